//! Splits of the layers over an order of devices, by lower bound.

use super::{Effort, Method, Problem, orders, orders::Device};
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
use std::collections::HashMap;
use zofo_hal::{Error, Result};

/// An order of devices with what every split of it has in common.
struct Order {
    devices: Vec<Device>,
    cut: usize,
    w: Workload,
    /// Per stage: where its costs lie among the tables.
    tables: Vec<usize>,
}

/// Costs of one device in one place of a pipeline, for all ranges of layers.
struct Table {
    /// Its work in a step, infinite where not even one micro-batch fits.
    load: Vec<f64>,
    /// Seconds until a micro-batch's base output is made.
    base: Vec<f64>,
}

/// What a table depends on: the device, its role, whether it is the last before the cut, whether it is the last, whether there are directions.
type Place = (usize, Role, bool, bool, bool);

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
    tables: Vec<Table>,
    places: HashMap<Place, usize>,
}

impl<'a> Search<'a> {
    /// A search for what beats `incumbent`.
    pub fn new(p: &'a Problem, method: Method, effort: Effort, incumbent: f64) -> Self {
        Self {
            p,
            method,
            left: effort,
            incumbent,
            best: None,
            failure: None,
            open: f64::INFINITY,
            favourite: 0,
            tables: Vec::new(),
            places: HashMap::new(),
        }
    }

    pub fn incumbent(&self) -> f64 {
        self.incumbent
    }

