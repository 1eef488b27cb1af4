//! After DAPPLE (Fan et al. 2021, arXiv 2007.01045): a pipeline whose stages are data-parallel groups of consecutive devices, shared evenly.
//!
//! Equal devices are assumed inside a group: each takes 1/g of every micro-batch, so the slowest sets the pace.

pub use super::legs::Leg;

use super::{
    Layout, Member, Problem, Proposal, Split, StageLayout,
    layout::worst,
    legs::fits,
    nothing_in_time, pipelines,
    ranked::{Ranked, drop_smallest, first_fit},
    split::{DEVICE_PARTS, LAYER_PARTS, places},
};
use crate::{ir::Role, order::ScheduleName, sim::Link};
use std::{collections::HashMap, ops::Range};
use zofo_hal::Result;

/// Splits that are handed to the simulator at most, should the best ones not fit.
const CANDIDATES: usize = 32;

/// The leg that a step spends its steady phase on: `Q = S - 1`, then from the last to the first `Q = s` where
/// `(M - 1)(F_s + B_s) > (M - 1)(F_Q + B_Q) + sum over s < a < Q of (F_a + B_a)` (section 4.2).
pub fn pivot(legs: &[Leg], micro_batches: u32) -> usize {
    let more = f64::from(micro_batches.saturating_sub(1));
    let mut pivot = legs.len().saturating_sub(1);
    for s in (0..pivot).rev() {
        let between: f64 = legs[s + 1..pivot.max(s + 1)].iter().map(Leg::both).sum();
        if more * legs[s].both() > more * legs[pivot].both() + between {
            pivot = s;
        }
    }
    pivot
}

/// Predicted seconds of a step, `L = Tw + Ts + Te` (section 4.2, equations 1 to 4): with the pivot Q
/// `Tw = sum over s <= Q of F_s`, `Ts = (M - 1)(F_Q + B_Q)` and
/// `Te = max over s of (AR_s + sum over s <= a <= Q of B_a)`, or `AR_s - sum over Q <= a <= s of B_a` for s > Q.
pub fn latency(legs: &[Leg], micro_batches: u32) -> f64 {
    let q = pivot(legs, micro_batches);
    let (Some(at), more) = (legs.get(q), f64::from(micro_batches.saturating_sub(1))) else { return 0.0 };
    let warm_up: f64 = legs[..=q].iter().map(|l| l.forward).sum();
    let backward = |legs: &[Leg]| legs.iter().map(|l| l.backward).sum::<f64>();
    let ending = (legs.iter().enumerate())
        .map(|(s, leg)| leg.all_reduce + if s <= q { backward(&legs[s..=q]) } else { -backward(&legs[q..=s]) })
        .fold(f64::NEG_INFINITY, f64::max);
    warm_up + more * at.both() + ending
}

/// Ends of stages in layers and in devices.
type Cuts = Vec<(usize, usize)>;

/// The first stages of a pipeline, with the transfers between them.
#[derive(Clone)]
struct Prefix {
    /// Of the best pipeline that they are known to begin.
    latency: f64,
    cuts: Cuts,
    legs: Vec<Leg>,
}

struct Search<'a> {
    p: &'a Problem,
    devices: Vec<usize>,
    heed_memory: bool,
    /// Seconds in which a stage has to do its work.
    below: f64,
}

impl<'a> Search<'a> {
    fn new(p: &'a Problem, devices: &[usize], heed_memory: bool, below: f64) -> Self {
        Self { p, devices: devices.to_vec(), heed_memory, below }
    }

    fn in_time(&self, stage: &Leg) -> bool {
        f64::from(self.p.micro_batches()) * stage.both() < self.below
    }

    fn stage(&self, layers: Range<usize>, devices: Range<usize>) -> StageLayout {
        let share = 1.0 / devices.len() as f64;
        let members = devices.map(|i| Member { device: self.devices[i], share }).collect();
        StageLayout::group(members, layers, Split::Batch, Role::FirstOrder)
    }

    fn stages(&self, cuts: &Cuts) -> Vec<StageLayout> {
        let mut first = (0, 0);
        let stage = |&end: &(usize, usize)| {
            let stage = self.stage(first.0..end.0, first.1..end.1);
            first = end;
            stage
        };
        cuts.iter().map(stage).collect()
    }

    /// The slowest of all links between two ranges of devices, there and back.
    fn between(&self, from: Range<usize>, to: Range<usize>) -> [Link; 2] {
        let pairs = || from.clone().flat_map(|a| to.clone().map(move |b| (self.devices[a], self.devices[b])));
        [worst(pairs().map(|(a, b)| self.p.link(a, b))), worst(pairs().map(|(a, b)| self.p.link(b, a)))]
    }

    /// Whether the first `stages` of a pipeline of `of` fit; policy A keeps `min(S - i, M)` micro-batches.
    fn fits(&self, cuts: &Cuts, stages: usize, of: usize) -> bool {
        let kept = |i: usize| (of - i).min(self.p.micro_batches() as usize);
        !self.heed_memory || self.stages(cuts).iter().take(stages).enumerate().all(|(i, s)| fits(self.p, s, kept(i)))
    }

