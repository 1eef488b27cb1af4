//! Rotary embedding, KV cache, attention.

use super::{CHUNK, Context, primitive::check_distinct};
use crate::{
    isa::tiered,
    math,
    scratch::{Carver, Slab, Slabs},
    simd::{Simd, dot},
    view::{Mat, Rows, check_indices},
};
use alloc::format;
use core::ops::Range;
use zofo_hal::{
    DType, Error, Operand, Result, TensorArg,
    op::{Attention, AttentionShape, Copies, KvAppend, MaskedSoftmax, NO_INDEX, Pairing, Rope},
};

tiered! {
    fn rope_rows(
        numbers: Range<usize>, rows: Rows, x: Mat, positions: Mat, cos: Mat, sin: Mat, out: Mat, pairing: Pairing, head_dim: usize,
        inverse: bool,
    ) {
        const N: usize = CHUNK / 2;
        let (mut u, mut v, mut both) = ([0.0f32; N], [0.0f32; N], [0.0f32; CHUNK]);
        let (mut c, mut s) = ([0.0f32; N], [0.0f32; N]);
        let half = head_dim / 2;
        for i in numbers {
            let r = rows.at(i);
            let p = positions.word(0, i % rows.live) as usize;
            for first in (0..half).step_by(N) {
                let n = N.min(half - first);
                let (u, v, both, c, s) = (&mut u[..n], &mut v[..n], &mut both[..2 * n], &mut c[..n], &mut s[..n]);
                cos.load(p, first, c);
                sin.load(p, first, s);
                if inverse {
                    s.iter_mut().for_each(|s| *s = -*s);
                }
                for head in (0..x.cols).step_by(head_dim) {
                    match pairing {
                        Pairing::Half => {
                            x.load(r, head + first, u);
                            x.load(r, head + half + first, v);
                        }
                        Pairing::Interleaved => {
                            x.load(r, head + 2 * first, both);
                            for (j, pair) in both.chunks_exact(2).enumerate() {
                                (u[j], v[j]) = (pair[0], pair[1]);
                            }
                        }
                    }
                    for (((u, v), c), s) in u.iter_mut().zip(v.iter_mut()).zip(&*c).zip(&*s) {
                        (*u, *v) = (*u * *c - *v * *s, *u * *s + *v * *c);
                    }
                    match pairing {
                        Pairing::Half => {
                            out.store(r, head + first, u);
                            out.store(r, head + half + first, v);
                        }
                        Pairing::Interleaved => {
                            for (j, pair) in both.chunks_exact_mut(2).enumerate() {
                                (pair[0], pair[1]) = (u[j], v[j]);
                            }
                            out.store(r, head + 2 * first, both);
                        }
                    }
                }
            }
        }
    }
}

pub(super) unsafe fn rope(op: &Rope<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (x, positions, out) = unsafe { (Mat::of(&op.x)?, Mat::of(&op.positions)?, Mat::of(&op.out)?) };
    // Safety: as above.
    let (cos, sin, live) = unsafe { (Mat::of(&op.cos)?, Mat::of(&op.sin)?, Mat::of_opt(&op.live)?) };
    let rows = Rows::new(out.rows, op.copies.total(), live)?;
    check_indices("positions", &positions, rows.live, cos.rows, false)?;
    cx.pool.split(rows.len(), out.cols * 2, &|numbers, _| {
        rope_rows(cx.tier, numbers, rows, x, positions, cos, sin, out, op.pairing, op.head_dim, op.inverse);
    });
    Ok(())
}

pub(super) unsafe fn kv_append(op: &KvAppend<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (k, v, slots) = unsafe { (Mat::of(&op.k)?, Mat::of(&op.v)?, Mat::of(&op.slots)?) };
    // Safety: as above.
    let (k_cache, v_cache) = unsafe { (Mat::of(&op.k_cache)?, Mat::of(&op.v_cache)?) };
    check_distinct("slots", &slots, k.rows, k_cache.rows)?;
    cx.pool.split(k.rows, k.cols * 2, &|rows, _| {
        let mut x = [0.0f32; CHUNK];
        for r in rows {
            let slot = match slots.word(0, r) {
                NO_INDEX => continue,
                slot => slot as usize,
            };
            for (new, cache) in [(&k, &k_cache), (&v, &v_cache)] {
                for c in (0..new.cols).step_by(CHUNK) {
                    let x = &mut x[..CHUNK.min(new.cols - c)];
                    new.load(r, c, x);
                    cache.store(slot, c, x);
                }
            }
        }
    });
    Ok(())
}

/// Packed sequences: where each lies among the queries and among the keys.
#[derive(Clone, Copy)]
pub(super) struct Sequences {
    q: Mat,
    kv: Mat,
    causal: bool,
}

