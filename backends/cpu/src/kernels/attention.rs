//! Rotary embedding, KV cache, attention.

use super::{CHUNK, Context, primitive::check_distinct};
use crate::{
    gemm::{Extent, Left, NC, NR, Packing, PackingSlabs, Right, Table, Tile, product},
    isa::tiered,
    math,
    scratch::{Carver, Slab, Slabs},
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

/// Queries of a task: enough rows for the products, few enough for their scores to stay in the second-level cache.
fn queries_per_task(keys: usize, group: usize) -> usize {
    ((1 << 17) / (keys * group).max(1)).clamp(4, 32)
}

/// Scratch of attention, per worker.
#[derive(Clone, Copy)]
pub(super) struct AttentionScratch {
    /// Probabilities, and their changes, `[rows, keys]`.
    scores: [Slabs<f32>; 2],
    /// Outputs, `[rows, head_dim]`.
    out: Slabs<f32>,
    pointers: Slabs<*const u8>,
    packing: PackingSlabs,
}

pub(super) fn attention_scratch<T: Operand>(op: &Attention<T>, threads: usize, c: &mut Carver<'_>) -> AttentionScratch {
    let keys = op.k.spec().rows / op.copies.total().max(1);
    let tangents = op.copies.is_tangent(1) && op.copies.count > 0;
    let group = op.shape.heads / op.shape.kv_heads.max(1);
    let rows = queries_per_task(keys, group).min(op.q.spec().rows) * group;
    let scores = rows.saturating_mul(keys.next_multiple_of(NR));
    AttentionScratch {
        scores: [c.workers(threads, scores), c.workers(threads, if tangents { scores } else { 0 })],
        out: c.workers(threads, rows * op.shape.head_dim.next_multiple_of(NR)),
        pointers: c.workers(threads, rows),
        packing: Packing::carve(c, threads, rows, NC),
    }
}

/// What the products of a head's queries and keys work in: the rows are the queries of one head after those of the other.
#[derive(Clone, Copy)]
pub(super) struct Products<'a> {
    pub(super) table: &'static Table,
    pub(super) packing: &'a Packing,
    pub(super) pointers: Slab<*const u8>,
}

impl Products<'_> {
    /// `tile = left right`, or added to it, for the rows that `row(i)` names.
    ///
    /// # Safety
    /// Rows are valid for `k` elements of `dtype`; the calling thread alone uses tile, pointers and packing.
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn rows(
        &self,
        m: usize,
        row: impl Fn(usize) -> *const u8,
        dtype: DType,
        right: &Right<'_>,
        (n, k): (usize, usize),
        tile: Tile,
        fresh: bool,
    ) {
        // Safety: the caller's promise.
        unsafe {
            let pointers = self.pointers.part(0, m).get_mut();
            pointers.iter_mut().enumerate().for_each(|(i, p)| *p = row(i));
            let e = Extent { m, n0: 0, n, k, right_k: 0, fresh };
            product(self.table, &Left::Rows { rows: pointers, dtype }, right, e, tile, self.packing);
        }
    }
}

tiered! {
    /// Scores become probabilities; `seen(i)` of row i count, the others become 0. `lse(i, value)` gets the log of the sum of exponentials.
    fn probabilities<'a>(rows: usize, tile: Tile, scale: f32, seen: &'a dyn Fn(usize) -> usize, lse: &'a mut dyn FnMut(usize, f32)) {
        for i in 0..rows {
            // Safety: the tile is this thread's.
            let (p, rest) = unsafe { tile.row(i) }.split_at_mut(seen(i));
            p.iter_mut().for_each(|p| *p *= scale);
            let sum = softmax(p);
            rest.fill(0.0);
            lse(i, sum);
        }
    }
}

tiered! {
    /// Changes of scores become changes of probabilities: `p (ds - sum of p ds)`.
    fn slopes(rows: usize, p: Tile, ds: Tile, scale: f32) {
        for i in 0..rows {
            // Safety: the tiles are this thread's. Where p is 0, the change is too, whatever the score.
            let (p, ds) = unsafe { (&*p.row(i), ds.row(i)) };
            let mean = scale * math::sum(p.len(), |j| p[j] * ds[j]);
            ds.iter_mut().zip(p).for_each(|(ds, p)| *ds = *p * (scale * *ds - mean));
        }
    }
}

/// Operands and sizes of an attention.
struct Heads<'a> {
    q: Mat,
    k: Mat,
    v: Mat,
    out: Mat,
    lse: Option<Mat>,
    sequences: Sequences,
    copies: Copies,
    shape: AttentionShape,
    room: &'a AttentionScratch,
}

