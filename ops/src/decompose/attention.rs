//! Rotary embedding, KV cache, attention.

use super::emit::{Emit, Rows, View};
use zofo_hal::{
    Result,
    op::{Attention, AttentionBackward, AttentionShape, Form, KvAppend, MaskedSoftmax, Orientation, Pairing, Reduction, Rope},
};

/// First and second elements of all pairs, each f32 `[T, heads * head_dim / 2]`: copied out of `x` (f32, contiguous), or into it.
fn pairs<E: Emit>(e: &mut E, op: &Rope<E::T>, x: &E::T, [u, v]: [&E::T; 2], into: bool) -> Result<()> {
    let ((t, cols), half, all) = (x.size(), op.head_dim / 2, Rows::all());
    let mut copy = |apart: &E::T, together: &E::T| {
        if into { e.copy(apart, together, &all) } else { e.copy(together, apart, &all) }
    };
    if op.pairing == Pairing::Interleaved {
        let n = t * cols / 2;
        let pairs = x.shaped(n, 2);
        copy(&u.shaped(n, 1), &pairs.cols_of(0, 1))?;
        return copy(&v.shaped(n, 1), &pairs.cols_of(1, 1));
    }
    for head in 0..cols / op.head_dim {
        let first = head * op.head_dim;
        copy(&u.cols_of(head * half, half), &x.cols_of(first, half))?;
        copy(&v.cols_of(head * half, half), &x.cols_of(first + half, half))?;
    }
    Ok(())
}

pub(super) fn rope<E: Emit>(e: &mut E, op: &Rope<E::T>) -> Result<()> {
    let (rows, cols) = op.x.size();
    let t = rows / op.copies.total();
    let (live, all) = (Rows::live(&op.live), Rows::all());
    let positions = e.live_indices(&op.positions, &op.live)?;
    // A row's angles, once per head.
    let mut angles = |table: &E::T, sign: f32| -> Result<E::T> {
        let (one, every) = (e.gather(table, &positions)?, e.f32(t, cols / 2)?);
        for head in 0..cols / op.head_dim {
            e.scale(&one, sign, &every.cols_of(head * op.head_dim / 2, op.head_dim / 2), &all)?;
        }
        Ok(every)
    };
    let sign = if op.inverse { -1.0 } else { 1.0 };
    let (cos, sin, minus_sin) = (angles(&op.cos, 1.0)?, angles(&op.sin, sign)?, angles(&op.sin, -sign)?);
    for block in 0..op.copies.total() {
        let x = e.clean(&op.x.rows_of(block * t, t), &live)?;
        let [u, v, a, b] = [e.f32_like(&cos)?, e.f32_like(&cos)?, e.f32_like(&cos)?, e.f32_like(&cos)?];
        pairs(e, op, &x, [&u, &v], false)?;
        e.mul(&u, &cos, &a, &all)?;
        e.mul_add(&v, &minus_sin, &a, &all)?;
        e.mul(&u, &sin, &b, &all)?;
        e.mul_add(&v, &cos, &b, &all)?;
        pairs(e, op, &x, [&a, &b], true)?;
        e.copy(&x, &op.out.rows_of(block * t, t), &live)?;
    }
    Ok(())
}

pub(super) fn kv_append<E: Emit>(e: &mut E, op: &KvAppend<E::T>) -> Result<()> {
    for (new, cache) in [(&op.k, &op.k_cache), (&op.v, &op.v_cache)] {
        let (rows, cols) = new.size();
        let rounded = e.temp(cache.dtype(), rows, cols)?;
        e.copy(new, &rounded, &Rows::all())?;
        e.scatter(&rounded, &op.slots, cache)?;
    }
    Ok(())
}

/// The last of the cumulative lengths: the rows that lie in some sequence, which come first.
fn used<T: View>(cu: &T) -> Option<T> {
    Some(cu.cols_of(cu.size().1 - 1, 1))
}

/// Columns of query head `h`, or of the key head that it reads.
fn query_head<T: View>(x: &T, shape: &AttentionShape, h: usize) -> T {
    x.cols_of(h * shape.head_dim, shape.head_dim)
}

fn key_head<T: View>(x: &T, shape: &AttentionShape, h: usize) -> T {
    x.cols_of(h / (shape.heads / shape.kv_heads) * shape.head_dim, shape.head_dim)
}

/// Probabilities of one head, `[T, S]`; 0 where a query does not see a key and in rows outside every sequence, as q and k are 0 there.
fn probabilities<E: Emit>(
    e: &mut E,
    [q, k]: [&E::T; 2],
    [cu_q, cu_kv]: [&E::T; 2],
    shape: &AttentionShape,
    lse: Option<E::T>,
) -> Result<E::T> {
    let p = e.f32(q.size().0, k.size().0)?;
    e.product(Orientation::Nt, q, k.matrix(), &p, (1.0, 0.0), &None)?;
    let softmax = MaskedSoftmax::new(p.clone(), cu_q.clone(), cu_kv.clone(), p.clone(), shape.scale, shape.causal);
    e.emit(softmax.lse(lse))?;
    Ok(p)
}

