//! The training loop's state: a pipeline, its step number, its checkpoints.

mod checkpoint;

use crate::{
    estimator::EstimatorSpec,
    events::StepReport,
    executor::{Executor, Setup, SharedSource, Snapshot, StageDevice, StepInput},
    journal::Entry,
    plan::Plan,
};
pub use checkpoint::Checkpoint;
use std::path::Path;
use zofo_hal::{Error, Result};
use zofo_ops::{
    batch::{Capacity, MicroBatch, Sequence},
    config::ModelConfig,
    lora::{HostAdapter, LoraSpec},
    optim::Rule,
};

/// How the learning rate changes over a run.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Decay {
    /// It does not.
    Constant,
    /// Down to 0 at the last of so many steps, in a line.
    Linear {
        /// Steps of the whole run.
        steps: u32,
    },
}

/// An optimiser's rule and learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct OptimiserSpec {
    /// The rule.
    pub rule: Rule,
    /// Learning rate of the first step.
    pub lr: f64,
}

impl OptimiserSpec {
    /// An optimiser.
    pub fn new(rule: Rule, lr: f64) -> Self {
        Self { rule, lr }
    }
}

/// Everything about training but the model, the data and the plan.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TrainSpec {
    /// The adapters.
    pub lora: LoraSpec,
    /// How zeroth-order stages estimate.
    pub estimator: EstimatorSpec,
    /// Optimiser of first-order stages.
    pub first_order: OptimiserSpec,
    /// Optimiser of zeroth-order stages.
    pub zeroth_order: OptimiserSpec,
    /// How both learning rates change.
    pub decay: Decay,
    /// Steps over which both learning rates rise from 0 at first.
    pub warmup: u32,
    /// Largest norm of the first-order gradient; 0 does not clip.
    pub clip: f64,
    /// Seed of initial adapters and directions.
    pub seed: u64,
    /// The largest micro-batch to come, where it is known: see [`Session::planned_bytes`].
    pub capacity: Option<Capacity>,
    /// Tokens of the longest sequence; `None` is what [`zofo_ops::llama::SliceSpec`] takes by itself.
    pub positions: Option<usize>,
    /// Whether first-order stages keep each layer's input alone and recompute the rest in the backward pass: less memory for more time, the
    /// same bits.
    pub recompute: bool,
}

impl TrainSpec {
    /// AdamW for both parts, constant learning rates, clipping at norm 1, seed 0.
    pub fn new(lora: LoraSpec, estimator: EstimatorSpec, first_order_lr: f64, zeroth_order_lr: f64) -> Self {
        Self {
            lora,
            estimator,
            first_order: OptimiserSpec::new(Rule::ADAMW, first_order_lr),
            zeroth_order: OptimiserSpec::new(Rule::ADAMW, zeroth_order_lr),
            decay: Decay::Constant,
            warmup: 0,
            clip: 1.0,
            seed: 0,
            capacity: None,
            positions: None,
            recompute: false,
        }
    }

    fn factor(&self, step: u32) -> f64 {
        let up = if step < self.warmup { f64::from(step + 1) / f64::from(self.warmup + 1) } else { 1.0 };
        match self.decay {
            Decay::Constant => up,
            Decay::Linear { steps } => up * f64::from(steps.saturating_sub(step)) / f64::from(steps.max(1)),
        }
    }

    fn check(&self) -> Result<()> {
        self.lora.check()?;
        for (name, o) in [("first-order", &self.first_order), ("zeroth-order", &self.zeroth_order)] {
            if !(o.lr.is_finite() && o.lr >= 0.0) {
                return Err(Error::invalid(format!("the {name} learning rate is {}; it must be finite and at least 0", o.lr)));
            }
        }
        if !(self.clip.is_finite() && self.clip >= 0.0) {
            return Err(Error::invalid(format!("the clipping norm is {}; it must be finite, and 0 for no clipping", self.clip)));
        }
        Ok(())
    }

