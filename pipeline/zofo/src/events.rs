//! What a run reports while it goes on. The library does not print: an application shows these, or does not.

use std::path::PathBuf;

use zofo_pipeline::plan::Plan;

pub use zofo_pipeline::events::{Span, StepReport};

use crate::eval::Evaluation;

/// When an evaluation takes place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Before the first step, with adapters that change nothing.
    Before,
    /// After the last step.
    After,
}

/// An event of a run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The run begins, or goes on after `first_step` steps.
    Started {
        /// Who does what.
        plan: Plan,
        /// Trained values.
        parameters: usize,
        /// Training examples.
        examples: usize,
        /// Examples for evaluation.
        eval_examples: usize,
        /// Steps done before.
        first_step: u32,
        /// Steps in all.
        steps: u32,
    },
    /// The base model is on its devices: [what was read as what](crate::Model::describe_weights).
    Loaded(String),
    /// What a step will hold at its peak was planned.
    Memory {
        /// Bytes on all devices together: weights, adapters, optimisers, activations, scratch.
        planned_bytes: u64,
    },
    /// An evaluation goes on.
    Evaluating {
        /// Which one.
        when: When,
        /// Examples scored.
        done: usize,
        /// Examples in all.
        total: usize,
    },
    /// An evaluation is done.
    Evaluated {
        /// Which one.
        when: When,
        /// Its scores.
        scores: Evaluation,
    },
    /// An optimiser step is done.
    Step(StepReport),
    /// The state of the run is on disk.
    Checkpoint {
        /// Steps done.
        step: u32,
        /// Where.
        path: PathBuf,
    },
    /// Something that a user should know and no error.
    Note(String),
}

/// Who hears of events.
pub(crate) type Listener = Box<dyn FnMut(&Event) + Send>;
