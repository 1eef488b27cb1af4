//! What is measured, a file per suite. Both harnesses, criterion and the report, run these.

mod ceilings;
mod matmul;

use crate::{Case, Subject};

/// A group of cases that is run on its own.
pub struct Suite {
    /// Its name, which is that of its file and of its criterion bench.
    pub name: &'static str,
    /// Its cases on some devices. Those of one group follow each other.
    pub cases: fn(&[Subject]) -> Vec<Case>,
}

/// Every suite, cheap ones first.
pub const SUITES: &[Suite] = &[Suite { name: "ceilings", cases: ceilings::cases }, Suite { name: "matmul", cases: matmul::cases }];

/// The suite called `name`.
pub fn suite(name: &str) -> Option<&'static Suite> {
    SUITES.iter().find(|s| s.name == name)
}
