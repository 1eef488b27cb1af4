//! Models, adapters and tokenizers in files.
//!
//! | module | reads | writes |
//! |---|---|---|
//! | [`config`] | `config.json` | |
//! | [`checkpoint`] | `model.safetensors`, single or sharded | |
//! | [`gguf`] | a whole model in one GGUF file | |
//! | [`model`] | a Hugging Face folder: both of the above, checked against each other | |
//! | [`peft`] | LoRA adapters in PEFT's format | the same |
//! | [`tokenizer`] | `tokenizer.json`, SentencePiece `tokenizer.model` | |
//!
//! Files are untrusted: lengths, offsets, counts and names are checked before use, memory is bounded by what the file really holds, and every
//! error names the file and what to do about it.

pub mod checkpoint;
pub mod config;
pub mod gguf;
mod json;
pub mod mapped;
pub mod model;
pub mod peft;
mod safetensors;
pub mod tokenizer;
mod write;

pub use checkpoint::{Checkpoint, TensorView};
pub use gguf::{Gguf, GgufModel};
pub use mapped::MappedBytes;
pub use model::{LayerTensors, Linear, ModelFiles};
pub use peft::{Adapter, AdapterConfig, LoraPair, read_adapter, write_adapter};
pub use tokenizer::{DecodeStream, Tokenizer};
