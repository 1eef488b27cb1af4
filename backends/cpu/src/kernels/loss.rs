//! The fused language-model head: losses, their gradient, scores.

mod slope;

use super::{CHUNK, Context, primitive::check_distinct};
use crate::{
    gemm::{Extent, Left, MT, NC, NR, Packing, PackingSlabs, Right, Tile, product},
    isa::tiered,
    math,
    scratch::{Carver, Slab, Slabs},
    simd::dot,
    view::{Mat, below, check_indices},
    weight::{CpuWeight, WeightView},
};
use core::{cmp::min, ops::Range};
use zofo_hal::{
    Matrix, Operand, Result, TensorArg,
    op::{ArgMax, CandidateScores, Copies, CrossEntropy, CrossEntropyBackward, NO_INDEX},
};

/// Columns of the vocabulary that one task takes. A row's sums are formed over a tile, tiles over a span, spans over the vocabulary, always
/// ascending, so they depend on the size of the vocabulary alone.
const SPAN: usize = 10 * NC;

/// The labelled rows, without padding.
#[derive(Clone, Copy)]
struct Labels {
    /// Place of each in `rows`.
    places: Slab<u32>,
    rows: Mat,
    targets: Mat,
}

/// The head as rows to look up.
#[derive(Clone, Copy)]
enum Entries<'a> {
    Tensor(Mat),
    Weight(WeightView<'a>),
}

impl<'a> Entries<'a> {
    /// # Safety
    /// As for [`Mat::of`].
    unsafe fn of(head: &'a Matrix<TensorArg>) -> Result<Self> {
        Ok(match head {
            // Safety: the caller's promise.
            Matrix::Tensor(t) => Self::Tensor(unsafe { Mat::of(t)? }),
            Matrix::Weight(w) => Self::Weight(CpuWeight::of(w)?.view()?),
        })
    }

    /// Row `id`.
    #[inline(always)]
    fn load(&self, id: usize, out: &mut [f32]) {
        match self {
            Self::Tensor(m) => m.load(id, 0, out),
            Self::Weight(w) => w.row(id, out),
        }
    }
}

impl Labels {
    /// Checks rows and targets and leaves out padding.
    ///
    /// # Errors
    /// `Execution`.
    ///
    /// # Safety
    /// `places` is the op's own, as long as `rows`.
    unsafe fn new(rows: Mat, targets: Mat, places: Slab<u32>, height: usize, vocabulary: usize) -> Result<Self> {
        check_distinct("rows", &rows, rows.cols, height)?;
        let mut n = 0;
        for i in (0..rows.cols).filter(|i| rows.word(0, *i) != NO_INDEX) {
            below("targets", i, targets.word(0, i), vocabulary)?;
            // Safety: the caller's promise.
            unsafe { places.part(n, 1).get_mut()[0] = i as u32 };
            n += 1;
        }
        Ok(Self { places: places.part(0, n), rows, targets })
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    /// Place in the list, row, target of label `j`.
    #[inline(always)]
    fn at(&self, j: usize) -> (usize, usize, usize) {
        // Safety: written once in `new`.
        let i = unsafe { self.places.get()[j] } as usize;
        (i, self.rows.word(0, i) as usize, self.targets.word(0, i) as usize)
    }
}

/// Scratch of [`cross_entropy`] without slope.
struct LossScratch {
    places: Slab<u32>,
    /// Per span and row: the maximum and the sum of exponentials below it; of a tangent the weighted sum of slopes.
    partial: Slab<f64>,
    /// Logit, or its slope, of the target.
    target: Slab<f64>,
    tile: Slabs<f32>,
    pointers: Slabs<*const u8>,
    packing: PackingSlabs,
}

/// Labels whose copies fill a tile.
fn labels_per_tile(copies: usize) -> usize {
    (MT / copies.max(1)).max(1)
}

pub(super) fn cross_entropy_scratch<T: Operand>(op: &CrossEntropy<T>, threads: usize, c: &mut Carver<'_>) {
    match &op.slope {
        None => drop(losses_scratch(op, threads, c)),
        Some(_) => drop(slope::scratch(op, threads, c)),
    }
}

fn losses_scratch<T: Operand>(op: &CrossEntropy<T>, threads: usize, c: &mut Carver<'_>) -> LossScratch {
    let (labels, copies, vocabulary) = (op.rows.spec().cols, op.copies.total(), op.head.shape()[0]);
    let m = labels_per_tile(copies).min(labels).saturating_mul(copies);
    let rows = labels.saturating_mul(copies);
    LossScratch {
        places: c.shared(labels),
        partial: c.shared(rows.saturating_mul(2 * vocabulary.div_ceil(SPAN))),
        target: c.shared(rows),
        tile: c.workers(threads, m * NC),
        pointers: c.workers(threads, m),
        packing: Packing::carve(c, threads, m, NC),
    }
}

/// Largest of a row; NaN is passed over.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; math::LANES];
    let mut chunks = x.chunks_exact(math::LANES);
    for chunk in &mut chunks {
        lanes.iter_mut().zip(chunk).for_each(|(m, x)| *m = if *x > *m { *x } else { *m });
    }
    lanes.iter().chain(chunks.remainder()).fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m })
}

