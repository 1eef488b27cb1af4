//! Plan files: a plan as JSON, complete enough to be simulated again.

use super::Planned;
use crate::options::TrainOptions;
use serde::{Deserialize, Serialize};
use zofo_hal::{Error, Result};
use zofo_pipeline::{
    cluster::{Cluster, DeviceEntry},
    costs::Costs,
    estimator::EstimatorName,
    ir::{Chain, Credits, Readout, Role, Schedule, Step},
    order::ScheduleName,
    plan::Plan,
    planner::{Layout, Member, Method, Outcome, Problem, Split, StageLayout, verdict::Alternative},
};

/// A simulated step.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Simulated {
    /// Name of the order.
    pub schedule: String,
    /// Seconds of a step.
    pub makespan_s: f64,
    /// Mean over the devices in use of computing time over the makespan (Comu_ti of HybridOP).
    pub utilisation: f64,
    /// The same, perturbed copies not counted.
    pub utilisation_without_directions: f64,
    /// Joules of a step, where the power of all devices is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joules: Option<f64>,
    /// In pipeline order.
    pub devices: Vec<SimulatedDevice>,
}

/// One device's part.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct SimulatedDevice {
    /// Its name.
    pub name: String,
    /// Seconds of computing.
    pub busy_s: f64,
    /// Seconds of communication that kept it from computing.
    pub communicating_s: f64,
    /// Micro-batches forwarded and not yet backpropagated, at most.
    pub peak_in_flight: usize,
    /// Bytes at the peak.
    pub peak_memory_bytes: f64,
}

impl Simulated {
    /// What `outcome` found.
    pub fn new(p: &Problem, outcome: &Outcome) -> Self {
        let devices = outcome.devices.iter().map(|d| SimulatedDevice {
            name: p.device(d.device).name.clone(),
            busy_s: d.busy,
            communicating_s: d.communicating,
            peak_in_flight: d.peak_in_flight,
            peak_memory_bytes: d.peak_bytes,
        });
        Self {
            schedule: outcome.name.name().into(),
            makespan_s: outcome.makespan(),
            utilisation: outcome.utilisation(),
            utilisation_without_directions: outcome.utilisation_without_copies(),
            joules: outcome.joules(p),
            devices: devices.collect(),
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StageEntry {
    layers: [usize; 2],
    role: String,
    split: String,
    devices: Vec<(String, f64)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    batch_layers: Vec<usize>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Comparison {
    what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    makespan_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    joules: Option<f64>,
}

/// A plan file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlanFile {
    /// Who planned.
    pub planner: String,
    /// Device, first layer, end; devices that share a stage one after the other.
    pub partition: Vec<(String, usize, usize)>,
    /// Seconds of a step.
    pub predicted_makespan_s: f64,
    /// No plan of one device per stage takes less.
    pub lower_bound_s: f64,
    /// Whether that was shown to be the best.
    pub proven_optimal: bool,
    /// Time that planning took.
    pub plan_seconds: f64,
    /// How zeroth-order stages learn.
    pub estimator: EstimatorName,
    /// Directions of every micro-batch; 0: they are frozen, or there are none.
    pub directions: u32,
    merge_base: bool,
    /// The simulated step.
    #[serde(flatten)]
    pub simulated: Simulated,
    /// What to know about it.
    #[serde(default)]
    pub notes: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    verdict: Vec<Comparison>,
    stages: Vec<StageEntry>,
    placement: Vec<usize>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    chains: Vec<[usize; 4]>,
    /// Hidden, copies, delta, awaiting.
    credits: [usize; 4],
    split_backward: bool,
    order: Vec<Vec<String>>,
    costs: Costs,
}

/// Keys that are left out where there is nothing to say.
const OPTIONAL: [&str; 3] = ["joules", "verdict", "chains"];

const ROLES: [Role; 3] = [Role::FirstOrder, Role::ZerothOrder, Role::Frozen];

impl PlanFile {
    /// The file of a plan.
    pub fn new(p: &Problem, planned: &Planned) -> Self {
        let outcome = &planned.proposal.outcome;
        let (layout, schedule) = (&outcome.layout, &outcome.schedule);
        let name = |d: usize| p.device(d).name.clone();
        let comparison = |a: &Alternative| Comparison {
            what: a.what.clone(),
            makespan_s: a.makespan.as_ref().ok().copied(),
            why_not: a.makespan.as_ref().err().cloned(),
            joules: a.joules,
        };
        let stages = layout.stages.iter().map(|s| StageEntry {
            layers: [s.layers.start, s.layers.end],
            role: s.role.name().into(),
            split: s.split.name().into(),
            devices: s.members.iter().map(|m| (name(m.device), m.share)).collect(),
            batch_layers: s.batch_layers.clone(),
        });
        let stages: Vec<StageEntry> = stages.collect();
        let c = schedule.credits;
        let mut costs = p.costs().clone();
        if schedule.workload.estimates() {
            costs.exit_directions = schedule.workload.exit_directions;
        }
        Self {
            planner: planned.planner.name().into(),
            partition: Self::partition(&stages),
            predicted_makespan_s: outcome.makespan(),
            lower_bound_s: planned.lower_bound,
            proven_optimal: planned.proven_optimal,
            plan_seconds: planned.seconds,
            estimator: planned.proposal.method.estimator,
            directions: if layout.stages.iter().any(|s| s.role == Role::ZerothOrder) { planned.proposal.method.directions } else { 0 },
            merge_base: planned.proposal.method.merge_base,
            simulated: Simulated::new(p, outcome),
            notes: planned.proposal.notes.clone(),
            verdict: planned.verdict.iter().map(comparison).collect(),
            stages,
            placement: layout.placement.clone(),
            chains: layout
                .chains
                .iter()
                .map(|c| [c.stages.start, c.stages.end, c.micro_batches.start as usize, c.micro_batches.end as usize])
                .collect(),
            credits: [c.hidden, c.copies, c.delta, c.awaiting],
            split_backward: schedule.workload.split_backward,
            order: schedule.lists.iter().map(|list| list.iter().map(ToString::to_string).collect()).collect(),
            costs,
        }
    }

    /// Reads a file's text.
    ///
    /// # Errors
    /// `Format` with line and column, or naming a key that no plan has.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |e: serde_json::Error| {
            // The plan of a run says who did what, not what it was expected to cost.
            let of_a_run = text.contains("\"workers\"") && !text.contains("\"planner\"");
            let hint =
                if of_a_run { "; a run folder's plan.json is a record of the run, which goes on with `zofo train --resume`" } else { "" };
            Error::format(format!("no plan that `zofo plan --out` wrote: {e}{hint}"))
        };
        let file: Self = serde_json::from_str(text).map_err(wrong)?;
        let given: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text).map_err(wrong)?;
        let known = serde_json::to_value(&file).map_err(wrong)?;
        if let Some(key) = given.keys().find(|key| known.get(key).is_none() && !OPTIONAL.contains(&key.as_str())) {
            return Err(Error::format(format!("a plan has no `{key}`; nothing would follow from it")));
        }
        Ok(file)
    }

