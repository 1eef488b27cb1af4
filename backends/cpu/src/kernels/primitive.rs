//! Primitives.

use super::{CHUNK, Context, Grid, check_direction, noise_params};
use crate::{
    isa::tiered,
    math,
    view::{Mat, Rows, check_indices},
};
use alloc::{format, vec};
use core::ops::Range;
use zofo_hal::{
    DType, Error, Result, TensorArg,
    op::{
        Cast, Copy, Fill, GatherRows, Map, MapFunction, Mul, NO_INDEX, Perturb, PhiloxWords, Reduction, RowReduce, ScaledAdd, ScatterRows,
        SumSquares,
    },
    perturb::Noise,
};

pub(super) unsafe fn copy(op: &Copy<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (src, dst) = unsafe { (Mat::of(&op.src)?, Mat::of(&op.dst)?) };
    cx.pool.split(src.rows, src.cols, &|rows, _| rows.for_each(|r| dst.copy_row(r, &src, r)));
    Ok(())
}

pub(super) unsafe fn fill(op: &Fill<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let dst = unsafe { Mat::of(&op.dst)? };
    let value = op.value;
    cx.pool.split(dst.rows, dst.cols, &|rows, _| {
        let chunk = [value; CHUNK];
        for r in rows {
            if dst.dtype == DType::U32 {
                (0..dst.cols).for_each(|c| dst.set_word(r, c, value as u32));
                continue;
            }
            for c in (0..dst.cols).step_by(CHUNK) {
                dst.store(r, c, &chunk[..CHUNK.min(dst.cols - c)]);
            }
        }
    });
    Ok(())
}

tiered! {
    fn cast_pieces(pieces: Range<usize>, grid: Grid, src: Mat, dst: Mat) {
        let mut x = [0.0f32; CHUNK];
        for piece in pieces {
            let (r, c, n) = grid.at(piece);
            src.load(r, c, &mut x[..n]);
            dst.store(r, c, &x[..n]);
        }
    }
}

pub(super) unsafe fn cast(op: &Cast<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (src, dst) = unsafe { (Mat::of(&op.src)?, Mat::of(&op.dst)?) };
    let grid = Grid::new(src.cols);
    cx.pool.split(grid.pieces(src.rows), grid.cost(1), &|p, _| cast_pieces(cx.tier, p, grid, src, dst));
    Ok(())
}

/// Elements of an operand that may be one row or one column of an output with `cols` columns.
#[inline(always)]
fn load_broadcast(b: &Mat, cols: usize, r: usize, c: usize, out: &mut [f32]) {
    let row = if b.rows == 1 { 0 } else { r };
    match b.cols == cols {
        true => b.load(row, c, out),
        false => out.fill(b.get(row, 0)),
    }
}

tiered! {
    fn scaled_add_pieces(
        pieces: Range<usize>, grid: Grid, rows: Rows, a: Mat, b: Option<Mat>, out: Mat, alpha: f32, beta: f32, gamma: f32,
    ) {
        let (mut x, mut y) = ([0.0f32; CHUNK], [0.0f32; CHUNK]);
        for piece in pieces {
            let (i, c, n) = grid.at(piece);
            let r = rows.at(i);
            let (x, y) = (&mut x[..n], &mut y[..n]);
            a.load(r, c, x);
            match &b {
                Some(b) => {
                    load_broadcast(b, out.cols, r, c, y);
                    x.iter_mut().zip(&*y).for_each(|(x, y)| *x = (alpha * *x + beta * *y) + gamma);
                }
                None => x.iter_mut().for_each(|x| *x = (alpha * *x + 0.0) + gamma),
            }
            out.store(r, c, x);
        }
    }
}

pub(super) unsafe fn scaled_add(op: &ScaledAdd<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (a, b, out, live) = unsafe { (Mat::of(&op.a)?, Mat::of_opt(&op.b)?, Mat::of(&op.out)?, Mat::of_opt(&op.live)?) };
    let (rows, grid) = (Rows::new(out.rows, op.blocks, live)?, Grid::new(out.cols));
    cx.pool.split(grid.pieces(rows.len()), grid.cost(1), &|p, _| {
        scaled_add_pieces(cx.tier, p, grid, rows, a, b, out, op.alpha, op.beta, op.gamma);
    });
    Ok(())
}

tiered! {
    fn mul_pieces(pieces: Range<usize>, grid: Grid, rows: Rows, a: Mat, b: Mat, out: Mat, accumulate: bool) {
        let (mut x, mut y, mut z) = ([0.0f32; CHUNK], [0.0f32; CHUNK], [0.0f32; CHUNK]);
        for piece in pieces {
            let (i, c, n) = grid.at(piece);
            let r = rows.at(i);
            let (x, y, z) = (&mut x[..n], &mut y[..n], &mut z[..n]);
            a.load(r, c, x);
            load_broadcast(&b, out.cols, r, c, y);
            x.iter_mut().zip(&*y).for_each(|(x, y)| *x *= *y);
            if accumulate {
                out.load(r, c, z);
                x.iter_mut().zip(&*z).for_each(|(x, z)| *x += *z);
            }
            out.store(r, c, x);
        }
    }
}