impl Sequences {
    /// Checks that both lists ascend from 0 to at most `queries` and `keys`.
    ///
    /// # Errors
    /// `Execution`.
    pub(super) fn new(q: Mat, kv: Mat, queries: usize, keys: usize, causal: bool) -> Result<Self> {
        for (name, cu, end) in [("cu_q", &q, queries), ("cu_kv", &kv, keys)] {
            let mut last = 0;
            for i in 0..cu.cols {
                let now = cu.word(0, i) as usize;
                if (i == 0 && now != 0) || now < last || now > end {
                    let m = format!("{name}[{i}] is {now} after {last}; it ascends from 0 to at most {end}");
                    return Err(Error::execution(m));
                }
                last = now;
            }
        }
        Ok(Self { q, kv, causal })
    }

    pub(super) fn count(&self) -> usize {
        self.q.cols - 1
    }

    pub(super) fn queries(&self, s: usize) -> Range<usize> {
        self.q.word(0, s) as usize..self.q.word(0, s + 1) as usize
    }

    pub(super) fn keys(&self, s: usize) -> Range<usize> {
        self.kv.word(0, s) as usize..self.kv.word(0, s + 1) as usize
    }

    /// Queries of all sequences.
    pub(super) fn total(&self) -> usize {
        self.q.word(0, self.count()) as usize
    }

    /// The sequence of query row `i`.
    fn of(&self, i: usize) -> usize {
        let (mut low, mut high) = (0, self.count());
        while low + 1 < high {
            let middle = (low + high) / 2;
            if self.q.word(0, middle) as usize <= i { low = middle } else { high = middle }
        }
        low
    }

    /// How many of its keys query row `i` of sequence `s` sees.
    pub(super) fn seen(&self, s: usize, i: usize) -> usize {
        let (q, kv) = (self.queries(s), self.keys(s));
        if self.causal { (i - q.start + 1 + kv.len()).saturating_sub(q.len()) } else { kv.len() }
    }
}

/// Softmax in place; the log of the sum of exponentials, minus infinity where there is nothing.
#[inline(always)]
fn softmax(scores: &mut [f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; math::LANES];
    let mut chunks = scores.chunks_exact(math::LANES);
    for chunk in &mut chunks {
        lanes.iter_mut().zip(chunk).for_each(|(m, x)| *m = if *x > *m { *x } else { *m });
    }
    let max = lanes.iter().chain(chunks.remainder()).fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
    // All of them minus infinity or NaN: there is nothing to subtract.
    let shift = if max.is_finite() { max } else { 0.0 };
    scores.iter_mut().for_each(|x| *x = math::exp(*x - shift));
    let sum = math::sum(scores.len(), |i| scores[i]);
    let inverse = 1.0 / sum;
    scores.iter_mut().for_each(|x| *x *= inverse);
    shift + libm::logf(sum)
}

pub(super) fn masked_softmax_scratch<T: Operand>(op: &MaskedSoftmax<T>, threads: usize, c: &mut Carver<'_>) -> Slabs<f32> {
    c.workers(threads, op.scores.spec().cols)
}

tiered! {
    fn masked_softmax_rows<'a>(
        rows: Range<usize>, sequences: Sequences, scores: Mat, out: Mat, lse: Option<Mat>, scale: f32, room: &'a mut [f32],
    ) {
        for i in rows {
            let s = sequences.of(i);
            let (first, n) = (sequences.keys(s).start, sequences.seen(s, i));
            let (before, rest) = room.split_at_mut(first);
            let (p, after) = rest.split_at_mut(n);
            scores.load(i, first, p);
            p.iter_mut().for_each(|x| *x *= scale);
            let sum = softmax(p);
            before.fill(0.0);
            after.fill(0.0);
            out.store(i, 0, room);
            if let Some(lse) = &lse {
                lse.store(i, 0, &[sum]);
            }
        }
    }
}

pub(super) unsafe fn masked_softmax(op: &MaskedSoftmax<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (scores, out, lse) = unsafe { (Mat::of(&op.scores)?, Mat::of(&op.out)?, Mat::of_opt(&op.lse)?) };
    // Safety: as above.
    let (cu_q, cu_kv) = unsafe { (Mat::of(&op.cu_q)?, Mat::of(&op.cu_kv)?) };
    let sequences = Sequences::new(cu_q, cu_kv, scores.rows, scores.cols, op.causal)?;
    let room = masked_softmax_scratch(op, cx.pool.threads(), &mut cx.carver());
    cx.pool.split(sequences.total(), scores.cols * 8, &|rows, worker| {
        // Safety: the worker's slab.
        masked_softmax_rows(cx.tier, rows, sequences, scores, out, lse, op.scale, unsafe { room.of(worker).get_mut() });
    });
    Ok(())
}

