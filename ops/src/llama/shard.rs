//! One member's part of a model that a group of devices computes together, layer by layer: tensor parallelism (Shoeybi et al. 2019,
//! arXiv:1909.08053), with uneven shares (Choi et al. 2026, arXiv:2609.19909).
//!
//! | parameter | cut | adapter |
//! |---|---|---|
//! | q, k, v | output rows, by query head | rows of B; A whole |
//! | o | input columns, by query head | columns of A; B whole |
//! | gate, up | output rows | rows of B; A whole |
//! | down | input columns | columns of A; B whole |
//! | embedding, norms, head | whole on every member | - |
//!
//! What a member computes with a whole factor is its own part of a sum over the members, and so is that factor's gradient.

use alloc::{format, vec::Vec};
use core::ops::Range;

use zofo_hal::{
    Error, Result,
    perturb::{Factor, Projection, TensorId},
};

use super::{Cut, linear_name};
use crate::{
    config::ModelConfig,
    lora::{HostAdapter, HostLora},
};

/// Feed-forward columns that stay together: a block of the quantised types of 32, and whole vectors of every device.
const TILE: usize = 32;

/// The part of every layer that one member of a group has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// Its query heads.
    pub heads: Range<usize>,
    /// Its columns of the feed-forward network: outputs of gate and up, inputs of down.
    pub columns: Range<usize>,
}

