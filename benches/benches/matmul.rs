//! The suite `matmul` under criterion.

mod common;

fn main() {
    common::main("matmul");
}
