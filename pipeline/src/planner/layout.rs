//! Who holds which layers: what a planner decides, and from which the simulator's input follows.

use super::{Method, Problem};
use crate::{
    ir::{Chain, Readout, Role, Schedule, Workload},
    order::{self, ScheduleName},
    sim::{self, Link, StageTiming, Timeline, Timing, Urgency},
};
use std::ops::Range;
use zofo_hal::{Error, Result};

/// How a group of devices shares a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Split {
    /// Each takes its share of every micro-batch; all hold all of the stage's weights; adapters' gradients are all-reduced at the update.
    Batch,
    /// Each takes its share of heads and feed-forward columns; two all-reduces of activations per layer and pass.
    Tensor,
    /// Each takes its share of the directions, for zeroth-order stages; only scalars cross.
    Directions,
}

impl Split {
    /// All ways.
    pub const ALL: [Self; 3] = [Self::Batch, Self::Tensor, Self::Directions];

    /// The name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::Tensor => "tensor",
            Self::Directions => "directions",
        }
    }
}

/// A device's part in a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Member {
    /// Index of the device in the costs.
    pub device: usize,
    /// Its share; shares of a group add up to 1.
    pub share: f64,
}

/// A stage: layers, who holds them, how they learn.
#[derive(Clone, Debug, PartialEq)]
pub struct StageLayout {
    /// Half-open range of layers.
    pub layers: Range<usize>,
    /// The devices that work on it as one.
    pub members: Vec<Member>,
    /// How they share it; of no meaning for one device.
    pub split: Split,
    /// Layers of a [`Split::Tensor`] stage that are shared as [`Split::Batch`] instead, by their index in the model.
    pub batch_layers: Vec<usize>,
    /// How it learns.
    pub role: Role,
}

impl StageLayout {
    /// A stage of one device.
    pub fn single(device: usize, layers: Range<usize>, role: Role) -> Self {
        Self { layers, members: vec![Member { device, share: 1.0 }], split: Split::Batch, batch_layers: Vec::new(), role }
    }

    /// A stage of a group.
    pub fn group(members: Vec<Member>, layers: Range<usize>, split: Split, role: Role) -> Self {
        Self { layers, members, split, batch_layers: Vec::new(), role }
    }

    /// The slowest link between members.
    pub(super) fn inner_link(&self, p: &Problem) -> Link {
        worst(self.members.iter().flat_map(|a| self.members.iter().filter(|b| a.device != b.device).map(|b| p.link(a.device, b.device))))
    }

    /// The slowest link from a member to one of `next`.
    pub(super) fn link_to(&self, p: &Problem, next: &Self) -> Link {
        worst(self.members.iter().flat_map(|a| next.members.iter().map(|b| p.link(a.device, b.device))))
    }

    /// Seconds of an all-reduce of `bytes` over a ring: 2 (g-1) rounds of a g-th.
    pub(super) fn all_reduce(&self, p: &Problem, bytes: f64) -> f64 {
        let g = self.members.len() as f64;
        if g < 2.0 {
            return 0.0;
        }
        let link = self.inner_link(p);
        2.0 * (g - 1.0) * link.transfer(bytes / g)
    }

