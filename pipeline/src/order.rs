//! Orders of work by name.
//!
//! All but GPipe come from one list scheduler: stages take the most urgent action that is ready, under credits, in a simulation with
//! nominal costs. What it emits is causal and free of deadlock by construction; [`crate::check`] proves it again.

mod gpipe;
mod list;

use crate::ir::{Readout, Role, Schedule, Workload};
use serde::{Deserialize, Serialize};
use zofo_hal::{Error, Result};

/// A schedule by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ScheduleName {
    /// One stage, micro-batches one after the other.
    Single,
    /// All forward passes, then all backward passes (Huang et al. 2019).
    Gpipe,
    /// Zeroth-order stages at the head, first-order stages at the tail (HybridOP, section 4.2).
    HybridopHead,
}

impl ScheduleName {
    /// All names, as on the command line.
    pub const ALL: [(&'static str, Self); 3] = [("single", Self::Single), ("gpipe", Self::Gpipe), ("hybridop-head", Self::HybridopHead)];

    /// The name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, s)| *s == self).map_or("?", |(n, _)| n)
    }

    /// The schedule called `name`.
    ///
    /// # Errors
    /// `InvalidArgument` that lists the names there are.
    pub fn parse(name: &str) -> Result<Self> {
        Self::ALL.iter().find(|(n, _)| *n == name).map(|(_, s)| *s).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|(n, _)| *n).collect();
            Error::invalid(format!("no schedule is called `{name}`; there are: {}", known.join(", ")))
        })
    }

    /// The order of work for `workload`.
    ///
    /// # Errors
    /// `InvalidArgument` where the schedule cannot serve the workload, naming the stage.
    pub fn build(self, workload: &Workload) -> Result<Schedule> {
        check_roles(workload)?;
        let actions = workload.actions_per_stage();
        if actions > MAX_ACTIONS {
            return Err(Error::invalid(format!(
                "a step of {actions} actions per stage is more than this scheduler orders ({MAX_ACTIONS}): use fewer micro-batches or \
                 directions, or larger groups of directions"
            )));
        }
        let stages = workload.stages();
        let not_first_order = workload.roles.iter().position(|r| *r != Role::FirstOrder);
        match (self, not_first_order) {
            (Self::Single, _) if stages != 1 => {
                Err(Error::invalid(format!("schedule `single` runs on one stage, the cluster has {stages}")))
            }
            (Self::Single | Self::Gpipe, Some(stage)) => Err(Error::invalid(format!(
                "schedule `{}` backpropagates through every stage, but stage {stage} is {}; use `hybridop-head`",
                self.name(),
                workload.roles[stage].name()
            ))),
            (Self::Gpipe, None) => Ok(gpipe::order(workload)),
            (Self::Single | Self::HybridopHead, _) => list::order(workload),
        }
    }
}

/// The list scheduler looks at every waiting action whenever something changes, so its time grows with the square.
const MAX_ACTIONS: u64 = 4096;

/// Roles must be such that gradients exist: no zeroth-order stage behind a first-order one, and a first-order stage at the tail.
fn check_roles(w: &Workload) -> Result<()> {
    if w.roles.is_empty() {
        return Err(Error::invalid("a pipeline needs at least one stage"));
    }
    if w.micro_batches == 0 {
        return Err(Error::invalid("a step needs at least one micro-batch"));
    }
    let cut = w.cut();
    if let Some(s) = w.roles[cut..].iter().position(|r| *r != Role::FirstOrder) {
        return Err(Error::invalid(format!(
            "stage {} is {} behind first-order stage {cut}: a stage is first-order only if everything downstream can backpropagate",
            cut + s,
            w.roles[cut + s].name()
        )));
    }
    if cut == w.stages() && w.readout != Readout::Loss {
        return Err(Error::invalid("no first-order stage at the tail: there is no gradient at the cut to read slopes with"));
    }
    if cut == w.stages() {
        return Err(Error::invalid(
            "no BP-capable stage at the tail (placement `hybridop-tail`): put at least one device that can backpropagate last",
        ));
    }
    Ok(())
}
