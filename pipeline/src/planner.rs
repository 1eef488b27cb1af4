//! Planners: from costs to who holds which layers, and in which order work is done.
//!
//! Every planner proposes a [`Layout`] and an order; the simulator says how long a step takes, whichever formula the planner itself went by, and
//! the memory of every device is a hard limit for all. `docs/planners.md` says where each comes from and what was assumed.

pub mod accpar;
pub mod adaptis;
pub mod asteroid;
pub mod auto;
mod bounds;
pub mod dapple;
mod directions;
pub mod early_exit;
pub mod given;
mod hdp;
pub mod hybridop;
mod layout;
mod legs;
mod pipelines;
mod problem;
mod ranked;
mod shares;
mod split;
pub mod verdict;
pub mod xronos;

pub use layout::{DeviceReport, Layout, Member, Outcome, Split, StageLayout};
pub use problem::{Method, Problem};

use crate::order::ScheduleName;
use pipelines::Cut;
use serde::{Deserialize, Serialize};
use zofo_hal::{Error, Result};

/// What a planner comes up with.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Proposal {
    /// The layout with its order, simulated.
    pub outcome: Outcome,
    /// How zeroth-order stages learn, where there are any.
    pub method: Method,
    /// What a user should know about it.
    pub notes: Vec<String>,
}

/// A planner by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum PlannerName {
    /// The fastest device alone.
    Single,
    /// GPipe with equal stages.
    Gpipe,
    /// GPipe with the best slowest stage.
    GpipeMinMax,
    /// 1F1B with equal stages.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B with the best slowest stage.
    #[serde(rename = "1f1b-min-max")]
    OneFOneBMinMax,
    /// Interleaved 1F1B.
    #[serde(rename = "interleaved-1f1b")]
    Interleaved,
    /// Two pipelines in opposite directions.
    Chimera,
    /// ZB-H1 with the best slowest stage.
    ZbH1,
    /// Pipeline of data-parallel groups with even shares, after DAPPLE.
    Dapple,
    /// Data parallelism over pipelines, after HetPipe.
    Hdp,
    /// Pipeline of data-parallel groups with uneven shares, after Asteroid.
    Asteroid,
    /// Batch or tensor parallelism by layer, after AccPar.
    Accpar,
    /// Tensor parallelism with uneven shares, after Xronos.
    Xronos,
    /// Partition, placement and order tuned together, after AdaPtis.
    Adaptis,
    /// HybridOP's planner with its errata mended.
    Hybridop,
    /// HybridOP's planner as its text has it.
    HybridopAsPrinted,
    /// All layers in front of the cut on every bp-free device, each with its own directions.
    DirectionParallel,
    /// HybridOP's tail placement: a model of latency that cannot train.
    HybridopTail,
    /// zofo's own.
    Auto,
}

/// Layers, devices and passes of a micro-batch that planners take: they look at pairs of all, and simulate hundreds of candidates.
const LIMITS: [usize; 3] = [512, 128, 500_000];

/// Layers times devices that planners take, for the same reason.
const PAIRS: usize = 8192;

/// Whether a problem is of a size that can be planned for.
pub(crate) fn check_size(p: &Problem) -> Result<()> {
    let [layers, devices, passes] = LIMITS;
    if p.layers() > layers || p.devices() > devices || p.layers() * p.devices() > PAIRS {
        return Err(Error::invalid(format!(
            "{} layers and {} devices; planners take up to {layers} and {devices}, and {PAIRS} pairs of them: give several layers as one, or plan for part of the devices",
            p.layers(),
            p.devices()
        )));
    }
    let c = p.costs();
    let each = 2 + c.directions.unwrap_or(1).div_ceil(c.group.max(1)) as usize;
    let all = (c.micro_batches as usize).saturating_mul(each).saturating_mul(p.devices().min(p.layers()));
    match all > passes {
        true => Err(Error::invalid(format!(
            "a step of some {all} actions is too long to plan for (up to {passes}); its time grows evenly with the micro-batches, so plan with fewer of \
             them, or with larger groups of directions"
        ))),
        false => Ok(()),
    }
}

/// Plans; where a limit in seconds is given, plans that are known to take so long without being simulated may be left out.
type Plan = fn(&Problem, &Method, f64) -> Result<Proposal>;

