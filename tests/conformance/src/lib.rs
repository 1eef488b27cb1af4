#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod buffers;
mod case;
mod check;
mod estimate;
mod foreign;
mod host;
mod invariance;
mod matrix;
mod model;
#[cfg(test)]
mod mutants;
mod ops;
mod quantised;
mod queues;
mod rng;
mod slopes;
mod suite;
mod weights;

pub use matrix::support_matrix;
pub use suite::Suite;

use std::process::ExitCode;
use zofo_hal::DeviceRef;

/// Runs the suite against the device that `factory` opens; the `main` of a backend's conformance test.
pub fn run(factory: impl Fn() -> zofo_hal::Result<DeviceRef> + Send + Sync + 'static) -> ExitCode {
    Suite::new().device("", factory).run()
}

/// Every test of the kit.
fn tests(tests: &mut suite::Tests) {
    buffers::tests(tests);
    weights::tests(tests);
    queues::tests(tests);
    ops::tests(tests);
    invariance::tests(tests);
    slopes::tests(tests);
}