    /// What two runs must have in common for one to continue the other, by name.
    fn identity(&self, plan: &Plan) -> Vec<(String, String)> {
        let stages: Vec<String> = plan.stages.iter().map(|s| format!("{:?} {}", s.layers, s.role.name())).collect();
        let mut all: Vec<(&str, String)> = vec![
            ("lora", format!("{:?}", self.lora)),
            ("estimator", format!("{:?}", self.estimator)),
            ("first-order optimiser", format!("{:?}", self.first_order)),
            ("zeroth-order optimiser", format!("{:?}", self.zeroth_order)),
            ("decay", format!("{:?} after {} steps of warm-up", self.decay, self.warmup)),
            ("clipping norm", self.clip.to_string()),
            ("seed", self.seed.to_string()),
            ("micro-batches", plan.schedule.workload.micro_batches.to_string()),
            ("stages", stages.join(", ")),
        ];
        // Members of a stage sum what they measured in their order.
        let shared = plan.stages.iter().enumerate().filter(|(_, s)| s.members.len() > 1);
        let shares: Vec<String> =
            shared.map(|(i, s)| format!("{i}: {:?} {:?}", s.split, s.members.iter().map(|m| m.share).collect::<Vec<_>>())).collect();
        if !shares.is_empty() {
            all.push(("shares of stages", shares.join(", ")));
        }
        // Gradients of several pipelines are summed in their order.
        let chains = &plan.schedule.workload.chains;
        if !chains.is_empty() {
            all.push(("micro-batches of each pipeline", format!("{:?}", chains.iter().map(|c| &c.micro_batches).collect::<Vec<_>>())));
        }
        all.drain(..).map(|(k, v)| (k.to_owned(), v)).collect()
    }
}

/// Divides a mini-batch as evenly as it goes.
fn micro_batches(batch: &[Sequence], count: u32) -> Result<impl Iterator<Item = &[Sequence]>> {
    let m = count as usize;
    if batch.len() < m {
        return Err(Error::invalid(format!("a mini-batch of {} sequences cannot be split into {m} micro-batches", batch.len())));
    }
    let (size, rest) = (batch.len() / m, batch.len() % m);
    Ok((0..m).map(move |i| {
        let first = i * size + i.min(rest);
        &batch[first..first + size + usize::from(i < rest)]
    }))
}

/// The smallest capacity that every micro-batch of `batch` fits in, for [`TrainSpec::capacity`].
///
/// # Errors
/// `InvalidArgument` for fewer sequences than micro-batches.
pub fn capacity_of(batch: &[Sequence], micro_batches: u32) -> Result<Capacity> {
    let parts = self::micro_batches(batch, micro_batches)?;
    parts.map(Capacity::of_sequences).reduce(Capacity::max).ok_or_else(|| Error::invalid("0 micro-batches"))
}

/// A training run in progress.
pub struct Session {
    executor: Executor,
    config: ModelConfig,
    spec: TrainSpec,
    step: u32,
    journal: Vec<Entry>,
}

impl Session {
    /// Starts from new adapters.
    ///
    /// # Errors
    /// `InvalidArgument` for settings out of range; those of [`Executor::start`].
    pub fn start(plan: Plan, devices: Vec<StageDevice>, source: SharedSource, spec: TrainSpec) -> Result<Self> {
        spec.check()?;
        let config = source.config().clone();
        let adapter = HostAdapter::init(&config, 0..config.layers, &spec.lora, spec.seed)?;
        Self::start_from(plan, devices, source, spec, adapter)
    }

    /// Starts from given adapters.
    ///
    /// # Errors
    /// As [`Session::start`]; those of [`HostAdapter::check`].
    pub fn start_from(plan: Plan, devices: Vec<StageDevice>, source: SharedSource, spec: TrainSpec, adapter: HostAdapter) -> Result<Self> {
        for (name, d) in plan.devices().into_iter().zip(&devices) {
            spec.estimator.check(d.compute).map_err(|e| e.with_device(name))?;
        }
        Self::start_unchecked(plan, devices, source, spec, adapter)
    }

    /// As [`Session::start_from`], also for an estimator and a compute type that [`EstimatorSpec::check`] refuses together: to measure why.
    ///
    /// # Errors
    /// As [`Session::start_from`], but for that refusal.
    pub fn start_unchecked(
        plan: Plan,
        devices: Vec<StageDevice>,
        source: SharedSource,
        spec: TrainSpec,
        adapter: HostAdapter,
    ) -> Result<Self> {
        spec.check()?;
        let config = source.config().clone();
        let mut setup = Setup::new(plan, devices, source, adapter, spec.estimator.clone());
        setup.first_order = spec.first_order.rule;
        setup.zeroth_order = spec.zeroth_order.rule;
        (setup.clip, setup.seed, setup.capacity, setup.recompute) = (spec.clip, spec.seed, spec.capacity, spec.recompute);
        if let Some(positions) = spec.positions {
            setup.positions = positions;
        }
        Ok(Self { executor: Executor::start(setup)?, config, spec, step: 0, journal: Vec::new() })
    }

