//! Which devices take part, in which order, and what each is used for.

use super::{Method, Problem};
use crate::{
    cluster::Kind,
    ir::Role,
    planner::{bounds, split},
};
use zofo_hal::Error;

/// A device in an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub index: usize,
    /// Whether it backpropagates: by itself, or because it is made to at its price.
    pub exact: bool,
}

/// Position of the first stage of `order` that is first-order: behind the last device that only runs forward.
pub(super) fn cut(order: &[Device]) -> usize {
    order.iter().rposition(|d| !d.exact).map_or(0, |i| i + 1)
}

/// Types of devices, each a list of indices.
fn types(p: &Problem) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = Vec::new();
    let same_links = matches!(p.costs().links, crate::costs::Links::Uniform(_));
    for d in 0..p.devices() {
        match all.iter_mut().find(|t| same_links && p.device(t[0]).is_like(p.device(d))) {
            Some(t) => t.push(d),
            None => all.push(vec![d]),
        }
    }
    all
}

/// All orders of all subsets that end in a device that backpropagates, up to `limit`; and whether these are all. Where they are too many,
/// devices that backpropagate stay behind those that do not, and then only the order in which faster devices come first, or last, is left.
pub(super) fn all(p: &Problem, limit: usize) -> (Vec<Vec<Device>>, bool) {
    let types = types(p);
    for (mixed, sorted) in [(true, false), (false, false), (false, true)] {
        let mut walk =
            Walk { p, types: &types, used: vec![0; types.len()], order: Vec::new(), found: Vec::new(), limit, mixed, sorted, steps: 0 };
        if walk.go() {
            return (walk.found, mixed);
        }
    }
    (simple(p), false)
}

struct Walk<'a> {
    p: &'a Problem,
    types: &'a [Vec<usize>],
    /// Devices of each type that are in the order; the first so many of the type.
    used: Vec<usize>,
    order: Vec<Device>,
    found: Vec<Vec<Device>>,
    limit: usize,
    mixed: bool,
    sorted: bool,
    steps: usize,
}

impl Walk<'_> {
    /// Whether everything was found within the limit.
    fn go(&mut self) -> bool {
        self.steps += 1;
        if self.steps > self.limit.saturating_mul(20) {
            return false;
        }
        if self.order.last().is_some_and(|d| d.exact) {
            if self.found.len() >= self.limit {
                return false;
            }
            self.found.push(self.order.clone());
        }
        if self.order.len() == self.p.layers() {
            return true;
        }
        for t in 0..self.types.len() {
            let Some(&index) = self.types[t].get(self.used[t]) else { continue };
            let device = self.p.device(index);
            let uses: &[bool] = match (device.kind, device.fo_speed.is_some()) {
                (Kind::Bp, _) => &[true],
                (Kind::BpFree, false) => &[false],
                (Kind::BpFree, true) => &[false, true],
            };
            for &exact in uses {
                if !self.allows(Device { index, exact }) {
                    continue;
                }
                self.used[t] += 1;
                self.order.push(Device { index, exact });
                let on = self.go();
                self.order.pop();
                self.used[t] -= 1;
                if !on {
                    return false;
                }
            }
        }
        true
    }

    fn allows(&self, next: Device) -> bool {
        let Some(last) = self.order.last() else { return true };
        let emulated = |d: &Device| d.exact && self.p.device(d.index).kind == Kind::BpFree;
        if !next.exact {
            // In front of a device that only runs forward nobody backpropagates, so nobody is made to.
            if self.order.iter().any(emulated) || (!self.mixed && last.exact) {
                return false;
            }
        }
        // Within each side of the cut, faster devices last.
        let time = |d: &Device| self.p.forward(d.index, &(0..self.p.layers()), d.exact);
        !self.sorted || last.exact != next.exact || time(last) >= time(&next)
    }
}

/// Orders of all devices by speed, for clusters of which not even the sorted subsets can be listed.
fn simple(p: &Problem) -> Vec<Vec<Device>> {
    let time = |d: &Device| p.forward(d.index, &(0..p.layers()), d.exact);
    let side = |kind: Kind| -> Vec<Device> {
        (0..p.devices()).filter(|d| p.device(*d).kind == kind).map(|index| Device { index, exact: kind == Kind::Bp }).collect()
    };
    let (mut head, mut tail) = (side(Kind::BpFree), side(Kind::Bp));
    if tail.is_empty() {
        let made = head.iter().copied().filter(|d| p.device(d.index).fo_speed.is_some()).map(|d| Device { exact: true, ..d });
        tail = made.collect();
        head.clear();
    }
    if tail.is_empty() {
        return Vec::new();
    }
    let mut all = Vec::new();
    for slow_first in [true, false] {
        for devices in [&mut head, &mut tail] {
            devices.sort_by(|a, b| if slow_first { time(b).total_cmp(&time(a)) } else { time(a).total_cmp(&time(b)) });
        }
        // Fewer and fewer of the slow ones.
        let most = p.layers();
        for (h, t) in [(1, 1), (0, 1), (1, 2), (2, 1)].iter().map(|(h, t)| (if *h == 0 { 0 } else { head.len() / h }, tail.len() / t)) {
            let fastest = |devices: &[Device], n: usize| -> Vec<Device> {
                let mut keep: Vec<Device> = devices.to_vec();
                keep.sort_by(|a, b| time(a).total_cmp(&time(b)));
                keep.truncate(n);
                devices.iter().copied().filter(|d| keep.contains(d)).collect()
            };
            let t = t.clamp(1, most);
            let order = [fastest(&head, h.min(most - t)), fastest(&tail, t)].concat();
            if !all.contains(&order) {
                all.push(order);
            }
        }
    }
    all
}

