//! Gradients of attention.

use super::{
    Context,
    attention::{Products, Sequences},
};
use crate::{
    gemm::{Extent, Left, NC, NR, Packing, PackingSlabs, Right, Tile, product},
    isa::tiered,
    math,
    scratch::{Carver, Slab, Slabs},
    view::Mat,
};
use core::cmp::min;
use zofo_hal::{
    DType, Operand, Result, TensorArg,
    op::{AttentionBackward, AttentionShape},
};

/// Queries at a time.
fn queries_at_once(keys: usize) -> usize {
    ((1 << 17) / keys.max(1)).clamp(4, 96)
}

/// Scratch per worker.
#[derive(Clone, Copy)]
pub(super) struct BackwardScratch {
    /// Probabilities, and the gradient of the scores, `[queries, keys]`.
    scores: [Slabs<f32>; 2],
    /// Gradient of queries, `[queries, head_dim]`.
    dq: Slabs<f32>,
    /// Rows of a head: out, dout.
    rows: [Slabs<f32>; 2],
    /// Accumulated dk and dv of a sequence and head.
    sums: [Slabs<f32>; 2],
    pointers: Slabs<*const u8>,
    packing: PackingSlabs,
}

pub(super) fn attention_backward_scratch<T: Operand>(op: &AttentionBackward<T>, threads: usize, c: &mut Carver<'_>) -> BackwardScratch {
    let (keys, d) = (op.k.spec().rows, op.shape.head_dim);
    let wide = d.next_multiple_of(NR);
    let m = queries_at_once(keys).min(op.q.spec().rows);
    BackwardScratch {
        scores: core::array::from_fn(|_| c.workers(threads, m.saturating_mul(keys.next_multiple_of(NR)))),
        dq: c.workers(threads, m * wide),
        rows: core::array::from_fn(|_| c.workers(threads, d)),
        sums: core::array::from_fn(|_| c.workers(threads, keys.saturating_mul(wide))),
        pointers: c.workers(threads, m),
        // A transposed operand has as many rows as there are keys.
        packing: Packing::carve(c, threads, usize::MAX, NC),
    }
}

/// Operands.
#[derive(Clone, Copy)]
struct Operands {
    q: Mat,
    k: Mat,
    v: Mat,
    out: Mat,
    lse: Mat,
    dout: Mat,
    dq: Mat,
    dk: Mat,
    dv: Mat,
}

tiered! {
    /// Scores become probabilities, and gradients of probabilities those of scores, of queries `first ..` of head `h`.
    fn score_gradients<'a>(
        first: usize, count: usize, h: usize, shape: AttentionShape, m: &'a Operands, seen: &'a dyn Fn(usize) -> usize, p: Tile, ds: Tile,
        out: &'a mut [f32], dout: &'a mut [f32],
    ) {
        let d = shape.head_dim;
        for i in 0..count {
            m.out.load(first + i, h * d, out);
            m.dout.load(first + i, h * d, dout);
            let (lse, mean) = (m.lse.get(first + i, h), math::sum(d, |c| out[c] * dout[c]));
            // Safety: the tiles are this thread's.
            let ((p, p_rest), (ds, ds_rest)) = unsafe { (p.row(i).split_at_mut(seen(i)), ds.row(i).split_at_mut(seen(i))) };
            p.iter_mut().for_each(|p| *p = math::exp(shape.scale * *p - lse));
            ds.iter_mut().zip(&*p).for_each(|(ds, p)| *ds = shape.scale * (*p * (*ds - mean)));
            p_rest.fill(0.0);
            ds_rest.fill(0.0);
        }
    }
}

