//! Row-wise forward ops.

use super::emit::{Emit, Rows, View, pieces};
use super::loss::PIECE_ELEMENTS;
use zofo_hal::{
    Matrix, Result,
    op::{BoundaryDot, Embedding, Form, MapFunction, Orientation, Reduction, RmsNorm, Spread, SwiGlu},
};

/// A weight is looked up by a product with one-hot rows, which is exact but needs [`zofo_hal::Uses::nn`] or `nt`: a table that was imported
/// for gathering alone serves only a device that has the op.
pub(super) fn embedding<E: Emit>(e: &mut E, op: &Embedding<E::T>) -> Result<()> {
    let (t, d) = op.out.size();
    let ids = e.live_indices(&op.ids, &op.live)?;
    let rows = match &op.table {
        Matrix::Tensor(table) => e.gather(table, &ids)?,
        Matrix::Weight(_) => {
            let (rows, entries) = (e.f32(t, d)?, op.table.shape()[0]);
            for (first, n) in pieces(t, PIECE_ELEMENTS / entries.max(1)) {
                let chosen = e.one_hot(&ids.cols_of(first, n), entries)?;
                e.product(Orientation::Nn, &chosen, op.table.clone(), &rows.rows_of(first, n), (1.0, 0.0), &None)?;
            }
            rows
        }
    };
    e.copy(&rows, &op.out, &Rows::live(&op.live))
}

/// `1 / sqrt(mean(h^2) + eps)` per row, `[rows, 1]`.
pub(super) fn inverse_rms<E: Emit>(e: &mut E, h: &E::T, eps: f32, rows: &Rows<E::T>) -> Result<E::T> {
    let r = e.row_dot(h, h, rows)?;
    e.map(MapFunction::Rsqrt, (1.0 / h.size().1.max(1) as f32, eps), &r, &r, rows)?;
    Ok(r)
}

pub(super) fn rms_norm<E: Emit>(e: &mut E, op: &RmsNorm<E::T>) -> Result<()> {
    let (total, d) = op.x.size();
    let blocks = op.copies.total();
    let t = total / blocks;
    let all = Rows::blocks(&op.live, blocks);
    let h = match (&op.sum, &op.residual) {
        (None, None) => op.x.clone(),
        (Some(sum), None) => {
            // Not a copy: `sum` may be `x`.
            e.scale(&op.x, 1.0, sum, &all)?;
            sum.clone()
        }
        (sum, Some(residual)) => {
            let h = sum.as_ref().map_or_else(|| e.f32_like(&op.x), |sum| Ok(sum.clone()))?;
            e.add(&op.x, residual, 1.0, &h, &all)?;
            h
        }
    };
    let normed = e.f32(total, d)?;
    if op.copies.form == Form::Value {
        let r = inverse_rms(e, &h, op.eps, &all)?;
        e.mul(&h, &r, &normed, &all)?;
    } else {
        let one = Rows::live(&op.live);
        let block = |x: &E::T, b: usize| x.rows_of(b * t, t);
        let base = block(&h, 0);
        let r = inverse_rms(e, &base, op.eps, &one)?;
        e.mul(&base, &r, &block(&normed, 0), &one)?;
        for b in 1..blocks {
            let correction = e.row_dot(&base, &block(&h, b), &one)?;
            norm_slope(e, [&base, &block(&h, b)], [&r, &correction], &block(&normed, b), &one)?;
        }
    }
    e.mul(&normed, &op.gamma, &op.out, &all)
}

/// `out = u r - h r^3 dot / d`, with r and `dot` per row; `dot` is overwritten.
pub(super) fn norm_slope<E: Emit>(e: &mut E, [h, u]: [&E::T; 2], [r, dot]: [&E::T; 2], out: &E::T, rows: &Rows<E::T>) -> Result<()> {
    for _ in 0..3 {
        e.mul(dot, r, dot, rows)?;
    }
    e.scale(dot, -1.0 / h.size().1.max(1) as f32, dot, rows)?;
    e.mul(u, r, out, rows)?;
    e.mul_add(h, dot, out, rows)
}

/// silu and its slope, f32.
pub(super) fn silu<E: Emit>(e: &mut E, x: &E::T, rows: &Rows<E::T>) -> Result<[E::T; 2]> {
    let [value, slope, rest] = [e.f32_like(x)?, e.f32_like(x)?, e.f32_like(x)?];
    e.map(MapFunction::Silu, (1.0, 0.0), x, &value, rows)?;
    // sigmoid(x) + silu(x) sigmoid(-x): 1 - sigmoid(x) would cancel.
    e.map(MapFunction::Sigmoid, (1.0, 0.0), x, &slope, rows)?;
    e.map(MapFunction::Sigmoid, (-1.0, 0.0), x, &rest, rows)?;
    e.mul_add(&value, &rest, &slope, rows)?;
    Ok([value, slope])
}

pub(super) fn swiglu<E: Emit>(e: &mut E, op: &SwiGlu<E::T>) -> Result<()> {
    if op.copies.form == Form::Value {
        let rows = Rows::blocks(&op.live, op.copies.total());
        let gate = e.f32_like(&op.gate)?;
        e.map(MapFunction::Silu, (1.0, 0.0), &op.gate, &gate, &rows)?;
        return e.mul(&gate, &op.up, &op.out, &rows);
    }
    let (t, rows) = (op.gate.size().0 / op.copies.total(), Rows::live(&op.live));
    let block = |x: &E::T, b: usize| x.rows_of(b * t, t);
    let (gate, up) = (block(&op.gate, 0), block(&op.up, 0));
    let [value, slope] = silu(e, &gate, &rows)?;
    e.mul(&slope, &up, &slope, &rows)?;
    e.mul(&value, &up, &block(&op.out, 0), &rows)?;
    for b in 1..op.copies.total() {
        // `out` may be `gate` or `up`, both of which are read here.
        let sum = e.f32_like(&gate)?;
        e.mul(&slope, &block(&op.gate, b), &sum, &rows)?;
        e.mul_add(&value, &block(&op.up, b), &sum, &rows)?;
        e.copy(&sum, &block(&op.out, b), &rows)?;
    }
    Ok(())
}

pub(super) fn spread<E: Emit>(e: &mut E, op: &Spread<E::T>) -> Result<()> {
    let (t, d) = op.src.size();
    let rows = Rows::live(&op.live);
    let zeros = if op.copies.form == Form::Tangent { Some(e.zeros(t, d)?) } else { None };
    for b in 0..op.copies.total() {
        let src = zeros.as_ref().filter(|_| b > 0).unwrap_or(&op.src);
        e.copy(src, &op.out.rows_of(b * t, t), &rows)?;
    }
    Ok(())
}

pub(super) fn boundary_dot<E: Emit>(e: &mut E, op: &BoundaryDot<E::T>) -> Result<()> {
    let (t, _) = op.delta.size();
    let rows = Rows::live(&op.live);
    for c in 0..op.out.size().1 {
        let mut h = op.h.rows_of(c * t, t);
        if let Some(base) = &op.base {
            // The difference first: h and base nearly cancel.
            let difference = e.f32_like(&h)?;
            e.add(&h, base, -1.0, &difference, &rows)?;
            h = difference;
        }
        let dots = e.row_dot(&op.delta, &h, &rows)?;
        let dots = e.clean(&dots, &rows)?.shaped(1, t);
        let total = e.reduce(Reduction::Sum, &dots, &Rows::all())?;
        e.copy(&total, &op.out.cols_of(c, 1), &Rows::all())?;
    }
    Ok(())
}
