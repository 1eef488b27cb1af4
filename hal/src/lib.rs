//! Hardware abstraction of zofo.
#![cfg_attr(not(feature = "std"), no_std)]
#![warn(missing_docs)]
extern crate alloc;

mod dtype;
mod error;
pub mod perturb;

pub use dtype::DType;
pub use error::{Error, ErrorKind, OpTag, Result};
