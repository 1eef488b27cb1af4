//! List scheduling under credits, in a simulation with nominal costs.

use crate::ir::{Action, Credits, Lane, Payload, Role, Schedule, Workload};
use std::collections::{HashMap, HashSet};
use zofo_hal::{Error, Result};

/// Nominal cost of an action, in forward passes of one micro-batch.
fn cost(w: &Workload, a: &Action) -> u64 {
    match a {
        Action::Forward { .. } => 1,
        Action::Backward { .. } => 2,
        Action::PerturbedForward(g) | Action::ExitForward(g) => g.copies(w.form).total() as u64,
        Action::Loss { .. } | Action::BoundaryDot(_) | Action::Guide { .. } | Action::Update => 0,
    }
}

/// Smaller is more urgent: what frees memory first, then what feeds the next stage, then extra directions.
fn urgency(a: &Action) -> (u8, u32, u32) {
    match a {
        Action::BoundaryDot(g) => (0, g.m, g.q0),
        Action::Guide { m } => (0, *m, 0),
        Action::Loss { m } => (1, *m, 0),
        Action::Backward { m } => (2, *m, 0),
        Action::Forward { m } => (3, *m, 0),
        Action::PerturbedForward(g) if g.with_base => (3, g.m, 0),
        Action::PerturbedForward(g) => (4, g.m, g.q0 * 2 + u32::from(g.minus)),
        Action::ExitForward(g) => (5, g.m, g.q0),
        Action::Update => (6, 0, 0),
    }
}

struct Stage {
    waiting: Vec<Action>,
    done: HashSet<Action>,
    list: Vec<Action>,
    busy: Option<(u64, Action)>,
    received: HashSet<(usize, Payload)>,
    /// Micro-batches forwarded and not yet backpropagated, on a first-order stage.
    in_flight: usize,
}

struct Simulation<'a> {
    w: &'a Workload,
    credits: Credits,
    stages: Vec<Stage>,
    /// Messages sent and not yet taken; one made but not yet sent holds its slot too.
    arrived: HashSet<(usize, usize, Payload)>,
    used: HashMap<(usize, usize, Lane), usize>,
    /// Micro-batches of which the first stage has started a direction.
    entered: HashSet<u32>,
    /// Groups of each micro-batch that are not read at the cut yet.
    unread: HashMap<u32, usize>,
}

impl Simulation<'_> {
    fn ready(&self, s: usize, a: &Action) -> bool {
        let (w, stage) = (self.w, &self.stages[s]);
        let first_order = w.roles[s] == Role::FirstOrder;
        w.requires(s, a).iter().all(|r| stage.done.contains(r))
            && w.consumes(s, a).iter().all(|(from, p)| stage.received.contains(&(*from, *p)) || self.arrived.contains(&(*from, s, *p)))
            && w.produces(s, a).iter().all(|(to, p)| self.used.get(&(s, *to, p.lane())).copied().unwrap_or(0) < self.credits.lane(p.lane()))
            && match a {
                Action::Forward { .. } if first_order => stage.in_flight < (w.micro_batches as usize).min(w.stages() - s),
                // Admitted where it enters: further down, a full lane could hold what is refused and lack what is waited for.
                Action::PerturbedForward(g) if s == 0 && w.cut() > 0 => self.entered(g.m) || self.awaiting() < self.credits.awaiting,
                // Gradients are accumulated in the order of the micro-batches on every stage, so that the split does not change their bits.
                Action::Backward { m } | Action::Guide { m } => !stage.waiting.iter().any(|o| match o {
                    Action::Backward { m: k } | Action::Guide { m: k } => k < m,
                    _ => false,
                }),
                _ => true,
            }
    }

    /// Whether any direction of a micro-batch has been started.
    fn entered(&self, m: u32) -> bool {
        self.entered.contains(&m)
    }

    /// Micro-batches that have entered and whose slopes are not all read yet.
    fn awaiting(&self) -> usize {
        self.entered.iter().filter(|m| self.unread.get(m).is_some_and(|n| *n > 0)).count()
    }

    fn start(&mut self, s: usize, now: u64, index: usize) {
        let w = self.w;
        let a = self.stages[s].waiting.remove(index);
        for (from, p) in w.consumes(s, &a) {
            if self.stages[s].received.insert((from, p)) {
                self.arrived.remove(&(from, s, p));
                *self.used.get_mut(&(from, s, p.lane())).expect("a message in a lane has a slot") -= 1;
            }
        }
        for (to, p) in w.produces(s, &a) {
            *self.used.entry((s, to, p.lane())).or_default() += 1;
        }
        match a {
            Action::Forward { .. } if w.roles[s] == Role::FirstOrder => self.stages[s].in_flight += 1,
            Action::Backward { .. } => self.stages[s].in_flight -= 1,
            Action::PerturbedForward(g) if s == 0 => drop(self.entered.insert(g.m)),
            Action::BoundaryDot(g) => *self.unread.get_mut(&g.m).expect("every readout was counted") -= 1,
            _ => {}
        }
        self.stages[s].list.push(a);
        self.stages[s].busy = Some((now + cost(w, &a), a));
    }

    fn finish(&mut self, s: usize, a: Action) {
        for (to, p) in self.w.produces(s, &a) {
            self.arrived.insert((s, to, p));
        }
        self.stages[s].done.insert(a);
    }
}

pub(super) fn order(w: &Workload) -> Result<Schedule> {
    let credits = Credits::for_workload(w);
    let stages: Vec<Stage> = (0..w.stages())
        .map(|s| {
            let mut waiting = w.expected(s);
            waiting.sort_by_key(urgency);
            Stage { waiting, done: HashSet::new(), list: Vec::new(), busy: None, received: HashSet::new(), in_flight: 0 }
        })
        .collect();
    let mut unread = HashMap::new();
    for stage in &stages {
        for a in &stage.waiting {
            if let Action::BoundaryDot(g) = a {
                *unread.entry(g.m).or_default() += 1;
            }
        }
    }
    let (arrived, used, entered) = (HashSet::new(), HashMap::new(), HashSet::new());
    let mut sim = Simulation { w, credits, stages, arrived, used, entered, unread };
    let mut now = 0;
    loop {
        // Start and finish at the same instant until nothing moves: actions of no cost must not wait for the clock.
        loop {
            let mut moved = false;
            for s in 0..sim.stages.len() {
                if let Some((end, a)) = sim.stages[s].busy
                    && end <= now
                {
                    sim.stages[s].busy = None;
                    sim.finish(s, a);
                    moved = true;
                }
                if sim.stages[s].busy.is_none()
                    && let Some(i) = (0..sim.stages[s].waiting.len()).find(|i| sim.ready(s, &sim.stages[s].waiting[*i]))
                {
                    sim.start(s, now, i);
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        match sim.stages.iter().filter_map(|s| s.busy.map(|(end, _)| end)).min() {
            Some(next) => now = next,
            None => break,
        }
    }
    if let Some((s, stage)) = sim.stages.iter().enumerate().find(|(_, s)| !s.waiting.is_empty()) {
        return Err(Error::invalid(format!("no order exists under these credits: stage {s} is left with {}", stage.waiting[0])));
    }
    Ok(Schedule { workload: w.clone(), stages: sim.stages.into_iter().map(|s| s.list).collect(), credits })
}
