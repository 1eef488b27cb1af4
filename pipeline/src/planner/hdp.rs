//! Hybrid data parallelism after HetPipe (Park et al. 2020, arXiv 2005.14038): groups of devices that each hold the whole model as a pipeline,
//! and share the micro-batches of a step.

use super::{
    Layout, Method, Problem, Proposal, StageLayout, nothing_in_time, pipelines,
    ranked::{Ranked, fastest},
    shares,
    split::{min_max, short_by},
};
use crate::{
    costs::Links,
    ir::{Chain, Role},
    order::ScheduleName,
    sim::Link,
};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    rc::Rc,
};
use zofo_hal::Result;

/// More devices than this are grouped by type, not by all set partitions, of which there are 115,975 of ten.
const ENUMERATED: usize = 10;
/// Partitions that are simulated, best predicted first.
const SIMULATED: usize = 8;
/// Partitions that are kept, should the best not fit.
const CANDIDATES: usize = 64;

/// A pipeline of the whole model.
struct Group {
    devices: Vec<usize>,
    ends: Vec<usize>,
    /// Seconds from one micro-batch to the next.
    pace: f64,
    /// Seconds of one micro-batch on its own.
    alone: f64,
}

impl Group {
    /// The split whose slowest stage is fastest, 1F1B's activations counted; `None` where there is none.
    fn new(p: &Problem, devices: &[usize]) -> Option<Self> {
        let (layers, stages) = (p.layers(), devices.len());
        let kept = |s: usize| (stages - s).min(p.micro_batches() as usize);
        let time = |s: usize, l: &Range<usize>| match short_by(p, devices[s], l, kept(s)) {
            None => p.both(devices[s], l),
            Some(_) => f64::INFINITY,
        };
        let (slowest, ends) = min_max(layers, stages, time)?;
        let (mut pace, mut alone, mut first) = (slowest, 0.0, 0);
        for (s, &end) in ends.iter().enumerate() {
            alone += p.both(devices[s], &(first..end));
            if let Some(&next) = devices.get(s + 1) {
                let bytes = p.boundary_bytes(&(first..end));
                for link in [p.link(devices[s], next), p.link(next, devices[s])] {
                    pace = pace.max(link.occupancy(bytes));
                    alone += link.transfer(bytes);
                }
            }
            first = end;
        }
        Some(Self { devices: devices.to_vec(), ends, pace, alone })
    }

    /// 1F1B: the first micro-batch on its own, the others behind it at the pace of the slowest stage or link.
    fn seconds(&self, micro_batches: u32) -> f64 {
        self.alone + f64::from(micro_batches - 1) * self.pace
    }
}

/// Groups with the micro-batches of each.
type Shared = Vec<(Rc<Group>, u32)>;

/// Seconds of the slowest group.
fn slowest(groups: &Shared) -> f64 {
    groups.iter().map(|(g, n)| g.seconds(*n)).fold(0.0, f64::max)
}

/// Seconds of the all-reduce of adapters between groups, over the slowest link between devices of any two.
fn all_reduce(p: &Problem, links: &[Vec<Link>], groups: &Shared) -> f64 {
    let (count, bytes) = (groups.len() as f64, p.gradient_bytes(&(0..p.layers())));
    let mut link = Link::default();
    let pairs = groups.iter().enumerate().flat_map(|(i, (a, _))| groups[..i].iter().map(move |(b, _)| (a, b)));
    for (x, y) in pairs.flat_map(|(a, b)| a.devices.iter().flat_map(|x| b.devices.iter().flat_map(move |y| [(*x, *y), (*y, *x)]))) {
        link.latency_s = link.latency_s.max(links[x][y].latency_s);
        link.bytes_per_s = link.bytes_per_s.min(links[x][y].bytes_per_s);
    }
    2.0 * (count - 1.0) * link.transfer(bytes / count)
}

fn layout(groups: &Shared) -> Layout {
    let mut all = Layout { stages: Vec::new(), chains: Vec::new(), placement: Vec::new() };
    let mut taken = 0;
    for (group, n) in groups {
        let start = all.stages.len();
        let mut first = 0;
        for (d, end) in group.devices.iter().zip(&group.ends) {
            all.stages.push(StageLayout::single(*d, first..*end, Role::FirstOrder));
            first = *end;
        }
        all.chains.push(Chain { stages: start..all.stages.len(), micro_batches: taken..taken + n });
        taken += n;
    }
    all.placement = (0..all.stages.len()).collect();
    if all.chains.len() == 1 {
        all.chains.clear();
    }
    all
}

/// Devices that are alike have the same number, if nothing but their names tells their links apart.
fn types(p: &Problem, devices: &[usize]) -> Vec<usize> {
    let alike = |a: usize, b: usize| matches!(p.costs().links, Links::Uniform(_)) && p.device(a).is_like(p.device(b));
    devices.iter().map(|d| devices.iter().position(|other| alike(*other, *d) || other == d).unwrap_or(0)).collect()
}

/// Calls `each` with every set partition of `order`, `last` being the group of the device before; devices of one type, which follow one another,
/// go to groups in order, because they are interchangeable.
fn set_partitions(order: &[usize], types: &[usize], last: usize, groups: &mut Vec<Vec<usize>>, each: &mut dyn FnMut(&[Vec<usize>])) {
    let Some((&at, rest)) = order.split_first() else { return each(groups) };
    let same = groups.get(last).and_then(|g| g.last()).is_some_and(|before| types[*before] == types[at]);
    for g in if same { last } else { 0 }..groups.len() {
        groups[g].push(at);
        set_partitions(rest, types, g, groups, each);
        groups[g].pop();
    }
    groups.push(vec![at]);
    set_partitions(rest, types, groups.len() - 1, groups, each);
    groups.pop();
}

