//! The suite `lora` under criterion.

mod common;

fn main() {
    common::main("lora");
}
