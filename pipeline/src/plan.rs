//! A plan: who holds which layers, how each stage learns, and in which order work is done. Plain data.

mod adopt;
mod segments;

use crate::{
    cluster::{Cluster, Kind},
    estimator::{EstimatorName, EstimatorSpec},
    ir::{Role, Schedule, Workload},
    order::{self, ScheduleName},
    planner::Split,
};
use std::ops::Range;
use zofo_hal::{Error, Result};

/// A device's part in a stage.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StageMember {
    /// Name of the device in the cluster.
    pub device: String,
    /// Its share; those of a stage add up to 1.
    pub share: f64,
}

impl StageMember {
    /// A device with its share.
    pub fn new(device: impl Into<String>, share: f64) -> Self {
        Self { device: device.into(), share }
    }
}

/// One stage of a plan.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StagePlan {
    /// The devices that work on it as one: a single one as a rule.
    pub members: Vec<StageMember>,
    /// How they share it; of no meaning for one device.
    pub split: Split,
    /// Decoder layers it holds.
    pub layers: Range<usize>,
    /// How its adapters learn.
    pub role: Role,
}

impl StagePlan {
    /// A stage of one device.
    pub fn single(device: impl Into<String>, layers: Range<usize>, role: Role) -> Self {
        Self::group(vec![StageMember::new(device, 1.0)], Split::Batch, layers, role)
    }

    /// A stage of a group of devices.
    pub fn group(members: Vec<StageMember>, split: Split, layers: Range<usize>, role: Role) -> Self {
        Self { members, split, layers, role }
    }

    /// Its devices as messages call them: `gpu0`, `gpu0, gpu1`.
    pub fn devices(&self) -> String {
        self.members.iter().map(|m| m.device.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Whether a device works on it.
    pub fn has(&self, device: &str) -> bool {
        self.members.iter().any(|m| m.device == device)
    }

    /// How many of `n` sequences of one length each member gets of a micro-batch.
    pub fn sequences(&self, n: usize) -> Vec<usize> {
        if self.split != Split::Batch {
            return vec![n; self.members.len()];
        }
        let ends: Vec<u32> = (0..=n as u32).collect();
        let shares: Vec<f64> = self.members.iter().map(|m| m.share).collect();
        crate::executor::sequences(&shares, &ends).iter().map(|part| part.len()).collect()
    }
}

/// How a step is executed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// Name of the schedule.
    pub name: ScheduleName,
    /// The stages, in pipeline order.
    pub stages: Vec<StagePlan>,
    /// The order of work.
    pub schedule: Schedule,
}

impl Plan {
    /// The devices that one of the schedule's lists is for; each goes through it, and does its part.
    pub fn members(&self, worker: usize) -> &[StageMember] {
        let stage = self.schedule.placement.iter().position(|w| *w == worker);
        stage.and_then(|s| self.stages.get(s)).map_or(&[], |s| &s.members)
    }

    /// Rank of the first member of a worker: its place in [`Plan::devices`].
    pub fn first_rank(&self, worker: usize) -> usize {
        (0..worker).map(|w| self.members(w).len()).sum()
    }

    /// Names of the devices that work by the plan, in the order of their ranks: worker by worker, members of each in turn.
    pub fn devices(&self) -> Vec<&str> {
        (0..self.schedule.workers()).flat_map(|worker| self.members(worker)).map(|m| m.device.as_str()).collect()
    }

    /// That all stages of a worker have the same members, and shares that add up.
    ///
    /// # Errors
    /// `InvalidArgument` naming the stage.
    pub(crate) fn check_members(&self) -> Result<()> {
        for (i, (stage, worker)) in self.stages.iter().zip(&self.schedule.placement).enumerate() {
            let names = |members: &[StageMember]| members.iter().map(|m| m.device.clone()).collect::<Vec<_>>();
            if names(&stage.members) != names(self.members(*worker)) {
                return Err(Error::invalid(format!("stage {i} is on a worker with other devices: a group of devices works as one")));
            }
            let sum: f64 = stage.members.iter().map(|m| m.share).sum();
            if stage.members.iter().any(|m| !(m.share.is_finite() && m.share > 0.0)) || (sum - 1.0).abs() > 1e-6 {
                return Err(Error::invalid(format!("the shares of stage {i} must be above 0 and add up to 1, they add up to {sum}")));
            }
        }
        Ok(())
    }
}

/// Stages of one device as messages call them: `stage 1 (gpu0)`, `stages 0 and 2 (gpu0)`.
pub(crate) fn describe_stages(stages: &[usize], device: &str) -> String {
    let numbers = stages.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    format!("{} {numbers} ({device})", if stages.len() == 1 { "stage" } else { "stages" })
}

/// What a plan is made for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PlanRequest<'a> {
    /// The devices.
    pub cluster: &'a Cluster,
    /// Decoder layers of the model.
    pub layers: usize,
    /// Micro-batches per step.
    pub micro_batches: u32,
    /// How zeroth-order stages estimate.
    pub estimator: &'a EstimatorSpec,
    /// The schedule; `None` takes `single` for one device, `gpipe` where every device backpropagates, else `hybridop-head`. With
    /// `interleaved-1f1b` every device gets two stages, where all have two layers; with `chimera` one of each of two pipelines.
    pub schedule: Option<ScheduleName>,
    /// Leaves the stages above the cut untrained.
    pub freeze_head: bool,
}