impl Shard {
    /// Parts for members with these shares of the work, in member order: whole query heads, and columns in tiles of 32, or single ones
    /// where the width is no whole number of tiles or there are fewer tiles than members. Both by largest remainder, and every member has
    /// at least one.
    ///
    /// # Errors
    /// `InvalidArgument` where there is no member, a share is not positive and finite, or there are more members than heads or columns.
    pub fn split(config: &ModelConfig, shares: &[f64]) -> Result<Vec<Self>> {
        config.validate()?;
        let members = shares.len();
        if let Some(bad) = shares.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
            return Err(Error::invalid(format!("a member's share is {bad}; it must be positive and finite")));
        }
        if members == 0 {
            return Err(Error::invalid("a group has no members; give it at least one device"));
        }
        if members > config.heads || members > config.intermediate {
            return Err(Error::invalid(format!(
                "{members} devices cannot share a layer: the model has {} query heads and {} feed-forward columns, and each device takes at least \
                 one of both; take devices out of the group",
                config.heads, config.intermediate
            )));
        }
        let whole_tiles = config.intermediate.is_multiple_of(TILE) && config.intermediate / TILE >= members;
        let tile = if whole_tiles { TILE } else { 1 };
        let heads = apportion(config.heads, shares);
        let columns = apportion(config.intermediate / tile, shares);
        let (mut head, mut column) = (0, 0);
        let next = |at: &mut usize, n: usize| {
            let start = *at;
            *at += n;
            start..*at
        };
        let parts = heads.into_iter().zip(columns);
        Ok(parts.map(|(h, c)| Self { heads: next(&mut head, h), columns: next(&mut column, c * tile) }).collect())
    }

    /// That the model has such a part, and that its parts add up.
    ///
    /// # Errors
    /// `InvalidArgument` where it has not; `Unsupported` where o_proj or down_proj carries a bias, which the members' sum would hold once
    /// for each of them.
    pub fn check(&self, whole: &ModelConfig) -> Result<()> {
        whole.validate()?;
        for (what, range, limit) in [("query heads", &self.heads, whole.heads), ("columns", &self.columns, whole.intermediate)] {
            if range.is_empty() || range.end > limit {
                return Err(Error::invalid(format!("{what} {}..{} of the {limit} that the model has", range.start, range.end)));
            }
        }
        if let Some(p) = [Projection::O, Projection::Down].into_iter().find(|p| linear_name(*p).has_bias(whole)) {
            return Err(Error::unsupported(format!("{} has a bias, which is not built for layers that devices share", p.name())));
        }
        Ok(())
    }

    /// The member's own model, for a part that [`Shard::check`] accepts: its heads, the key and value heads that they read, its columns.
    ///
    /// Where its heads take unequal parts of the groups that share a key head, key and value heads are repeated, as seldom as makes the
    /// groups equal: 2 query heads of one group and 4 of the next read 1 and 2 copies.
    pub fn config(&self, whole: &ModelConfig) -> ModelConfig {
        ModelConfig { heads: self.heads.len(), kv_heads: self.kv_heads(whole).len(), intermediate: self.columns.len(), ..whole.clone() }
    }

    /// The key and value head of the whole model that each of the member's own is.
    fn kv_heads(&self, whole: &ModelConfig) -> Vec<usize> {
        let group = whole.heads / whole.kv_heads;
        let heads = self.heads.clone();
        let read: Vec<(usize, usize)> = (0..whole.kv_heads)
            .map(|kv| (kv, heads.end.min((kv + 1) * group).saturating_sub(heads.start.max(kv * group))))
            .filter(|(_, queries)| *queries > 0)
            .collect();
        let equal = read.iter().fold(0, |d, (_, queries)| gcd(d, *queries));
        read.into_iter().flat_map(|(kv, queries)| core::iter::repeat_n(kv, queries / equal)).collect()
    }

    /// Which outputs, or inputs, of a projection the member has.
    fn features(&self, whole: &ModelConfig, p: Projection) -> Vec<Range<usize>> {
        let width = whole.head_dim;
        match p {
            Projection::Q | Projection::O => alloc::vec![self.heads.start * width..self.heads.end * width],
            Projection::Gate | Projection::Up | Projection::Down => alloc::vec![self.columns.clone()],
            Projection::K | Projection::V => {
                let mut ranges: Vec<Range<usize>> = Vec::new();
                for kv in self.kv_heads(whole) {
                    match ranges.last_mut() {
                        Some(last) if last.end == kv * width => last.end += width,
                        _ => ranges.push(kv * width..(kv + 1) * width),
                    }
                }
                ranges
            }
        }
    }

    /// Which part of a projection's matrix `[out, in]` the member has. Of a bias it has the elements of its rows.
    pub fn weight(&self, whole: &ModelConfig, p: Projection) -> Cut {
        let (out, inp) = linear_name(p).shape(whole);
        match p {
            Projection::O | Projection::Down => Cut::cols(self.features(whole, p), inp),
            _ => Cut::rows(self.features(whole, p), out),
        }
    }

    /// Which part of an adapter's factor the member has.
    pub fn factor(&self, whole: &ModelConfig, p: Projection, factor: Factor) -> Cut {
        match (self.weight(whole, p), factor) {
            (cut @ Cut::Cols(_), Factor::A) | (cut @ Cut::Rows(_), Factor::B) => cut,
            _ => Cut::Whole,
        }
    }

    fn cut_and_shape(&self, whole: &ModelConfig, id: TensorId, rank: usize) -> (Cut, (usize, usize)) {
        let (out, inp) = linear_name(id.projection()).shape(whole);
        let shape = match id.factor() {
            Factor::A => (rank, inp),
            Factor::B => (out, rank),
        };
        (self.factor(whole, id.projection(), id.factor()), shape)
    }

    /// The member's part of a factor, both row-major.
    ///
    /// # Errors
    /// `InvalidArgument` where `values` is not the factor of a model of this configuration, or the model has no such part.
    pub fn take(&self, whole: &ModelConfig, id: TensorId, rank: usize, values: &[f32]) -> Result<Vec<f32>> {
        let (cut, shape) = self.cut_and_shape(whole, id, rank);
        cut.take(shape, values)
    }

    /// Adds the gradient of the member's part of a factor to that of the whole factor: after all members, in any case in the same order, it
    /// is the whole gradient. A key head that several members hold, or one holds several times, has its gradient from all of them.
    ///
    /// # Errors
    /// As [`Shard::take`].
    pub fn add(&self, whole: &ModelConfig, id: TensorId, rank: usize, local: &[f32], into: &mut [f32]) -> Result<()> {
        let (cut, shape) = self.cut_and_shape(whole, id, rank);
        cut.add(shape, local, into)
    }

    /// Writes the member's part of a factor to its places in the whole one.
    ///
    /// # Errors
    /// As [`Shard::take`].
    pub fn put(&self, whole: &ModelConfig, id: TensorId, rank: usize, local: &[f32], into: &mut [f32]) -> Result<()> {
        let (cut, shape) = self.cut_and_shape(whole, id, rank);
        cut.put(shape, local, into)
    }

    /// The member's part of an adapter.
    ///
    /// # Errors
    /// Those of [`Shard::check`] and [`HostAdapter::check`].
    pub fn adapter(&self, whole: &ModelConfig, host: &HostAdapter) -> Result<HostAdapter> {
        self.check(whole)?;
        host.check(whole)?;
        let mut local = HostAdapter::default();
        for (&(layer, p), m) in &host.modules {
            let part = |factor, values: &[f32]| self.take(whole, TensorId::new(layer as u32, p, factor)?, m.rank, values);
            let (a, b) = (part(Factor::A, &m.a)?, part(Factor::B, &m.b)?);
            local.modules.insert((layer, p), HostLora { rank: m.rank, scale: m.scale, a, b });
        }
        Ok(local)
    }

    /// Writes the member's part of an adapter to its places in the whole one: after all members it is whole.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the module that the whole adapter does not have in the same rank and scale, or where a factor has another
    /// shape.
    pub fn put_adapter(&self, whole: &ModelConfig, local: &HostAdapter, into: &mut HostAdapter) -> Result<()> {
        self.check(whole)?;
        for (&(layer, p), m) in &local.modules {
            let here = into.modules.get_mut(&(layer, p)).filter(|w| w.rank == m.rank && w.scale == m.scale);
            let Some(w) = here else {
                return Err(Error::invalid(format!(
                    "the whole adapter has no module of layer {layer}, {} in the same rank and scale",
                    p.name()
                )));
            };
            for (factor, values, into) in [(Factor::A, &m.a, &mut w.a), (Factor::B, &m.b, &mut w.b)] {
                self.put(whole, TensorId::new(layer as u32, p, factor)?, m.rank, values, into)?;
            }
        }
        Ok(())
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Hands out `total` by `shares`, which are positive, by largest remainder (Hamilton's method); everyone has at least one, which the member
/// that is furthest above its quota gives. Ties go to the member that comes first.
fn apportion(total: usize, shares: &[f64]) -> Vec<usize> {
    // Shares near the largest float would overflow the sum.
    let most = shares.iter().copied().fold(0.0, f64::max);
    let sum: f64 = shares.iter().map(|s| s / most).sum();
    let quotas: Vec<f64> = shares.iter().map(|s| total as f64 * (s / most) / sum).collect();
    let mut counts: Vec<usize> = quotas.iter().map(|q| *q as usize).collect();
    let left = total.saturating_sub(counts.iter().sum());
    let mut order: Vec<usize> = (0..shares.len()).collect();
    // The sort is stable.
    order.sort_by(|a, b| (quotas[*b] - counts[*b] as f64).total_cmp(&(quotas[*a] - counts[*a] as f64)));
    order.into_iter().cycle().take(left).for_each(|i| counts[i] += 1);
    while let Some(none) = counts.iter().position(|c| *c == 0) {
        let above = |i: &usize| counts[*i] as f64 - quotas[*i];
        let givers = (0..counts.len()).rev().filter(|i| counts[*i] > 1);
        let Some(giver) = givers.max_by(|a, b| above(a).total_cmp(&above(b))) else { break };
        counts[giver] -= 1;
        counts[none] += 1;
    }
    counts
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are what is meant")]
mod tests {
    use super::*;
    use crate::llama::MemoryModel;
    use alloc::{string::ToString, vec};

    fn config(heads: usize, kv_heads: usize, intermediate: usize) -> ModelConfig {
        ModelConfig { heads, kv_heads, intermediate, ..MemoryModel::tiny_config() }
    }

    #[test]
    fn heads_and_columns_follow_the_shares() {
        let parts = Shard::split(&config(9, 3, 1536), &[4.0, 2.0, 1.0]).unwrap();
        // Quotas 5.14, 2.57, 1.29 of 9 heads, and 27.4, 13.7, 6.9 of 48 tiles.
        assert_eq!(parts.iter().map(|p| p.heads.clone()).collect::<Vec<_>>(), [0..5, 5..8, 8..9]);
        assert_eq!(parts.iter().map(|p| p.columns.clone()).collect::<Vec<_>>(), [0..27 * 32, 27 * 32..41 * 32, 41 * 32..1536]);
    }

    #[test]
    fn nobody_is_left_without_work() {
        assert_eq!(apportion(4, &[1e300, 1e-300, 1e308, f64::MIN_POSITIVE]), [1, 1, 1, 1]);
        assert_eq!(apportion(7, &[100.0, 1.0, 1.0]), [5, 1, 1]);
        assert_eq!(apportion(3, &[1.0, 1.0]), [2, 1]);
    }

    #[test]
    fn key_heads_are_those_that_are_read_repeated_where_groups_are_unequal() {
        let whole = config(8, 2, 24);
        let kv = |heads: Range<usize>| Shard { heads, columns: 0..24 }.kv_heads(&whole);
        assert_eq!(kv(0..8), [0, 1]);
        assert_eq!(kv(0..4), [0]);
        assert_eq!(kv(5..7), [1]);
        assert_eq!(kv(2..6), [0, 1]);
        assert_eq!(kv(2..8), [0, 1, 1]);
        assert_eq!(kv(3..8), [0, 1, 1, 1, 1]);
        for heads in [0..8, 2..6, 2..8, 3..8, 1..4] {
            let shard = Shard { heads: heads.clone(), columns: 3..24 };
            let own = shard.config(&whole);
            assert!(own.validate().is_ok());
            let group = own.heads / own.kv_heads;
            for (i, h) in heads.enumerate() {
                assert_eq!(shard.kv_heads(&whole)[i / group], h / 4);
            }
        }
    }

    #[test]
    fn cuts_of_weights_and_factors() {
        let whole = config(4, 2, 24);
        let shard = Shard { heads: 1..4, columns: 8..24 };
        assert_eq!(shard.weight(&whole, Projection::Q), Cut::Rows(vec![4..16]));
        assert_eq!(shard.weight(&whole, Projection::V), Cut::Rows(vec![0..8, 4..8]));
        assert_eq!(shard.weight(&whole, Projection::O), Cut::Cols(vec![4..16]));
        assert_eq!(shard.weight(&whole, Projection::Down), Cut::Cols(vec![8..24]));
        assert_eq!(shard.factor(&whole, Projection::Down, Factor::A), Cut::Cols(vec![8..24]));
        assert_eq!(shard.factor(&whole, Projection::Down, Factor::B), Cut::Whole);
        assert_eq!(shard.factor(&whole, Projection::Up, Factor::A), Cut::Whole);
        assert_eq!(shard.factor(&whole, Projection::Up, Factor::B), Cut::Rows(vec![8..24]));
        let all = Shard { heads: 0..4, columns: 0..24 };
        assert!(Projection::ALL.iter().all(|p| all.weight(&whole, *p) == Cut::Whole));
    }

    #[test]
    fn groups_that_cannot_be_are_refused() {
        let whole = config(4, 2, 24);
        let text = |shares: &[f64]| Shard::split(&whole, shares).unwrap_err().to_string();
        assert!(text(&[1.0; 5]).contains("4 query heads"), "{}", text(&[1.0; 5]));
        assert!(text(&[]).contains("no members"));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(text(&[1.0, bad]).contains("must be positive"));
        }
        assert!(Shard::split(&config(4, 2, 2), &[1.0; 3]).is_err());
        for bad in [Shard { heads: 2..5, columns: 0..24 }, Shard { heads: 0..4, columns: 7..7 }] {
            assert!(bad.check(&whole).is_err());
        }
    }
}
