//! The executor: one worker thread per stage, bounded channels between them, a coordinator that owns every decision.
//!
//! Workers do what their list says. The coordinator (the calling thread) collects losses, dots and square sums, computes slopes in f64, clips,
//! writes nothing and prints nothing: it returns what happened. Nothing here knows the name of a schedule or an estimator's formula beyond
//! [`EstimatorSpec`].

mod link;
mod readout;
mod worker;

use crate::{
    estimator::EstimatorSpec,
    events::Span,
    ir::{Group, Readout, Role},
    journal::Entry,
    plan::Plan,
};
use link::Links;
use readout::Readouts;
use std::{
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};
use worker::{Command, Report, ReportKind, UpdateOrder, WorkerSetup};
use zofo_hal::{DType, DeviceRef, Error, ErrorKind, MemoryStats, Result};
use zofo_ops::{
    batch::{Capacity, MicroBatch},
    llama::{Importer, SliceSpec, WeightSource, WeightTypes},
    lora::HostAdapter,
    optim::{Rule, clip},
};

/// Model parameters that several worker threads read.
pub type SharedSource = Arc<dyn WeightSource + Send + Sync>;

/// The device of one stage and the type it computes in.
#[derive(Clone)]
#[non_exhaustive]
pub struct StageDevice {
    /// The device.
    pub device: DeviceRef,
    /// Type of activations other than the residual stream.
    pub compute: DType,
}

impl StageDevice {
    /// A stage on `device`.
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
    /// One device per stage.
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
    /// The largest micro-batch to come, where it is known: workers then make room once, and [`Executor::planned_bytes`] knows how much.
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

    fn labels(&self) -> usize {
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
    /// Per stage: what it did and when.
    pub timeline: Vec<Vec<Span>>,
}

/// Adapters and optimiser state of all stages.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Snapshot {
    /// The adapters.
    pub adapter: HostAdapter,
    /// State of each stage's optimiser; empty for a frozen stage.
    pub optimisers: Vec<Vec<u8>>,
}

impl Snapshot {
    /// A snapshot from its parts.
    pub fn new(adapter: HostAdapter, optimisers: Vec<Vec<u8>>) -> Self {
        Self { adapter, optimisers }
    }
}

struct Worker {
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
}

/// A running pipeline.
pub struct Executor {
    workers: Vec<Worker>,
    reports: Receiver<Report>,
    plan: Plan,
    estimator: EstimatorSpec,
    clip: f64,
    importer: Arc<Mutex<Importer>>,
    devices: Vec<DeviceRef>,
    /// What each stage will allocate for its activations, as rehearsed.
    rehearsed: Option<Vec<u64>>,
    /// Set by the first failure: a pipeline with a stage missing cannot go on.
    failed: Option<Error>,
}

impl Executor {
    /// Loads every stage's part of the model onto its device.
    ///
    /// # Errors
    /// `InvalidArgument` where plan and devices do not match; what loading a slice gives, with the stage's device named.
    pub fn start(setup: Setup) -> Result<Self> {
        let stages = setup.plan.stages.len();
        if setup.devices.len() != stages {
            return Err(Error::invalid(format!("{} devices for {stages} stages", setup.devices.len())));
        }
        let (schedule, name) = (&setup.plan.schedule, setup.plan.name.name());
        if !schedule.is_one_to_one() || !schedule.workload.chains.is_empty() || schedule.workload.split_backward {
            return Err(Error::unsupported(format!(
                "schedule `{name}` is simulated, not executed: this executor runs one stage per device with whole backward passes; take 1f1b, gpipe \
                 or hybridop-head"
            )));
        }
        if schedule.workload.readout == Readout::Tail {
            return Err(Error::unsupported(format!(
                "schedule `{name}` is a model of latency: behind the cut nobody can return a gradient"
            )));
        }
        setup.adapter.check(setup.source.config())?;
        let importer = Arc::new(Mutex::new(Importer::new()));
        let specs: Vec<SliceSpec> = (0..stages).map(|s| worker::slice_spec(&setup, s)).collect();
        {
            let mut importer = importer.lock().expect("no thread has it yet");
            for (spec, d) in specs.iter().zip(&setup.devices) {
                spec.announce(&mut importer, &d.device, setup.source.config());
            }
        }
        let (report, reports) = channel();
        let mut workers = Vec::new();
        for ((stage, links), spec) in Links::connect(&setup.plan.schedule).into_iter().enumerate().zip(specs) {
            let (commands, orders) = channel();
            let worker =
                WorkerSetup { stage, spec, setup: setup.clone(), links, importer: importer.clone(), orders, report: report.clone() };
            let name = format!("zofo-stage-{stage}");
            let thread = std::thread::Builder::new().name(name).spawn(move || worker.run());
            let thread = thread.map_err(|e| {
                Error::new(ErrorKind::OutOfMemory { requested: 0, available: None }, format!("no thread for stage {stage}: {e}"))
            })?;
            workers.push(Worker { commands, thread: Some(thread) });
        }
        let (plan, estimator, clip) = (setup.plan, setup.estimator, setup.clip);
        let devices = setup.devices.into_iter().map(|d| d.device).collect();
        let mut executor = Self { workers, reports, plan, estimator, clip, importer, devices, rehearsed: None, failed: None };
        let mut rehearsed = vec![0; stages];
        executor.collect(
            |kind| matches!(kind, ReportKind::Ready { .. }),
            |stage, kind| {
                if let ReportKind::Ready { activation_bytes } = kind {
                    rehearsed[stage] = activation_bytes;
                }
                Ok(())
            },
        )?;
        executor.rehearsed = setup.capacity.map(|_| rehearsed);
        Ok(executor)
    }