impl Heads<'_> {
    /// Queries `first .. end`, all of one sequence, of key head `g` in block `block`, and in tangent form of all blocks.
    ///
    /// # Safety
    /// As for [`super::run`]; `worker` is the calling thread's.
    unsafe fn task(&self, cx: &Context<'_>, s: usize, queries: Range<usize>, g: usize, block: usize, worker: usize) {
        let blocks = self.copies.total();
        let (height, keys) = (self.q.rows / blocks, self.k.rows / blocks);
        let (d, group) = (self.shape.head_dim, self.shape.heads / self.shape.kv_heads);
        let (count, m) = (queries.len(), queries.len() * group);
        let first_key = self.sequences.keys(s).start;
        // Keys that the last of these queries sees are all that any of them does.
        let n = self.sequences.seen(s, queries.end - 1);
        let (packing, ld) = (self.room.packing.of(worker), n.next_multiple_of(NR));
        let products = Products { table: cx.gemm, packing: &packing, pointers: self.room.pointers.of(worker) };
        let [p, dp] = self.room.scores.map(|s| Tile { acc: s.of(worker), ld });
        let o = Tile { acc: self.room.out.of(worker), ld: d.next_multiple_of(NR) };
        // Row i: head i / count, query i % count.
        let place = |block: usize, i: usize| (block * height + queries.start + i % count, (g * group + i / count) * d);
        let q = |block: usize| {
            move |i: usize| {
                let (r, c) = place(block, i);
                self.q.at(r, c).cast_const()
            }
        };
        let at = |t: &Mat, block: usize| t.part(block * keys + first_key, n, g * d, d);
        let row = |t: Tile| move |i: usize| t.acc.part(i * t.ld, n).ptr().cast_const().cast::<u8>();
        let (k, v) = (|b: usize| Right::matrix(at(&self.k, b), false), |b: usize| Right::matrix(at(&self.v, b), true));
        let seen = |i: usize| self.sequences.seen(s, queries.start + i % count);
        // Safety: q, k and v are read only; scratch is the worker's; rows of the output are this task's.
        unsafe {
            let finish = |block: usize| {
                for i in 0..m {
                    let (r, c) = place(block, i);
                    self.out.store(r, c, &o.row(i)[..d]);
                }
            };
            products.rows(m, q(block), self.q.dtype, &k(block), (n, d), p, true);
            let mut keep = |i: usize, sum: f32| {
                if let (Some(lse), 0) = (&self.lse, block) {
                    let (r, c) = place(0, i);
                    lse.store(r, c / d, &[sum]);
                }
            };
            probabilities(cx.tier, m, Tile { acc: p.acc.part(0, m * ld), ..p }, self.shape.scale, &seen, &mut keep);
            products.rows(m, row(p), DType::F32, &v(block), (d, n), o, true);
            finish(block);
            if !self.copies.is_tangent(1) {
                return;
            }
            for copy in 1..blocks {
                products.rows(m, q(copy), self.q.dtype, &k(0), (n, d), dp, true);
                products.rows(m, q(0), self.q.dtype, &k(copy), (n, d), dp, false);
                slopes(cx.tier, m, p, dp, self.shape.scale);
                products.rows(m, row(dp), DType::F32, &v(0), (d, n), o, true);
                products.rows(m, row(p), DType::F32, &v(copy), (d, n), o, false);
                finish(copy);
            }
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
    let heads = op.shape.kv_heads;
    let size = queries_per_task(k.rows / blocks, op.shape.heads / heads);
    let heads_of = Heads { q, k, v, out, lse, sequences, copies: op.copies, shape: op.shape, room: &room };
    let (chunks, outer) = (sequences.total().div_ceil(size), if op.copies.is_tangent(1) { 1 } else { blocks });
    let cost = size.saturating_mul(q.cols / heads).saturating_mul(k.rows / blocks) / 8;
    cx.pool.split(outer * chunks * heads, cost, &|tasks, worker| {
        for task in tasks {
            let (block, rest) = (task / (chunks * heads), task % (chunks * heads));
            let (mut first, g) = (rest / heads * size, rest % heads);
            let end = (first + size).min(sequences.total());
            while first < end {
                let s = sequences.of(first);
                let queries = first..end.min(sequences.queries(s).end);
                first = queries.end;
                // Safety: the caller's promise; tasks write different rows and heads.
                unsafe { heads_of.task(cx, s, queries, g, block, worker) };
            }
        }
    });
    Ok(())
}
