//! The planner that the others are compared with.
//!
//! It enumerates which devices take part in which order (devices of one type are one), and for each order the splits of the layers, by lower
//! bound: what cannot beat the best plan known is never simulated. The first best plan comes from balancing loads and moving single layers
//! while that helps; every other planner's plan is a candidate too. When nothing with a lower bound below the best plan is left, the plan is
//! optimal over contiguous stages, device subsets and orders, and the named orders of work.
//!
//! The search is bounded by counts of simulated actions and visited splits, not by time, so equal inputs give equal plans.

mod orders;
mod search;

use super::{Method, PlannerName, Problem, Proposal};
use crate::{
    estimator::EstimatorName,
    ir::{Readout, Role},
};
use orders::Device;
use search::Search;
use zofo_hal::{Error, Result, op::Form};

/// How much may be searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Effort {
    /// Actions that may be simulated.
    pub actions: u64,
    /// Splits, complete or not, that may be visited.
    pub splits: u64,
    /// Orders of devices that may be looked at.
    pub orders: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Self { actions: 200_000, splits: 100_000, orders: 5_000 }
    }
}

impl Effort {
    /// What proves optimality more often, in seconds instead of tens of milliseconds.
    pub fn thorough() -> Self {
        Self { actions: 40_000_000, splits: 20_000_000, orders: 200_000 }
    }
}

/// What the search found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Found {
    /// The plan.
    pub proposal: Proposal,
    /// No plan of its kind takes less, in seconds.
    pub lower_bound: f64,
    /// Whether the plan was shown to be the best of its kind.
    pub proven_optimal: bool,
}

/// The method that the costs ask for, and whether they leave a choice.
pub fn asked(p: &Problem) -> (Method, bool) {
    let c = p.costs();
    let estimator = c.estimator.unwrap_or(EstimatorName::CutTangent);
    let mut method = Method::new(estimator, c.directions.unwrap_or(DIRECTIONS[0]));
    if let Some(merge) = c.merge_base {
        method.merge_base = merge || estimator.form() == Form::Tangent;
    }
    (method, c.directions.is_none())
}

/// Numbers of directions that are tried where none is given, most first.
const DIRECTIONS: [u32; 5] = [16, 8, 4, 2, 1];

/// How much longer than with a frozen head a step may take for the sake of directions that nobody asked for.
const WORTH: f64 = 1.05;

/// Plans with a number of directions as given, or with as many as cost next to nothing. Where not even one does and the estimator was not given, the
/// head learns from the gradient at the cut, which takes no perturbed pass, if that costs next to nothing; else it is frozen.
///
/// # Errors
/// `InvalidArgument` where no plan fits, naming the device whose memory is short and by how much.
pub fn plan(p: &Problem, effort: Effort) -> Result<Found> {
    super::check_size(p)?;
    let (method, open) = asked(p);
    // Most planners backpropagate everywhere: theirs are the same plans whatever the method.
    let known = the_others(p, &method, None, |n| !n.uses_method());
    let best = |method: &Method| best(p, method, effort, &known);
    if !open {
        return best(&method);
    }
    let frozen = best(&Method::FROZEN)?;
    let has_head = |f: &Found| f.proposal.outcome.layout.stages.iter().any(|s| s.role != Role::FirstOrder);
    if !has_head(&frozen) {
        return Ok(frozen);
    }
    let limit = WORTH * frozen.proposal.outcome.makespan();
    let cheap = |method: Method| best(&method).ok().filter(|f| f.proposal.outcome.makespan() <= limit && has_head(f));
    let longer = |f: &Found| 100.0 * (f.proposal.outcome.makespan() / frozen.proposal.outcome.makespan() - 1.0);
    for q in DIRECTIONS {
        if let Some(mut found) = cheap(Method { directions: q, ..method }) {
            found.proposal.notes.push(format!(
                "{q} directions were chosen: a step takes {:.1} % longer than with a frozen head; give `directions` to have more",
                longer(&found)
            ));
            return Ok(found);
        }
    }
    if p.costs().estimator.is_none()
        && let Some(mut found) = cheap(Method::new(EstimatorName::Guided, 1))
    {
        found.proposal.notes.push(format!(
            "`guided` was chosen: a step takes {:.1} % longer than with a frozen head, and even one random direction more than {:.0} %; give `estimator` \
             or `directions` to have it otherwise",
            longer(&found),
            100.0 * (WORTH - 1.0)
        ));
        return Ok(found);
    }
    let mut found = frozen;
    found.proposal.notes.push(format!(
        "the head is frozen: even one direction{} would lengthen a step by more than {:.0} %; give `directions` to train it",
        if p.costs().estimator.is_none() { ", or a guided estimate," } else { "" },
        100.0 * (WORTH - 1.0)
    ));
    Ok(found)
}

