//! Does this backend keep the contract?

use std::process::ExitCode;
use toy_backend::ToyDevice;

fn main() -> ExitCode {
    zofo_conformance::run(|| Ok(ToyDevice::open()))
}
