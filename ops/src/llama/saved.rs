//! The explicit activation list of first-order training: what the backward pass of a slice needs, planned before the forward pass.
//!
//! Per layer and row, with d hidden, f intermediate, q and k the widths of all query and key heads, h heads, and c bytes of the compute type:
//!
//! | kept | bytes | where |
//! |---|---|---|
//! | residual stream before each norm | 4 d twice | gradients go on below the norm |
//! | output of each norm | c d twice | an adapter that reads it is trained |
//! | q and k after rotation, v | c (q + 2 k) | gradients go through the attention |
//! | log-sum-exp | 4 h | the same |
//! | attention output | c q | the same, or o_proj is trained |
//! | gate, up | 2 c f | gradients go through the SwiGlu |
//! | its output | c f | down_proj is trained |
//! | `x A^T` | 4 r each | the adapter is trained |
//!
//! Gradients go down to the lowest trained adapter, or to the slice's input where that is asked for; nothing is kept below.
//!
//! A slice that recomputes ([`SliceSpec::recompute`]) keeps the first line's first stream of every layer alone, 4 d bytes per row, and the
//! backward pass makes the rest of the list from it, layer by layer (Chen et al. 2016).

use alloc::vec::Vec;

use zofo_hal::{DType, TensorArg, perturb::Projection};

use super::{pass::Act, slice::SliceSpec};
use crate::{
    config::ModelConfig,
    lora::{Adapters, LoraSpec, Targets},
};

/// A group of projections that read the same input; the backward pass goes through them from the last layer's last group upwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    Qkv = 0,
    O = 1,
    GateUp = 2,
    Down = 3,
}

impl Group {
    const ALL: [Self; 4] = [Self::Qkv, Self::O, Self::GateUp, Self::Down];

    pub fn projections(self) -> &'static [Projection] {
        use Projection::{Down, Gate, K, O, Q, Up, V};
        match self {
            Self::Qkv => &[Q, K, V],
            Self::O => &[O],
            Self::GateUp => &[Gate, Up],
            Self::Down => &[Down],
        }
    }

    fn of(p: Projection) -> Self {
        match p {
            Projection::Q | Projection::K | Projection::V => Self::Qkv,
            Projection::O => Self::O,
            Projection::Gate | Projection::Up => Self::GateUp,
            Projection::Down => Self::Down,
        }
    }

    fn any(self, trained: Targets) -> bool {
        self.projections().iter().any(|p| trained.contains(*p))
    }
}

/// How far down gradients go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// The lowest group that is trained.
    floor: Option<(usize, usize)>,
    pub input_grad: bool,
}

impl Plan {
    pub fn new(layers: impl IntoIterator<Item = (usize, Targets)>, input_grad: bool) -> Self {
        let trained = layers.into_iter().flat_map(|(l, t)| Group::ALL.into_iter().filter(move |g| g.any(t)).map(move |g| (l, g as usize)));
        Self { floor: trained.min(), input_grad }
    }

    /// Whether the gradient reaches a group's outputs.
    pub fn reaches(&self, layer: usize, group: Group) -> bool {
        self.input_grad || self.floor.is_some_and(|floor| (layer, group as usize) >= floor)
    }

    /// Whether it goes on through the group to its input.
    pub fn passes(&self, layer: usize, group: Group) -> bool {
        self.input_grad || self.floor.is_some_and(|floor| (layer, group as usize) > floor)
    }
}

/// An activation of a layer that may be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    Stream1,
    Norm1,
    Q,
    K,
    V,
    O,
    Lse,
    Stream2,
    Norm2,
    Gate,
    Up,
    Act,
}

impl Kept {
    const ALL: [Self; 12] = [
        Self::Stream1,
        Self::Norm1,
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Lse,
        Self::Stream2,
        Self::Norm2,
        Self::Gate,
        Self::Up,
        Self::Act,
    ];

    fn wanted(self, plan: &Plan, layer: usize, trained: Targets) -> bool {
        let reads = |g: Group| plan.reaches(layer, g) && g.any(trained);
        let passes = |g: Group| plan.passes(layer, g);
        match self {
            Self::Stream1 => passes(Group::Qkv),
            Self::Norm1 => reads(Group::Qkv),
            Self::Q | Self::K | Self::V | Self::Lse => passes(Group::O),
            Self::O => passes(Group::O) || reads(Group::O),
            Self::Stream2 => passes(Group::GateUp),
            Self::Norm2 => reads(Group::GateUp),
            Self::Gate | Self::Up => passes(Group::Down),
            Self::Act => reads(Group::Down),
        }
    }

