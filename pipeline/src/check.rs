//! Proof that a schedule can run: every action once, causes before effects, no deadlock under its credits.
//!
//! Workers are deterministic and talk over bounded channels with blocking sends and receives, so they form a Kahn network: whether it
//! deadlocks does not depend on timing, and one untimed run decides it. Messages between stages of one worker are given credits here too; the
//! executor hands them over without any, and more room never makes a network of this kind wait. Nor does it where several devices go through one list:
//! the run found here is one of theirs too, with every device of a group at the same step, and each of their channels carries some of the messages of
//! the one counted here, in its order.

use crate::ir::{Action, Group, Lane, Payload, Readout, Schedule, Workload};
use std::collections::{HashMap, HashSet, VecDeque};
use zofo_hal::{Error, Result};

/// What a schedule needs at most, found while checking it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peaks {
    /// Per stage: micro-batches forwarded and not yet backpropagated.
    pub in_flight: Vec<usize>,
    /// Per stage: groups of perturbed outputs kept for the gradient at the cut.
    pub awaiting: Vec<usize>,
}

/// Checks `schedule`.
///
/// # Errors
/// `InvalidArgument` that names the stage and the action that is missing, extra, too early, or stuck.
pub fn check(schedule: &Schedule) -> Result<Peaks> {
    coverage(schedule)?;
    run(schedule)
}

pub(crate) fn coverage(schedule: &Schedule) -> Result<()> {
    let w = &schedule.workload;
    crate::order::check_size(w)?;
    chains(w)?;
    if schedule.placement.len() != w.stages() {
        return Err(Error::invalid(format!("{} stages are placed, there are {}", schedule.placement.len(), w.stages())));
    }
    if let Some((s, worker)) = schedule.placement.iter().enumerate().find(|(_, worker)| **worker >= schedule.workers()) {
        return Err(Error::invalid(format!("stage {s} is placed on worker {worker}, there are {}", schedule.workers())));
    }
    let mut expected: Vec<Expected> = (0..w.stages()).map(|s| Expected::new(w, s)).collect();
    for (worker, list) in schedule.lists.iter().enumerate() {
        for step in list {
            let (s, a) = (step.stage(), &step.action);
            if schedule.placement.get(s) != Some(&worker) {
                return Err(Error::invalid(format!("worker {worker} does {a} of stage {s}, which it does not have")));
            }
            let Some(place) = expected[s].place(w, a) else {
                return Err(Error::invalid(format!("stage {s} does {a} that it has no part in")));
            };
            if std::mem::replace(&mut expected[s].done[place], true) {
                return Err(Error::invalid(format!("stage {s} does {a} twice")));
            }
            let first = match a {
                Action::Update => expected[s].missing().find(|m| *m != Action::Update),
                _ => w.requires(s, a).into_iter().find(|r| expected[s].place(w, r).is_none_or(|i| !expected[s].done[i])),
            };
            if let Some(first) = first {
                return Err(Error::invalid(format!("stage {s} does {a} before {first}")));
            }
        }
    }
    match expected.iter().enumerate().find_map(|(s, e)| e.missing().min().map(|a| (s, a))) {
        Some((s, a)) => Err(Error::invalid(format!("stage {s} never does {a}"))),
        None => Ok(()),
    }
}

/// Whether several pipelines follow one another in stages and micro-batches, and are all there is.
fn chains(w: &Workload) -> Result<()> {
    let (mut stages, mut micro_batches) = (0, 0);
    for c in &w.chains {
        if c.stages.start != stages || c.stages.is_empty() || c.micro_batches.start != micro_batches || c.micro_batches.end < micro_batches
        {
            return Err(Error::invalid("pipelines must follow one another in stages and micro-batches"));
        }
        (stages, micro_batches) = (c.stages.end, c.micro_batches.end);
    }
    match w.chains.is_empty() || (stages, micro_batches) == (w.stages(), w.micro_batches) {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "pipelines of {stages} stages and {micro_batches} micro-batches for a step of {} and {}",
            w.stages(),
            w.micro_batches
        ))),
    }
}

/// The actions of a stage, each in a place of its own: steps have millions of them.
struct Expected {
    actions: Vec<Option<Action>>,
    done: Vec<bool>,
}

impl Expected {
    fn new(w: &Workload, stage: usize) -> Self {
        let mut all = Self { actions: Vec::new(), done: Vec::new() };
        for a in w.expected(stage) {
            if let Some(i) = Self::number(w, &a) {
                if all.actions.len() <= i {
                    all.actions.resize(i + 1, None);
                }
                all.actions[i] = Some(a);
            }
        }
        all.done = vec![false; all.actions.len()];
        all
    }

