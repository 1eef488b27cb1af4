//! List scheduling: the most urgent action that is ready, under credits.
//!
//! Within a class, actions are taken in the order of micro-batches and directions, so a stage's state is a handful of counters and gradients
//! accumulate in the same order whatever the split.

use super::{
    engine::{Order, State},
    stuck,
};
use crate::ir::{Action, Credits, Group, Readout, Role, Step, Workload};
use zofo_hal::Result;

/// Kinds of work that a first-order stage chooses between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Base forward passes.
    Forward,
    /// Backward passes.
    Backward,
    /// Perturbed forward passes.
    Perturbed,
}

/// What zeroth-order stages do first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadOrder {
    /// Base passes before directions, as far ahead as credits allow.
    BaseFirst,
    /// One micro-batch after the other, its directions behind its base pass.
    MicroBatchFirst,
}

/// How many micro-batches a first-order stage keeps for their backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InFlight {
    /// As many as there are stages from it to the end, as 1F1B does.
    Depth,
    /// All.
    All,
}

/// What is more urgent than what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Urgency {
    /// On first-order stages, most urgent first.
    pub classes: [Class; 3],
    /// On zeroth-order stages.
    pub head: HeadOrder,
    /// Limit of kept activations.
    pub in_flight: InFlight,
    /// Limits of messages.
    pub credits: Credits,
}

impl Urgency {
    /// What frees memory first, then what feeds the next stage, then directions; credits that keep every stage busy and no more.
    pub fn frugal(w: &Workload) -> Self {
        Self {
            classes: [Class::Backward, Class::Forward, Class::Perturbed],
            head: HeadOrder::BaseFirst,
            in_flight: InFlight::Depth,
            credits: Credits::for_workload(w),
        }
    }

    /// As [`Urgency::frugal`], without limits of memory.
    pub fn eager(w: &Workload) -> Self {
        Self { in_flight: InFlight::All, credits: Credits::ample(w), ..Self::frugal(w) }
    }

    /// All that are tried: six orders of classes, two of the head, two limits of activations, frugal and ample credits.
    pub fn all(w: &Workload) -> Vec<Self> {
        use Class::{Backward as B, Forward as F, Perturbed as P};
        let classes = [[B, F, P], [B, P, F], [F, B, P], [F, P, B], [P, B, F], [P, F, B]];
        let heads = [HeadOrder::BaseFirst, HeadOrder::MicroBatchFirst];
        let limits =
            [(InFlight::Depth, Credits::for_workload(w)), (InFlight::Depth, Credits::ample(w)), (InFlight::All, Credits::ample(w))];
        // Directions matter to the order only where there are any, and to the classes only where first-order stages take them.
        let classes: Vec<[Class; 3]> = match w.estimates() && w.readout == Readout::Loss {
            true => classes.to_vec(),
            false => vec![classes[0], classes[2]],
        };
        let heads = if w.estimates() { &heads[..] } else { &heads[..1] };
        let mut all = Vec::new();
        for (in_flight, credits) in limits {
            for head in heads {
                all.extend(classes.iter().map(|c| Self { classes: *c, head: *head, in_flight, credits }));
            }
        }
        all
    }
}

/// The classes of all stages; a stage's work of each goes in order.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Track {
    Base,
    /// Behind the cut, the copies that went with the base pass in front of it: they arrive in an order of their own.
    First,
    Copies,
    Exit,
    Loss,
    Backward,
    Weight,
    Dot,
    Guide,
}

const TRACKS: [Track; 9] =
    [Track::Dot, Track::Guide, Track::Loss, Track::Backward, Track::Base, Track::First, Track::Copies, Track::Weight, Track::Exit];

/// Smaller is more urgent.
type Key = (u32, u32, u32);

struct StageTracks {
    /// Per track: how many have been started.
    next: [usize; 9],
    total: [usize; 9],
    /// Tracks that the stage has.
    tracks: Vec<Track>,
    /// Directions of micro-batch 0 in order, less the group that the base pass takes along.
    copies: Vec<Group>,
    updated: bool,
    limit: usize,
}

pub(super) struct ByUrgency<'a> {
    urgency: &'a Urgency,
    stages: Vec<StageTracks>,
    stages_of: Vec<Vec<usize>>,
    groups: Vec<Group>,
    exits: Vec<Group>,
    /// The group that goes with the base pass through zeroth-order stages.
    merged: Option<Group>,
    cut: usize,
}

