//! The conformance kit on every tier of this machine with two threads, and on the fastest also with one. `ZOFO_CPU_ISA=avx2` runs it on that
//! tier alone.

mod tiers;

use std::process::ExitCode;
use zofo_conformance::Suite;
use zofo_cpu::{CpuDevice, CpuOptions};

fn main() -> ExitCode {
    let tiers = match tiers::chosen() {
        Ok(tiers) => tiers,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let with = |threads| tiers.iter().map(move |isa| (*isa, threads));
    let mut suite = Suite::new();
    for (isa, threads) in with(2).chain(with(1).rev().take(1)) {
        let options = CpuOptions { threads: Some(threads), isa: Some(isa) };
        suite = suite.device(format!("{isa}-{threads}t"), move || Ok(CpuDevice::new(options)?));
    }
    suite.run()
}
