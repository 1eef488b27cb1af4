//! After AccPar (Song et al. 2020, HPCA): every layer shared by batch or by tensor, in shares that balance the devices.

use super::{Layout, Member, Problem, Proposal, Split, StageLayout, pipelines, ranked::first_fit, shares};
use crate::{ir::Role, order::ScheduleName};
use std::ops::Range;
use zofo_hal::Result;

/// How a layer is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// Type-I: each has the whole layer and a part of the batch.
    Batch,
    /// A Type-III product into a Type-II one: heads and feed-forward columns, inputs and outputs whole on each.
    Tensor,
}

const TYPES: [Type; 2] = [Type::Batch, Type::Tensor];

/// Seconds of a step that do not depend on the shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerComm {
    /// Of the all-reduce that a batch-shared layer needs for its gradients.
    pub batch: f64,
    /// Of the all-reduces that a tensor-shared layer needs for its activations and their gradients.
    pub tensor: f64,
    /// Of making its output whole (or its gradient) where the layer behind is shared in the other way.
    pub convert: f64,
}

/// Types that cost least together (the dynamic programme over layers): `c(l + 1, t) = min over t' of c(l, t') + own(t) + convert(t' -> t)`.
/// Of equal ones batch. Computing is left out: its time is that of the shares whichever the type.
pub fn types(layers: &[LayerComm]) -> Vec<Type> {
    let own = |l: &LayerComm| [l.batch, l.tensor];
    let mut costs = layers.first().map_or([0.0; 2], own);
    let mut from: Vec<[usize; 2]> = Vec::new();
    for pair in layers.windows(2) {
        let reach = |t: usize| {
            let by = |before: usize| costs[before] + if before == t { 0.0 } else { pair[0].convert };
            let before = if by(t) <= by(1 - t) { t } else { 1 - t };
            (before, by(before) + own(&pair[1])[t])
        };
        let found = [reach(0), reach(1)];
        from.push(found.map(|f| f.0));
        costs = found.map(|f| f.1);
    }
    let mut t = usize::from(costs[1] < costs[0]);
    let mut all = vec![TYPES[t]];
    for before in from.iter().rev() {
        t = before[t];
        all.push(TYPES[t]);
    }
    all.reverse();
    all.truncate(layers.len());
    all
}

/// The tree of bi-partitions: a group of devices halved until each is alone.
struct Balance<'a> {
    /// Seconds of everything on each device alone.
    times: &'a [f64],
    /// The largest share that each device holds.
    caps: &'a [f64],
}

impl Balance<'_> {
    fn speed(&self, group: &Range<usize>) -> f64 {
        shares::inverse(self.times)[group.clone()].iter().sum()
    }

    /// Divides `amount` between the halves of `group` so that both take as long, `alpha T_1 = (1 - alpha) T_2`, as far as memory lets them,
    /// and so on within each.
    fn divide(&self, group: Range<usize>, amount: f64, into: &mut [f64]) {
        if group.len() == 1 {
            into[group.start] = amount;
            return;
        }
        let middle = group.start + group.len() / 2;
        let (a, b) = (group.start..middle, middle..group.end);
        let most = |half: &Range<usize>| self.caps[half.clone()].iter().sum::<f64>();
        let alpha = self.speed(&a) / (self.speed(&a) + self.speed(&b));
        let first = (alpha * amount).max(amount - most(&b)).min(most(&a)).clamp(0.0, amount);
        self.divide(a, first, into);
        self.divide(b, amount - first, into);
    }
}

struct Search<'a> {
    p: &'a Problem,
    devices: &'a [usize],
    times: Vec<f64>,
}

