#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "std"), no_std)]
#![warn(missing_docs)]
extern crate alloc;

mod buffer;
mod device;
mod dtype;
mod error;
pub mod op;
pub mod perturb;
pub mod quant;
mod queue;
pub mod record;
pub mod reference;
mod registry;
mod rehearsal;
mod restricted;
mod sync;
mod tensor;
mod unique;
mod weight;

pub use buffer::{Buffer, BufferRef, Home, MapRead, MapWrite, MemorySpace, Usage};
pub use device::{
    DTypeUsage, Device, DeviceInfo, DeviceKind, DeviceRef, Driver, Features, Lacking, Limits, MemoryStats, OpenOptions, Support,
    alloc_tensor,
};
pub use dtype::DType;
pub use error::{Error, ErrorKind, OpTag, Result};
pub use op::Op;
pub use queue::{Event, EventRef, Queue, QueueId, Recording, RecordingRef};
pub use registry::Registry;
pub use rehearsal::Rehearsal;
pub use restricted::{Allow, Restricted};
pub use tensor::{Matrix, Operand, TensorArg, TensorSpec};
pub use weight::{SharedBytes, Uses, Weight, WeightData, WeightRef, WeightSpec};
