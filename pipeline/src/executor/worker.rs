//! A stage's worker: takes its list's actions one after the other.

use super::{Setup, Snapshot, StepInput, backpropagates, link::Links};
use crate::{
    estimator::{EstimatorName, EstimatorSpec, Scope},
    events::Span,
    ir::{Action, Group, Payload, Readout, Role, Workload},
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender},
    },
    time::Instant,
};
use zofo_hal::{
    DType, Device, Error, ErrorKind, Rehearsal, Result, TensorArg,
    op::{BoundaryDot, Copies, Form},
    perturb::{Direction, Distribution, Domain, Noise, NoiseParams, Tier},
};
use zofo_ops::{
    Runner,
    batch::{Capacity, DeviceBatch, MicroBatch},
    llama::{Importer, Input, Perturbation, RankActivations, Saved, SavedLoss, Slice, SliceSpec},
    lora::{Adapters, GradScope, HostAdapter},
    optim::{Optimiser, ZoStep},
};

/// What the coordinator tells a worker.
pub(super) enum Command {
    Step { input: Arc<StepInput>, begin: Instant },
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
    pub stage: usize,
    pub kind: ReportKind,
}

pub(super) enum ReportKind {
    Ready { activation_bytes: u64 },
    Losses { m: u32, rows: Vec<f32> },
    CopyLosses { group: Group, rows: Vec<Vec<f32>> },
    ExitLosses { group: Group, rows: Vec<Vec<f32>> },
    Dots { group: Group, values: Vec<f32> },
    AtUpdate { square_sums: Vec<f32>, oracle: Vec<f64> },
    Done { spans: Vec<Span> },
    Exported { adapter: HostAdapter, optimiser: Vec<u8> },
    Stopped,
    Failed(Error),
}

/// Everything a worker thread starts from.
pub(super) struct WorkerSetup {
    pub stage: usize,
    pub spec: SliceSpec,
    pub setup: Setup,
    pub links: Links,
    pub importer: Arc<Mutex<Importer>>,
    pub orders: Receiver<Command>,
    pub report: Sender<Report>,
}

/// The part of the model that a stage loads.
pub(super) fn slice_spec(setup: &Setup, stage: usize) -> SliceSpec {
    let mut spec = SliceSpec::new(setup.source.config(), setup.plan.stages[stage].layers.clone());
    spec.positions = setup.positions;
    spec.compute = setup.devices[stage].compute;
    spec.backward = backpropagates(setup, stage);
    spec.recompute = setup.recompute && spec.backward;
    spec.exit_head = setup.plan.schedule.workload.exit_directions > 0 && stage + 1 == setup.plan.schedule.workload.cut();
    spec
}

impl WorkerSetup {
    pub fn run(self) {
        let (stage, report) = (self.stage, self.report.clone());
        let panicked = || Error::execution("the worker panicked; this is a bug of zofo");
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.work())).unwrap_or_else(|_| Err(panicked()));
        let kind = match outcome {
            Ok(()) => ReportKind::Stopped,
            Err(e) => ReportKind::Failed(e),
        };
        // The coordinator may be gone already.
        let _ = report.send(Report { stage, kind });
    }

    fn work(self) -> Result<()> {
        let Self { stage, spec, setup, links, importer, orders, report } = self;
        let mut runner = Runner::new(setup.devices[stage].device.clone())?;
        let slice = {
            let mut importer = importer.lock().map_err(|_| Error::new(ErrorKind::Cancelled, "another stage failed to load"))?;
            Slice::load(&mut runner, &mut importer, &*setup.source, &spec)?
        };
        let mut adapters = Adapters::from_host(&mut runner, &slice, &setup.adapter)?;
        let role = setup.plan.stages[stage].role;
        let guided = setup.estimator.name == EstimatorName::Guided;
        match role {
            _ if spec.backward => adapters.enable_grads(&mut runner, GradScope::All)?,
            Role::ZerothOrder if guided => adapters.enable_grads(&mut runner, GradScope::Guided)?,
            _ => {}
        }
        let optimiser = match role {
            Role::FirstOrder => Some(Optimiser::first_order(&mut runner, &adapters, setup.first_order)?),
            Role::ZerothOrder if guided => Some(Optimiser::first_order(&mut runner, &adapters, setup.zeroth_order)?),
            Role::ZerothOrder => Some(Optimiser::zeroth_order(&mut runner, &adapters, setup.zeroth_order, factors(&setup.estimator))?),
            Role::Frozen => None,
        };
        let list = setup.plan.schedule.actions(stage).collect();
        let workload = setup.plan.schedule.workload.clone();
        let capacity = setup.capacity;
        let mut worker = Worker {
            stage,
            role,
            list,
            workload,
            estimator: setup.estimator.clone(),
            seed: setup.seed,
            runner,
            slice,
            adapters,
            optimiser,
            links,
            report,
            batches: Vec::new(),
            noise: HashMap::new(),
            state: State::default(),
            rehearsing: false,
        };
        let activation_bytes = match capacity {
            None => 0,
            Some(capacity) => {
                worker.make_room(capacity)?;
                worker.rehearse(capacity)?
            }
        };
        worker.tell(ReportKind::Ready { activation_bytes });
        worker.serve(&orders)
    }
}

