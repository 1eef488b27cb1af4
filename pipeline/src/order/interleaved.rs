//! Interleaved 1F1B: every worker has several stages, a `workers`-th of the pipeline apart.

use super::{check_roles, check_size};
use crate::ir::{Action, Credits, Schedule, Step, Workload};
use zofo_hal::{Error, Result};

/// Megatron-LM's interleaved schedule: `chunks` stages per worker, stage `c * workers + r` on worker `r`.
///
/// Micro-batches go through the chunks in groups of as many as there are workers; the last group may be smaller, so their number need not be
/// a multiple.
///
/// # Errors
/// `InvalidArgument` for no worker, chunk or micro-batch.
pub fn interleaved(workers: usize, chunks: usize, micro_batches: u32) -> Result<Schedule> {
    if workers == 0 || chunks == 0 {
        return Err(Error::invalid(format!("{chunks} stages on each of {workers} workers; both must be at least 1")));
    }
    let w = Workload::first_order(workers * chunks, micro_batches);
    check_roles(&w)?;
    check_size(&w)?;
    let (p, all) = (workers, micro_batches as usize);
    // (chunk, micro-batch) in the order of forward passes; backward passes take the chunks from the last.
    let order: Vec<(usize, u32)> = (0..micro_batches)
        .step_by(p)
        .flat_map(|first| {
            let group = first..micro_batches.min(first + p as u32);
            (0..chunks).flat_map(move |c| group.clone().map(move |m| (c, m)))
        })
        .collect();
    let lists = (0..p)
        .map(|rank| {
            let mut list = Vec::new();
            let forward = |list: &mut Vec<Step>, k: usize| {
                let (c, m) = order[k];
                list.push(Step::new(c * p + rank, Action::Forward { m }));
                if c + 1 == chunks && rank + 1 == p {
                    list.push(Step::new(c * p + rank, Action::Loss { m }));
                }
            };
            // One less than what is under way at most: the steady state forwards before it backpropagates.
            let warmup = (2 * (p - rank - 1) + (chunks - 1) * p).min(order.len());
            // A last group that is not full comes back late: nothing may be waited for that has not been sent.
            let warmup = if all % p != 0 { (warmup + (p - all % p)).min(order.len()) } else { warmup };
            (0..warmup).for_each(|k| forward(&mut list, k));
            for (k, (c, m)) in order.iter().enumerate() {
                if warmup + k < order.len() {
                    forward(&mut list, warmup + k);
                }
                list.push(Step::new((chunks - 1 - c) * p + rank, Action::Backward { m: *m }));
            }
            list.extend((0..chunks).map(|c| Step::new(c * p + rank, Action::Update)));
            list
        })
        .collect();
    let placement = (0..w.stages()).map(|s| s % p).collect();
    let credits = Credits { hidden: all, copies: 1, delta: all, awaiting: all };
    Ok(Schedule { workload: w, placement, lists, credits })
}
