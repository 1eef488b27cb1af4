//! The reference device keeps its own contract.

use std::process::ExitCode;
use zofo_hal::reference::Reference;

fn main() -> ExitCode {
    zofo_conformance::run(|| Ok(Reference::new()))
}