    /// Who holds which layers, by the stages.
    fn partition(stages: &[StageEntry]) -> Vec<(String, usize, usize)> {
        stages.iter().flat_map(|s| s.devices.iter().map(|(name, _)| (name.clone(), s.layers[0], s.layers[1]))).collect()
    }

    /// Simulates it again, from its costs, stages and order alone.
    ///
    /// # Errors
    /// `Format` or `InvalidArgument` naming the part that makes no sense.
    pub fn simulate(&self) -> Result<(Problem, Outcome)> {
        if self.partition != Self::partition(&self.stages) {
            return Err(Error::format("`partition` of the plan is not that of its `stages`: the stages are what runs, so change both"));
        }
        let p = Problem::new(self.costs.clone())?;
        let mut method = Method::new(self.estimator, self.directions);
        method.merge_base = self.merge_base;
        let layout = self.layout(&p)?;
        let timing = layout.timing(&p);
        let mut workload = layout.workload(&p, &method);
        workload.split_backward = self.split_backward;
        let lists: Result<Vec<Vec<Step>>> = self.order.iter().map(|list| list.iter().map(|s| s.parse()).collect()).collect();
        let [hidden, copies, delta, awaiting] = self.credits;
        let credits = Credits { hidden, copies, delta, awaiting };
        let schedule = Schedule { workload, placement: layout.placement.clone(), lists: lists?, credits };
        let name = ScheduleName::parse(&self.simulated.schedule)?;
        if (name == ScheduleName::HybridopTail) != (schedule.workload.readout == Readout::Tail) {
            return Err(Error::format(format!("the order of the plan is not `{}`", name.name())));
        }
        let outcome = layout.run(&p, schedule, &timing, name)?;
        Ok((p, outcome))
    }

    /// The plan as one that trains by `options` on `cluster`, a model of `layers` layers.
    ///
    /// # Errors
    /// As [`PlanFile::simulate`] and [`zofo_pipeline::plan::PlanRequest::adopt`].
    pub fn plan(&self, cluster: &Cluster, layers: usize, options: &TrainOptions) -> Result<Plan> {
        let (p, outcome) = self.simulate()?;
        options.plan_request(cluster, layers, &options.estimator_spec()).adopt(&p, &outcome, self.estimator)
    }