fn factors(e: &EstimatorSpec) -> zofo_ops::llama::Factors {
    match e.factors {
        crate::estimator::Factors::B => zofo_ops::llama::Factors::B,
        crate::estimator::Factors::Ab => zofo_ops::llama::Factors::Ab,
    }
}

/// What a stage keeps between actions of one step.
#[derive(Default)]
struct State {
    /// Outputs of the base forward pass, until the loss or the boundary dots took them.
    base: HashMap<u32, TensorArg>,
    saved: HashMap<u32, Saved>,
    loss: HashMap<u32, SavedLoss>,
    copies: HashMap<Group, TensorArg>,
    rank: HashMap<u32, RankActivations>,
    delta: HashMap<u32, TensorArg>,
    /// Groups read at the cut.
    read: HashMap<u32, usize>,
    spans: Vec<Span>,
}

struct Worker {
    stage: usize,
    role: Role,
    list: Vec<Action>,
    workload: Workload,
    estimator: EstimatorSpec,
    seed: u64,
    runner: Runner,
    slice: Slice,
    adapters: Adapters,
    optimiser: Option<Optimiser>,
    links: Links,
    report: Sender<Report>,
    batches: Vec<DeviceBatch>,
    noise: HashMap<(Domain, Group), Perturbation>,
    state: State,
    /// Whether actions run on a stand-in for the device, so that nobody is to hear of them.
    rehearsing: bool,
}

impl Worker {
    fn tell(&self, kind: ReportKind) {
        if self.rehearsing {
            return;
        }
        // Only fails when the coordinator is gone, which the next wait for a command notices.
        let _ = self.report.send(Report { stage: self.stage, kind });
    }

    fn serve(mut self, orders: &Receiver<Command>) -> Result<()> {
        loop {
            match orders.recv() {
                Ok(Command::Step { input, begin }) => {
                    self.step(&input, begin)?;
                    let (square_sums, oracle) = self.at_update(&input)?;
                    self.tell(ReportKind::AtUpdate { square_sums, oracle });
                    let start = begin.elapsed();
                    match orders.recv() {
                        Ok(Command::Update(order)) => self.update(&input, &order)?,
                        Ok(_) => {}
                        Err(_) => return Ok(()),
                    }
                    let mut spans = std::mem::take(&mut self.state).spans;
                    spans.push(Span { action: Action::Update, start, end: begin.elapsed() });
                    self.tell(ReportKind::Done { spans });
                }
                Ok(Command::Export) => {
                    let adapter = self.adapters.to_host(&mut self.runner)?;
                    let optimiser = self.optimiser.as_ref().map(|o| o.export(&mut self.runner)).transpose()?.unwrap_or_default();
                    self.tell(ReportKind::Exported { adapter, optimiser });
                }
                Ok(Command::Import(snapshot)) => {
                    self.adapters.restore(&mut self.runner, &snapshot.adapter)?;
                    if let Some(o) = &mut self.optimiser {
                        o.import(&mut self.runner, &snapshot.optimisers[self.stage])?;
                    }
                    self.tell(ReportKind::Ready { activation_bytes: 0 });
                }
                Ok(Command::Stop) => return self.runner.close(),
                Ok(Command::Update(_) | Command::Skip) => {}
                Err(_) => return Ok(()),
            }
        }
    }

