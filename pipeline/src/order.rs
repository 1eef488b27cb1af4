//! Orders of work by name.
//!
//! Orders that the field defines as lists (GPipe, 1F1B and its kin) are written as lists; those of HybridOP come from
//! [`crate::sim::arrange`]: stages take the most urgent action that is ready. [`crate::check`] proves either kind.

mod chimera;
mod gpipe;
mod interleaved;
mod one_f_one_b;
mod zero_bubble;

pub use chimera::chimera;
pub use interleaved::interleaved;
pub use one_f_one_b::Warmup;

use crate::{
    ir::{Action, Readout, Role, Schedule, Workload},
    sim::{Timing, Urgency, arrange},
};
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
    /// One forward, one backward, with a flush at the end of a step (PipeDream-Flush, Narayanan et al. 2021).
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B with several stages per worker (Megatron-LM, Narayanan et al. 2021).
    #[serde(rename = "interleaved-1f1b")]
    Interleaved,
    /// Two pipelines in opposite directions over the same workers (Li and Hoefler 2021).
    Chimera,
    /// 1F1B whose weight gradients fill its drain, at the memory of 1F1B's first stage (Qi et al. 2024).
    ZbH1,
    /// Early backward with more forward passes under way where transfers are slow (Fan et al. 2021).
    Dapple,
    /// First-order stages at the head, zeroth-order ones at the tail (HybridOP, section 4.2): a model of latency that cannot train.
    HybridopTail,
    /// Zeroth-order stages at the head, first-order stages at the tail (HybridOP, section 4.2).
    HybridopHead,
}

impl ScheduleName {
    /// All names, as on the command line.
    pub const ALL: [(&'static str, Self); 9] = [
        ("single", Self::Single),
        ("gpipe", Self::Gpipe),
        ("1f1b", Self::OneFOneB),
        ("interleaved-1f1b", Self::Interleaved),
        ("chimera", Self::Chimera),
        ("zb-h1", Self::ZbH1),
        ("dapple", Self::Dapple),
        ("hybridop-tail", Self::HybridopTail),
        ("hybridop-head", Self::HybridopHead),
    ];

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

    /// The order of work for `workload` on one worker per stage, where nothing has been measured.
    ///
    /// # Errors
    /// As [`ScheduleName::build_for`].
    pub fn build(self, workload: &Workload) -> Result<Schedule> {
        self.build_for(workload, &Timing::nominal(workload.stages()))
    }

    /// The order of work for `workload` on one worker per stage, at these times.
    ///
    /// # Errors
    /// `InvalidArgument` where the schedule cannot serve the workload, naming the stage.
    pub fn build_for(self, workload: &Workload, timing: &Timing) -> Result<Schedule> {
        check_size(workload)?;
        check_roles(workload)?;
        let stages = workload.stages();
        if self == Self::Single && stages != 1 {
            return Err(Error::invalid(format!("schedule `single` runs on one stage, the cluster has {stages}")));
        }
        match (self, workload.roles.iter().position(|r| *r != Role::FirstOrder)) {
            (Self::HybridopHead, _) if workload.readout != Readout::Tail => {}
            (Self::HybridopTail, _) if workload.readout == Readout::Tail => {}
            (Self::HybridopHead | Self::HybridopTail, _) => {
                return Err(Error::invalid(format!("schedule `{}` does not go with a readout at the {:?}", self.name(), workload.readout)));
            }
            (_, Some(stage)) => {
                return Err(Error::invalid(format!(
                    "schedule `{}` backpropagates through every stage, but stage {stage} is {}; use `hybridop-head`",
                    self.name(),
                    workload.roles[stage].name()
                )));
            }
            _ => {}
        }
        match self {
            Self::Single | Self::OneFOneB => Ok(one_f_one_b::order(workload, Warmup::Depth)),
            Self::Gpipe => Ok(gpipe::order(workload)),
            Self::Dapple => Ok(one_f_one_b::order(workload, Warmup::for_links(timing))),
            Self::ZbH1 => Ok(zero_bubble::order(workload)),
            Self::Interleaved => interleaved(stages, 1, workload.micro_batches),
            Self::Chimera => chimera(stages, workload.micro_batches),
            Self::HybridopHead => Ok(arrange(workload, timing, &Urgency::frugal(workload))?.0),
            // First-order stages wait for the others' passes of a micro-batch, so they keep all there are.
            Self::HybridopTail => Ok(arrange(workload, timing, &Urgency::eager(workload))?.0),
        }
    }
}

/// Appends a forward pass, with its losses on the last stage.
fn forward(list: &mut Vec<Action>, m: u32, last: bool) {
    list.push(Action::Forward { m });
    if last {
        list.push(Action::Loss { m });
    }
}

/// Lists of more entries than this fill memory before they are of use to anyone.
const MAX_ACTIONS: u64 = 20_000_000;

pub(crate) fn check_size(w: &Workload) -> Result<()> {
    let groups = |n: u32| u64::from(n.div_ceil(w.group.max(1)));
    let per_stage = u64::from(w.micro_batches) * (4 + 4 * groups(w.directions) + groups(w.exit_directions));
    let actions = per_stage.saturating_mul(w.stages() as u64);
    match actions > MAX_ACTIONS {
        true => Err(Error::invalid(format!(
            "a step of up to {actions} actions is more than an order of work may have ({MAX_ACTIONS}): use fewer micro-batches or directions, \
             or larger groups of directions"
        ))),
        false => Ok(()),
    }
}

/// Roles must be such that gradients exist: no zeroth-order stage behind a first-order one, and a first-order stage at the tail.
pub(crate) fn check_roles(w: &Workload) -> Result<()> {
    if w.roles.is_empty() {
        return Err(Error::invalid("a pipeline needs at least one stage"));
    }
    if w.micro_batches == 0 {
        return Err(Error::invalid("a step needs at least one micro-batch"));
    }
    if !w.chains.is_empty() && w.roles.iter().any(|r| *r != Role::FirstOrder) {
        return Err(Error::invalid("several pipelines at once are first-order ones"));
    }
    if w.readout == Readout::Tail {
        let tail = w.roles.iter().take_while(|r| **r == Role::FirstOrder).count();
        return match w.roles[tail..].iter().position(|r| *r != Role::ZerothOrder) {
            Some(s) => Err(Error::invalid(format!("stage {} is {} behind zeroth-order stage {tail}", tail + s, w.roles[tail + s].name()))),
            None if tail == w.stages() || w.directions == 0 => {
                Err(Error::invalid("the tail placement needs zeroth-order stages and directions"))
            }
            None => Ok(()),
        };
    }
    let cut = w.roles.iter().take_while(|r| **r != Role::FirstOrder).count();
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