/// Sequence `s`, key head `g`.
///
/// # Safety
/// As for [`super::run`]; `worker` is the calling thread's.
#[allow(clippy::too_many_arguments)]
unsafe fn head(
    cx: &Context<'_>,
    s: usize,
    g: usize,
    sequences: Sequences,
    shape: AttentionShape,
    m: &Operands,
    room: &BackwardScratch,
    worker: usize,
) {
    let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let (kv, queries) = (sequences.keys(s), sequences.queries(s));
    let packing = room.packing.of(worker);
    let products = Products { table: cx.gemm, packing: &packing, pointers: room.pointers.of(worker) };
    let wide = d.next_multiple_of(NR);
    let tile = |slab: Slab<f32>, ld| Tile { acc: slab, ld };
    let [dk, dv] = room.sums.map(|s| tile(s.of(worker), wide));
    let dq = tile(room.dq.of(worker), wide);
    // Safety: the worker's slabs; k, v, q and dout are read only; rows of the outputs are this task's.
    unsafe {
        let [out, dout] = room.rows.map(|s| s.of(worker).get_mut());
        for sum in [dk, dv] {
            sum.acc.part(0, kv.len() * wide).get_mut().fill(0.0);
        }
        for h in g * group..(g + 1) * group {
            for first in queries.clone().step_by(queries_at_once(m.k.rows)) {
                let count = min(queries_at_once(m.k.rows), queries.end - first);
                let n = sequences.seen(s, first + count - 1);
                let [p, ds] = room.scores.map(|s| tile(s.of(worker), n.next_multiple_of(NR)));
                let of_keys = |t: &Mat| t.part(kv.start, n, g * d, d);
                let of_queries = |t: &Mat| t.part(first, count, h * d, d);
                let (q, k, v, dout_head) = (of_queries(&m.q), of_keys(&m.k), of_keys(&m.v), of_queries(&m.dout));
                let rows = |t: Mat| move |i: usize| t.at(i, 0).cast_const();
                products.rows(count, rows(q), q.dtype, &Right::matrix(k, false), (n, d), p, true);
                products.rows(count, rows(dout_head), dout_head.dtype, &Right::matrix(v, false), (n, d), ds, true);
                let seen = |i: usize| sequences.seen(s, first + i);
                score_gradients(cx.tier, first, count, h, shape, m, &seen, p, ds, out, dout);
                let scores = |t: Tile| Mat::raw(t.acc.ptr(), count, n, t.ld);
                products.rows(count, rows(scores(ds)), DType::F32, &Right::matrix(k, true), (d, n), dq, true);
                (0..count).for_each(|i| m.dq.store(first + i, h * d, &dq.row(i)[..d]));
                for (weights, right, sum) in [(ds, q, dk), (p, dout_head, dv)] {
                    let left = Left::Columns { matrix: scores(weights), first: 0, k0: 0 };
                    let e = Extent { m: n, n0: 0, n: d, k: count, right_k: 0, fresh: false };
                    product(cx.gemm, &left, &Right::matrix(right, true), e, sum, &packing);
                }
            }
        }
        for j in 0..kv.len() {
            m.dk.store(kv.start + j, g * d, &dk.row(j)[..d]);
            m.dv.store(kv.start + j, g * d, &dv.row(j)[..d]);
        }
    }
}

pub(super) unsafe fn attention_backward(op: &AttentionBackward<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (m, cu_q, cu_kv) = unsafe {
        let m = Operands {
            q: Mat::of(&op.q)?,
            k: Mat::of(&op.k)?,
            v: Mat::of(&op.v)?,
            out: Mat::of(&op.out)?,
            lse: Mat::of(&op.lse)?,
            dout: Mat::of(&op.dout)?,
            dq: Mat::of(&op.dq)?,
            dk: Mat::of(&op.dk)?,
            dv: Mat::of(&op.dv)?,
        };
        (m, Mat::of(&op.cu_q)?, Mat::of(&op.cu_kv)?)
    };
    let sequences = Sequences::new(cu_q, cu_kv, m.q.rows, m.k.rows, op.shape.causal)?;
    let room = attention_backward_scratch(op, cx.pool.threads(), &mut cx.carver());
    let heads = op.shape.kv_heads;
    // Keys gather from all queries of their sequence, so a sequence's key head is the smallest piece that needs no order between threads.
    let tasks = sequences.count() * heads;
    let cost = (m.q.rows * m.q.cols).saturating_mul(m.k.rows) / tasks.max(1);
    cx.pool.split(tasks, cost, &|tasks, worker| {
        for task in tasks {
            // Safety: the caller's promise; tasks write different rows and heads.
            unsafe { head(cx, task / heads, task % heads, sequences, op.shape, &m, &room, worker) };
        }
    });
    Ok(())
}
