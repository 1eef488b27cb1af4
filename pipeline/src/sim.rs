//! An exact event-driven simulator of any schedule.
//!
//! Time passes in actions and on links, nothing else. A worker does one action at a time. What it made goes out on the link to the other
//! worker, first come first served: bytes occupy the link at its rate, latency then delays what has been sent without occupying it. A lane
//! holds as many messages as the schedule has credits, those under way included; a worker with no credit left waits, as the executor's does.
//! Equal inputs give equal results, ties are broken by pipeline order.
//!
//! Two things are asked of it, and both are the same engine: how long a given order takes ([`simulate`]), and which order comes of always
//! taking the most urgent action that is ready ([`arrange`]).

mod engine;
mod fixed;
mod timeline;
mod timing;
mod urgency;

pub use timeline::{SimSpan, Timeline, WorkerReport};
pub use timing::{Link, LinkTable, StageTiming, Timing};
pub use urgency::{Class, HeadOrder, InFlight, Urgency};

use crate::ir::{Schedule, Workload};
use engine::Engine;
use zofo_hal::{Error, Result};

/// The time that `schedule` takes.
///
/// For a fixed order, and links that are not half duplex, faster stages or links never lengthen it: all start times are maxima of sums.
///
/// # Errors
/// `InvalidArgument` where the schedule is not complete and causal, or ends in a deadlock, naming stage and action; or where `timing` is not of
/// its stages.
pub fn simulate(schedule: &Schedule, timing: &Timing) -> Result<Timeline> {
    checked(schedule, timing)?;
    replay(schedule, timing)
}

fn checked(schedule: &Schedule, timing: &Timing) -> Result<()> {
    crate::check::coverage(schedule)?;
    timing.check(&schedule.workload, schedule.workers())
}

/// As [`simulate`], with every action's start and end.
///
/// # Errors
/// As [`simulate`].
pub fn trace(schedule: &Schedule, timing: &Timing) -> Result<Timeline> {
    checked(schedule, timing)?;
    let mut engine = Engine::new(&schedule.workload, &schedule.placement, schedule.workers(), timing, schedule.credits, false);
    engine.trace();
    engine.run(fixed::FixedOrder::new(&schedule.lists)).map(|(timeline, _)| timeline)
}

/// The order that comes of `urgency` at these times, one worker per stage, and the time it takes.
///
/// # Errors
/// `InvalidArgument` where credits leave a stage waiting for ever, naming it.
pub fn arrange(workload: &Workload, timing: &Timing, urgency: &Urgency) -> Result<(Schedule, Timeline)> {
    let placement: Vec<usize> = (0..workload.stages()).collect();
    arrange_on(workload, &placement, placement.len(), timing, urgency)
}

/// As [`arrange`], with stage `s` on worker `placement[s]` of `workers`.
///
/// # Errors
/// As [`arrange`]; `InvalidArgument` where `placement` is not of the workload's stages and these workers.
pub fn arrange_on(
    workload: &Workload,
    placement: &[usize],
    workers: usize,
    timing: &Timing,
    urgency: &Urgency,
) -> Result<(Schedule, Timeline)> {
    if placement.len() != workload.stages() {
        return Err(Error::invalid(format!("{} stages are placed, there are {}", placement.len(), workload.stages())));
    }
    if let Some((s, worker)) = placement.iter().enumerate().find(|(_, worker)| **worker >= workers) {
        return Err(Error::invalid(format!("stage {s} is placed on worker {worker}, there are {workers}")));
    }
    timing.check(workload, workers)?;
    let mut engine = Engine::new(workload, placement, workers, timing, urgency.credits, true);
    engine.record();
    let order = urgency::ByUrgency::new(workload, placement, workers, urgency);
    let (timeline, lists) = engine.run(order)?;
    Ok((Schedule { workload: workload.clone(), placement: placement.to_vec(), lists, credits: urgency.credits }, timeline))
}

/// The time of [`arrange`] without the order, for searches.
///
/// # Errors
/// As [`arrange`].
pub fn makespan(workload: &Workload, timing: &Timing, urgency: &Urgency) -> Result<Timeline> {
    let placement: Vec<usize> = (0..workload.stages()).collect();
    makespan_on(workload, &placement, placement.len(), timing, urgency)
}

/// The time of [`arrange_on`] without the order, for searches: `placement` and `timing` are taken as they are.
pub(crate) fn makespan_on(w: &Workload, placement: &[usize], workers: usize, timing: &Timing, urgency: &Urgency) -> Result<Timeline> {
    let engine = Engine::new(w, placement, workers, timing, urgency.credits, true);
    engine.run(urgency::ByUrgency::new(w, placement, workers, urgency)).map(|(timeline, _)| timeline)
}

/// [`simulate`] for orders that are complete and causal by construction, for searches.
pub(crate) fn replay(schedule: &Schedule, timing: &Timing) -> Result<Timeline> {
    let engine = Engine::new(&schedule.workload, &schedule.placement, schedule.workers(), timing, schedule.credits, false);
    engine.run(fixed::FixedOrder::new(&schedule.lists)).map(|(timeline, _)| timeline)
}

fn stuck(stage: usize, what: &str) -> Error {
    Error::invalid(format!("deadlock: stage {stage} {what}"))
}
