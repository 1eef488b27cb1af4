//! The clock: workers, lanes, links, and memory over time.

use super::{Timeline, Timing, WorkerReport, stuck, timeline::SimSpan};
use crate::ir::{Action, Credits, Lane, Payload, Readout, Role, Step, Workload};
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
};
use zofo_hal::{Result, op::Form};

/// Who decides what a worker does next.
pub(super) trait Order {
    /// What `worker`, which is idle, starts now; `None` to wait.
    fn next(&mut self, state: &mut State<'_>, worker: usize) -> Option<Step>;
    /// Called when nothing moves any more: whether everything was done.
    fn finished(&self, state: &State<'_>) -> Result<()>;
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A message has arrived at a stage.
    Arrive { stage: u32, id: u32, bytes: u64 },
    /// A worker's action ends.
    End { worker: u32 },
    /// A worker is done with what communication kept it from computing.
    Free { worker: u32 },
}

struct Bits(Vec<u64>);

impl Bits {
    fn new(n: usize) -> Self {
        Self(vec![0; n.div_ceil(64)])
    }

    fn get(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }

    fn set(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }
}

/// One channel into a stage.
#[derive(Default)]
struct LaneState {
    /// Credits in use: messages made (or about to be) and not yet taken.
    used: usize,
    /// Messages in the channel in order, where a worker reads it in order.
    queue: VecDeque<u32>,
    /// A worker that waits for a credit.
    blocked: Option<usize>,
    /// Index of the link, or none within a worker.
    link: Option<usize>,
}

struct LinkState {
    link: super::Link,
    free: f64,
}

#[derive(Default)]
struct WorkerState {
    running: Option<Step>,
    occupied: bool,
    /// Messages that its last action made and that have no credit yet.
    pending: VecDeque<(usize, Payload, f64)>,
    stall: f64,
    bytes: f64,
    report: WorkerReport,
}

#[derive(Default)]
struct StageState {
    /// Actions left, the update not counted.
    left: usize,
    in_flight: usize,
    awaiting: usize,
}

/// What the clock knows; orders look at it.
pub(super) struct State<'a> {
    pub w: &'a Workload,
    pub timing: &'a Timing,
    pub credits: Credits,
    placement: &'a [usize],
    /// Orders that start an action only when what it makes has credits reserve them then; others take them one by one afterwards, and wait.
    reserving: bool,
    now: f64,
    cut: usize,
    groups: usize,
    exits: usize,
    arrived: Vec<Bits>,
    taken: Vec<Bits>,
    lanes: Vec<[LaneState; 3]>,
    links: Vec<LinkState>,
    workers: Vec<WorkerState>,
    stages: Vec<StageState>,
    /// Per micro-batch: groups that are not read at the cut yet.
    unread: Vec<usize>,
    /// Per stage: the stages that hold the same layers.
    replicas: Vec<Vec<usize>>,
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    events: u64,
    /// Workers for which something has changed, each once.
    dirty: Vec<usize>,
    is_dirty: Vec<bool>,
    last_head: usize,
}

impl State<'_> {
    fn messages(&self) -> usize {
        self.w.micro_batches as usize * (2 + self.groups + self.exits)
    }

    /// Number of a message among those of its stage.
    fn id(&self, p: &Payload) -> usize {
        let all = self.w.micro_batches as usize;
        match p {
            Payload::Hidden { m } => *m as usize,
            Payload::Delta { m } => all + *m as usize,
            Payload::Copies(g) => 2 * all + g.m as usize * self.groups + self.w.group_index(g),
            Payload::ExitCopies(g) => (2 + self.groups) * all + g.m as usize * self.exits + self.w.group_index(g),
        }
    }

