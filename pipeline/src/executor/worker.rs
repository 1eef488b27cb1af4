//! A worker: one device, one thread, and the stages that are placed on it. It goes through its list and does what the coordinator says. Where several
//! devices share the stages, each has a worker that goes through the same list and does its part.

use super::{
    link::Links,
    protocol::{Command, Report, ReportKind, UpdateOrder},
    setup::{Setup, StepInput},
    sharing::Sharing,
    stage::{LayerPart, Stage},
};
use crate::{
    estimator::EstimatorSpec,
    events::Span,
    ir::{Action, Payload, Step, Workload},
    plan::describe_stages,
};
use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender},
    },
    time::{Duration, Instant},
};
use zofo_hal::{Error, ErrorKind, Result, TensorArg};
use zofo_ops::{
    Runner,
    batch::{Capacity, DeviceBatch, MicroBatch},
    llama::{Importer, SliceSpec},
};

/// An error, and the stage that it is of where it is not the whole worker's.
pub(super) struct Failure {
    stage: Option<usize>,
    error: Error,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { stage: None, error }
    }
}

fn at(stage: usize) -> impl FnOnce(Error) -> Failure {
    move |error| Failure { stage: Some(stage), error }
}

pub(super) type Outcome<T> = std::result::Result<T, Failure>;

/// A stage that a worker is to load.
pub(super) struct OwnStage {
    pub index: usize,
    /// Its part of the model.
    pub spec: SliceSpec,
    /// What of its layers it has, where others have the rest.
    pub part: Option<LayerPart>,
}

/// Everything a worker thread starts from.
pub(super) struct WorkerSetup {
    /// Its number among the plan's devices.
    pub rank: usize,
    /// The list that it goes through.
    pub list: Vec<Step>,
    /// The stages that are placed on it.
    pub stages: Vec<OwnStage>,
    pub setup: Setup,
    pub sharing: Arc<Sharing>,
    pub links: Links,
    pub importer: Arc<Mutex<Importer>>,
    pub orders: Receiver<Command>,
    pub report: Sender<Report>,
}

impl WorkerSetup {
    pub fn run(self) {
        let (rank, report) = (self.rank, self.report.clone());
        let device = self.setup.plan.devices().get(rank).map_or_else(String::new, |d| (*d).to_owned());
        let own: Vec<usize> = self.stages.iter().map(|s| s.index).collect();
        let panicked = || Err(Error::execution("the worker panicked; this is a bug of zofo").into());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.work())).unwrap_or_else(|_| panicked());
        let kind = match outcome {
            Ok(()) => ReportKind::Stopped,
            Err(Failure { stage, error }) => ReportKind::Failed(error.context(describe_stages(&stage.map_or(own, |s| vec![s]), &device))),
        };
        // The coordinator may be gone already.
        let _ = report.send(Report { rank, kind });
    }

    fn work(self) -> Outcome<()> {
        let Self { rank, list, stages, setup, sharing, links, importer, orders, report } = self;
        let mut runner = Runner::new(setup.devices[rank].device.clone())?;
        let mut loaded: Vec<Stage> = Vec::with_capacity(stages.len());
        // A stage of each way in which micro-batches are divided.
        let mut divisions: Vec<usize> = Vec::new();
        for own in stages {
            let index = own.index;
            let mut importer = importer.lock().map_err(|_| Error::new(ErrorKind::Cancelled, "another worker failed to load"))?;
            let mut stage = Stage::load(&mut runner, &mut importer, &setup, own).map_err(at(index))?;
            stage.division = divisions.iter().position(|d| sharing.same_rows(*d, index)).unwrap_or_else(|| {
                divisions.push(index);
                divisions.len() - 1
            });
            loaded.push(stage);
        }
        let mut worker = Worker {
            stages: loaded,
            list,
            links,
            handed_over: HashMap::new(),
            spans: Vec::new(),
            hidden: setup.source.config().hidden,
            positions: setup.positions,
            shared: Shared {
                runner,
                batches: vec![Vec::new(); divisions.len()],
                divisions,
                workload: setup.plan.schedule.workload.clone(),
                sharing,
                estimator: setup.estimator.clone(),
                seed: setup.seed,
                rank,
                report,
                rehearsing: false,
            },
        };
        let activation_bytes = match setup.capacity {
            None => 0,
            Some(capacity) => {
                let capacities = worker.capacities(capacity);
                worker.make_room(&capacities)?;
                worker.rehearse(&capacities)?
            }
        };
        worker.shared.tell(ReportKind::Ready { activation_bytes });
        worker.serve(&orders)
    }
}

