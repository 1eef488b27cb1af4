//! What one optimiser step has to compute, and the dataflow that follows from it.

use super::{Action, Group, Payload, Readout, Role};
use std::ops::Range;
use zofo_hal::op::Form;

/// A pipeline: a range of stages through which a range of micro-batches goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its stages, in pipeline order.
    pub stages: Range<usize>,
    /// Its micro-batches.
    pub micro_batches: Range<u32>,
}

/// What one optimiser step has to compute: everything the dataflow depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Role per stage, in pipeline order: zeroth-order or frozen stages first, then first-order ones (the other way round for
    /// [`Readout::Tail`]).
    pub roles: Vec<Role>,
    /// Micro-batches per step, of all pipelines together.
    pub micro_batches: u32,
    /// Directions (Q) that every micro-batch takes; 0 where nothing is estimated.
    pub directions: u32,
    /// Directions per action at most.
    pub group: u32,
    /// Form of the copies.
    pub form: Form,
    /// Where slopes are read.
    pub readout: Readout,
    /// Whether each direction is also taken backwards.
    pub two_sided: bool,
    /// Further directions that end at the exit head (Q').
    pub exit_directions: u32,
    /// Whether zeroth-order stages take a micro-batch's base pass together with its first directions, as one action.
    pub merge_base: bool,
    /// Whether a backward pass is two actions, [`Action::BackwardInput`] and [`Action::BackwardWeight`].
    pub split_backward: bool,
    /// The pipelines, where there are several, one behind the other in stages and micro-batches; empty: all stages are one.
    pub chains: Vec<Chain>,
}

/// Which of the three kinds of stage it is, by what it computes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// In front of the cut: forward passes.
    Head,
    /// Forward and backward.
    Exact,
    /// Forward passes behind the first-order stages, see [`Readout::Tail`].
    Tail,
}

