//! stories260K against upstream's text, a float64 forward pass, and PyTorch + PEFT.

#[path = "golden/adapter.rs"]
mod adapter;
#[path = "llama/common.rs"]
mod common;
#[path = "golden/gguf.rs"]
mod gguf;
#[path = "golden/material.rs"]
mod material;
#[path = "golden/smollm2.rs"]
mod smollm2;
#[path = "golden/story.rs"]
mod story;
#[path = "golden/training.rs"]
mod training;
