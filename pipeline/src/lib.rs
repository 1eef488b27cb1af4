//! Schedules, executor, estimators and training loop of zofo.
//!
//! Data flows one way: a [`cluster::Cluster`] and an [`estimator::EstimatorSpec`] make a [`plan::Plan`], whose [`ir::Schedule`] the executor
//! runs. Plans and schedules are plain data.
#![warn(missing_docs)]

pub mod check;
pub mod cluster;
pub mod costs;
pub mod devices;
pub mod estimator;
pub mod events;
pub mod executor;
pub mod ir;
pub mod journal;
pub mod order;
pub mod plan;
pub mod planner;
pub mod sim;
pub mod train;
