#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "std"), no_std)]
#![warn(missing_docs)]
extern crate alloc;

mod convert;
mod device;
mod gemm;
#[cfg(feature = "std")]
mod host;
mod isa;
mod kernels;
mod math;
mod memory;
mod pool;
mod queue;
mod scratch;
mod simd;
mod sync;
mod view;
mod weight;
#[cfg(feature = "std")]
mod workers;

pub use device::{CpuDevice, CpuDriver, CpuOptions};
pub use isa::Isa;