    /// Device memory at the peak of a step: what is loaded, and what each stage's actions were found to allocate when they were rehearsed at
    /// [`Setup::capacity`]. To be asked before the first step; `None` where the capacity is not known.
    pub fn planned_bytes(&self) -> Option<u64> {
        Some(self.device_bytes() + self.rehearsed.as_ref()?.iter().sum::<u64>())
    }

    /// Device memory in use, each device counted once. Workers keep a step's buffers for the next, so after a step it is that step's peak.
    pub fn device_bytes(&self) -> u64 {
        let all: Vec<MemoryStats> = self.devices.iter().map(|d| d.memory()).collect();
        let first = |i: usize| all[i].owner == 0 || all[..i].iter().all(|m| m.owner != all[i].owner);
        (0..all.len()).filter(|i| first(*i)).map(|i| all[i].in_use).sum()
    }

    /// The plan it runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes of base weights on all devices, shared ones counted once.
    pub fn weight_bytes(&self) -> usize {
        self.importer.lock().map_or(0, |i| i.bytes())
    }

    /// What types of base weights were read as what.
    pub fn weight_types(&self) -> Vec<WeightTypes> {
        self.importer.lock().map_or_else(|_| Vec::new(), |i| i.types())
    }

    /// Runs one optimiser step.
    ///
    /// # Errors
    /// `InvalidArgument` for a wrong number of micro-batches or no label at all; the first failure of a stage, after which the executor is
    /// of no more use; `Execution` where a loss or a slope is not finite (nothing was updated then).
    pub fn step(&mut self, input: StepInput) -> Result<StepOutcome> {
        self.alive()?;
        let workload = self.plan.schedule.workload.clone();
        if input.batches.len() != workload.micro_batches as usize {
            return Err(Error::invalid(format!("{} micro-batches, the plan has {}", input.batches.len(), workload.micro_batches)));
        }
        let labels = input.labels();
        if labels == 0 {
            return Err(Error::invalid("no token of the mini-batch has a label: nothing to learn from"));
        }
        let begin = Instant::now();
        let input = Arc::new(input);
        self.command(|_| Command::Step { input: input.clone(), begin })?;
        let mut readouts = Readouts::default();
        let mut sums: Vec<Vec<f32>> = vec![Vec::new(); self.workers.len()];
        let mut parts: Vec<Vec<f64>> = vec![Vec::new(); self.workers.len()];
        self.collect(
            |kind| matches!(kind, ReportKind::AtUpdate { .. }),
            |stage, kind| {
                match kind {
                    ReportKind::Losses { m, rows } => readouts.base(m, rows),
                    ReportKind::CopyLosses { group, rows } => readouts.losses(group, rows),
                    ReportKind::ExitLosses { group, rows } => readouts.exit_losses(group, rows),
                    ReportKind::Dots { group, values } => readouts.dots(group, values),
                    ReportKind::AtUpdate { square_sums, oracle: part } => {
                        sums[stage] = square_sums;
                        parts[stage] = part;
                    }
                    _ => {}
                }
                Ok(())
            },
        )?;
        // Stages report in any order; partial sums are added in that of the pipeline.
        let mut oracle = vec![0.0; self.estimator.directions as usize];
        parts.iter().for_each(|p| oracle.iter_mut().zip(p).for_each(|(sum, p)| *sum += p));
        let loss = readouts.loss(labels);
        let (directions, coefficients, slopes) = readouts.coefficients(&self.estimator, &workload, labels, &oracle)?;
        let all: Vec<f32> = sums.into_iter().flatten().collect();
        let (norm, grad_scale) = clip(&all, self.clip);
        let gradient_norm = (!all.is_empty()).then_some(norm);
        let finite = loss.is_finite() && gradient_norm.is_none_or(f64::is_finite) && coefficients.iter().all(|c| c.is_finite());
        if !finite {
            self.command(|_| Command::Skip)?;
            self.collect(|kind| matches!(kind, ReportKind::Done { .. }), |_, _| Ok(()))?;
            return Err(Error::execution(format!(
                "step {} is not finite (loss {loss}, gradient norm {norm}); nothing was updated. Lower the learning rate, or eps",
                input.step + 1
            )));
        }
        let journalled = !directions.is_empty();
        let order = Arc::new(UpdateOrder { grad_scale, directions, coefficients });
        self.command(|_| Command::Update(order.clone()))?;
        let mut timeline = vec![Vec::new(); self.workers.len()];
        self.collect(
            |kind| matches!(kind, ReportKind::Done { .. }),
            |stage, kind| {
                if let ReportKind::Done { spans } = kind {
                    timeline[stage] = spans;
                }
                Ok(())
            },
        )?;
        let entry = || Entry::new(input.step, input.zeroth_order_lr, order.directions.clone(), order.coefficients.clone());
        Ok(StepOutcome { loss, gradient_norm, slopes, journal: journalled.then(entry), elapsed: begin.elapsed(), timeline })
    }