/// Factor that takes a sum of exponentials from below maximum `old` to below `new`.
#[inline(always)]
fn rescale(old: f64, new: f64) -> f64 {
    if old == new { 1.0 } else { libm::exp(old - new) }
}

tiered! {
    /// Adds a tile of logits, of the labels `first ..`, to their running sums.
    fn add_tile(
        tile: Tile, first: usize, count: usize, n0: usize, n: usize, copies: Copies, labels: Labels, partial: Slab<f64>, target: Slab<f64>,
    ) {
        let blocks = copies.total();
        for j in 0..count {
            let (_, _, wanted) = labels.at(first + j);
            let here = (n0..n0 + n).contains(&wanted).then(|| wanted - n0);
            // How far the base's sums move down when a larger logit comes.
            let mut shrink = 1.0;
            for block in 0..blocks {
                let row = (first + j) * blocks + block;
                // Safety: the tile is this thread's, and so are the sums of these rows and this span.
                let (x, sums) = unsafe { (&mut tile.row(j * blocks + block)[..n], partial.part(2 * row, 2).get_mut()) };
                if let Some(at) = here {
                    // Safety: as above; only the task with this column writes it.
                    unsafe { target.part(row, 1).get_mut()[0] = x[at].into() };
                }
                if copies.is_tangent(block) {
                    // Safety: as above; the base's exponentials are in its row by now.
                    let p = unsafe { &tile.row(j * blocks)[..n] };
                    sums[0] = sums[0] * shrink + f64::from(math::sum(n, |i| p[i] * x[i]));
                    continue;
                }
                let max = sums[0].max(largest(x).into());
                shrink = rescale(sums[0], max);
                let shift = max as f32;
                x.iter_mut().for_each(|x| *x = math::exp(*x - shift));
                sums[1] = sums[1] * shrink + f64::from(math::sum(n, |i| x[i]));
                sums[0] = max;
            }
        }
    }
}

