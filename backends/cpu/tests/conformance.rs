//! The conformance kit on every tier of this machine, with one thread and with two.

use std::process::ExitCode;
use zofo_conformance::Suite;
use zofo_cpu::{CpuDevice, CpuOptions, Isa};

fn main() -> ExitCode {
    let mut suite = Suite::new();
    for isa in Isa::available() {
        for threads in [1, 2] {
            suite = suite
                .device(format!("{isa}-{threads}t"), move || Ok(CpuDevice::new(CpuOptions { threads: Some(threads), isa: Some(isa) })?));
        }
    }
    suite.run()
}
