//! The schedule IR: per worker an ordered list of compute actions on its stages.
//!
//! A schedule says *what* each stage computes and in which order; which messages that needs and makes follows from [`Workload::consumes`] and
//! [`Workload::produces`], so an order cannot forget a send. The executor, the simulator, and every pass over a schedule, use those two
//! functions and nothing else: none of them knows a schedule's name.

mod action;
mod schedule;
mod workload;

pub use action::{Action, Group, Lane, Payload, Readout, Role};
pub use schedule::{Credits, Schedule, Step};
pub use workload::{Chain, Workload};
