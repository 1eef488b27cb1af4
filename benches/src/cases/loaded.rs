//! A model of random weights on a device, with adapters of q and v: what the cases of whole models run.

use crate::{Arithmetic, Work, synthetic::Synthetic};
use zofo_hal::{DType, DeviceRef, Result, op::Copies, perturb::Projection};
use zofo_ops::{
    Runner,
    batch::{DeviceBatch, MicroBatch, Sequence},
    llama::{Importer, Input, ModelConfig, Slice, SliceSpec},
    lora::{Adapters, GradScope, LoraSpec, Targets},
    optim::{Optimiser, Rule, clip},
};

use crate::shapes;

/// Seed of everything random.
pub const SEED: u64 = 1;

/// Types of a model.
#[derive(Clone, Copy)]
pub struct Types {
    pub weights: DType,
    pub compute: DType,
}

impl Types {
    pub const F32: Self = Self { weights: DType::F32, compute: DType::F32 };
    pub const BF16: Self = Self { weights: DType::Bf16, compute: DType::Bf16 };

    /// Work done in these types.
    pub fn work(self, work: Work) -> Work {
        work.with(if self.compute == DType::Bf16 { Arithmetic::Bf16 } else { Arithmetic::F32 })
    }
}

/// Which tokens carry a label.
#[derive(Clone, Copy)]
pub enum Labels {
    /// Every token but the first, as in language modelling.
    All,
    /// The last of each sequence, as in classification.
    Last,
}

impl Labels {
    /// Labels of a sequence of so many tokens.
    pub fn count(self, tokens: usize) -> usize {
        match self {
            Self::All => tokens - 1,
            Self::Last => 1,
        }
    }

    /// A sequence with its labels.
    pub fn on(self, ids: Vec<u32>) -> Sequence {
        let first = ids.len() - self.count(ids.len());
        Sequence::predicting(ids, first)
    }
}

/// A part of a model on a queue of its own.
pub fn load(device: &DeviceRef, config: &ModelConfig, types: Types, spec: SliceSpec) -> Result<(Runner, Slice)> {
    let mut runner = Runner::new(device.clone())?;
    let source = Synthetic::new(config.clone(), types.weights);
    let slice = Slice::load(&mut runner, &mut Importer::new(), &source, &spec.with_compute(types.compute))?;
    Ok((runner, slice))
}

/// A whole model with adapters.
pub struct Loaded {
    pub runner: Runner,
    pub slice: Slice,
    pub adapters: Adapters,
}

impl Loaded {
    pub fn new(device: &DeviceRef, config: &ModelConfig, types: Types) -> Result<Self> {
        let (mut runner, slice) = load(device, config, types, SliceSpec::whole(config).with_backward())?;
        let spec = LoraSpec::new(shapes::RANK, 16.0, Targets::from(&[Projection::Q, Projection::V][..]));
        let adapters = Adapters::init(&mut runner, &slice, &spec, SEED)?;
        Ok(Self { runner, slice, adapters })
    }

    pub fn batch(&mut self, sequences: &[Sequence]) -> Result<DeviceBatch> {
        let host = MicroBatch::pack(self.slice.config(), sequences)?;
        DeviceBatch::from_host(&mut self.runner, &host, 1.0 / host.labels() as f32)
    }

    /// Loss of the model without adapters.
    pub fn forward_loss(&mut self, batch: &DeviceBatch) -> Result<()> {
        let h = self.slice.forward(&mut self.runner, batch, &Adapters::none(), Input::Tokens)?;
        self.slice.loss(&mut self.runner, batch, &h, Copies::BASE, false)?.sums(&mut self.runner).map(drop)
    }
}

/// A model that is trained first-order.
pub struct FirstOrder {
    pub model: Loaded,
    optimiser: Optimiser,
}

impl FirstOrder {
    pub fn new(mut model: Loaded) -> Result<Self> {
        model.adapters.enable_grads(&mut model.runner, GradScope::All)?;
        let optimiser = Optimiser::first_order(&mut model.runner, &model.adapters, Rule::ADAMW)?;
        Ok(Self { model, optimiser })
    }

    /// Forward, backward, clipping and update.
    pub fn step(&mut self, batch: &DeviceBatch) -> Result<()> {
        let Loaded { runner, slice, adapters } = &mut self.model;
        let (h, saved) = slice.forward_saving(runner, batch, adapters, Input::Tokens, false)?;
        let loss = slice.loss(runner, batch, &h, Copies::BASE, true)?;
        loss.sums(runner)?;
        if let Some(saved_loss) = loss.saved {
            let dh = slice.loss_backward(runner, batch, saved_loss)?;
            slice.backward(runner, batch, adapters, saved, &dh)?;
        }
        let (_, scale) = clip(&self.optimiser.sum_squares(runner)?, 1.0);
        self.optimiser.step(runner, 1e-4, scale)?;
        adapters.zero_grad(runner)
    }
}
