//! A stage on its worker: its part of the model, what it learns by, and what it keeps between the actions of a step.

mod backward;
mod forward;
mod part;

use super::{
    protocol::{ReportKind, UpdateOrder},
    reduce::Gradients,
    setup::{Setup, Snapshot, StepInput},
    worker::{OwnStage, Shared},
};
use crate::{
    estimator::{EstimatorName, EstimatorSpec},
    ir::{Action, Group, Readout, Role},
};
pub(super) use part::LayerPart;
use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};
use zofo_hal::{
    Error, Result, TensorArg,
    perturb::{Direction, Distribution, Domain, Noise, NoiseParams, Tier},
};
use zofo_ops::{
    Runner,
    llama::{Importer, Perturbation, RankActivations, Saved, SavedGradients, SavedLoss, Slice, SliceSpec},
    lora::{Adapters, GradScope, HostAdapter},
    optim::{Optimiser, ZoStep},
};

/// The part of the model that a stage loads.
pub(super) fn slice_spec(setup: &Setup, stage: usize, rank: usize) -> SliceSpec {
    let schedule = &setup.plan.schedule;
    let mut spec = SliceSpec::new(setup.source.config(), setup.plan.stages[stage].layers.clone());
    spec.positions = setup.positions;
    spec.compute = setup.devices[rank].compute;
    // By its role in the order of work: the oracle needs exact gradients of stages that learn otherwise.
    spec.backward = schedule.workload.roles[stage] == Role::FirstOrder;
    spec.recompute = setup.recompute && spec.backward;
    spec.exit_head = schedule.workload.exit_directions > 0 && stage + 1 == schedule.workload.cut();
    spec
}

fn factors(e: &EstimatorSpec) -> zofo_ops::llama::Factors {
    match e.factors {
        crate::estimator::Factors::B => zofo_ops::llama::Factors::B,
        crate::estimator::Factors::Ab => zofo_ops::llama::Factors::Ab,
    }
}

/// What a stage keeps between actions of one step.
#[derive(Default)]
struct Kept {
    /// Outputs of the base forward pass, until the loss or the boundary dots took them.
    base: HashMap<u32, TensorArg>,
    saved: HashMap<u32, Saved>,
    loss: HashMap<u32, SavedLoss>,
    /// Between the two parts of a backward pass.
    gradients: HashMap<u32, SavedGradients>,
    copies: HashMap<Group, TensorArg>,
    rank: HashMap<u32, RankActivations>,
    delta: HashMap<u32, TensorArg>,
    /// Micro-batches whose gradient at the cut has come; it is kept no longer than it is read.
    came: HashSet<u32>,
    /// Groups read at the cut.
    read: HashMap<u32, usize>,
}

/// Buffers of directions, by where they are used.
type NoiseBuffers = HashMap<(Domain, Group), Perturbation>;

/// What the coordinator needs before it orders the update.
pub(super) struct Measured {
    /// Sums of squares of the gradients, in canonical order.
    pub square_sums: Vec<f32>,
    /// Inner products of the exact gradient and each direction, for the oracle.
    pub oracle: Vec<f64>,
}

pub(super) struct Stage {
    /// Its number in the plan.
    pub index: usize,
    /// Which of the worker's divisions of micro-batches is its own.
    pub division: usize,
    role: Role,
    /// What of its layers it has, where others have the rest.
    part: Option<LayerPart>,
    slice: Slice,
    adapters: Adapters,
    optimiser: Option<Optimiser>,
    noise: NoiseBuffers,
    kept: Kept,
}

