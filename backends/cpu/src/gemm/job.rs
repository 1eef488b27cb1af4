//! A whole product: tiles, threads, and what is done with a finished tile.

use super::{Extent, FEW, MT, NC, NR, Out, Packing, Right, Tile, int8, pack::PackingSlabs, product_into};
use crate::{
    isa::tiered,
    kernels::Context,
    scratch::{Carver, Slab, Slabs},
    view::{Mat, Rows},
};
use core::cmp::min;
use zofo_hal::DType;

/// The left operand of a job.
#[derive(Clone, Copy)]
pub(crate) enum Left {
    /// Rows of a matrix `[m, k]`, as [`Job::rows`] counts them.
    Rows(Mat),
    /// A matrix `[k, m]`, whose rows count as given.
    Columns(Mat, Rows),
}

/// A second product that is added to the first in the same accumulators: `left2 right2`, with a right operand per block of rows.
#[derive(Clone, Copy)]
pub(crate) struct Extension<'a> {
    /// `[output rows, width]`, by the numbers of output rows.
    pub(crate) left: Slab<f32>,
    /// Room per row of `left`; the largest `k`.
    pub(crate) width: usize,
    /// Right operands: one for all blocks, or one each.
    pub(crate) sets: usize,
    /// Steps of a block's product.
    pub(crate) k: &'a (dyn Fn(usize) -> usize + Sync),
    pub(crate) pack: &'a PackPanels<'a>,
}

/// Writes the panels of block `set`, `n` columns from `n0` on, `[n / 16][k][16]`: arguments `set, n0, n, panels`.
pub(crate) type PackPanels<'a> = dyn Fn(usize, usize, usize, &mut [f32]) + Sync + 'a;

/// What becomes of accumulators: `out = alpha acc + beta out + bias`.
#[derive(Clone, Copy)]
pub(crate) struct Epilogue {
    pub(crate) out: Mat,
    /// Which rows of `out` count.
    pub(crate) rows: Rows,
    pub(crate) alpha: f32,
    /// With 0, `out` is not read.
    pub(crate) beta: f32,
    pub(crate) bias: Option<Mat>,
    /// Blocks after the first are tangents, which get no bias.
    pub(crate) tangents: bool,
    /// Whether row i of the product is column i of `out`; without bias.
    pub(crate) transposed: bool,
}

impl Epilogue {
    /// Output `out`, factors 1 and 0, no bias.
    pub(crate) fn new(out: Mat, rows: Rows) -> Self {
        Self { out, rows, alpha: 1.0, beta: 0.0, bias: None, tangents: false, transposed: false }
    }

    /// Where sums of rows `numbers` and of `n` columns from `n0` on go if they go there as they are, or are added to what is there.
    fn plain(&self, numbers: &core::ops::Range<usize>, n0: usize, n: usize) -> Option<Out> {
        let (first, last) = (self.rows.at(numbers.start), self.rows.at(numbers.end - 1));
        let as_they_are = self.alpha == 1.0
            && (self.beta == 0.0 || self.beta == 1.0)
            && self.bias.is_none()
            && !self.transposed
            && self.out.dtype == DType::F32;
        (as_they_are && n.is_multiple_of(NR) && last - first + 1 == numbers.len()).then(|| Out {
            first: self.out.part(first, numbers.len(), n0, n).at(0, 0).cast(),
            ld: self.out.stride,
            add: self.beta == 1.0,
        })
    }

    /// Writes columns `n0 ..` of row number `i` from its accumulators, which are lost.
    #[inline(always)]
    fn row(&self, i: usize, n0: usize, acc: &mut [f32]) {
        let r = self.rows.at(i);
        if self.transposed {
            for (c, x) in acc.iter().enumerate() {
                let before = if self.beta != 0.0 { self.beta * self.out.get(n0 + c, r) } else { 0.0 };
                self.out.store(n0 + c, r, &[self.alpha * x + before]);
            }
            return;
        }
        let bias = self.bias.filter(|_| !(self.tangents && self.rows.block(i) > 0));
        if self.alpha != 1.0 {
            acc.iter_mut().for_each(|x| *x *= self.alpha);
        }
        if self.beta != 0.0 {
            self.out.each(r, n0, acc.len(), |c, y| acc[c] += self.beta * y);
        }
        if let Some(bias) = bias {
            bias.each(0, n0, acc.len(), |c, y| acc[c] += y);
        }
        self.out.store(r, n0, acc);
    }
}

