//! Proof that a schedule can run: every action once, causes before effects, no deadlock under its credits.
//!
//! Stages are deterministic and talk over bounded channels with blocking sends and receives, so they form a Kahn network: whether it
//! deadlocks does not depend on timing, and one untimed run decides it.

use crate::ir::{Action, Lane, Payload, Schedule};
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

fn coverage(schedule: &Schedule) -> Result<()> {
    let w = &schedule.workload;
    if schedule.stages.len() != w.stages() {
        return Err(Error::invalid(format!("{} lists for {} stages", schedule.stages.len(), w.stages())));
    }
    for (s, list) in schedule.stages.iter().enumerate() {
        let mut missing: HashSet<Action> = w.expected(s).into_iter().collect();
        let mut done = HashSet::new();
        for a in list {
            if !missing.remove(a) {
                let why = if done.contains(a) { "twice" } else { "that it has no part in" };
                return Err(Error::invalid(format!("stage {s} does {a} {why}")));
            }
            if let Some(r) = w.requires(s, a).into_iter().find(|r| !done.contains(r)) {
                return Err(Error::invalid(format!("stage {s} does {a} before {r}")));
            }
            done.insert(*a);
        }
        if let Some(a) = missing.into_iter().min() {
            return Err(Error::invalid(format!("stage {s} never does {a}")));
        }
    }
    Ok(())
}

fn run(schedule: &Schedule) -> Result<Peaks> {
    let w = &schedule.workload;
    let n = w.stages();
    let mut next = vec![0usize; n];
    let mut pending: Vec<VecDeque<(usize, Payload)>> = vec![VecDeque::new(); n];
    let mut channels: HashMap<(usize, usize, Lane), VecDeque<Payload>> = HashMap::new();
    let mut received: Vec<HashSet<(usize, Payload)>> = vec![HashSet::new(); n];
    let mut peaks = Peaks { in_flight: vec![0; n], awaiting: vec![0; n] };
    let (mut in_flight, mut awaiting) = (vec![0usize; n], vec![0usize; n]);
    loop {
        let mut moved = false;
        for s in 0..n {
            // A stage first gets rid of what it made: sends block it, in order.
            while let Some((to, p)) = pending[s].front().copied() {
                let channel = channels.entry((s, to, p.lane())).or_default();
                if channel.len() >= schedule.credits.lane(p.lane()) {
                    break;
                }
                channel.push_back(p);
                pending[s].pop_front();
                moved = true;
            }
            if !pending[s].is_empty() {
                continue;
            }
            let Some(a) = schedule.stages[s].get(next[s]) else { continue };
            let mut ready = true;
            for (from, p) in w.consumes(s, a) {
                // A receive reads its channel until the wanted message is there, and keeps the others.
                while !received[s].contains(&(from, p)) {
                    let Some(got) = channels.get_mut(&(from, s, p.lane())).and_then(VecDeque::pop_front) else { break };
                    received[s].insert((from, got));
                    moved = true;
                }
                ready &= received[s].contains(&(from, p));
            }
            if !ready {
                continue;
            }
            match a {
                Action::Forward { .. } if s >= w.cut() => in_flight[s] += 1,
                Action::Backward { .. } => in_flight[s] -= 1,
                Action::PerturbedForward(_) if s + 1 == w.cut() && w.readout == crate::ir::Readout::Cut => awaiting[s] += 1,
                Action::BoundaryDot(_) => awaiting[s] -= 1,
                _ => {}
            }
            peaks.in_flight[s] = peaks.in_flight[s].max(in_flight[s]);
            peaks.awaiting[s] = peaks.awaiting[s].max(awaiting[s]);
            pending[s].extend(w.produces(s, a));
            next[s] += 1;
            moved = true;
        }
        if !moved {
            break;
        }
    }
    if let Some(s) = (0..n).find(|s| next[*s] < schedule.stages[*s].len() || !pending[*s].is_empty()) {
        let what = match pending[s].front() {
            Some((to, p)) => format!("cannot send {p:?} to stage {to}: its channel is full"),
            None => format!("waits for ever at {}", schedule.stages[s][next[s]]),
        };
        return Err(Error::invalid(format!("deadlock: stage {s} {what}")));
    }
    Ok(peaks)
}
