//! The hostile device keeps the contract too, under several interleavings.

use std::process::ExitCode;
use zofo_conformance::Suite;
use zofo_hal::reference::{Hostile, HostileConfig};

fn main() -> ExitCode {
    [1, 2]
        .into_iter()
        .fold(Suite::new(), |suite, seed| suite.device(format!("seed{seed}"), move || Ok(Hostile::new(HostileConfig::seeded(seed)))))
        .run()
}
