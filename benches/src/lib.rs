#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod case;
pub mod cases;
pub mod ceiling;
mod devices;
mod lab;
pub mod paired;
#[cfg(any(feature = "peers", feature = "peers-candle"))]
mod peers;
mod random;
pub mod serve;
pub mod shapes;
mod synthetic;

pub use case::{Arithmetic, Case, Id, Run, Unit, Work};
#[cfg(feature = "peers")]
pub(crate) use devices::physical_cores;
pub use devices::{Factory, Subject, factories, selected, threads};
pub use lab::Lab;
