//! What the coordinator and its workers say to each other.

use super::{
    reduce::Gradients,
    setup::{Snapshot, StepInput},
    stage::Measured,
};
use crate::{events::Span, ir::Group};
use std::{sync::Arc, time::Instant};
use zofo_hal::Error;
use zofo_ops::lora::HostAdapter;

/// What the coordinator tells a worker.
pub(super) enum Command {
    Step {
        input: Arc<StepInput>,
        begin: Instant,
    },
    /// The sums of gradients, where several devices have parts of them.
    Reduced(Arc<Gradients>),
    Update(Arc<UpdateOrder>),
    Skip,
    Export,
    Import(Arc<Snapshot>),
    Stop,
}

/// How parameters change: what is left of the first-order gradient after clipping, and the zeroth-order sum.
pub(super) struct UpdateOrder {
    pub grad_scale: f32,
    pub directions: Vec<u32>,
    pub coefficients: Vec<f32>,
}

/// What a worker tells the coordinator.
pub(super) struct Report {
    /// Number of its device among the plan's.
    pub rank: usize,
    pub kind: ReportKind,
}

/// What is said of stages comes with their numbers.
pub(super) enum ReportKind {
    Ready {
        activation_bytes: u64,
    },
    Losses {
        m: u32,
        rows: Vec<f32>,
    },
    CopyLosses {
        group: Group,
        rows: Vec<Vec<f32>>,
    },
    ExitLosses {
        group: Group,
        rows: Vec<Vec<f32>>,
    },
    Dots {
        group: Group,
        values: Vec<f32>,
    },
    /// Of stages that others have the gradients of, too.
    Gradients(Vec<(usize, Gradients)>),
    AtUpdate(Vec<(usize, Measured)>),
    Done {
        spans: Vec<Span>,
    },
    Exported(Vec<(usize, HostAdapter, Vec<u8>)>),
    Stopped,
    Failed(Error),
}