impl Stage {
    pub fn load(runner: &mut Runner, importer: &mut Importer, setup: &Setup, OwnStage { index, spec, part }: OwnStage) -> Result<Self> {
        let (slice, mut adapters) = match &part {
            None => {
                let slice = Slice::load(runner, importer, &*setup.source, &spec)?;
                let adapters = Adapters::from_host(runner, &slice, &setup.adapter)?;
                (slice, adapters)
            }
            Some(part) => part.load(runner, importer, &*setup.source, &setup.adapter, &spec)?,
        };
        let role = setup.plan.stages[index].role;
        let guided = setup.estimator.name == EstimatorName::Guided;
        match role {
            _ if spec.backward => adapters.enable_grads(runner, GradScope::All)?,
            Role::ZerothOrder if guided => adapters.enable_grads(runner, GradScope::Guided)?,
            _ => {}
        }
        let optimiser = match role {
            Role::FirstOrder => Some(Optimiser::first_order(runner, &adapters, setup.first_order)?),
            Role::ZerothOrder if guided => Some(Optimiser::first_order(runner, &adapters, setup.zeroth_order)?),
            Role::ZerothOrder => Some(Optimiser::zeroth_order(runner, &adapters, setup.zeroth_order, factors(&setup.estimator))?),
            Role::Frozen => None,
        };
        Ok(Self { index, division: 0, role, part, slice, adapters, optimiser, noise: HashMap::new(), kept: Kept::default() })
    }

    /// Nothing kept, no gradient.
    pub fn begin(&mut self, shared: &mut Shared) -> Result<()> {
        self.forget();
        self.adapters.zero_grad(&mut shared.runner)
    }

    /// Drops what a step kept.
    pub fn forget(&mut self) {
        self.kept = Kept::default();
    }

    /// Whether the gradient of `m` at the cut has come already.
    pub fn had_delta(&self, m: u32) -> bool {
        self.kept.came.contains(&m)
    }

    /// The buffers that a rehearsal must not use; it makes others.
    pub fn take_noise(&mut self) -> NoiseBuffers {
        std::mem::take(&mut self.noise)
    }

    pub fn put_noise(&mut self, noise: NoiseBuffers) {
        self.noise = noise;
    }

    /// Runs `action`; returns the tensor that its messages carry.
    pub fn act(&mut self, shared: &mut Shared, action: &Action, step: u32, received: Option<TensorArg>) -> Result<Option<TensorArg>> {
        match *action {
            Action::Forward { m } => self.forward(shared, m, received).map(Some),
            Action::PerturbedForward(g) => self.perturbed(shared, g, step, received).map(Some),
            Action::ExitForward(g) => self.exit(shared, g, step, received).map(Some),
            Action::Loss { m } => self.loss(shared, m).map(|()| None),
            Action::Backward { m } => self.backward(shared, m, received),
            Action::BoundaryDot(g) => self.boundary_dot(shared, g, received).map(|()| None),
            Action::Guide { m } => self.guide(shared, m, received).map(|()| None),
            Action::BackwardInput { m } => self.backward_input(shared, m, received),
            Action::BackwardWeight { m } => self.backward_weight(shared, m).map(|()| None),
            Action::Update => Ok(None),
        }
    }

    /// Whether actions run on a stand-in, without the other members.
    pub fn rehearse(&self, alone: bool) {
        if let Some(part) = &self.part {
            part.leave_alone(alone);
        }
    }

    /// Time that the last action waited for the other members inside its layers.
    pub fn waited(&self) -> Duration {
        self.part.as_ref().map_or(Duration::ZERO, LayerPart::waited)
    }

    /// Tells what a member of the stage found; what all of them know, one says.
    fn tell(&self, shared: &Shared, kind: ReportKind) {
        if shared.sharing.speaks(self.index, shared.rank) {
            shared.tell(kind);
        }
    }

    /// Keeps the gradient at the cut for readouts to come.
    pub fn keep_delta(&mut self, m: u32, delta: TensorArg) {
        self.kept.came.insert(m);
        self.kept.delta.insert(m, delta);
    }

    /// The gradients of its micro-batches, by tensor, where others have some of them too.
    pub fn gradients(&self, shared: &mut Shared) -> Result<Gradients> {
        let mut all = Gradients::default();
        let added = self.optimiser.iter().filter(|_| shared.sharing.adds_gradients(self.index));
        for t in added.flat_map(Optimiser::tensors) {
            if let Some(grad) = &t.grad {
                let own = shared.runner.read_f32(grad)?;
                let whole = self.part.as_ref().map(|part| part.widen(&self.adapters, t.id, &own)).transpose()?;
                all.insert(t.id, whole.unwrap_or(own));
            }
        }
        Ok(all)
    }

