//! After Asteroid (Ye et al. 2024, arXiv 2408.08015): a pipeline of data-parallel groups that share micro-batches by speed and memory.

pub use super::legs::Leg;

use super::{
    Layout, Member, Problem, Proposal, Split, StageLayout, pipelines,
    ranked::{Ranked, first_fit},
    shares,
    split::{DEVICE_PARTS, LAYER_PARTS, places},
};
use crate::{ir::Role, order::ScheduleName};
use std::ops::Range;
use zofo_hal::{Error, Result};

/// Parts that a micro-batch is shared out in: costs do not say how many samples it has.
pub const PARTS: u32 = 32;
/// Parts that go from the slowest to a faster device at a time.
const BLOCK: u32 = 1;

/// A plan with the time that the planner's own formula gives it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// Groups and shares.
    pub layout: Layout,
    /// Predicted seconds of a step.
    pub latency: f64,
}

/// Predicted seconds of a step of execution and communication steps in turn (section 4.2, the latency of an HPP round): with the dominant
/// step `dm`, the last of those of largest `F + B`, `max over s of (Tw + Te + Ta)` where `Tw(s) = sum over a < s of F_a`, `Ta` is the all-reduce and
/// `Te(s) = M (F_dm + B_dm)`, and `sum over s <= a < dm of (F_a + B_a)` more in front of it, `sum over dm <= a < s` less behind it.
pub fn latency(legs: &[Leg], micro_batches: u32) -> f64 {
    let mut dominant = 0;
    for (s, leg) in legs.iter().enumerate() {
        // The last of equal ones: a pipeline of equal stages then takes its fill too.
        if leg.both() >= legs[dominant].both() {
            dominant = s;
        }
    }
    let both = |legs: &[Leg]| legs.iter().map(Leg::both).sum::<f64>();
    let (mut waiting, mut longest) = (0.0, 0.0f64);
    for (s, leg) in legs.iter().enumerate() {
        let around = if s < dominant { both(&legs[s..dominant]) } else { -both(&legs[dominant..s]) };
        let executing = f64::from(micro_batches) * legs[dominant].both() + around;
        longest = longest.max(waiting + executing + leg.all_reduce);
        waiting += leg.forward;
    }
    longest
}

/// How a group shares micro-batches of which it keeps `kept` (Algorithm 1), in [`PARTS`] parts; `None` where its memory does not hold them.
///
/// First in proportion to speed, none beyond its memory, what is left over among the others in the same way; then, as long as that makes the
/// slowest faster, a block of parts from the slowest to the one that is fastest with it.
pub fn share(p: &Problem, devices: &[usize], layers: &Range<usize>, kept: usize) -> Option<Vec<u32>> {
    let times: Vec<f64> = devices.iter().map(|d| p.both(*d, layers)).collect();
    let (state, activations) = (p.state_bytes(layers), kept as f64 * p.activation_bytes(layers));
    let most = |d: &usize| match p.device(*d).memory_bytes {
        Some(limit) if state > limit => 0,
        Some(limit) if activations > 0.0 => ((limit - state) / activations * f64::from(PARTS)).floor().min(f64::from(PARTS)) as u32,
        _ => PARTS,
    };
    let most: Vec<u32> = devices.iter().map(most).collect();
    let mut parts = shares::whole_within(PARTS, &shares::inverse(&times), &most)?;
    let time = |i: usize, parts: u32| times[i] * f64::from(parts);
    loop {
        let slowest = (0..parts.len()).max_by(|a, b| time(*a, parts[*a]).total_cmp(&time(*b, parts[*b])))?;
        let with_room = (0..parts.len()).filter(|i| *i != slowest && parts[*i] + BLOCK <= most[*i]);
        let fastest = with_room.min_by(|a, b| time(*a, parts[*a] + BLOCK).total_cmp(&time(*b, parts[*b] + BLOCK)));
        match fastest {
            Some(to) if parts[slowest] >= BLOCK && time(to, parts[to] + BLOCK) < time(slowest, parts[slowest]) => {
                parts[slowest] -= BLOCK;
                parts[to] += BLOCK;
            }
            _ => return Some(parts),
        }
    }
}

/// The best split of the last so many layers over the last so many devices.
struct Suffix {
    latency: f64,
    /// Seconds of both passes of its slowest leg.
    pace: f64,
    legs: Vec<Leg>,
    first: StageLayout,
    /// Layers and devices of the stages behind the first.
    rest: (usize, usize),
}

struct Search<'a> {
    p: &'a Problem,
    devices: Vec<usize>,
    heed_memory: bool,
    /// Seconds in which a stage has to do its work.
    below: f64,
}

