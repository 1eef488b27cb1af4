//! Costs in the form that searches ask for: sums over ranges of layers in constant time.

use crate::{
    costs::{Costs, DeviceCosts},
    estimator::EstimatorName,
    ir::{Role, Workload},
    sim::{Link, StageTiming},
};
use std::ops::Range;
use zofo_hal::{Error, Result, op::Form};

/// How zeroth-order stages learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Method {
    /// By which estimator.
    pub estimator: EstimatorName,
    /// With how many directions for each micro-batch; 0 freezes them.
    pub directions: u32,
    /// Whether the base pass and the first directions are one action.
    pub merge_base: bool,
}

impl Method {
    /// Not at all.
    pub const FROZEN: Self = Self { estimator: EstimatorName::CutTangent, directions: 0, merge_base: true };

    /// An estimator with so many directions; tangents take their base along, differences do not.
    pub fn new(estimator: EstimatorName, directions: u32) -> Self {
        Self { estimator, directions, merge_base: estimator.form() == Form::Tangent }
    }

    /// Role of the stages in front of the cut.
    pub fn head_role(&self) -> Role {
        if self.directions == 0 { Role::Frozen } else { Role::ZerothOrder }
    }
}

/// Sums over the first so many layers.
struct Prefix(Vec<f64>);

impl Prefix {
    fn new(values: impl Iterator<Item = f64>) -> Self {
        let mut sums = vec![0.0];
        let mut sum = 0.0;
        for v in values {
            sum += v;
            sums.push(sum);
        }
        Self(sums)
    }

    fn of(&self, layers: &Range<usize>) -> f64 {
        self.0[layers.end] - self.0[layers.start]
    }
}

/// What planners plan for.
pub struct Problem {
    costs: Costs,
    native: Vec<Prefix>,
    emulated: Vec<Option<Prefix>>,
    weights: Prefix,
    trained: Prefix,
    activations: Prefix,
    /// Links from every device to every other, where there are few enough.
    links: Option<Vec<Link>>,
}

/// Links between more devices than this are looked up by name.
const TABLED: usize = 256;

impl Problem {
    /// Checks `costs` and prepares them.
    ///
    /// # Errors
    /// As [`Costs::check`].
    pub fn new(costs: Costs) -> Result<Self> {
        costs.check()?;
        if costs.estimator == Some(EstimatorName::Oracle) {
            return Err(Error::invalid("estimator `oracle` is a test tool that backpropagates everywhere; there is nothing to plan"));
        }
        let work = |speed: f64| Prefix::new(costs.layers.iter().map(move |l| l.work / speed));
        let native = costs.devices.iter().map(|d| match &d.layer_forward_s {
            Some(times) => Prefix::new(times.iter().copied()),
            None => work(d.speed),
        });
        let (native, emulated) = (native.collect(), costs.devices.iter().map(|d| d.fo_speed.map(work)).collect());
        let of = |f: fn(&crate::costs::LayerCosts) -> f64| Prefix::new(costs.layers.iter().map(f));
        let (weights, trained) = (of(|l| l.weight_bytes), of(|l| l.trainable_bytes));
        let activations = of(|l| l.activation_bytes);
        let names = || costs.devices.iter().map(|d| d.name.as_str());
        let links = (costs.devices.len() <= TABLED).then(|| {
            names().flat_map(|from| names().map(move |to| (from, to))).map(|(from, to)| costs.links.between(from, to).link()).collect()
        });
        Ok(Self { native, emulated, weights, trained, activations, links, costs })
    }

