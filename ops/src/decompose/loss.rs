//! The language-model head: losses, their gradient, scores.
//!
//! Labelled rows are taken a few at a time, so that logits need a bounded piece of memory; a weight cannot be cut by rows of the vocabulary.

use super::emit::{Emit, Rows, View, pieces};
use zofo_hal::{
    Matrix, Result,
    op::{CandidateScores, CrossEntropy, CrossEntropyBackward, Form, MapFunction, Orientation, Reduction},
};

/// Elements of logits (or one-hot rows) that are in memory at a time: 16 MiB of f32, or one row.
pub(super) const PIECE_ELEMENTS: usize = 1 << 22;

/// Logits of the rows of `h` at `index`, f32 `[n, V]`; 0 for padding.
fn logits<E: Emit>(e: &mut E, h: &E::T, index: &E::T, head: &Matrix<E::T>) -> Result<E::T> {
    let rows = e.gather(h, index)?;
    let out = e.f32(index.size().1, head.shape()[0])?;
    e.product(Orientation::Nt, &rows, head.clone(), &out, (1.0, 0.0), &None)?;
    Ok(out)
}

/// 1 for each label, 0 for padding, f32 `[n, 1]`; and the targets as one-hot rows, `[n, V]`. Targets of padding are not looked at.
fn labels<E: Emit>(e: &mut E, t: usize, rows: &E::T, targets: &E::T, vocabulary: usize) -> Result<[E::T; 2]> {
    let ones = e.f32(t, 1)?;
    e.fill(&ones, 1.0)?;
    let mask = e.gather(&ones, rows)?;
    let targets = e.masked_indices(targets, &mask)?;
    let one_hot = e.one_hot(&targets, vocabulary)?;
    Ok([mask, one_hot])
}

/// Replaces logits by their distance to the row's maximum. Returns the log of the sum of the distances' exponentials.
fn shift<E: Emit>(e: &mut E, logits: &E::T) -> Result<E::T> {
    let all = Rows::all();
    let max = e.reduce(Reduction::Max, logits, &all)?;
    e.add(logits, &max, -1.0, logits, &all)?;
    let exponentials = e.f32_like(logits)?;
    e.map(MapFunction::Exp, (1.0, 0.0), logits, &exponentials, &all)?;
    let sum = e.reduce(Reduction::Sum, &exponentials, &all)?;
    e.map(MapFunction::Ln, (1.0, 0.0), &sum, &sum, &all)?;
    Ok(sum)
}

/// `softmax - onehot` in place of logits, with the log of the sum of their exponentials.
fn slope<E: Emit>(e: &mut E, logits: &E::T, lse: &E::T, one_hot: &E::T) -> Result<()> {
    let all = Rows::all();
    e.add(logits, lse, -1.0, logits, &all)?;
    e.map(MapFunction::Exp, (1.0, 0.0), logits, logits, &all)?;
    e.add(logits, one_hot, -1.0, logits, &all)
}

pub(super) fn cross_entropy<E: Emit>(e: &mut E, op: &CrossEntropy<E::T>) -> Result<()> {
    let (blocks, vocabulary, all) = (op.copies.total(), op.head.shape()[0], Rows::all());
    let t = op.h.size().0 / blocks;
    let tangents = if op.copies.form == Form::Tangent { op.copies.count as usize } else { 0 };
    for (first, n) in pieces(op.rows.size().1, PIECE_ELEMENTS / vocabulary.max(1)) {
        let rows = op.rows.cols_of(first, n);
        let [mask, one_hot] = labels(e, t, &rows, &op.targets.cols_of(first, n), vocabulary)?;
        let block = |b: usize| op.h.rows_of(b * t, t);
        // A piece of one row of the output, as a column.
        let piece = |out: &E::T, row: usize| out.rows_of(row, 1).cols_of(first, n).shaped(n, 1);
        for b in 0..blocks - tangents {
            let logits = logits(e, &block(b), &rows, &op.head)?;
            let sum = shift(e, &logits)?;
            let loss = e.row_dot(&one_hot, &logits, &all)?;
            e.add(&sum, &loss, -1.0, &loss, &all)?;
            e.mul(&loss, &mask, &piece(&op.losses, b), &all)?;
            if tangents > 0 || op.slope.is_some() {
                slope(e, &logits, &sum, &one_hot)?;
            }
            if let Some(out) = &op.slope {
                let out = out.rows_of(first, n);
                e.product(Orientation::Nn, &logits, op.head.clone(), &out, (1.0, 0.0), &None)?;
                e.mul(&out, &mask, &out, &all)?;
            }
            for b in 1..=tangents {
                let tangent = self::logits(e, &block(b), &rows, &op.head)?;
                let loss = e.row_dot(&logits, &tangent, &all)?;
                e.mul(&loss, &mask, &piece(&op.losses, b), &all)?;
            }
        }
    }
    Ok(())
}

pub(super) fn cross_entropy_backward<E: Emit>(e: &mut E, op: &CrossEntropyBackward<E::T>) -> Result<()> {
    let ((n, d), all) = (op.slope.size(), Rows::all());
    e.fill(&op.dh, 0.0)?;
    let (scale, rounded) = (e.f32(n, 1)?, e.temp(op.dh.dtype(), n, d)?);
    e.fill(&scale, 1.0)?;
    e.mul(&scale, &op.scale, &scale, &all)?;
    // Scattering skips rows of padding.
    e.mul(&op.slope, &scale, &rounded, &all)?;
    e.scatter(&rounded, &op.rows, &op.dh)
}

pub(super) fn candidate_scores<E: Emit>(e: &mut E, op: &CandidateScores<E::T>) -> Result<()> {
    if let Matrix::Tensor(head) = &op.head {
        let (h, candidates) = (e.gather(&op.h, &op.rows)?, e.gather(head, &op.candidates)?);
        return e.product(Orientation::Nt, &h, candidates.matrix(), &op.out, (1.0, 0.0), &None);
    }
    let vocabulary = op.head.shape()[0];
    let chosen = e.one_hot(&op.candidates, vocabulary)?;
    for (first, n) in pieces(op.rows.size().1, PIECE_ELEMENTS / vocabulary.max(1)) {
        let logits = logits(e, &op.h, &op.rows.cols_of(first, n), &op.head)?;
        e.product(Orientation::Nt, &logits, chosen.matrix(), &op.out.rows_of(first, n), (1.0, 0.0), &None)?;
    }
    Ok(())
}
