//! Steps from one candidate to the next.

use super::{Bubbles, Candidate, ORDERS};

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// Which layers a stage has.
    Partition,
    /// Which device a stage is on, and how many there are.
    Placement,
    /// The order of work.
    Schedule,
}

impl Move {
    pub const ALL: [Self; 3] = [Self::Partition, Self::Placement, Self::Schedule];
}

impl Candidate {
    fn first(&self, stage: usize) -> usize {
        if stage == 0 { 0 } else { self.ends[stage - 1] }
    }

    /// One layer less on stage `from`, one more on stage `to`; those between pass one on.
    fn shifted(&self, from: usize, to: usize) -> Option<Self> {
        let mut next = self.clone();
        if self.ends[from] - self.first(from) < 2 {
            return None;
        }
        match from < to {
            true => next.ends[from..to].iter_mut().for_each(|end| *end -= 1),
            false => next.ends[to..from].iter_mut().for_each(|end| *end += 1),
        }
        Some(next)
    }

    /// A layer from stages of the busiest device over a boundary of theirs, or all the way to the idlest one.
    pub fn towards_idle(&self, found: &[(usize, Bubbles)]) -> Vec<Self> {
        let by = |a: &&(usize, Bubbles), b: &&(usize, Bubbles)| a.1.sum().total_cmp(&b.1.sum());
        let (Some((busiest, _)), Some((idlest, _))) = (found.iter().min_by(by), found.iter().max_by(by)) else { return Vec::new() };
        let of = |device: usize| (0..self.on.len()).filter(move |s| self.on[*s] == device);
        let adjacent = of(*busiest).flat_map(|s| [s.checked_sub(1), Some(s + 1)].into_iter().flatten().map(move |to| (s, to)));
        let all_the_way = of(*busiest).flat_map(|s| of(*idlest).map(move |to| (s, to)));
        let pairs = adjacent.chain(all_the_way).filter(|(s, to)| s != to && *to < self.on.len());
        pairs.filter_map(|(s, to)| self.shifted(s, to)).collect()
    }

    /// All candidates one move of a kind away.
    pub fn neighbours(&self, kind: Move, devices: &[usize]) -> Vec<Self> {
        let stages = self.on.len();
        let pairs = || (0..stages).flat_map(|a| (0..stages).map(move |b| (a, b)));
        match kind {
            Move::Partition => pairs().filter(|(a, b)| a != b).filter_map(|(a, b)| self.shifted(a, b)).collect(),
            Move::Schedule => ORDERS.iter().map(|order| Self { order: *order, ..self.clone() }).collect(),
            Move::Placement => {
                let swap = |(a, b): (usize, usize)| {
                    let mut next = self.clone();
                    next.on.swap(a, b);
                    next
                };
                let swaps = pairs().filter(|(a, b)| a < b && self.on[*a] != self.on[*b]).map(swap);
                let moves = (0..stages).flat_map(|s| devices.iter().map(move |d| (s, *d))).filter(|(s, d)| self.on[*s] != *d);
                let moves = moves.map(|(s, d)| {
                    let mut next = self.clone();
                    next.on[s] = d;
                    next
                });
                swaps.chain(moves).chain(self.finer(devices)).chain(self.coarser()).collect()
            }
        }
    }

    /// A stage halved, the second half on any device.
    fn finer(&self, devices: &[usize]) -> Vec<Self> {
        let mut all = Vec::new();
        for s in (0..self.on.len()).filter(|s| self.ends[*s] - self.first(*s) >= 2) {
            for d in devices {
                let mut next = self.clone();
                next.ends.insert(s, self.first(s).midpoint(self.ends[s]));
                next.on.insert(s + 1, *d);
                all.push(next);
            }
        }
        all
    }

    /// Two stages made one, on the device of either.
    fn coarser(&self) -> Vec<Self> {
        let mut all = Vec::new();
        for s in 1..self.on.len() {
            for gone in [s - 1, s] {
                let mut next = self.clone();
                next.ends.remove(s - 1);
                next.on.remove(gone);
                all.push(next);
            }
        }
        all
    }
}
