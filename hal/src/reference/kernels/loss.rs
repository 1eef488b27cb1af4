//! The fused language-model head.

use super::matmul::{add_scaled, dot};
use crate::op::{ArgMax, CandidateScores, CrossEntropy, CrossEntropyBackward};
use crate::reference::operand::{Live, Mat, Memory, below, distinct_or_none, load, load_matrix, store, store_words, words};
use crate::{Result, TensorArg};
use alloc::vec::Vec;

/// The labelled rows: place in the list, row of a block, target.
fn labels(mem: &dyn Memory, rows: &TensorArg, targets: &TensorArg, t: usize, v: usize) -> Result<Vec<(usize, usize, usize)>> {
    let (rows, targets) = (distinct_or_none("rows", &words(mem, rows)?, t)?, words(mem, targets)?);
    let labelled = rows.iter().zip(&targets).enumerate().filter_map(|(i, (r, target))| r.map(|r| (i, r, *target)));
    labelled.map(|(i, r, target)| Ok((i, r, below("targets", i, target, v)?))).collect()
}

fn logits(h: &[f64], head: &Mat) -> Vec<f64> {
    (0..head.rows).map(|v| dot(h, head.row(v))).collect()
}

/// ln sum e^x
fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().fold(f64::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
    max + libm::log(x.iter().map(|x| libm::exp(x - max)).sum())
}

pub(super) fn cross_entropy(op: &CrossEntropy<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let blocks = op.copies.total();
    let t = op.h.spec.rows / blocks;
    let (h, head) = (load(mem, &op.h)?, load_matrix(mem, &op.head)?);
    let mut losses = Mat::zeros(blocks, op.rows.spec.cols);
    let mut slope = Mat::zeros(op.rows.spec.cols, head.cols);
    for (i, r, target) in labels(mem, &op.rows, &op.targets, t, head.rows)? {
        let base = logits(h.row(r), &head);
        let base_lse = log_sum_exp(&base);
        let p = |v: usize| libm::exp(base[v] - base_lse);
        for b in 0..blocks {
            losses.row_mut(b)[i] = if op.copies.is_tangent(b) {
                let slope = logits(h.row(b * t + r), &head);
                let mean: f64 = slope.iter().enumerate().map(|(v, d)| p(v) * d).sum();
                mean - slope[target]
            } else {
                let own = logits(h.row(b * t + r), &head);
                log_sum_exp(&own) - own[target]
            };
        }
        if op.slope.is_some() {
            (0..head.rows).for_each(|v| add_scaled(slope.row_mut(i), p(v) - f64::from(u8::from(v == target)), head.row(v)));
        }
    }
    store(mem, &op.losses, &losses, Live::ALL)?;
    op.slope.as_ref().map_or(Ok(()), |s| store(mem, s, &slope, Live::ALL))
}

pub(super) fn cross_entropy_backward(op: &CrossEntropyBackward<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [t, d] = op.dh.spec.shape();
    let (slope, scale) = (load(mem, &op.slope)?, load(mem, &op.scale)?.data[0]);
    let mut dh = Mat::zeros(t, d);
    for (i, r) in distinct_or_none("rows", &words(mem, &op.rows)?, t)?.into_iter().enumerate() {
        if let Some(r) = r {
            add_scaled(dh.row_mut(r), scale, slope.row(i));
        }
    }
    store(mem, &op.dh, &dh, Live::ALL)
}

pub(super) fn candidate_scores(op: &CandidateScores<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [r, k] = op.out.spec.shape();
    let (h, head) = (load(mem, &op.h)?, load_matrix(mem, &op.head)?);
    let (rows, candidates) = (words(mem, &op.rows)?, words(mem, &op.candidates)?);
    let mut out = Mat::zeros(r, k);
    for (i, row) in rows.iter().enumerate() {
        let row = below("rows", i, *row, h.rows)?;
        for (j, candidate) in candidates.iter().enumerate() {
            let candidate = below("candidates", j, *candidate, head.rows)?;
            out.row_mut(i)[j] = dot(h.row(row), head.row(candidate));
        }
    }
    store(mem, &op.out, &out, Live::ALL)
}

pub(super) fn argmax(op: &ArgMax<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let x = load(mem, &op.x)?;
    let best = |row: &[f64]| {
        let mut best = 0;
        for (i, x) in row.iter().enumerate() {
            if row[best].is_nan() {
                break;
            }
            if x.is_nan() || *x > row[best] {
                best = i;
            }
        }
        best as u32
    };
    let out: Vec<u32> = (0..x.rows).map(|r| best(x.row(r))).collect();
    store_words(mem, &op.out, &out)
}