impl<'a> ByUrgency<'a> {
    pub fn new(w: &Workload, placement: &[usize], workers: usize, urgency: &'a Urgency) -> Self {
        let (groups, exits, cut) = (w.groups(0), w.exit_groups(0), w.cut());
        let merged = groups.first().copied().filter(|g| g.with_base);
        let all = w.micro_batches as usize;
        let stages = (0..w.stages())
            .map(|s| {
                let (head, tail) = (s < cut, s >= w.tail());
                let exact = !head && !tail;
                let perturbs = head || tail || w.readout == Readout::Loss;
                let copies: Vec<Group> = if perturbs { groups.iter().copied().filter(|g| !g.with_base).collect() } else { Vec::new() };
                let total = |t: Track| match t {
                    Track::Base => all,
                    Track::First if perturbs && !head && merged.is_some() => all,
                    Track::Copies => all * copies.len(),
                    Track::Exit if head => all * exits.len(),
                    Track::Loss if w.is_last(s) => all,
                    Track::Backward if exact => all,
                    Track::Weight if exact && w.split_backward => all,
                    Track::Dot if s + 1 == cut && w.readout == Readout::Cut => all * groups.len(),
                    Track::Guide if head && w.guides() => all,
                    _ => 0,
                };
                let total = TRACKS.map(|t| (t as usize, total(t))).iter().fold([0; 9], |mut a, (i, n)| {
                    a[*i] = *n;
                    a
                });
                let tracks = TRACKS.into_iter().filter(|t| total[*t as usize] > 0).collect();
                let limit = match urgency.in_flight {
                    InFlight::All => all,
                    InFlight::Depth => all.min(w.tail() - s.min(w.tail())),
                };
                StageTracks { next: [0; 9], total, tracks, copies, updated: false, limit }
            })
            .collect();
        let mut stages_of = vec![Vec::new(); workers];
        placement.iter().enumerate().for_each(|(s, w)| stages_of[*w].push(s));
        Self { urgency, stages, stages_of, groups, exits, merged, cut }
    }

    fn at(&self, stage: usize, track: Track) -> usize {
        self.stages[stage].next[track as usize]
    }

    /// The next action of a track, with its micro-batch.
    fn action(&self, w: &Workload, stage: usize, track: Track) -> Option<(u32, Action)> {
        let (t, i) = (&self.stages[stage], self.at(stage, track));
        if i >= t.total[track as usize] {
            return None;
        }
        let of = |groups: &[Group]| {
            let m = (i / groups.len()) as u32;
            (m, Group { m, ..groups[i % groups.len()] })
        };
        let m = i as u32;
        Some(match track {
            Track::Base => match self.merged {
                Some(g) if stage < self.cut => (m, Action::PerturbedForward(Group { m, ..g })),
                _ => (m, Action::Forward { m }),
            },
            Track::First => (m, Action::PerturbedForward(Group { m, ..self.merged?.without_base() })),
            Track::Copies => {
                let (m, g) = of(&t.copies);
                (m, Action::PerturbedForward(g))
            }
            Track::Exit => {
                let (m, g) = of(&self.exits);
                (m, Action::ExitForward(g))
            }
            Track::Loss => (m, Action::Loss { m }),
            Track::Backward if w.split_backward => (m, Action::BackwardInput { m }),
            Track::Backward => (m, Action::Backward { m }),
            Track::Weight => (m, Action::BackwardWeight { m }),
            Track::Dot => {
                let (m, g) = of(&self.groups);
                (m, Action::BoundaryDot(g))
            }
            Track::Guide => (m, Action::Guide { m }),
        })
    }

