//! Pipelines of equal or best min-max stages, in the devices' given order: GPipe, 1F1B and their kin, which all backpropagate everywhere.

use super::{Layout, Method, Problem, Proposal, StageLayout, split};
use crate::{
    ir::{Chain, Role},
    order::ScheduleName,
};
use zofo_hal::{Error, Result};

/// Which layers a stage gets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// As many as the others, as planners for equal devices have it.
    Equal,
    /// So that the slowest stage is as fast as can be.
    MinMax,
}

/// Devices that backpropagate, or are made to; a note on those that are left out.
pub(super) fn capable(p: &Problem) -> Result<(Vec<usize>, Vec<String>)> {
    let all = p.capable();
    if all.is_empty() {
        return Err(Error::invalid("no device can backpropagate; give one of kind `bp`, or the bp-free ones an fo_speed"));
    }
    let mut notes = Vec::new();
    let left_out: Vec<usize> = (0..p.devices()).filter(|d| !all.contains(d)).collect();
    if !left_out.is_empty() {
        notes.push(format!("without {}: bp-free, and no fo_speed says what backpropagation would cost", p.names(&left_out)));
    }
    Ok((all, notes))
}

/// As [`capable`], no more than there are layers.
pub(super) fn devices(p: &Problem) -> Result<(Vec<usize>, Vec<String>)> {
    let (mut all, mut notes) = capable(p)?;
    if all.len() > p.layers() {
        notes.push(format!("the first {} devices only: there are no more layers", p.layers()));
        all.truncate(p.layers());
    }
    Ok((all, notes))
}

/// Ends of the stages of these devices.
pub(super) fn ends(p: &Problem, devices: &[usize], cut: Cut) -> Result<Vec<usize>> {
    let (layers, stages) = (p.layers(), devices.len());
    match cut {
        Cut::Equal => Ok(split::equal(layers, stages)),
        Cut::MinMax => {
            let kept = |s: usize| (stages - s).min(p.micro_batches() as usize);
            let fits = |s: usize, l: &std::ops::Range<usize>| split::short_by(p, devices[s], l, kept(s)).is_none();
            let found = split::min_max(layers, stages, |s, l| if fits(s, l) { p.both(devices[s], l) } else { f64::INFINITY });
            // Where nothing fits, the simulation of the split that ignores memory says which device is short and by how much.
            let found = found.or_else(|| split::min_max(layers, stages, |s, l| p.both(devices[s], l)));
            found.map(|(_, ends)| ends).ok_or_else(|| Error::invalid("no split"))
        }
    }
}

/// One stage per device, all first-order.
pub(super) fn line(p: &Problem, name: ScheduleName, cut: Cut) -> Result<Proposal> {
    let (devices, notes) = devices(p)?;
    let layout = Layout::pipeline(&devices, &ends(p, &devices, cut)?, 0, &Method::FROZEN);
    Ok(Proposal { outcome: layout.simulate(p, &Method::FROZEN, name)?, method: Method::FROZEN, notes })
}

/// Everything on the fastest device that holds it.
pub(super) fn single(p: &Problem) -> Result<Proposal> {
    let all = 0..p.layers();
    let mut best: Option<Proposal> = None;
    let mut failure = Error::invalid("no device can backpropagate; give one of kind `bp`, or the bp-free ones an fo_speed");
    for d in p.capable() {
        let layout = Layout::line(vec![StageLayout::single(d, all.clone(), Role::FirstOrder)]);
        match layout.simulate(p, &Method::FROZEN, ScheduleName::Single) {
            Ok(outcome) if best.as_ref().is_none_or(|b| outcome.makespan() < b.outcome.makespan()) => {
                best = Some(Proposal { outcome, method: Method::FROZEN, notes: Vec::new() });
            }
            Ok(_) => {}
            Err(e) => failure = e,
        }
    }
    best.ok_or(failure)
}

/// Several stages of equal size on each device: as many chunks as give the best time, up to 4.
pub(super) fn interleaved(p: &Problem) -> Result<Proposal> {
    let (devices, notes) = devices(p)?;
    let workers = devices.len();
    let mut best: Option<Proposal> = None;
    let mut failure = Error::invalid("no split");
    for chunks in 1..=(p.layers() / workers).min(4) {
        let stages = workers * chunks;
        let mut first = 0;
        let stages: Vec<StageLayout> = (split::equal(p.layers(), stages).into_iter().enumerate())
            .map(|(s, end)| {
                let layers = first..end;
                first = end;
                StageLayout::single(devices[s % workers], layers, Role::FirstOrder)
            })
            .collect();
        let placement = (0..stages.len()).map(|s| s % workers).collect();
        let layout = Layout { stages, chains: Vec::new(), placement };
        match layout.simulate(p, &Method::FROZEN, ScheduleName::Interleaved) {
            Ok(outcome) if best.as_ref().is_none_or(|b| outcome.makespan() < b.outcome.makespan()) => {
                let mut notes = notes.clone();
                notes.push(format!("{chunks} stages on each device"));
                best = Some(Proposal { outcome, method: Method::FROZEN, notes });
            }
            Ok(_) => {}
            Err(e) => failure = e,
        }
    }
    best.ok_or(failure)
}

/// Two pipelines in opposite directions; of an odd number of devices the slowest is left out.
pub(super) fn chimera(p: &Problem) -> Result<Proposal> {
    let (mut devices, mut notes) = devices(p)?;
    if devices.len() % 2 == 1 {
        let slowest = (0..devices.len()).max_by(|a, b| {
            let time = |i: usize| p.both(devices[i], &(0..p.layers()));
            time(*a).total_cmp(&time(*b))
        });
        let gone = devices.remove(slowest.unwrap_or(0));
        notes.push(format!("without {}: the schedule needs an even number of devices", p.names(&[gone])));
    }
    let workers = devices.len();
    if workers == 0 {
        return Err(Error::invalid("schedule `chimera` needs two devices that backpropagate"));
    }
    let ends = split::equal(p.layers(), workers);
    let stage = |worker: usize, i: usize| {
        let first = if i == 0 { 0 } else { ends[i - 1] };
        StageLayout::single(devices[worker], first..ends[i], Role::FirstOrder)
    };
    let stages = (0..workers).map(|i| stage(i, i)).chain((0..workers).map(|i| stage(workers - 1 - i, i))).collect();
    let all = p.micro_batches();
    let down = all.div_ceil(2);
    let chains =
        vec![Chain { stages: 0..workers, micro_batches: 0..down }, Chain { stages: workers..2 * workers, micro_batches: down..all }];
    let placement = (0..workers).chain((0..workers).rev()).collect();
    let layout = Layout { stages, chains, placement };
    Ok(Proposal { outcome: layout.simulate(p, &Method::FROZEN, ScheduleName::Chimera)?, method: Method::FROZEN, notes })
}
