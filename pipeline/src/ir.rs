//! The schedule IR: per stage an ordered list of compute actions.
//!
//! A schedule says *what* each stage computes and in which order; which messages that needs and makes follows from [`Workload::consumes`] and
//! [`Workload::produces`], so an order cannot forget a send. The executor, and every pass over a schedule, uses those two functions and
//! nothing else: none of them knows a schedule's name.

use core::fmt;
use zofo_hal::op::{Copies, Form};

/// How a stage's adapters learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Exact gradients by backpropagation.
    FirstOrder,
    /// Estimated gradients from forward passes.
    ZerothOrder,
    /// Not at all.
    Frozen,
}

impl Role {
    /// The name shown to people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FirstOrder => "FO",
            Self::ZerothOrder => "ZO",
            Self::Frozen => "frozen",
        }
    }
}

/// Where the slope of the loss along a direction is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Readout {
    /// At the loss: perturbed activations run on through the first-order stages (HybridOP eq. 2).
    Loss,
    /// At the cut: the first first-order stage returns the gradient there.
    Cut,
    /// No slope: the gradient at the cut itself goes to every zeroth-order stage.
    Guide,
}

/// A group of directions that go through a stage in one action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// Micro-batch.
    pub m: u32,
    /// First direction.
    pub q0: u32,
    /// Number of directions.
    pub n: u32,
    /// Whether the action also serves as the base forward pass.
    pub with_base: bool,
    /// Whether the step goes along minus z (second half of a two-sided difference).
    pub minus: bool,
}

impl Group {
    /// The copies that the group's activations consist of; tangents always travel with their base.
    pub fn copies(&self, form: Form) -> Copies {
        Copies { count: self.n, has_base: self.with_base || form == Form::Tangent, form }
    }

    /// The same directions without the base.
    pub fn without_base(mut self) -> Self {
        self.with_base = false;
        self
    }
}

/// One step of a stage's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Action {
    /// Base forward pass of a micro-batch.
    Forward {
        /// Micro-batch.
        m: u32,
    },
    /// Losses of a micro-batch, on the last stage.
    Loss {
        /// Micro-batch.
        m: u32,
    },
    /// Backward pass of a micro-batch.
    Backward {
        /// Micro-batch.
        m: u32,
    },
    /// Forward pass of perturbed copies.
    PerturbedForward(Group),
    /// Forward pass of further perturbed copies that end at the exit head of the last zeroth-order stage.
    ExitForward(Group),
    /// Readout of a group's slopes at the cut.
    BoundaryDot(Group),
    /// Gradient factors from the gradient at the cut.
    Guide {
        /// Micro-batch.
        m: u32,
    },
    /// Optimiser step; last in every list.
    Update,
}

impl Action {
    /// The micro-batch, for all but [`Action::Update`].
    pub fn micro_batch(&self) -> Option<u32> {
        match *self {
            Self::Forward { m } | Self::Loss { m } | Self::Backward { m } | Self::Guide { m } => Some(m),
            Self::PerturbedForward(g) | Self::ExitForward(g) | Self::BoundaryDot(g) => Some(g.m),
            Self::Update => None,
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let group = |f: &mut fmt::Formatter<'_>, name: &str, g: &Group| {
            let base = if g.with_base { "+base" } else { "" };
            let sign = if g.minus { "-" } else { "" };
            write!(f, "{name}{}[{sign}{}..{}{base}]", g.m, g.q0, g.q0 + g.n)
        };
        match self {
            Self::Forward { m } => write!(f, "F{m}"),
            Self::Loss { m } => write!(f, "L{m}"),
            Self::Backward { m } => write!(f, "B{m}"),
            Self::Guide { m } => write!(f, "G{m}"),
            Self::PerturbedForward(g) => group(f, "P", g),
            Self::ExitForward(g) => group(f, "X", g),
            Self::BoundaryDot(g) => group(f, "D", g),
            Self::Update => f.write_str("U"),
        }
    }
}