/// What the stages of a worker have in common.
pub(super) struct Shared {
    pub runner: Runner,
    /// The worker's part of the step's micro-batches, in each way that its stages divide them.
    pub batches: Vec<Vec<DeviceBatch>>,
    /// A stage that divides them so.
    pub divisions: Vec<usize>,
    pub workload: Workload,
    pub sharing: Arc<Sharing>,
    pub estimator: EstimatorSpec,
    pub seed: u64,
    /// The device's number among the plan's.
    pub rank: usize,
    report: Sender<Report>,
    /// Whether actions run on a stand-in for the device, so that nobody is to hear of them.
    pub rehearsing: bool,
}

impl Shared {
    pub fn tell(&self, kind: ReportKind) {
        if self.rehearsing {
            return;
        }
        // Only fails when the coordinator is gone, which the next wait for a command notices.
        let _ = self.report.send(Report { rank: self.rank, kind });
    }
}

pub(super) struct Worker {
    pub stages: Vec<Stage>,
    list: Vec<Step>,
    pub links: Links,
    /// Messages between the worker's own stages, where they lie on the device. Nobody waits for one: the list has its sender first.
    pub handed_over: HashMap<(usize, usize, Payload), TensorArg>,
    spans: Vec<Span>,
    /// Width of hidden states.
    pub hidden: usize,
    /// Tokens of the longest sequence.
    pub positions: usize,
    pub shared: Shared,
}

impl Worker {
    fn serve(mut self, orders: &Receiver<Command>) -> Outcome<()> {
        loop {
            match orders.recv() {
                Ok(Command::Step { input, begin }) => {
                    self.step(&input, begin)?;
                    if self.shared.sharing.any_adds_gradients() {
                        let gradients = self.each(|stage, shared| stage.gradients(shared))?;
                        self.shared.tell(ReportKind::Gradients(gradients));
                        let Ok(Command::Reduced(sums)) = orders.recv() else { return Ok(()) };
                        self.each(|stage, shared| stage.take_gradients(shared, &sums))?;
                    }
                    let measured = self.each(|stage, shared| stage.measure(shared, &input))?;
                    self.shared.tell(ReportKind::AtUpdate(measured));
                    match orders.recv() {
                        Ok(Command::Update(order)) => self.update(&input, &order, begin)?,
                        Ok(_) => {}
                        Err(_) => return Ok(()),
                    }
                    self.stages.iter_mut().for_each(Stage::forget);
                    self.shared.tell(ReportKind::Done { spans: std::mem::take(&mut self.spans) });
                }
                Ok(Command::Export) => {
                    let exported = self.each(|stage, shared| stage.export(shared))?;
                    let exported = exported.into_iter().map(|(s, (adapter, optimiser))| (s, adapter, optimiser));
                    self.shared.tell(ReportKind::Exported(exported.collect()));
                }
                Ok(Command::Import(snapshot)) => {
                    self.each(|stage, shared| stage.import(shared, &snapshot))?;
                    self.shared.tell(ReportKind::Ready { activation_bytes: 0 });
                }
                Ok(Command::Stop) => return Ok(self.shared.runner.close()?),
                Ok(Command::Reduced(_) | Command::Update(_) | Command::Skip) => {}
                Err(_) => return Ok(()),
            }
        }
    }

    /// Does something with every stage; what it gives, with the stage's number.
    fn each<T>(&mut self, mut f: impl FnMut(&mut Stage, &mut Shared) -> Result<T>) -> Outcome<Vec<(usize, T)>> {
        let shared = &mut self.shared;
        self.stages.iter_mut().map(|stage| Ok((stage.index, f(stage, shared).map_err(at(stage.index))?))).collect()
    }

