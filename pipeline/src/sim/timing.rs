//! What actions take and hold.

use crate::ir::{Action, Group, Workload};
use std::collections::HashMap;
use zofo_hal::{Error, Result, op::Form};

/// What the actions of one stage take, in seconds, and what they hold, in bytes.
///
/// Of a stage that is a group of devices these are the times of the group: of its slowest member where micro-batches are shared out, with
/// the collectives that its members wait for.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct StageTiming {
    /// Forward pass of a micro-batch.
    pub forward: f64,
    /// The part of its backward pass that makes the gradient of the stage's input.
    pub backward_input: f64,
    /// The rest of its backward pass.
    pub backward_weight: f64,
    /// Perturbed copies in one action, beside what each of them takes.
    pub perturbed_alpha: f64,
    /// One perturbed copy of a micro-batch.
    pub perturbed_beta: f64,
    /// The exit head on one copy, on the last zeroth-order stage.
    pub exit: f64,
    /// Losses of a micro-batch, on the last stage.
    pub loss: f64,
    /// Readout of one copy at the cut.
    pub dot: f64,
    /// Gradient factors of one micro-batch from the gradient at the cut.
    pub guide: f64,
    /// The optimiser's step, and before it the all-reduce of replicas.
    pub update: f64,
    /// Of every forward pass of a micro-batch (or copy), what its members spend on communication: part of the times above, not of computing.
    pub forward_collective: f64,
    /// The same of a backward pass.
    pub backward_collective: f64,
    /// The same of the update.
    pub update_collective: f64,
    /// Weights, adapters, gradients and optimiser state.
    pub state_bytes: f64,
    /// What a micro-batch's forward pass keeps for its backward pass.
    pub activation_bytes: f64,
    /// The output of a micro-batch (or copy).
    pub boundary_bytes: f64,
}

impl StageTiming {
    fn copies(&self, w: &Workload, g: &Group) -> f64 {
        let base = if g.with_base || w.form == Form::Tangent { self.forward } else { 0.0 };
        base + self.perturbed_alpha + self.perturbed_beta * f64::from(g.n)
    }

    /// Seconds of `action`.
    pub fn seconds(&self, w: &Workload, last_head: bool, action: &Action) -> f64 {
        match action {
            Action::Forward { .. } => self.forward,
            Action::Loss { .. } => self.loss,
            Action::Backward { .. } => self.backward_input + self.backward_weight,
            Action::BackwardInput { .. } => self.backward_input,
            Action::BackwardWeight { .. } => self.backward_weight,
            Action::PerturbedForward(g) => self.copies(w, g),
            Action::ExitForward(g) => {
                let heads = if last_head { g.copies(w.form).total() as f64 } else { 0.0 };
                self.copies(w, g) + self.exit * heads
            }
            Action::BoundaryDot(g) => self.dot * f64::from(g.n),
            Action::Guide { .. } => self.guide,
            Action::Update => self.update,
        }
    }

    /// Of [`StageTiming::seconds`], what is communication inside the stage.
    pub fn collective(&self, w: &Workload, action: &Action) -> f64 {
        match action {
            Action::Forward { .. } => self.forward_collective,
            Action::Backward { .. } | Action::BackwardInput { .. } => self.backward_collective,
            Action::PerturbedForward(g) | Action::ExitForward(g) => self.forward_collective * g.copies(w.form).total() as f64,
            Action::Update => self.update_collective,
            Action::Loss { .. } | Action::BackwardWeight { .. } | Action::BoundaryDot(_) | Action::Guide { .. } => 0.0,
        }
    }