/// Orders next to one: a device less, a device more at any place, two neighbours exchanged. Devices of one type are one.
pub(super) fn next_to(p: &Problem, order: &[Device]) -> Vec<Vec<Device>> {
    let mut all: Vec<Vec<Device>> = Vec::new();
    let same = |a: &Device, b: &Device| a.exact == b.exact && p.device(a.index).is_like(p.device(b.index));
    let mut add = |next: Vec<Device>| {
        let ends_well = next.last().is_some_and(|d| d.exact);
        let known = |o: &Vec<Device>| o.len() == next.len() && o.iter().zip(&next).all(|(a, b)| same(a, b));
        if ends_well && next.len() <= p.layers() && !all.iter().any(known) {
            all.push(next);
        }
    };
    for i in 0..order.len() {
        let mut less = order.to_vec();
        less.remove(i);
        add(less);
        if i > 0 {
            let mut swapped = order.to_vec();
            swapped.swap(i - 1, i);
            add(swapped);
        }
    }
    let mut spare: Vec<Device> = Vec::new();
    for index in (0..p.devices()).filter(|d| order.iter().all(|o| o.index != *d)) {
        let device = Device { index, exact: p.device(index).kind == Kind::Bp };
        if !spare.iter().any(|s| same(s, &device)) {
            spare.push(device);
        }
    }
    for device in spare {
        for at in 0..=order.len() {
            let mut more = order.to_vec();
            more.insert(at, device);
            add(more);
        }
    }
    all
}

/// A bound for any plan of one device per stage: all devices share the work as finely as can be.
pub(super) fn least(p: &Problem, methods: &[Method]) -> f64 {
    methods.iter().map(|m| least_of(p, m)).fold(f64::INFINITY, f64::min)
}

fn least_of(p: &Problem, method: &Method) -> f64 {
    let all = 0..p.layers();
    // Per layer, its least load on any device; the work cannot be spread over more than all devices.
    let loads = |d: usize, exact: bool| -> f64 {
        let role = if exact { Role::FirstOrder } else { method.head_role() };
        let w = p.workload(vec![role, Role::FirstOrder], method);
        let shape = bounds::Shape::new(&w);
        shape.load(&w, &p.stage(d, &all, role), !exact, false, false)
    };
    let proportional = (0..p.devices()).all(|d| p.device(d).layer_forward_s.is_none());
    let rate: f64 = (0..p.devices())
        .map(|d| {
            let device = p.device(d);
            let head = loads(d, false);
            let least = if device.can_backpropagate() { head.min(loads(d, true)) } else { head };
            1.0 / least.max(f64::MIN_POSITIVE)
        })
        .sum();
    // With measured times the layers differ between devices, and the sum of rates says nothing.
    if proportional { 1.0 / rate } else { 0.0 }
}

/// What is said where no plan fits: how many layers each device holds at most, and what it lacks for one more.
pub(super) fn nothing_fits(p: &Problem) -> Error {
    if p.capable().is_empty() {
        return super::no_order();
    }
    let limits: Option<f64> = (0..p.devices()).map(|d| p.device(d).memory_bytes).sum();
    let all = p.state_bytes(&(0..p.layers()));
    if let Some(limit) = limits
        && all > limit
    {
        return Error::invalid(format!(
            "the model needs {all:.0} bytes of weights and adapters, all devices together have {limit:.0}, {:.0} too few",
            all - limit
        ));
    }
    let lines: Vec<String> = (0..p.devices())
        .map(|d| {
            // Where it backpropagates it keeps at least one micro-batch.
            let kept = usize::from(p.device(d).kind == Kind::Bp);
            let least_short = |n: usize| {
                (0..=p.layers() - n).map(|a| split::short_by(p, d, &(a..a + n), kept).unwrap_or(0.0)).fold(f64::INFINITY, f64::min)
            };
            let most = (1..=p.layers()).take_while(|n| least_short(*n) == 0.0).count();
            let name = &p.device(d).name;
            match most == p.layers() {
                true => format!("`{name}` all"),
                false => format!("`{name}` {most} ({:.0} bytes too few for {})", least_short(most + 1), most + 1),
            }
        })
        .collect();
    Error::invalid(format!(
        "no split of the {} layers fits; at most they fit, with one micro-batch under way: {}",
        p.layers(),
        lines.join(", ")
    ))
}
