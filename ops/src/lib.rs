//! Validated ops, decompositions, LLaMA blocks with explicit forward and backward, LoRA, losses, optimisers.

#![cfg_attr(not(feature = "std"), no_std)]
#![warn(missing_docs)]

extern crate alloc;

mod convert;
mod decompose;
mod pool;
mod run;

pub use run::{RunStats, Runner, lookup_uses, support};

pub mod batch;
pub mod config;
#[cfg(feature = "std")]
pub mod files;
pub mod llama;
pub mod lora;
pub mod optim;