    /// Times of the stage, and each member's part of the busy time.
    pub(super) fn timing(&self, p: &Problem) -> (StageTiming, Vec<f64>) {
        let own: Vec<(f64, StageTiming)> = self.members.iter().map(|m| (m.share, p.stage(m.device, &self.layers, self.role))).collect();
        if own.len() == 1 {
            return (own[0].1.clone(), vec![1.0]);
        }
        let slowest = |f: &dyn Fn(&StageTiming) -> f64| own.iter().map(|(share, t)| share * f(t)).fold(0.0, f64::max);
        let mut t = own[0].1.clone();
        t.perturbed_beta = slowest(&|t| t.perturbed_beta);
        t.perturbed_alpha = own.iter().map(|(_, t)| t.perturbed_alpha).fold(0.0, f64::max);
        if self.split == Split::Directions {
            // Everybody needs the base pass that its directions are measured against.
            t.forward = own.iter().map(|(_, t)| t.forward).fold(0.0, f64::max);
            let parts = own.iter().map(|(share, o)| share * o.perturbed_beta / t.perturbed_beta.max(f64::MIN_POSITIVE)).collect();
            return (t, parts);
        }
        t.forward = slowest(&|t| t.forward);
        t.backward_input = slowest(&|t| t.backward_input);
        t.backward_weight = (slowest(&|t| t.backward_input + t.backward_weight) - t.backward_input).max(0.0);
        let tensor = if self.split == Split::Tensor { self.layers.len() - self.batch_layers.len() } else { 0 };
        t.forward_collective = 2.0 * tensor as f64 * self.all_reduce(p, t.boundary_bytes);
        t.backward_collective = t.forward_collective;
        t.forward += t.forward_collective;
        t.perturbed_beta += t.forward_collective;
        t.backward_input += t.backward_collective;
        let shared: f64 = match self.split {
            Split::Batch => p.gradient_bytes(&self.layers),
            _ => self.batch_layers.iter().map(|l| p.gradient_bytes(&(*l..l + 1))).sum(),
        };
        t.update_collective = self.all_reduce(p, shared);
        t.update = t.update_collective;
        let computing = (t.forward - t.forward_collective).max(f64::MIN_POSITIVE);
        let parts = own.iter().map(|(share, o)| share * o.forward / computing).collect();
        (t, parts)
    }

    /// Bytes that a member holds all the time, and its share of what comes and goes.
    pub(super) fn member_bytes(&self, p: &Problem, member: &Member) -> (f64, f64) {
        let all = p.state_bytes(&self.layers);
        match self.split {
            _ if self.members.len() == 1 => (all, 1.0),
            Split::Batch => (all, member.share),
            Split::Directions => (all, 1.0),
            Split::Tensor => {
                let whole: f64 = self.batch_layers.iter().map(|l| p.state_bytes(&(*l..l + 1))).sum();
                (whole + (all - whole) * member.share, member.share)
            }
        }
    }
}

pub(super) fn worst(links: impl Iterator<Item = Link>) -> Link {
    let mut all = Link::default();
    for link in links {
        all.latency_s = all.latency_s.max(link.latency_s);
        all.bytes_per_s = all.bytes_per_s.min(link.bytes_per_s);
        all.overlap = all.overlap.min(link.overlap);
        all.half_duplex |= link.half_duplex;
    }
    all
}

/// Stages and how they lie on workers.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// In pipeline order, pipelines one after the other.
    pub stages: Vec<StageLayout>,
    /// Pipelines, where there are several.
    pub chains: Vec<Chain>,
    /// Worker of each stage.
    pub placement: Vec<usize>,
}

impl Layout {
    /// One pipeline with a worker per stage.
    pub fn line(stages: Vec<StageLayout>) -> Self {
        let placement = (0..stages.len()).collect();
        Self { stages, chains: Vec::new(), placement }
    }

    /// One device per stage; first-order ones from `cut` on, those in front by `method`.
    pub fn pipeline(devices: &[usize], ends: &[usize], cut: usize, method: &Method) -> Self {
        let mut first = 0;
        let stages = devices.iter().zip(ends).enumerate().map(|(i, (d, end))| {
            let layers = first..*end;
            first = *end;
            StageLayout::single(*d, layers, if i < cut { method.head_role() } else { Role::FirstOrder })
        });
        Self::line(stages.collect())
    }

    /// Whether every pipeline has all layers once and in order, and every device belongs to one worker.
    ///
    /// # Errors
    /// `InvalidArgument` naming the stage or device.
    pub fn check(&self, p: &Problem) -> Result<()> {
        let whole = [Chain { stages: 0..self.stages.len(), micro_batches: 0..p.micro_batches() }];
        for chain in if self.chains.is_empty() { &whole[..] } else { &self.chains } {
            let mut at = 0;
            for s in chain.stages.clone() {
                let stage = self.stages.get(s).ok_or_else(|| Error::invalid(format!("stage {s} of a pipeline does not exist")))?;
                if stage.layers.start != at {
                    return Err(Error::invalid(format!("stage {s} starts at layer {}, but {at} is the next", stage.layers.start)));
                }
                if !stage.batch_layers.is_sorted_by(|a, b| a < b) {
                    return Err(Error::invalid(format!("stage {s}: layers shared by batch are to be in order, each once")));
                }
                at = stage.layers.end;
            }
            if at != p.layers() {
                return Err(Error::invalid(format!("a pipeline ends at layer {at}, the model has {}", p.layers())));
            }
        }
        let mut worker_of = vec![None; p.devices()];
        for (stage, worker) in self.stages.iter().zip(&self.placement) {
            for m in &stage.members {
                if worker_of[m.device].get_or_insert(*worker) != worker {
                    return Err(Error::invalid(format!("device `{}` belongs to two workers", p.device(m.device).name)));
                }
            }
        }
        Ok(())
    }

