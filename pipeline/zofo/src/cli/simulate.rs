//! `zofo simulate`

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Args;
use serde_json::json;
use zofo::{
    Error,
    order::ScheduleName,
    planner::{Outcome, PlannerName, Problem, auto, given},
    planning::{self, PlanFile, Simulated},
    timeline::Timeline,
};

use super::{
    Failure, console, output,
    plan::{self, CostArgs, seconds},
    usage,
};

pub const EXAMPLES: &str = "Examples:
  zofo simulate --costs costs.json --schedule gpipe
  zofo simulate --costs costs.json --compare all
  zofo plan --costs costs.json --out plan.json
  zofo simulate --plan plan.json --trace step.json --report step.html

The trace opens in https://ui.perfetto.dev. Times are modelled, not measured.
`zofo plan --help` says what costs.json has.";

#[derive(Args)]
pub struct SimulateArgs {
    /// A plan that `zofo plan --out` wrote
    #[arg(long, value_name = "FILE", conflicts_with_all = ["costs", "model", "cluster", "tokens", "rank", "micro_batches", "directions", "exit_directions", "estimator", "schedule"])]
    pub plan: Option<PathBuf>,
    #[command(flatten)]
    pub from: CostArgs,
    /// Order of work; on the costs' partition, or on stages as balanced as can be. An unknown name lists them
    #[arg(long, value_name = "NAME", value_parser = |n: &str| ScheduleName::parse(n).map_err(|e| e.message().to_owned()))]
    pub schedule: Option<ScheduleName>,
    /// Planners to put side by side: `all`, or names with commas between
    #[arg(long, value_name = "NAMES", conflicts_with_all = ["schedule", "trace", "report"])]
    pub compare: Option<String>,
    /// Write a timeline that Perfetto opens
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Write timeline and devices as a page
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &SimulateArgs) -> Result<(), Failure> {
    if let Some(path) = &args.trace {
        output::replaceable(path, "{\"displayTimeUnit\":", "a trace")?;
    }
    if let Some(path) = &args.report {
        output::replaceable(path, "<!DOCTYPE html><html lang=\"en\"><meta charset=\"utf-8\"><title>zofo", "a report")?;
    }
    if args.trace.is_some() && args.trace == args.report {
        return Err(Failure::Usage(Error::invalid("--trace and --report name the same file; each needs one of its own")));
    }
    if let Some(names) = &args.compare {
        return compare(args, names);
    }
    let (p, outcome) = match (&args.plan, args.schedule) {
        (Some(path), _) => read(path)?.simulate().map_err(|e| e.context(path.display()))?,
        (None, Some(name)) => {
            let p = args.from.problem(false)?;
            let (method, _) = auto::asked(&p);
            let outcome = given::simulate(&p, &method, name).map_err(usage)?;
            (p, outcome)
        }
        (None, None) => return Err(Failure::Usage(Error::invalid("say what to simulate: --schedule NAME, --compare all, or --plan FILE"))),
    };
    show(args, &p, &outcome)
}

fn read(path: &Path) -> zofo::Result<PlanFile> {
    PlanFile::parse(&plan::text(path)?).map_err(|e| e.context(path.display()))
}

fn show(args: &SimulateArgs, p: &Problem, outcome: &Outcome) -> Result<(), Failure> {
    let simulated = Simulated::new(p, outcome);
    if let Some(path) = &args.trace {
        std::fs::write(path, Timeline::modelled(p, outcome).trace().to_string() + "\n").map_err(|e| Error::io(path, e))?;
    }
    if let Some(path) = &args.report {
        std::fs::write(path, planning::report(p, outcome)).map_err(|e| Error::io(path, e))?;
    }
    if args.json {
        console::json(&simulated);
        return Ok(());
    }
    console::line(format!("{}: {} s a step, modelled\n", simulated.schedule, seconds(simulated.makespan_s)));
    console::print(&plan::devices(outcome, &simulated));
    if outcome.name == ScheduleName::HybridopTail {
        console::print(&plan::wrapped("a model of latency: behind the cut nobody can return a gradient, so this cannot train"));
    }
    for path in args.trace.iter().chain(&args.report) {
        console::line(format!("written: {}", path.display()));
    }
    Ok(())
}

fn compare(args: &SimulateArgs, names: &str) -> Result<(), Failure> {
    let names: Vec<&str> = names.split(',').map(str::trim).filter(|n| !n.is_empty()).collect();
    let planners: Vec<PlannerName> = match names.contains(&"all") || names.is_empty() {
        true => PlannerName::all().collect(),
        false => names.into_iter().map(|n| PlannerName::parse(n).map_err(usage)).collect::<Result<_, _>>()?,
    };
    let p = match &args.plan {
        // Against what the plan was made from.
        Some(path) => read(path)?.simulate().map_err(|e| e.context(path.display()))?.0,
        None => args.from.problem(false)?,
    };
    let (method, _) = auto::asked(&p);
    let mut rows = Vec::new();
    for planner in planners {
        let begin = Instant::now();
        // Orders and spans of all planners together would fill memory.
        let found = planner.propose(&p, &method).map(|f| (Simulated::new(&p, &f.outcome), plan::learns(&f)));
        rows.push((planner, found, begin.elapsed().as_secs_f64()));
    }
    rows.sort_by(|a, b| {
        let time = |r: &zofo::Result<(Simulated, String)>| r.as_ref().map_or(f64::INFINITY, |s| s.0.makespan_s);
        time(&a.1).total_cmp(&time(&b.1))
    });
    let best = rows.iter().filter(|r| r.0.trains()).find_map(|r| r.1.as_ref().ok()).map(|s| s.0.makespan_s);
    if args.json {
        let all: Vec<_> = rows
            .iter()
            .map(|(planner, found, took)| match found {
                Ok((o, learns)) => {
                    json!({"planner": planner.name(), "trains": planner.trains(), "plan_seconds": took, "head": learns, "simulated": o})
                }
                Err(e) => json!({"planner": planner.name(), "trains": planner.trains(), "plan_seconds": took, "error": e.message()}),
            })
            .collect();
        console::json(&json!({"planners": all}));
        return Ok(());
    }
    console::line(format!("{:<19} {:>9} {:>6} {:>5} {:>5} {:>8} head", "planner", "s a step", "x best", "busy", "used", "planned"));
    for (planner, found, took) in &rows {
        match found {
            Ok((o, learns)) => {
                let ratio = best.map_or(String::new(), |b| format!("{:.2}", o.makespan_s / b.max(f64::MIN_POSITIVE)));
                let mut used: Vec<&str> = o.devices.iter().map(|d| d.name.as_str()).collect();
                used.sort_unstable();
                used.dedup();
                console::line(format!(
                    "{:<19} {:>9} {ratio:>6} {:>3.0} % {:>5} {:>5.1} ms {}",
                    planner.name(),
                    seconds(o.makespan_s),
                    100.0 * o.utilisation,
                    format!("{}/{}", used.len(), p.devices()),
                    1e3 * took,
                    if planner.trains() { learns } else { "latency only" }
                ));
            }
            Err(e) => {
                console::print(&plan::wrapped(&format!("{}: {}", planner.name(), e.message())));
            }
        }
    }
    Ok(())
}
