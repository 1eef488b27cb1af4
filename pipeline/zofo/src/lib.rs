//! Fine-tune LLaMA-family models with LoRA over mixed edge accelerators.
#![warn(missing_docs)]

mod cancel;
pub mod catalogue;
pub mod chat;
pub mod compare;
pub mod curves;
pub mod data;
pub mod devices;
#[cfg(feature = "embedded")]
pub mod embedded;
pub mod eval;
pub mod events;
pub mod generate;
#[cfg(feature = "hub")]
pub mod hub;
pub mod inference;
pub mod model;
pub mod options;
pub mod planning;
pub mod run_folder;
mod shuffle;
pub mod summary;
pub mod timeline;
pub mod tokens;
pub mod trainer;

pub use cancel::CancelToken;
pub use events::Event;
pub use inference::Inference;
pub use model::Model;
pub use options::TrainOptions;
pub use summary::Summary;
pub use trainer::{Run, Trainer, TrainerBuilder};
pub use zofo_hal::{DType, Error, ErrorKind, Result};
pub use zofo_pipeline::{cluster, costs, estimator, ir, order, planner, sim};
