//! Early exit in idle time: how many further directions a plan takes for nothing (HybridOP, section 4.4).

use super::{Method, Outcome, Problem};
use crate::{estimator::EstimatorName, ir::Role};
use zofo_hal::Result;

/// More are not looked for: their slopes are those of another loss, and every one makes the sum over the main directions count for less.
const MOST: u32 = 64;

/// The most exit directions (Q') with which the same stages take no longer than without any and every device's memory suffices, and the plan with
/// them; `None` where not even one fits, or the plan has no use for any: no zeroth-order stage, or another kind of pipeline than a plain line.
///
/// Passes to the exit head come behind all other work of their stages, so where they lengthen a step is where idle time ends.
///
/// # Errors
/// As [`super::Layout::run`], of the plan without exit directions.
pub fn fill(p: &Problem, outcome: &Outcome, method: &Method) -> Result<Option<(u32, Outcome)>> {
    let layout = &outcome.layout;
    let learns = layout.stages.iter().any(|s| s.role == Role::ZerothOrder);
    if method.estimator != EstimatorName::EarlyExit || !learns || !layout.chains.is_empty() || !outcome.schedule.is_one_to_one() {
        return Ok(None);
    }
    let with = |q: u32| -> Result<Outcome> {
        let mut costs = p.costs().clone();
        costs.exit_directions = q;
        layout.best(&Problem::new(costs)?, method)
    };
    let limit = with(0)?.makespan().min(outcome.makespan()) * (1.0 + 1e-9);
    let fits = |q: u32| with(q).ok().filter(|found| found.makespan() <= limit);
    let (mut most, mut too_many, mut best) = (0, MOST + 1, None);
    while too_many - most > 1 {
        let q = most + (too_many - most) / 2;
        match fits(q) {
            Some(found) => (most, best) = (q, Some(found)),
            None => too_many = q,
        }
    }
    Ok(best.map(|found| (most, found)))
}