    fn bytes(&self, from: usize, p: &Payload) -> f64 {
        let blocks = match p {
            Payload::Hidden { .. } | Payload::Delta { .. } => 1,
            Payload::Copies(g) | Payload::ExitCopies(g) => g.copies(self.w.form).total(),
        };
        // A gradient is as large as the activations that it belongs to, which the stage upstream made.
        let maker = if matches!(p, Payload::Delta { .. }) && from > 0 && self.w.readout != Readout::Tail { from - 1 } else { from };
        self.timing.stages[maker].boundary_bytes * blocks as f64
    }

    fn touch(&mut self, worker: usize) {
        if !std::mem::replace(&mut self.is_dirty[worker], true) {
            self.dirty.push(worker);
        }
    }

    /// Whether the message that `action` needs has arrived, or it needs none.
    pub fn has_input(&self, stage: usize, action: &Action) -> bool {
        self.w.consumes(stage, action).is_none_or(|(_, p)| self.arrived[stage].get(self.id(&p)))
    }

    /// Whether all that `action` makes has credits.
    pub fn has_room(&self, stage: usize, action: &Action) -> bool {
        self.w.produces(stage, action).all(|(to, p)| self.lanes[to][p.lane().index()].used < self.credits.lane(p.lane()))
    }

    pub fn in_flight(&self, stage: usize) -> usize {
        self.stages[stage].in_flight
    }

    pub fn left(&self, stage: usize) -> usize {
        self.stages[stage].left
    }

    /// Reads the channel up to the message that `action` needs, as a blocking receive does; whether it has it.
    pub fn fetch(&mut self, stage: usize, action: &Action) -> bool {
        let Some((_, p)) = self.w.consumes(stage, action) else { return true };
        let (id, lane) = (self.id(&p), p.lane().index());
        while !self.taken[stage].get(id) {
            let Some(first) = self.lanes[stage][lane].queue.front().copied() else { return false };
            if !self.arrived[stage].get(first as usize) {
                return false;
            }
            self.lanes[stage][lane].queue.pop_front();
            self.taken[stage].set(first as usize);
            self.release(stage, lane);
        }
        true
    }

    fn release(&mut self, stage: usize, lane: usize) {
        self.lanes[stage][lane].used -= 1;
        if let Some(worker) = self.lanes[stage][lane].blocked.take() {
            self.touch(worker);
        } else if self.reserving {
            // Whoever makes these messages may go on.
            let from = match Lane::ALL[lane] {
                Lane::Delta if stage < self.cut => self.cut,
                Lane::Delta if self.w.readout == Readout::Tail && stage + 1 == self.w.tail() => self.placement.len() - 1,
                Lane::Delta => (stage + 1).min(self.placement.len() - 1),
                _ => stage.saturating_sub(1),
            };
            self.touch(self.placement[from]);
        }
    }

    /// Whether everything that the update of `stage` waits for is done: the stage, those that hold the same layers, and readouts.
    pub fn may_update(&self, stage: usize) -> bool {
        let done = |s: usize| self.stages[s].left == 0;
        let estimated = self.w.roles[stage] == Role::ZerothOrder && self.w.estimates();
        let at_loss = matches!(self.w.readout, Readout::Loss | Readout::Tail);
        done(stage)
            && self.replicas[stage].iter().all(|s| done(*s))
            && (!estimated || ((self.cut == 0 || done(self.cut - 1)) && (!at_loss || done(self.w.stages() - 1))))
    }

    fn push(&mut self, at: f64, event: Event) {
        self.events += 1;
        // Times are not negative, and such floats order as their bits do.
        self.heap.push(Reverse((at.to_bits(), self.events, event)));
    }

    fn hold(&mut self, worker: usize, bytes: f64) {
        let w = &mut self.workers[worker];
        w.bytes += bytes;
        w.report.peak_dynamic_bytes = w.report.peak_dynamic_bytes.max(w.bytes);
    }