    /// Puts the sums of all in the place of its own gradients.
    pub fn take_gradients(&mut self, shared: &mut Shared, sums: &Gradients) -> Result<()> {
        let added = self.optimiser.iter().filter(|_| shared.sharing.adds_gradients(self.index));
        let mut square_sums = Vec::new();
        for t in added.flat_map(Optimiser::tensors) {
            if let (Some(grad), Some(sum)) = (&t.grad, sums.get(&t.id)) {
                match &self.part {
                    None => shared.runner.upload_f32(grad, sum)?,
                    Some(part) => {
                        square_sums.push(sum.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>() as f32);
                        shared.runner.upload_f32(grad, &part.narrow(&self.adapters, t.id, sum)?)?;
                    }
                }
            }
        }
        if let Some(part) = &mut self.part {
            part.square_sums = square_sums;
        }
        Ok(())
    }

    pub fn measure(&mut self, shared: &mut Shared, input: &StepInput) -> Result<Measured> {
        let square_sums = match (&self.part, &self.optimiser, self.role) {
            // Of the whole tensors, which no member has.
            (Some(part), ..) => part.square_sums.clone(),
            (None, Some(o), Role::FirstOrder) => o.sum_squares(&mut shared.runner)?,
            _ => Vec::new(),
        };
        let mut oracle = Vec::new();
        if shared.estimator.name == EstimatorName::Oracle
            && self.role == Role::ZerothOrder
            && let Some(o) = &self.optimiser
        {
            oracle = vec![0.0; shared.estimator.directions as usize];
            for t in o.tensors() {
                let grad = t.grad.as_ref().ok_or_else(|| Error::execution("the oracle has no exact gradient"))?;
                let [rows, cols] = grad.spec.shape();
                let grad = shared.runner.read_f32(grad)?;
                let mut z = vec![0.0f32; cols];
                for (q, sum) in (0u32..).zip(&mut oracle) {
                    let direction = Direction::new(Domain::Main, 0, q)?;
                    let noise = Noise::new(shared.seed, input.step, direction, t.site(Distribution::Gaussian), Tier::detect());
                    for (r, g) in grad.chunks(cols).enumerate().take(rows) {
                        noise.z_into(r as u32, 0, &mut z);
                        *sum += g.iter().zip(&z).map(|(g, z)| f64::from(*g) * f64::from(*z)).sum::<f64>();
                    }
                }
            }
        }
        Ok(Measured { square_sums, oracle })
    }

    pub fn update(&mut self, shared: &mut Shared, input: &StepInput, order: &UpdateOrder) -> Result<()> {
        let Some(optimiser) = &mut self.optimiser else { return Ok(()) };
        let runner = &mut shared.runner;
        match self.role {
            Role::FirstOrder => optimiser.step(runner, input.first_order_lr, order.grad_scale)?,
            Role::ZerothOrder if shared.workload.readout == Readout::Guide => optimiser.step(runner, input.zeroth_order_lr, 1.0)?,
            Role::ZerothOrder => {
                let noise = NoiseParams::new(shared.seed, input.step, Direction::new(Domain::Main, 0, 0)?, 0.0);
                let (coefficients, directions) = (&order.coefficients[..], &order.directions[..]);
                let step = ZoStep { coefficients, directions, noise, distribution: Distribution::Gaussian };
                optimiser.step_zo(runner, input.zeroth_order_lr, &step)?;
            }
            Role::Frozen => {}
        }
        runner.synchronize()
    }

    /// Adapters and optimiser state as they are.
    pub fn export(&self, shared: &mut Shared) -> Result<(HostAdapter, Vec<u8>)> {
        let adapter = self.adapters.to_host(&mut shared.runner)?;
        let optimiser = self.optimiser.as_ref().map(|o| o.export(&mut shared.runner)).transpose()?;
        Ok((adapter, optimiser.unwrap_or_default()))
    }

    pub fn import(&mut self, shared: &mut Shared, snapshot: &Snapshot) -> Result<()> {
        let own = self.part.as_ref().map(|part| part.adapter(&snapshot.adapter.layers(self.slice.layers()))).transpose()?;
        self.adapters.restore(&mut shared.runner, own.as_ref().unwrap_or(&snapshot.adapter))?;
        match &mut self.optimiser {
            Some(o) => o.import(&mut shared.runner, &snapshot.optimisers[shared.sharing.slot(self.index, shared.rank)]),
            None => Ok(()),
        }
    }
}
