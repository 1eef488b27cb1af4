//! From what stages measured to the coefficients of an update.

use super::protocol::ReportKind;
use crate::{
    estimator::{EstimatorName, EstimatorSpec, Scope},
    ir::{Group, Role, Workload},
};
use std::collections::{BTreeMap, HashMap};
use zofo_hal::{
    Error, Result,
    perturb::{Direction, Domain},
};

/// Key of a readout: micro-batch, direction, side.
type ReadoutKey = (u32, u32, bool);

fn keys(group: &Group) -> impl Iterator<Item = ReadoutKey> + use<> {
    let g = *group;
    (g.q0..g.q0 + g.n).map(move |q| (g.m, q, g.minus))
}

/// What devices measured of the same thing, by their ranks: those of a group have a part of the rows each, in that order.
type ByRank<T> = BTreeMap<usize, T>;

/// Losses and dots of a step, as they come in.
#[derive(Default)]
pub(super) struct Readouts {
    base: BTreeMap<u32, ByRank<Vec<f32>>>,
    losses: HashMap<ReadoutKey, ByRank<Vec<f32>>>,
    dots: HashMap<ReadoutKey, ByRank<f32>>,
    exit: HashMap<ReadoutKey, ByRank<f64>>,
}

fn put<T>(parts: &mut ByRank<T>, rank: usize, part: T) {
    parts.insert(rank, part);
}

/// Sum of differences in f64: differencing row by row keeps what would cancel in a difference of sums.
fn difference<'a>(copy: impl IntoIterator<Item = &'a f32>, base: impl IntoIterator<Item = &'a f32>) -> f64 {
    copy.into_iter().zip(base).map(|(c, b)| f64::from(*c) - f64::from(*b)).sum()
}

impl Readouts {
    /// Takes what the device of that rank measured.
    pub fn take(&mut self, rank: usize, kind: ReportKind) {
        match kind {
            // One per labelled row; of copies one vector per copy.
            ReportKind::Losses { m, rows } => put(self.base.entry(m).or_default(), rank, rows),
            ReportKind::CopyLosses { group, rows } => {
                keys(&group).zip(rows).for_each(|(key, rows)| put(self.losses.entry(key).or_default(), rank, rows));
            }
            // Of the exit head's base, then of the copies.
            ReportKind::ExitLosses { group, rows } => {
                if let Some((base, copies)) = rows.split_first() {
                    keys(&group).zip(copies).for_each(|(key, copy)| put(self.exit.entry(key).or_default(), rank, difference(copy, base)));
                }
            }
            ReportKind::Dots { group, values } => {
                keys(&group).zip(values).for_each(|(key, value)| put(self.dots.entry(key).or_default(), rank, value));
            }
            _ => {}
        }
    }

    /// Mean loss.
    pub fn loss(&self, labels: usize) -> f64 {
        self.base.values().flat_map(BTreeMap::values).flatten().map(|l| f64::from(*l)).sum::<f64>() / labels as f64
    }

    fn measured(&self, key: ReadoutKey, readout_at_loss: bool, labels: usize) -> Result<f64> {
        let missing = || Error::execution(format!("direction {} of micro-batch {} was never read", key.1, key.0));
        if !readout_at_loss {
            return self.dots.get(&key).map(|parts| parts.values().map(|d| f64::from(*d)).sum()).ok_or_else(missing);
        }
        let (copy, base) = (self.losses.get(&key).ok_or_else(missing)?, self.base.get(&key.0).ok_or_else(missing)?);
        Ok(difference(copy.values().flatten(), base.values().flatten()) / labels as f64)
    }

    /// Direction words and coefficients in the order of the sum, and the slopes of the main directions.
    pub fn coefficients(
        &self,
        spec: &EstimatorSpec,
        w: &Workload,
        labels: usize,
        oracle: &[f64],
    ) -> Result<(Vec<u32>, Vec<f32>, Vec<f64>)> {
        let at_loss = w.readout == crate::ir::Readout::Loss;
        let mut slopes: Vec<(Domain, u32, u32, f64)> = Vec::new();
        if spec.name == EstimatorName::Oracle {
            slopes.extend((0u32..).zip(oracle).map(|(q, g)| (Domain::Main, 0, q, *g)));
        }
        for m in 0..w.micro_batches {
            if w.estimates() {
                for q in 0..w.directions {
                    let plus = self.measured((m, q, false), at_loss, labels)?;
                    let minus = w.two_sided.then(|| self.measured((m, q, true), at_loss, labels)).transpose()?;
                    slopes.push((Domain::Main, m, q, spec.slope(plus, minus)));
                }
            }
            for g in w.exit_groups(m) {
                for key in keys(&g) {
                    let parts = self.exit.get(&key).ok_or_else(|| Error::execution("an exit direction was never read"))?;
                    let sum: f64 = parts.values().sum();
                    slopes.push((Domain::Exit, m, key.1, spec.slope(sum / labels as f64, None)));
                }
            }
        }
        for domain in [Domain::Main, Domain::Exit] {
            let mut g: Vec<f64> = slopes.iter().filter(|s| s.0 == domain).map(|s| s.3).collect();
            spec.winsorise(&mut g);
            slopes.iter_mut().filter(|s| s.0 == domain).zip(g).for_each(|(s, g)| s.3 = g);
        }
        // In mini-batch scope all micro-batches share z, so their slopes add up to one coefficient.
        let mut terms: BTreeMap<(bool, u32, u32), f64> = BTreeMap::new();
        for (domain, m, q, g) in &slopes {
            let m = if spec.scope == Scope::MiniBatch { 0 } else { *m };
            *terms.entry((*domain == Domain::Exit, m, *q)).or_default() += g;
        }
        let (mut directions, mut coefficients) = (Vec::new(), Vec::new());
        for ((exit, m, q), g) in terms {
            let (domain, weight) = match exit {
                false => (Domain::Main, 1.0 / f64::from(spec.directions)),
                true => (Domain::Exit, f64::from(spec.exit_lambda) / f64::from(spec.exit_directions)),
            };
            directions.push(Direction::new(domain, m, q)?.word());
            coefficients.push((g * weight) as f32);
        }
        let main = slopes.iter().filter(|s| s.0 == Domain::Main).map(|s| s.3).collect();
        debug_assert!(directions.is_empty() || spec.name == EstimatorName::Oracle || w.roles.contains(&Role::ZerothOrder));
        Ok((directions, coefficients, main))
    }
}