/// All planners: the name on the command line, and how it plans. Those that search long come behind the others, whose plans spare `auto` most of it.
const PLANNERS: &[(&str, PlannerName, Plan)] = &[
    ("single", PlannerName::Single, |p, _, _| pipelines::single(p)),
    ("gpipe", PlannerName::Gpipe, |p, _, _| pipelines::line(p, ScheduleName::Gpipe, Cut::Equal)),
    ("gpipe-min-max", PlannerName::GpipeMinMax, |p, _, _| pipelines::line(p, ScheduleName::Gpipe, Cut::MinMax)),
    ("1f1b", PlannerName::OneFOneB, |p, _, _| pipelines::line(p, ScheduleName::OneFOneB, Cut::Equal)),
    ("1f1b-min-max", PlannerName::OneFOneBMinMax, |p, _, _| pipelines::line(p, ScheduleName::OneFOneB, Cut::MinMax)),
    ("interleaved-1f1b", PlannerName::Interleaved, |p, _, _| pipelines::interleaved(p)),
    ("chimera", PlannerName::Chimera, |p, _, _| pipelines::chimera(p)),
    ("zb-h1", PlannerName::ZbH1, |p, _, _| pipelines::line(p, ScheduleName::ZbH1, Cut::MinMax)),
    ("accpar", PlannerName::Accpar, |p, _, _| accpar::propose(p)),
    ("xronos", PlannerName::Xronos, |p, _, _| xronos::propose(p)),
    ("dapple", PlannerName::Dapple, |p, _, below| dapple::propose(p, below)),
    ("hdp", PlannerName::Hdp, |p, _, below| hdp::propose(p, below)),
    ("asteroid", PlannerName::Asteroid, |p, _, below| asteroid::propose(p, below)),
    ("adaptis", PlannerName::Adaptis, |p, _, below| adaptis::propose(p, below)),
    ("hybridop", PlannerName::Hybridop, |p, method, _| hybridop::plan(p, method)),
    ("hybridop-as-printed", PlannerName::HybridopAsPrinted, |p, method, _| hybridop::as_printed(p, method)),
    ("direction-parallel", PlannerName::DirectionParallel, directions::plan),
    ("hybridop-tail", PlannerName::HybridopTail, |p, method, _| hybridop::tail(p, method)),
    ("auto", PlannerName::Auto, |p, _, _| auto::plan(p, auto::Effort::default()).map(|f| f.proposal)),
];

/// What a planner says that knows of no plan below the seconds that it was given.
fn nothing_in_time() -> Error {
    Error::invalid("nothing in time")
}

impl PlannerName {
    /// All planners.
    pub fn all() -> impl Iterator<Item = Self> {
        PLANNERS.iter().map(|(_, planner, _)| *planner)
    }

    /// The name.
    pub fn name(self) -> &'static str {
        PLANNERS.iter().find(|(_, p, _)| *p == self).map_or("?", |(name, _, _)| name)
    }

    /// The planner called `name`.
    ///
    /// # Errors
    /// `InvalidArgument` that lists the names there are.
    pub fn parse(name: &str) -> Result<Self> {
        PLANNERS.iter().find(|(n, _, _)| *n == name).map(|(_, p, _)| *p).ok_or_else(|| {
            let known: Vec<_> = PLANNERS.iter().map(|(n, _, _)| *n).collect();
            Error::invalid(format!("no planner is called `{name}`; there are: {}", known.join(", ")))
        })
    }

    /// Whether its plans can train; the others are models of latency.
    pub fn trains(self) -> bool {
        self != Self::HybridopTail
    }

    /// Whether its plans depend on how zeroth-order stages learn; the others backpropagate everywhere.
    pub fn uses_method(self) -> bool {
        matches!(self, Self::Hybridop | Self::HybridopAsPrinted | Self::DirectionParallel | Self::HybridopTail | Self::Auto)
    }

    /// Plans.
    ///
    /// # Errors
    /// `InvalidArgument` where no plan of its kind exists, naming the device whose memory is short and by how much.
    pub fn propose(self, p: &Problem, method: &Method) -> Result<Proposal> {
        self.propose_below(p, method, f64::INFINITY)
    }

    /// As [`PlannerName::propose`], for who has a plan of `below` seconds: a plan that takes longer may be an error instead.
    pub(crate) fn propose_below(self, p: &Problem, method: &Method, below: f64) -> Result<Proposal> {
        check_size(p)?;
        let (_, _, plan) = PLANNERS.iter().find(|(_, n, _)| *n == self).ok_or_else(|| Error::invalid("no such planner"))?;
        plan(p, method, below)
    }
}
