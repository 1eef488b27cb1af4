//! Splits of the layers over an order of devices, by lower bound.

use super::{Effort, Method, Problem, orders, orders::Device, urgencies};
use crate::{
    ir::{Readout, Role, Workload},
    order::{self, ScheduleName},
    planner::{
        bounds::{self, Shape},
        layout::{Layout, Outcome},
        split,
    },
    sim::{self, Urgency},
};
use std::ops::Range;
use zofo_hal::{Error, Result};

/// An order of devices with what every split of it has in common.
struct Order<'a> {
    devices: &'a [Device],
    cut: usize,
    w: Workload,
    shape: Shape,
}

/// A plan: which order, which split, which urgency.
#[derive(Clone)]
struct Best {
    devices: Vec<Device>,
    ends: Vec<usize>,
    urgency: Urgency,
}

pub(super) struct Search<'a> {
    p: &'a Problem,
    method: Method,
    left: Effort,
    incumbent: f64,
    best: Option<Best>,
    failure: Option<Error>,
    /// Least bound of what was not searched to the end.
    open: f64,
    /// The urgency that won last: tried first.
    favourite: usize,
}

impl<'a> Search<'a> {
    /// A search for what beats `incumbent`.
    pub fn new(p: &'a Problem, method: Method, effort: Effort, incumbent: f64) -> Self {
        Self { p, method, left: effort, incumbent, best: None, failure: None, open: f64::INFINITY, favourite: 0 }
    }

    pub fn incumbent(&self) -> f64 {
        self.incumbent
    }

    pub fn best(&self) -> Option<()> {
        self.best.as_ref().map(|_| ())
    }

    pub fn failure(&mut self) -> Option<Error> {
        self.failure.take()
    }

    /// Whether nothing below the incumbent was left unsearched.
    pub fn complete(&self) -> bool {
        self.open >= self.incumbent
    }

    /// No plan of these orders takes less.
    pub fn lower_bound(&self) -> f64 {
        self.open.min(self.incumbent)
    }

