//! Primitives.

use crate::op::{
    Cast, Copy, Fill, GatherRows, Map, MapFunction, Mul, Perturb, PhiloxWords, Reduction, RowReduce, ScaledAdd, ScatterRows, SumSquares,
};
use crate::perturb::{Direction, NoiseParams, Site, Tier};
use crate::reference::operand::{
    Live, Mat, Memory, below, distinct_or_none, load, load_bytes, load_opt, round_into, store, store_rows, store_words, words,
};
use crate::{Error, Result, TensorArg};
use alloc::{format, vec, vec::Vec};

pub(super) fn copy(op: &Copy<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let src = load_bytes(mem, &op.src)?;
    store_rows(mem, &op.dst, 0..src.len(), &mut |r, row| row.copy_from_slice(&src[r]))
}

pub(super) fn fill(op: &Fill<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let dtype = op.dst.spec.dtype;
    store_rows(mem, &op.dst, 0..op.dst.spec.rows, &mut |_, row| {
        row.chunks_exact_mut(dtype.block().1).for_each(|b| round_into(dtype, op.value.into(), b));
    })
}

pub(super) fn cast(op: &Cast<TensorArg>, mem: &dyn Memory) -> Result<()> {
    store(mem, &op.dst, &load(mem, &op.src)?, Live::ALL)
}

/// Element (r, c) of an operand that may be one row or one column.
fn broadcast(m: &Mat, r: usize, c: usize) -> f64 {
    let (r, c) = (if m.rows == 1 { 0 } else { r }, if m.cols == 1 { 0 } else { c });
    m.row(r)[c]
}

/// `f(row, column)` on the live rows of `out`.
fn elementwise(mem: &dyn Memory, out: &TensorArg, live: Live, f: impl Fn(usize, usize) -> f64) -> Result<()> {
    let [rows, cols] = out.spec.shape();
    let mut values = Mat::zeros(rows, cols);
    for r in live.rows(rows) {
        for c in 0..cols {
            values.row_mut(r)[c] = f(r, c);
        }
    }
    store(mem, out, &values, live)
}

pub(super) fn scaled_add(op: &ScaledAdd<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let live = Live::load(mem, &op.live, op.out.spec.rows / op.blocks)?;
    let (a, b) = (load(mem, &op.a)?, load_opt(mem, &op.b)?);
    elementwise(mem, &op.out, live, |r, c| {
        // The op is defined as this f32 sequence.
        let scaled = op.alpha * a.row(r)[c] as f32;
        let other = b.as_ref().map_or(0.0, |b| op.beta * broadcast(b, r, c) as f32);
        (scaled + other + op.gamma).into()
    })
}

pub(super) fn mul(op: &Mul<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let live = Live::load(mem, &op.live, op.out.spec.rows / op.blocks)?;
    let (a, b) = (load(mem, &op.a)?, load(mem, &op.b)?);
    let old = if op.accumulate { Some(load(mem, &op.out)?) } else { None };
    elementwise(mem, &op.out, live, |r, c| old.as_ref().map_or(0.0, |o| o.row(r)[c]) + a.row(r)[c] * broadcast(&b, r, c))
}

fn function(f: MapFunction, x: f64) -> f64 {
    match f {
        MapFunction::Exp => libm::exp(x),
        MapFunction::Ln => libm::log(x),
        MapFunction::Sigmoid => super::forward::sigmoid(x),
        MapFunction::Silu => x * super::forward::sigmoid(x),
        MapFunction::Rsqrt => 1.0 / libm::sqrt(x),
        MapFunction::Recip => 1.0 / x,
        MapFunction::Sqrt => libm::sqrt(x),
    }
}

pub(super) fn map(op: &Map<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let live = Live::load(mem, &op.live, op.x.spec.rows / op.blocks)?;
    let x = load(mem, &op.x)?;
    elementwise(mem, &op.out, live, |r, c| function(op.function, f64::from(op.scale) * x.row(r)[c] + f64::from(op.shift)))
}

pub(super) fn row_reduce(op: &RowReduce<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let live = Live::load(mem, &op.live, op.x.spec.rows / op.blocks)?;
    let x = load(mem, &op.x)?;
    let max = |m: f64, x: &f64| if m.is_nan() || *x <= m { m } else { *x };
    elementwise(mem, &op.out, live, |r, _| match op.reduction {
        Reduction::Sum => x.row(r).iter().sum(),
        Reduction::Max => x.row(r).iter().fold(f64::NEG_INFINITY, max),
    })
}

