//! Backward ops.

use super::emit::{Emit, Rows, View};
use super::forward::{inverse_rms, norm_slope, silu};
use zofo_hal::{
    Result,
    op::{LoraMatMulBackward, Orientation, RmsNormBackward, SwiGluBackward},
};

pub(super) fn rms_norm_backward<E: Emit>(e: &mut E, op: &RmsNormBackward<E::T>) -> Result<()> {
    let rows = Rows::live(&op.live);
    let r = inverse_rms(e, &op.x, op.eps, &rows)?;
    let [u, dx] = [e.f32_like(&op.x)?, e.f32_like(&op.x)?];
    e.mul(&op.dout, &op.gamma, &u, &rows)?;
    let dot = e.row_dot(&op.x, &u, &rows)?;
    norm_slope(e, [&op.x, &u], [&r, &dot], &dx, &rows)?;
    match &op.dresidual {
        Some(residual) => e.add(&dx, residual, 1.0, &op.dx, &rows),
        None => e.copy(&dx, &op.dx, &rows),
    }
}

pub(super) fn lora_matmul_backward<E: Emit>(e: &mut E, op: &LoraMatMulBackward<E::T>) -> Result<()> {
    let (live, rows) = (&op.live, Rows::live(&op.live));
    let u = e.f32(op.dout.size().0, op.b.size().1)?;
    e.product(Orientation::Nn, &op.dout, op.b.matrix(), &u, (op.scale, 0.0), live)?;
    if let Some(dx) = &op.dx {
        let sum = e.accumulator(dx)?;
        if op.beta != 0.0 && sum.dtype() != dx.dtype() {
            e.copy(dx, &sum, &rows)?;
        }
        e.product(Orientation::Nn, &op.dout, op.w.clone(), &sum, (1.0, op.beta), live)?;
        e.product(Orientation::Nn, &u, op.a.matrix(), &sum, (1.0, 1.0), live)?;
        e.finish(&sum, dx, &rows)?;
    }
    if !op.factors {
        return Ok(());
    }
    e.product(Orientation::Tn, &u, op.x.matrix(), &op.da, (1.0, 1.0), live)?;
    e.product(Orientation::Tn, &op.dout, op.xa.matrix(), &op.db, (op.scale, 1.0), live)
}

pub(super) fn swiglu_backward<E: Emit>(e: &mut E, op: &SwiGluBackward<E::T>) -> Result<()> {
    let rows = Rows::live(&op.live);
    let [value, slope] = silu(e, &op.gate, &rows)?;
    // Both results before either is written: an output may be an input.
    e.mul(&slope, &op.up, &slope, &rows)?;
    e.mul(&slope, &op.dout, &slope, &rows)?;
    e.mul(&value, &op.dout, &value, &rows)?;
    e.copy(&slope, &op.dgate, &rows)?;
    e.copy(&value, &op.dup, &rows)
}
