//! Backward ops.

use super::{CHUNK, Context, Grid, forward};
use crate::{
    gemm::{Epilogue, Extension, Job, JobLeft, JobScratch, NR, Right},
    isa::tiered,
    math,
    scratch::{Carver, Slab, Slabs},
    view::{Mat, Rows},
};
use core::ops::Range;
use zofo_hal::{
    Operand, Result, TensorArg,
    op::{LoraMatMulBackward, RmsNormBackward, SwiGluBackward},
};

pub(super) fn rms_norm_backward_scratch<T: Operand>(op: &RmsNormBackward<T>, threads: usize, c: &mut Carver<'_>) -> [Slabs<f32>; 3] {
    let d = op.x.spec().cols;
    core::array::from_fn(|_| c.workers(threads, d))
}

tiered! {
    fn rms_norm_backward_rows<'a>(
        rows: Range<usize>, x: Mat, gamma: Mat, dout: Mat, dresidual: Option<Mat>, dx: Mat, eps: f32, h: &'a mut [f32], u: &'a mut [f32],
        g: &'a mut [f32],
    ) {
        gamma.load(0, 0, g);
        let mut y = [0.0f32; CHUNK];
        for r in rows {
            x.load(r, 0, h);
            dout.load(r, 0, u);
            u.iter_mut().zip(&*g).for_each(|(u, g)| *u *= *g);
            let norm = forward::inverse_norm(h, eps);
            let mean = (forward::dot_wide(h, u) / h.len() as f64) as f32;
            let correction = norm * norm * mean;
            u.iter_mut().zip(&*h).for_each(|(u, h)| *u = norm * (*u - *h * correction));
            if let Some(dresidual) = &dresidual {
                for (i, u) in u.chunks_mut(CHUNK).enumerate() {
                    let y = &mut y[..u.len()];
                    dresidual.load(r, i * CHUNK, y);
                    u.iter_mut().zip(&*y).for_each(|(u, y)| *u += *y);
                }
            }
            dx.store(r, 0, u);
        }
    }
}

pub(super) unsafe fn rms_norm_backward(op: &RmsNormBackward<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (x, gamma, dout, dx) = unsafe { (Mat::of(&op.x)?, Mat::of(&op.gamma)?, Mat::of(&op.dout)?, Mat::of(&op.dx)?) };
    // Safety: as above.
    let (dresidual, live) = unsafe { (Mat::of_opt(&op.dresidual)?, Mat::of_opt(&op.live)?) };
    let rows = Rows::new(dx.rows, 1, live)?;
    let scratch = rms_norm_backward_scratch(op, cx.pool.threads(), &mut cx.carver());
    cx.pool.split(rows.live, dx.cols * 3, &|rows, worker| {
        // Safety: the worker's slabs.
        let [h, u, g] = scratch.map(|s| unsafe { s.of(worker).get_mut() });
        rms_norm_backward_rows(cx.tier, rows, x, gamma, dout, dresidual, dx, op.eps, h, u, g);
    });
    Ok(())
}

tiered! {
    fn swiglu_backward_pieces(pieces: Range<usize>, grid: Grid, gate: Mat, up: Mat, dout: Mat, dgate: Mat, dup: Mat) {
        let (mut g, mut u, mut d) = ([0.0f32; CHUNK], [0.0f32; CHUNK], [0.0f32; CHUNK]);
        for piece in pieces {
            let (r, c, n) = grid.at(piece);
            let (g, u, d) = (&mut g[..n], &mut u[..n], &mut d[..n]);
            gate.load(r, c, g);
            up.load(r, c, u);
            dout.load(r, c, d);
            for ((g, u), d) in g.iter_mut().zip(u.iter_mut()).zip(&*d) {
                let silu = *g * math::sigmoid(*g);
                (*g, *u) = (*d * *u * forward::silu_slope(*g), *d * silu);
            }
            dgate.store(r, c, g);
            dup.store(r, c, u);
        }
    }
}

pub(super) unsafe fn swiglu_backward(op: &SwiGluBackward<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (gate, up, dout, live) = unsafe { (Mat::of(&op.gate)?, Mat::of(&op.up)?, Mat::of(&op.dout)?, Mat::of_opt(&op.live)?) };
    // Safety: as above.
    let (dgate, dup) = unsafe { (Mat::of(&op.dgate)?, Mat::of(&op.dup)?) };
    let (rows, grid) = (Rows::new(dgate.rows, 1, live)?, Grid::new(dgate.cols));
    cx.pool.split(grid.pieces(rows.live), grid.cost(12), &|p, _| swiglu_backward_pieces(cx.tier, p, grid, gate, up, dout, dgate, dup));
    Ok(())
}