pub(super) fn gather_rows(op: &GatherRows<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let (src, index) = (load_bytes(mem, &op.src)?, words(mem, &op.index)?);
    for (at, i) in index.iter().enumerate().filter(|(_, i)| **i != crate::op::NO_INDEX) {
        below("index", at, *i, src.len())?;
    }
    store_rows(mem, &op.out, 0..index.len(), &mut |r, row| match src.get(index[r] as usize) {
        Some(src) => row.copy_from_slice(src),
        None => row.fill(0),
    })
}

pub(super) fn scatter_rows(op: &ScatterRows<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let index = distinct_or_none("index", &words(mem, &op.index)?, op.dst.spec.rows)?;
    let pairs: Vec<(usize, usize)> = index.iter().enumerate().filter_map(|(r, i)| i.map(|i| (i, r))).collect();
    if !op.accumulate {
        let src = load_bytes(mem, &op.src)?;
        let mut from = pairs.iter().map(|(_, r)| *r);
        return store_rows(mem, &op.dst, pairs.iter().map(|(i, _)| *i), &mut |_, row| {
            if let Some(r) = from.next() {
                row.copy_from_slice(&src[r]);
            }
        });
    }
    let (src, mut dst) = (load(mem, &op.src)?, load(mem, &op.dst)?);
    for (i, r) in &pairs {
        for (d, s) in dst.row_mut(*i).iter_mut().zip(src.row(*r)) {
            *d = (*d as f32 + *s as f32).into();
        }
    }
    let dtype = op.dst.spec.dtype;
    store_rows(mem, &op.dst, pairs.iter().map(|(i, _)| *i), &mut |i, row| {
        row.chunks_exact_mut(dtype.block().1).zip(dst.row(i)).for_each(|(b, x)| round_into(dtype, *x, b));
    })
}

/// The noise parameters as they are in device memory now.
pub(super) fn noise_params(mem: &dyn Memory, t: &TensorArg) -> Result<NoiseParams> {
    Ok(bytemuck::cast_slice(&words(mem, t)?)[0])
}

/// z of copy `copy` over a whole local matrix, row by row.
pub(super) fn z(params: &NoiseParams, copy: u32, site: Site, rows: usize, cols: usize) -> Result<Vec<f32>> {
    let mut z = vec![0.0; rows * cols];
    let noise = checked(params, copy)?.noise(copy, site, Tier::SCALAR);
    for (r, row) in z.chunks_exact_mut(cols.max(1)).enumerate() {
        noise.z_into(r as u32, 0, row);
    }
    Ok(z)
}

/// That the direction of copy `copy` exists.
fn checked(params: &NoiseParams, copy: u32) -> Result<&NoiseParams> {
    Direction::from_word(params.direction)
        .and_then(|d| d.copy(copy))
        .map(|_| params)
        .map_err(|e| Error::execution(format!("noise parameters, copy {copy}: {}", e.message())))
}

pub(super) fn perturb(op: &Perturb<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [rows, cols] = op.out.spec.shape();
    let params = noise_params(mem, &op.noise)?;
    let z = z(&params, op.copy, op.site, rows, cols)?;
    let a = load_opt(mem, &op.a)?;
    // Without `a` it is z itself: 0 + 1 z would turn -0 into +0.
    elementwise(mem, &op.out, Live::ALL, |r, c| {
        let z = z[r * cols + c];
        a.as_ref().map_or(z, |a| a.row(r)[c] as f32 + params.epsilon * z).into()
    })
}

pub(super) fn philox_words(op: &PhiloxWords<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [rows, cols] = op.out.spec.shape();
    let params = noise_params(mem, &op.noise)?;
    let noise = checked(&params, op.copy)?.noise(op.copy, op.site, Tier::SCALAR);
    let mut out = vec![0; rows * cols];
    for (r, row) in out.chunks_exact_mut(cols.max(1)).enumerate() {
        noise.words_into(r as u32, 0, row);
    }
    store_words(mem, &op.out, &out)
}

pub(super) fn sum_squares(op: &SumSquares<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let x = load(mem, &op.x)?;
    elementwise(mem, &op.out, Live::ALL, |_, _| x.data.iter().map(|x| x * x).sum())
}
