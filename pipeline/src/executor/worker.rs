//! A worker: one device, one thread, and the stages that are placed on it. It goes through its list and does what the coordinator says.

use super::{
    link::Links,
    protocol::{Command, Report, ReportKind, UpdateOrder},
    setup::{Setup, StepInput},
    stage::Stage,
};
use crate::{
    estimator::EstimatorSpec,
    events::Span,
    ir::{Action, Payload, Step, Workload},
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender},
    },
    time::Instant,
};
use zofo_hal::{DType, Error, ErrorKind, Result, TensorArg};
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

/// Everything a worker thread starts from.
pub(super) struct WorkerSetup {
    pub worker: usize,
    /// The stages that are placed on it, and the parts of the model that they load.
    pub stages: Vec<(usize, SliceSpec)>,
    pub setup: Setup,
    pub links: Links,
    pub importer: Arc<Mutex<Importer>>,
    pub orders: Receiver<Command>,
    pub report: Sender<Report>,
}

impl WorkerSetup {
    pub fn run(self) {
        let (worker, report) = (self.worker, self.report.clone());
        let (plan, own) = (self.setup.plan.clone(), self.stages.iter().map(|(s, _)| *s).collect::<Vec<_>>());
        let panicked = || Err(Error::execution("the worker panicked; this is a bug of zofo").into());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.work())).unwrap_or_else(|_| panicked());
        let kind = match outcome {
            Ok(()) => ReportKind::Stopped,
            Err(Failure { stage, error }) => ReportKind::Failed(error.context(plan.describe_stages(&stage.map_or(own, |s| vec![s])))),
        };
        // The coordinator may be gone already.
        let _ = report.send(Report { worker, kind });
    }

    fn work(self) -> Outcome<()> {
        let Self { worker, stages, setup, links, importer, orders, report } = self;
        let schedule = &setup.plan.schedule;
        let mut runner = Runner::new(setup.devices[worker].device.clone())?;
        let mut loaded = Vec::with_capacity(stages.len());
        for (index, spec) in stages {
            let mut importer = importer.lock().map_err(|_| Error::new(ErrorKind::Cancelled, "another worker failed to load"))?;
            loaded.push(Stage::load(&mut runner, &mut importer, &setup, index, &spec).map_err(at(index))?);
        }
        let mut worker = Worker {
            stages: loaded,
            list: schedule.lists[worker].clone(),
            placement: schedule.placement.clone(),
            links,
            handed_over: HashMap::new(),
            spans: Vec::new(),
            hidden: setup.source.config().hidden,
            positions: setup.positions,
            shared: Shared {
                runner,
                batches: Vec::new(),
                workload: schedule.workload.clone(),
                estimator: setup.estimator.clone(),
                seed: setup.seed,
                worker,
                report,
                rehearsing: false,
            },
        };
        let activation_bytes = match setup.capacity {
            None => 0,
            Some(capacity) => {
                worker.make_room(capacity)?;
                worker.rehearse(capacity)?
            }
        };
        worker.shared.tell(ReportKind::Ready { activation_bytes });
        worker.serve(&orders)
    }
}

/// What the stages of a worker have in common.
pub(super) struct Shared {
    pub runner: Runner,
    /// The step's micro-batches.
    pub batches: Vec<DeviceBatch>,
    pub workload: Workload,
    pub estimator: EstimatorSpec,
    pub seed: u64,
    worker: usize,
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
        let _ = self.report.send(Report { worker: self.worker, kind });
    }

    /// Live rows of every block as one vector.
    fn download(&mut self, m: u32, t: &TensorArg) -> Result<Arc<Vec<f32>>> {
        let batch = &self.batches[m as usize];
        let (block, live) = (batch.block_rows(), batch.rows());
        let mut data = Vec::with_capacity(t.spec.rows / block * live * t.spec.cols);
        for c in 0..t.spec.rows / block {
            data.extend(self.runner.read_f32(&t.rows(c * block, live))?);
        }
        Ok(Arc::new(data))
    }

    fn place(&mut self, m: u32, blocks: usize, cols: usize, data: &[f32]) -> Result<TensorArg> {
        let batch = &self.batches[m as usize];
        let (block, live) = (batch.block_rows(), batch.rows());
        if data.len() != blocks * live * cols {
            return Err(Error::execution(format!("{} values arrived for {blocks} blocks of [{live}, {cols}]", data.len())));
        }
        let t = self.runner.temp(DType::F32, blocks * block, cols)?;
        for (c, chunk) in data.chunks(live * cols).enumerate() {
            self.runner.upload_f32(&t.rows(c * block, live), chunk)?;
        }
        Ok(t)
    }
}