    /// The adapters and optimisers as they are.
    ///
    /// # Errors
    /// The first failure of a stage.
    pub fn snapshot(&mut self) -> Result<Snapshot> {
        self.alive()?;
        self.command(|_| Command::Export)?;
        let mut snapshot = Snapshot { adapter: HostAdapter::default(), optimisers: vec![Vec::new(); self.workers.len()] };
        self.collect(
            |kind| matches!(kind, ReportKind::Exported { .. }),
            |stage, kind| {
                if let ReportKind::Exported { adapter, optimiser } = kind {
                    snapshot.adapter.merge(adapter);
                    snapshot.optimisers[stage] = optimiser;
                }
                Ok(())
            },
        )?;
        Ok(snapshot)
    }

    /// Goes back to a snapshot of the same plan.
    ///
    /// # Errors
    /// `Format` or `InvalidArgument` where it is of another plan or another adapter; the executor is of no more use then.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        self.alive()?;
        if snapshot.optimisers.len() != self.workers.len() {
            return Err(Error::invalid(format!(
                "a checkpoint of {} stages for a plan of {}",
                snapshot.optimisers.len(),
                self.workers.len()
            )));
        }
        let shared = Arc::new(snapshot.clone());
        self.command(|_| Command::Import(shared.clone()))?;
        self.collect(|kind| matches!(kind, ReportKind::Ready { .. }), |_, _| Ok(()))
    }

    /// Stops the workers and closes their queues.
    ///
    /// # Errors
    /// What closing a queue gives.
    pub fn finish(mut self) -> Result<()> {
        self.alive()?;
        self.command(|_| Command::Stop)?;
        self.collect(|kind| matches!(kind, ReportKind::Stopped), |_, _| Ok(()))
    }

    fn alive(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), |e| Err(e.context("the pipeline stopped earlier")))
    }

    fn command(&mut self, command: impl Fn(usize) -> Command) -> Result<()> {
        for (stage, worker) in self.workers.iter().enumerate() {
            // A worker that has gone reported why; `collect` finds it.
            let _ = worker.commands.send(command(stage));
        }
        Ok(())
    }

    /// Takes reports until every stage has sent one that `is_last`, or one has failed.
    fn collect(&mut self, is_last: impl Fn(&ReportKind) -> bool, mut take: impl FnMut(usize, ReportKind) -> Result<()>) -> Result<()> {
        let mut waiting = self.workers.len();
        let mut failure: Option<(usize, Error)> = None;
        while waiting > 0 {
            let Ok(Report { stage, kind }) = self.reports.recv() else {
                let lost = || (0, Error::new(ErrorKind::DeviceLost, "a stage's thread ended without a word"));
                failure.get_or_insert_with(lost);
                break;
            };
            match kind {
                ReportKind::Failed(e) => {
                    waiting -= 1;
                    // Stages that lost their neighbour fail too; the cause is the one that did not.
                    let is_cause = *e.kind() != ErrorKind::Cancelled;
                    if failure.as_ref().is_none_or(|(_, f)| is_cause && *f.kind() == ErrorKind::Cancelled) {
                        failure = Some((stage, e));
                    }
                    // Lets the stages that wait for the coordinator end too.
                    for worker in &mut self.workers {
                        worker.commands = channel().0;
                    }
                }
                kind => {
                    // After a failure nobody gets further than where it waits for a command.
                    waiting -= usize::from(is_last(&kind));
                    if failure.is_none() {
                        take(stage, kind)?;
                    }
                }
            }
        }
        match failure {
            None => Ok(()),
            Some((stage, e)) => {
                let e = e.context(format!("stage {stage} ({})", self.plan.stages[stage].device));
                self.failed = Some(e.clone());
                Err(e)
            }
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.commands = channel().0;
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// Whether a stage runs forward and backward: by its role, or because the oracle needs its exact gradient.
fn backpropagates(setup: &Setup, stage: usize) -> bool {
    setup.plan.schedule.workload.roles[stage] == Role::FirstOrder
}

/// Key of a readout: micro-batch, direction, side.
type ReadoutKey = (u32, u32, bool);

fn keys(group: &Group) -> impl Iterator<Item = ReadoutKey> + use<> {
    let g = *group;
    (g.q0..g.q0 + g.n).map(move |q| (g.m, q, g.minus))
}