/// What a message between stages carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Payload {
    /// Base activations of a micro-batch, downstream.
    Hidden {
        /// Micro-batch.
        m: u32,
    },
    /// Activations of a group of copies, downstream.
    Copies(Group),
    /// Activations of a group of copies on its way to the exit head.
    ExitCopies(Group),
    /// Gradient of the loss with respect to the activations between two stages, upstream.
    Delta {
        /// Micro-batch.
        m: u32,
    },
}

impl Payload {
    /// Which of a link's channels carries it.
    pub fn lane(&self) -> Lane {
        match self {
            Self::Hidden { .. } => Lane::Hidden,
            Self::Copies(_) | Self::ExitCopies(_) => Lane::Copies,
            Self::Delta { .. } => Lane::Delta,
        }
    }
}

/// The channels of a link; each has credits of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// Base activations.
    Hidden,
    /// Perturbed activations.
    Copies,
    /// Gradients.
    Delta,
}

impl Lane {
    /// All lanes.
    pub const ALL: [Self; 3] = [Self::Hidden, Self::Copies, Self::Delta];
}

/// What one optimiser step has to compute: everything the dataflow depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Role per stage, in pipeline order: zeroth-order or frozen stages first, then first-order ones.
    pub roles: Vec<Role>,
    /// Micro-batches per step.
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
        }
    }

    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.roles.len()
    }

    /// Index of the first first-order stage: the cut is in front of it.
    pub fn cut(&self) -> usize {
        self.roles.iter().take_while(|r| **r != Role::FirstOrder).count()
    }

    /// Whether slopes along random directions are estimated.
    pub fn estimates(&self) -> bool {
        self.directions > 0 && self.readout != Readout::Guide && self.roles.contains(&Role::ZerothOrder)
    }

    fn guides(&self) -> bool {
        self.readout == Readout::Guide && self.roles.contains(&Role::ZerothOrder)
    }

    fn groups_of(&self, directions: u32, m: u32, base: bool, minus: bool) -> impl Iterator<Item = Group> {
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
        let plus = self.groups_of(self.directions, m, true, false);
        let minus = self.groups_of(if self.two_sided { self.directions } else { 0 }, m, false, true);
        plus.chain(minus).collect()
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

    /// An upper bound of the actions of one stage.
    pub fn actions_per_stage(&self) -> u64 {
        let groups = |n: u32| u64::from(n.div_ceil(self.group.max(1)));
        let main = if self.estimates() { groups(self.directions) * if self.two_sided { 2 } else { 1 } } else { 0 };
        let exit = if self.estimates() { groups(self.exit_directions) } else { 0 };
        u64::from(self.micro_batches) * (3 + 2 * main + exit)
    }

    /// Everything `stage` must do, in no particular order.
    pub fn expected(&self, stage: usize) -> Vec<Action> {
        let (cut, last) = (self.cut(), self.stages() - 1);
        let mut all = Vec::new();
        for m in 0..self.micro_batches {
            let groups = self.groups(m);
            if stage < cut {
                match groups.is_empty() {
                    true => all.push(Action::Forward { m }),
                    false => all.extend(groups.iter().map(|g| Action::PerturbedForward(*g))),
                }
                all.extend(self.exit_groups(m).into_iter().map(Action::ExitForward));
                if stage + 1 == cut && self.readout == Readout::Cut {
                    all.extend(groups.iter().map(|g| Action::BoundaryDot(*g)));
                }
                if self.guides() {
                    all.push(Action::Guide { m });
                }
            } else {
                all.push(Action::Forward { m });
                if stage == last {
                    all.push(Action::Loss { m });
                }
                if self.readout == Readout::Loss {
                    all.extend(groups.iter().map(|g| Action::PerturbedForward(g.without_base())));
                }
                all.push(Action::Backward { m });
            }
        }
        all.push(Action::Update);
        all
    }

    /// Actions of the same stage that must come before `action`.
    pub fn requires(&self, stage: usize, action: &Action) -> Vec<Action> {
        let base = |m: u32| match self.groups_of(self.directions, m, true, false).next() {
            Some(g) if stage < self.cut() && self.estimates() => Action::PerturbedForward(g),
            _ => Action::Forward { m },
        };
        match *action {
            Action::Forward { .. } | Action::ExitForward(_) => Vec::new(),
            Action::PerturbedForward(g) if g.with_base || stage < self.cut() => Vec::new(),
            Action::PerturbedForward(g) => vec![Action::Forward { m: g.m }],
            Action::Loss { m } => vec![Action::Forward { m }],
            Action::Backward { m } if stage + 1 == self.stages() => vec![Action::Loss { m }],
            Action::Backward { m } => vec![Action::Forward { m }],
            Action::BoundaryDot(g) => vec![Action::PerturbedForward(g), base(g.m)],
            Action::Guide { m } => vec![base(m)],
            Action::Update => self.expected(stage).into_iter().filter(|a| *a != Action::Update).collect(),
        }
    }

    /// Messages that `action` needs: `(from, payload)`.
    pub fn consumes(&self, stage: usize, action: &Action) -> Vec<(usize, Payload)> {
        let upstream = |p: Payload| if stage == 0 { Vec::new() } else { vec![(stage - 1, p)] };
        match *action {
            Action::Forward { m } => upstream(Payload::Hidden { m }),
            Action::PerturbedForward(g) => upstream(Payload::Copies(g)),
            Action::ExitForward(g) => upstream(Payload::ExitCopies(g)),
            Action::Backward { m } if stage + 1 < self.stages() => vec![(stage + 1, Payload::Delta { m })],
            Action::BoundaryDot(Group { m, .. }) | Action::Guide { m } => vec![(self.cut(), Payload::Delta { m })],
            Action::Backward { .. } | Action::Loss { .. } | Action::Update => Vec::new(),
        }
    }

    /// Messages that `action` makes: `(to, payload)`.
    pub fn produces(&self, stage: usize, action: &Action) -> Vec<(usize, Payload)> {
        let (cut, last) = (self.cut(), self.stages() - 1);
        match *action {
            Action::Forward { m } if stage < last => vec![(stage + 1, Payload::Hidden { m })],
            Action::PerturbedForward(g) if stage + 1 < cut || (stage >= cut && stage < last) => vec![(stage + 1, Payload::Copies(g))],
            Action::PerturbedForward(g) if stage + 1 == cut => {
                let mut out = Vec::new();
                if g.with_base {
                    out.push((cut, Payload::Hidden { m: g.m }));
                }
                if self.readout == Readout::Loss {
                    out.push((cut, Payload::Copies(g.without_base())));
                }
                out
            }
            Action::ExitForward(g) if stage + 1 < cut => vec![(stage + 1, Payload::ExitCopies(g))],
            Action::Backward { m } if stage > cut => vec![(stage - 1, Payload::Delta { m })],
            Action::Backward { m } if stage == cut && cut > 0 => match self.readout {
                Readout::Cut if self.estimates() => vec![(cut - 1, Payload::Delta { m })],
                Readout::Guide if self.guides() => (0..cut).map(|s| (s, Payload::Delta { m })).collect(),
                _ => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    /// Whether the first-order stage at the cut must compute the gradient of its input.
    pub fn needs_input_gradient(&self, stage: usize) -> bool {
        !self.produces(stage, &Action::Backward { m: 0 }).is_empty()
    }
}

/// A complete order of work: one list per stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What is computed.
    pub workload: Workload,
    /// In which order, per stage.
    pub stages: Vec<Vec<Action>>,
    /// How far stages may run ahead of each other.
    pub credits: Credits,
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

    /// Capacity of a lane.
    pub fn lane(&self, lane: Lane) -> usize {
        match lane {
            Lane::Hidden => self.hidden,
            Lane::Copies => self.copies,
            Lane::Delta => self.delta,
        }
    }
}
