//! What a simulation found.

use crate::ir::Step;

/// An action on the simulated clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimSpan {
    /// What was done.
    pub step: Step,
    /// Start in seconds from the step's begin; waiting is not in it.
    pub start: f64,
    /// End.
    pub end: f64,
}

/// One worker's part.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct WorkerReport {
    /// Seconds of computing.
    pub busy: f64,
    /// Of these, on perturbed copies.
    pub perturbing: f64,
    /// Seconds of communication that kept it from computing.
    pub communicating: f64,
    /// Micro-batches forwarded and not yet backpropagated, at most, over its stages.
    pub peak_in_flight: usize,
    /// Groups of perturbed outputs that waited for the gradient at the cut, at most.
    pub peak_awaiting: usize,
    /// Bytes at the peak, without [`super::StageTiming::state_bytes`]: kept activations, messages that have arrived and are still wanted,
    /// outputs that wait for the gradient at the cut.
    pub peak_dynamic_bytes: f64,
}

/// What a simulation found.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Timeline {
    /// Seconds of the whole step.
    pub makespan: f64,
    /// Per worker.
    pub workers: Vec<WorkerReport>,
    /// Per worker, in order of time; empty unless asked for.
    pub spans: Vec<Vec<SimSpan>>,
}

impl Timeline {
    /// Mean over workers of the time spent computing, over the makespan (Comu_ti of HybridOP).
    pub fn utilisation(&self) -> f64 {
        self.share(|w| w.busy)
    }

    /// As [`Timeline::utilisation`], perturbed copies not counted: more directions raise the former and are no progress in themselves.
    pub fn utilisation_without_copies(&self) -> f64 {
        self.share(|w| w.busy - w.perturbing)
    }

    fn share(&self, part: impl Fn(&WorkerReport) -> f64) -> f64 {
        match self.makespan > 0.0 && !self.workers.is_empty() {
            true => (self.workers.iter().map(part).sum::<f64>() / self.makespan / self.workers.len() as f64).min(1.0),
            false => 0.0,
        }
    }
}
