//! The executor: one worker thread per device, bounded channels between them, a coordinator that owns every decision.
//!
//! A device's number among all is its rank: devices of the first worker first, those that share its stages in turn.
//!
//! Workers do what their list says. The coordinator (the calling thread) collects losses, dots and square sums, computes slopes in f64, clips,
//! writes nothing and prints nothing: it returns what happened. Nothing here knows the name of a schedule or an estimator's formula beyond
//! [`EstimatorSpec`].

mod link;
mod memory;
mod messages;
mod peers;
mod protocol;
mod readout;
mod reduce;
mod setup;
mod sharing;
mod stage;
mod worker;

use crate::{
    estimator::EstimatorSpec,
    ir::{Readout, Role},
    journal::Entry,
    plan::Plan,
    planner::Split,
};
use link::Links;
use peers::Peers;
use protocol::{Command, Report, ReportKind, UpdateOrder};
use readout::Readouts;
pub use setup::{Setup, SharedSource, Snapshot, StageDevice, StepInput, StepOutcome};
use sharing::Sharing;
pub(crate) use sharing::sequences;
use stage::LayerPart;
use std::{
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::Instant,
};
use worker::{OwnStage, WorkerSetup};
use zofo_hal::{DeviceRef, Error, ErrorKind, MemoryStats, Result};
use zofo_ops::{
    config::ModelConfig,
    llama::{Importer, WeightTypes},
    lora::HostAdapter,
    optim::clip,
};

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
    sharing: Arc<Sharing>,
    config: ModelConfig,
    /// The adapters that it started from: their shapes are those of all that follow.
    start: HostAdapter,
    /// What each worker will allocate for its stages' activations, as rehearsed.
    rehearsed: Option<Vec<u64>>,
    /// Set by the first failure: a pipeline with a worker missing cannot go on.
    failed: Option<Error>,
}

impl Executor {
    /// Loads every stage's part of the model onto its device.
    ///
    /// # Errors
    /// `InvalidArgument` where plan and devices do not match, or the order of work cannot run ([`crate::check`]); what loading a slice gives, with
    /// the stage's device named.
    pub fn start(setup: Setup) -> Result<Self> {
        let schedule = &setup.plan.schedule;
        let (ranks, stages) = (setup.plan.devices().len(), setup.plan.stages.len());
        if setup.devices.len() != ranks || schedule.workload.stages() != stages {
            let found = setup.devices.len();
            return Err(Error::invalid(format!(
                "{found} devices and {stages} stages for a plan of {ranks} and {}",
                schedule.workload.stages()
            )));
        }
        runs(&setup.plan)?;
        setup.adapter.check(setup.source.config())?;
        let importer = Arc::new(Mutex::new(Importer::new()));
        let sharing = Arc::new(Sharing::new(&setup.plan, setup.source.config())?);
        let mut own: Vec<Vec<OwnStage>> = (0..ranks).map(|_| Vec::new()).collect();
        let mut worker_of = vec![0; ranks];
        for (stage, worker) in schedule.placement.iter().enumerate() {
            let ranks = sharing.ranks(stage);
            let by_heads = sharing.shard(stage, ranks.start).map_or(0, |_| ranks.len());
            let mut group = Peers::group(by_heads).into_iter();
            for rank in ranks {
                let part = sharing.shard(stage, rank).zip(group.next());
                let part = part.map(|(shard, peers)| LayerPart::new(setup.source.config(), shard, peers));
                let spec = stage::slice_spec(&setup, stage, rank);
                let mut importer = importer.lock().expect("no thread has it yet");
                spec.announce(&mut importer, &setup.devices[rank].device, setup.source.config());
                own[rank].push(OwnStage { index: stage, spec, part });
                worker_of[rank] = *worker;
            }
        }
        let (report, reports) = channel();
        let mut threads = Vec::new();
        for ((rank, links), stages) in Links::connect(schedule, &sharing, ranks).into_iter().enumerate().zip(own) {
            let (commands, orders) = channel();
            let list = schedule.lists[worker_of[rank]].clone();
            let (setup, sharing, importer, report) = (setup.clone(), sharing.clone(), importer.clone(), report.clone());
            let work = WorkerSetup { rank, list, stages, setup, sharing, links, importer, orders, report };
            let thread = std::thread::Builder::new().name(format!("zofo-worker-{rank}")).spawn(move || work.run());
            let thread = thread.map_err(|e| {
                Error::new(ErrorKind::OutOfMemory { requested: 0, available: None }, format!("no thread for device {rank}: {e}"))
            })?;
            threads.push(Worker { commands, thread: Some(thread) });
        }
        let (plan, estimator, clip) = (setup.plan, setup.estimator, setup.clip);
        let (config, start) = (setup.source.config().clone(), setup.adapter);
        let devices = setup.devices.into_iter().map(|d| d.device).collect();
        let mut executor = Self {
            workers: threads,
            reports,
            plan,
            estimator,
            clip,
            importer,
            devices,
            sharing,
            config,
            start,
            rehearsed: None,
            failed: None,
        };
        let mut rehearsed = vec![0; ranks];
        executor.collect(
            |kind| matches!(kind, ReportKind::Ready { .. }),
            |rank, kind| {
                if let ReportKind::Ready { activation_bytes } = kind {
                    rehearsed[rank] = activation_bytes;
                }
            },
        )?;
        executor.rehearsed = setup.capacity.map(|_| rehearsed);
        Ok(executor)
    }

