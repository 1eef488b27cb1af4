//! Devices that offer less: what they refuse, they refuse as the contract says.

use std::process::ExitCode;
use zofo_conformance::Suite;
use zofo_hal::{Allow, Restricted, reference::Reference};

fn main() -> ExitCode {
    Suite::new()
        .device("forward", || Ok(Restricted::new(Reference::new(), Allow::Forward, "forward only")))
        .device("primitives", || Ok(Restricted::new(Reference::new(), Allow::Primitives, "primitives only")))
        .run()
}