impl Search<'_> {
    /// A stage that `behind` others follow: with the transfers between them `2 behind + 1` micro-batches are under way.
    fn stage(&self, layers: Range<usize>, devices: Range<usize>, behind: usize) -> Option<StageLayout> {
        let kept = (2 * behind + 1).min(self.p.micro_batches() as usize);
        let devices = &self.devices[devices];
        let parts = match self.heed_memory {
            true => share(self.p, devices, &layers, kept)?,
            false => shares::whole(PARTS, &shares::inverse(&devices.iter().map(|d| self.p.both(*d, &layers)).collect::<Vec<_>>())),
        };
        let of =
            |(device, parts): (&usize, u32)| (parts > 0).then(|| Member { device: *device, share: f64::from(parts) / f64::from(PARTS) });
        let members = devices.iter().zip(parts).filter_map(of).collect();
        Some(StageLayout::group(members, layers, Split::Batch, Role::FirstOrder))
    }

    /// The least that a stage can take for both passes of a micro-batch: all devices at once, in shares as fine as can be.
    fn least(&self, layers: &Range<usize>, devices: Range<usize>) -> f64 {
        1.0 / self.devices[devices].iter().map(|d| 1.0 / self.p.both(*d, layers)).sum::<f64>()
    }

    /// Algorithm 2: `Q(l, n, s)` is the best split of the last `l` layers over the last `n` devices in `s` stages, made of a head stage and
    /// `Q(l', n', s - 1)`. Best plan of every number of stages, best first. O(layers^2 devices^2 stages) stages.
    fn run(&self) -> Ranked<Plan> {
        let (layers, devices) = (self.p.layers(), self.devices.len());
        let at = |l: usize, n: usize| l * (devices + 1) + n;
        let mut tables: Vec<Vec<Option<Suffix>>> = Vec::new();
        let mut ranked = Ranked::new(devices);
        let mut legs = Vec::new();
        // Sizes of suffixes that are told apart.
        let suffixes = |n: usize, most: usize| places(n, most).into_iter().rev().map(|at| n - at).collect::<Vec<_>>();
        let (of_layers, of_devices) = (suffixes(layers, LAYER_PARTS), suffixes(devices, DEVICE_PARTS));
        let within = |all: &'_ Vec<usize>, from: usize, to: usize| {
            // Sizes ascend.
            let [from, to] = [from, to].map(|i| all.partition_point(|size| *size < i));
            from..to.max(from)
        };
        let pairs = |from: usize, l: usize, n: usize| {
            let (ls, ns) = (&of_layers[within(&of_layers, from, l)], &of_devices[within(&of_devices, from, n)]);
            ls.iter().flat_map(move |l| ns.iter().map(move |n| (*l, *n)))
        };
        for behind in 0..devices.min(layers) {
            let mut table: Vec<Option<Suffix>> = (0..at(layers + 1, 0)).map(|_| None).collect();
            for (l, n) in pairs(behind + 1, layers + 1, devices + 1) {
                let mut best: Option<Suffix> = None;
                let mut offer = |rest: (usize, usize), suffix: Option<&Suffix>| {
                    let (own, on) = (layers - l..layers - rest.0, devices - n..devices - rest.1);
                    // A latency is no less than all micro-batches on any one leg: most heads need not be built.
                    let least = self.least(&own, on.clone());
                    if f64::from(self.p.micro_batches()) * least >= self.below {
                        return;
                    }
                    let pace = least.max(suffix.map_or(0.0, |s| s.pace));
                    if best.as_ref().is_some_and(|b| f64::from(self.p.micro_batches()) * pace > b.latency) {
                        return;
                    }
                    let Some(head) = self.stage(own, on, behind) else { return };
                    legs.clear();
                    legs.push(Leg::stage(self.p, &head));
                    if let Some(suffix) = suffix {
                        legs.push(Leg::transfer(self.p, &head, &suffix.first));
                        legs.extend(&suffix.legs);
                    }
                    let latency = latency(&legs, self.p.micro_batches());
                    if best.as_ref().is_none_or(|b| latency < b.latency) {
                        let pace = legs.iter().map(Leg::both).fold(0.0, f64::max);
                        best = Some(Suffix { latency, pace, legs: legs.clone(), first: head, rest });
                    }
                };
                match tables.last() {
                    None => offer((0, 0), None),
                    Some(shorter) => {
                        for rest in pairs(behind, l, n) {
                            if let Some(suffix) = &shorter[at(rest.0, rest.1)] {
                                offer(rest, Some(suffix));
                            }
                        }
                    }
                }
                table[at(l, n)] = best;
            }
            tables.push(table);
            if let Some(found) = &tables[behind][at(layers, devices)] {
                ranked.offer(found.latency, || {
                    let (mut stages, mut here) = (Vec::new(), (layers, devices));
                    for table in tables.iter().rev() {
                        let suffix = table[at(here.0, here.1)].as_ref().expect("a split leads to the splits that it is made of");
                        stages.push(suffix.first.clone());
                        here = suffix.rest;
                    }
                    Plan { layout: Layout::line(stages), latency: found.latency }
                });
            }
        }
        ranked
    }
}

/// The best plan of every number of stages, best first by the planner's own formula; devices go into the pipeline by memory, largest first.
///
/// # Errors
/// `InvalidArgument` where no device can backpropagate.
pub fn plans(p: &Problem) -> Result<Vec<Plan>> {
    plans_below(p, f64::INFINITY)
}

fn plans_below(p: &Problem, below: f64) -> Result<Vec<Plan>> {
    let (mut devices, _) = pipelines::capable(p)?;
    let memory = |d: &usize| p.device(*d).memory_bytes.unwrap_or(f64::INFINITY);
    devices.sort_by(|a, b| memory(b).total_cmp(&memory(a)));
    let mut search = Search { p, devices, heed_memory: true, below };
    let mut ranked = search.run();
    if ranked.is_empty() && below.is_infinite() {
        // The simulation of a plan that ignores memory says which device is short and by how much.
        search.heed_memory = false;
        ranked = search.run();
    }
    match ranked.is_empty() {
        true => Err(Error::invalid("no split")),
        false => Ok(ranked.into_iter().collect()),
    }
}

pub(super) fn propose(p: &Problem, below: f64) -> Result<Proposal> {
    let (_, mut notes) = pipelines::capable(p)?;
    notes.push("after Asteroid, whose paper was not at hand: see docs/planners.md".into());
    first_fit(p, plans_below(p, below)?.into_iter().map(|plan| plan.layout), ScheduleName::Dapple, notes)
}
