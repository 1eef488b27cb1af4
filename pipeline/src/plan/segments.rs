//! A stage whose layers are shared in two ways, as several stages of the same group.

use crate::{
    ir::{Action, Chain, Schedule, Step, Workload},
    planner::{Split, StageLayout},
};
use std::ops::Range;

/// Runs of layers that are shared in the same way.
fn runs(stage: &StageLayout) -> Vec<StageLayout> {
    if stage.split != Split::Tensor || stage.members.len() < 2 {
        return vec![stage.clone()];
    }
    let split = |layer: usize| if stage.batch_layers.contains(&layer) { Split::Batch } else { Split::Tensor };
    let mut all: Vec<StageLayout> = Vec::new();
    for layer in stage.layers.clone() {
        match all.last_mut().filter(|run| run.split == split(layer)) {
            Some(run) => run.layers.end = layer + 1,
            None => all.push(StageLayout::group(stage.members.clone(), layer..layer + 1, split(layer), stage.role)),
        }
    }
    all
}

/// Stages each shared in one way, and the order of work with every action on them in turn: forward through the first to the last, backward the other
/// way round.
pub(super) fn segment(stages: &[StageLayout], schedule: &Schedule) -> (Vec<StageLayout>, Schedule) {
    let all: Vec<Vec<StageLayout>> = stages.iter().map(runs).collect();
    if all.iter().all(|runs| runs.len() == 1) {
        return (all.into_iter().flatten().collect(), schedule.clone());
    }
    let first: Vec<usize> = (0..=all.len()).map(|s| all[..s].iter().map(Vec::len).sum()).collect();
    let new = |s: usize| first[s]..first[s + 1];
    let spread = |s: &Range<usize>| first[s.start]..first[s.end];
    let w = &schedule.workload;
    let workload = Workload {
        roles: (0..all.len()).flat_map(|s| new(s).map(move |_| w.roles[s])).collect(),
        chains: w.chains.iter().map(|c| Chain { stages: spread(&c.stages), micro_batches: c.micro_batches.clone() }).collect(),
        ..w.clone()
    };
    let placement = (0..all.len()).flat_map(|s| new(s).map(move |_| schedule.placement[s])).collect();
    let steps = |step: &Step| -> Vec<Step> {
        let (own, action) = (new(step.stage()), step.action);
        let on = |s: usize| Step::new(s, action);
        match action {
            Action::Backward { .. } | Action::BackwardInput { .. } | Action::BackwardWeight { .. } => own.rev().map(on).collect(),
            Action::Loss { .. } | Action::BoundaryDot(_) => own.last().map(on).into_iter().collect(),
            _ => own.map(on).collect(),
        }
    };
    let lists = schedule.lists.iter().map(|list| list.iter().flat_map(steps).collect()).collect();
    (all.into_iter().flatten().collect(), Schedule { workload, placement, lists, credits: schedule.credits })
}