    /// The costs.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.costs.layers.len()
    }

    /// Number of devices.
    pub fn devices(&self) -> usize {
        self.costs.devices.len()
    }

    /// A device.
    pub fn device(&self, d: usize) -> &DeviceCosts {
        &self.costs.devices[d]
    }

    /// Micro-batches per step.
    pub fn micro_batches(&self) -> u32 {
        self.costs.micro_batches
    }

    /// Seconds of a forward pass of `layers` on device `d`; first-order passes of a bp-free device are at its price for that.
    pub fn forward(&self, d: usize, layers: &Range<usize>, first_order: bool) -> f64 {
        match (&self.emulated[d], first_order) {
            (Some(prefix), true) => prefix.of(layers),
            _ => self.native[d].of(layers),
        }
    }

    /// Seconds of a forward and backward pass.
    pub fn both(&self, d: usize, layers: &Range<usize>) -> f64 {
        self.forward(d, layers, true) * (1.0 + self.device(d).backward_ratio)
    }

    /// Bytes of weights, adapters and what belongs to them.
    pub fn state_bytes(&self, layers: &Range<usize>) -> f64 {
        self.weights.of(layers) + self.trained.of(layers)
    }

    /// Bytes of base weights.
    pub fn weight_bytes(&self, layers: &Range<usize>) -> f64 {
        self.weights.of(layers)
    }

    /// Bytes of gradients that replicas of `layers` exchange: a quarter of what training adds, which is parameters, gradients and two moments.
    pub fn gradient_bytes(&self, layers: &Range<usize>) -> f64 {
        self.trained.of(layers) / 4.0
    }

    /// Bytes that a micro-batch's forward pass keeps.
    pub fn activation_bytes(&self, layers: &Range<usize>) -> f64 {
        self.activations.of(layers)
    }

    /// Bytes of a micro-batch's output.
    pub fn boundary_bytes(&self, layers: &Range<usize>) -> f64 {
        self.costs.layers[layers.end - 1].boundary_bytes
    }

    /// The link from one device to another.
    pub fn link(&self, from: usize, to: usize) -> Link {
        match &self.links {
            Some(table) => table[from * self.devices() + to],
            None => self.costs.links.between(&self.device(from).name, &self.device(to).name).link(),
        }
    }

    /// Times of `layers` on device `d` alone.
    pub fn stage(&self, d: usize, layers: &Range<usize>, role: Role) -> StageTiming {
        let device = self.device(d);
        let first_order = role == Role::FirstOrder;
        let f = self.forward(d, layers, first_order);
        let weight = device.weight_gradient_ratio.unwrap_or((device.backward_ratio - 1.0).max(0.0));
        let mut t = StageTiming::default();
        t.forward = f;
        t.backward_weight = weight * f;
        t.backward_input = device.backward_ratio * f - t.backward_weight;
        (t.perturbed_alpha, t.perturbed_beta) = match device.perturbed {
            Some(p) => (p.alpha_s * layers.len() as f64, p.beta_s * layers.len() as f64),
            None => (0.0, device.perturbed_ratio * f),
        };
        t.exit = device.exit_s;
        t.state_bytes = self.state_bytes(layers);
        t.activation_bytes = self.activation_bytes(layers);
        t.boundary_bytes = self.boundary_bytes(layers);
        t
    }

    /// What a step computes on these roles by this method.
    pub fn workload(&self, roles: Vec<Role>, method: &Method) -> Workload {
        let stages = roles.len();
        let estimating = roles.contains(&Role::ZerothOrder);
        Workload {
            roles,
            directions: if estimating { method.directions } else { 0 },
            group: self.costs.group,
            form: method.estimator.form(),
            readout: method.estimator.readout(),
            exit_directions: if estimating && method.estimator == EstimatorName::EarlyExit { self.costs.exit_directions } else { 0 },
            merge_base: method.merge_base,
            ..Workload::first_order(stages, self.costs.micro_batches)
        }
    }

    /// Indices of devices that can backpropagate, at whatever price.
    pub fn capable(&self) -> Vec<usize> {
        (0..self.devices()).filter(|d| self.device(*d).can_backpropagate()).collect()
    }

    /// Names of devices, for messages.
    pub fn names(&self, devices: &[usize]) -> String {
        devices.iter().map(|d| self.device(*d).name.as_str()).collect::<Vec<_>>().join(", ")
    }
}