/// HetPipe's allocations for many devices: all as one, a type to a group (node partition), some of each type in every group (equal
/// distribution), and every device on its own.
fn by_type(types: &[usize]) -> Vec<Vec<Vec<usize>>> {
    let mut kinds: Vec<Vec<usize>> = Vec::new();
    for (i, kind) in types.iter().enumerate() {
        match kinds.iter_mut().find(|k| types[k[0]] == *kind) {
            Some(own) => own.push(i),
            None => kinds.push(vec![i]),
        }
    }
    let fewest = kinds.iter().map(Vec::len).min().unwrap_or(1);
    let mut dealt = vec![Vec::new(); fewest];
    kinds.iter().for_each(|kind| kind.iter().enumerate().for_each(|(i, d)| dealt[i % fewest].push(*d)));
    dealt.iter_mut().for_each(|group| group.sort_unstable());
    let all = (0..types.len()).collect::<Vec<_>>();
    let alone = all.iter().map(|d| vec![*d]).collect();
    vec![vec![all], kinds, dealt, alone]
}

pub(super) fn propose(p: &Problem, below: f64) -> Result<Proposal> {
    let (devices, mut notes) = pipelines::capable(p)?;
    notes.push("after HetPipe, whose paper was not at hand: see docs/planners.md".into());
    let types = types(p, &devices);
    let links: Vec<Vec<Link>> = (0..p.devices()).map(|x| (0..p.devices()).map(|y| p.link(x, y)).collect()).collect();
    // Groups of like devices are cut alike.
    let mut known: HashMap<Vec<usize>, Option<Rc<Group>>> = HashMap::new();
    let mut offered = HashSet::new();
    let mut ranked = Ranked::new(CANDIDATES);
    let mut offer = |partition: &[Vec<usize>]| {
        let mut group = |members: &Vec<usize>| {
            let kinds: Vec<usize> = members.iter().take(p.layers()).map(|i| types[*i]).collect();
            let members: Vec<usize> = members.iter().take(p.layers()).map(|i| devices[*i]).collect();
            let like = known.entry(kinds).or_insert_with(|| Group::new(p, &members).map(Rc::new)).clone()?;
            match like.devices == members {
                true => Some(like),
                false => Some(Rc::new(Group { devices: members, ends: like.ends.clone(), ..*like })),
            }
        };
        // A group that does not fit gets no micro-batch.
        let groups: Vec<Rc<Group>> = partition.iter().filter_map(&mut group).collect();
        if groups.is_empty() {
            return;
        }
        // No sharing takes less than all groups at their paces.
        let rate: f64 = groups.iter().map(|g| 1.0 / g.pace).sum();
        let least = f64::from(p.micro_batches()) / rate;
        if !ranked.takes(least) || least >= below {
            return;
        }
        let weights = shares::inverse(&groups.iter().map(|g| g.pace).collect::<Vec<_>>());
        let counts = shares::whole(p.micro_batches(), &weights);
        let shared: Shared = groups.into_iter().zip(counts).filter(|(_, n)| *n > 0).collect();
        let slowest = slowest(&shared);
        if ranked.takes(slowest) && offered.insert(shared.iter().map(|(g, n)| (g.devices.clone(), *n)).collect::<Vec<_>>()) {
            ranked.offer(slowest + all_reduce(p, &links, &shared), || shared);
        }
    };
    match devices.len() <= ENUMERATED {
        true => {
            let mut order: Vec<usize> = (0..devices.len()).collect();
            order.sort_by_key(|i| types[*i]);
            let (mut seen, mut shape): (HashSet<Vec<u64>>, Vec<u64>) = (HashSet::new(), Vec::new());
            let mut distinct = |groups: &[Vec<usize>]| {
                // Alike devices are interchangeable: one partition stands for all that differ in which of them is where. How many of each type a
                // group has is one number, four bits a type.
                const { assert!(ENUMERATED < 16) };
                shape.clear();
                shape.extend(groups.iter().map(|g| g.iter().map(|i| 1u64 << (4 * types[*i])).sum::<u64>()));
                shape.sort_unstable();
                if seen.contains(&shape) {
                    return;
                }
                seen.insert(shape.clone());
                // Within a group devices keep the order that they were given in.
                let mut groups = groups.to_vec();
                groups.iter_mut().for_each(|g| g.sort_unstable());
                offer(&groups);
            };
            set_partitions(&order, &types, 0, &mut Vec::new(), &mut distinct);
        }
        false => by_type(&types).iter().for_each(|partition| offer(partition)),
    }
    let simulate = |shared: &Shared| layout(shared).simulate(p, &Method::FROZEN, ScheduleName::OneFOneB);
    match fastest(ranked.into_iter(), SIMULATED, simulate)? {
        Some((shared, outcome)) => {
            let groups = shared.iter().map(|(g, n)| format!("{n} micro-batches on {}", p.names(&g.devices)));
            notes.push(groups.collect::<Vec<_>>().join("; "));
            Ok(Proposal { outcome, method: Method::FROZEN, notes })
        }
        None if below.is_finite() => Err(nothing_in_time()),
        // No group fits: the pipeline of all devices says which is short and by how much.
        None => pipelines::line(p, ScheduleName::OneFOneB, pipelines::Cut::MinMax),
    }
}