impl<'a> PlanRequest<'a> {
    /// A request with an automatic schedule and nothing frozen.
    pub fn new(cluster: &'a Cluster, layers: usize, micro_batches: u32, estimator: &'a EstimatorSpec) -> Self {
        Self { cluster, layers, micro_batches, estimator, schedule: None, freeze_head: false }
    }

    /// Makes the plan: even or given split, roles by the rule of the pipeline (a stage is first-order iff everything downstream can
    /// backpropagate), order by name.
    ///
    /// # Errors
    /// `InvalidArgument` naming the device or stage that does not fit.
    pub fn plan(&self) -> Result<Plan> {
        self.cluster.check()?;
        let split = self.cluster.split(self.layers)?;
        let devices = &self.cluster.devices;
        let cut = devices.iter().rposition(|d| d.kind == Kind::BpFree).map_or(0, |i| i + 1);
        if cut == devices.len() {
            let last = &devices[cut - 1];
            return Err(Error::invalid(format!(
                "the last device `{}` is bp-free: without a BP-capable stage at the tail (placement `hybridop-tail`) no stage has a gradient \
                 to learn from; put a device of kind \"bp\" last",
                last.name
            )));
        }
        let name = self.schedule.unwrap_or(match (devices.len(), cut) {
            (1, 0) => ScheduleName::Single,
            (_, 0) => ScheduleName::Gpipe,
            _ => ScheduleName::HybridopHead,
        });
        let e = self.estimator;
        let head = if self.freeze_head || e.directions == 0 { Role::Frozen } else { Role::ZerothOrder };
        let mut first = 0;
        let parts = parts(name, &split);
        let stages: Vec<StagePlan> = (parts.iter())
            .map(|(device, n)| {
                // Every pipeline starts from the first layer again.
                let layers = first..first + n;
                first = layers.end % self.layers;
                StagePlan::single(&*devices[*device].name, layers, if *device < cut { head } else { Role::FirstOrder })
            })
            .collect();
        if let Some(s) = stages.iter().find(|s| s.role != Role::FirstOrder)
            && name != ScheduleName::HybridopHead
        {
            return Err(Error::invalid(format!(
                "schedule `{}` backpropagates on every device, but `{}` cannot (or has a bp-free device behind it); use `hybridop-head`",
                name.name(),
                s.devices()
            )));
        }
        // The oracle projects exact gradients, so every stage runs forward and backward, whatever it is trained by.
        let oracle = e.name == EstimatorName::Oracle && head == Role::ZerothOrder;
        let roles = stages.iter().map(|s| if oracle { Role::FirstOrder } else { s.role }).collect();
        let schedule = match name {
            ScheduleName::Interleaved => order::interleaved(devices.len(), parts.len() / devices.len(), self.micro_batches)?,
            ScheduleName::Chimera => order::chimera(devices.len(), self.micro_batches)?,
            _ => name.build(&Workload { roles, micro_batches: self.micro_batches, ..e.workload(cut) })?,
        };
        crate::check::check(&schedule)?;
        Ok(Plan { name, stages, schedule })
    }
}

/// Device and number of layers of each stage: one of every device, but for orders that give it several. Each device's layers are then cut in two
/// ([`ScheduleName::Interleaved`], where it has two), or the split is taken once from either end ([`ScheduleName::Chimera`]).
fn parts(name: ScheduleName, split: &[usize]) -> Vec<(usize, usize)> {
    let line = || split.iter().copied().enumerate();
    match name {
        ScheduleName::Interleaved if split.iter().all(|n| *n > 1) => {
            line().map(|(d, n)| (d, n.div_ceil(2))).chain(line().map(|(d, n)| (d, n / 2))).collect()
        }
        ScheduleName::Chimera => line().chain(line().map(|(d, n)| (split.len() - 1 - d, n))).collect(),
        _ => line().collect(),
    }
}
