//! The best few candidates by what a planner predicts, and the first of them that a device's memory allows.

use super::{Layout, Method, Outcome, Problem, Proposal};
use crate::order::ScheduleName;
use zofo_hal::{Error, Result};

/// The best few by predicted time, best first; of equal ones the first to come.
pub(super) struct Ranked<T> {
    most: usize,
    entries: Vec<(f64, T)>,
}

impl<T> Ranked<T> {
    /// At most so many.
    pub fn new(most: usize) -> Self {
        Self { most, entries: Vec::new() }
    }

    /// Takes part with a predicted time.
    pub fn offer(&mut self, time: f64, make: impl FnOnce() -> T) {
        let at = self.entries.partition_point(|(t, _)| *t <= time);
        if at < self.most {
            self.entries.insert(at, (time, make()));
            self.entries.truncate(self.most);
        }
    }

    /// Whether it would take part with a predicted time.
    pub fn takes(&self, time: f64) -> bool {
        self.entries.len() < self.most || self.entries.last().is_some_and(|(worst, _)| time < *worst)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Best first.
    pub fn into_iter(self) -> impl Iterator<Item = T> {
        self.entries.into_iter().map(|(_, t)| t)
    }
}

/// The fastest of the first `most` candidates that fit; `None` where there is none; else what the first lacks.
pub(super) fn fastest<T>(
    candidates: impl IntoIterator<Item = T>,
    most: usize,
    simulate: impl Fn(&T) -> Result<Outcome>,
) -> Result<Option<(T, Outcome)>> {
    let (mut best, mut failure, mut fitting): (Option<(T, Outcome)>, _, _) = (None, None, 0);
    for candidate in candidates {
        match simulate(&candidate) {
            Ok(outcome) => {
                fitting += 1;
                if best.as_ref().is_none_or(|(_, b)| outcome.makespan() < b.makespan()) {
                    best = Some((candidate, outcome));
                }
            }
            Err(e) => failure = failure.or(Some(e)),
        }
        if fitting == most {
            break;
        }
    }
    match (best, failure) {
        (None, Some(e)) => Err(e),
        (best, _) => Ok(best),
    }
}

/// The first layout that fits by the simulator's count, which knows messages under way too; else what the first of them lacks.
pub(super) fn first_fit(
    p: &Problem,
    layouts: impl IntoIterator<Item = Layout>,
    name: ScheduleName,
    notes: Vec<String>,
) -> Result<Proposal> {
    let mut failure = None;
    for layout in layouts {
        match layout.simulate(p, &Method::FROZEN, name) {
            Ok(outcome) => return Ok(Proposal { outcome, method: Method::FROZEN, notes }),
            Err(e) => failure = failure.or(Some(e)),
        }
    }
    Err(failure.unwrap_or_else(|| Error::invalid("no split")))
}

/// Leaves out the device of least memory, of equal ones the last: what is tried where nothing fits on all.
pub(super) fn drop_smallest(p: &Problem, devices: &mut Vec<usize>) {
    let memory = |d: &usize| p.device(*d).memory_bytes.unwrap_or(f64::INFINITY);
    if let Some((i, _)) = devices.iter().enumerate().rev().min_by(|a, b| memory(a.1).total_cmp(&memory(b.1))) {
        devices.remove(i);
    }
}
