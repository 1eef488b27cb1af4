//! Rotary embedding, KV cache, attention.

use super::matmul::{add_scaled, dot};
use crate::op::{Attention, AttentionBackward, AttentionShape, KvAppend, MaskedSoftmax, Pairing, Rope};
use crate::reference::operand::{Live, Mat, Memory, below, distinct_or_none, load, round_into, store, store_rows, words};
use crate::{Error, Result, TensorArg};
use alloc::{format, vec, vec::Vec};
use core::ops::Range;

pub(super) fn rope(op: &Rope<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [rows, cols] = op.x.spec.shape();
    let block = rows / op.copies.total();
    let live = Live::load(mem, &op.live, block)?;
    let (x, cos, sin) = (load(mem, &op.x)?, load(mem, &op.cos)?, load(mem, &op.sin)?);
    let positions = words(mem, &op.positions)?;
    let mut out = Mat::zeros(rows, cols);
    let half = op.head_dim / 2;
    for r in live.rows(rows) {
        let p = below("positions", r % block, positions[r % block], cos.rows)?;
        for head in (0..cols).step_by(op.head_dim) {
            for i in 0..half {
                let (u, v) = match op.pairing {
                    Pairing::Half => (head + i, head + i + half),
                    Pairing::Interleaved => (head + 2 * i, head + 2 * i + 1),
                };
                let (c, s) = (cos.row(p)[i], if op.inverse { -sin.row(p)[i] } else { sin.row(p)[i] });
                let (a, b) = (x.row(r)[u], x.row(r)[v]);
                out.row_mut(r)[u] = a * c - b * s;
                out.row_mut(r)[v] = a * s + b * c;
            }
        }
    }
    store(mem, &op.out, &out, live)
}

pub(super) fn kv_append(op: &KvAppend<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let slots = distinct_or_none("slots", &words(mem, &op.slots)?, op.k_cache.spec.rows)?;
    let pairs: Vec<(usize, usize)> = slots.iter().enumerate().filter_map(|(t, s)| s.map(|s| (s, t))).collect();
    for (new, cache) in [(&op.k, &op.k_cache), (&op.v, &op.v_cache)] {
        let new = load(mem, new)?;
        let mut from = pairs.iter().map(|(_, t)| *t);
        let dtype = cache.spec.dtype;
        store_rows(mem, cache, pairs.iter().map(|(s, _)| *s), &mut |_, row| {
            if let Some(t) = from.next() {
                row.chunks_exact_mut(dtype.block().1).zip(new.row(t)).for_each(|(b, x)| round_into(dtype, *x, b));
            }
        })?;
    }
    Ok(())
}

/// One packed sequence: its rows among the queries, and among the keys.
struct Sequence {
    q: Range<usize>,
    kv: Range<usize>,
    causal: bool,
}

impl Sequence {
    /// The keys that query row `i` sees.
    fn keys(&self, i: usize) -> Range<usize> {
        let end = if self.causal { (i - self.q.start + 1 + self.kv.len()).saturating_sub(self.q.len()) } else { self.kv.len() };
        self.kv.start..self.kv.start + end
    }
}

/// Reads cumulative lengths and checks that they ascend from 0 to at most the number of rows.
fn sequences(mem: &dyn Memory, cu_q: &TensorArg, cu_kv: &TensorArg, t: usize, s: usize, causal: bool) -> Result<Vec<Sequence>> {
    let (q, kv) = (words(mem, cu_q)?, words(mem, cu_kv)?);
    for (name, cu, end) in [("cu_q", &q, t), ("cu_kv", &kv, s)] {
        let ascends = cu[0] == 0 && cu.windows(2).all(|w| w[0] <= w[1]) && cu[cu.len() - 1] as usize <= end;
        if !ascends {
            return Err(Error::execution(format!("{name} does not ascend from 0 to at most {end}: {cu:?}")));
        }
    }
    let range = |w: &[u32]| w[0] as usize..w[1] as usize;
    Ok(q.windows(2).zip(kv.windows(2)).map(|(q, kv)| Sequence { q: range(q), kv: range(kv), causal }).collect())
}