    fn all(&self) -> [(&'static str, f64); 17] {
        [
            ("forward", self.forward),
            ("backward_input", self.backward_input),
            ("backward_weight", self.backward_weight),
            ("perturbed_alpha", self.perturbed_alpha),
            ("perturbed_beta", self.perturbed_beta),
            ("exit", self.exit),
            ("loss", self.loss),
            ("dot", self.dot),
            ("guide", self.guide),
            ("update", self.update),
            ("forward_collective", self.forward_collective),
            ("backward_collective", self.backward_collective),
            ("update_collective", self.update_collective),
            ("state_bytes", self.state_bytes),
            ("activation_bytes", self.activation_bytes),
            ("boundary_bytes", self.boundary_bytes),
            ("sum", self.forward + self.backward_input + self.backward_weight),
        ]
    }
}

/// A link between two workers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Link {
    /// Seconds from the last byte's departure to its arrival.
    pub latency_s: f64,
    /// Bytes per second; infinite where transfers cost nothing.
    pub bytes_per_s: f64,
    /// How much of a transfer goes on beside computing, on either end: 1 all of it, 0 none (one processor does both).
    pub overlap: f64,
    /// Whether both directions share the rate.
    pub half_duplex: bool,
}

impl Default for Link {
    fn default() -> Self {
        Self { latency_s: 0.0, bytes_per_s: f64::INFINITY, overlap: 1.0, half_duplex: false }
    }
}

impl Link {
    /// Seconds that `bytes` occupy the link.
    pub fn occupancy(&self, bytes: f64) -> f64 {
        if bytes > 0.0 { bytes / self.bytes_per_s } else { 0.0 }
    }

    /// Seconds until `bytes` have arrived over a free link.
    pub fn transfer(&self, bytes: f64) -> f64 {
        self.latency_s + self.occupancy(bytes)
    }
}

/// Links between workers: one kind as a rule, others by pair.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinkTable {
    /// Between workers that no pair names.
    pub default: Link,
    /// From one worker to another.
    pub pairs: HashMap<(usize, usize), Link>,
}

impl LinkTable {
    /// The link between two workers.
    pub fn get(&self, from: usize, to: usize) -> Link {
        self.pairs.get(&(from, to)).copied().unwrap_or(self.default)
    }
}

/// Everything the simulator needs beside the order.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Timing {
    /// Per stage.
    pub stages: Vec<StageTiming>,
    /// Between workers.
    pub links: LinkTable,
    /// Sets of stages that hold the same layers: their updates wait for one another.
    pub replicas: Vec<Vec<usize>>,
}

impl Timing {
    /// These stages, with links that cost nothing.
    pub fn new(stages: Vec<StageTiming>) -> Self {
        Self { stages, ..Self::default() }
    }

    /// One second forward and two backward, one for a perturbed copy: the shape of work where nothing has been measured.
    pub fn nominal(stages: usize) -> Self {
        let one = StageTiming { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, perturbed_beta: 1.0, ..StageTiming::default() };
        Self::new(vec![one; stages])
    }

    pub(super) fn check(&self, w: &Workload, workers: usize) -> Result<()> {
        if self.stages.len() != w.stages() {
            return Err(Error::invalid(format!("times of {} stages for a schedule of {}", self.stages.len(), w.stages())));
        }
        for (s, stage) in self.stages.iter().enumerate() {
            if let Some((name, v)) = stage.all().into_iter().find(|(_, v)| !(v.is_finite() && *v >= 0.0)) {
                return Err(Error::invalid(format!("{name} of stage {s} is {v}; it must be a finite number, 0 or more")));
            }
        }
        for (pair, link) in std::iter::once((None, &self.links.default)).chain(self.links.pairs.iter().map(|(p, l)| (Some(*p), l))) {
            let sound =
                link.latency_s.is_finite() && link.latency_s >= 0.0 && link.bytes_per_s > 0.0 && (0.0..=1.0).contains(&link.overlap);
            if !sound {
                let which = pair.map_or("the links".into(), |(a, b)| format!("the link from worker {a} to {b}"));
                return Err(Error::invalid(format!(
                    "{which}: latency must be 0 s or more, the rate above 0 bytes/s, the overlap between 0 and 1; got {link:?}"
                )));
            }
        }
        if let Some(s) = self.replicas.iter().flatten().find(|s| **s >= w.stages()) {
            return Err(Error::invalid(format!("stage {s} has replicas but there are only {} stages on {workers} workers", w.stages())));
        }
        Ok(())
    }
}