    /// Device memory at the peak of a step: what is loaded, and what each worker's list was found to allocate when it was rehearsed at
    /// [`Setup::capacity`]. To be asked before the first step; `None` where the capacity is not known.
    pub fn planned_bytes(&self) -> Option<u64> {
        Some(self.device_bytes() + self.rehearsed.as_ref()?.iter().sum::<u64>())
    }

    /// What each device of the plan allocates for a step beside what is loaded, as rehearsed; `None` where the capacity is not known.
    pub fn step_bytes(&self) -> Option<&[u64]> {
        self.rehearsed.as_deref()
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
        self.command(|| Command::Step { input: input.clone(), begin });
        let (mut readouts, mut gradients, mut measured) = (Readouts::default(), Vec::new(), Vec::new());
        if self.sharing.any_adds_gradients() {
            self.collect(
                |kind| matches!(kind, ReportKind::Gradients(_)),
                |rank, kind| match kind {
                    ReportKind::Gradients(of_stages) => gradients.extend(of_stages.into_iter().map(|(stage, g)| (stage, rank, g))),
                    kind => readouts.take(rank, kind),
                },
            )?;
            let sums = Arc::new(reduce::sum(gradients));
            self.command(|| Command::Reduced(sums.clone()));
        }
        self.collect(
            |kind| matches!(kind, ReportKind::AtUpdate(_)),
            |rank, kind| match kind {
                ReportKind::AtUpdate(of_stages) => measured.extend(of_stages.into_iter().map(|(stage, m)| (rank, stage, m))),
                kind => readouts.take(rank, kind),
            },
        )?;
        // Members and copies have the same gradients by now, and each tensor counts once.
        measured.retain(|(rank, stage, _)| *stage < self.first_copy() && *rank == self.sharing.ranks(*stage).start);
        // Workers report in any order; partial sums are added in that of the pipeline.
        measured.sort_by_key(|(_, stage, _)| *stage);
        let mut oracle = vec![0.0; self.estimator.directions as usize];
        measured.iter().for_each(|(.., m)| oracle.iter_mut().zip(&m.oracle).for_each(|(sum, p)| *sum += p));
        let loss = readouts.loss(labels);
        let (directions, coefficients, slopes) = readouts.coefficients(&self.estimator, &workload, labels, &oracle)?;
        let all: Vec<f32> = measured.into_iter().flat_map(|(.., m)| m.square_sums).collect();
        let (norm, grad_scale) = clip(&all, self.clip);
        let gradient_norm = (!all.is_empty()).then_some(norm);
        let finite = loss.is_finite() && gradient_norm.is_none_or(f64::is_finite) && coefficients.iter().all(|c| c.is_finite());
        if !finite {
            self.command(|| Command::Skip);
            self.collect(|kind| matches!(kind, ReportKind::Done { .. }), |_, _| {})?;
            return Err(Error::execution(format!(
                "step {} is not finite (loss {loss}, gradient norm {norm}); nothing was updated. Lower the learning rate, or eps",
                input.step + 1
            )));
        }
        let journalled = !directions.is_empty();
        let order = Arc::new(UpdateOrder { grad_scale, directions, coefficients });
        self.command(|| Command::Update(order.clone()));
        let mut timeline = vec![Vec::new(); self.workers.len()];
        self.collect(
            |kind| matches!(kind, ReportKind::Done { .. }),
            |rank, kind| {
                if let ReportKind::Done { spans } = kind {
                    timeline[rank] = spans;
                }
            },
        )?;
        let entry = || Entry::new(input.step, input.zeroth_order_lr, order.directions.clone(), order.coefficients.clone());
        Ok(StepOutcome { loss, gradient_norm, slopes, journal: journalled.then(entry), elapsed: begin.elapsed(), timeline })
    }

    /// The adapters and optimisers as they are.
    ///
    /// # Errors
    /// The first failure of a stage; `Execution` where copies of a layer on several devices differ, which no device may let happen.
    pub fn snapshot(&mut self) -> Result<Snapshot> {
        self.alive()?;
        self.command(|| Command::Export);
        let mut exported = Vec::new();
        self.collect(
            |kind| matches!(kind, ReportKind::Exported(_)),
            |rank, kind| {
                let ReportKind::Exported(of_stages) = kind else { return };
                exported.extend(of_stages.into_iter().map(|(stage, adapter, optimiser)| (stage, rank, adapter, optimiser)));
            },
        )?;
        let mut snapshot = Snapshot { adapter: self.start.clone(), optimisers: vec![Vec::new(); self.sharing.slots()] };
        for (stage, rank, own, optimiser) in &mut exported {
            snapshot.optimisers[self.sharing.slot(*stage, *rank)] = std::mem::take(optimiser);
            match self.sharing.shard(*stage, *rank) {
                None => snapshot.adapter.merge(own.clone()),
                Some(shard) => shard.put_adapter(&self.config, own, &mut snapshot.adapter)?,
            }
        }
        for (stage, rank, own, _) in &exported {
            let layers = snapshot.adapter.layers(self.plan.stages[*stage].layers.clone());
            let expected = match self.sharing.shard(*stage, *rank) {
                None => layers,
                Some(shard) => shard.adapter(&self.config, &layers)?,
            };
            if let Some((layer, projection)) = expected.modules.iter().find(|(key, m)| own.modules.get(key) != Some(m)).map(|(key, _)| key)
            {
                return Err(Error::execution(format!(
                    "the copies of the adapter of layer {layer}, {} on several devices are no longer the same: a device does not update by the \
                     exact sequence",
                    projection.name()
                )));
            }
        }
        Ok(snapshot)
    }

