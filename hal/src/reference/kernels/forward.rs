//! Row-wise forward ops.

use super::matmul::dot;
use crate::op::{BoundaryDot, Embedding, Form, RmsNorm, Spread, SwiGlu};
use crate::reference::operand::{Live, Mat, Memory, below, load, load_bytes, load_matrix, load_opt, round_into, store, store_rows, words};
use crate::{DType, Result, TensorArg};

/// 1 / (1 + e^-x)
pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

/// silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x)))
pub(super) fn silu_slope(x: f64) -> f64 {
    // 1 - sigmoid(x) is sigmoid(-x), which does not cancel for large x.
    sigmoid(x) * (1.0 + x * sigmoid(-x))
}

pub(super) fn embedding(op: &Embedding<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [t, d] = op.out.spec.shape();
    let live = Live::load(mem, &op.live, t)?;
    let (ids, table) = (words(mem, &op.ids)?, load_matrix(mem, &op.table)?);
    let mut out = Mat::zeros(t, d);
    for r in live.rows(t) {
        let id = below("ids", r, ids[r], table.rows)?;
        out.row_mut(r).copy_from_slice(table.row(id));
    }
    store(mem, &op.out, &out, live)
}

/// `x` as a tensor of type `dtype` would hold it.
fn rounded(dtype: DType, x: f64) -> f64 {
    let mut b = [0; 4];
    match dtype {
        DType::F16 => {
            round_into(dtype, x, &mut b[..2]);
            half::f16::from_ne_bytes([b[0], b[1]]).to_f64()
        }
        DType::Bf16 => {
            round_into(dtype, x, &mut b[..2]);
            half::bf16::from_ne_bytes([b[0], b[1]]).to_f64()
        }
        _ => (x as f32).into(),
    }
}

pub(super) fn rms_norm(op: &RmsNorm<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [rows, d] = op.x.spec.shape();
    let block = rows / op.copies.total();
    let live = Live::load(mem, &op.live, block)?;
    let gamma = load(mem, &op.gamma)?;
    let mut h = load(mem, &op.x)?;
    if let Some(residual) = load_opt(mem, &op.residual)? {
        h.data.iter_mut().zip(&residual.data).for_each(|(h, r)| *h += r);
    }
    if let Some(sum) = &op.sum {
        h.data.iter_mut().for_each(|h| *h = rounded(sum.spec.dtype, *h));
        store(mem, sum, &h, live)?;
    }
    let mut out = Mat::zeros(rows, d);
    for i in live.rows(rows) {
        let base = h.row(if op.copies.is_tangent(i / block) { i % block } else { i });
        let r = 1.0 / libm::sqrt(dot(base, base) / d as f64 + f64::from(op.eps));
        // A value has no correction; a tangent has that of the changing norm.
        let correction = if op.copies.is_tangent(i / block) { r * r * r * dot(base, h.row(i)) / d as f64 } else { 0.0 };
        for (j, base) in base.iter().enumerate() {
            out.row_mut(i)[j] = gamma.row(0)[j] * (h.row(i)[j] * r - base * correction);
        }
    }
    store(mem, &op.out, &out, live)
}

pub(super) fn swiglu(op: &SwiGlu<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [rows, f] = op.gate.spec.shape();
    let block = rows / op.copies.total();
    let live = Live::load(mem, &op.live, block)?;
    let (gate, up) = (load(mem, &op.gate)?, load(mem, &op.up)?);
    let mut out = Mat::zeros(rows, f);
    for i in live.rows(rows) {
        for j in 0..f {
            let (g, u) = (gate.row(i)[j], up.row(i)[j]);
            out.row_mut(i)[j] = if op.copies.is_tangent(i / block) {
                let (g0, u0) = (gate.row(i % block)[j], up.row(i % block)[j]);
                silu_slope(g0) * g * u0 + g0 * sigmoid(g0) * u
            } else {
                g * sigmoid(g) * u
            };
        }
    }
    store(mem, &op.out, &out, live)
}

pub(super) fn spread(op: &Spread<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [t, _] = op.src.spec.shape();
    let live = Live::load(mem, &op.live, t)?;
    let src = load_bytes(mem, &op.src)?;
    store_rows(mem, &op.out, live.rows(op.out.spec.rows), &mut |r, row| {
        if op.copies.form == Form::Tangent && r >= t {
            row.fill(0);
        } else {
            row.copy_from_slice(&src[r % t]);
        }
    })
}

pub(super) fn boundary_dot(op: &BoundaryDot<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [t, _] = op.delta.spec.shape();
    let live = Live::load(mem, &op.live, t)?;
    let (delta, h, base) = (load(mem, &op.delta)?, load(mem, &op.h)?, load_opt(mem, &op.base)?);
    let mut out = Mat::zeros(1, op.out.spec.cols);
    for (c, sum) in out.row_mut(0).iter_mut().enumerate() {
        for r in live.rows(t) {
            *sum += match &base {
                // The difference first: h and base nearly cancel.
                Some(base) => delta.row(r).iter().zip(h.row(c * t + r).iter().zip(base.row(r))).map(|(d, (h, b))| d * (h - b)).sum(),
                None => dot(delta.row(r), h.row(c * t + r)),
            };
        }
    }
    store(mem, &op.out, &out, Live::ALL)
}
