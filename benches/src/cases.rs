//! What is measured, a file per suite. Both harnesses, criterion and the report, run these.

mod attention;
mod ceilings;
mod elementwise;
mod loaded;
mod lora;
mod matmul;
mod model;
mod overhead;
mod perturb;
mod text;

use crate::{Case, Subject};

/// A group of cases that is run on its own.
pub struct Suite {
    /// Its name, which is that of its file and of its criterion bench.
    pub name: &'static str,
    /// Its cases on some devices. Those of one group follow each other.
    pub cases: fn(&[Subject]) -> Vec<Case>,
}

/// Every suite, cheap ones first.
pub const SUITES: &[Suite] = &[
    Suite { name: "ceilings", cases: ceilings::cases },
    Suite { name: "perturb", cases: perturb::cases },
    Suite { name: "elementwise", cases: elementwise::cases },
    Suite { name: "attention", cases: attention::cases },
    Suite { name: "lora", cases: lora::cases },
    Suite { name: "matmul", cases: matmul::cases },
    Suite { name: "overhead", cases: overhead::cases },
    Suite { name: "text", cases: text::cases },
    Suite { name: "model", cases: model::cases },
];

/// The suite called `name`.
pub fn suite(name: &str) -> Option<&'static Suite> {
    SUITES.iter().find(|s| s.name == name)
}
