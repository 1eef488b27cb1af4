//! The conformance kit on every tier of this machine with two threads, with and without products in 8 bits, and on the fastest also with one.
//! `ZOFO_CPU_ISA=avx2` runs it on that tier alone.

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
    let with = |threads, int8| tiers.iter().map(move |isa| CpuOptions { threads: Some(threads), isa: Some(*isa), int8 });
    let mut suite = Suite::new();
    for (isa, options) in
        tiers.iter().chain(&tiers).chain(tiers.last()).zip(with(2, false).chain(with(2, true)).chain(with(1, false).rev()))
    {
        let (threads, int8) = (options.threads.unwrap_or(1), if options.int8 { "-int8" } else { "" });
        suite = suite.device(format!("{isa}-{threads}t{int8}"), move || Ok(CpuDevice::new(options)?));
    }
    suite.run()
}