    /// Whether a plan better than the first incumbent was found.
    pub fn found(&self) -> bool {
        self.best.is_some()
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

    /// Searches `all` orders; where these are not `complete`, also what lies next to the best of them.
    pub fn run(&mut self, all: &[Vec<Device>], complete: bool) {
        // Orders by the load of their best balanced split, which bounds them.
        let mut ranked: Vec<Ranked> = all.iter().filter_map(|devices| self.rank(devices)).collect();
        ranked.sort_by(|a, b| a.bound.total_cmp(&b.bound));
        // A good plan early saves most of the search; the bound of the balanced split tells best where to look for one.
        let mut promising: Vec<usize> = (0..ranked.len()).collect();
        promising.sort_by(|a, b| ranked[*a].balanced.total_cmp(&ranked[*b].balanced));
        for r in promising.into_iter().take(FIRST).map(|i| &ranked[i]) {
            if r.balanced < self.incumbent {
                self.climb(&r.order, r.ends.clone());
            }
        }
        if !complete {
            self.vary();
        }
        for r in &ranked {
            if r.bound >= self.incumbent {
                break;
            }
            self.exhaust(&r.order, &r.ends);
        }
    }

    fn rank(&mut self, devices: &[Device]) -> Option<Ranked> {
        let order = self.order(devices);
        order::check_size(&order.w).ok()?;
        let (bound, ends) = split::min_max(self.p.layers(), devices.len(), |s, l| self.load(&order, s, l.start, l.end))?;
        let balanced = bounds::line(&order.w, &self.layout(&order, &ends).timing(self.p));
        Some(Ranked { bound, balanced, ends, order })
    }

    /// From the best plan: one device less, one more, two neighbours exchanged, while that helps.
    fn vary(&mut self) {
        while let Some(best) = self.best.clone() {
            let before = self.incumbent;
            for devices in orders::next_to(self.p, &best.devices) {
                if let Some(r) = self.rank(&devices)
                    && r.balanced < self.incumbent
                {
                    self.try_split(&r.order, &r.ends, QUICK);
                }
            }
            if let Some(better) = self.best.clone().filter(|_| self.incumbent < before) {
                let order = self.order(&better.devices);
                self.climb(&order, better.ends);
            } else {
                return;
            }
        }
    }

    fn order(&mut self, devices: &[Device]) -> Order {
        let cut = orders::cut(devices);
        let role = |s: usize| if s < cut { self.method.head_role() } else { Role::FirstOrder };
        let roles: Vec<Role> = (0..devices.len()).map(role).collect();
        let w = self.p.workload(roles.clone(), &self.method);
        let tables = (0..devices.len())
            .map(|s| {
                let place = (devices[s].index, roles[s], s + 1 == cut, s + 1 == devices.len(), w.estimates());
                match self.places.get(&place) {
                    Some(t) => *t,
                    None => {
                        self.tables.push(self.table(&w, place));
                        self.places.insert(place, self.tables.len() - 1);
                        self.tables.len() - 1
                    }
                }
            })
            .collect();
        Order { devices: devices.to_vec(), cut, w, tables }
    }

    fn table(&self, w: &Workload, (device, role, last_head, last, _): Place) -> Table {
        let layers = self.p.layers();
        let shape = Shape::new(w);
        let (head, kept) = (role != Role::FirstOrder, usize::from(role == Role::FirstOrder));
        let mut table = Table { load: vec![f64::INFINITY; (layers + 1) * (layers + 1)], base: vec![0.0; (layers + 1) * (layers + 1)] };
        for start in 0..layers {
            for end in start + 1..=layers {
                let range = start..end;
                let t = self.p.stage(device, &range, role);
                let at = start * (layers + 1) + end;
                table.base[at] = if head { shape.base(&t) } else { t.forward };
                if split::short_by(self.p, device, &range, kept).is_none() {
                    table.load[at] = shape.load(w, &t, head, last_head, last);
                }
            }
        }
        table
    }

    fn load(&self, o: &Order, s: usize, start: usize, end: usize) -> f64 {
        self.tables[o.tables[s]].load[start * (self.p.layers() + 1) + end]
    }

    fn base(&self, o: &Order, s: usize, start: usize, end: usize) -> f64 {
        self.tables[o.tables[s]].base[start * (self.p.layers() + 1) + end]
    }

    fn layout(&self, o: &Order, ends: &[usize]) -> Layout {
        let devices: Vec<usize> = o.devices.iter().map(|d| d.index).collect();
        Layout::pipeline(&devices, ends, o.cut, &self.method)
    }

    /// Simulates a split under so many urgencies, or until one meets its bound; whether it became the best plan.
    fn try_split(&mut self, o: &Order, ends: &[usize], urgencies_at_most: usize) -> bool {
        let layout = self.layout(o, ends);
        let timing = layout.timing(self.p);
        let bound = bounds::line(&o.w, &timing);
        if bound >= self.incumbent * (1.0 - 1e-12) {
            return false;
        }
        let all = Urgency::all(&o.w);
        let actions: u64 = (0..o.w.stages()).map(|s| (o.w.actions_per_micro_batch(s) as u64) * u64::from(o.w.micro_batches)).sum();
        let mut better = false;
        for i in 0..all.len().min(urgencies_at_most) {
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
            // As a list the order may hold more at a time, and end earlier: it does not wait for credits before an action, but behind it.
            let as_list = || {
                layout.devices(self.p, &timeline)?;
                let (schedule, _) = sim::arrange(&o.w, &timing, &all[i])?;
                let listed = sim::replay(&schedule, &timing)?;
                layout.devices(self.p, &listed).map(|_| listed.makespan)
            };
            match as_list() {
                Ok(makespan) if makespan >= self.incumbent => {}
                Ok(makespan) => {
                    self.incumbent = makespan;
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
    fn climb(&mut self, o: &Order, mut ends: Vec<usize>) {
        self.try_split(o, &ends, usize::MAX);
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
                    if self.try_split(o, &next, QUICK) {
                        ends = next;
                        moved = true;
                    }
                }
            }
            if !moved {
                self.try_split(o, &ends, usize::MAX);
                return;
            }
        }
    }

    /// All splits of an order that could beat the incumbent, the most promising first.
    fn exhaust(&mut self, o: &Order, balanced: &[usize]) {
        let (layers, stages) = (self.p.layers(), o.devices.len());
        self.try_split(o, balanced, usize::MAX);
        // Least largest load of the layers from `start` on over the stages from `s` on.
        let mut rest = vec![vec![f64::INFINITY; layers + 1]; stages + 1];
        rest[stages][layers] = 0.0;
        for s in (0..stages).rev() {
            for start in s..layers {
                for end in start + 1..=layers {
                    let load = self.load(o, s, start, end);
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
            self.try_split(o, &ends, usize::MAX);
        }
    }

    /// Stage `s` starts at layer `start`; the first micro-batch gets there at `ahead` at the earliest.
    fn walk(&mut self, o: &Order, rest: &[Vec<f64>], walk: &mut Walk, s: usize, ahead: f64, so_far: f64) {
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
            let load = self.load(o, s, start, end);
            if ahead + load >= self.incumbent {
                // Loads grow with the layers; a stage without memory for these has none for more.
                break;
            }
            let base = self.base(o, s, start, end);
            let hop = match o.devices.get(s + 1) {
                Some(next) => self.p.link(o.devices[s].index, next.index).transfer(self.p.boundary_bytes(&(start..end))),
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
    pub fn into_outcome(mut self) -> Result<Outcome> {
        let best = self.best.take().ok_or_else(super::no_order)?;
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

/// Urgencies that are tried where a neighbour is only looked at.
const QUICK: usize = 2;

/// An order with its best balanced split.
struct Ranked {
    /// Load of the split's busiest stage: no split of the order takes less.
    bound: f64,
    /// Bound of the split.
    balanced: f64,
    ends: Vec<usize>,
    order: Order,
}

struct Walk {
    ends: Vec<usize>,
    leaves: Vec<(f64, Vec<usize>)>,
    /// Least bound of what the limit of splits left out.
    cut_short: f64,
}