pub(super) unsafe fn mul(op: &Mul<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (a, b, out, live) = unsafe { (Mat::of(&op.a)?, Mat::of(&op.b)?, Mat::of(&op.out)?, Mat::of_opt(&op.live)?) };
    let (rows, grid) = (Rows::new(out.rows, op.blocks, live)?, Grid::new(out.cols));
    cx.pool.split(grid.pieces(rows.len()), grid.cost(1), &|p, _| mul_pieces(cx.tier, p, grid, rows, a, b, out, op.accumulate));
    Ok(())
}

/// f(high + low), where `high` is an argument rounded to f32 and `low` what rounding lost: without it the error of the argument would be
/// magnified in e^x.
#[inline(always)]
fn apply(function: MapFunction, high: f32, low: f32, exact: f64) -> f32 {
    match function {
        MapFunction::Exp => math::exp(high) * (1.0 + low),
        MapFunction::Sigmoid | MapFunction::Silu => {
            let s = math::sigmoid(high);
            let s = s + s * (1.0 - s) * low;
            if function == MapFunction::Silu { high * s + low * s } else { s }
        }
        MapFunction::Ln => libm::log(exact) as f32,
        MapFunction::Rsqrt => (1.0 / sqrt64(exact)) as f32,
        MapFunction::Recip => (1.0 / exact) as f32,
        MapFunction::Sqrt => sqrt64(exact) as f32,
        // A function that this version does not know: `supports` is the table's answer, so one is never submitted.
        _ => f32::NAN,
    }
}

#[inline(always)]
fn sqrt64(x: f64) -> f64 {
    #[cfg(feature = "std")]
    return x.sqrt();
    #[cfg(not(feature = "std"))]
    return libm::sqrt(x);
}

tiered! {
    fn map_pieces(pieces: Range<usize>, grid: Grid, rows: Rows, x: Mat, out: Mat, function: MapFunction, scale: f32, shift: f32) {
        let mut v = [0.0f32; CHUNK];
        for piece in pieces {
            let (i, c, n) = grid.at(piece);
            let r = rows.at(i);
            let v = &mut v[..n];
            x.load(r, c, v);
            macro_rules! each {
                ($($f:ident)*) => {
                    match function {
                        $(MapFunction::$f => v.iter_mut().for_each(|v| {
                            let exact = f64::from(scale) * f64::from(*v) + f64::from(shift);
                            let high = exact as f32;
                            let low = if high.is_finite() { (exact - f64::from(high)) as f32 } else { 0.0 };
                            *v = apply(MapFunction::$f, high, low, exact);
                        }),)*
                        _ => v.iter_mut().for_each(|v| *v = f32::NAN),
                    }
                };
            }
            each!(Exp Ln Sigmoid Silu Rsqrt Recip Sqrt);
            out.store(r, c, v);
        }
    }
}

pub(super) unsafe fn map(op: &Map<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (x, out, live) = unsafe { (Mat::of(&op.x)?, Mat::of(&op.out)?, Mat::of_opt(&op.live)?) };
    let (rows, grid) = (Rows::new(out.rows, op.blocks, live)?, Grid::new(out.cols));
    cx.pool.split(grid.pieces(rows.len()), grid.cost(8), &|p, _| {
        map_pieces(cx.tier, p, grid, rows, x, out, op.function, op.scale, op.shift);
    });
    Ok(())
}

tiered! {
    fn reduce_rows(numbers: Range<usize>, rows: Rows, x: Mat, out: Mat, reduction: Reduction) {
        let mut v = [0.0f32; CHUNK];
        for i in numbers {
            let r = rows.at(i);
            let (mut sum, mut max) = (0.0f64, f32::NEG_INFINITY);
            for c in (0..x.cols).step_by(CHUNK) {
                let v = &mut v[..CHUNK.min(x.cols - c)];
                x.load(r, c, v);
                match reduction {
                    Reduction::Max => max = v.iter().fold(max, |m, x| if m.is_nan() || *x <= m { m } else { *x }),
                    _ => sum += f64::from(math::sum(v.len(), |i| v[i])),
                }
            }
            out.store(r, 0, &[if reduction == Reduction::Max { max } else { sum as f32 }]);
        }
    }
}

pub(super) unsafe fn row_reduce(op: &RowReduce<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (x, out, live) = unsafe { (Mat::of(&op.x)?, Mat::of(&op.out)?, Mat::of_opt(&op.live)?) };
    let rows = Rows::new(out.rows, op.blocks, live)?;
    cx.pool.split(rows.len(), x.cols, &|p, _| reduce_rows(cx.tier, p, rows, x, out, op.reduction));
    Ok(())
}

pub(super) unsafe fn gather_rows(op: &GatherRows<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (src, index, out) = unsafe { (Mat::of(&op.src)?, Mat::of(&op.index)?, Mat::of(&op.out)?) };
    check_indices("index", &index, out.rows, src.rows, true)?;
    cx.pool.split(out.rows, out.cols, &|rows, _| {
        for r in rows {
            match index.word(0, r) {
                NO_INDEX => out.zero_row(r),
                i => out.copy_row(r, &src, i as usize),
            }
        }
    });
    Ok(())
}