/// A product over all rows and columns of an output.
pub(crate) struct Job<'a> {
    pub(crate) left: Left,
    pub(crate) right: Right<'a>,
    /// Rows of the left operand (of the output, for [`Left::Columns`]).
    pub(crate) rows: Rows,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// Output blocks that each row feeds; more than 1 where copies share one input.
    pub(crate) spread: usize,
    /// Whether the blocks after the first get the product too, or its extension alone.
    pub(crate) spread_product: bool,
    pub(crate) extension: Option<Extension<'a>>,
    pub(crate) epilogue: Epilogue,
}

/// Scratch of [`Job::run`].
#[derive(Clone, Copy)]
pub(crate) struct JobScratch {
    acc: Slabs<f32>,
    /// A block's accumulators, where several start from the same product.
    own: Slabs<f32>,
    extension: Slabs<f32>,
    rows: Slabs<*const u8>,
    packing: PackingSlabs,
    /// The left operand in 8 bits, if it is multiplied so.
    blocks: Slab<int8::Block>,
}

impl JobScratch {
    /// Cuts scratch for a product of up to `m` rows and `n` columns, an extension of `sets * width` steps, and a left operand of so many
    /// blocks of 8-bit numbers: 0 where it is multiplied as it is.
    pub(crate) fn carve(c: &mut Carver<'_>, workers: usize, m: usize, n: usize, extension: usize, spread: bool, blocks: usize) -> Self {
        let (m, n) = (m.min(MT), n.next_multiple_of(NR).min(NC));
        Self {
            acc: c.workers(workers, m * n),
            own: c.workers(workers, if spread { m * n } else { 0 }),
            extension: c.workers(workers, extension * n),
            rows: c.workers(workers, m),
            packing: Packing::carve(c, workers, m, n),
            blocks: c.shared(blocks),
        }
    }
}

/// Work below this many multiply-adds stays on the calling thread.
const GATE: usize = 1 << 18;
/// Rows of a task below which its columns are made fewer instead.
const FEWEST: usize = 72;

/// Columns and rows of a task.
///
/// A task reads its rows once for all its columns and its columns once for all its rows, so it is as large as a tile, as long as there are
/// tasks enough to even out what threads are doing beside.
fn grid(threads: usize, m: usize, n: usize, k: usize) -> (usize, usize) {
    let wide = n.next_multiple_of(NR).min(NC);
    if threads == 1 || m.saturating_mul(n).saturating_mul(k) < GATE {
        return (wide, m);
    }
    let want = threads * 4;
    if m <= FEW {
        // Few rows wait for memory: columns are shared out evenly.
        return (n.div_ceil(want).next_multiple_of(2 * NR).min(NC), m);
    }
    // Multiples of every tier's micro-kernel.
    let (panels, rows) = (6 * NR, 18);
    let split = |columns: usize| {
        let across = n.div_ceil(columns);
        let least = want.div_ceil(across).max(m.div_ceil(MT));
        // A number of tasks that threads can share, if there is one nearby.
        let down = (least..least + threads).find(|down| (across * down).is_multiple_of(threads)).unwrap_or(least);
        (columns, m.div_ceil(down).next_multiple_of(rows).min(m))
    };
    match split(NC) {
        (columns, rows) if rows >= FEWEST && n > panels => (columns, rows),
        _ => split(panels),
    }
}

