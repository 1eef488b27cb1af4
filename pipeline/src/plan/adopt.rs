//! A planner's plan as one that trains: the same stages, placement and order.

use super::{Plan, PlanRequest, StageMember, StagePlan, segments::segment};
use crate::{
    cluster::{DeviceEntry, Kind},
    estimator::EstimatorName,
    ir::{Readout, Role},
    planner::{Member, Outcome, Problem},
};
use zofo_hal::{Error, Result};

impl PlanRequest<'_> {
    /// Takes up what a planner made for `p`, with zeroth-order stages that learn by `estimator`. What the request asks for beside that must be what
    /// the plan is for; devices of the cluster that the plan does not use are left out.
    ///
    /// # Errors
    /// `InvalidArgument` naming what differs: depth of the model, micro-batches, estimator, schedule, a device; or, for plans that cannot train, the
    /// stage and what to plan by instead.
    pub fn adopt(&self, p: &Problem, outcome: &Outcome, estimator: EstimatorName) -> Result<Plan> {
        self.cluster.check()?;
        let (schedule, layout, w) = (&outcome.schedule, &outcome.layout, &outcome.schedule.workload);
        differs("layers of the model", p.layers(), self.layers)?;
        differs("micro-batches of a step", w.micro_batches, self.micro_batches)?;
        differs("the schedule", outcome.name.name(), self.schedule.unwrap_or(outcome.name).name())?;
        if w.readout == Readout::Tail {
            return Err(Error::invalid(
                "the plan is a model of latency, `hybridop-tail`, and cannot train; plan with `hybridop` or `auto`",
            ));
        }
        self.learns(outcome, estimator)?;
        layout.check(p)?;
        let (stages, schedule) = segment(&layout.stages, schedule);
        let stages = stages.iter().enumerate().map(|(i, stage)| {
            let members = stage.members.iter().map(|m| Ok(StageMember::new(&*self.device(p, i, stage.role, m)?.name, m.share)));
            Ok(StagePlan::group(members.collect::<Result<_>>()?, stage.split, stage.layers.clone(), stage.role))
        });
        let stages = stages.collect::<Result<Vec<_>>>()?;
        for d in &self.cluster.devices {
            let planned: usize = stages.iter().filter(|s| s.has(&d.name)).map(|s| s.layers.len()).sum();
            if let Some(given) = d.layers.filter(|given| planned > 0 && planned != *given) {
                return Err(Error::invalid(format!(
                    "device `{}` takes {given} layers by the cluster and {planned} by the plan; leave `layers` out of the cluster, the plan says it",
                    d.name
                )));
            }
        }
        crate::check::check(&schedule)?;
        let plan = Plan { name: outcome.name, stages, schedule };
        plan.check_members()?;
        Ok(plan)
    }

    /// Whether zeroth-order stages learn as the request has it.
    fn learns(&self, outcome: &Outcome, estimator: EstimatorName) -> Result<()> {
        let (w, e) = (&outcome.schedule.workload, self.estimator);
        if w.roles.contains(&Role::Frozen) && !self.freeze_head && e.directions > 0 {
            return Err(Error::invalid(format!(
                "the plan leaves the stages in front of the cut untrained, the run is asked for {} directions; plan with directions, or leave that out",
                e.directions
            )));
        }
        if !w.roles.contains(&Role::ZerothOrder) {
            return Ok(());
        }
        differs("the estimator", estimator.name(), e.name.name())?;
        // Guided estimates take none.
        if w.readout != Readout::Guide {
            differs("directions", w.directions, e.directions)?;
            differs("exit directions", w.exit_directions, e.exit_directions)?;
        }
        if e.two_sided != w.two_sided || self.freeze_head {
            return Err(Error::invalid(match self.freeze_head {
                true => {
                    "the plan trains the stages in front of the cut, and the run is to leave them frozen; plan with 0 directions, or train them"
                }
                false => "the plan takes each direction to one side, and the run is to take both (two-sided); train it without",
            }));
        }
        Ok(())
    }

    /// The cluster's entry for a device of a stage.
    fn device(&self, p: &Problem, index: usize, role: Role, member: &Member) -> Result<&DeviceEntry> {
        let name = &p.device(member.device).name;
        let entry = self.cluster.devices.iter().find(|d| d.name == *name).ok_or_else(|| {
            let known: Vec<_> = self.cluster.devices.iter().map(|d| d.name.as_str()).collect();
            Error::invalid(format!("the plan uses device `{name}`, which is not in the cluster; there are: {}", known.join(", ")))
        })?;
        if role == Role::FirstOrder && entry.kind == Kind::BpFree {
            return Err(Error::invalid(format!(
                "stage {index} of the plan backpropagates on `{name}`, which only runs forward (bp-free); plan with --trainable, or without an \
                 fo_speed for it"
            )));
        }
        Ok(entry)
    }
}

fn differs<T: PartialEq + std::fmt::Display>(what: &str, planned: T, asked: T) -> Result<()> {
    match planned == asked {
        true => Ok(()),
        false => Err(Error::invalid(format!("{what}: {planned} in the plan, {asked} in this run; plan anew, or run what was planned for"))),
    }
}
