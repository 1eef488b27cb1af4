//! What stages do and what travels between them.

use core::{fmt, str::FromStr};
use zofo_hal::{
    Error, Result,
    op::{Copies, Form},
};

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
    /// At the loss, with the zeroth-order stages *behind* the first-order ones, which then wait for all perturbed passes of a micro-batch
    /// (HybridOP's tail placement). A model of latency alone: no stage behind the cut can return a gradient to it, so this cannot train.
    Tail,
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
    /// The part of a backward pass that stages upstream wait for: gradients of the activations.
    BackwardInput {
        /// Micro-batch.
        m: u32,
    },
    /// The part of a backward pass that nobody waits for: gradients of the parameters (zero-bubble schedules).
    BackwardWeight {
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
            Self::Forward { m }
            | Self::Loss { m }
            | Self::Backward { m }
            | Self::BackwardInput { m }
            | Self::BackwardWeight { m }
            | Self::Guide { m } => Some(m),
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
            Self::BackwardInput { m } => write!(f, "I{m}"),
            Self::BackwardWeight { m } => write!(f, "W{m}"),
            Self::Guide { m } => write!(f, "G{m}"),
            Self::PerturbedForward(g) => group(f, "P", g),
            Self::ExitForward(g) => group(f, "X", g),
            Self::BoundaryDot(g) => group(f, "D", g),
            Self::Update => f.write_str("U"),
        }
    }
}

impl FromStr for Action {
    type Err = Error;

    /// Reads what [`Action`] is displayed as: `F0`, `B3`, `P1[0..8+base]`, `P1[-8..12]`, `U`.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::format(format!("`{}` is no action; one looks like F0, B3, P1[0..8+base] or U", text.escape_debug()));
        let mut chars = text.chars();
        let kind = chars.next().ok_or_else(wrong)?;
        let rest = chars.as_str();
        if kind == 'U' && rest.is_empty() {
            return Ok(Self::Update);
        }
        let number = |t: &str| t.parse::<u32>().ok().filter(|n| n.to_string() == t).ok_or_else(wrong);
        let group = || -> Result<Group> {
            let (m, list) = rest.strip_suffix(']').and_then(|r| r.split_once('[')).ok_or_else(wrong)?;
            let (list, with_base) = list.strip_suffix("+base").map_or((list, false), |l| (l, true));
            let (list, minus) = list.strip_prefix('-').map_or((list, false), |l| (l, true));
            let (from, to) = list.split_once("..").ok_or_else(wrong)?;
            let (m, q0, to) = (number(m)?, number(from)?, number(to)?);
            let n = to.checked_sub(q0).filter(|n| *n > 0).ok_or_else(wrong)?;
            Ok(Group { m, q0, n, with_base, minus })
        };
        Ok(match kind {
            'F' => Self::Forward { m: number(rest)? },
            'L' => Self::Loss { m: number(rest)? },
            'B' => Self::Backward { m: number(rest)? },
            'I' => Self::BackwardInput { m: number(rest)? },
            'W' => Self::BackwardWeight { m: number(rest)? },
            'G' => Self::Guide { m: number(rest)? },
            'P' => Self::PerturbedForward(group()?),
            'X' => Self::ExitForward(group()?),
            'D' => Self::BoundaryDot(group()?),
            _ => return Err(wrong()),
        })
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
    /// The micro-batch that it is of.
    pub fn micro_batch(&self) -> u32 {
        match self {
            Self::Hidden { m } | Self::Delta { m } => *m,
            Self::Copies(g) | Self::ExitCopies(g) => g.m,
        }
    }

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

    /// Position in [`Lane::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}