pub(super) unsafe fn cross_entropy(op: &CrossEntropy<TensorArg>, cx: &Context<'_>) -> Result<()> {
    if let Some(out) = &op.slope {
        // Safety: the caller's promise.
        return unsafe { slope::losses_and_slope(op, out, cx) };
    }
    // Safety: the caller's promise.
    let (h, rows, targets, losses) = unsafe { (Mat::of(&op.h)?, Mat::of(&op.rows)?, Mat::of(&op.targets)?, Mat::of(&op.losses)?) };
    // Safety: as above.
    let head = unsafe { Right::of(&op.head, false)? };
    let ([vocabulary, d], copies) = (op.head.shape(), op.copies);
    let (blocks, height) = (copies.total(), h.rows / copies.total());
    let s = losses_scratch(op, cx.pool.threads(), &mut cx.carver());
    // Safety: the slab is this op's.
    let labels = unsafe { Labels::new(rows, targets, s.places, height, vocabulary)? };
    (0..blocks).for_each(|block| losses.zero_row(block));
    if labels.len() == 0 {
        return Ok(());
    }
    let spans = vocabulary.div_ceil(SPAN);
    let per_tile = match labels.len() * blocks * vocabulary * d < 1 << 20 {
        true => labels_per_tile(blocks),
        false => labels_per_tile(blocks).min(labels.len().div_ceil((cx.pool.threads() * 4).div_ceil(spans))),
    };
    let tiles = labels.len().div_ceil(per_tile);
    let per_tile = labels.len().div_ceil(tiles);
    // A span's tasks follow each other, so the head passes through the caches once.
    let work = |task: usize, worker: usize| {
        let (span, first) = (task / tiles, task % tiles * per_tile);
        let count = min(per_tile, labels.len() - first);
        let partial = s.partial.part(span * labels.len() * blocks * 2, labels.len() * blocks * 2);
        let (tile, packing) = (s.tile.of(worker), s.packing.of(worker));
        // Safety: slabs are the worker's; sums are of this task's rows and span; the head is read only.
        unsafe {
            for row in first * blocks..(first + count) * blocks {
                let start = if copies.is_tangent(row % blocks) { 0.0 } else { f64::NEG_INFINITY };
                partial.part(2 * row, 2).get_mut().copy_from_slice(&[start, 0.0]);
            }
            let pointers = s.pointers.of(worker).part(0, count * blocks).get_mut();
            for (i, p) in pointers.iter_mut().enumerate() {
                *p = h.at(i % blocks * height + labels.at(first + i / blocks).1, 0);
            }
            let left = Left::Rows { rows: pointers, dtype: h.dtype };
            let end = min((span + 1) * SPAN, vocabulary);
            for n0 in (span * SPAN..end).step_by(NC) {
                let n = min(NC, end - n0);
                let tile = Tile { acc: tile, ld: n.next_multiple_of(NR) };
                let e = Extent { m: count * blocks, n0, n, k: d, right_k: 0, fresh: true };
                product(cx.gemm, &left, &head, e, tile, &packing);
                add_tile(cx.tier, tile, first, count, n0, n, copies, labels, partial, s.target);
            }
        }
    };
    cx.pool.run(spans * tiles, &work);

    let stride = labels.len() * blocks * 2;
    // Safety: all threads are done.
    let (partial, target) = unsafe { (s.partial.get(), s.target.get()) };
    for j in 0..labels.len() {
        let (place, _, _) = labels.at(j);
        // Maximum and sum of block `b`, and a function that adds its spans' values from below their maximum to below the whole's.
        let gather = |b: usize, of: usize, which: usize, max: f64| -> f64 {
            let at = |span: usize, b: usize| span * stride + (j * blocks + b) * 2;
            (0..spans).map(|span| partial[at(span, of) + which] * rescale(partial[at(span, b)], max)).sum()
        };
        let max_of = |b: usize| (0..spans).map(|span| partial[span * stride + (j * blocks + b) * 2]).fold(f64::NEG_INFINITY, f64::max);
        let (base_max, mut base_sum) = (max_of(0), 0.0);
        for b in 0..blocks {
            let loss = if copies.is_tangent(b) {
                gather(0, b, 0, base_max) / base_sum - target[j * blocks + b]
            } else {
                let max = max_of(b);
                let sum = gather(b, b, 1, max);
                let total = max + libm::log(sum);
                if b == 0 {
                    base_sum = sum;
                }
                total - target[j * blocks + b]
            };
            losses.store(b, place, &[loss as f32]);
        }
    }
    Ok(())
}