    fn workers(&self) -> usize {
        self.placement.iter().max().map_or(0, |w| w + 1)
    }

    /// What a step computes.
    pub fn workload(&self, p: &Problem, method: &Method) -> Workload {
        let mut w = p.workload(self.stages.iter().map(|s| s.role).collect(), method);
        w.chains = self.chains.clone();
        if self.is_tail() {
            w.readout = Readout::Tail;
            w.merge_base = false;
            w.exit_directions = 0;
        }
        w
    }

    /// Whether zeroth-order stages lie behind first-order ones: a model of latency.
    fn is_tail(&self) -> bool {
        self.stages.first().is_some_and(|s| s.role == Role::FirstOrder) && self.stages.last().is_some_and(|s| s.role == Role::ZerothOrder)
    }

    /// What stages and links take.
    pub fn timing(&self, p: &Problem) -> Timing {
        let mut timing = Timing::new(self.stages.iter().map(|s| s.timing(p).0).collect());
        for a in 0..self.stages.len() {
            for b in [a + 1, self.stages.len() - 1] {
                if b < self.stages.len() && self.placement[a] != self.placement[b] {
                    let (from, to) = (&self.stages[a].members, &self.stages[b].members);
                    let there = worst(from.iter().flat_map(|x| to.iter().map(|y| p.link(x.device, y.device))));
                    let back = worst(from.iter().flat_map(|x| to.iter().map(|y| p.link(y.device, x.device))));
                    timing.links.pairs.insert((self.placement[a], self.placement[b]), there);
                    timing.links.pairs.insert((self.placement[b], self.placement[a]), back);
                }
            }
        }
        // The gradient at the cut goes to every stage in front of it where nothing else is read there.
        let cut = self.stages.iter().position(|s| s.role == Role::FirstOrder).unwrap_or(0);
        for s in 0..cut.saturating_sub(1) {
            let (from, to) = (&self.stages[cut].members, &self.stages[s].members);
            let link = worst(from.iter().flat_map(|x| to.iter().map(|y| p.link(x.device, y.device))));
            timing.links.pairs.entry((self.placement[cut], self.placement[s])).or_insert(link);
        }
        self.replicas(p, &mut timing);
        timing
    }

    /// Stages of different pipelines with the same layers keep the same adapters: their updates wait for the all-reduce.
    fn replicas(&self, p: &Problem, timing: &mut Timing) {
        if self.chains.len() < 2 {
            return;
        }
        // Pipelines may cut the model differently; what overlaps is exchanged.
        for s in 0..self.stages.len() {
            let own = self.chain_of(s);
            let others: Vec<usize> = (0..self.stages.len())
                .filter(|o| self.chain_of(*o) != own)
                .filter(|o| {
                    self.stages[*o].layers.start < self.stages[s].layers.end && self.stages[s].layers.start < self.stages[*o].layers.end
                })
                .collect();
            let links = others.iter().flat_map(|o| {
                let (a, b) = (&self.stages[s].members, &self.stages[*o].members);
                a.iter().flat_map(|x| b.iter().filter(|y| x.device != y.device).map(|y| p.link(x.device, y.device)))
            });
            let (link, g) = (worst(links), self.chains.len() as f64);
            let time = 2.0 * (g - 1.0) * link.transfer(p.gradient_bytes(&self.stages[s].layers) / g);
            timing.stages[s].update += time;
            timing.stages[s].update_collective += time;
            timing.replicas.push([&[s][..], &others].concat());
        }
    }

    fn chain_of(&self, stage: usize) -> usize {
        self.chains.iter().position(|c| c.stages.contains(&stage)).unwrap_or(0)
    }