impl Search<'_> {
    fn stage(&self, members: Vec<Member>, types: &[Type]) -> StageLayout {
        let mut stage = StageLayout::group(members, 0..self.p.layers(), Split::Tensor, Role::FirstOrder);
        stage.batch_layers = (0..types.len()).filter(|l| types[*l] == Type::Batch).collect();
        stage
    }

    fn members(&self, shares: &[f64]) -> Vec<Member> {
        self.devices.iter().zip(shares).filter(|(_, s)| **s > 0.0).map(|(d, s)| Member { device: *d, share: *s }).collect()
    }

    fn comm(&self, shares: &[f64]) -> Vec<LayerComm> {
        let (group, m) = (self.stage(self.members(shares), &[]), f64::from(self.p.micro_batches()));
        let first: f64 = shares[..shares.len() / 2].iter().sum();
        let of = |l: usize| {
            let (layer, link) = (l..l + 1, group.inner_link(self.p));
            let bytes = self.p.boundary_bytes(&layer);
            LayerComm {
                batch: group.all_reduce(self.p, self.p.gradient_bytes(&layer)),
                tensor: 4.0 * m * group.all_reduce(self.p, bytes),
                // Each half of the root lacks what the other has.
                convert: m * link.transfer(first.max(1.0 - first) * bytes),
            }
        };
        (0..self.p.layers()).map(of).collect()
    }

    /// The largest share of each device beside the whole of batch-shared layers.
    fn caps(&self, types: &[Type]) -> Vec<f64> {
        let all = 0..self.p.layers();
        let batch = |l: usize| if types[l] == Type::Batch { self.p.state_bytes(&(l..l + 1)) } else { 0.0 };
        let whole: f64 = all.clone().map(batch).sum();
        let shared = self.p.state_bytes(&all) - whole + self.p.activation_bytes(&all);
        let cap = |d: &usize| match self.p.device(*d).memory_bytes {
            Some(limit) if limit < whole => 0.0,
            // A little less than fits, for what rounding makes of the product.
            Some(limit) if shared > 0.0 => ((limit - whole) / shared * (1.0 - 1e-9)).min(1.0),
            _ => 1.0,
        };
        let mut caps: Vec<f64> = self.devices.iter().map(cap).collect();
        if types.contains(&Type::Tensor) {
            // A layer has so many heads, and every device of a tensor-shared one takes at least one: the slowest take none.
            let mut order: Vec<usize> = (0..caps.len()).filter(|i| caps[*i] > 0.0).collect();
            order.sort_by(|a, b| self.times[*a].total_cmp(&self.times[*b]));
            order.into_iter().skip(self.p.costs().tensor_units as usize).for_each(|i| caps[i] = 0.0);
        }
        caps
    }

    fn shares(&self, caps: &[f64]) -> Vec<f64> {
        let mut shares = vec![0.0; self.devices.len()];
        Balance { times: &self.times, caps }.divide(0..self.devices.len(), 1.0, &mut shares);
        shares
    }

    fn run(&self) -> StageLayout {
        let unlimited = vec![1.0; self.devices.len()];
        let comm = self.comm(&self.shares(&unlimited));
        let mut types = types(&comm);
        loop {
            let caps = self.caps(&types);
            if caps.iter().sum::<f64>() >= 1.0 {
                return self.stage(self.members(&self.shares(&caps)), &types);
            }
            // Batch-shared layers are whole on every device: the one whose bytes cost least to share goes first.
            let price = |l: &usize| (comm[*l].tensor - comm[*l].batch) / self.p.state_bytes(&(*l..*l + 1)).max(f64::MIN_POSITIVE);
            let batch = (0..types.len()).filter(|l| types[*l] == Type::Batch);
            match batch.min_by(|a, b| price(a).total_cmp(&price(b))) {
                Some(l) => types[l] = Type::Tensor,
                // Nothing fits: the simulation of balanced shares says which device is short and by how much.
                None => return self.stage(self.members(&self.shares(&unlimited)), &types),
            }
        }
    }
}

pub(super) fn propose(p: &Problem) -> Result<Proposal> {
    let (devices, mut notes) = pipelines::capable(p)?;
    notes.push("after AccPar, whose paper was not at hand: see docs/planners.md".into());
    let times = devices.iter().map(|d| p.both(*d, &(0..p.layers()))).collect();
    let stage = Search { p, devices: &devices, times }.run();
    notes.push(match stage.batch_layers.len() {
        0 => "all layers shared by tensor".into(),
        n if n == p.layers() => "all layers shared by batch".into(),
        n => format!("{n} of {} layers shared by batch, the others by tensor", p.layers()),
    });
    first_fit(p, [Layout::line(vec![stage])], ScheduleName::Single, notes)
}
