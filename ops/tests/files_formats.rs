//! Models, adapters and tokenizers in files: what is read, what is written, and that bad input is refused without a panic.
#![cfg(feature = "std")]

#[path = "files/adapter.rs"]
mod adapter;
#[path = "files/checkpoint.rs"]
mod checkpoint;
#[path = "files/config.rs"]
mod config;
#[path = "files/gguf_keys.rs"]
mod gguf_keys;
#[path = "files/gguf_model.rs"]
mod gguf_model;
#[path = "files/gguf_tokenizer.rs"]
mod gguf_tokenizer;
#[path = "files/model.rs"]
mod model;
#[path = "files/support.rs"]
mod support;
#[path = "files/tokenizer.rs"]
mod tokenizer;