/// Scratch of [`lora_matmul_backward`].
pub(super) struct LoraBackwardScratch {
    /// scale dout B, `[T, r]`.
    u: Slab<f32>,
    /// One after the other: u, dx, da, db.
    jobs: [JobScratch; 4],
}

pub(super) fn lora_matmul_backward_scratch<T: Operand>(
    op: &LoraMatMulBackward<T>,
    threads: usize,
    c: &mut Carver<'_>,
) -> LoraBackwardScratch {
    let ([rows, inputs], [outputs, rank]) = (op.x.spec().shape(), op.b.spec().shape());
    LoraBackwardScratch {
        u: c.shared(rows * rank),
        jobs: [
            JobScratch::carve(c, threads, rows, rank, 0, false, 0),
            JobScratch::carve(c, threads, if op.dx.is_some() { rows } else { 0 }, inputs, rank, false, 0),
            JobScratch::carve(c, threads, rank, inputs, 0, false, 0),
            JobScratch::carve(c, threads, rank, outputs, 0, false, 0),
        ],
    }
}

pub(super) unsafe fn lora_matmul_backward(op: &LoraMatMulBackward<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (x, xa, a, b, dout) = unsafe { (Mat::of(&op.x)?, Mat::of(&op.xa)?, Mat::of(&op.a)?, Mat::of(&op.b)?, Mat::of(&op.dout)?) };
    // Safety: as above.
    let (da, db, dx, live) = unsafe { (Mat::of(&op.da)?, Mat::of(&op.db)?, Mat::of_opt(&op.dx)?, Mat::of_opt(&op.live)?) };
    let rows = Rows::new(x.rows, 1, live)?;
    let ([outputs, rank], inputs) = ([b.rows, b.cols], x.cols);
    let scratch = lora_matmul_backward_scratch(op, cx.pool.threads(), &mut cx.carver());
    let all = |rows| Rows { blocks: 1, height: rows, live: rows };
    // Safety: shapes were checked with the op; `u` is written by the first product and read by the others; outputs overlap nothing.
    unsafe {
        let u = Mat::raw(scratch.u.ptr(), x.rows, rank, rank);
        let job =
            |left, right, rows, n, k, epilogue| Job { left, right, rows, n, k, spread: 1, spread_product: true, extension: None, epilogue };
        let scaled = Epilogue { alpha: op.scale, ..Epilogue::new(u, rows) };
        job(JobLeft::Rows(dout), Right::matrix(b, true), rows, rank, outputs, scaled).run(cx, &scratch.jobs[0]);
        if let Some(dx) = dx {
            // u A in the same accumulators as dout W.
            let pack = |_: usize, n0: usize, n: usize, dst: &mut [f32]| {
                for (p, panel) in dst.chunks_exact_mut((rank * NR).max(1)).take(n.div_ceil(NR)).enumerate() {
                    let valid = NR.min(n - p * NR);
                    for (k, row) in panel.chunks_exact_mut(NR).enumerate() {
                        a.load(k, n0 + p * NR, &mut row[..valid]);
                        row[valid..].fill(0.0);
                    }
                }
            };
            let steps = |_: usize| rank;
            let extension = Extension { left: scratch.u, width: rank, sets: 1, k: &steps, pack: &pack };
            let epilogue = Epilogue { beta: op.beta, ..Epilogue::new(dx, rows) };
            let job = job(JobLeft::Rows(dout), Right::of(&op.w, true)?, rows, inputs, outputs, epilogue);
            Job { extension: Some(extension), ..job }.run(cx, &scratch.jobs[1]);
        }
        if !op.factors {
            return Ok(());
        }
        let add = |out: Mat, alpha| Epilogue { alpha, beta: 1.0, ..Epilogue::new(out, all(out.rows)) };
        job(JobLeft::Columns(u, rows), Right::matrix(x, true), all(rank), inputs, rows.live, add(da, 1.0)).run(cx, &scratch.jobs[2]);
        // dB by its transpose: its few columns would leave most of a vector empty.
        let transposed = Epilogue { transposed: true, rows: all(rank), ..add(db, op.scale) };
        job(JobLeft::Columns(xa, rows), Right::matrix(dout, true), all(rank), outputs, rows.live, transposed).run(cx, &scratch.jobs[3]);
    }
    Ok(())
}
