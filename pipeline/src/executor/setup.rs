//! What an executor is started with, what a step takes and gives.

use crate::{estimator::EstimatorSpec, events::Span, journal::Entry, plan::Plan};
use std::{sync::Arc, time::Duration};
use zofo_hal::{DType, DeviceRef};
use zofo_ops::{
    batch::{Capacity, MicroBatch},
    llama::{SliceSpec, WeightSource},
    lora::HostAdapter,
    optim::Rule,
};

/// Model parameters that several worker threads read.
pub type SharedSource = Arc<dyn WeightSource + Send + Sync>;

/// A device that stages run on, and the type they compute in.
#[derive(Clone)]
#[non_exhaustive]
pub struct StageDevice {
    /// The device.
    pub device: DeviceRef,
    /// Type of activations other than the residual stream.
    pub compute: DType,
}

impl StageDevice {
    /// Stages on `device`.
    pub fn new(device: DeviceRef, compute: DType) -> Self {
        Self { device, compute }
    }
}

/// What an executor is started with.
#[derive(Clone)]
#[non_exhaustive]
pub struct Setup {
    /// Who does what, in which order.
    pub plan: Plan,
    /// The devices of the plan, in the order of [`Plan::devices`].
    pub devices: Vec<StageDevice>,
    /// The base model.
    pub source: SharedSource,
    /// The adapters to start from.
    pub adapter: HostAdapter,
    /// How zeroth-order stages estimate.
    pub estimator: EstimatorSpec,
    /// Optimiser of first-order stages.
    pub first_order: Rule,
    /// Optimiser of zeroth-order stages.
    pub zeroth_order: Rule,
    /// Largest norm of the first-order gradient; 0 does not clip.
    pub clip: f64,
    /// Seed of the directions.
    pub seed: u64,
    /// Tokens of the longest sequence.
    pub positions: usize,
    /// The largest micro-batch to come, where it is known: workers then make room once, and [`super::Executor::planned_bytes`] knows how much.
    pub capacity: Option<Capacity>,
    /// Whether first-order stages recompute activations in the backward pass, see [`SliceSpec::recompute`].
    pub recompute: bool,
}

impl Setup {
    /// A setup with AdamW everywhere, no clipping and seed 0.
    pub fn new(plan: Plan, devices: Vec<StageDevice>, source: SharedSource, adapter: HostAdapter, estimator: EstimatorSpec) -> Self {
        let positions = source.config().max_positions.min(SliceSpec::POSITIONS);
        let (first_order, zeroth_order) = (Rule::ADAMW, Rule::ADAMW);
        let (clip, seed, capacity, recompute) = (0.0, 0, None, false);
        Self { plan, devices, source, adapter, estimator, first_order, zeroth_order, clip, seed, positions, capacity, recompute }
    }
}

/// What one step works on.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepInput {
    /// Step number, which also numbers the noise.
    pub step: u32,
    /// One per micro-batch of the plan.
    pub batches: Vec<MicroBatch>,
    /// Learning rate of first-order stages.
    pub first_order_lr: f64,
    /// Learning rate of zeroth-order stages.
    pub zeroth_order_lr: f64,
}

impl StepInput {
    /// A step.
    pub fn new(step: u32, batches: Vec<MicroBatch>, first_order_lr: f64, zeroth_order_lr: f64) -> Self {
        Self { step, batches, first_order_lr, zeroth_order_lr }
    }

    /// Labelled tokens of the whole mini-batch.
    pub(super) fn labels(&self) -> usize {
        self.batches.iter().map(MicroBatch::labels).sum()
    }
}

/// What one step did.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StepOutcome {
    /// Mean loss over labelled tokens before the update.
    pub loss: f64,
    /// Norm of the first-order gradient before clipping.
    pub gradient_norm: Option<f64>,
    /// Slopes after winsorising, micro-batch by micro-batch, direction by direction.
    pub slopes: Vec<f64>,
    /// The zeroth-order update for the journal, where it is made of seeds.
    pub journal: Option<Entry>,
    /// Wall-clock time.
    pub elapsed: Duration,
    /// Per device of the plan: what it did and when.
    pub timeline: Vec<Vec<Span>>,
}

/// Adapters and optimiser state of all stages.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Snapshot {
    /// The adapters, each once: devices that have copies have the same.
    pub adapter: HostAdapter,
    /// State of every device's optimiser of each stage, copies of a layer included; empty for a frozen stage.
    pub optimisers: Vec<Vec<u8>>,
}

impl Snapshot {
    /// A snapshot from its parts.
    pub fn new(adapter: HostAdapter, optimisers: Vec<Vec<u8>>) -> Self {
        Self { adapter, optimisers }
    }
}