impl Workload {
    /// A workload without directions.
    pub fn first_order(stages: usize, micro_batches: u32) -> Self {
        Self {
            roles: vec![Role::FirstOrder; stages],
            micro_batches,
            directions: 0,
            group: 1,
            form: Form::Value,
            readout: Readout::Loss,
            two_sided: false,
            exit_directions: 0,
            merge_base: true,
            split_backward: false,
            chains: Vec::new(),
        }
    }

    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.roles.len()
    }

    /// Index of the first first-order stage: the cut is in front of it. 0 for [`Readout::Tail`].
    pub fn cut(&self) -> usize {
        match self.readout {
            Readout::Tail => 0,
            // Asked for every action of pipelines of a thousand stages; roles in an order that this relies on are checked where schedules are made.
            _ => self.roles.partition_point(|r| *r != Role::FirstOrder),
        }
    }

    /// Index of the first stage behind the first-order ones, see [`Readout::Tail`]; else the number of stages.
    pub fn tail(&self) -> usize {
        match self.readout {
            Readout::Tail => self.roles.partition_point(|r| *r == Role::FirstOrder),
            _ => self.stages(),
        }
    }

    fn side(&self, stage: usize) -> Side {
        match stage {
            s if s < self.cut() => Side::Head,
            s if s >= self.tail() => Side::Tail,
            _ => Side::Exact,
        }
    }

    /// The pipeline that `stage` is part of.
    pub fn chain(&self, stage: usize) -> Chain {
        let found = self.chains.iter().find(|c| c.stages.contains(&stage));
        found.cloned().unwrap_or(Chain { stages: 0..self.stages(), micro_batches: 0..self.micro_batches })
    }

    fn is_first(&self, stage: usize) -> bool {
        stage == 0 || self.chains.iter().any(|c| c.stages.start == stage)
    }

    /// Whether the losses are computed on `stage`.
    pub fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.stages() || self.chains.iter().any(|c| c.stages.end == stage + 1)
    }

    /// Whether slopes along random directions are estimated.
    pub fn estimates(&self) -> bool {
        self.directions > 0 && self.readout != Readout::Guide && self.roles.contains(&Role::ZerothOrder)
    }

    /// Whether zeroth-order stages learn from the gradient at the cut itself.
    pub fn guides(&self) -> bool {
        self.readout == Readout::Guide && self.roles.contains(&Role::ZerothOrder)
    }

    fn groups_of(&self, directions: u32, m: u32, base: bool, minus: bool) -> impl Iterator<Item = Group> + use<> {
        let size = self.group.max(1);
        (0..directions).step_by(size as usize).map(move |q0| Group {
            m,
            q0,
            n: size.min(directions - q0),
            with_base: base && q0 == 0 && !minus,
            minus,
        })
    }

    /// The groups of directions of a micro-batch, the one with the base first.
    pub fn groups(&self, m: u32) -> Vec<Group> {
        if !self.estimates() {
            return Vec::new();
        }
        let plus = self.groups_of(self.directions, m, self.merge_base, false);
        let minus = self.groups_of(if self.two_sided { self.directions } else { 0 }, m, false, true);
        plus.chain(minus).collect()
    }

    /// Length of [`Workload::groups`].
    pub fn groups_per_micro_batch(&self) -> usize {
        match self.estimates() {
            true => self.directions.div_ceil(self.group.max(1)) as usize * if self.two_sided { 2 } else { 1 },
            false => 0,
        }
    }

    /// Position of `g` in [`Workload::groups`].
    pub fn group_index(&self, g: &Group) -> usize {
        let size = self.group.max(1);
        (g.q0 / size + if g.minus { self.directions.div_ceil(size) } else { 0 }) as usize
    }

    /// The groups of exit directions of a micro-batch.
    pub fn exit_groups(&self, m: u32) -> Vec<Group> {
        if !self.estimates() {
            return Vec::new();
        }
        // Each exit group carries its own base in either form: the exit head's loss differs from the full model's, and only a difference
        // against the same head's loss has the right mean (HybridOP 4.4 as printed subtracts the full model's).
        self.groups_of(self.exit_directions, m, true, false).map(|g| Group { with_base: true, ..g }).collect()
    }

    /// Length of [`Workload::exit_groups`].
    pub fn exit_groups_per_micro_batch(&self) -> usize {
        if self.estimates() { self.exit_directions.div_ceil(self.group.max(1)) as usize } else { 0 }
    }

    fn backward(&self, m: u32) -> Action {
        if self.split_backward { Action::BackwardInput { m } } else { Action::Backward { m } }
    }

    /// Everything `stage` must do, in no particular order.
    pub fn expected(&self, stage: usize) -> Vec<Action> {
        let (side, cut, last) = (self.side(stage), self.cut(), self.is_last(stage));
        let mut all = Vec::new();
        for m in self.chain(stage).micro_batches {
            let groups = self.groups(m);
            if side != Side::Head || groups.is_empty() || !self.merge_base {
                all.push(Action::Forward { m });
            }
            if side == Side::Head || side == Side::Tail || self.readout == Readout::Loss {
                let own = |g: &Group| if side == Side::Head { *g } else { g.without_base() };
                all.extend(groups.iter().map(|g| Action::PerturbedForward(own(g))));
            }
            if last {
                all.push(Action::Loss { m });
            }
            match side {
                Side::Head => {
                    all.extend(self.exit_groups(m).into_iter().map(Action::ExitForward));
                    if stage + 1 == cut && self.readout == Readout::Cut {
                        all.extend(groups.iter().map(|g| Action::BoundaryDot(*g)));
                    }
                    if self.guides() {
                        all.push(Action::Guide { m });
                    }
                }
                Side::Exact => {
                    all.push(self.backward(m));
                    if self.split_backward {
                        all.push(Action::BackwardWeight { m });
                    }
                }
                Side::Tail => {}
            }
        }
        all.push(Action::Update);
        all
    }

    /// How many actions a stage has for each of its micro-batches.
    pub fn actions_per_micro_batch(&self, stage: usize) -> usize {
        let (side, groups) = (self.side(stage), self.groups_per_micro_batch());
        let last = usize::from(self.is_last(stage));
        match side {
            Side::Head => {
                let base = usize::from(groups == 0 || !self.merge_base);
                let read = if stage + 1 == self.cut() && self.readout == Readout::Cut { groups } else { 0 };
                base + groups + read + self.exit_groups_per_micro_batch() + usize::from(self.guides())
            }
            Side::Exact => {
                let copies = if self.readout == Readout::Loss { groups } else { 0 };
                1 + copies + last + 1 + usize::from(self.split_backward)
            }
            Side::Tail => 1 + groups + last,
        }
    }

    /// Actions of the same stage that must come before `action`.
    pub fn requires(&self, stage: usize, action: &Action) -> Vec<Action> {
        let side = self.side(stage);
        let base = |m: u32| match self.groups_of(self.directions, m, self.merge_base, false).next() {
            Some(g) if g.with_base && side == Side::Head && self.estimates() => Action::PerturbedForward(g),
            _ => Action::Forward { m },
        };
        match *action {
            Action::Forward { .. } | Action::ExitForward(_) => Vec::new(),
            Action::PerturbedForward(_) if side == Side::Head => Vec::new(),
            Action::PerturbedForward(g) => vec![Action::Forward { m: g.m }],
            Action::Loss { m } if side == Side::Tail => {
                let copies = self.groups(m).into_iter().map(|g| Action::PerturbedForward(g.without_base()));
                [Action::Forward { m }].into_iter().chain(copies).collect()
            }
            Action::Loss { m } => vec![Action::Forward { m }],
            Action::Backward { m } | Action::BackwardInput { m } if self.is_last(stage) => vec![Action::Loss { m }],
            Action::Backward { m } | Action::BackwardInput { m } => vec![Action::Forward { m }],
            Action::BackwardWeight { m } => vec![Action::BackwardInput { m }],
            Action::BoundaryDot(g) => vec![Action::PerturbedForward(g), base(g.m)],
            Action::Guide { m } => vec![base(m)],
            Action::Update => self.expected(stage).into_iter().filter(|a| *a != Action::Update).collect(),
        }
    }

    /// The message that `action` needs: `(from, payload)`.
    pub fn consumes(&self, stage: usize, action: &Action) -> Option<(usize, Payload)> {
        let upstream = |p: Payload| (!self.is_first(stage)).then(|| (stage - 1, p));
        match *action {
            Action::Forward { m } => upstream(Payload::Hidden { m }),
            // Copies start from the base activations where the zeroth-order stages do.
            Action::PerturbedForward(_) if self.readout == Readout::Tail && stage == self.tail() => None,
            Action::PerturbedForward(g) => upstream(Payload::Copies(g)),
            Action::ExitForward(g) => upstream(Payload::ExitCopies(g)),
            Action::Backward { m } | Action::BackwardInput { m } if !self.is_last(stage) => {
                let from = if stage + 1 == self.tail() { self.stages() - 1 } else { stage + 1 };
                Some((from, Payload::Delta { m }))
            }
            Action::BoundaryDot(Group { m, .. }) | Action::Guide { m } => Some((self.cut(), Payload::Delta { m })),
            Action::Backward { .. }
            | Action::BackwardInput { .. }
            | Action::BackwardWeight { .. }
            | Action::Loss { .. }
            | Action::Update => None,
        }
    }

    /// The messages that `action` makes: `(to, payload)`.
    pub fn produces(&self, stage: usize, action: &Action) -> impl Iterator<Item = (usize, Payload)> + use<> {
        let (cut, last) = (self.cut(), self.is_last(stage));
        let mut one = [None, None];
        let mut to_all_heads = None;
        match *action {
            Action::Forward { m } if !last => one[0] = Some((stage + 1, Payload::Hidden { m })),
            Action::PerturbedForward(g) if stage + 1 == cut => {
                if g.with_base {
                    one[0] = Some((cut, Payload::Hidden { m: g.m }));
                }
                if self.readout == Readout::Loss {
                    one[1] = Some((cut, Payload::Copies(g.without_base())));
                }
            }
            Action::PerturbedForward(g) if !last => one[0] = Some((stage + 1, Payload::Copies(g))),
            Action::ExitForward(g) if stage + 1 < cut => one[0] = Some((stage + 1, Payload::ExitCopies(g))),
            Action::Loss { m } if self.readout == Readout::Tail && self.tail() > 0 => {
                one[0] = Some((self.tail() - 1, Payload::Delta { m }));
            }
            Action::Backward { m } | Action::BackwardInput { m } if stage == cut && cut > 0 => match self.readout {
                Readout::Cut if self.estimates() => one[0] = Some((cut - 1, Payload::Delta { m })),
                Readout::Guide if self.guides() => to_all_heads = Some(m),
                _ => {}
            },
            Action::Backward { m } | Action::BackwardInput { m } if !self.is_first(stage) => {
                one[0] = Some((stage - 1, Payload::Delta { m }));
            }
            _ => {}
        }
        let broadcast = to_all_heads.into_iter().flat_map(move |m| (0..cut).map(move |s| (s, Payload::Delta { m })));
        one.into_iter().flatten().chain(broadcast)
    }

    /// Whether the first-order stage at the cut must compute the gradient of its input.
    pub fn needs_input_gradient(&self, stage: usize) -> bool {
        self.produces(stage, &self.backward(0)).next().is_some()
    }
}
