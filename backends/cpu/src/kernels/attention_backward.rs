//! Gradients of attention.

use super::{
    Context,
    attention::{HeadRows, Sequences, weighted_sum},
};
use crate::{
    isa::tiered,
    math,
    scratch::{Carver, Slabs},
    simd::{axpy, dot},
    view::Mat,
};
use zofo_hal::{
    DType, Operand, Result, TensorArg,
    op::{AttentionBackward, AttentionShape},
};

/// Scratch per worker.
#[derive(Clone, Copy)]
pub(super) struct BackwardScratch {
    /// Probabilities, and the gradient of the scores.
    scores: [Slabs<f32>; 2],
    /// Rows of a head: q, out, dout, dq.
    rows: [Slabs<f32>; 4],
    /// Accumulated dk and dv of a sequence and head.
    sums: [Slabs<f32>; 2],
    /// k and v, where they must be converted.
    heads: [Slabs<f32>; 2],
}

pub(super) fn attention_backward_scratch<T: Operand>(op: &AttentionBackward<T>, threads: usize, c: &mut Carver<'_>) -> BackwardScratch {
    let (keys, d) = (op.k.spec().rows, op.shape.head_dim);
    let head = keys.saturating_mul(d);
    let converted = op.k.spec().dtype != DType::F32 || op.v.spec().dtype != DType::F32;
    BackwardScratch {
        scores: core::array::from_fn(|_| c.workers(threads, keys)),
        rows: core::array::from_fn(|_| c.workers(threads, d)),
        sums: core::array::from_fn(|_| c.workers(threads, head)),
        heads: core::array::from_fn(|_| c.workers(threads, if converted { head } else { 0 })),
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
    /// Sequence `s`, key head `g`.
    fn head<'a>(
        s: usize, g: usize, sequences: Sequences, shape: AttentionShape, m: &'a Operands, room: &'a BackwardScratch, worker: usize,
    ) {
        let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
        let kv = sequences.keys(s);
        // Safety: the worker's slabs.
        let [p, ds] = room.scores.map(|s| unsafe { s.of(worker).get_mut() });
        // Safety: as above.
        let [q, out, dout, dq] = room.rows.map(|s| unsafe { s.of(worker).get_mut() });
        // Safety: as above.
        let [dk, dv] = room.sums.map(|s| unsafe { s.of(worker).part(0, kv.len() * d).get_mut() });
        // Safety: k and v are read only; the slabs are the worker's.
        let (k, v) = unsafe {
            let [kr, vr] = room.heads.map(|s| s.of(worker));
            (HeadRows::new(m.k, kv.start, kv.len(), g * d, d, kr), HeadRows::new(m.v, kv.start, kv.len(), g * d, d, vr))
        };
        dk.fill(0.0);
        dv.fill(0.0);
        for h in g * group..(g + 1) * group {
            for i in sequences.queries(s) {
                let n = sequences.seen(s, i);
                let (p, ds) = (&mut p[..n], &mut ds[..n]);
                m.q.load(i, h * d, q);
                m.out.load(i, h * d, out);
                m.dout.load(i, h * d, dout);
                let lse = m.lse.get(i, h);
                // Safety, here and below: the tier's features are there.
                let mean = unsafe { dot::<S>(dout, out) };
                for j in 0..n {
                    unsafe {
                        p[j] = shape.scale * dot::<S>(q, k.row(j)) - lse;
                        ds[j] = dot::<S>(dout, v.row(j)) - mean;
                    }
                }
                p.iter_mut().for_each(|p| *p = math::exp(*p));
                ds.iter_mut().zip(&*p).for_each(|(ds, p)| *ds = shape.scale * (*p * *ds));
                dq.fill(0.0);
                unsafe { weighted_sum::<S>(ds, &k, dq) };
                m.dq.store(i, h * d, dq);
                for j in 0..n {
                    unsafe {
                        axpy::<S>(ds[j], q, &mut dk[j * d..(j + 1) * d]);
                        axpy::<S>(p[j], dout, &mut dv[j * d..(j + 1) * d]);
                    }
                }
            }
        }
        for j in 0..kv.len() {
            m.dk.store(kv.start + j, g * d, &dk[j * d..(j + 1) * d]);
            m.dv.store(kv.start + j, g * d, &dv[j * d..(j + 1) * d]);
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
            head(cx.tier, task / heads, task % heads, sequences, op.shape, &m, &room, worker);
        }
    });
    Ok(())
}