    fn row_bytes(self, config: &ModelConfig, compute: DType) -> usize {
        let c = compute.block().1;
        match self {
            Self::Stream1 | Self::Stream2 => 4 * config.hidden,
            Self::Norm1 | Self::Norm2 => c * config.hidden,
            Self::Q | Self::O => c * config.q_width(),
            Self::K | Self::V => c * config.kv_width(),
            Self::Lse => 4 * config.heads,
            Self::Gate | Self::Up | Self::Act => c * config.intermediate,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Slot {
    wanted: bool,
    tensor: Option<TensorArg>,
}

/// What is kept of one layer.
#[derive(Clone, Debug, Default)]
pub(super) struct LayerSaved {
    kept: [Slot; Kept::ALL.len()],
    ranks: [Slot; Projection::ALL.len()],
}

impl LayerSaved {
    pub fn new(plan: &Plan, layer: usize, trained: Targets) -> Self {
        let slot = |wanted| Slot { wanted, tensor: None };
        Self {
            kept: Kept::ALL.map(|k| slot(k.wanted(plan, layer, trained))),
            ranks: Projection::ALL.map(|p| slot(trained.contains(p) && plan.reaches(layer, Group::of(p)))),
        }
    }

    /// The input alone, of a layer that gradients reach.
    fn input(plan: &Plan, layer: usize) -> Self {
        let mut saved = Self::default();
        saved.kept[Kept::Stream1 as usize].wanted = plan.reaches(layer, Group::Down);
        saved
    }

    /// What the forward pass keeps of a layer.
    pub fn of_forward(spec: &SliceSpec, plan: &Plan, layer: usize, trained: Targets) -> Self {
        if spec.recompute { Self::input(plan, layer) } else { Self::new(plan, layer, trained) }
    }

    pub fn wants(&self, kept: Kept) -> bool {
        self.kept[kept as usize].wanted
    }

    pub fn wants_rank(&self, p: Projection) -> bool {
        self.ranks[p as usize].wanted
    }

    pub fn put(&mut self, kept: Kept, act: &Act) {
        let slot = &mut self.kept[kept as usize];
        if slot.wanted {
            slot.tensor = Some(act.tensor.clone());
        }
    }

    pub fn put_rank(&mut self, p: Projection, xa: Option<TensorArg>) {
        self.ranks[p as usize].tensor = xa;
    }

    pub fn get(&self, kept: Kept) -> Option<TensorArg> {
        self.kept[kept as usize].tensor.clone()
    }

    pub fn rank(&self, p: Projection) -> Option<TensorArg> {
        self.ranks[p as usize].tensor.clone()
    }
}

/// What the backward pass of a slice needs.
#[derive(Debug)]
pub struct Saved {
    pub(super) plan: Plan,
    pub(super) layers: Vec<LayerSaved>,
}

impl Saved {
    /// Bytes that a forward pass over `rows` rows (the bucket, not the rows that count) keeps, before any device's rounding. The slice's own
    /// input is counted where it is kept; what a backward pass that recomputes makes in between is not.
    pub fn bytes(config: &ModelConfig, spec: &SliceSpec, lora: &LoraSpec, rows: usize, input_grad: bool) -> usize {
        let plan = Plan::new(spec.layers.clone().map(|l| (l, lora.targets)), input_grad);
        let layer = |l: usize| {
            let saved = LayerSaved::of_forward(spec, &plan, l, lora.targets);
            let kept = Kept::ALL.into_iter().filter(|k| saved.wants(*k)).map(|k| k.row_bytes(config, spec.compute));
            let ranks = Projection::ALL.into_iter().filter(|p| saved.wants_rank(*p)).map(|_| 4 * lora.rank);
            kept.chain(ranks).sum::<usize>()
        };
        rows * spec.layers.clone().map(layer).sum::<usize>()
    }

    /// Bytes that are really kept.
    pub fn held_bytes(&self) -> usize {
        let slots = self.layers.iter().flat_map(|l| l.kept.iter().chain(&l.ranks));
        slots.filter_map(|s| s.tensor.as_ref()).map(|t| t.spec.span_bytes()).sum()
    }
}

impl Adapters {
    /// The projections of a layer whose factors both have gradients.
    pub(crate) fn trained(&self, layer: usize) -> Targets {
        let with_grads = |p: &Projection| self.get(layer, *p).is_some_and(|m| m.da.is_some() && m.db.is_some());
        Projection::ALL.into_iter().filter(with_grads).collect()
    }
}
