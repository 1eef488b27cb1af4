//! The suite `perturb` under criterion.

mod common;

fn main() {
    common::main("perturb");
}