/// Softmax in place; returns the log of the sum of exponentials, minus infinity where there is nothing.
fn softmax(scores: &mut [f64]) -> f64 {
    let max = scores.iter().fold(f64::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
    // All of them minus infinity or NaN: there is nothing to subtract.
    let shift = if max.is_finite() { max } else { 0.0 };
    let mut sum = 0.0;
    for x in scores.iter_mut() {
        *x = libm::exp(*x - shift);
        sum += *x;
    }
    scores.iter_mut().for_each(|x| *x /= sum);
    shift + libm::log(sum)
}

pub(super) fn masked_softmax(op: &MaskedSoftmax<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [t, s] = op.scores.spec.shape();
    let sequences = sequences(mem, &op.cu_q, &op.cu_kv, t, s, op.causal)?;
    let scores = load(mem, &op.scores)?;
    let (mut out, mut lse) = (Mat::zeros(t, s), Mat::zeros(t, 1));
    for sequence in &sequences {
        for i in sequence.q.clone() {
            let keys = sequence.keys(i);
            let mut p: Vec<f64> = scores.row(i)[keys.clone()].iter().map(|x| f64::from(op.scale) * x).collect();
            lse.row_mut(i)[0] = softmax(&mut p);
            out.row_mut(i)[keys].copy_from_slice(&p);
        }
    }
    let touched = sequences.last().map_or(0, |s| s.q.end);
    store_first(mem, &op.out, &out, 1, touched)?;
    op.lse.as_ref().map_or(Ok(()), |l| store_first(mem, l, &lse, 1, touched))
}

/// Writes the first `touched` rows of each of `blocks` blocks.
fn store_first(mem: &dyn Memory, t: &TensorArg, values: &Mat, blocks: usize, touched: usize) -> Result<()> {
    let (dtype, block) = (t.spec.dtype, values.rows / blocks);
    let rows = (0..blocks).flat_map(|b| b * block..b * block + touched);
    store_rows(mem, t, rows, &mut |r, row| {
        row.chunks_exact_mut(dtype.block().1).zip(values.row(r)).for_each(|(b, x)| round_into(dtype, *x, b));
    })
}

/// Columns of query head `h`, and of the key head that it reads.
fn columns(shape: &AttentionShape, h: usize) -> (Range<usize>, Range<usize>) {
    let (d, g) = (shape.head_dim, h / (shape.heads / shape.kv_heads));
    (h * d..(h + 1) * d, g * d..(g + 1) * d)
}

pub(super) fn attention(op: &Attention<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let shape = &op.shape;
    let blocks = op.copies.total();
    let (t, s) = (op.q.spec.rows / blocks, op.k.spec.rows / blocks);
    let sequences = sequences(mem, &op.cu_q, &op.cu_kv, t, s, shape.causal)?;
    let (q, k, v) = (load(mem, &op.q)?, load(mem, &op.k)?, load(mem, &op.v)?);
    let mut out = Mat::zeros(blocks * t, shape.heads * shape.head_dim);
    let mut lse = Mat::zeros(t, shape.heads);
    let scale = f64::from(shape.scale);
    for sequence in &sequences {
        for i in sequence.q.clone() {
            let keys = sequence.keys(i);
            for h in 0..shape.heads {
                let (wide, narrow) = columns(shape, h);
                // Rows of q, k and v of block b, cut to this head.
                let q = |b: usize| &q.row(b * t + i)[wide.clone()];
                let k = |b: usize, j: usize| &k.row(b * s + j)[narrow.clone()];
                let v = |b: usize, j: usize| &v.row(b * s + j)[narrow.clone()];
                let probabilities = |b: usize| {
                    let mut p: Vec<f64> = keys.clone().map(|j| scale * dot(q(b), k(b, j))).collect();
                    let lse = softmax(&mut p);
                    (p, lse)
                };
                let (base, base_lse) = probabilities(0);
                if op.copies.has_base {
                    lse.row_mut(i)[h] = base_lse;
                }
                for b in 0..blocks {
                    let mut o = vec![0.0; shape.head_dim];
                    if op.copies.is_tangent(b) {
                        let ds: Vec<f64> = keys.clone().map(|j| scale * (dot(q(b), k(0, j)) + dot(q(0), k(b, j)))).collect();
                        let mean = dot(&base, &ds);
                        for ((j, p), ds) in keys.clone().zip(&base).zip(&ds) {
                            add_scaled(&mut o, p * (ds - mean), v(0, j));
                            add_scaled(&mut o, *p, v(b, j));
                        }
                    } else {
                        let own = if b == 0 { base.clone() } else { probabilities(b).0 };
                        keys.clone().zip(&own).for_each(|(j, p)| add_scaled(&mut o, *p, v(b, j)));
                    }
                    out.row_mut(b * t + i)[wide.clone()].copy_from_slice(&o);
                }
            }
        }
    }
    let touched = sequences.last().map_or(0, |s| s.q.end);
    store_first(mem, &op.out, &out, blocks, touched)?;
    op.lse.as_ref().map_or(Ok(()), |l| store_first(mem, l, &lse, 1, touched))
}

pub(super) fn attention_backward(op: &AttentionBackward<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let shape = &op.shape;
    let (t, s) = (op.q.spec.rows, op.k.spec.rows);
    let sequences = sequences(mem, &op.cu_q, &op.cu_kv, t, s, shape.causal)?;
    let (q, k, v) = (load(mem, &op.q)?, load(mem, &op.k)?, load(mem, &op.v)?);
    let (out, lse, dout) = (load(mem, &op.out)?, load(mem, &op.lse)?, load(mem, &op.dout)?);
    let (mut dq, mut dk, mut dv) = (Mat::zeros(t, q.cols), Mat::zeros(s, k.cols), Mat::zeros(s, v.cols));
    let scale = f64::from(shape.scale);
    for sequence in &sequences {
        for i in sequence.q.clone() {
            for h in 0..shape.heads {
                let (wide, narrow) = columns(shape, h);
                let (q, dout) = (&q.row(i)[wide.clone()], &dout.row(i)[wide.clone()]);
                let mean = dot(dout, &out.row(i)[wide.clone()]);
                for j in sequence.keys(i) {
                    let (k, v) = (&k.row(j)[narrow.clone()], &v.row(j)[narrow.clone()]);
                    let p = libm::exp(scale * dot(q, k) - lse.row(i)[h]);
                    let ds = p * (dot(dout, v) - mean);
                    add_scaled(&mut dv.row_mut(j)[narrow.clone()], p, dout);
                    add_scaled(&mut dq.row_mut(i)[wide.clone()], scale * ds, k);
                    add_scaled(&mut dk.row_mut(j)[narrow.clone()], scale * ds, q);
                }
            }
        }
    }
    let (queries, keys) = sequences.last().map_or((0, 0), |s| (s.q.end, s.kv.end));
    store_first(mem, &op.dq, &dq, 1, queries)?;
    store_first(mem, &op.dk, &dk, 1, keys)?;
    store_first(mem, &op.dv, &dv, 1, keys)
}