    /// Goes back to a snapshot of the same plan.
    ///
    /// # Errors
    /// `Format` or `InvalidArgument` where it is of another plan or another adapter; the executor is of no more use then.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        self.alive()?;
        let (found, expected) = (snapshot.optimisers.len(), self.sharing.slots());
        if found != expected {
            return Err(Error::invalid(format!("a checkpoint of {found} optimisers for a plan of {expected}, one per stage and device")));
        }
        let shared = Arc::new(snapshot.clone());
        self.command(|| Command::Import(shared.clone()));
        self.collect(|kind| matches!(kind, ReportKind::Ready { .. }), |_, _| {})
    }

    /// Stops the workers and closes their queues.
    ///
    /// # Errors
    /// What closing a queue gives.
    pub fn finish(mut self) -> Result<()> {
        self.alive()?;
        self.command(|| Command::Stop);
        self.collect(|kind| matches!(kind, ReportKind::Stopped), |_, _| {})
    }

    /// The first pipeline has every layer once; the stages from here on are copies.
    fn first_copy(&self) -> usize {
        self.plan.schedule.workload.chain(0).stages.end
    }

    fn alive(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), |e| Err(e.context("the pipeline stopped earlier")))
    }

    fn command(&mut self, command: impl Fn() -> Command) {
        for worker in &self.workers {
            // A worker that has gone reported why; `collect` finds it.
            let _ = worker.commands.send(command());
        }
    }

    /// Takes reports until every worker has sent one that `is_last`, or one has failed.
    fn collect(&mut self, is_last: impl Fn(&ReportKind) -> bool, mut take: impl FnMut(usize, ReportKind)) -> Result<()> {
        let mut waiting = self.workers.len();
        let mut failure: Option<Error> = None;
        while waiting > 0 {
            let Ok(Report { rank, kind }) = self.reports.recv() else {
                failure.get_or_insert_with(|| Error::new(ErrorKind::DeviceLost, "a worker's thread ended without a word"));
                break;
            };
            match kind {
                ReportKind::Failed(e) => {
                    waiting -= 1;
                    // Workers that lost their neighbour fail too; the cause is the one that did not.
                    let is_cause = *e.kind() != ErrorKind::Cancelled;
                    if failure.as_ref().is_none_or(|f| is_cause && *f.kind() == ErrorKind::Cancelled) {
                        failure = Some(e);
                    }
                    // Lets the workers that wait for the coordinator end too.
                    for worker in &mut self.workers {
                        worker.commands = channel().0;
                    }
                }
                kind => {
                    // After a failure nobody gets further than where it waits for a command.
                    waiting -= usize::from(is_last(&kind));
                    if failure.is_none() {
                        take(rank, kind);
                    }
                }
            }
        }
        self.failed.clone_from(&failure);
        failure.map_or(Ok(()), Err)
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

/// Whether `plan` can train: what the simulator times may be a model of latency.
fn runs(plan: &Plan) -> Result<()> {
    let (schedule, name) = (&plan.schedule, plan.name.name());
    if schedule.workload.readout == Readout::Tail {
        return Err(Error::unsupported(format!("schedule `{name}` is a model of latency: behind the cut nobody can return a gradient")));
    }
    crate::order::check_roles(&schedule.workload)?;
    plan.check_members()?;
    shares(plan)?;
    // A list that cannot run would wait for ever.
    crate::check::check(schedule).map(drop)
}

/// Whether stages that several devices share are shared in a way that what they learn by allows.
fn shares(plan: &Plan) -> Result<()> {
    let w = &plan.schedule.workload;
    for (i, stage) in plan.stages.iter().enumerate().filter(|(_, s)| s.members.len() > 1) {
        let refused = |why: &str| Err(Error::unsupported(format!("stage {i} of {}: {why}", stage.devices())));
        match stage.split {
            Split::Directions if w.roles[i] != Role::ZerothOrder || !w.estimates() => {
                return refused("only stages that learn along random directions can be shared by directions; share it by batch");
            }
            Split::Tensor if stage.role != Role::FirstOrder => {
                return refused("only stages that learn first-order can be shared by heads and columns; share it by batch");
            }
            Split::Tensor | Split::Directions | Split::Batch => {}
        }
    }
    Ok(())
}
