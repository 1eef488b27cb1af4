//! After DAPPLE (Fan et al. 2021, arXiv 2007.01045): a pipeline whose stages are data-parallel groups of consecutive devices, shared evenly.
//!
//! Equal devices are assumed inside a group: each takes 1/g of every micro-batch, so the slowest sets the pace.

pub use super::legs::Leg;

use super::{
    Layout, Member, Problem, Proposal, Split, StageLayout,
    legs::fits,
    pipelines,
    ranked::{Ranked, drop_smallest, first_fit},
    split::{DEVICE_PARTS, LAYER_PARTS, places},
};
use crate::{ir::Role, order::ScheduleName};
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

struct Search<'a> {
    p: &'a Problem,
    devices: Vec<usize>,
    heed_memory: bool,
    known: HashMap<(Range<usize>, Range<usize>), Leg>,
    scratch: Vec<Leg>,
}

impl<'a> Search<'a> {
    fn new(p: &'a Problem, devices: &[usize], heed_memory: bool) -> Self {
        Self { p, devices: devices.to_vec(), heed_memory, known: HashMap::new(), scratch: Vec::new() }
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

    /// The slowest of all links between two ranges of devices.
    fn between(&self, end: usize, from: Range<usize>, to: Range<usize>) -> Leg {
        Leg::transfer(self.p, &self.stage(end - 1..end, from), &self.stage(end - 1..end, to))
    }

    fn latency(&mut self, cuts: &Cuts) -> f64 {
        let mut legs = std::mem::take(&mut self.scratch);
        legs.clear();
        let (mut first, mut before) = ((0, 0), 0..0);
        for &end in cuts {
            let (layers, devices) = (first.0..end.0, first.1..end.1);
            if !before.is_empty() {
                legs.push(self.between(layers.start, before, devices.clone()));
            }
            let leg = match self.known.get(&(layers.clone(), devices.clone())) {
                Some(leg) => *leg,
                None => {
                    let leg = Leg::stage(self.p, &self.stage(layers.clone(), devices.clone()));
                    self.known.insert((layers, devices.clone()), leg);
                    leg
                }
            };
            legs.push(leg);
            (first, before) = (end, devices);
        }
        let found = latency(&legs, self.p.micro_batches());
        self.scratch = legs;
        found
    }

    /// Whether the first `stages` of a pipeline of `of` fit; policy A keeps `min(S - i, M)` micro-batches.
    fn fits(&self, cuts: &Cuts, stages: usize, of: usize) -> bool {
        let kept = |i: usize| (of - i).min(self.p.micro_batches() as usize);
        !self.heed_memory || self.stages(cuts).iter().take(stages).enumerate().all(|(i, s)| fits(self.p, s, kept(i)))
    }

    /// The planner's dynamic programme (section 4.3): of all splits of the first `j` layers over the first `m` devices, the one that is best if
    /// all that is left were one more stage. Every such completion is a candidate. O(layers^2 devices^2) latencies.
    fn run(&mut self) -> Ranked<Cuts> {
        let (layers, devices) = (self.p.layers(), self.devices.len());
        let mut ranked = Ranked::new(CANDIDATES);
        let whole = vec![(layers, devices)];
        if self.fits(&whole, 1, 1) {
            ranked.offer(self.latency(&whole), || whole);
        }
        let mut best: Vec<Vec<Option<(f64, Cuts)>>> = vec![vec![None; devices]; layers];
        best[0][0] = Some((f64::INFINITY, Cuts::new()));
        let (at_layers, at_devices) = (places(layers, LAYER_PARTS), places(devices, DEVICE_PARTS));
        let inner = |all: &[usize], from: usize, n: usize| all.iter().copied().filter(|i| (from..n).contains(i)).collect::<Vec<_>>();
        let pairs = |j: usize, m: usize| {
            let (ends, tos) = (inner(&at_layers, j, layers), inner(&at_devices, m, devices));
            ends.into_iter().flat_map(|end| tos.iter().map(|to| (end, *to)).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        for (j, m) in pairs(0, 0) {
            let Some((_, prefix)) = best[j][m].take() else { continue };
            for (end, to) in pairs(j + 1, m + 1) {
                let mut cuts = prefix.clone();
                cuts.extend([(end, to), (layers, devices)]);
                let of = cuts.len();
                let time = self.latency(&cuts);
                let better = best[end][to].as_ref().is_none_or(|(t, _)| time < *t);
                // More stages keep more micro-batches: what does not fit now never will.
                if !(better || ranked.takes(time)) || !self.fits(&cuts, of - 1, of) {
                    continue;
                }
                if ranked.takes(time) && self.fits(&cuts, of, of) {
                    ranked.offer(time, || cuts.clone());
                }
                if better {
                    cuts.pop();
                    best[end][to] = Some((time, cuts));
                }
            }
        }
        ranked
    }
}

pub(super) fn propose(p: &Problem) -> Result<Proposal> {
    let (devices, mut notes) = pipelines::capable(p)?;
    let mut fewer = devices.clone();
    let mut search = Search::new(p, &devices, true);
    let mut ranked = search.run();
    while ranked.is_empty() && fewer.len() > 1 {
        drop_smallest(p, &mut fewer);
        search = Search::new(p, &fewer, true);
        ranked = search.run();
    }
    if ranked.is_empty() {
        // The simulation of the best split that ignores memory says which device is short and by how much.
        search = Search::new(p, &devices, false);
        ranked = search.run();
    } else if fewer.len() < devices.len() {
        let gone: Vec<usize> = devices.iter().copied().filter(|d| !fewer.contains(d)).collect();
        notes.push(format!("without {}: nothing fits with all devices", p.names(&gone)));
    }
    notes.push("after DAPPLE, whose paper was not at hand: see docs/planners.md".into());
    first_fit(p, ranked.into_iter().map(|cuts| Layout::line(search.stages(&cuts))), ScheduleName::Dapple, notes)
}
