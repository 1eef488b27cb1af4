//! The performance model: where each worker idles.

use crate::{ir::Action, sim::Timeline};

/// Seconds that a worker idles in a step, updates not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bubbles {
    /// In front of its first action.
    pub leading: f64,
    /// Behind its last action.
    pub trailing: f64,
    /// In between.
    pub residual: f64,
}

impl Bubbles {
    /// Leading and trailing.
    pub fn boundary(&self) -> f64 {
        self.leading + self.trailing
    }

    /// All.
    pub fn sum(&self) -> f64 {
        self.boundary() + self.residual
    }
}

/// Bubbles of every worker of a simulated step with spans.
pub fn bubbles(timeline: &Timeline) -> Vec<Bubbles> {
    let of = |spans: &Vec<crate::sim::SimSpan>| {
        let work = || spans.iter().filter(|s| s.step.action != Action::Update);
        let (first, last) = (work().next()?, work().next_back()?);
        let busy: f64 = work().map(|s| s.end - s.start).sum();
        Some(Bubbles { leading: first.start, trailing: timeline.makespan - last.end, residual: (last.end - first.start - busy).max(0.0) })
    };
    timeline.spans.iter().map(|spans| of(spans).unwrap_or_default()).collect()
}
