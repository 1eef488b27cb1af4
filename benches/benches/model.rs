//! The suite `model` under criterion.

mod common;

fn main() {
    common::main("model");
}
