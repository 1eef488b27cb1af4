//! Who has which part of what a stage works on, where several devices share it, and what they say to each other then.
//!
//! A stage that is shared by [`Split::Batch`] divides every micro-batch between its members, whole sequences each, so that their tokens come as near
//! to the shares as they can. [`Split::Directions`] divides the directions of the step: every member has all rows, the base, and its own copies.
//! Members of a [`Split::Tensor`] stage all have all rows and copies of what travels between stages, and add up inside the layers.
//!
//! A message from stage to stage is then several, from each member that has a part to each member that needs it. Both ends work out which rows of
//! which blocks it carries, from the shares and the lengths of the sequences alone.

use crate::{
    ir::{Action, Group, Payload, Workload},
    plan::{Plan, describe_stages},
    planner::Split,
};
use std::ops::Range;
use zofo_hal::{Error, Result, op::Form};
use zofo_ops::{batch::Capacity, config::ModelConfig, llama::Shard};

/// One of the blocks that the rows of a message come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Block {
    /// The model as it is.
    Base,
    /// The copy along a direction.
    Direction(u32),
}

/// Blocks in the order in which they lie in a tensor: the base, where it is there, and copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    base: bool,
    directions: Range<u32>,
}

impl Blocks {
    const BASE: Self = Self { base: true, directions: 0..0 };
    const NONE: Self = Self { base: false, directions: 0..0 };

    /// Those of a group's activations.
    fn of(g: &Group, form: Form) -> Self {
        Self { base: g.copies(form).has_base, directions: g.q0..g.q0 + g.n }
    }

    /// Those that an action puts out.
    pub fn put_out(action: &Action, form: Form) -> Self {
        match action {
            Action::PerturbedForward(g) | Action::ExitForward(g) => Self::of(g, form),
            _ => Self::BASE,
        }
    }

    pub fn len(&self) -> usize {
        usize::from(self.base) + self.directions.len()
    }

    fn iter(&self) -> impl Iterator<Item = Block> + use<> {
        self.base.then_some(Block::Base).into_iter().chain(self.directions.clone().map(Block::Direction))
    }

    /// Position of the first of `part`, which lie one behind the other here; `None` where they do not.
    pub fn within(&self, part: &Self) -> Option<usize> {
        let mut positions = part.iter().map(|b| self.position(b));
        let first = positions.next()??;
        positions.zip(first + 1..).all(|(found, expected)| found == Some(expected)).then_some(first)
    }

    /// Where a block lies.
    pub fn position(&self, block: Block) -> Option<usize> {
        match block {
            Block::Base => self.base.then_some(0),
            Block::Direction(q) => self.directions.contains(&q).then(|| usize::from(self.base) + (q - self.directions.start) as usize),
        }
    }
}

/// What a member has of a message, or needs of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Rows of the micro-batch.
    pub rows: Range<usize>,
    pub blocks: Blocks,
}

/// Rows of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub block: Block,
    /// Of the micro-batch.
    pub rows: Range<usize>,
}

/// The shares of a stage's members.
#[derive(Clone, Debug)]
struct StageShares {
    split: Split,
    /// Share of all members up to each, itself included.
    up_to: Vec<f64>,
    /// Rank of the first member; the others follow.
    first_rank: usize,
    /// Each member's part of every layer, where they share it by heads and columns.
    shards: Vec<Shard>,
}

/// The part of `0..n` between a member's bounds, which `at` finds from the share of all members up to there.
fn between(up_to: &[f64], member: usize, n: usize, at: impl Fn(f64) -> usize) -> Range<usize> {
    let start = if member == 0 { 0 } else { at(up_to[member - 1]) };
    let end = if member + 1 == up_to.len() { n } else { at(up_to[member]) };
    start..end.max(start)
}

/// The sequence in front of which a share of all tokens comes nearest to lie.
fn nearest(ends: &[u32], share: f64) -> usize {
    let tokens = ends.last().map_or(0.0, |end| f64::from(*end));
    let off = |i: &usize| (f64::from(ends[*i]) - share * tokens).abs();
    (0..ends.len()).min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(0)
}

fn up_to(shares: &[f64]) -> Vec<f64> {
    let sums = shares.iter().scan(0.0, |sum, share| {
        *sum += share;
        Some(*sum)
    });
    sums.collect()
}

/// Sequences of a micro-batch that each of several members has by their shares.
pub(crate) fn sequences(shares: &[f64], ends: &[u32]) -> Vec<Range<usize>> {
    let up_to = up_to(shares);
    (0..shares.len()).map(|member| between(&up_to, member, ends.len().saturating_sub(1), |share| nearest(ends, share))).collect()
}

/// The shares of all stages.
#[derive(Clone, Debug)]
pub(super) struct Sharing {
    stages: Vec<StageShares>,
    workload: Workload,
}