/// Rows of keys or values of one head, as f32.
#[derive(Clone, Copy)]
pub(super) struct HeadRows {
    matrix: Mat,
    row0: usize,
    col0: usize,
    width: usize,
}

impl HeadRows {
    /// Rows `row0 .. row0 + n` and columns `col0 .. col0 + width` of `m`: in place if they are f32, else converted to `room`.
    ///
    /// # Safety
    /// They are not written while the rows are used; `room` is the calling thread's.
    #[inline(always)]
    pub(super) unsafe fn new(m: Mat, row0: usize, n: usize, col0: usize, width: usize, room: Slab<f32>) -> Self {
        if m.dtype == DType::F32 {
            return Self { matrix: m, row0, col0, width };
        }
        for j in 0..n {
            // Safety: the caller's promise.
            m.load(row0 + j, col0, unsafe { room.part(j * width, width).get_mut() });
        }
        // Safety: as above.
        Self { matrix: unsafe { Mat::raw(room.ptr(), n, width, width) }, row0: 0, col0: 0, width }
    }

    #[inline(always)]
    pub(super) fn row(&self, j: usize) -> &[f32] {
        // Safety: see `new`.
        unsafe { self.matrix.slice(self.row0 + j, self.col0, self.width) }
    }
}

/// `out += sum over j ascending of p[j] rows[j]`.
///
/// # Safety
/// The tier's features are there.
#[inline(always)]
pub(super) unsafe fn weighted_sum<S: Simd>(p: &[f32], rows: &HeadRows, out: &mut [f32]) {
    let width = out.len().min(rows.width);
    let whole = width - width % 16;
    // Safety: columns below `whole` are loaded from rows and stored to `out`, both at least as long.
    unsafe {
        let mut d = 0;
        while d + 64 <= whole {
            let mut acc: [S::V; 4] = core::array::from_fn(|v| S::load(out.as_ptr().add(d + 16 * v)));
            for (j, p) in p.iter().enumerate() {
                let (row, p) = (rows.row(j).as_ptr().add(d), S::splat(p));
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = S::fma(*acc, p, S::load(row.add(16 * v)));
                }
            }
            acc.into_iter().enumerate().for_each(|(v, acc)| S::store(out.as_mut_ptr().add(d + 16 * v), acc));
            d += 64;
        }
        while d < whole {
            let mut acc = S::load(out.as_ptr().add(d));
            for (j, p) in p.iter().enumerate() {
                acc = S::fma(acc, S::splat(p), S::load(rows.row(j).as_ptr().add(d)));
            }
            S::store(out.as_mut_ptr().add(d), acc);
            d += 16;
        }
        if d < width {
            for (j, p) in p.iter().enumerate() {
                crate::simd::axpy::<S>(*p, &rows.row(j)[d..width], &mut out[d..width]);
            }
        }
    }
}

/// Query rows of a task.
const QUERIES: usize = 32;

/// Scratch of attention, per worker.
#[derive(Clone, Copy)]
pub(super) struct AttentionScratch {
    /// Probabilities, and their changes.
    scores: [Slabs<f32>; 2],
    /// Rows of a head: q, dq, out.
    rows: [Slabs<f32>; 3],
    /// k, v, and of a tangent dk, dv, where they must be converted.
    heads: [Slabs<f32>; 4],
}

pub(super) fn attention_scratch<T: Operand>(op: &Attention<T>, threads: usize, c: &mut Carver<'_>) -> AttentionScratch {
    let keys = op.k.spec().rows / op.copies.total().max(1);
    let converted = op.k.spec().dtype != DType::F32 || op.v.spec().dtype != DType::F32;
    let tangents = op.copies.is_tangent(1) && op.copies.count > 0;
    let head = |needed: bool| if converted && needed { keys.saturating_mul(op.shape.head_dim) } else { 0 };
    AttentionScratch {
        scores: [c.workers(threads, keys), c.workers(threads, if tangents { keys } else { 0 })],
        rows: core::array::from_fn(|_| c.workers(threads, op.shape.head_dim)),
        heads: core::array::from_fn(|i| c.workers(threads, head(i < 2 || tangents))),
    }
}