/// The best plan for `method`, `known` being that of planners that do not depend on it.
fn best(p: &Problem, method: &Method, effort: Effort, known: &Option<Proposal>) -> Result<Found> {
    let mut methods = vec![*method];
    // Differences may take their base pass along or not; tangents need it beside them.
    let free = p.costs().merge_base.is_none() && method.estimator.form() == Form::Value && method.directions > 0;
    if free && method.estimator.readout() != Readout::Guide {
        methods.push(Method { merge_base: !method.merge_base, ..*method });
    }
    // What the others come up with need not be found again, only beaten.
    let others = the_others(p, method, known.clone(), PlannerName::uses_method);
    let mut incumbent = others.as_ref().map_or(f64::INFINITY, |o| o.outcome.makespan() * (1.0 + 1e-12));
    let (orders, complete) = orders::all(p, effort.orders);
    let (mut own, mut failure, mut bound) = (None, None, f64::INFINITY);
    let mut proven = complete;
    let each = Effort { actions: effort.actions / methods.len() as u64, splits: effort.splits / methods.len() as u64, ..effort };
    for method in &methods {
        let mut search = Search::new(p, *method, each, incumbent);
        search.run(&orders, complete);
        bound = bound.min(search.lower_bound());
        proven &= search.complete();
        incumbent = search.incumbent();
        failure = search.failure().or(failure);
        if search.found() {
            own = Some((search, *method));
        }
    }
    if !complete {
        bound = bound.min(orders::least(p, &methods));
    }
    let own =
        own.map(|(search, method)| search.into_outcome().map(|outcome| Proposal { outcome, method, notes: Vec::new() })).transpose()?;
    match (own, others) {
        (Some(proposal), _) => {
            let makespan = proposal.outcome.makespan();
            let lower_bound = if proven { makespan } else { bound.min(makespan) };
            Ok(Found { proposal, lower_bound, proven_optimal: proven })
        }
        // Another planner's plan may be of another kind: groups, several stages per device, split backward passes. That none of one device per
        // stage beats it may be proven; that none of its own kind does is not.
        (None, Some(other)) => {
            let makespan = other.outcome.makespan();
            let proven_optimal = proven && is_searched(&other);
            let lower_bound = if proven_optimal { makespan } else { bound.min(makespan) };
            Ok(Found { proposal: other, lower_bound, proven_optimal })
        }
        (None, None) => Err(failure.unwrap_or_else(|| orders::nothing_fits(p))),
    }
}

/// Whether a plan is of the kind that is searched: one device per stage, one stage per device, whole backward passes.
fn is_searched(proposal: &Proposal) -> bool {
    let (layout, schedule) = (&proposal.outcome.layout, &proposal.outcome.schedule);
    let alone = layout.stages.iter().all(|s| s.members.len() == 1);
    alone && schedule.is_one_to_one() && schedule.workload.chains.is_empty() && !schedule.workload.split_backward
}

/// The best plan of `known` and those of the other planners.
fn the_others(p: &Problem, method: &Method, known: Option<Proposal>, which: impl Fn(PlannerName) -> bool) -> Option<Proposal> {
    let planners = PlannerName::all().filter(|n| n.trains() && *n != PlannerName::Auto && which(*n));
    planners.fold(known, |best, planner| {
        // Bounds are sums of the same times in another order.
        let below = best.as_ref().map_or(f64::INFINITY, |best| best.outcome.makespan() * (1.0 + 1e-9));
        let other = planner.propose_below(p, method, below).ok().map(|mut other| {
            other.notes.insert(0, format!("the plan of `{}`; nothing else that was searched is better", planner.name()));
            other
        });
        better(best, other)
    })
}

/// The faster of two plans, the first of equal ones.
fn better(a: Option<Proposal>, b: Option<Proposal>) -> Option<Proposal> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if b.outcome.makespan() < a.outcome.makespan() { b } else { a }),
        (a, b) => a.or(b),
    }
}

/// A bound for any plan of one device per stage by `method`: all devices share the work as finely as can be.
pub fn least(p: &Problem, method: &Method) -> f64 {
    orders::least(p, &[*method])
}

/// All that a brute force has to go through, for tests: every order of devices with its cut.
pub fn device_orders(p: &Problem) -> Vec<(Vec<usize>, usize)> {
    let (orders, _) = orders::all(p, usize::MAX);
    orders.into_iter().map(|o| (o.iter().map(|d: &Device| d.index).collect(), orders::cut(&o))).collect()
}

fn no_order() -> Error {
    Error::invalid("no order of the devices leaves one that backpropagates at the end")
}