impl Sharing {
    /// # Errors
    /// Those of [`Shard::split`], with the stage.
    pub fn new(plan: &Plan, config: &ModelConfig) -> Result<Self> {
        let stages = plan.stages.iter().zip(&plan.schedule.placement).enumerate().map(|(i, (s, worker))| {
            let shares: Vec<f64> = s.members.iter().map(|m| m.share).collect();
            let by_heads = s.split == Split::Tensor && shares.len() > 1;
            let shards = by_heads.then(|| Shard::split(config, &shares)).transpose();
            let shards = shards
                .map_err(|e| {
                    e.context(format!(
                        "{}, planned with `tensor_units` of the costs above the model's query heads",
                        describe_stages(&[i], &s.devices())
                    ))
                })?
                .unwrap_or_default();
            Ok(StageShares { split: s.split, up_to: up_to(&shares), first_rank: plan.first_rank(*worker), shards })
        });
        Ok(Self { stages: stages.collect::<Result<_>>()?, workload: plan.schedule.workload.clone() })
    }

    /// A member's part of every layer, where it has not all of them.
    pub fn shard(&self, stage: usize, rank: usize) -> Option<&Shard> {
        let s = &self.stages[stage];
        s.shards.get(rank - s.first_rank)
    }

    /// Ranks of a stage's members.
    pub fn ranks(&self, stage: usize) -> Range<usize> {
        let s = &self.stages[stage];
        s.first_rank..s.first_rank + s.up_to.len()
    }

    pub fn is_shared(&self, stage: usize) -> bool {
        self.stages[stage].up_to.len() > 1
    }

    /// Whether stages that one worker has divide micro-batches alike.
    pub fn same_rows(&self, a: usize, b: usize) -> bool {
        let divides = |s: usize| (self.stages[s].split == Split::Batch && self.is_shared(s)).then_some(&self.stages[s].up_to);
        divides(a) == divides(b)
    }

    /// Whether several devices, of the stage or of others with the same layers, add up their gradients.
    pub fn adds_gradients(&self, stage: usize) -> bool {
        self.is_shared(stage) || !self.workload.chains.is_empty()
    }

    pub fn any_adds_gradients(&self) -> bool {
        (0..self.stages.len()).any(|s| self.adds_gradients(s))
    }

    /// Whether a device that has a part in both stages has all that it needs of a message between them itself, whatever the micro-batch: the tensor
    /// need not leave it.
    pub fn hands_over(&self, from: usize, to: usize, rank: usize, payload: &Payload) -> bool {
        let (has, needs) = (self.blocks(from, rank, payload), self.blocks(to, rank, payload));
        self.ranks(from).contains(&rank) && self.same_rows(from, to) && needs.len() > 0 && has.within(&needs).is_some()
    }

    /// Whether a device of that rank says what all members of the stage know.
    pub fn speaks(&self, stage: usize, rank: usize) -> bool {
        self.stages[stage].split != Split::Tensor || rank == self.ranks(stage).start
    }

    /// Place of a member's optimiser among those of all members of all stages.
    pub fn slot(&self, stage: usize, rank: usize) -> usize {
        let before: usize = self.stages[..stage].iter().map(|s| s.up_to.len()).sum();
        before + rank - self.ranks(stage).start
    }

    pub fn slots(&self) -> usize {
        self.stages.iter().map(|s| s.up_to.len()).sum()
    }

    /// Sequences of a micro-batch that a member has; `ends` is [`zofo_ops::batch::MicroBatch::cu_seqlens`].
    pub fn sequences(&self, stage: usize, rank: usize, ends: &[u32]) -> Range<usize> {
        let s = &self.stages[stage];
        match s.split {
            Split::Batch => between(&s.up_to, rank - s.first_rank, ends.len().saturating_sub(1), |share| nearest(ends, share)),
            _ => 0..ends.len().saturating_sub(1),
        }
    }

    fn rows(&self, stage: usize, rank: usize, ends: &[u32]) -> Range<usize> {
        let sequences = self.sequences(stage, rank, ends);
        let end = |i: usize| ends.get(i).map_or(0, |e| *e as usize);
        end(sequences.start)..end(sequences.end)
    }

    /// Room for a member's part of any micro-batch that `whole` has room for: a bound lies half a sequence off its share at most.
    pub fn capacity(&self, stage: usize, rank: usize, whole: Capacity, longest: usize) -> Capacity {
        if self.stages[stage].split != Split::Batch || !self.is_shared(stage) {
            return whole;
        }
        let s = &self.stages[stage];
        let member = rank - s.first_rank;
        let share = s.up_to[member] - if member == 0 { 0.0 } else { s.up_to[member - 1] };
        let rows = ((share * whole.rows as f64).ceil() as usize).saturating_add(longest).min(whole.rows);
        Capacity::bucket(rows, whole.sequences.min(rows), whole.labels.min(rows))
    }