    fn step(&mut self, input: &StepInput, begin: Instant) -> Result<()> {
        self.state = State::default();
        self.upload(input)?;
        self.adapters.zero_grad(&mut self.runner)?;
        for action in self.list.clone() {
            let received = self.receive(&action)?;
            let start = begin.elapsed();
            let out = self.act(&action, input, received)?;
            self.state.spans.push(Span { action, start, end: begin.elapsed() });
            self.send(&action, out)?;
        }
        // The update waits for the coordinator and is timed on its own.
        self.state.spans.retain(|s| s.action != Action::Update);
        Ok(())
    }

    fn upload(&mut self, input: &StepInput) -> Result<()> {
        let labels: usize = input.batches.iter().map(MicroBatch::labels).sum();
        let scale = 1.0 / labels as f32;
        let held = self.batches.iter().map(DeviceBatch::capacity);
        if let Some(wanted) = input.batches.iter().map(Capacity::of).chain(held).reduce(Capacity::max) {
            self.make_room(wanted)?;
        }
        for (m, batch) in input.batches.iter().enumerate() {
            self.batches[m].upload(&mut self.runner, batch, scale)?;
        }
        Ok(())
    }

    /// One capacity for all micro-batches, so that their activations take turns in the same buffers. When it grows, those are of no more use.
    fn make_room(&mut self, capacity: Capacity) -> Result<()> {
        let count = self.workload.micro_batches as usize;
        if self.batches.len() == count && self.batches.iter().all(|b| b.capacity() == capacity) {
            return Ok(());
        }
        self.batches.clear();
        self.runner.trim();
        for _ in 0..count {
            self.batches.push(DeviceBatch::new(&mut self.runner, capacity)?);
        }
        Ok(())
    }

    /// Runs the list with micro-batches of `capacity` on a stand-in for the device; the bytes that it would allocate.
    fn rehearse(&mut self, capacity: Capacity) -> Result<u64> {
        let device = Rehearsal::new(self.runner.device().clone());
        let stand_in = Runner::new(device.clone())?;
        let real = (std::mem::replace(&mut self.runner, stand_in), std::mem::take(&mut self.batches), std::mem::take(&mut self.noise));
        self.rehearsing = true;
        // The batches themselves are on the real device by now.
        let done = self.make_room(capacity).map(|()| device.memory().in_use).and_then(|batches| {
            self.rehearse_list(capacity)?;
            Ok(device.memory().peak - batches)
        });
        self.state = State::default();
        self.rehearsing = false;
        (self.runner, self.batches, self.noise) = real;
        done
    }

    fn rehearse_list(&mut self, capacity: Capacity) -> Result<()> {
        let batch = MicroBatch::filling(capacity, self.slice.spec().positions);
        let batches = vec![batch; self.workload.micro_batches as usize];
        let input = StepInput::new(0, batches, 0.0, 0.0);
        self.upload(&input)?;
        let d = self.slice.config().hidden;
        for action in self.list.clone() {
            let blocks = match self.workload.consumes(self.stage, &action) {
                None => 0,
                Some((_, Payload::Delta { m })) if self.state.delta.contains_key(&m) => 0,
                Some((_, Payload::Hidden { .. } | Payload::Delta { .. })) => 1,
                Some((_, Payload::Copies(g) | Payload::ExitCopies(g))) => g.copies(self.workload.form).total(),
            };
            let received = (blocks > 0).then(|| Arc::new(vec![0.0; blocks * input.batches[0].rows() * d]));
            self.act(&action, &input, received)?;
        }
        // The update allocates nothing of a batch's size, and its optimiser keeps what it does allocate.
        Ok(())
    }