    fn number(w: &Workload, a: &Action) -> Option<usize> {
        let groups = w.groups_per_micro_batch();
        // The update, six actions of a micro-batch, and groups of three kinds.
        let each = 6 + 2 * groups + w.exit_groups_per_micro_batch();
        let group = |g: &Group, most: usize| Some(w.group_index(g)).filter(|i| *i < most);
        let kind = match a {
            Action::Update => return Some(0),
            Action::Forward { .. } => 0,
            Action::Loss { .. } => 1,
            Action::Backward { .. } => 2,
            Action::BackwardInput { .. } => 3,
            Action::BackwardWeight { .. } => 4,
            Action::Guide { .. } => 5,
            Action::PerturbedForward(g) => 6 + group(g, groups)?,
            Action::BoundaryDot(g) => 6 + groups + group(g, groups)?,
            Action::ExitForward(g) => 6 + 2 * groups + group(g, w.exit_groups_per_micro_batch())?,
        };
        let m = a.micro_batch().filter(|m| *m < w.micro_batches)? as usize;
        Some(1 + m * each + kind)
    }

    fn place(&self, w: &Workload, a: &Action) -> Option<usize> {
        Self::number(w, a).filter(|i| self.actions.get(*i).is_some_and(|e| e.as_ref() == Some(a)))
    }

    fn missing(&self) -> impl Iterator<Item = Action> + '_ {
        self.actions.iter().zip(&self.done).filter(|(_, done)| !**done).filter_map(|(a, _)| *a)
    }
}

fn run(schedule: &Schedule) -> Result<Peaks> {
    let w = &schedule.workload;
    let (stages, workers) = (w.stages(), schedule.workers());
    let mut next = vec![0usize; workers];
    let mut pending: Vec<VecDeque<(usize, usize, Payload)>> = vec![VecDeque::new(); workers];
    let mut channels: HashMap<(usize, usize, Lane), VecDeque<Payload>> = HashMap::new();
    let mut received: Vec<HashSet<(usize, Payload)>> = vec![HashSet::new(); stages];
    let mut peaks = Peaks { in_flight: vec![0; stages], awaiting: vec![0; stages] };
    let (mut in_flight, mut awaiting) = (vec![0usize; stages], vec![0usize; stages]);
    loop {
        let mut moved = false;
        for worker in 0..workers {
            // A worker first gets rid of what it made: sends block it, in order.
            while let Some((from, to, p)) = pending[worker].front().copied() {
                let channel = channels.entry((from, to, p.lane())).or_default();
                if channel.len() >= schedule.credits.lane(p.lane()) {
                    break;
                }
                channel.push_back(p);
                pending[worker].pop_front();
                moved = true;
            }
            if !pending[worker].is_empty() {
                continue;
            }
            let Some(step) = schedule.lists[worker].get(next[worker]) else { continue };
            let (s, a) = (step.stage(), &step.action);
            if let Some((from, p)) = w.consumes(s, a) {
                // A receive reads its channel until the wanted message is there, and keeps the others.
                while !received[s].contains(&(from, p)) {
                    let Some(got) = channels.get_mut(&(from, s, p.lane())).and_then(VecDeque::pop_front) else { break };
                    received[s].insert((from, got));
                    moved = true;
                }
                if !received[s].contains(&(from, p)) {
                    continue;
                }
            }
            match a {
                Action::Forward { .. } if s >= w.cut() => in_flight[s] += 1,
                Action::Backward { .. } | Action::BackwardWeight { .. } => in_flight[s] -= 1,
                Action::PerturbedForward(_) if s + 1 == w.cut() && w.readout == Readout::Cut => awaiting[s] += 1,
                Action::BoundaryDot(_) => awaiting[s] -= 1,
                _ => {}
            }
            peaks.in_flight[s] = peaks.in_flight[s].max(in_flight[s]);
            peaks.awaiting[s] = peaks.awaiting[s].max(awaiting[s]);
            pending[worker].extend(w.produces(s, a).map(|(to, p)| (s, to, p)));
            next[worker] += 1;
            moved = true;
        }
        if !moved {
            break;
        }
    }
    if let Some(worker) = (0..workers).find(|i| next[*i] < schedule.lists[*i].len() || !pending[*i].is_empty()) {
        let what = match pending[worker].front() {
            Some((from, to, p)) => {
                format!("stage {from} waits for ever to send {:?} to stage {to}: the credits of their link are used up", p.lane())
                    .to_lowercase()
            }
            None => {
                let step = schedule.lists[worker][next[worker]];
                format!("stage {} waits for ever at {}", step.stage, step.action)
            }
        };
        return Err(Error::invalid(format!("deadlock: {what}")));
    }
    Ok(peaks)
}
