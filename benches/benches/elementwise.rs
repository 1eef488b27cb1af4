//! The suite `elementwise` under criterion.

mod common;

fn main() {
    common::main("elementwise");
}
