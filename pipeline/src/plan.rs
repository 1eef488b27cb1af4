//! A plan: who holds which layers, how each stage learns, and in which order work is done. Plain data.

use crate::{
    cluster::{Cluster, Kind},
    estimator::{EstimatorName, EstimatorSpec},
    ir::{Role, Schedule, Workload},
    order::ScheduleName,
};
use std::ops::Range;
use zofo_hal::{Error, Result};

/// One stage of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagePlan {
    /// Name of the device in the cluster.
    pub device: String,
    /// Decoder layers it holds.
    pub layers: Range<usize>,
    /// How its adapters learn.
    pub role: Role,
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
    /// The schedule; `None` takes `single` for one device, `gpipe` where every device backpropagates, else `hybridop-head`.
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
        let stages: Vec<StagePlan> = (devices.iter().zip(&split).enumerate())
            .map(|(i, (d, n))| {
                let layers = first..first + n;
                first += n;
                StagePlan { device: d.name.clone(), layers, role: if i < cut { head } else { Role::FirstOrder } }
            })
            .collect();
        if let Some(s) = stages.iter().find(|s| s.role != Role::FirstOrder)
            && name != ScheduleName::HybridopHead
        {
            return Err(Error::invalid(format!(
                "schedule `{}` backpropagates on every device, but `{}` cannot (or has a bp-free device behind it); use `hybridop-head`",
                name.name(),
                s.device
            )));
        }
        // The oracle projects exact gradients, so every stage runs forward and backward, whatever it is trained by.
        let oracle = e.name == EstimatorName::Oracle && head == Role::ZerothOrder;
        let roles = stages.iter().map(|s| if oracle { Role::FirstOrder } else { s.role }).collect();
        let workload = Workload { roles, micro_batches: self.micro_batches, ..e.workload(cut) };
        let schedule = name.build(&workload)?;
        crate::check::check(&schedule)?;
        Ok(Plan { name, stages, schedule })
    }
}