pub(super) fn cross_entropy_backward_scratch<T: Operand>(op: &CrossEntropyBackward<T>, threads: usize, c: &mut Carver<'_>) -> Slabs<f32> {
    c.workers(threads, op.dh.spec().cols)
}

pub(super) unsafe fn cross_entropy_backward(op: &CrossEntropyBackward<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (slope, rows, dh) = unsafe { (Mat::of(&op.slope)?, Mat::of(&op.rows)?, Mat::of(&op.dh)?) };
    // Safety: as above.
    let scale = unsafe { Mat::of(&op.scale)?.get(0, 0) };
    check_distinct("rows", &rows, rows.cols, dh.rows)?;
    let room = cross_entropy_backward_scratch(op, cx.pool.threads(), &mut cx.carver());
    cx.pool.split(dh.rows, dh.cols, &|range, _| range.for_each(|r| dh.zero_row(r)));
    cx.pool.split(rows.cols, dh.cols * 2, &|range, worker| {
        // Safety: the worker's slab.
        let x = unsafe { room.of(worker).get_mut() };
        for i in range.filter(|i| rows.word(0, *i) != NO_INDEX) {
            slope.load(i, 0, x);
            x.iter_mut().for_each(|x| *x *= scale);
            dh.store(rows.word(0, i) as usize, 0, x);
        }
    });
    Ok(())
}

pub(super) fn candidate_scores_scratch<T: Operand>(op: &CandidateScores<T>, threads: usize, c: &mut Carver<'_>) -> [Slabs<f32>; 2] {
    let d = op.h.spec().cols;
    core::array::from_fn(|_| c.workers(threads, d))
}

tiered! {
    fn scores_of<'a>(
        range: Range<usize>, h: Mat, rows: Mat, candidates: Mat, head: Entries<'a>, out: Mat, entry: &'a mut [f32], room: &'a mut [f32],
    ) {
        for j in range {
            let id = candidates.word(0, j) as usize;
            head.load(id, entry);
            for i in 0..out.rows {
                // Safety: h is read only; the tier's features are there.
                let score = unsafe { dot::<S>(h.read(rows.word(0, i) as usize, 0, entry.len(), room), entry) };
                out.store(i, j, &[score]);
            }
        }
    }
}

pub(super) unsafe fn candidate_scores(op: &CandidateScores<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (h, rows, candidates, out) = unsafe { (Mat::of(&op.h)?, Mat::of(&op.rows)?, Mat::of(&op.candidates)?, Mat::of(&op.out)?) };
    check_indices("rows", &rows, out.rows, h.rows, false)?;
    check_indices("candidates", &candidates, out.cols, op.head.shape()[0], false)?;
    // Safety: the caller's promise.
    let head = unsafe { Entries::of(&op.head)? };
    let scratch = candidate_scores_scratch(op, cx.pool.threads(), &mut cx.carver());
    cx.pool.split(out.cols, (out.rows + 1) * h.cols, &|range, worker| {
        // Safety: the worker's slabs.
        let [entry, room] = scratch.map(|s| unsafe { s.of(worker).get_mut() });
        scores_of(cx.tier, range, h, rows, candidates, head, out, entry, room);
    });
    Ok(())
}

pub(super) unsafe fn argmax(op: &ArgMax<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (x, out) = unsafe { (Mat::of(&op.x)?, Mat::of(&op.out)?) };
    cx.pool.split(x.rows, x.cols, &|rows, _| {
        let mut chunk = [0.0f32; CHUNK];
        for r in rows {
            let (mut best, mut at) = (x.get(r, 0), 0);
            for c in (0..x.cols).step_by(CHUNK) {
                let chunk = &mut chunk[..CHUNK.min(x.cols - c)];
                x.load(r, c, chunk);
                for (i, v) in chunk.iter().enumerate() {
                    if !best.is_nan() && (v.is_nan() || *v > best) {
                        (best, at) = (*v, c + i);
                    }
                }
            }
            out.set_word(0, r, at as u32);
        }
    });
    Ok(())
}
