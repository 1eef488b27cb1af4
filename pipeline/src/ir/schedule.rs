//! A complete order of work.

use super::{Action, Lane, Workload};
use core::{fmt, str::FromStr};
use zofo_hal::{Error, Result};

/// One entry of a worker's list: an action on one of its stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Step {
    /// The stage.
    pub stage: u32,
    /// What it does.
    pub action: Action,
}

impl Step {
    /// `action` on `stage`.
    pub fn new(stage: usize, action: Action) -> Self {
        Self { stage: stage as u32, action }
    }

    /// The same step of a pipeline whose stages and micro-batches start there.
    pub fn shifted(mut self, stages: usize, micro_batches: u32) -> Self {
        self.stage += stages as u32;
        match &mut self.action {
            Action::Forward { m }
            | Action::Loss { m }
            | Action::Backward { m }
            | Action::BackwardInput { m }
            | Action::BackwardWeight { m }
            | Action::Guide { m } => *m += micro_batches,
            Action::PerturbedForward(g) | Action::ExitForward(g) | Action::BoundaryDot(g) => g.m += micro_batches,
            Action::Update => {}
        }
        self
    }

    /// The stage as an index.
    pub fn stage(&self) -> usize {
        self.stage as usize
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.action, self.stage)
    }
}

impl FromStr for Step {
    type Err = Error;

    /// Reads what [`Step`] is displayed as: an action, `@` and its stage.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::format(format!("`{}` is no step; one looks like F0@2", text.escape_debug()));
        let (action, stage) = text.split_once('@').ok_or_else(wrong)?;
        Ok(Self { stage: stage.parse().map_err(|_| wrong())?, action: action.parse()? })
    }
}

/// A complete order of work: one list per worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What is computed.
    pub workload: Workload,
    /// Worker of each stage. A worker is a device, or a group of devices that work as one.
    pub placement: Vec<usize>,
    /// In which order, per worker.
    pub lists: Vec<Vec<Step>>,
    /// How far stages may run ahead of each other.
    pub credits: Credits,
}

impl Schedule {
    /// A schedule whose stage `s` is all that worker `s` has.
    pub fn one_to_one(workload: Workload, lists: Vec<Vec<Action>>, credits: Credits) -> Self {
        let placement = (0..lists.len()).collect();
        let lists = (lists.into_iter().enumerate()).map(|(s, list)| list.into_iter().map(|a| Step::new(s, a)).collect()).collect();
        Self { workload, placement, lists, credits }
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.lists.len()
    }

    /// Whether stage `s` is all that worker `s` has.
    pub fn is_one_to_one(&self) -> bool {
        self.placement.len() == self.lists.len() && self.placement.iter().enumerate().all(|(s, w)| s == *w)
    }

    /// What `stage` does, in the order of its worker's list.
    pub fn actions(&self, stage: usize) -> impl Iterator<Item = Action> + '_ {
        let list = self.placement.get(stage).and_then(|w| self.lists.get(*w)).map_or(&[][..], Vec::as_slice);
        list.iter().filter(move |s| s.stage() == stage).map(|s| s.action)
    }
}

/// Limits on what is in flight; the executor's channels have these capacities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credits {
    /// Base activations per link.
    pub hidden: usize,
    /// Groups of perturbed activations per link.
    pub copies: usize,
    /// Gradients per link.
    pub delta: usize,
    /// Micro-batches between their entry and the readout of their slopes at the cut: the perturbed outputs of so many are kept at most.
    pub awaiting: usize,
}

impl Credits {
    /// Enough for every first-order stage to be busy and no more.
    pub fn for_workload(w: &Workload) -> Self {
        let first_order = (w.stages() - w.cut()).max(1);
        Self { hidden: 2, copies: 2, delta: w.micro_batches.max(1) as usize, awaiting: first_order + 1 }
    }

    /// No limit that a step could reach.
    pub fn ample(w: &Workload) -> Self {
        let m = w.micro_batches.max(1) as usize;
        let groups = w.groups_per_micro_batch().max(w.exit_groups_per_micro_batch()).max(1);
        Self { hidden: m, copies: 2 * m * groups, delta: m, awaiting: m }
    }

    /// Capacity of a lane.
    pub fn lane(&self, lane: Lane) -> usize {
        match lane {
            Lane::Hidden => self.hidden,
            Lane::Copies => self.copies,
            Lane::Delta => self.delta,
        }
    }
}
