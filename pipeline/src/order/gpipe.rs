//! GPipe: every stage forwards all micro-batches, then backpropagates them in the same order.

use super::forward;
use crate::ir::{Action, Credits, Schedule, Workload};

pub(super) fn order(w: &Workload) -> Schedule {
    let last = w.stages() - 1;
    let stages = (0..w.stages())
        .map(|s| {
            let mut list = Vec::new();
            for m in 0..w.micro_batches {
                forward(&mut list, m, s == last);
            }
            list.extend((0..w.micro_batches).map(|m| Action::Backward { m }));
            list.push(Action::Update);
            list
        })
        .collect();
    let m = w.micro_batches as usize;
    Schedule::one_to_one(w.clone(), stages, Credits { hidden: m, copies: 1, delta: m, awaiting: m })
}