    /// Waits for what the action needs, except gradients that are here already.
    fn receive(&mut self, action: &Action) -> Result<Option<Arc<Vec<f32>>>> {
        match self.workload.consumes(self.stage, action) {
            None => Ok(None),
            Some((_, Payload::Delta { m })) if self.state.delta.contains_key(&m) => Ok(None),
            Some((from, payload)) => self.links.receive(from, payload).map(Some),
        }
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

    fn place(&mut self, m: u32, blocks: usize, data: &[f32]) -> Result<TensorArg> {
        let batch = &self.batches[m as usize];
        let (block, live) = (batch.block_rows(), batch.rows());
        let d = self.slice.config().hidden;
        if data.len() != blocks * live * d {
            return Err(Error::execution(format!("{} values arrived for {blocks} blocks of [{live}, {d}]", data.len())));
        }
        let t = self.runner.temp(DType::F32, blocks * block, d)?;
        for (c, chunk) in data.chunks(live * d).enumerate() {
            self.runner.upload_f32(&t.rows(c * block, live), chunk)?;
        }
        Ok(t)
    }

    fn perturbation(&mut self, domain: Domain, g: Group, step: u32) -> Result<Perturbation> {
        let m = if self.estimator.scope == Scope::MiniBatch { 0 } else { g.m };
        let eps = if g.minus { -self.estimator.eps } else { self.estimator.eps };
        let params = NoiseParams::new(self.seed, step, Direction::new(domain, m, g.q0)?, eps);
        if let Some(p) = self.noise.get(&(domain, g)) {
            p.set(&mut self.runner, &params)?;
            return Ok(p.clone());
        }
        let p = Perturbation::new(&mut self.runner, &params, factors(&self.estimator), Distribution::Gaussian)?;
        self.noise.insert((domain, g), p.clone());
        Ok(p)
    }

    /// Runs `action`; returns the tensor that its messages carry.
    fn act(&mut self, action: &Action, input: &StepInput, received: Option<Arc<Vec<f32>>>) -> Result<Option<TensorArg>> {
        match *action {
            Action::Forward { m } => self.forward(m, received).map(Some),
            Action::PerturbedForward(g) => self.perturbed(g, input.step, received).map(Some),
            Action::ExitForward(g) => self.exit(g, input.step, received).map(Some),
            Action::Loss { m } => self.loss(m).map(|()| None),
            Action::Backward { m } => self.backward(m, received),
            Action::BoundaryDot(g) => self.boundary_dot(g, received).map(|()| None),
            Action::Guide { m } => {
                let delta = self.delta(m, received)?;
                let missing = || Error::execution("nothing was kept for a guided estimate");
                let kept = self.state.rank.remove(&m).ok_or_else(missing)?;
                self.adapters.guide(&mut self.runner, &self.batches[m as usize], &delta, &kept)?;
                Ok(None)
            }
            Action::BackwardInput { .. } | Action::BackwardWeight { .. } => {
                Err(Error::unsupported("backward passes in two parts are simulated, not executed; use schedule `1f1b`"))
            }
            Action::Update => Ok(None),
        }
    }

    fn send(&mut self, action: &Action, out: Option<TensorArg>) -> Result<()> {
        let Some(out) = out else { return Ok(()) };
        let m = action.micro_batch().unwrap_or(0);
        let block = self.batches[m as usize].block_rows();
        let mut sent: Vec<(TensorArg, Arc<Vec<f32>>)> = Vec::new();
        for (to, payload) in self.workload.produces(self.stage, action) {
            // At the cut one action makes two messages: the base, and the copies without it.
            let tensor = match (action, payload) {
                (Action::PerturbedForward(_), Payload::Hidden { .. }) => out.rows(0, block),
                (Action::PerturbedForward(g), Payload::Copies(p)) if g.with_base && !p.with_base => out.rows(block, out.spec.rows - block),
                _ => out.clone(),
            };
            let same = sent.iter().find(|(t, _)| t.offset == tensor.offset && t.spec == tensor.spec).map(|(_, d)| d.clone());
            let data = match same {
                Some(data) => data,
                None => self.download(m, &tensor)?,
            };
            sent.push((tensor, data.clone()));
            self.links.send(to, payload, data)?;
        }
        Ok(())
    }

    fn forward(&mut self, m: u32, received: Option<Arc<Vec<f32>>>) -> Result<TensorArg> {
        let hidden = received.map(|data| self.place(m, 1, &data)).transpose()?;
        let start = hidden.as_ref().map_or(Input::Tokens, Input::Hidden);
        let batch = &self.batches[m as usize];
        let h = if self.slice.spec().backward {
            let input_grad = self.workload.needs_input_gradient(self.stage);
            let (h, saved) = self.slice.forward_saving(&mut self.runner, batch, &self.adapters, start, input_grad)?;
            self.state.saved.insert(m, saved);
            h
        } else {
            let mut kept = RankActivations::new();
            let guided = self.role == Role::ZerothOrder && self.workload.readout == Readout::Guide;
            let keep = guided.then_some(&mut kept);
            let h = self.slice.forward_copies(&mut self.runner, batch, &self.adapters, start, Copies::BASE, None, keep)?;
            if guided {
                self.state.rank.insert(m, kept);
            }
            h
        };
        let read_at_cut = self.workload.readout == Readout::Cut && self.workload.form == Form::Value && self.workload.estimates();
        if self.stage + 1 == self.workload.stages() || (self.stage + 1 == self.workload.cut() && read_at_cut) {
            self.state.base.insert(m, h.clone());
        }
        Ok(h)
    }

    fn copies(&mut self, domain: Domain, g: Group, step: u32, received: Option<Arc<Vec<f32>>>) -> Result<TensorArg> {
        let copies = g.copies(self.workload.form);
        let hidden = received.map(|data| self.place(g.m, copies.total(), &data)).transpose()?;
        let start = hidden.as_ref().map_or(Input::Tokens, Input::Hidden);
        // Past the cut the copies run on through adapters as they are, and a frozen stage has no direction of its own.
        let perturbation = match self.role {
            Role::ZerothOrder => Some(self.perturbation(domain, g, step)?),
            _ => None,
        };
        let batch = &self.batches[g.m as usize];
        self.slice.forward_copies(&mut self.runner, batch, &self.adapters, start, copies, perturbation.as_ref(), None)
    }

    fn perturbed(&mut self, g: Group, step: u32, received: Option<Arc<Vec<f32>>>) -> Result<TensorArg> {
        let h = self.copies(Domain::Main, g, step, received)?;
        let block = self.batches[g.m as usize].block_rows();
        if self.stage + 1 == self.workload.stages() {
            let rows = self.copy_losses(g, &h, false)?;
            self.tell(ReportKind::CopyLosses { group: g, rows });
        } else if self.stage + 1 == self.workload.cut() && self.workload.readout == Readout::Cut {
            if g.with_base && self.workload.form == Form::Value {
                self.state.base.insert(g.m, h.rows(0, block));
            }
            let copies = g.copies(self.workload.form);
            let first = copies.first_copy() * block;
            self.state.copies.insert(g, h.rows(first, h.spec.rows - first));
        }
        Ok(h)
    }

    fn exit(&mut self, g: Group, step: u32, received: Option<Arc<Vec<f32>>>) -> Result<TensorArg> {
        let h = self.copies(Domain::Exit, g, step, received)?;
        if self.stage + 1 == self.workload.cut() {
            let rows = self.copy_losses(g, &h, true)?;
            self.tell(ReportKind::ExitLosses { group: g, rows });
        }
        Ok(h)
    }

    /// Losses of each block, one per labelled row.
    fn copy_losses(&mut self, g: Group, h: &TensorArg, exit: bool) -> Result<Vec<Vec<f32>>> {
        let copies = g.copies(self.workload.form);
        let batch = &self.batches[g.m as usize];
        let out = match exit {
            true => self.slice.exit_losses(&mut self.runner, batch, h, copies)?,
            false => self.slice.loss(&mut self.runner, batch, h, copies, false)?,
        };
        let (width, labels) = (out.losses.spec.cols, batch.labels());
        Ok(self.runner.read_f32(&out.losses)?.chunks(width).map(|row| row[..labels].to_vec()).collect())
    }

    fn loss(&mut self, m: u32) -> Result<()> {
        let h = self.state.base.remove(&m).ok_or_else(|| Error::execution("a loss before its forward pass"))?;
        let batch = &self.batches[m as usize];
        let labels = batch.labels();
        let out = self.slice.loss(&mut self.runner, batch, &h, Copies::BASE, true)?;
        let mut rows = self.runner.read_f32(&out.losses)?;
        rows.truncate(labels);
        if let Some(saved) = out.saved {
            self.state.loss.insert(m, saved);
        }
        self.tell(ReportKind::Losses { m, rows });
        Ok(())
    }

    fn delta(&mut self, m: u32, received: Option<Arc<Vec<f32>>>) -> Result<TensorArg> {
        if let Some(data) = received {
            let t = self.place(m, 1, &data)?;
            self.state.delta.insert(m, t);
        }
        self.state.delta.get(&m).cloned().ok_or_else(|| Error::execution("a gradient that never came"))
    }

    fn backward(&mut self, m: u32, received: Option<Arc<Vec<f32>>>) -> Result<Option<TensorArg>> {
        let dh = match received {
            Some(data) => self.place(m, 1, &data)?,
            None => {
                let saved = self.state.loss.remove(&m).ok_or_else(|| Error::execution("a backward pass before its loss"))?;
                self.slice.loss_backward(&mut self.runner, &self.batches[m as usize], saved)?
            }
        };
        let saved = self.state.saved.remove(&m).ok_or_else(|| Error::execution("a backward pass before its forward pass"))?;
        self.slice.backward(&mut self.runner, &self.batches[m as usize], &self.adapters, saved, &dh)
    }

    fn boundary_dot(&mut self, g: Group, received: Option<Arc<Vec<f32>>>) -> Result<()> {
        let delta = self.delta(g.m, received)?;
        let missing = || Error::execution("a readout before its forward pass");
        let h = self.state.copies.remove(&g).ok_or_else(missing)?;
        let base = match self.workload.form {
            Form::Value => Some(self.state.base.get(&g.m).cloned().ok_or_else(missing)?),
            Form::Tangent => None,
        };
        let out = self.runner.temp(DType::F32, 1, g.n as usize)?;
        let live = self.batches[g.m as usize].live.clone();
        self.runner.run(BoundaryDot::new(delta, h, out.clone()).base(base).live(live))?;
        let values = self.runner.read_f32(&out)?;
        // The base is free once every group of its micro-batch has been read, those to come included.
        let read = self.state.read.entry(g.m).or_default();
        *read += 1;
        if *read == self.workload.groups(g.m).len() {
            self.state.base.remove(&g.m);
            self.state.delta.remove(&g.m);
        }
        self.tell(ReportKind::Dots { group: g, values });
        Ok(())
    }

    /// What the coordinator needs before it orders the update.
    fn at_update(&mut self, input: &StepInput) -> Result<(Vec<f32>, Vec<f64>)> {
        let square_sums = match (&self.optimiser, self.role) {
            (Some(o), Role::FirstOrder) => o.sum_squares(&mut self.runner)?,
            _ => Vec::new(),
        };
        let mut oracle = Vec::new();
        if self.estimator.name == EstimatorName::Oracle
            && self.role == Role::ZerothOrder
            && let Some(o) = &self.optimiser
        {
            oracle = vec![0.0; self.estimator.directions as usize];
            for t in o.tensors() {
                let grad = t.grad.as_ref().ok_or_else(|| Error::execution("the oracle has no exact gradient"))?;
                let [rows, cols] = grad.spec.shape();
                let grad = self.runner.read_f32(grad)?;
                let mut z = vec![0.0f32; cols];
                for (q, sum) in (0u32..).zip(&mut oracle) {
                    let direction = Direction::new(Domain::Main, 0, q)?;
                    let noise = Noise::new(self.seed, input.step, direction, t.site(Distribution::Gaussian), Tier::detect());
                    for (r, g) in grad.chunks(cols).enumerate().take(rows) {
                        noise.z_into(r as u32, 0, &mut z);
                        *sum += g.iter().zip(&z).map(|(g, z)| f64::from(*g) * f64::from(*z)).sum::<f64>();
                    }
                }
            }
        }
        Ok((square_sums, oracle))
    }

    fn update(&mut self, input: &StepInput, order: &UpdateOrder) -> Result<()> {
        let Some(optimiser) = &mut self.optimiser else { return Ok(()) };
        match self.role {
            Role::FirstOrder => optimiser.step(&mut self.runner, input.first_order_lr, order.grad_scale)?,
            Role::ZerothOrder if self.workload.readout == Readout::Guide => {
                optimiser.step(&mut self.runner, input.zeroth_order_lr, 1.0)?;
            }
            Role::ZerothOrder => {
                let noise = NoiseParams::new(self.seed, input.step, Direction::new(Domain::Main, 0, 0)?, 0.0);
                let step = ZoStep {
                    coefficients: &order.coefficients,
                    directions: &order.directions,
                    noise,
                    distribution: Distribution::Gaussian,
                };
                optimiser.step_zo(&mut self.runner, input.zeroth_order_lr, &step)?;
            }
            Role::Frozen => {}
        }
        self.runner.synchronize()
    }
}
