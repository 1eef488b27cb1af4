//! The hostile device keeps the contract too.

use std::process::ExitCode;
use zofo_hal::reference::{Hostile, HostileConfig};

fn main() -> ExitCode {
    zofo_conformance::run(|| Ok(Hostile::new(HostileConfig::seeded(1))))
}