pub(super) struct Worker {
    pub stages: Vec<Stage>,
    list: Vec<Step>,
    /// Worker of each stage of the pipeline.
    placement: Vec<usize>,
    links: Links,
    /// Messages between the worker's own stages, where they lie on the device. Nobody waits for one: the list has its sender first.
    pub handed_over: HashMap<(usize, usize, Payload), TensorArg>,
    spans: Vec<Span>,
    /// Width of hidden states.
    hidden: usize,
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
                    if !self.shared.workload.chains.is_empty() {
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
        let Step { action, .. } = step;
        let position = self.stages.iter().position(|s| s.index == step.stage());
        let position = position.ok_or_else(|| Error::invalid(format!("stage {} is not on this worker", step.stage)))?;
        let received = self.receive(position, &action, input)?;
        let start = begin.elapsed();
        let out = self.stages[position].act(&mut self.shared, &action, input.step, received)?;
        self.spans.push(Span { step, start, end: begin.elapsed() });
        match out {
            Some(out) => self.send(step.stage(), &action, &out),
            None => Ok(()),
        }
    }

    /// Waits for what the action needs, except gradients that are here already.
    fn receive(&mut self, position: usize, action: &Action, input: &StepInput) -> Result<Option<TensorArg>> {
        let stage = &self.stages[position];
        let to = stage.index;
        let Some((from, payload)) = self.shared.workload.consumes(to, action) else { return Ok(None) };
        let (m, blocks) = match payload {
            Payload::Delta { m } if stage.has_delta(m) => return Ok(None),
            Payload::Hidden { m } | Payload::Delta { m } => (m, 1),
            Payload::Copies(g) | Payload::ExitCopies(g) => (g.m, g.copies(self.shared.workload.form).total()),
        };
        if self.placement[from] == self.placement[to] {
            let missing = || Error::execution(format!("{payload:?} of stage {from} is not there yet"));
            return self.handed_over.remove(&(from, to, payload)).ok_or_else(missing).map(Some);
        }
        let data = match self.shared.rehearsing {
            true => Arc::new(vec![0.0; blocks * input.batches[m as usize].rows() * self.hidden]),
            false => self.links.receive(from, to, payload)?,
        };
        self.shared.place(m, blocks, self.hidden, &data).map(Some)
    }

    fn send(&mut self, from: usize, action: &Action, out: &TensorArg) -> Result<()> {
        let m = action.micro_batch().unwrap_or(0);
        let block = self.shared.batches[m as usize].block_rows();
        let mut sent: Vec<(TensorArg, Arc<Vec<f32>>)> = Vec::new();
        for (to, payload) in self.shared.workload.produces(from, action) {
            // At the cut one action makes two messages: the base, and the copies without it.
            let tensor = match (action, payload) {
                (Action::PerturbedForward(_), Payload::Hidden { .. }) => out.rows(0, block),
                (Action::PerturbedForward(g), Payload::Copies(p)) if g.with_base && !p.with_base => out.rows(block, out.spec.rows - block),
                _ => out.clone(),
            };
            if self.placement[from] == self.placement[to] {
                self.handed_over.insert((from, to, payload), tensor);
                continue;
            }
            if self.shared.rehearsing {
                continue;
            }
            let same = sent.iter().find(|(t, _)| t.offset == tensor.offset && t.spec == tensor.spec).map(|(_, d)| d.clone());
            let data = match same {
                Some(data) => data,
                None => self.shared.download(m, &tensor)?,
            };
            sent.push((tensor, data.clone()));
            self.links.send(from, to, payload, data)?;
        }
        Ok(())
    }

    fn update(&mut self, input: &StepInput, order: &UpdateOrder, begin: Instant) -> Outcome<()> {
        let spans = self.each(|stage, shared| {
            let start = begin.elapsed();
            stage.update(shared, input, order)?;
            Ok(Span { step: Step::new(stage.index, Action::Update), start, end: begin.elapsed() })
        })?;
        self.spans.extend(spans.into_iter().map(|(_, span)| span));
        Ok(())
    }

    pub fn upload(&mut self, input: &StepInput) -> Result<()> {
        let scale = 1.0 / input.labels() as f32;
        let held = self.shared.batches.iter().map(DeviceBatch::capacity);
        if let Some(wanted) = input.batches.iter().map(Capacity::of).chain(held).reduce(Capacity::max) {
            self.make_room(wanted)?;
        }
        let Shared { runner, batches, .. } = &mut self.shared;
        batches.iter_mut().zip(&input.batches).try_for_each(|(to, batch): (_, &MicroBatch)| to.upload(runner, batch, scale))
    }
}
