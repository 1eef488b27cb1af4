//! Plans and simulations as the program shows them: files, tables, timelines.

mod file;
mod model_costs;
mod report;

pub use file::{PlanFile, Simulated};
pub use model_costs::{BOARDS, Board, model_costs};
pub use report::report;

use std::time::Instant;

use zofo_hal::Result;
use zofo_pipeline::{
    estimator::EstimatorName,
    ir::Role,
    planner::{
        PlannerName, Problem, Proposal,
        auto::{self, Effort, Found},
        early_exit,
        verdict::{Alternative, left_out, verdict},
    },
};

/// A plan with what is to be said about it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Planned {
    /// Who planned.
    pub planner: PlannerName,
    /// The plan, simulated.
    pub proposal: Proposal,
    /// No plan of one device per stage takes less, in seconds.
    pub lower_bound: f64,
    /// Whether the plan was shown to be the best over contiguous stages, device subsets and orders, and the named orders of work.
    pub proven_optimal: bool,
    /// Time that planning took.
    pub seconds: f64,
    /// The plan without each board and with a frozen head; `auto` alone.
    pub verdict: Vec<Alternative>,
}

/// Plans for `p`.
///
/// # Errors
/// `InvalidArgument` where no plan fits, naming the device whose memory is short and by how much.
pub fn plan(p: &Problem, planner: PlannerName, effort: Effort) -> Result<Planned> {
    let mut planned = search(p, planner, effort)?;
    if p.costs().exit_directions == 0 {
        exit_early(p, &mut planned.proposal)?;
    }
    Ok(planned)
}

/// Gives a plan by `early-exit` as many exit directions as its idle time has room for.
fn exit_early(p: &Problem, proposal: &mut Proposal) -> Result<()> {
    let Proposal { outcome, method, notes, .. } = proposal;
    if method.estimator != EstimatorName::EarlyExit || outcome.layout.stages.iter().all(|s| s.role != Role::ZerothOrder) {
        return Ok(());
    }
    match early_exit::fill(p, outcome, method)? {
        Some((q, filled)) => {
            *outcome = filled;
            notes.push(format!("exit directions that fit into time that is idle without them: {q}"));
        }
        None => {
            method.estimator = EstimatorName::LossDifference;
            notes.push("no exit direction fits into idle time: by loss-difference, which is early-exit without any; give --exit-directions to have some".into());
        }
    }
    Ok(())
}

fn search(p: &Problem, planner: PlannerName, effort: Effort) -> Result<Planned> {
    let begin = Instant::now();
    let (method, _) = auto::asked(p);
    if planner == PlannerName::Auto {
        let mut found = auto::plan(p, effort)?;
        let seconds = begin.elapsed().as_secs_f64();
        let mut alternatives = verdict(p, &found, effort);
        // Other planners use all devices that they are given; where theirs is the plan, it can be better without one.
        let makespan = |f: &Found| f.proposal.outcome.makespan();
        let better = alternatives.iter().filter_map(|a| a.without.as_ref()).min_by(|a, b| makespan(a).total_cmp(&makespan(b)));
        if let Some(better) = better.filter(|b| makespan(b) < makespan(&found) * (1.0 - 1e-9)).cloned() {
            let bound = found.lower_bound.min(makespan(&better));
            found = better;
            (found.lower_bound, found.proven_optimal) = (bound, false);
            alternatives = verdict(p, &found, effort);
        }
        let mut proposal = found.proposal.clone();
        let gone = left_out(p, &found);
        if !gone.is_empty() {
            proposal.notes.push(format!(
                "{} left out: no better plan was found with {}",
                gone.join(", "),
                if gone.len() == 1 { "it" } else { "them" }
            ));
        }
        let Found { lower_bound, proven_optimal, .. } = found;
        return Ok(Planned { planner, proposal, lower_bound, proven_optimal, seconds, verdict: alternatives });
    }
    let proposal = planner.propose(p, &method)?;
    let seconds = begin.elapsed().as_secs_f64();
    let lower_bound = auto::least(p, &method).min(proposal.outcome.makespan());
    Ok(Planned { planner, proposal, lower_bound, proven_optimal: false, seconds, verdict: Vec::new() })
}
