//! What a run reports while it goes on. Libraries do not print: an application shows these, or does not.

use crate::ir::Step;
use std::time::Duration;

/// An event of a training run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// An optimiser step is done.
    Step(StepReport),
    /// The adapters and the optimiser's state are on disk.
    Checkpoint {
        /// Steps done.
        step: u32,
        /// Where.
        path: std::path::PathBuf,
    },
    /// Something that a user should know and no error.
    Note(String),
}

/// One optimiser step.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StepReport {
    /// Its number, from 0.
    pub step: u32,
    /// Mean loss over labelled tokens, at the parameters before the update.
    pub loss: f64,
    /// Labelled tokens.
    pub labels: usize,
    /// Sequences.
    pub samples: usize,
    /// Tokens.
    pub tokens: usize,
    /// Norm of the first-order gradient before clipping, where there is one.
    pub gradient_norm: Option<f64>,
    /// Root mean square of the slopes along the directions, where there are any.
    pub slope_rms: Option<f64>,
    /// Wall-clock time.
    pub seconds: f64,
    /// Per device of the plan: what it did and when.
    pub timeline: Vec<Vec<Span>>,
}

impl StepReport {
    /// Mean over devices of the time spent computing, over the step's time (Comu_ti of HybridOP, communication excluded).
    pub fn utilisation(&self) -> f64 {
        if self.timeline.is_empty() || self.seconds <= 0.0 {
            return 0.0;
        }
        let busy: f64 = self.timeline.iter().flatten().map(|s| s.busy().as_secs_f64()).sum();
        busy / self.seconds / self.timeline.len() as f64
    }
}

/// An action on the clock, from the step's start; waiting for messages is not in it.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// What was done.
    pub step: Step,
    /// When it began.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
    /// Time of that in which the device waited for others inside the layers that they share.
    pub waiting: Duration,
}

impl Span {
    /// Time of computing.
    pub fn busy(&self) -> Duration {
        (self.end - self.start).saturating_sub(self.waiting)
    }
}
