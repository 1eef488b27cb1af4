//! What each board brings: the plan with it, without it, and with a frozen head.

use super::{
    Method, Problem,
    auto::{self, Effort, Found},
};
use crate::{
    cluster::Kind,
    costs::{Costs, Links},
    ir::Role,
};
use zofo_hal::Result;

/// One line of a verdict.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Alternative {
    /// What is changed.
    pub what: String,
    /// Seconds of a step, or why there is no such plan.
    pub makespan: std::result::Result<f64, String>,
    /// Joules of a step, where the power of all devices is known.
    pub joules: Option<f64>,
    /// The plan, where it is one for fewer devices; its devices are those of the whole problem.
    pub without: Option<Found>,
}

impl Alternative {
    fn new(what: String, p: &Problem, found: Result<Found>) -> Self {
        let joules = found.as_ref().ok().and_then(|f| f.proposal.outcome.joules(p));
        let makespan = found.map(|f| f.proposal.outcome.makespan()).map_err(|e| e.message().to_owned());
        Self { what, makespan, joules, without: None }
    }
}

/// The costs without some devices.
fn without(costs: &Costs, gone: &[usize]) -> Costs {
    let mut left = costs.clone();
    let names: Vec<String> = gone.iter().map(|d| costs.devices[*d].name.clone()).collect();
    left.devices.retain(|d| !names.contains(&d.name));
    if let Links::Pairs(pairs) = &mut left.links {
        let named = |end: &Option<String>| end.as_ref().is_some_and(|n| names.contains(n));
        pairs.retain(|p| !named(&p.from) && !named(&p.to));
    }
    left.partition = None;
    left
}

/// The plan `found` beside those without each board (boards of one type once), without all that only run forward, and with the head frozen.
pub fn verdict(p: &Problem, found: &Found, effort: Effort) -> Vec<Alternative> {
    let method = found.proposal.method;
    let mut rows = vec![Alternative::new("this plan".into(), p, Ok(found.clone()))];
    let plan = |gone: &[usize]| -> Result<(Problem, Found)> {
        let mut costs = without(p.costs(), gone);
        // As many directions as the plan chose, where it has stages that take any; else as many as were asked for.
        if found.proposal.outcome.layout.stages.iter().any(|s| s.role == Role::ZerothOrder) {
            (costs.estimator, costs.directions) = (Some(method.estimator), Some(method.directions));
        }
        let p = Problem::new(costs)?;
        let found = auto::plan(&p, effort)?;
        Ok((p, found))
    };
    let makespan = found.proposal.outcome.makespan();
    let unused = |d: usize| found.proposal.outcome.devices.iter().all(|r| r.device != d);
    let mut row = |what: String, gone: &[usize]| {
        rows.push(match plan(gone) {
            Ok((fewer, mut found)) => {
                let mut row = Alternative::new(what, &fewer, Ok(found.clone()));
                // The search is bounded: what it finds without a board that the plan leaves out is no worse than the plan.
                if gone.iter().all(|d| unused(*d)) && row.makespan.as_ref().is_ok_and(|t| *t > makespan) {
                    (row.makespan, row.joules) = (Ok(makespan), None);
                    return rows.push(row);
                }
                let kept: Vec<usize> = (0..p.devices()).filter(|d| !gone.contains(d)).collect();
                found.proposal.outcome.rename(|d| kept[d]);
                row.without = Some(found);
                row
            }
            Err(e) => Alternative::new(what, p, Err(e)),
        });
    };
    let mut seen: Vec<usize> = Vec::new();
    for d in 0..p.devices() {
        if p.devices() == 1 || seen.iter().any(|s| p.device(*s).is_like(p.device(d))) {
            continue;
        }
        seen.push(d);
        let alike = (0..p.devices()).filter(|o| p.device(*o).is_like(p.device(d))).count();
        let of = if alike > 1 { format!(", one of {alike} alike") } else { String::new() };
        row(format!("without {}{of}", p.device(d).name), &[d]);
    }
    let free: Vec<usize> = (0..p.devices()).filter(|d| p.device(*d).kind == Kind::BpFree).collect();
    if free.len() > 1 && free.len() < p.devices() {
        row(format!("without {}", p.names(&free)), &free);
    }
    if found.proposal.outcome.layout.stages.iter().any(|s| s.role == Role::ZerothOrder) {
        let mut costs = p.costs().clone();
        costs.directions = Some(0);
        let frozen = Problem::new(costs).and_then(|p| auto::plan(&p, effort));
        let mut row = Alternative::new("head frozen".into(), p, frozen);
        // The same stages without directions are a plan with a frozen head too.
        let mut same = found.proposal.outcome.layout.clone();
        same.stages.iter_mut().filter(|s| s.role == Role::ZerothOrder).for_each(|s| s.role = Role::Frozen);
        if let Ok(outcome) = same.best(p, &Method::FROZEN)
            && row.makespan.as_ref().is_ok_and(|t| outcome.makespan() < *t)
        {
            (row.makespan, row.joules) = (Ok(outcome.makespan()), outcome.joules(p));
        }
        rows.push(row);
    }
    rows
}

/// Names of devices that a plan leaves out.
pub fn left_out(p: &Problem, found: &Found) -> Vec<String> {
    let used = |d: usize| found.proposal.outcome.devices.iter().any(|r| r.device == d);
    (0..p.devices()).filter(|d| !used(*d)).map(|d| p.device(d).name.clone()).collect()
}
