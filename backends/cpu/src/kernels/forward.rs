//! Row-wise forward ops.

use super::{CHUNK, Context, Grid};
use crate::{
    convert,
    isa::tiered,
    math,
    scratch::{Carver, Slabs},
    view::{Mat, Rows, check_indices},
    weight::{CpuWeight, WeightView},
};
use core::ops::Range;
use zofo_hal::{
    Matrix, Operand, Result, TensorArg,
    op::{BoundaryDot, Copies, Embedding, RmsNorm, Spread, SwiGlu},
};

pub(super) fn embedding_scratch<T: Operand>(op: &Embedding<T>, threads: usize, c: &mut Carver<'_>) -> Slabs<f32> {
    c.workers(threads, op.out.spec().cols)
}

tiered! {
    fn look_up<'a>(numbers: Range<usize>, ids: Mat, table: WeightView<'a>, out: Mat, room: &'a mut [f32]) {
        for i in numbers {
            table.row(ids.word(0, i) as usize, room);
            out.store(i, 0, room);
        }
    }
}

pub(super) unsafe fn embedding(op: &Embedding<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (ids, out, live) = unsafe { (Mat::of(&op.ids)?, Mat::of(&op.out)?, Mat::of_opt(&op.live)?) };
    let rows = Rows::new(out.rows, 1, live)?;
    let [entries, _] = op.table.shape();
    check_indices("ids", &ids, rows.live, entries, false)?;
    match &op.table {
        Matrix::Tensor(t) => {
            // Safety: the caller's promise.
            let table = unsafe { Mat::of(t)? };
            cx.pool.split(rows.live, out.cols, &|numbers, _| {
                let mut x = [0.0f32; CHUNK];
                for i in numbers {
                    for c in (0..out.cols).step_by(CHUNK) {
                        let x = &mut x[..CHUNK.min(out.cols - c)];
                        table.load(ids.word(0, i) as usize, c, x);
                        out.store(i, c, x);
                    }
                }
            });
        }
        Matrix::Weight(w) => {
            let table = CpuWeight::of(w)?.view()?;
            let room = embedding_scratch(op, cx.pool.threads(), &mut cx.carver());
            cx.pool.split(rows.live, out.cols * 2, &|numbers, worker| {
                // Safety: the worker's slab.
                look_up(cx.tier, numbers, ids, table, out, unsafe { room.of(worker).get_mut() });
            });
        }
    }
    Ok(())
}

/// `x + residual` of a row, rounded as `sum` holds it, which gets it too. Returns nothing but the row.
#[inline(always)]
fn hidden(x: &Mat, residual: &Option<Mat>, sum: &Option<Mat>, r: usize, h: &mut [f32]) {
    x.load(r, 0, h);
    if let Some(residual) = residual {
        let mut y = [0.0f32; CHUNK];
        for (i, h) in h.chunks_mut(CHUNK).enumerate() {
            let y = &mut y[..h.len()];
            residual.load(r, i * CHUNK, y);
            h.iter_mut().zip(&*y).for_each(|(h, y)| *h += *y);
        }
    }
    if let Some(sum) = sum {
        convert::round(sum.dtype, h);
        sum.store(r, 0, h);
    }
}

/// `sum of a[i] b[i]`: chains of f32 over a piece, pieces added in f64.
#[inline(always)]
pub(super) fn dot_wide(a: &[f32], b: &[f32]) -> f64 {
    a.chunks(CHUNK).zip(b.chunks(CHUNK)).map(|(a, b)| f64::from(math::sum(a.len().min(b.len()), |i| a[i] * b[i]))).sum()
}

/// 1 / sqrt(mean(h^2) + eps)
#[inline(always)]
pub(super) fn inverse_norm(h: &[f32], eps: f32) -> f32 {
    let mean = dot_wide(h, h) / h.len() as f64;
    1.0 / math::sqrt((mean + f64::from(eps)) as f32)
}

pub(super) fn rms_norm_scratch<T: Operand>(op: &RmsNorm<T>, threads: usize, c: &mut Carver<'_>) -> [Slabs<f32>; 3] {
    let d = op.x.spec().cols;
    core::array::from_fn(|_| c.workers(threads, d))
}

tiered! {
    fn rms_norm_rows<'a>(
        numbers: Range<usize>, rows: Rows, copies: Copies, x: Mat, gamma: Mat, residual: Option<Mat>, out: Mat, sum: Option<Mat>, eps: f32,
        base: &'a mut [f32], own: &'a mut [f32], g: &'a mut [f32],
    ) {
        gamma.load(0, 0, g);
        let tangents = (1..rows.blocks).any(|b| copies.is_tangent(b));
        for i in numbers {
            if !tangents {
                let r = rows.at(i);
                hidden(&x, &residual, &sum, r, base);
                let norm = inverse_norm(base, eps);
                base.iter_mut().zip(&*g).for_each(|(h, g)| *h = *g * (*h * norm));
                out.store(r, 0, base);
                continue;
            }
            // Here i counts rows of one block: the base, then its tangents.
            hidden(&x, &residual, &sum, i, base);
            let norm = inverse_norm(base, eps);
            for block in 1..rows.blocks {
                let r = block * rows.height + i;
                hidden(&x, &residual, &sum, r, own);
                let mean = (dot_wide(base, own) / base.len() as f64) as f32;
                let correction = norm * norm * norm * mean;
                for ((o, h), g) in own.iter_mut().zip(&*base).zip(&*g) {
                    *o = *g * (*o * norm - *h * correction);
                }
                out.store(r, 0, own);
            }
            base.iter_mut().zip(&*g).for_each(|(h, g)| *h = *g * (*h * norm));
            out.store(i, 0, base);
        }
    }
}