    /// Whether the stage itself has done what comes before.
    fn follows(&self, w: &Workload, stage: usize, track: Track, m: u32) -> bool {
        let (t, m) = (&self.stages[stage], m as usize);
        let base = self.at(stage, Track::Base) > m;
        match track {
            Track::Base => true,
            // Extra directions are for time that the stage would idle: when everything else that it forwards is done (HybridOP, section 4.4).
            Track::Exit => [Track::Base, Track::Copies].iter().all(|k| t.next[*k as usize] == t.total[*k as usize]),
            Track::Copies => stage < self.cut || base,
            Track::First => base,
            Track::Loss if stage < w.tail() => base,
            Track::Loss => {
                let firsts = self.merged.is_none() || self.at(stage, Track::First) > m;
                base && firsts && self.at(stage, Track::Copies) >= (m + 1) * t.copies.len()
            }
            Track::Backward if w.is_last(stage) => self.at(stage, Track::Loss) > m,
            Track::Backward => base,
            Track::Weight => self.at(stage, Track::Backward) > m,
            // The group that goes with the base is the first.
            Track::Dot => {
                let i = self.at(stage, Track::Dot) % self.groups.len();
                let merged = usize::from(self.merged.is_some());
                base && (i < merged || self.at(stage, Track::Copies) > m * t.copies.len() + i - merged)
            }
            Track::Guide => base,
        }
    }

    /// Whether a micro-batch may enter a head whose slopes are read at the cut: so many wait for that at most. Decided where it enters; further
    /// down, a full lane could hold what is refused and lack what is waited for.
    fn admits(&self, w: &Workload, stage: usize, track: Track, m: u32) -> bool {
        if stage != 0
            || self.cut == 0
            || w.readout != Readout::Cut
            || self.groups.is_empty()
            || !matches!(track, Track::Base | Track::Copies)
        {
            return true;
        }
        let copies = self.stages[0].copies.len().max(1);
        let entered = self.at(0, Track::Base).max(self.at(0, Track::Copies).div_ceil(copies));
        let read = self.at(self.cut - 1, Track::Dot) / self.groups.len();
        (m as usize) < entered || entered - read < self.urgency.credits.awaiting
    }

    fn key(&self, w: &Workload, stage: usize, track: Track, m: u32) -> Key {
        let class = |c: Class| 2 + self.urgency.classes.iter().position(|k| *k == c).unwrap_or(3) as u32;
        let rank = match track {
            Track::Dot | Track::Guide => return (0, 0, m),
            Track::Loss => return (0, 1, m),
            Track::Backward => class(Class::Backward),
            Track::Base if w.roles[stage] == Role::FirstOrder => class(Class::Forward),
            Track::First | Track::Copies if w.roles[stage] == Role::FirstOrder => class(Class::Perturbed),
            Track::Base => 2,
            Track::First | Track::Copies => 3,
            Track::Weight => return (u32::MAX - 1, 0, m),
            Track::Exit => return (u32::MAX, 0, m),
        };
        match self.urgency.head {
            HeadOrder::MicroBatchFirst if w.roles[stage] != Role::FirstOrder => (1, m, rank),
            _ => (1, rank, m),
        }
    }
}

impl Order for ByUrgency<'_> {
    fn next(&mut self, state: &mut State<'_>, worker: usize) -> Option<Step> {
        let w = state.w;
        let mut best: Option<(Key, usize, Track, Action)> = None;
        for &stage in &self.stages_of[worker] {
            for &track in &self.stages[stage].tracks {
                let Some((m, action)) = self.action(w, stage, track) else { continue };
                let key = self.key(w, stage, track, m);
                let exact = stage >= self.cut && stage < w.tail();
                let ready = best.as_ref().is_none_or(|b| key < b.0)
                    && self.follows(w, stage, track, m)
                    && state.has_input(stage, &action)
                    && !(track == Track::Base && exact && state.in_flight(stage) >= self.stages[stage].limit)
                    && self.admits(w, stage, track, m)
                    && state.has_room(stage, &action);
                if ready {
                    best = Some((key, stage, track, action));
                }
            }
        }
        if let Some((_, stage, track, action)) = best {
            self.stages[stage].next[track as usize] += 1;
            return Some(Step::new(stage, action));
        }
        let due = self.stages_of[worker].iter().copied().find(|s| !self.stages[*s].updated && state.may_update(*s))?;
        self.stages[due].updated = true;
        Some(Step::new(due, Action::Update))
    }

    fn finished(&self, state: &State<'_>) -> Result<()> {
        match self.stages.iter().position(|s| !s.updated) {
            Some(s) => Err(stuck(s, &format!("is left with {} actions under these credits", state.left(s)))),
            None => Ok(()),
        }
    }
}