    pub fn run(&mut self, all: &[Vec<Device>]) {
        // Orders by the load of their best balanced split, which bounds them; then a good plan early, then the rest.
        let mut ranked: Vec<(f64, Vec<usize>, Order<'_>)> = Vec::new();
        for devices in all {
            let order = self.order(devices);
            if order::check_size(&order.w).is_err() {
                continue;
            }
            let cost = |s: usize, l: &Range<usize>| self.load(&order, s, l);
            match split::min_max(self.p.layers(), devices.len(), cost) {
                Some((bound, ends)) => ranked.push((bound, ends, order)),
                None => {}
            }
        }
        ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (bound, ends, order) in ranked.iter().take(FIRST) {
            if *bound < self.incumbent {
                self.climb(order, ends.clone());
            }
        }
        for (bound, ends, order) in &ranked {
            if *bound >= self.incumbent {
                break;
            }
            self.exhaust(order, ends);
        }
    }

    fn order<'d>(&self, devices: &'d [Device]) -> Order<'d> {
        let cut = orders::cut(devices);
        let roles = (0..devices.len()).map(|s| if s < cut { self.method.head_role() } else { Role::FirstOrder }).collect();
        let w = self.p.workload(roles, &self.method);
        let shape = Shape::new(&w);
        Order { devices, cut, w, shape }
    }

    fn stage(&self, o: &Order<'_>, s: usize, layers: &Range<usize>) -> sim::StageTiming {
        let role = if s < o.cut { self.method.head_role() } else { Role::FirstOrder };
        self.p.stage(o.devices[s].index, layers, role)
    }

    /// Work of stage `s`, infinite where not even one micro-batch fits.
    fn load(&self, o: &Order<'_>, s: usize, layers: &Range<usize>) -> f64 {
        let d = o.devices[s].index;
        let kept = usize::from(s >= o.cut);
        match split::short_by(self.p, d, layers, kept) {
            Some(_) => f64::INFINITY,
            None => bounds::load(&o.w, &o.shape, &self.stage(o, s, layers), s),
        }
    }

    fn layout(&self, o: &Order<'_>, ends: &[usize]) -> Layout {
        let devices: Vec<usize> = o.devices.iter().map(|d| d.index).collect();
        Layout::pipeline(&devices, ends, o.cut, &self.method)
    }

    /// Simulates a split under every urgency until one meets its bound; whether it became the best plan.
    fn try_split(&mut self, o: &Order<'_>, ends: &[usize]) -> bool {
        let layout = self.layout(o, ends);
        let timing = layout.timing(self.p);
        let bound = bounds::line(&o.w, &timing);
        if bound >= self.incumbent * (1.0 - 1e-12) {
            return false;
        }
        let all = urgencies(&o.w);
        let actions: u64 = (0..o.w.stages()).map(|s| (o.w.actions_per_micro_batch(s) as u64) * u64::from(o.w.micro_batches)).sum();
        let mut better = false;
        for i in 0..all.len() {
            // The one that won last comes first.
            let i = (i + self.favourite) % all.len();
            if self.left.actions < actions {
                self.open = self.open.min(bound);
                return better;
            }
            self.left.actions -= actions;
            let Ok(timeline) = sim::makespan(&o.w, &timing, &all[i]) else { continue };
            if timeline.makespan >= self.incumbent {
                continue;
            }
            match layout.devices(self.p, &timeline) {
                Ok(_) => {
                    self.incumbent = timeline.makespan;
                    self.best = Some(Best { devices: o.devices.to_vec(), ends: ends.to_vec(), urgency: all[i] });
                    self.favourite = i;
                    better = true;
                    if self.incumbent <= bound * (1.0 + 1e-12) {
                        break;
                    }
                }
                Err(e) => self.failure = Some(e),
            }
        }
        better
    }

    /// Moves single layers across boundaries while that helps.
    fn climb(&mut self, o: &Order<'_>, mut ends: Vec<usize>) {
        self.try_split(o, &ends);
        loop {
            let mut moved = false;
            for i in 0..ends.len() - 1 {
                for up in [true, false] {
                    let mut next = ends.clone();
                    next[i] = if up { next[i] + 1 } else { next[i] - 1 };
                    let start = if i == 0 { 0 } else { next[i - 1] };
                    if next[i] <= start || next[i] >= next[i + 1] {
                        continue;
                    }
                    if self.try_split(o, &next) {
                        ends = next;
                        moved = true;
                    }
                }
            }
            if !moved {
                return;
            }
        }
    }

    /// All splits of an order that could beat the incumbent, the most promising first.
    fn exhaust(&mut self, o: &Order<'_>, balanced: &[usize]) {
        let (layers, stages) = (self.p.layers(), o.devices.len());
        self.try_split(o, balanced);
        // Least largest load of the layers from `start` on over the stages from `s` on.
        let mut rest = vec![vec![f64::INFINITY; layers + 1]; stages + 1];
        rest[stages][layers] = 0.0;
        for s in (0..stages).rev() {
            for start in s..layers {
                for end in start + 1..=layers {
                    let load = self.load(o, s, &(start..end));
                    rest[s][start] = rest[s][start].min(load.max(rest[s + 1][end]));
                    if load > self.incumbent {
                        break;
                    }
                }
            }
        }
        let mut walk = Walk { ends: Vec::new(), leaves: Vec::new(), cut_short: f64::INFINITY };
        self.walk(o, &rest, &mut walk, 0, 0.0, 0.0);
        self.open = self.open.min(walk.cut_short);
        walk.leaves.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
        for (bound, ends) in walk.leaves {
            if bound >= self.incumbent {
                break;
            }
            self.try_split(o, &ends);
        }
    }

    /// Stage `s` starts at layer `start`; the first micro-batch gets there at `ahead` at the earliest.
    fn walk(&mut self, o: &Order<'_>, rest: &[Vec<f64>], walk: &mut Walk, s: usize, ahead: f64, so_far: f64) {
        let (layers, stages) = (self.p.layers(), o.devices.len());
        let start = walk.ends.last().copied().unwrap_or(0);
        if s == stages {
            let timing = self.layout(o, &walk.ends).timing(self.p);
            let bound = bounds::line(&o.w, &timing);
            if bound < self.incumbent * (1.0 - 1e-12) {
                walk.leaves.push((bound, walk.ends.clone()));
            }
            return;
        }
        let last = s + 1 == stages;
        let first_end = if last { layers } else { start + 1 };
        for end in first_end..=layers - (stages - 1 - s) {
            let layers = start..end;
            let load = self.load(o, s, &layers);
            if ahead + load >= self.incumbent {
                // Loads grow with the layers; a stage without memory for these has none for more.
                break;
            }
            let t = self.stage(o, s, &layers);
            let base = if s < o.cut { o.shape.base(&t) } else { t.forward };
            let hop = match o.devices.get(s + 1) {
                Some(next) => self.p.link(o.devices[s].index, next.index).transfer(t.boundary_bytes),
                None => 0.0,
            };
            let after = ahead + base + hop;
            let bound = so_far.max(ahead + load).max(after + rest[s + 1][end]);
            if bound >= self.incumbent {
                continue;
            }
            if self.left.splits == 0 {
                walk.cut_short = walk.cut_short.min(bound);
                continue;
            }
            self.left.splits -= 1;
            walk.ends.push(end);
            self.walk(o, rest, walk, s + 1, after, bound);
            walk.ends.pop();
        }
    }

    /// The best plan, simulated with its spans.
    pub fn into_outcome(self) -> Result<Outcome> {
        let best = self.best.as_ref().ok_or_else(super::no_order)?;
        let order = self.order(&best.devices);
        let layout = self.layout(&order, &best.ends);
        let timing = layout.timing(self.p);
        let (schedule, _) = sim::arrange(&order.w, &timing, &best.urgency)?;
        let name = match (order.cut, order.w.stages()) {
            (0, 1) => ScheduleName::Single,
            _ if order.w.readout == Readout::Tail => ScheduleName::HybridopTail,
            _ => ScheduleName::HybridopHead,
        };
        layout.run(self.p, schedule, &timing, name)
    }
}

/// Orders that are climbed from before any is searched to the end.
const FIRST: usize = 4;

struct Walk {
    ends: Vec<usize>,
    leaves: Vec<(f64, Vec<usize>)>,
    /// Least bound of what the limit of splits left out.
    cut_short: f64,
}