    fn start(&mut self, worker: usize, step: Step, spans: Option<&mut Vec<SimSpan>>) {
        let (s, a) = (step.stage(), &step.action);
        let mut wait = 0.0;
        if let Some((from, p)) = self.w.consumes(s, a) {
            let (id, lane) = (self.id(&p), p.lane().index());
            if self.reserving && !self.taken[s].get(id) {
                self.taken[s].set(id);
                self.release(s, lane);
            }
            let bytes = self.bytes(from, &p);
            // A gradient at the cut stays until all slopes of its micro-batch are read.
            if !matches!(a, Action::BoundaryDot(_)) {
                self.hold(worker, -bytes);
            }
            if let Some(l) = self.lanes[s][lane].link
                && !matches!(a, Action::BoundaryDot(g) if self.unread[g.m as usize] < self.groups)
            {
                let link = self.links[l].link;
                wait = (1.0 - link.overlap) * link.occupancy(bytes);
            }
        }
        if self.reserving {
            for (to, p) in self.w.produces(s, a) {
                self.lanes[to][p.lane().index()].used += 1;
            }
        }
        let t = &self.timing.stages[s];
        let exact = s >= self.cut && s < self.w.tail();
        match a {
            Action::Forward { .. } if exact => {
                self.stages[s].in_flight += 1;
                let n = self.stages[s].in_flight;
                let report = &mut self.workers[worker].report;
                report.peak_in_flight = report.peak_in_flight.max(n);
                let bytes = t.activation_bytes;
                self.hold(worker, bytes);
            }
            Action::Forward { .. } if self.keeps_base(s) => self.hold(worker, t.boundary_bytes),
            Action::PerturbedForward(g) if s == self.last_head && self.w.readout == Readout::Cut => {
                self.stages[s].awaiting += 1;
                let n = self.stages[s].awaiting;
                let report = &mut self.workers[worker].report;
                report.peak_awaiting = report.peak_awaiting.max(n);
                let base = usize::from(g.with_base && self.w.form == Form::Value);
                let bytes = t.boundary_bytes * (g.n as usize + base) as f64;
                self.hold(worker, bytes);
            }
            _ => {}
        }
        let t = &self.timing.stages[s];
        let seconds = t.seconds(self.w, s == self.last_head, a);
        let collective = t.collective(self.w, a).min(seconds);
        let w = &mut self.workers[worker];
        w.running = Some(step);
        w.occupied = true;
        w.report.busy += seconds - collective;
        w.report.communicating += collective + wait;
        if let Action::PerturbedForward(g) | Action::ExitForward(g) = a {
            let base = if g.with_base { t.forward } else { 0.0 };
            w.report.perturbing += (seconds - collective - base).max(0.0);
        }
        let (from, to) = (self.now + wait, self.now + wait + seconds);
        if let Some(spans) = spans {
            spans.push(SimSpan { step, start: from, end: to });
        }
        self.push(to, Event::End { worker: worker as u32 });
    }

    /// Whether base outputs of a stage wait for the gradient at the cut.
    fn keeps_base(&self, stage: usize) -> bool {
        stage == self.last_head && self.w.readout == Readout::Cut && self.w.form == Form::Value && self.w.estimates()
    }

    fn end(&mut self, worker: usize) {
        let step = self.workers[worker].running.take().expect("an action that ends was started");
        let (s, a) = (step.stage(), step.action);
        let t = &self.timing.stages[s];
        match a {
            Action::Backward { .. } | Action::BackwardWeight { .. } => {
                self.stages[s].in_flight -= 1;
                self.hold(worker, -t.activation_bytes);
            }
            Action::BoundaryDot(g) => {
                self.stages[s].awaiting -= 1;
                self.unread[g.m as usize] -= 1;
                let all_read = self.unread[g.m as usize] == 0;
                let base = if all_read && self.w.form == Form::Value { 1.0 } else { 0.0 };
                let bytes = t.boundary_bytes * (f64::from(g.n) + base);
                self.hold(worker, -bytes);
                if all_read {
                    let delta = self.bytes(self.cut, &Payload::Delta { m: g.m });
                    self.hold(worker, -delta);
                }
                // Whoever waits for a micro-batch to be read enters at the first stage.
                self.touch(self.placement[0]);
            }
            _ => {}
        }
        if a != Action::Update {
            self.stages[s].left -= 1;
            if self.stages[s].left == 0 {
                (0..self.workers.len()).for_each(|w| self.touch(w));
            }
        }
        let made: Vec<(usize, Payload)> = self.w.produces(s, &a).collect();
        for (to, p) in made {
            let bytes = self.bytes(s, &p);
            self.workers[worker].pending.push_back((to, p, bytes));
        }
        self.flush(worker);
    }

