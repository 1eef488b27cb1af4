//! The suite `attention` under criterion.

mod common;

fn main() {
    common::main("attention");
}