/// `p (ds - rowsum(p ds))`, in place of ds.
fn softmax_slope<E: Emit>(e: &mut E, p: &E::T, ds: &E::T, mean: &E::T) -> Result<()> {
    let all = Rows::all();
    e.add(ds, mean, -1.0, ds, &all)?;
    e.mul(p, ds, ds, &all)
}

pub(super) fn attention<E: Emit>(e: &mut E, op: &Attention<E::T>) -> Result<()> {
    const NT: Orientation = Orientation::Nt;
    const NN: Orientation = Orientation::Nn;
    let (shape, blocks) = (&op.shape, op.copies.total());
    let (t, s) = (op.q.size().0 / blocks, op.k.size().0 / blocks);
    let (queries, keys) = (used(&op.cu_q), used(&op.cu_kv));
    let q = e.clean(&op.q, &Rows::blocks(&queries, blocks))?;
    let k = e.clean(&op.k, &Rows::blocks(&keys, blocks))?;
    let v = e.clean(&op.v, &Rows::blocks(&keys, blocks))?;
    let sum = e.accumulator(&op.out)?;
    let tangents = if op.copies.form == Form::Tangent { op.copies.count as usize } else { 0 };
    for h in 0..shape.heads {
        // This head of one block.
        let q = |b: usize| query_head(&q.rows_of(b * t, t), shape, h);
        let k = |b: usize| key_head(&k.rows_of(b * s, s), shape, h);
        let v = |b: usize| key_head(&v.rows_of(b * s, s), shape, h);
        let out = |b: usize| query_head(&sum.rows_of(b * t, t), shape, h);
        let lse = |b: usize| op.lse.as_ref().filter(|_| b == 0).map(|l| l.cols_of(h, 1));
        for b in 0..blocks - tangents {
            let p = probabilities(e, [&q(b), &k(b)], [&op.cu_q, &op.cu_kv], shape, lse(b))?;
            e.product(NN, &p, v(b).matrix(), &out(b), (1.0, 0.0), &queries)?;
            for b in 1..=tangents {
                let ds = e.f32_like(&p)?;
                e.product(NT, &q(b), k(0).matrix(), &ds, (shape.scale, 0.0), &None)?;
                e.product(NT, &q(0), k(b).matrix(), &ds, (shape.scale, 1.0), &None)?;
                let mean = e.row_dot(&p, &ds, &Rows::all())?;
                softmax_slope(e, &p, &ds, &mean)?;
                e.product(NN, &ds, v(0).matrix(), &out(b), (1.0, 0.0), &queries)?;
                e.product(NN, &p, v(b).matrix(), &out(b), (1.0, 1.0), &queries)?;
            }
        }
    }
    e.finish(&sum, &op.out, &Rows::blocks(&queries, blocks))
}

/// The probabilities are normalised again instead of taken from `lse`, which has no mask.
pub(super) fn attention_backward<E: Emit>(e: &mut E, op: &AttentionBackward<E::T>) -> Result<()> {
    let shape = &op.shape;
    let (queries, keys) = (Rows::live(&used(&op.cu_q)), Rows::live(&used(&op.cu_kv)));
    let [q, out, dout] = [e.clean(&op.q, &queries)?, e.clean(&op.out, &queries)?, e.clean(&op.dout, &queries)?];
    let [k, v] = [e.clean(&op.k, &keys)?, e.clean(&op.v, &keys)?];
    let [dq, dk, dv] = [e.f32_like(&q)?, e.f32_like(&k)?, e.f32_like(&v)?];
    let products = e.f32_like(&q)?;
    e.mul(&dout, &out, &products, &Rows::all())?;
    for h in 0..shape.heads {
        let wide = |x: &E::T| query_head(x, shape, h);
        let narrow = |x: &E::T| key_head(x, shape, h);
        // Key heads add up over the query heads that read them.
        let kept = if h % (shape.heads / shape.kv_heads) == 0 { 0.0 } else { 1.0 };
        let p = probabilities(e, [&wide(&q), &narrow(&k)], [&op.cu_q, &op.cu_kv], shape, None)?;
        e.product(Orientation::Tn, &p, wide(&dout).matrix(), &narrow(&dv), (1.0, kept), &None)?;
        let ds = e.f32_like(&p)?;
        e.product(Orientation::Nt, &wide(&dout), narrow(&v).matrix(), &ds, (1.0, 0.0), &None)?;
        let mean = e.reduce(Reduction::Sum, &wide(&products), &Rows::all())?;
        softmax_slope(e, &p, &ds, &mean)?;
        e.product(Orientation::Nn, &ds, narrow(&k).matrix(), &wide(&dq), (shape.scale, 0.0), &None)?;
        e.product(Orientation::Tn, &ds, wide(&q).matrix(), &narrow(&dk), (shape.scale, kept), &None)?;
    }
    e.copy(&dq, &op.dq, &queries)?;
    e.copy(&dk, &op.dk, &keys)?;
    e.copy(&dv, &op.dv, &keys)
}