    /// The planner's dynamic programme (section 4.3): of all splits of the first `j` layers over the first `m` devices, the one that is best if
    /// all that is left were one more stage. Every such completion is a candidate. O(layers^2 devices^2) latencies.
    fn run(&self) -> Ranked<Cuts> {
        let (layers, devices) = (self.p.layers(), self.devices.len());
        let mut ranked = Ranked::new(CANDIDATES);
        let (at_layers, at_devices) = (places(layers, LAYER_PARTS), places(devices, DEVICE_PARTS));
        let inner = |all: &[usize], from: usize, n: usize| all.iter().copied().filter(|i| (from..n).contains(i)).collect::<Vec<_>>();
        let pairs = |j: usize, m: usize| {
            let (ends, tos) = (inner(&at_layers, j, layers), inner(&at_devices, m, devices));
            ends.into_iter().flat_map(|end| tos.iter().map(|to| (end, *to)).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        let leg = |from: (usize, usize), to: (usize, usize)| Leg::stage(self.p, &self.stage(from.0..to.0, from.1..to.1));
        let transfer = |links: [Link; 2], end: usize| Leg::over(links, self.p.boundary_bytes(&(end - 1..end)));
        // All that is left, as one stage.
        let mut rests: HashMap<(usize, usize), Leg> = pairs(0, 0).into_iter().map(|at| (at, leg(at, (layers, devices)))).collect();
        let whole = vec![(layers, devices)];
        let rest = rests[&(0, 0)];
        if self.in_time(&rest) && self.fits(&whole, 1, 1) {
            ranked.offer(latency(&[rest], self.p.micro_batches()), || whole);
        }
        rests.retain(|at, _| at.0 > 0 && at.1 > 0);
        let mut best: Vec<Vec<Option<Prefix>>> = vec![vec![None; devices]; layers];
        best[0][0] = Some(Prefix { latency: f64::INFINITY, cuts: Cuts::new(), legs: Vec::new() });
        for (j, m) in pairs(0, 0) {
            let Some(Prefix { mut cuts, mut legs, .. }) = best[j][m].take() else { continue };
            let (stages, known) = (cuts.len(), legs.len());
            let before = (stages > 0).then(|| stages.checked_sub(2).map_or(0, |s| cuts[s].1)..m);
            for to in inner(&at_devices, m + 1, devices) {
                let (from, ahead) = (before.clone().map(|b| self.between(b, m..to)), self.between(m..to, to..devices));
                for end in inner(&at_layers, j + 1, layers) {
                    let own_leg = leg((j, m), (end, to));
                    // More layers only take longer.
                    if !self.in_time(&own_leg) {
                        break;
                    }
                    legs.truncate(known);
                    legs.extend(from.map(|links| transfer(links, j)));
                    legs.push(own_leg);
                    let own = legs.len();
                    legs.extend([transfer(ahead, end), rests[&(end, to)]]);
                    let time = latency(&legs, self.p.micro_batches());
                    // More stages keep more micro-batches: what does not fit now never will.
                    let better = best[end][to].as_ref().is_none_or(|b| time < b.latency);
                    if !(better || ranked.takes(time)) {
                        continue;
                    }
                    cuts.truncate(stages);
                    cuts.extend([(end, to), (layers, devices)]);
                    let of = cuts.len();
                    if !self.fits(&cuts, of - 1, of) {
                        continue;
                    }
                    if ranked.takes(time) && self.in_time(&rests[&(end, to)]) && self.fits(&cuts, of, of) {
                        ranked.offer(time, || cuts.clone());
                    }
                    if better {
                        best[end][to] = Some(Prefix { latency: time, cuts: cuts[..of - 1].to_vec(), legs: legs[..own].to_vec() });
                    }
                }
            }
        }
        ranked
    }
}

pub(super) fn propose(p: &Problem, below: f64) -> Result<Proposal> {
    let (devices, mut notes) = pipelines::capable(p)?;
    let mut fewer = devices.clone();
    let mut search = Search::new(p, &devices, true, below);
    let mut ranked = search.run();
    while ranked.is_empty() && fewer.len() > 1 {
        drop_smallest(p, &mut fewer);
        search = Search::new(p, &fewer, true, below);
        ranked = search.run();
    }
    if ranked.is_empty() && below.is_finite() {
        return Err(nothing_in_time());
    }
    if ranked.is_empty() {
        // The simulation of the best split that ignores memory says which device is short and by how much.
        search = Search::new(p, &devices, false, f64::INFINITY);
        ranked = search.run();
    } else if fewer.len() < devices.len() {
        let gone: Vec<usize> = devices.iter().copied().filter(|d| !fewer.contains(d)).collect();
        notes.push(format!("without {}: nothing fits with all devices", p.names(&gone)));
    }
    notes.push("after DAPPLE, whose paper was not at hand: see docs/planners.md".into());
    first_fit(p, ranked.into_iter().map(|cuts| Layout::line(search.stages(&cuts))), ScheduleName::Dapple, notes)
}
