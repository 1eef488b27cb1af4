//! `zofo plan`

use std::path::{Path, PathBuf};

use clap::Args;
use zofo::{
    Error, Model, Result, TrainOptions,
    cluster::{Cluster, Kind},
    costs::{Costs, Links},
    estimator::EstimatorName,
    ir::Role,
    planner::{Outcome, PlannerName, Problem, Proposal, auto::Effort},
    planning::{self, PlanFile, Planned, Simulated},
};

use super::{Failure, console, output, usage};

pub const EXAMPLES: &str = "Examples:
  zofo plan --costs costs.json
  zofo plan --costs costs.json --planner asteroid --json
  zofo plan --costs costs.json --out plan.json
  zofo plan --model smollm2-135m --cluster boards.toml --trainable --out plan.json

costs.json has what a step costs:
  {\"layers\": [{\"work\": 1.0}, {\"work\": 1.0}],
   \"devices\": [{\"name\": \"npu0\", \"kind\": \"bp-free\", \"speed\": 0.5},
               {\"name\": \"gpu0\", \"kind\": \"bp\", \"speed\": 1.0}],
   \"micro_batches\": 4, \"directions\": 1, \"estimator\": \"cut-tangent\"}
A layer takes work / speed seconds. Also: weight_bytes, trainable_bytes,
activation_bytes, boundary_bytes of layers; memory_bytes, backward_ratio,
perturbed_ratio, fo_speed, power_idle_w, power_busy_w of devices; links
{\"latency_s\", \"bytes_per_s\", \"overlap\", \"half_duplex\"}, or a list by pair.

A cluster file says `board` for each device (atlas-200i-dk-a2, jetson-orin-nano,
jetson-orin-nx, jetson-xavier-nx) or `flops` and `memory`, and what lies between
them in a table [link] with latency_s and bytes_per_s.";

/// Where costs come from.
#[derive(Args)]
pub struct CostArgs {
    /// What layers, devices and links cost; - reads standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "cluster"])]
    pub costs: Option<PathBuf>,
    /// Base model, whose layers are counted instead of measured
    #[arg(long, value_name = "M", requires = "cluster")]
    pub model: Option<PathBuf>,
    /// Cluster file; its devices say their `board` or `flops`
    #[arg(long, value_name = "FILE", requires = "model")]
    pub cluster: Option<PathBuf>,
    /// Tokens of a micro-batch, for --model
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub tokens: u32,
    /// Rank of the adapters, for --model
    #[arg(long, value_name = "R", default_value_t = 8)]
    pub rank: usize,
    /// Micro-batches of a step [default: the costs', or 8]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..))]
    pub micro_batches: Option<u32>,
    /// Directions of every micro-batch; 0 freezes the head [default: the costs', or as many as are nearly free]
    #[arg(long, value_name = "Q")]
    pub directions: Option<u32>,
    /// Further directions that early-exit takes as far as its exit head [default: the costs', or as many as idle time has room for]
    #[arg(long, value_name = "Q", value_parser = clap::value_parser!(u32).range(1..))]
    pub exit_directions: Option<u32>,
    /// How slopes are estimated [default: the costs', or cut-tangent]
    #[arg(long, value_name = "NAME", value_parser = |n: &str| EstimatorName::parse(n).map_err(|e| e.message().to_owned()))]
    pub estimator: Option<EstimatorName>,
}

#[derive(Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub from: CostArgs,
    /// Who plans; an unknown name lists them
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = |n: &str| PlannerName::parse(n).map_err(|e| e.message().to_owned()))]
    pub planner: PlannerName,
    /// HybridOP's planner with the errors of its text; for comparison
    #[arg(long, conflicts_with = "planner")]
    pub as_printed: bool,
    /// Search for seconds instead of tens of milliseconds
    #[arg(long)]
    pub thorough: bool,
    /// Only plans that `zofo train --plan` can run: bp-free devices run forward, whatever backpropagation on them would take
    #[arg(long)]
    pub trainable: bool,
    /// Write the plan, for `zofo train --plan` and `zofo simulate --plan`
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Largest file of costs or a plan that is read.
const LARGEST: u64 = 1 << 28;

/// The text of a file, or of standard input.
pub fn text(path: &Path) -> Result<String> {
    use std::io::Read;
    let io = |e| Error::io(path, e);
    let mut text = String::new();
    if path == Path::new("-") {
        std::io::stdin().lock().take(LARGEST).read_to_string(&mut text).map_err(io)?;
    } else {
        let file = std::fs::File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.is_dir() {
            return Err(Error::invalid(format!("{}: this is a folder", path.display())));
        }
        file.take(LARGEST).read_to_string(&mut text).map_err(io)?;
    }
    // Some editors begin a file with a byte order mark.
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

impl CostArgs {
    /// What `zofo train` has to be told again of where the costs came from.
    fn repeated(&self) -> String {
        let option = |name: &str, path: &Option<PathBuf>| {
            path.as_ref().map_or(String::new(), |p| format!(" --{name} {}", console::quoted(&p.display().to_string())))
        };
        option("model", &self.model) + &option("cluster", &self.cluster)
    }

    /// The costs with what the command line says on top. To train, bp-free devices only run forward, whatever backpropagation on them would cost.
    pub fn problem(&self, trainable: bool) -> std::result::Result<Problem, Failure> {
        let mut costs = match (&self.costs, &self.model, &self.cluster) {
            (Some(path), _, _) => {
                let name = if path == Path::new("-") { "standard input".into() } else { path.display().to_string() };
                Costs::parse(&text(path)?).map_err(|e| usage(e.context(name)))?
            }
            (None, Some(model), Some(cluster)) => {
                let cluster = Cluster::parse(&text(cluster)?).map_err(|e| usage(e.context(cluster.display())))?;
                let model = Model::open(super::cache::model(model)?)?;
                let source = model.source().as_ref();
                planning::model_costs(source, &cluster, self.tokens as usize, self.rank, 8).map_err(usage)?
            }
            _ => return Err(Failure::Usage(Error::invalid("give --costs, or --model and --cluster"))),
        };
        costs.micro_batches = self.micro_batches.unwrap_or(costs.micro_batches);
        costs.directions = self.directions.or(costs.directions);
        costs.estimator = self.estimator.or(costs.estimator);
        costs.exit_directions = self.exit_directions.unwrap_or(costs.exit_directions);
        if trainable {
            costs.devices.iter_mut().filter(|d| d.kind == Kind::BpFree).for_each(|d| d.fo_speed = None);
        }
        Problem::new(costs).map_err(usage)
    }
}

pub fn run(args: &PlanArgs) -> std::result::Result<(), Failure> {
    if let Some(out) = &args.out {
        output::replaceable(out, "{\"planner\":", "a plan")?;
    }
    let p = args.from.problem(args.trainable)?;
    let planner = if args.as_printed { PlannerName::HybridopAsPrinted } else { args.planner };
    let effort = if args.thorough { Effort::thorough() } else { Effort::default() };
    let planned = planning::plan(&p, planner, effort).map_err(usage)?;
    let mut file = PlanFile::new(&p, &planned);
    let trains = {
        let mut options = TrainOptions::default();
        file.settle(&mut options);
        file.plan(&file.cluster(), p.layers(), &options).map(drop)
    };
    if args.trainable {
        trains.clone().map_err(usage)?;
    }
    if args.from.cluster.is_some() && p.costs().links == Links::default() {
        file.notes
            .push("transfers are taken to be free: say what they take with [link] latency_s and bytes_per_s in the cluster file".into());
    }
    if p.costs().partition.is_some() {
        file.notes.push("the partition of the costs is for `zofo simulate`; a planner makes its own".into());
    }
    if let Some(out) = &args.out {
        let text = serde_json::to_string(&file).map_err(|e| Error::format(e.to_string()))?;
        std::fs::write(out, text + "\n").map_err(|e| Error::io(out, e))?;
    }
    if args.json {
        console::json(&file);
        return Ok(());
    }
    console::print(&table(&planned, &file));
    if let Some(out) = &args.out {
        let name = console::quoted(&out.display().to_string());
        console::line(format!("plan: {}", out.display()));
        console::line(format!("time it: zofo simulate --plan {name}"));
        console::print(&match trains {
            Ok(()) => format!("train it: zofo train --plan {name}{}\n", args.from.repeated()),
            Err(e) => wrapped(&format!("it cannot train: {}", e.message())),
        });
    }
    Ok(())
}

/// How the stages in front of the cut learn.
pub fn learns(proposal: &Proposal) -> String {
    let method = &proposal.method;
    let has = |role: Role| proposal.outcome.layout.stages.iter().any(|s| s.role == role);
    match (has(Role::ZerothOrder), has(Role::Frozen)) {
        (true, _) if method.estimator == EstimatorName::Guided => "guided".into(),
        (true, _) => format!("{}, Q={}", method.estimator.name(), method.directions),
        (false, true) => "frozen".into(),
        (false, false) => "-".into(),
    }
}

fn table(planned: &Planned, file: &PlanFile) -> String {
    let outcome = &planned.proposal.outcome;
    let head = Some(learns(&planned.proposal)).filter(|l| l != "-").map_or(String::new(), |l| format!(", head {l}"));
    let mut text = format!("{} (order {}{head})\n\n", step_time(outcome.makespan(), planned.planner.name()), file.simulated.schedule);
    text += &devices(outcome, &file.simulated);
    text += &bound(planned);
    for note in &file.notes {
        text += &wrapped(note);
    }
    if !planned.verdict.is_empty() {
        text += "\nwhat each board brings, seconds a step:\n";
        let width = planned.verdict.iter().map(|a| a.what.chars().count()).max().unwrap_or(0).min(40);
        for a in &planned.verdict {
            let joules = a.joules.map_or(String::new(), |j| format!("  {j:.3} J"));
            text += &match &a.makespan {
                Ok(t) => format!("  {:<width$}  {}{joules}\n", a.what, seconds(*t)),
                Err(why) => format!("  {:<width$}  no plan\n", a.what) + &wrapped(&format!("  {why}")),
            };
        }
    }
    text
}

/// A time with four digits that say something.
pub fn seconds(t: f64) -> String {
    match t {
        t if t >= 1e7 => format!("{t:.4e}"),
        t if t == 0.0 || t >= 1000.0 => format!("{t:.1}"),
        t if t >= 1.0 => format!("{t:.4}"),
        t if t >= 1e-4 => format!("{t:.6}"),
        t => format!("{t:.3e}"),
    }
}

fn step_time(t: f64, planner: &str) -> String {
    format!("{planner}: {} s a step", seconds(t))
}

fn bound(planned: &Planned) -> String {
    let took = format!("planned in {:.1} ms", 1e3 * planned.seconds);
    match planned.proven_optimal {
        true => format!("optimal over stages of one device, device subsets and orders; {took}\n"),
        false => format!("no plan of one device a stage takes less than {} s; {took}\n", seconds(planned.lower_bound)),
    }
}

/// A note that fits the terminal.
pub fn wrapped(note: &str) -> String {
    let mut text = String::new();
    let mut line = String::from(" ");
    for word in note.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > console::WIDTH && line.trim() != "" {
            text += &line;
            text.push('\n');
            line = "   ".into();
        }
        line.push(' ');
        line += word;
    }
    text + &line + "\n"
}

/// Stages and devices, a line each.
pub fn devices(outcome: &Outcome, simulated: &Simulated) -> String {
    let width = simulated.devices.iter().map(|d| d.name.chars().count()).max().unwrap_or(0).clamp(6, 24);
    let mut text = format!("{:<width$}  {:<13} {:<6} {:>8} {:>10} {:>9}\n", "device", "layers", "learns", "busy", "in flight", "memory");
    for (d, report) in simulated.devices.iter().zip(&outcome.devices) {
        let stages: Vec<_> = outcome.layout.stages.iter().filter(|s| s.members.iter().any(|m| m.device == report.device)).collect();
        let share = stages.iter().flat_map(|s| &s.members).find(|m| m.device == report.device).map_or(1.0, |m| m.share);
        let mut layers = stages.iter().map(|s| format!("{}..{}", s.layers.start, s.layers.end)).collect::<Vec<_>>().join(" ");
        if share < 1.0 {
            layers += &format!(" {:.0} %", 100.0 * share);
        }
        text += &format!(
            "{:<width$}  {:<13} {:<6} {:>6.1} % {:>10} {:>9}\n",
            d.name,
            layers,
            stages.first().map_or("", |s| s.role.name()),
            100.0 * d.busy_s / simulated.makespan_s.max(f64::MIN_POSITIVE),
            d.peak_in_flight,
            bytes(d.peak_memory_bytes)
        );
    }
    text + &format!(
        "computing {:.1} % of the time, {:.1} % without the extra directions\n",
        100.0 * simulated.utilisation,
        100.0 * simulated.utilisation_without_directions
    )
}

fn bytes(b: f64) -> String {
    match b {
        b if b >= 1e15 => format!("{:.1e} GB", b / 1e9),
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b if b > 0.0 => format!("{b:.0} B"),
        _ => "-".into(),
    }
}