    /// The order called `name` for this layout.
    ///
    /// # Errors
    /// As [`ScheduleName::build_for`]; `InvalidArgument` where the schedule wants the stages laid out in another way.
    pub fn schedule(&self, p: &Problem, method: &Method, name: ScheduleName, timing: &Timing) -> Result<Schedule> {
        let workers = self.workers();
        let schedule = match name {
            ScheduleName::Interleaved if workers > 0 && self.stages.len().is_multiple_of(workers) => {
                order::interleaved(workers, self.stages.len() / workers, p.micro_batches())?
            }
            ScheduleName::Chimera if self.chains.len() == 2 => order::chimera(workers, p.micro_batches())?,
            _ if self.chains.len() > 1 => self.side_by_side(p, name)?,
            _ => name.build_for(&self.workload(p, method), timing)?,
        };
        match schedule.placement == self.placement {
            true => Ok(schedule),
            false => Err(Error::invalid(format!("schedule `{}` does not go with these stages", name.name()))),
        }
    }

    /// Pipelines that share nothing but the update, each in the order called `name`.
    fn side_by_side(&self, p: &Problem, name: ScheduleName) -> Result<Schedule> {
        let mut workload = self.workload(p, &Method::FROZEN);
        workload.chains = self.chains.clone();
        let (mut lists, mut credits) = (Vec::new(), None);
        for chain in &self.chains {
            let n = chain.micro_batches.len() as u32;
            let own = name.build(&Workload::first_order(chain.stages.len(), n.max(1)))?;
            for list in own.lists {
                let moved = list.into_iter().map(|step| step.shifted(chain.stages.start, chain.micro_batches.start));
                lists.push(moved.collect());
            }
            let c = credits.get_or_insert(own.credits);
            (c.hidden, c.delta) = (c.hidden.max(own.credits.hidden), c.delta.max(own.credits.delta));
        }
        let credits = credits.ok_or_else(|| Error::invalid("no pipeline"))?;
        Ok(Schedule { workload, placement: self.placement.clone(), lists, credits })
    }

    /// Simulates an order of this layout and asks every device whether it fits.
    ///
    /// # Errors
    /// As [`sim::simulate`]; `InvalidArgument` naming the device whose memory is short, and by how much.
    pub fn run(&self, p: &Problem, schedule: Schedule, timing: &Timing, name: ScheduleName) -> Result<Outcome> {
        let timeline = sim::trace(&schedule, timing)?;
        let devices = self.devices(p, &timeline)?;
        Ok(Outcome { layout: self.clone(), name, schedule, timeline, devices })
    }

    /// [`Layout::run`] for the order called `name`.
    ///
    /// # Errors
    /// As [`Layout::run`] and [`Layout::schedule`].
    pub fn simulate(&self, p: &Problem, method: &Method, name: ScheduleName) -> Result<Outcome> {
        let timing = self.timing(p);
        let schedule = self.schedule(p, method, name, &timing)?;
        self.run(p, schedule, &timing, name)
    }

    /// The best of all urgencies that fit, for a line.
    ///
    /// # Errors
    /// As [`Layout::run`], of the urgency that came closest to fitting.
    pub fn best(&self, p: &Problem, method: &Method) -> Result<Outcome> {
        let (w, timing) = (self.workload(p, method), self.timing(p));
        order::check_size(&w)?;
        order::check_roles(&w)?;
        let name = match (w.readout, w.cut()) {
            (Readout::Tail, _) => ScheduleName::HybridopTail,
            (_, 0) if w.stages() == 1 => ScheduleName::Single,
            _ => ScheduleName::HybridopHead,
        };
        let mut failure = None;
        let mut fitting: Vec<(f64, Urgency)> = Vec::new();
        for u in Urgency::all(&w) {
            let timeline = sim::makespan(&w, &timing, &u)?;
            match self.devices(p, &timeline) {
                Ok(_) => fitting.push((timeline.makespan, u)),
                Err(e) => failure = Some(e),
            }
        }
        fitting.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (_, urgency) in fitting {
            // The order as a list starts an action before what it makes has credits, and may hold more at a time for that.
            let (schedule, _) = sim::arrange(&w, &timing, &urgency)?;
            match self.run(p, schedule, &timing, name) {
                Ok(outcome) => return Ok(outcome),
                Err(e) => failure = Some(e),
            }
        }
        Err(failure.unwrap_or_else(|| Error::invalid("no order of work")))
    }

