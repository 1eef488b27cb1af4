//! Optimiser updates: fixed sequences of separately rounded f32 operations.

use super::{CHUNK, Context, Grid, noise_params};
use crate::{
    isa::tiered,
    math,
    scratch::{Carver, Slab},
    view::Mat,
};
use alloc::format;
use core::ops::Range;
use zofo_hal::{
    Error, Operand, Result, TensorArg,
    op::{AdamW, HyperParams, Optimiser, Sgd, ZoUpdate},
    perturb::{Direction, Noise},
};

/// The hyperparameters as they are now.
fn hyper_params(hyper: &Mat) -> HyperParams {
    let values: [f32; HyperParams::LEN] = core::array::from_fn(|i| hyper.get(0, i));
    bytemuck::cast(values)
}

#[inline(always)]
fn sgd_rule(h: &HyperParams, p: &mut [f32], g: &[f32]) {
    for (p, g) in p.iter_mut().zip(g) {
        let g = h.grad_scale * *g;
        *p = h.decay * *p - h.step_size * g;
    }
}

#[inline(always)]
fn adamw_rule(h: &HyperParams, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        let g = h.grad_scale * *g;
        let decayed = h.decay * *p;
        *m = h.beta1 * *m + h.one_minus_beta1 * g;
        *v = h.beta2 * *v + h.one_minus_beta2 * g * g;
        let d = math::sqrt(*v) / h.sqrt_bias2 + h.eps;
        *p = decayed - h.step_size * (*m / d);
    }
}

tiered! {
    /// One rule on pieces of a tensor; the gradient is a tensor, or the noise of several directions.
    fn update_pieces<'a>(
        pieces: Range<usize>, grid: Grid, h: HyperParams, param: Mat, moments: Option<(Mat, Mat)>, grad: Option<Mat>,
        zo: Option<&'a Directions>,
    ) {
        let (mut p, mut g, mut m, mut v) = ([0.0f32; CHUNK], [0.0f32; CHUNK], [0.0f32; CHUNK], [0.0f32; CHUNK]);
        for piece in pieces {
            let (r, c, n) = grid.at(piece);
            let (p, g, m, v) = (&mut p[..n], &mut g[..n], &mut m[..n], &mut v[..n]);
            param.load(r, c, p);
            g.fill(0.0);
            if let Some(grad) = &grad {
                grad.load(r, c, g);
            }
            if let Some(zo) = &zo {
                zo.add(r, c, g);
            }
            match &moments {
                None => sgd_rule(&h, p, g),
                Some((first, second)) => {
                    first.load(r, c, m);
                    second.load(r, c, v);
                    adamw_rule(&h, p, g, m, v);
                    first.store(r, c, m);
                    second.store(r, c, v);
                }
            }
            param.store(r, c, p);
        }
    }
}

pub(super) unsafe fn sgd(op: &Sgd<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (grad, hyper, param) = unsafe { (Mat::of(&op.grad)?, Mat::of(&op.hyper)?, Mat::of(&op.param)?) };
    let (h, grid) = (hyper_params(&hyper), Grid::new(param.cols));
    cx.pool.split(grid.pieces(param.rows), grid.cost(1), &|p, _| update_pieces(cx.tier, p, grid, h, param, None, Some(grad), None));
    Ok(())
}

pub(super) unsafe fn adamw(op: &AdamW<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (grad, hyper, param) = unsafe { (Mat::of(&op.grad)?, Mat::of(&op.hyper)?, Mat::of(&op.param)?) };
    // Safety: as above.
    let moments = unsafe { Some((Mat::of(&op.m)?, Mat::of(&op.v)?)) };
    let (h, grid) = (hyper_params(&hyper), Grid::new(param.cols));
    cx.pool.split(grid.pieces(param.rows), grid.cost(4), &|p, _| update_pieces(cx.tier, p, grid, h, param, moments, Some(grad), None));
    Ok(())
}

/// A zeroth-order gradient: coefficients and direction words of one tensor.
struct Directions {
    noise: Noise,
    coefficients: Slab<f32>,
    words: Slab<u32>,
}

impl Directions {
    /// Adds the gradient of the run that begins at element (r, c).
    #[inline(always)]
    fn add(&self, r: usize, c: usize, g: &mut [f32]) {
        // Safety: both were written before the threads began, and are only read since. The call fails only for different lengths.
        let _ = unsafe { self.noise.accumulate(r as u32, c as u32, g, self.coefficients.get(), self.words.get()) };
    }
}

pub(super) fn zo_update_scratch<T: Operand>(op: &ZoUpdate<T>, _: usize, c: &mut Carver<'_>) -> (Slab<f32>, Slab<u32>) {
    let n = op.coefficients.spec().cols;
    (c.shared(n), c.shared(n))
}

pub(super) unsafe fn zo_update(op: &ZoUpdate<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (coefficients, directions, noise) = unsafe { (Mat::of(&op.coefficients)?, Mat::of(&op.directions)?, Mat::of(&op.noise)?) };
    // Safety: as above.
    let (hyper, param, m, v) = unsafe { (Mat::of(&op.hyper)?, Mat::of(&op.param)?, Mat::of_opt(&op.m)?, Mat::of_opt(&op.v)?) };
    let (h, grid, n) = (hyper_params(&hyper), Grid::new(param.cols), coefficients.cols);
    let (c, words) = zo_update_scratch(op, cx.pool.threads(), &mut cx.carver());
    // Safety: no thread runs yet.
    unsafe {
        coefficients.load(0, 0, c.get_mut());
        words.get_mut().iter_mut().enumerate().for_each(|(i, w)| *w = directions.word(0, i));
    }
    for i in 0..n {
        let word = directions.word(0, i);
        Direction::from_word(word).map_err(|e| Error::execution(format!("directions[{i}]: {}", e.message())))?;
    }
    let noise = noise_params(&noise).noise(0, op.site, cx.noise);
    let zo = Directions { noise, coefficients: c, words };
    let moments = if op.optimiser == Optimiser::AdamW { m.zip(v) } else { None };
    let cost = grid.cost(8 * n.max(1));
    cx.pool.split(grid.pieces(param.rows), cost, &|p, _| update_pieces(cx.tier, p, grid, h, param, moments, None, Some(&zo)));
    Ok(())
}