    /// The directions of a group that a member takes.
    fn own(&self, stage: usize, rank: usize, g: &Group, of: u32) -> Range<u32> {
        let all = g.q0..g.q0 + g.n;
        if self.stages[stage].split != Split::Directions || !self.is_shared(stage) {
            return all;
        }
        let s = &self.stages[stage];
        let own = between(&s.up_to, rank - s.first_rank, of as usize, |share| (share * f64::from(of)).round() as usize);
        let (start, end) = (all.start.max(own.start as u32), all.end.min(own.end as u32));
        start..end.max(start)
    }

    /// What a member does of an action: the same with its own directions; `None` where it has no part in it.
    pub fn narrow(&self, stage: usize, rank: usize, action: &Action) -> Option<Action> {
        let w = &self.workload;
        let group = |g: &Group, of: u32| {
            let own = self.own(stage, rank, g, of);
            Group { q0: own.start, n: own.len() as u32, ..*g }
        };
        match action {
            Action::PerturbedForward(g) => match group(g, w.directions) {
                Group { n: 0, with_base: true, m, .. } => Some(Action::Forward { m }),
                Group { n: 0, .. } => None,
                g => Some(Action::PerturbedForward(g)),
            },
            Action::BoundaryDot(g) => Some(group(g, w.directions)).filter(|g| g.n > 0).map(Action::BoundaryDot),
            Action::ExitForward(g) => Some(group(g, w.exit_directions)).filter(|g| g.n > 0).map(Action::ExitForward),
            other => Some(*other),
        }
    }

    /// How many readouts of a micro-batch a member makes at the cut.
    pub fn readouts(&self, stage: usize, rank: usize, m: u32) -> usize {
        let has_part = |g: &Group| self.narrow(stage, rank, &Action::BoundaryDot(*g)).is_some();
        self.workload.groups(m).iter().filter(|g| has_part(g)).count()
    }

    /// The blocks of a message that a member has, or needs.
    pub fn blocks(&self, stage: usize, rank: usize, payload: &Payload) -> Blocks {
        let form = self.workload.form;
        let action = match payload {
            Payload::Hidden { .. } | Payload::Delta { .. } => return Blocks::BASE,
            Payload::Copies(g) => Action::PerturbedForward(*g),
            Payload::ExitCopies(g) => Action::ExitForward(*g),
        };
        self.narrow(stage, rank, &action).map_or(Blocks::NONE, |a| Blocks::put_out(&a, form))
    }

    pub fn part(&self, stage: usize, rank: usize, payload: &Payload, ends: &[u32]) -> Part {
        Part { rows: self.rows(stage, rank, ends), blocks: self.blocks(stage, rank, payload) }
    }

    /// Who sends what of a message to a member of stage `to`: itself as far as it can, then the members of stage `from` in turn.
    ///
    /// # Errors
    /// `Execution` where nobody has a part that it needs.
    pub fn routes(&self, from: usize, to: usize, rank: usize, payload: &Payload, ends: &[u32]) -> Result<Vec<(usize, Vec<Piece>)>> {
        let needs = self.part(to, rank, payload, ends);
        let own = self.ranks(from).filter(|sender| *sender == rank);
        let senders: Vec<(usize, Part)> =
            own.chain(self.ranks(from).filter(|sender| *sender != rank)).map(|s| (s, self.part(from, s, payload, ends))).collect();
        let mut routes: Vec<(usize, Vec<Piece>)> = senders.iter().map(|(s, _)| (*s, Vec::new())).collect();
        if needs.rows.is_empty() {
            return Ok(Vec::new());
        }
        for block in needs.blocks.iter() {
            // Rows that nobody sends yet, in ascending ranges.
            let mut missing = vec![needs.rows.clone()];
            for ((_, has), (_, pieces)) in senders.iter().zip(&mut routes) {
                if has.blocks.position(block).is_none() {
                    continue;
                }
                let mut left = Vec::new();
                for range in missing {
                    let rows = range.start.max(has.rows.start)..range.end.min(has.rows.end);
                    if rows.is_empty() {
                        left.push(range);
                        continue;
                    }
                    left.extend([range.start..rows.start, rows.end..range.end].into_iter().filter(|r| !r.is_empty()));
                    pieces.push(Piece { block, rows });
                }
                missing = left;
            }
            if !missing.is_empty() {
                return Err(Error::execution(format!("nobody has rows {missing:?} of {payload:?} for stage {to}")));
            }
        }
        routes.retain(|(_, pieces)| !pieces.is_empty());
        Ok(routes)
    }
}
