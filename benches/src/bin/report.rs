//! A quick table of everything that is measured, contestants of a group in turns, beside the ceilings of the same minute.

use clap::Parser;
use std::process::ExitCode;
use zofo_benches::{
    Case, Unit, Work,
    cases::{SUITES, Suite, suite},
    ceiling::{Ceilings, Probe},
    paired, selected, serve, threads,
};
use zofo_hal::Result;

/// Measures contestants in turns and prints a Markdown table.
#[derive(Parser)]
struct Args {
    /// Only groups whose name has this in it, such as `matmul/f32`
    #[arg(long, default_value = "")]
    filter: String,
    /// Turns of each contestant
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Only these suites, with commas between
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only the case GROUP/WHO, run for as many seconds as a line of the input says: see `peers/turns.py`
    #[arg(long, value_name = "GROUP/WHO")]
    serve: Option<String>,
}

/// Ceilings before and after a group that differ by more than this say that something else was running.
const STEADY: f64 = 0.9;

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match &args.serve {
        Some(name) => serve::find(name).and_then(|case| serve::serve(&case, std::io::stdin().lock(), std::io::stdout())),
        None => report(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("report: {e}");
            ExitCode::FAILURE
        }
    }
}

fn suites(only: &[String]) -> Result<Vec<&'static Suite>> {
    let find = |name: &String| {
        suite(name).ok_or_else(|| {
            let all: Vec<&str> = SUITES.iter().map(|s| s.name).collect();
            zofo_hal::Error::invalid(format!("there is no suite `{name}`; there are {}", all.join(", ")))
        })
    };
    if only.is_empty() { Ok(SUITES.iter().collect()) } else { only.iter().map(find).collect() }
}

fn report(args: &Args) -> Result<()> {
    let (suites, subjects) = (suites(&args.only)?, selected()?);
    let probe = Probe::new(threads());
    let start = probe.ceilings();
    for s in &subjects {
        let info = s.device.info();
        println!("- {}: {}{}", s.who, info.name, info.soc.as_ref().map(|soc| format!(" ({soc})")).unwrap_or_default());
    }
    println!("- ceilings at the start, {} threads: {}", threads(), describe(&start));
    println!("- {} turns each, medians; `~`: the fma ceiling was not steady\n", args.rounds);
    println!("| what | who | time | rate | of ceiling | time / first |\n|---|---|---|---|---|---|");
    for suite in suites {
        let cases = (suite.cases)(&subjects);
        for group in cases.chunk_by(|a, b| a.id.group == b.id.group).filter(|g| g[0].id.group.contains(&args.filter)) {
            let before = probe.fma();
            let medians = paired::medians(group, args.rounds as usize);
            let after = probe.fma();
            let (low, high) = (before.min(after).min(start.fma), before.max(after));
            print_group(group, &medians, &Ceilings { fma: high, ..start }, low < STEADY * high.max(start.fma));
        }
    }
    let peak = peak_bytes().map(|b| format!("; most memory of this process: {} MB", b / 1_000_000)).unwrap_or_default();
    println!("\n- ceilings at the end: {}{peak}", describe(&probe.ceilings()));
    Ok(())
}

/// Most memory that the process has held, on Linux.
fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kb| kb * 1024)
}

fn describe(c: &Ceilings) -> String {
    let bf16 = c.bf16.map(|f| format!(", bf16 {:.0} GFLOP/s", f / 1e9)).unwrap_or_default();
    format!("fma {:.0} GFLOP/s{bf16}, memory {:.1} GB/s", c.fma / 1e9, c.read / 1e9)
}

fn print_group(group: &[Case], medians: &[Result<f64>], ceilings: &Ceilings, unsteady: bool) {
    let first = medians.iter().find_map(|m| m.as_ref().ok());
    for (case, median) in group.iter().zip(medians) {
        let (group, who) = (&case.id.group, &case.id.who);
        match median {
            Err(e) => println!("| {group} | {who} | {e} | | | |"),
            Ok(seconds) => {
                let least = case.work.least(ceilings).map(|(least, name)| format!("{:.0} % {name}", 100.0 * least / seconds));
                let mark = if unsteady { "~" } else { "" };
                let ratio = first.map(|f| format!("{:.2}", seconds / f)).unwrap_or_default();
                let of = least.unwrap_or_default();
                println!("| {group} | {who} | {} | {} | {mark}{of} | {ratio} |", time(*seconds), rate(&case.work, *seconds));
            }
        }
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

fn rate(work: &Work, seconds: f64) -> String {
    let rate = work.amount() as f64 / seconds;
    match work.unit {
        Unit::Flops => format!("{:.1} GFLOP/s", rate / 1e9),
        Unit::Bytes => format!("{:.1} GB/s", rate / 1e9),
        Unit::Elements(_) => format!("{:.2} G/s", rate / 1e9),
        Unit::Tokens(_) => format!("{rate:.1} tok/s"),
        Unit::Ops(n) => format!("{:.2} us/op of {n}", 1e6 / rate),
    }
}
