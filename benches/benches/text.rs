//! The suite `text` under criterion.

mod common;

fn main() {
    common::main("text");
}
