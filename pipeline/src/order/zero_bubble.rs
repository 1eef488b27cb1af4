//! ZB-H1: backward passes in two parts; the one that nobody waits for goes where the stage would idle.

use super::forward;
use crate::ir::{Action, Credits, Schedule, Workload};

pub(super) fn order(w: &Workload) -> Schedule {
    let mut workload = w.clone();
    workload.split_backward = true;
    let (stages, all) = (w.stages() as u32, w.micro_batches);
    let lists = (0..stages)
        .map(|s| {
            let mut list = Vec::new();
            let mut forwarded = all.min(stages - s);
            (0..forwarded).for_each(|m| forward(&mut list, m, s + 1 == stages));
            // As long as fewer micro-batches than there are stages have been forwarded, weight gradients wait: their activations are what the
            // first stage of 1F1B holds too.
            let mut weighed = 0;
            for m in 0..all {
                list.push(Action::BackwardInput { m });
                if forwarded >= all.min(stages) {
                    list.push(Action::BackwardWeight { m: weighed });
                    weighed += 1;
                }
                if forwarded < all {
                    forward(&mut list, forwarded, s + 1 == stages);
                    forwarded += 1;
                }
            }
            list.extend((weighed..all).map(|m| Action::BackwardWeight { m }));
            list.push(Action::Update);
            list
        })
        .collect();
    let m = all as usize;
    Schedule::one_to_one(workload, lists, Credits { hidden: (stages as usize).min(m), copies: 1, delta: m, awaiting: m })
}
