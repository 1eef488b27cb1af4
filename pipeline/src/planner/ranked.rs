//! The best few candidates by what a planner predicts, and the first of them that a device's memory allows.

use super::{Layout, Method, Problem, Proposal};
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

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Best first.
    pub fn into_iter(self) -> impl Iterator<Item = T> {
        self.entries.into_iter().map(|(_, t)| t)
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
