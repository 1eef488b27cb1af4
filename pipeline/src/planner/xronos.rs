//! After Xronos (Choi et al. 2026, arXiv 2609.19909): tensor parallelism over all devices, attention heads handed out one by one.

use super::{Layout, Member, Problem, Proposal, Split, StageLayout, pipelines, ranked::first_fit};
use crate::{ir::Role, order::ScheduleName};
use zofo_hal::Result;

/// What a profile of one block says about a device: `fixed_s + per_unit_s * units` seconds for so many units.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worker {
    /// Seconds that any unit at all costs.
    pub fixed_s: f64,
    /// Seconds of each.
    pub per_unit_s: f64,
    /// Units that its memory holds.
    pub most: u32,
}

impl Worker {
    /// Seconds of so many units.
    pub fn seconds(&self, units: u32) -> f64 {
        if units == 0 { 0.0 } else { self.fixed_s + self.per_unit_s * f64::from(units) }
    }
}

/// Units of each worker such that the slowest is as fast as can be: one at a time to the worker whose time with it is smallest, the first of
/// equal ones; `None` where all memory together is short.
///
/// No assignment is better where times grow with units, which affine ones do: any other gives some worker more units than this one, and that
/// worker could have had the unit that made the slowest here, but would have been slower with it.
pub fn assign(workers: &[Worker], units: u32) -> Option<Vec<u32>> {
    let mut given = vec![0; workers.len()];
    for _ in 0..units {
        let with = |i: &usize| workers[*i].seconds(given[*i] + 1);
        let next = (0..workers.len()).filter(|i| given[*i] < workers[*i].most).min_by(|a, b| with(a).total_cmp(&with(b)))?;
        given[next] += 1;
    }
    Some(given)
}

/// The profile: of the mean layer, which stands for all.
fn workers(p: &Problem, devices: &[usize], heed_memory: bool) -> Vec<Worker> {
    let (all, units) = (0..p.layers(), f64::from(p.costs().tensor_units));
    // One micro-batch is under way at a time, and every byte is shared as the units are.
    let bytes = |n: u32| [p.state_bytes(&all), p.activation_bytes(&all)].map(|b| b * (f64::from(n) / units)).iter().sum::<f64>();
    let of = |d: &usize| {
        let limit = p.device(*d).memory_bytes.filter(|_| heed_memory).unwrap_or(f64::INFINITY);
        // The most that fits, by halving.
        let (mut most, mut too_many) = (0, p.costs().tensor_units + 1);
        while too_many - most > 1 {
            let n = most + (too_many - most) / 2;
            *if bytes(n) <= limit { &mut most } else { &mut too_many } = n;
        }
        Worker { fixed_s: 0.0, per_unit_s: p.both(*d, &all) / p.layers() as f64 / units, most }
    };
    devices.iter().map(of).collect()
}

pub(super) fn propose(p: &Problem) -> Result<Proposal> {
    let (devices, mut notes) = pipelines::capable(p)?;
    notes.push("after Xronos, whose paper was not at hand: see docs/planners.md".into());
    let units = p.costs().tensor_units;
    let given = assign(&workers(p, &devices, true), units).or_else(|| assign(&workers(p, &devices, false), units)).unwrap_or_default();
    let member = |(device, units_here): (&usize, &u32)| Member { device: *device, share: f64::from(*units_here) / f64::from(units) };
    let members: Vec<Member> = devices.iter().zip(&given).filter(|(_, n)| **n > 0).map(member).collect();
    let idle: Vec<usize> = devices.iter().zip(&given).filter(|(_, n)| **n == 0).map(|(d, _)| *d).collect();
    if !idle.is_empty() {
        notes.push(format!("without {}: too slow or too small for one unit", p.names(&idle)));
    }
    let stage = StageLayout::group(members, 0..p.layers(), Split::Tensor, Role::FirstOrder);
    first_fit(p, [Layout::line(vec![stage])], ScheduleName::Single, notes)
}