pub(super) unsafe fn rms_norm(op: &RmsNorm<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (x, gamma, out) = unsafe { (Mat::of(&op.x)?, Mat::of(&op.gamma)?, Mat::of(&op.out)?) };
    // Safety: as above.
    let (residual, sum, live) = unsafe { (Mat::of_opt(&op.residual)?, Mat::of_opt(&op.sum)?, Mat::of_opt(&op.live)?) };
    let rows = Rows::new(out.rows, op.copies.total(), live)?;
    let scratch = rms_norm_scratch(op, cx.pool.threads(), &mut cx.carver());
    let tangents = op.copies.is_tangent(1) && rows.blocks > 1;
    let (count, each) = if tangents { (rows.live, rows.blocks) } else { (rows.len(), 1) };
    cx.pool.split(count, out.cols * each * 2, &|numbers, worker| {
        // Safety: the worker's slabs.
        let [a, b, c] = scratch.map(|s| unsafe { s.of(worker).get_mut() });
        rms_norm_rows(cx.tier, numbers, rows, op.copies, x, gamma, residual, out, sum, op.eps, a, b, c);
    });
    Ok(())
}

/// silu'(x) = s (1 + x (1 - s)), with 1 - s taken from the other side, where it does not cancel.
#[inline(always)]
pub(super) fn silu_slope(x: f32) -> f32 {
    math::sigmoid(x) * (1.0 + x * math::sigmoid(-x))
}

tiered! {
    fn swiglu_pieces(pieces: Range<usize>, grid: Grid, rows: Rows, tangents: bool, gate: Mat, up: Mat, out: Mat) {
        let (mut g, mut u) = ([0.0f32; CHUNK], [0.0f32; CHUNK]);
        let (mut dg, mut du) = ([0.0f32; CHUNK], [0.0f32; CHUNK]);
        for piece in pieces {
            let (i, c, n) = grid.at(piece);
            let r = if tangents { i } else { rows.at(i) };
            let (g, u) = (&mut g[..n], &mut u[..n]);
            gate.load(r, c, g);
            up.load(r, c, u);
            if tangents {
                let (dg, du) = (&mut dg[..n], &mut du[..n]);
                for block in 1..rows.blocks {
                    let r = block * rows.height + i;
                    gate.load(r, c, dg);
                    up.load(r, c, du);
                    for (((dg, du), g), u) in dg.iter_mut().zip(&*du).zip(&*g).zip(&*u) {
                        *dg = silu_slope(*g) * *dg * *u + *g * math::sigmoid(*g) * *du;
                    }
                    out.store(r, c, dg);
                }
            }
            g.iter_mut().zip(&*u).for_each(|(g, u)| *g = *g * math::sigmoid(*g) * *u);
            out.store(r, c, g);
        }
    }
}

pub(super) unsafe fn swiglu(op: &SwiGlu<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (gate, up, out, live) = unsafe { (Mat::of(&op.gate)?, Mat::of(&op.up)?, Mat::of(&op.out)?, Mat::of_opt(&op.live)?) };
    let (rows, grid) = (Rows::new(out.rows, op.copies.total(), live)?, Grid::new(out.cols));
    let tangents = op.copies.is_tangent(1) && rows.blocks > 1;
    let (count, each) = if tangents { (rows.live, rows.blocks) } else { (rows.len(), 1) };
    cx.pool.split(grid.pieces(count), grid.cost(8 * each), &|p, _| swiglu_pieces(cx.tier, p, grid, rows, tangents, gate, up, out));
    Ok(())
}

pub(super) unsafe fn spread(op: &Spread<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (src, out, live) = unsafe { (Mat::of(&op.src)?, Mat::of(&op.out)?, Mat::of_opt(&op.live)?) };
    let rows = Rows::new(out.rows, op.copies.total(), live)?;
    cx.pool.split(rows.len(), out.cols, &|numbers, _| {
        for i in numbers {
            match op.copies.is_tangent(rows.block(i)) {
                true => out.zero_row(rows.at(i)),
                false => out.copy_row(rows.at(i), &src, i % rows.live),
            }
        }
    });
    Ok(())
}

tiered! {
    fn boundary_dots(copies: Range<usize>, live: usize, delta: Mat, h: Mat, base: Option<Mat>, out: Mat) {
        let (mut x, mut y, mut z) = ([0.0f32; CHUNK], [0.0f32; CHUNK], [0.0f32; CHUNK]);
        for copy in copies {
            let mut sum = 0.0f64;
            for r in 0..live {
                for c in (0..delta.cols).step_by(CHUNK) {
                    let n = CHUNK.min(delta.cols - c);
                    let (x, y, z) = (&mut x[..n], &mut y[..n], &mut z[..n]);
                    delta.load(r, c, x);
                    h.load(copy * delta.rows + r, c, y);
                    // The difference first: h and base nearly cancel.
                    if let Some(base) = &base {
                        base.load(r, c, z);
                        y.iter_mut().zip(&*z).for_each(|(y, z)| *y -= *z);
                    }
                    sum += f64::from(math::sum(n, |i| x[i] * y[i]));
                }
            }
            out.store(0, copy, &[sum as f32]);
        }
    }
}

pub(super) unsafe fn boundary_dot(op: &BoundaryDot<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (delta, h, out) = unsafe { (Mat::of(&op.delta)?, Mat::of(&op.h)?, Mat::of(&op.out)?) };
    // Safety: as above.
    let (base, live) = unsafe { (Mat::of_opt(&op.base)?, Mat::of_opt(&op.live)?) };
    let rows = Rows::new(delta.rows, 1, live)?;
    cx.pool.split(out.cols, rows.live * delta.cols, &|copies, _| boundary_dots(cx.tier, copies, rows.live, delta, h, base, out));
    Ok(())
}
