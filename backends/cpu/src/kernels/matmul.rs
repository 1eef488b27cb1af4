//! Matrix products: plain, with LoRA, and with perturbed LoRA.

use super::{Context, check_direction, noise_params, primitive::add_noise};
use crate::{
    gemm::{
        Epilogue, Extension, Extent, INT8_STEPS, Job, JobLeft, JobScratch, Left, MT, NR, Packing, PackingSlabs, Right, Tile, pack_factor,
        product,
    },
    isa::tiered,
    scratch::{Carver, Slab, Slabs},
    view::{Mat, Rows},
};
use core::{cmp::min, ops::Range};
use zofo_hal::{
    Matrix, Operand, Result, TensorArg,
    op::{Copies, Form, LoraMatMul, MatMul, Orientation, PerturbLoraMatMul},
    perturb::{NoiseParams, Site, Tier},
};

/// Blocks that `x` is rounded to 8 bits in, where it meets `w` as `x W^T`: 0 if it is not.
fn int8_blocks<T: Operand>(x: &T, w: &Matrix<T>, c: &Carver<'_>) -> usize {
    let [rows, cols] = x.spec().shape();
    match w {
        Matrix::Weight(w) if c.int8() && T::weight_spec(w).dtype.is_quantised() => rows * (cols / INT8_STEPS),
        _ => 0,
    }
}

pub(super) fn matmul_scratch<T: Operand>(op: &MatMul<T>, threads: usize, c: &mut Carver<'_>) -> JobScratch {
    let [m, n] = op.out.spec().shape();
    let blocks = if op.orientation == Orientation::Nt { int8_blocks(&op.a, &op.b, c) } else { 0 };
    JobScratch::carve(c, threads, m, n, 0, false, blocks)
}

pub(super) unsafe fn matmul(op: &MatMul<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (a, bias, live, out) = unsafe { (Mat::of(&op.a)?, Mat::of_opt(&op.bias)?, Mat::of_opt(&op.live)?, Mat::of(&op.out)?) };
    // Safety: as above.
    let right = unsafe { Right::of(&op.b, op.orientation != Orientation::Nt)? };
    let blocks = op.copies.total();
    let tn = op.orientation == Orientation::Tn;
    let counted = Rows::new(if tn { a.rows } else { out.rows }, blocks, live)?;
    let (left, rows, k) = match tn {
        true => (JobLeft::Columns(a, counted), Rows::new(out.rows, 1, None)?, counted.len()),
        false => (JobLeft::Rows(a), counted, a.cols),
    };
    let epilogue = Epilogue { alpha: op.alpha, beta: op.beta, bias, tangents: !tn && op.copies.is_tangent(1), ..Epilogue::new(out, rows) };
    let job = Job { left, right, rows, n: out.cols, k, spread: 1, spread_product: true, extension: None, epilogue };
    // Safety: the op's check has compared all shapes; outputs overlap nothing.
    unsafe { job.run(cx, &matmul_scratch(op, cx.pool.threads(), &mut cx.carver())) };
    Ok(())
}

/// A linear layer with an adapter, perturbed or not.
struct Lora<'a> {
    x: Mat,
    a: Mat,
    b: Mat,
    w: Right<'a>,
    bias: Option<Mat>,
    out: Mat,
    /// Where `x A^T` goes: of all rows, or of the base block.
    xa: Option<Mat>,
    scale: f32,
    /// Rows of the output.
    rows: Rows,
    copies: Copies,
    shared_input: bool,
    /// None: every block has the same factors.
    noise: Option<Perturbation>,
}

#[derive(Clone, Copy)]
struct Perturbation {
    params: NoiseParams,
    tier: Tier,
    site_a: Option<Site>,
    site_b: Option<Site>,
}

/// Which factor values a panel is packed from.
#[derive(Clone, Copy)]
enum Values {
    /// The factor.
    Plain,
    /// The factor plus eps z of a copy.
    Perturbed(u32),
    /// z of a copy.
    Direction(u32),
}

impl Perturbation {
    /// Values `(r, c ..)` of a factor.
    #[inline(always)]
    fn values(&self, factor: &Mat, site: Option<Site>, values: Values, r: usize, c: usize, out: &mut [f32]) {
        let mut plain = [0.0f32; 128];
        match (values, site) {
            (Values::Direction(copy), Some(site)) => self.params.noise(copy, site, self.tier).z_into(r as u32, c as u32, out),
            (Values::Direction(_), None) => out.fill(0.0),
            (Values::Perturbed(copy), Some(site)) => {
                let plain = &mut plain[..out.len()];
                factor.load(r, c, plain);
                add_noise(&self.params.noise(copy, site, self.tier), r, c, plain, self.params.epsilon, out);
            }
            _ => factor.load(r, c, out),
        }
    }
}