    /// Sends what has credits; the worker is free when nothing is left.
    fn flush(&mut self, worker: usize) {
        while let Some((to, p, bytes)) = self.workers[worker].pending.front().copied() {
            let (id, lane) = (self.id(&p), p.lane());
            if !self.reserving {
                let state = &mut self.lanes[to][lane.index()];
                if state.used >= self.credits.lane(lane) {
                    state.blocked = Some(worker);
                    return;
                }
                state.used += 1;
                state.queue.push_back(id as u32);
            }
            self.workers[worker].pending.pop_front();
            let arrive = Event::Arrive { stage: to as u32, id: id as u32, bytes: bytes.to_bits() };
            match self.lanes[to][lane.index()].link {
                None => self.arrive(to, id, bytes),
                Some(l) => {
                    let state = &mut self.links[l];
                    let taken = state.link.occupancy(bytes);
                    state.free = state.free.max(self.now) + taken;
                    let at = state.free + state.link.latency_s;
                    self.workers[worker].stall += (1.0 - state.link.overlap) * taken;
                    self.push(at, arrive);
                }
            }
        }
        let stall = std::mem::take(&mut self.workers[worker].stall);
        if stall > 0.0 {
            self.workers[worker].report.communicating += stall;
            self.push(self.now + stall, Event::Free { worker: worker as u32 });
        } else {
            self.workers[worker].occupied = false;
            self.touch(worker);
        }
    }

    fn arrive(&mut self, stage: usize, id: usize, bytes: f64) {
        self.arrived[stage].set(id);
        let worker = self.placement[stage];
        self.hold(worker, bytes);
        self.touch(worker);
    }
}

/// A simulation about to run.
pub(super) struct Engine<'a> {
    state: State<'a>,
    spans: Option<Vec<Vec<SimSpan>>>,
    lists: Option<Vec<Vec<Step>>>,
}

impl<'a> Engine<'a> {
    pub fn new(w: &'a Workload, placement: &'a [usize], workers: usize, timing: &'a Timing, credits: Credits, reserving: bool) -> Self {
        let stages = w.stages();
        let (groups, exits) = (w.groups_per_micro_batch(), w.exit_groups_per_micro_batch());
        let cut = w.cut();
        let mut state = State {
            w,
            timing,
            credits,
            placement,
            reserving,
            now: 0.0,
            cut,
            groups,
            exits,
            arrived: Vec::new(),
            taken: Vec::new(),
            lanes: Vec::new(),
            links: Vec::new(),
            workers: (0..workers).map(|_| WorkerState::default()).collect(),
            stages: Vec::new(),
            unread: vec![groups; w.micro_batches as usize],
            replicas: vec![Vec::new(); stages],
            heap: BinaryHeap::new(),
            events: 0,
            dirty: (0..workers).collect(),
            is_dirty: vec![true; workers],
            last_head: if cut > 0 { cut - 1 } else { usize::MAX },
        };
        for set in &timing.replicas {
            set.iter().for_each(|s| state.replicas[*s].extend(set.iter().filter(|o| *o != s)));
        }
        let messages = state.messages();
        let mut links: HashMap<(usize, usize), usize> = HashMap::new();
        for s in 0..stages {
            state.arrived.push(Bits::new(messages));
            state.taken.push(Bits::new(messages));
            state.stages.push(StageState { left: actions(w, s), ..StageState::default() });
            // Who sends on each lane follows from the dataflow.
            let downstream = if s < cut { cut } else { s + 1 };
            let downstream = if w.readout == Readout::Tail && s + 1 == w.tail() { stages - 1 } else { downstream };
            let from = [s.checked_sub(1), s.checked_sub(1), (downstream < stages).then_some(downstream)];
            let lanes = from.map(|from| {
                let ends = from.map(|f| (placement[f], placement[s])).filter(|(a, b)| a != b);
                let link = ends.map(|(a, b)| {
                    let link = timing.links.get(a, b);
                    let key = if link.half_duplex { (a.min(b), a.max(b)) } else { (a, b) };
                    *links.entry(key).or_insert_with(|| {
                        state.links.push(LinkState { link, free: 0.0 });
                        state.links.len() - 1
                    })
                });
                LaneState { link, ..LaneState::default() }
            });
            state.lanes.push(lanes);
        }
        Self { state, spans: None, lists: None }
    }