    /// Continues a checkpoint, bit for bit: the same settings and plan are required.
    ///
    /// # Errors
    /// As [`Session::start`]; `Format` for a file that is no checkpoint; `InvalidArgument` naming the setting that differs.
    pub fn resume(plan: Plan, devices: Vec<StageDevice>, source: SharedSource, spec: TrainSpec, path: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::read(path)?;
        checkpoint.check_identity(&spec.identity(&plan)).map_err(|e| e.context(path.display()))?;
        let mut session = Self::start_from(plan, devices, source, spec, checkpoint.snapshot.adapter.clone())?;
        session.executor.restore(&checkpoint.snapshot).map_err(|e| e.context(path.display()))?;
        session.step = checkpoint.step;
        Ok(session)
    }

    /// Steps done.
    pub fn steps(&self) -> u32 {
        self.step
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        self.executor.plan()
    }

    /// Bytes of base weights on all devices, shared ones counted once.
    pub fn weight_bytes(&self) -> usize {
        self.executor.weight_bytes()
    }

    /// As [`Executor::step_bytes`].
    pub fn step_bytes(&self) -> Option<&[u64]> {
        self.executor.step_bytes()
    }

    /// As [`Executor::planned_bytes`].
    pub fn planned_bytes(&self) -> Option<u64> {
        self.executor.planned_bytes()
    }

    /// As [`Executor::device_bytes`].
    pub fn device_bytes(&self) -> u64 {
        self.executor.device_bytes()
    }

    /// What types of base weights were read as what.
    pub fn weight_types(&self) -> Vec<zofo_ops::llama::WeightTypes> {
        self.executor.weight_types()
    }

    /// One optimiser step on a mini-batch, which is split into the plan's micro-batches.
    ///
    /// # Errors
    /// `InvalidArgument` for fewer sequences than micro-batches, or a sequence that does not fit the model; those of [`Executor::step`].
    pub fn step(&mut self, batch: &[Sequence]) -> Result<StepReport> {
        let parts = micro_batches(batch, self.plan().schedule.workload.micro_batches)?;
        let batches = parts.map(|part| MicroBatch::pack(&self.config, part)).collect::<Result<Vec<_>>>()?;
        let labels = batches.iter().map(MicroBatch::labels).sum();
        let tokens = batches.iter().map(MicroBatch::rows).sum();
        let factor = self.spec.factor(self.step);
        let (fo, zo) = (self.spec.first_order.lr * factor, self.spec.zeroth_order.lr * factor);
        let out = self.executor.step(StepInput::new(self.step, batches, fo, zo))?;
        self.journal.extend(out.journal);
        let slope_rms = match out.slopes.len() {
            0 => None,
            n => Some((out.slopes.iter().map(|g| g * g).sum::<f64>() / n as f64).sqrt()),
        };
        let report = StepReport {
            step: self.step,
            loss: out.loss,
            labels,
            samples: batch.len(),
            tokens,
            gradient_norm: out.gradient_norm,
            slope_rms,
            seconds: out.elapsed.as_secs_f64(),
            timeline: out.timeline,
        };
        self.step += 1;
        Ok(report)
    }

    /// Journal entries since the last call.
    pub fn take_journal(&mut self) -> Vec<Entry> {
        std::mem::take(&mut self.journal)
    }

    /// The adapters as they are now.
    ///
    /// # Errors
    /// Those of [`Executor::snapshot`].
    pub fn adapter(&mut self) -> Result<HostAdapter> {
        Ok(self.executor.snapshot()?.adapter)
    }

    /// Writes a checkpoint to the file `path`; an earlier one is replaced only once the new one is whole.
    ///
    /// # Errors
    /// Those of [`Executor::snapshot`]; `Io`.
    pub fn save(&mut self, path: &Path) -> Result<()> {
        let snapshot: Snapshot = self.executor.snapshot()?;
        let identity = self.spec.identity(self.executor.plan());
        Checkpoint::new(self.step, identity, snapshot).write(path)
    }

    /// Stops the pipeline.
    ///
    /// # Errors
    /// Those of [`Executor::finish`].
    pub fn finish(self) -> Result<()> {
        self.executor.finish()
    }
}