tiered! {
    /// Queries `rows` of key head `g` in block `block`, and in tangent form of all blocks.
    fn attention_rows<'a>(
        rows: Range<usize>, g: usize, block: usize, sequences: Sequences, copies: Copies, shape: AttentionShape, q: Mat, k: Mat, v: Mat,
        out: Mat, lse: Option<Mat>, room: &'a AttentionScratch, worker: usize,
    ) {
        let blocks = copies.total();
        let (queries, keys) = (q.rows / blocks, k.rows / blocks);
        let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
        let tangents = if copies.is_tangent(1) { blocks } else { 1 };
        // Safety: the worker's slabs.
        let ([p, dp], [qr, dqr, o]) = unsafe { (room.scores.map(|s| s.of(worker).get_mut()), room.rows.map(|s| s.of(worker).get_mut())) };
        let [kr, vr, dkr, dvr] = room.heads.map(|s| s.of(worker));
        let mut first = rows.start;
        while first < rows.end {
            let s = sequences.of(first);
            let end = rows.end.min(sequences.queries(s).end);
            let kv = sequences.keys(s);
            // Keys that the last of these queries sees are all that any of them does.
            let n = sequences.seen(s, end - 1);
            // Safety: k and v are read only; the slabs are the worker's.
            let (k0, v0) = unsafe {
                let row0 = block * keys + kv.start;
                (HeadRows::new(k, row0, n, g * d, d, kr), HeadRows::new(v, row0, n, g * d, d, vr))
            };
            for copy in 0..tangents {
                // Safety: as above.
                let (dk, dv) = unsafe {
                    let row0 = copy * keys + kv.start;
                    match copy {
                        0 => (k0, v0),
                        _ => (HeadRows::new(k, row0, n, g * d, d, dkr), HeadRows::new(v, row0, n, g * d, d, dvr)),
                    }
                };
                for i in first..end {
                    let n = sequences.seen(s, i);
                    let (p, dp) = (&mut p[..n], &mut dp[..if copy > 0 { n } else { 0 }]);
                    for h in g * group..(g + 1) * group {
                        q.load(block * queries + i, h * d, qr);
                        for (j, p) in p.iter_mut().enumerate() {
                            // Safety: the tier's features are there.
                            *p = shape.scale * unsafe { dot::<S>(qr, k0.row(j)) };
                        }
                        let sum = softmax(p);
                        o.fill(0.0);
                        if copy == 0 {
                            // Safety: as above.
                            unsafe { weighted_sum::<S>(p, &v0, o) };
                            out.store(block * queries + i, h * d, o);
                            if let (Some(lse), 0) = (&lse, block) {
                                lse.store(i, h, &[sum]);
                            }
                            continue;
                        }
                        q.load(copy * queries + i, h * d, dqr);
                        for (j, dp) in dp.iter_mut().enumerate() {
                            // Safety: as above.
                            *dp = shape.scale * unsafe { dot::<S>(dqr, k0.row(j)) + dot::<S>(qr, dk.row(j)) };
                        }
                        let mean = math::sum(n, |j| p[j] * dp[j]);
                        dp.iter_mut().zip(&*p).for_each(|(dp, p)| *dp = *p * (*dp - mean));
                        // Safety: as above.
                        unsafe {
                            weighted_sum::<S>(dp, &v0, o);
                            weighted_sum::<S>(p, &dv, o);
                        }
                        out.store(copy * queries + i, h * d, o);
                    }
                }
            }
            first = end;
        }
    }
}

pub(super) unsafe fn attention(op: &Attention<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (q, k, v, out) = unsafe { (Mat::of(&op.q)?, Mat::of(&op.k)?, Mat::of(&op.v)?, Mat::of(&op.out)?) };
    // Safety: as above.
    let (cu_q, cu_kv, lse) = unsafe { (Mat::of(&op.cu_q)?, Mat::of(&op.cu_kv)?, Mat::of_opt(&op.lse)?) };
    let blocks = op.copies.total();
    let sequences = Sequences::new(cu_q, cu_kv, q.rows / blocks, k.rows / blocks, op.shape.causal)?;
    let room = attention_scratch(op, cx.pool.threads(), &mut cx.carver());
    let (chunks, heads) = (sequences.total().div_ceil(QUERIES), op.shape.kv_heads);
    let outer = if op.copies.is_tangent(1) { 1 } else { blocks };
    let cost = QUERIES.saturating_mul(q.cols / heads).saturating_mul(k.rows / blocks) / 4;
    cx.pool.split(outer * chunks * heads, cost, &|tasks, worker| {
        for task in tasks {
            let (block, rest) = (task / (chunks * heads), task % (chunks * heads));
            let (first, g) = (rest / heads * QUERIES, rest % heads);
            let rows = first..(first + QUERIES).min(sequences.total());
            attention_rows(cx.tier, rows, g, block, sequences, op.copies, op.shape, q, k, v, out, lse, &room, worker);
        }
    });
    Ok(())
}