    /// Keeps every action's start and end.
    pub fn trace(&mut self) {
        self.spans = Some(vec![Vec::new(); self.state.workers.len()]);
    }

    /// Keeps the order.
    pub fn record(&mut self) {
        self.lists = Some(vec![Vec::new(); self.state.workers.len()]);
    }

    pub fn run(mut self, mut order: impl Order) -> Result<(Timeline, Vec<Vec<Step>>)> {
        loop {
            // What happens at one instant happens together: a worker decides when all of it is known.
            while let Some(Reverse((at, _, event))) = self.state.heap.peek().copied() {
                if f64::from_bits(at) > self.state.now {
                    break;
                }
                self.state.heap.pop();
                match event {
                    Event::End { worker } => self.state.end(worker as usize),
                    Event::Free { worker } => {
                        self.state.workers[worker as usize].occupied = false;
                        self.state.touch(worker as usize);
                    }
                    Event::Arrive { stage, id, bytes } => self.state.arrive(stage as usize, id as usize, f64::from_bits(bytes)),
                }
            }
            if !self.state.dirty.is_empty() {
                let mut dirty = std::mem::take(&mut self.state.dirty);
                dirty.sort_unstable();
                for &worker in &dirty {
                    self.state.is_dirty[worker] = false;
                    if !self.state.workers[worker].pending.is_empty() {
                        self.state.flush(worker);
                    }
                    if self.state.workers[worker].occupied {
                        continue;
                    }
                    if let Some(step) = order.next(&mut self.state, worker) {
                        let spans = self.spans.as_mut().map(|s| &mut s[worker]);
                        self.state.start(worker, step, spans);
                        if let Some(lists) = &mut self.lists {
                            lists[worker].push(step);
                        }
                    }
                }
                if self.state.dirty.is_empty() {
                    dirty.clear();
                    self.state.dirty = dirty;
                }
                continue;
            }
            match self.state.heap.peek() {
                Some(Reverse((at, _, _))) => self.state.now = f64::from_bits(*at),
                None => break,
            }
        }
        if let Some(w) = self.state.workers.iter().find(|w| !w.pending.is_empty()) {
            let (to, p, _) = w.pending[0];
            return Err(stuck(to, &format!("takes no more {p:?}: the credits of the link to it are used up, and nobody reads it")));
        }
        order.finished(&self.state)?;
        let workers = self.state.workers.into_iter().map(|w| w.report).collect();
        let timeline = Timeline { makespan: self.state.now, workers, spans: self.spans.unwrap_or_default() };
        Ok((timeline, self.lists.unwrap_or_default()))
    }
}

/// Number of actions of a stage, the update not counted.
fn actions(w: &Workload, stage: usize) -> usize {
    let per_micro_batch = w.actions_per_micro_batch(stage);
    w.chain(stage).micro_batches.len() * per_micro_batch
}
