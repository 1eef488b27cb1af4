//! The suite `ceilings` under criterion.

mod common;

fn main() {
    common::main("ceilings");
}