/// That no index but "none" is there twice: threads write a row each.
///
/// # Errors
/// `Execution`, naming the repetition.
pub(super) fn check_distinct(what: &str, index: &Mat, n: usize, end: usize) -> Result<()> {
    check_indices(what, index, n, end, true)?;
    let mut seen = vec![0u64; end.div_ceil(64)];
    for at in 0..n {
        let i = index.word(0, at) as usize;
        if i as u32 == NO_INDEX {
            continue;
        }
        if seen[i / 64] >> (i % 64) & 1 == 1 {
            return Err(Error::execution(format!("{what}[{at}] is {i}, which an earlier entry also is; they must be distinct")));
        }
        seen[i / 64] |= 1 << (i % 64);
    }
    Ok(())
}

pub(super) unsafe fn scatter_rows(op: &ScatterRows<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (src, index, dst) = unsafe { (Mat::of(&op.src)?, Mat::of(&op.index)?, Mat::of(&op.dst)?) };
    check_distinct("index", &index, src.rows, dst.rows)?;
    cx.pool.split(src.rows, src.cols, &|rows, _| {
        let (mut x, mut y) = ([0.0f32; CHUNK], [0.0f32; CHUNK]);
        for r in rows {
            let to = match index.word(0, r) {
                NO_INDEX => continue,
                i => i as usize,
            };
            if !op.accumulate {
                dst.copy_row(to, &src, r);
                continue;
            }
            for c in (0..src.cols).step_by(CHUNK) {
                let n = CHUNK.min(src.cols - c);
                src.load(r, c, &mut x[..n]);
                dst.load(to, c, &mut y[..n]);
                y[..n].iter_mut().zip(&x[..n]).for_each(|(y, x)| *y += *x);
                dst.store(to, c, &y[..n]);
            }
        }
    });
    Ok(())
}

pub(super) unsafe fn perturb(op: &Perturb<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (noise, a, out) = unsafe { (Mat::of(&op.noise)?, Mat::of_opt(&op.a)?, Mat::of(&op.out)?) };
    let params = noise_params(&noise);
    check_direction(&params, op.copy)?;
    let noise = params.noise(op.copy, op.site, cx.noise);
    let grid = Grid::new(out.cols);
    cx.pool.split(grid.pieces(out.rows), grid.cost(8), &|pieces, _| {
        let (mut x, mut z) = ([0.0f32; CHUNK], [0.0f32; CHUNK]);
        for piece in pieces {
            let (r, c, n) = grid.at(piece);
            let (x, z) = (&mut x[..n], &mut z[..n]);
            match &a {
                Some(a) => {
                    a.load(r, c, x);
                    add_noise(&noise, r, c, x, params.epsilon, z);
                }
                None => noise.z_into(r as u32, c as u32, z),
            }
            out.store(r, c, z);
        }
    });
    Ok(())
}

/// `out = x + eps z` of a run that begins at element (r, c) of the local matrix.
#[inline(always)]
pub(super) fn add_noise(noise: &Noise, r: usize, c: usize, x: &[f32], eps: f32, out: &mut [f32]) {
    // Fails only for different lengths.
    let _ = noise.perturb_into(r as u32, c as u32, x, eps, out);
}

pub(super) unsafe fn philox_words(op: &PhiloxWords<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (noise, out) = unsafe { (Mat::of(&op.noise)?, Mat::of(&op.out)?) };
    let params = noise_params(&noise);
    check_direction(&params, op.copy)?;
    let noise = params.noise(op.copy, op.site, cx.noise);
    let grid = Grid::new(out.cols);
    cx.pool.split(grid.pieces(out.rows), grid.cost(4), &|pieces, _| {
        let mut words = [0u32; CHUNK];
        for piece in pieces {
            let (r, c, n) = grid.at(piece);
            noise.words_into(r as u32, c as u32, &mut words[..n]);
            words[..n].iter().enumerate().for_each(|(i, w)| out.set_word(r, c + i, *w));
        }
    });
    Ok(())
}

tiered! {
    fn sum_squares_of(x: Mat) -> f64 {
        let mut v = [0.0f32; CHUNK];
        let mut sum = 0.0f64;
        for r in 0..x.rows {
            for c in (0..x.cols).step_by(CHUNK) {
                let v = &mut v[..CHUNK.min(x.cols - c)];
                x.load(r, c, v);
                sum += f64::from(math::sum(v.len(), |i| v[i] * v[i]));
            }
        }
        sum
    }
}

pub(super) unsafe fn sum_squares(op: &SumSquares<TensorArg>, cx: &Context<'_>) -> Result<()> {
    // Safety: the caller's promise.
    let (x, out) = unsafe { (Mat::of(&op.x)?, Mat::of(&op.out)?) };
    out.store(0, 0, &[sum_squares_of(cx.tier, x) as f32]);
    Ok(())
}