impl Job<'_> {
    /// Runs it.
    ///
    /// # Safety
    /// Operands are as large as the job says; the output overlaps none of them; `scratch` was cut for this job.
    pub(crate) unsafe fn run(&self, cx: &Context<'_>, scratch: &JobScratch) {
        let m = self.rows.len();
        if m == 0 || self.n == 0 {
            return;
        }
        let eight = match (self.left, cx.int8) {
            (Left::Rows(x), Some(int8)) if scratch.blocks.len() > 0 => {
                let left = int8::Rows { blocks: scratch.blocks, per_row: self.k / int8::STEPS };
                cx.pool.split(m, self.k, &|rows, _| {
                    for i in rows {
                        // Safety: the scratch has blocks for all rows, each of which is one task's.
                        let row = unsafe { left.blocks.part(i * left.per_row, left.per_row).get_mut() };
                        int8::quantise(cx.tier, &x, self.rows.at(i), row);
                    }
                });
                Some((int8, left))
            }
            _ => None,
        };
        let (columns, rows) = grid(cx.pool.threads(), m, self.n, self.k);
        let (across, down) = (self.n.div_ceil(columns), m.div_ceil(rows));
        // Row by row of the grid: neighbours in time share the left operand.
        cx.pool.run(across * down, &|task, worker| {
            let (n0, m0) = (task % across * columns, task / across * rows);
            let n = min(columns, self.n - n0);
            // Safety: the caller's promise; the worker's slabs are its own, and tasks write disjoint parts of the output.
            unsafe { self.task(cx, scratch, worker, eight, n0, n, m0..min(m0 + rows, m)) };
        });
    }

    #[allow(clippy::too_many_arguments)]
    unsafe fn task(
        &self,
        cx: &Context<'_>,
        scratch: &JobScratch,
        worker: usize,
        eight: Option<(&int8::Int8, int8::Rows)>,
        n0: usize,
        n: usize,
        m: core::ops::Range<usize>,
    ) {
        let ld = n.next_multiple_of(NR);
        let acc = Tile { acc: scratch.acc.of(worker), ld };
        let own = Tile { acc: scratch.own.of(worker), ld };
        let packing = scratch.packing.of(worker);
        let panels = scratch.extension.of(worker);
        let live = self.epilogue.rows.live;
        if let Some(x) = &self.extension {
            let blocks = match (x.sets, self.spread) {
                (1, _) => 0..1,
                (_, 1) => m.start / live..(m.end - 1) / live + 1,
                (sets, _) => 0..sets,
            };
            for set in blocks {
                // Safety: the slab is the worker's.
                let dst = unsafe { panels.part(set * x.width * ld, (x.k)(set) * ld).get_mut() };
                (x.pack)(set, n0, n, dst);
            }
        }
        let step = scratch.acc.of(worker).len() / ld;
        for m0 in m.clone().step_by(step.min(MT)) {
            let rows = m0..min(m0 + step.min(MT), m.end);
            // Safety: the caller's promise; slabs are the worker's.
            unsafe {
                match &eight {
                    Some((int8, left)) => {
                        let e = Extent { m: rows.len(), n0, n, k: self.k, right_k: 0, fresh: true };
                        int8::product(int8, left, rows.start, &self.right, e, acc, &packing);
                    }
                    None => {
                        let done = self.spread == 1 && self.extension.is_none() && self.k > 0;
                        let out = if done { self.epilogue.plain(&rows, n0, n) } else { None };
                        self.base(cx, scratch.rows.of(worker), &packing, n0, n, rows.clone(), acc, out);
                        if out.is_some() {
                            continue;
                        }
                    }
                }
                if self.spread == 1 {
                    // Rows of different blocks in turn: each block has its own extension.
                    let mut first = rows.start;
                    while first < rows.end {
                        let block = first / live;
                        let end = min((block + 1) * live, rows.end);
                        let part = Tile { acc: acc.acc.part((first - rows.start) * ld, (end - first) * ld), ld };
                        self.finish(cx, scratch.rows.of(worker), &packing, panels, n0, n, block, first..end, part);
                        first = end;
                    }
                } else {
                    for block in 0..self.spread {
                        for i in 0..rows.len() {
                            match block == 0 || self.spread_product {
                                true => own.row(i).copy_from_slice(acc.row(i)),
                                false => own.row(i).fill(0.0),
                            }
                        }
                        let numbers = block * live + rows.start..block * live + rows.end;
                        self.finish(cx, scratch.rows.of(worker), &packing, panels, n0, n, block, numbers, own);
                    }
                }
            }
        }
    }

    /// The product of a tile's rows.
    #[allow(clippy::too_many_arguments)]
    unsafe fn base(
        &self,
        cx: &Context<'_>,
        pointers: Slab<*const u8>,
        packing: &Packing,
        n0: usize,
        n: usize,
        rows: core::ops::Range<usize>,
        acc: Tile,
        out: Option<Out>,
    ) {
        let e = Extent { m: rows.len(), n0, n, k: self.k, right_k: 0, fresh: true };
        // Safety: the caller's promise.
        unsafe {
            match self.left {
                Left::Rows(a) => {
                    let pointers = pointers.part(0, rows.len()).get_mut();
                    pointers.iter_mut().zip(rows).for_each(|(p, i)| *p = a.at(self.rows.at(i), 0));
                    let left = super::Left::Rows { rows: pointers, dtype: a.dtype };
                    product_into(cx.gemm, &left, &self.right, e, acc, packing, out);
                }
                Left::Columns(a, counted) => {
                    for block in 0..counted.blocks {
                        let k0 = block * counted.height;
                        let left = super::Left::Columns { matrix: a, first: rows.start, k0 };
                        let e = Extent { k: counted.live, right_k: k0, fresh: block == 0, ..e };
                        let out = out.filter(|_| block + 1 == counted.blocks);
                        product_into(cx.gemm, &left, &self.right, e, acc, packing, out);
                    }
                }
            }
        }
    }

    /// Extension and epilogue of rows of one block.
    #[allow(clippy::too_many_arguments)]
    unsafe fn finish(
        &self,
        cx: &Context<'_>,
        pointers: Slab<*const u8>,
        packing: &Packing,
        panels: Slab<f32>,
        n0: usize,
        n: usize,
        block: usize,
        numbers: core::ops::Range<usize>,
        tile: Tile,
    ) {
        if let Some(x) = &self.extension {
            let set = if x.sets == 1 { 0 } else { block };
            let k = (x.k)(set);
            // Safety: the caller's promise; the panels of this set were made for this task.
            unsafe {
                let right = Right::packed(panels.part(set * x.width * tile.ld, k * tile.ld).ptr(), n, k);
                let pointers = pointers.part(0, numbers.len()).get_mut();
                pointers
                    .iter_mut()
                    .zip(numbers.clone())
                    .for_each(|(p, i)| *p = x.left.part(i * x.width, x.width).ptr().cast_const().cast());
                let left = super::Left::Rows { rows: pointers, dtype: DType::F32 };
                let e = Extent { m: numbers.len(), n0: 0, n, k, right_k: 0, fresh: false };
                let out = if k > 0 { self.epilogue.plain(&numbers, n0, n) } else { None };
                product_into(cx.gemm, &left, &right, e, tile, packing, out);
                if out.is_some() {
                    return;
                }
            }
        }
        write(cx.tier, &self.epilogue, numbers, n0, n, tile);
    }
}

tiered! {
    /// Rows `numbers` of the output, columns `n0 .. n0 + n`, from their accumulators, which are the calling thread's.
    fn write<'a>(epilogue: &'a Epilogue, numbers: core::ops::Range<usize>, n0: usize, n: usize, tile: Tile) {
        for (i, number) in numbers.enumerate() {
            // Safety: the tile is this thread's.
            epilogue.row(number, n0, unsafe { &mut tile.row(i)[..n] });
        }
    }
}