    /// Every device's part in a simulated step.
    ///
    /// # Errors
    /// `InvalidArgument` naming the device whose memory is short, and by how much.
    pub fn devices(&self, p: &Problem, timeline: &Timeline) -> Result<Vec<DeviceReport>> {
        let mut all: Vec<DeviceReport> = Vec::new();
        for (worker, report) in timeline.workers.iter().enumerate() {
            let stages: Vec<usize> = (0..self.stages.len()).filter(|s| self.placement[*s] == worker).collect();
            let Some(&one) = stages.first() else { continue };
            let (_, parts) = self.stages[one].timing(p);
            for (member, part) in self.stages[one].members.iter().zip(parts) {
                let (mut state, mut share) = (0.0, 0.0f64);
                for s in &stages {
                    let (bytes, of_dynamic) = self.stages[*s].member_bytes(p, member);
                    state += bytes;
                    share = share.max(of_dynamic);
                }
                let device = p.device(member.device);
                let peak = state + share * report.peak_dynamic_bytes;
                if let Some(limit) = device.memory_bytes
                    && peak > limit
                {
                    return Err(short(&device.name, peak, limit));
                }
                all.push(DeviceReport {
                    device: member.device,
                    busy: report.busy * part,
                    perturbing: report.perturbing * part,
                    communicating: report.communicating,
                    peak_in_flight: report.peak_in_flight,
                    peak_bytes: peak,
                });
            }
        }
        Ok(all)
    }
}

/// What is said where a device's memory is short.
pub(super) fn short(name: &str, needed: f64, limit: f64) -> Error {
    Error::invalid(format!("memory of device `{name}`: {needed:.0} bytes are needed, it has {limit:.0}, {:.0} too few", needed - limit))
}

/// One device's part in a simulated step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeviceReport {
    /// Index of the device in the costs.
    pub device: usize,
    /// Seconds of computing.
    pub busy: f64,
    /// Of these, on perturbed copies.
    pub perturbing: f64,
    /// Seconds of communication that kept it from computing.
    pub communicating: f64,
    /// Micro-batches forwarded and not yet backpropagated, at most.
    pub peak_in_flight: usize,
    /// Bytes at the peak.
    pub peak_bytes: f64,
}

/// A layout with an order, simulated.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// Who holds what.
    pub layout: Layout,
    /// Name of the order.
    pub name: ScheduleName,
    /// The order.
    pub schedule: Schedule,
    /// The simulated step, with spans.
    pub timeline: Timeline,
    /// Every device's part.
    pub devices: Vec<DeviceReport>,
}

impl Outcome {
    /// Seconds of a step.
    pub fn makespan(&self) -> f64 {
        self.timeline.makespan
    }

    /// Mean over the devices in use of computing time over the makespan.
    pub fn utilisation(&self) -> f64 {
        self.share(|d| d.busy)
    }

    /// The same, perturbed copies not counted.
    pub fn utilisation_without_copies(&self) -> f64 {
        self.share(|d| d.busy - d.perturbing)
    }

    fn share(&self, of: impl Fn(&DeviceReport) -> f64) -> f64 {
        match self.devices.is_empty() || self.makespan() <= 0.0 {
            true => 0.0,
            false => (self.devices.iter().map(of).sum::<f64>() / self.makespan() / self.devices.len() as f64).min(1.0),
        }
    }

    /// Calls devices by other indices: those of costs that have more of them.
    pub fn rename(&mut self, name: impl Fn(usize) -> usize) {
        self.layout.stages.iter_mut().flat_map(|s| &mut s.members).for_each(|m| m.device = name(m.device));
        self.devices.iter_mut().for_each(|d| d.device = name(d.device));
    }

    /// Joules of a step over all devices of the costs, those that are left out idle; `None` where a device's power is not known.
    pub fn joules(&self, p: &Problem) -> Option<f64> {
        (0..p.devices())
            .map(|d| {
                let busy = self.devices.iter().filter(|r| r.device == d).map(|r| r.busy).sum::<f64>();
                let device = p.device(d);
                Some(device.power_busy_w? * busy + device.power_idle_w? * (self.makespan() - busy).max(0.0))
            })
            .sum()
    }
}