/// Scratch of a [`Lora`].
pub(super) struct LoraScratch {
    job: JobScratch,
    /// `x A^T` as the second product reads it, `[output rows, width]`.
    low: Slab<f32>,
    /// Panels of A as one copy sees it, `[rank / 16][inputs][16]`.
    factor: Slabs<f32>,
    tile: Slabs<f32>,
    pointers: Slabs<*const u8>,
    packing: PackingSlabs,
}

/// Sizes that decide about scratch.
struct Sizes {
    rows: usize,
    inputs: usize,
    outputs: usize,
    rank: usize,
    sets: usize,
    width: usize,
    spread: bool,
    blocks: usize,
}

impl LoraScratch {
    fn carve(s: &Sizes, threads: usize, c: &mut Carver<'_>) -> Self {
        let panels = s.rank.next_multiple_of(NR);
        let m = min(s.rows, MT);
        Self {
            job: JobScratch::carve(c, threads, s.rows, s.outputs, s.sets * s.width, s.spread, s.blocks),
            low: c.shared(s.rows * s.width),
            factor: c.workers(threads, panels * s.inputs),
            tile: c.workers(threads, m * panels),
            pointers: c.workers(threads, m),
            // A's panels are f32 already.
            packing: Packing::carve(c, threads, m, 0),
        }
    }
}

tiered! {
    /// Stores the product of `numbers` with A: scaled into the second product's operand, and as it is where the caller wants it.
    fn keep<'a>(numbers: Range<usize>, tile: Tile, rank: usize, scale: f32, width: usize, low: Slab<f32>, xa: Option<Mat>, rows: &'a Rows) {
        for (j, i) in numbers.enumerate() {
            // Safety: the tile and these rows of `low` are this task's.
            let (acc, low) = unsafe { (&tile.row(j)[..rank], low.part(i * width, rank).get_mut()) };
            low.iter_mut().zip(acc).for_each(|(l, a)| *l = scale * *a);
            if let Some(xa) = &xa {
                xa.store(rows.at(i), 0, acc);
            }
        }
    }
}

