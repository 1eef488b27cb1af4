//! A micro-batch's way through a pipeline of groups, as latency formulas see it: stages and the transfers between them, in turn.

use super::{Problem, StageLayout};
use crate::sim::Link;

/// A stage, or the transfer between two: DAPPLE's stages, Asteroid's execution and communication steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Leg {
    /// Seconds of a micro-batch's forward pass, or of its activations on the link.
    pub forward: f64,
    /// Seconds of its backward pass, or of its gradient on the link.
    pub backward: f64,
    /// Seconds of the all-reduce of gradients at the end of a step.
    pub all_reduce: f64,
}

impl Leg {
    /// Both passes.
    pub fn both(&self) -> f64 {
        self.forward + self.backward
    }

    /// A stage.
    pub(super) fn stage(p: &Problem, stage: &StageLayout) -> Self {
        let (t, _) = stage.timing(p);
        Self { forward: t.forward, backward: t.backward_input + t.backward_weight, all_reduce: t.update_collective }
    }

    /// What lies between two stages.
    pub(super) fn transfer(p: &Problem, from: &StageLayout, to: &StageLayout) -> Self {
        Self::over([from.link_to(p, to), to.link_to(p, from)], p.boundary_bytes(&from.layers))
    }

    /// So many bytes there and as many back.
    pub(super) fn over([there, back]: [Link; 2], bytes: f64) -> Self {
        Self { forward: there.transfer(bytes), backward: back.transfer(bytes), all_reduce: 0.0 }
    }
}

/// Whether every member of a stage fits with so many micro-batches kept.
pub(super) fn fits(p: &Problem, stage: &StageLayout, kept: usize) -> bool {
    stage.members.iter().all(|m| {
        let (state, share) = stage.member_bytes(p, m);
        let needed = state + share * kept as f64 * p.activation_bytes(&stage.layers);
        p.device(m.device).memory_bytes.is_none_or(|limit| needed <= limit)
    })
}
