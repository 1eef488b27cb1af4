//! Chimera: two pipelines in opposite directions over the same workers, each with a copy of the model.

use super::{check_roles, check_size};
use crate::ir::{Action, Chain, Credits, Schedule, Step, Workload};
use zofo_hal::{Error, Result};

/// The bidirectional schedule: stage `s` of the first pipeline on worker `s`, of the second on worker `workers - 1 - s`. Half of the
/// micro-batches go down, half up.
///
/// In slots of one action, micro-batch j of a direction enters in slot 2j and moves a stage per slot, forward and then back; the two directions
/// meet in slots of unlike parity, so the merged order has no conflict. Units of as many micro-batches as there are workers follow every
/// `2 * workers` slots.
///
/// # Errors
/// `InvalidArgument` for an odd number of workers.
pub fn chimera(workers: usize, micro_batches: u32) -> Result<Schedule> {
    if workers == 0 || !workers.is_multiple_of(2) {
        return Err(Error::invalid(format!("schedule `chimera` needs an even number of stages, the cluster has {workers}")));
    }
    let down = micro_batches.div_ceil(2);
    let mut w = Workload::first_order(2 * workers, micro_batches);
    w.chains = vec![
        Chain { stages: 0..workers, micro_batches: 0..down },
        Chain { stages: workers..2 * workers, micro_batches: down..micro_batches },
    ];
    check_roles(&w)?;
    check_size(&w)?;
    let placement: Vec<usize> = (0..workers).chain((0..workers).rev()).collect();
    let mut slots: Vec<Vec<(usize, Step)>> = vec![Vec::new(); workers];
    for chain in &w.chains {
        for m in chain.micro_batches.clone() {
            let j = (m - chain.micro_batches.start) as usize;
            let (unit, k) = (j / (workers / 2), j % (workers / 2));
            let enters = unit * 2 * workers + 2 * k;
            for s in 0..workers {
                let stage = chain.stages.start + s;
                let list = &mut slots[placement[stage]];
                list.push((enters + s, Step::new(stage, Action::Forward { m })));
                if s + 1 == workers {
                    list.push((enters + s, Step::new(stage, Action::Loss { m })));
                }
                list.push((enters + 2 * workers - 1 - s, Step::new(stage, Action::Backward { m })));
            }
        }
    }
    let lists = slots
        .into_iter()
        .enumerate()
        .map(|(worker, mut list)| {
            // Stable: a loss stays behind its forward pass.
            list.sort_by_key(|(slot, _)| *slot);
            let updates = (0..2 * workers).filter(|s| placement[*s] == worker).map(|s| Step::new(s, Action::Update));
            list.into_iter().map(|(_, step)| step).chain(updates).collect()
        })
        .collect();
    let all = micro_batches as usize;
    Ok(Schedule { workload: w, placement, lists, credits: Credits { hidden: all, copies: 1, delta: all, awaiting: all } })
}