impl Lora<'_> {
    fn rank(&self) -> usize {
        self.a.rows
    }

    fn tangent(&self, block: usize) -> bool {
        self.noise.is_some() && self.copies.is_tangent(block)
    }

    /// Copy that block `block` is, where it is one.
    fn copy(&self, block: usize) -> Option<u32> {
        block.checked_sub(self.copies.first_copy()).map(|c| c as u32)
    }

    /// Values of A (and B) that block `block` is multiplied with first.
    fn own_values(&self, block: usize) -> Values {
        match (self.copies.form, self.copy(block)) {
            (Form::Value, Some(copy)) => Values::Perturbed(copy),
            _ => Values::Plain,
        }
    }

    /// Row of `x` that output row `i` starts from.
    fn input(&self, i: usize) -> usize {
        if self.shared_input { i % self.rows.live } else { self.rows.at(i) }
    }

    /// Runs it.
    ///
    /// # Safety
    /// As for [`super::run`]; shapes fit.
    unsafe fn run(&self, cx: &Context<'_>, s: &LoraScratch, width: usize) {
        if self.rows.len() == 0 {
            return;
        }
        let plain = Perturbation { params: NoiseParams::default(), tier: cx.noise, site_a: None, site_b: None };
        let noise = self.noise.unwrap_or(plain);
        // Without noise all blocks are alike: their rows are one block.
        let blocks = if self.noise.is_some() { self.rows.blocks } else { 1 };
        let live = self.rows.len() / blocks;
        // Tangents need x A^T of their base rows, so the base goes first.
        let first = if self.copies.form == Form::Tangent { min(1, blocks) } else { blocks };
        for range in [0..first, first..blocks] {
            // Safety: the caller's promise.
            unsafe { self.low_rank(cx, s, width, &noise, range, live) };
        }

        let rank = self.rank();
        let steps = |block: usize| if self.tangent(block) { width } else { rank };
        let pack = |set: usize, n0: usize, n: usize, dst: &mut [f32]| {
            let (own, k) = (self.own_values(set), steps(set));
            let tangent = if k > rank { self.copy(set) } else { None };
            pack_factor(n, k, dst, |j, c, out| {
                // Of a tangent the first `rank` steps meet B, the others z of B.
                let near = rank.saturating_sub(c).min(out.len());
                let (left, right) = out.split_at_mut(near);
                if !left.is_empty() {
                    noise.values(&self.b, noise.site_b, own, n0 + j, c, left);
                }
                if let (Some(copy), false) = (tangent, right.is_empty()) {
                    noise.values(&self.b, noise.site_b, Values::Direction(copy), n0 + j, (c + near) - rank, right);
                }
            });
        };
        let sets = blocks;
        let extension = Extension { left: s.low, width, sets, k: &steps, pack: &pack };
        let tangents = self.copies.is_tangent(1);
        let epilogue = Epilogue { bias: self.bias, tangents, ..Epilogue::new(self.out, self.rows) };
        let spread = if self.shared_input { blocks } else { 1 };
        let rows = if self.shared_input { Rows { blocks: 1, ..self.rows } } else { self.rows };
        let job = Job {
            left: JobLeft::Rows(self.x),
            right: self.w,
            rows,
            n: self.out.cols,
            k: self.x.cols,
            spread,
            spread_product: self.copies.form == Form::Value,
            extension: Some(extension),
            epilogue,
        };
        // Safety: the caller's promise.
        unsafe { job.run(cx, &s.job) };
    }

    /// `x A^T` of `blocks`, each of `live` rows, as its form wants it, scaled, into the operand of the second product.
    unsafe fn low_rank(&self, cx: &Context<'_>, s: &LoraScratch, width: usize, noise: &Perturbation, blocks: Range<usize>, live: usize) {
        if blocks.is_empty() {
            return;
        }
        let (rank, inputs) = (self.rank(), self.x.cols);
        let panels = rank.next_multiple_of(NR);
        // A task makes the panels of its copy, so rows of a block are split only as far as threads need it.
        let want = (cx.pool.threads() * 2).div_ceil(blocks.len());
        let small = blocks.len() * live * inputs * panels < 1 << 20;
        let per_task = if small { live } else { live.div_ceil(want).next_multiple_of(18).max(36).min(live) };
        let per_block = live.div_ceil(per_task);
        let work = |task: usize, worker: usize| {
            let block = blocks.start + task / per_block;
            let first = block * live + task % per_block * per_task;
            let end = min(first + per_task, (block + 1) * live);
            // Safety: the worker's slabs; tasks keep disjoint rows.
            unsafe {
                let factor = s.factor.of(worker).part(0, panels * inputs);
                let packing = s.packing.of(worker);
                let right = Right::packed(factor.ptr(), rank, inputs);
                let pack = |values: Values| {
                    pack_factor(rank, inputs, factor.get_mut(), |j, c, out| noise.values(&self.a, noise.site_a, values, j, c, out));
                };
                let room = s.tile.of(worker);
                let step = min(MT, room.len() / panels.max(1)).max(1);
                let multiply = |rows: Range<usize>, input: &dyn Fn(usize) -> usize, fresh: bool| {
                    let pointers = s.pointers.of(worker).part(0, rows.len()).get_mut();
                    pointers.iter_mut().zip(rows.clone()).for_each(|(p, i)| *p = self.x.at(input(i), 0));
                    let left = Left::Rows { rows: pointers, dtype: self.x.dtype };
                    let e = Extent { m: rows.len(), n0: 0, n: rank, k: inputs, right_k: 0, fresh };
                    product(cx.gemm, &left, &right, e, Tile { acc: room, ld: panels }, &packing);
                };
                let tile = Tile { acc: room, ld: panels };
                if !self.tangent(block) {
                    pack(self.own_values(block));
                    for i in (first..end).step_by(step) {
                        let rows = i..min(i + step, end);
                        multiply(rows.clone(), &|i| self.input(i), true);
                        let xa = self.xa.filter(|_| self.noise.is_none() || block == 0);
                        keep(cx.tier, rows, tile, rank, self.scale, width, s.low, xa, &self.rows);
                    }
                    return;
                }
                // dx A^T + x zA^T, and beside it the base's x A^T for z of B. The rows of a tile pass twice, each time with other panels,
                // so a task of several tiles makes its panels again for each.
                let copy = self.copy(block).unwrap_or(0);
                for i in (first..end).step_by(step) {
                    let rows = i..min(i + step, end);
                    let mut fresh = true;
                    if !self.shared_input {
                        pack(Values::Plain);
                        multiply(rows.clone(), &|i| self.rows.at(i), true);
                        fresh = false;
                    }
                    if noise.site_a.is_some() {
                        pack(Values::Direction(copy));
                        multiply(rows.clone(), &|i| i % live, fresh);
                    } else if fresh {
                        (0..rows.len()).for_each(|j| tile.row(j).fill(0.0));
                    }
                    keep(cx.tier, rows.clone(), tile, rank, self.scale, width, s.low, None, &self.rows);
                    if width > rank {
                        for i in rows {
                            let base = s.low.part(i % live * width, rank).get();
                            s.low.part(i * width + rank, rank).get_mut().copy_from_slice(base);
                        }
                    }
                }
            }
        };
        cx.pool.run(blocks.len() * per_block, &work);
    }
}

