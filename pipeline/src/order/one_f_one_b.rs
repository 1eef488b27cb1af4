//! One forward, one backward.

use super::forward;
use crate::{
    ir::{Action, Credits, Schedule, Workload},
    sim::Timing,
};

/// How many micro-batches a stage forwards before its first backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Warmup {
    /// As many as there are stages from it to the end: the least that keeps equal stages busy (PipeDream-Flush; DAPPLE's policy A).
    Depth,
    /// Twice that less one, which hides transfers that take as long as stages (DAPPLE's policy B).
    Twice,
}

impl Warmup {
    /// DAPPLE's choice: policy B where sending activations takes longer than the slower of two neighbours computes on them.
    pub fn for_links(timing: &Timing) -> Self {
        let slow = timing.stages.windows(2).enumerate().any(|(s, pair)| {
            let sent = timing.links.get(s, s + 1).transfer(pair[0].boundary_bytes);
            sent > pair[0].forward.max(pair[1].forward)
        });
        if slow { Self::Twice } else { Self::Depth }
    }

    fn count(self, stages: usize, stage: usize, micro_batches: usize) -> usize {
        let depth = stages - stage;
        micro_batches.min(match self {
            Self::Depth => depth,
            Self::Twice => 2 * depth - 1,
        })
    }
}

pub(super) fn order(w: &Workload, warmup: Warmup) -> Schedule {
    let (stages, all) = (w.stages(), w.micro_batches);
    let lists = (0..stages)
        .map(|s| {
            let mut list = Vec::new();
            let ahead = warmup.count(stages, s, all as usize) as u32;
            (0..ahead).for_each(|m| forward(&mut list, m, s + 1 == stages));
            for m in 0..all {
                list.push(Action::Backward { m });
                if m + ahead < all {
                    forward(&mut list, m + ahead, s + 1 == stages);
                }
            }
            list.push(Action::Update);
            list
        })
        .collect();
    let ahead = warmup.count(stages, 0, all as usize).max(1);
    Schedule::one_to_one(w.clone(), lists, Credits { hidden: ahead, copies: 1, delta: all as usize, awaiting: all as usize })
}
