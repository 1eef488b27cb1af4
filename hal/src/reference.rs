//! The reference devices: what every backend is measured against.
//!
//! - [`Reference`] runs each op at once, on the calling thread, in plain loops: operands are read as f64, sums are f64, each result is rounded
//!   once. Ops that are defined as a sequence of f32 operations (scaled additions, perturbations, updates) run that sequence.
//! - [`Hostile`] (feature `std`) runs the same kernels as late, as out of order between queues and as far from the caller as the contract
//!   permits, and fails on demand. Code that works on it relies on nothing but the contract.
//!
//! Both are stricter than a device must be: a live count above the block, repeated indices where an op wants distinct ones, and a weight used
//! for what it was not imported for are errors.
//!
//! # For backend authors
//! This is also the example to read: `device.rs`, `buffer.rs` and `queue.rs` hold the whole contract and no arithmetic, `kernels/` holds the
//! arithmetic and no contract.

mod buffer;
mod device;
mod kernels;
mod operand;
mod queue;
mod storage;
mod weight;

#[cfg(feature = "std")]
mod hostile;

pub use device::{Reference, ReferenceDriver};
#[cfg(feature = "std")]
pub use hostile::{Fault, Hostile, HostileConfig};