pub(super) fn lora_matmul_scratch<T: Operand>(op: &LoraMatMul<T>, threads: usize, c: &mut Carver<'_>) -> LoraScratch {
    let ([rows, inputs], rank) = (op.x.spec().shape(), op.a.spec().rows);
    let outputs = op.out.spec().cols;
    LoraScratch::carve(
        &Sizes { rows, inputs, outputs, rank, sets: 1, width: rank, spread: false, blocks: int8_blocks(&op.x, &op.w, c) },
        threads,
        c,
    )
}

pub(super) unsafe fn lora_matmul(op: &LoraMatMul<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let lora = unsafe {
        let rows = Rows::new(op.out.spec.rows, op.copies.total(), Mat::of_opt(&op.live)?)?;
        Lora {
            x: Mat::of(&op.x)?,
            a: Mat::of(&op.a)?,
            b: Mat::of(&op.b)?,
            w: Right::of(&op.w, false)?,
            bias: Mat::of_opt(&op.bias)?,
            out: Mat::of(&op.out)?,
            xa: Mat::of_opt(&op.xa)?,
            scale: op.scale,
            rows,
            copies: op.copies,
            shared_input: false,
            noise: None,
        }
    };
    let scratch = lora_matmul_scratch(op, cx.pool.threads(), &mut cx.carver());
    // Safety: as above; the op's check has compared all shapes.
    unsafe { lora.run(cx, &scratch, op.a.spec.rows) };
    Ok(())
}

/// Steps of a block's second product: the rank, and once more for the tangent of B.
fn width<T: Operand>(op: &PerturbLoraMatMul<T>) -> usize {
    let rank = op.a.spec().rows;
    if op.copies.form == Form::Tangent && op.site_b.is_some() { 2 * rank } else { rank }
}

pub(super) fn perturb_lora_matmul_scratch<T: Operand>(op: &PerturbLoraMatMul<T>, threads: usize, c: &mut Carver<'_>) -> LoraScratch {
    let ([rows, outputs], [rank, inputs]) = (op.out.spec().shape(), op.a.spec().shape());
    let (sets, width) = (op.copies.total(), width(op));
    LoraScratch::carve(
        &Sizes { rows, inputs, outputs, rank, sets, width, spread: op.shared_input, blocks: int8_blocks(&op.x, &op.w, c) },
        threads,
        c,
    )
}

pub(super) unsafe fn perturb_lora_matmul(op: &PerturbLoraMatMul<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let params = noise_params(&unsafe { Mat::of(&op.noise)? });
    for copy in 0..op.copies.count {
        check_direction(&params, copy)?;
    }
    // Safety: the caller's promise.
    let lora = unsafe {
        let rows = Rows::new(op.out.spec.rows, op.copies.total(), Mat::of_opt(&op.live)?)?;
        Lora {
            x: Mat::of(&op.x)?,
            a: Mat::of(&op.a)?,
            b: Mat::of(&op.b)?,
            w: Right::of(&op.w, false)?,
            bias: Mat::of_opt(&op.bias)?,
            out: Mat::of(&op.out)?,
            xa: Mat::of_opt(&op.xa)?,
            scale: op.scale,
            rows,
            copies: op.copies,
            shared_input: op.shared_input,
            noise: Some(Perturbation { params, tier: cx.noise, site_a: op.site_a, site_b: op.site_b }),
        }
    };
    let scratch = perturb_lora_matmul_scratch(op, cx.pool.threads(), &mut cx.carver());
    // Safety: as above; the op's check has compared all shapes.
    unsafe { lora.run(cx, &scratch, width(op)) };
    Ok(())
}