    fn step(&mut self, input: &StepInput, begin: Instant) -> Outcome<()> {
        self.handed_over.clear();
        self.spans.clear();
        self.upload(input)?;
        self.each(|stage, shared| stage.begin(shared))?;
        self.follow(input, begin)
    }

    /// Goes through the list.
    pub fn follow(&mut self, input: &StepInput, begin: Instant) -> Outcome<()> {
        for i in 0..self.list.len() {
            let step = self.list[i];
            // All updates wait for the coordinator, and are timed on their own.
            if step.action != Action::Update {
                self.take(step, input, begin).map_err(at(step.stage()))?;
            }
        }
        Ok(())
    }

    fn take(&mut self, step: Step, input: &StepInput, begin: Instant) -> Result<()> {
        let position = self.stages.iter().position(|s| s.index == step.stage());
        let position = position.ok_or_else(|| Error::invalid(format!("stage {} is not on this worker", step.stage)))?;
        // A member that has no part in an action still takes what comes for it, as the order of messages is that of the list.
        let received = self.receive(position, &step.action, input)?;
        let stage = &mut self.stages[position];
        let m = step.action.micro_batch().unwrap_or(0);
        let has_rows = self.shared.batches[stage.division][m as usize].rows() > 0;
        let Some(own) = self.shared.sharing.narrow(step.stage(), self.shared.rank, &step.action).filter(|_| has_rows) else {
            received.into_iter().for_each(|delta| stage.keep_delta(m, delta));
            return Ok(());
        };
        let start = begin.elapsed();
        let out = stage.act(&mut self.shared, &own, input.step, received)?;
        let waiting = stage.waited();
        self.spans.push(Span { step: Step { action: own, ..step }, start, end: begin.elapsed(), waiting });
        match out {
            Some(out) => self.send(position, &step.action, &own, &out, input),
            None => Ok(()),
        }
    }

    fn update(&mut self, input: &StepInput, order: &UpdateOrder, begin: Instant) -> Outcome<()> {
        let spans = self.each(|stage, shared| {
            let start = begin.elapsed();
            stage.update(shared, input, order)?;
            Ok(Span { step: Step::new(stage.index, Action::Update), start, end: begin.elapsed(), waiting: Duration::ZERO })
        })?;
        self.spans.extend(spans.into_iter().map(|(_, span)| span));
        Ok(())
    }

    /// Puts the device's part of every micro-batch where its stages find it.
    fn upload(&mut self, input: &StepInput) -> Result<()> {
        let scale = 1.0 / input.labels() as f32;
        let (sharing, rank) = (self.shared.sharing.clone(), self.shared.rank);
        let mut capacities = Vec::new();
        let mut parts: Vec<Vec<Cow<'_, MicroBatch>>> = Vec::new();
        for (stage, held) in self.shared.divisions.iter().zip(&self.shared.batches) {
            let part = |batch: &'_ MicroBatch| {
                let own = sharing.sequences(*stage, rank, &batch.cu_seqlens);
                (own != (0..batch.sequences())).then(|| batch.part(own))
            };
            let own: Vec<_> = input.batches.iter().map(|b| part(b).map_or(Cow::Borrowed(b), Cow::Owned)).collect();
            let held = held.iter().map(DeviceBatch::capacity);
            capacities.extend(own.iter().map(|b| Capacity::of(b)).chain(held).reduce(Capacity::max));
            parts.push(own);
        }
        self.make_room(&capacities)?;
        for (division, parts) in parts.iter().enumerate() {
            self.fill(division, parts.iter().map(|b| &**b), scale)?;
        }
        Ok(())
    }

    pub fn fill<'b>(&mut self, division: usize, parts: impl Iterator<Item = &'b MicroBatch>, scale: f32) -> Result<()> {
        let Shared { runner, batches, .. } = &mut self.shared;
        batches[division].iter_mut().zip(parts).try_for_each(|(to, batch)| to.upload(runner, batch, scale))
    }
}
