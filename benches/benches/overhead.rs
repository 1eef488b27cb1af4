//! The suite `overhead` under criterion.

mod common;

fn main() {
    common::main("overhead");
}