    /// The settings of a run that the plan decides.
    pub fn settle(&self, options: &mut TrainOptions) {
        let has = |role: Role| self.stages.iter().any(|s| s.role == role.name());
        options.micro_batches = self.costs.micro_batches;
        options.freeze_head |= has(Role::Frozen);
        if has(Role::ZerothOrder) {
            (options.estimator, options.directions) = (self.estimator, self.directions);
            options.exit_directions = Some(self.costs.exit_directions).filter(|_| self.estimator == EstimatorName::EarlyExit);
        }
    }

    /// The devices that it was made for, as virtual ones over the host's CPU.
    pub fn cluster(&self) -> Cluster {
        Cluster::new(self.costs.devices.iter().map(|d| DeviceEntry::virtual_cpu(d.name.clone(), d.kind)).collect())
    }

    fn layout(&self, p: &Problem) -> Result<Layout> {
        let mut stages = Vec::new();
        for (i, s) in self.stages.iter().enumerate() {
            let wrong = |what: String| Error::format(format!("stage {i} of the plan {what}"));
            let [start, end] = s.layers;
            if start >= end || end > p.layers() {
                return Err(wrong(format!("has layers {start}..{end}, the model has {}", p.layers())));
            }
            if let Some(l) = s.batch_layers.iter().find(|l| !(start..end).contains(*l)) {
                return Err(wrong(format!("shares layer {l} by batch and has layers {start}..{end}")));
            }
            let mut members = Vec::new();
            for (name, share) in &s.devices {
                let device = p.costs().devices.iter().position(|d| d.name == *name);
                let device = device.ok_or_else(|| wrong(format!("names device `{name}`, which is not among the devices")))?;
                if !(0.0..=1.0).contains(share) {
                    return Err(wrong(format!("gives `{name}` a share of {share}")));
                }
                members.push(Member { device, share: *share });
            }
            let sum: f64 = members.iter().map(|m| m.share).sum();
            let twice = members.iter().enumerate().any(|(i, m)| members[..i].iter().any(|o| o.device == m.device));
            if members.is_empty() || twice || (sum - 1.0).abs() > 1e-6 || members.iter().any(|m| m.share == 0.0) {
                return Err(wrong(format!(
                    "is shared by {:?}; it needs different devices with shares above 0 that add up to 1",
                    s.devices
                )));
            }
            let split = Split::ALL.into_iter().find(|split| split.name() == s.split);
            let split = split.ok_or_else(|| wrong(format!("is shared by `{}`; there are batch, tensor and directions", s.split)))?;
            let role = ROLES.into_iter().find(|r| r.name() == s.role);
            let role = role.ok_or_else(|| wrong(format!("has the role `{}`; there are FO, ZO and frozen", s.role)))?;
            if let Some(m) = members.iter().find(|m| role == Role::FirstOrder && !p.device(m.device).can_backpropagate()) {
                return Err(wrong(format!("has the role FO, but `{}` cannot backpropagate", p.device(m.device).name)));
            }
            let mut stage = StageLayout::group(members, start..end, split, role);
            stage.batch_layers.clone_from(&s.batch_layers);
            stages.push(stage);
        }
        if stages.is_empty() || self.placement.len() != stages.len() {
            return Err(Error::format(format!("the plan places {} stages, it has {}", self.placement.len(), stages.len())));
        }
        if let Some(w) = self.placement.iter().find(|w| **w >= self.order.len()) {
            return Err(Error::format(format!("the plan places a stage on worker {w}, from 0 on it has lists of {}", self.order.len())));
        }
        let workers = self.placement.iter().max().map_or(0, |w| w + 1);
        if workers != self.order.len() {
            return Err(Error::format(format!("the plan has lists of {} workers and places stages on {workers}", self.order.len())));
        }
        let count = |n: usize| u32::try_from(n).map_err(|_| Error::format(format!("a pipeline of the plan has micro-batch {n}")));
        let chain = |[a, b, m, n]: &[usize; 4]| Ok(Chain { stages: *a..*b, micro_batches: count(*m)?..count(*n)? });
        let chains = self.chains.iter().map(chain).collect::<Result<_>>()?;
        let layout = Layout { stages, chains, placement: self.placement.clone() };
        layout.check(p).map_err(|e| Error::format(e.message().to_owned()))?;
        Ok(layout)
    }
}
