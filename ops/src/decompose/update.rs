//! Optimiser updates on the host: the documented f32 sequences, so the bits are those of a native update.

use crate::Runner;
use alloc::vec;
use zofo_hal::{
    Error, Op, Operand, Result, TensorArg,
    op::{AdamW, HyperParams, Optimiser, Sgd, ZoUpdate},
    perturb::{Direction, NoiseParams, Tier},
};

/// Whether [`update`] runs this op.
pub(super) fn knows<T: Operand>(op: &Op<T>) -> bool {
    match op {
        Op::Sgd(_) | Op::AdamW(_) => true,
        Op::ZoUpdate(op) => matches!(op.optimiser, Optimiser::Sgd | Optimiser::AdamW),
        _ => false,
    }
}

/// Runs the update `op` on the host, which waits for the tensors; `None` for another op.
pub(crate) fn update(runner: &mut Runner, op: &Op<TensorArg>) -> Option<Result<()>> {
    if !knows(op) {
        return None;
    }
    if runner.is_recording() {
        let reason = "an update runs on the host here, which cannot be recorded: end the recording before it";
        return Some(Err(Error::unsupported(reason)));
    }
    Some(match op {
        Op::Sgd(op) => sgd(runner, op),
        Op::AdamW(op) => adamw(runner, op),
        Op::ZoUpdate(op) => zo_update(runner, op),
        _ => return None,
    })
}

fn hyper(runner: &mut Runner, t: &TensorArg) -> Result<HyperParams> {
    Ok(bytemuck::pod_read_unaligned(&runner.read_bytes(t)?))
}

fn sgd(runner: &mut Runner, op: &Sgd<TensorArg>) -> Result<()> {
    let grad = runner.read_f32(&op.grad)?;
    apply_sgd(runner, &op.param, &grad, &op.hyper)
}

fn adamw(runner: &mut Runner, op: &AdamW<TensorArg>) -> Result<()> {
    let grad = runner.read_f32(&op.grad)?;
    apply_adamw(runner, [&op.param, &op.m, &op.v], &grad, &op.hyper)
}

fn apply_sgd(runner: &mut Runner, param: &TensorArg, grad: &[f32], hyper: &TensorArg) -> Result<()> {
    let h = self::hyper(runner, hyper)?;
    let mut p = runner.read_f32(param)?;
    for (p, g) in p.iter_mut().zip(grad) {
        let g = h.grad_scale * g;
        *p = h.decay * *p - h.step_size * g;
    }
    runner.upload_f32(param, &p)
}

fn apply_adamw(runner: &mut Runner, [param, m, v]: [&TensorArg; 3], grad: &[f32], hyper: &TensorArg) -> Result<()> {
    let h = self::hyper(runner, hyper)?;
    let (mut ps, mut ms, mut vs) = (runner.read_f32(param)?, runner.read_f32(m)?, runner.read_f32(v)?);
    for (((p, m), v), g) in ps.iter_mut().zip(&mut ms).zip(&mut vs).zip(grad) {
        let g = h.grad_scale * g;
        *p *= h.decay;
        *m = h.beta1 * *m + h.one_minus_beta1 * g;
        *v = h.beta2 * *v + h.one_minus_beta2 * g * g;
        let d = libm::sqrtf(*v) / h.sqrt_bias2 + h.eps;
        *p -= h.step_size * (*m / d);
    }
    runner.upload_f32(param, &ps)?;
    runner.upload_f32(m, &ms)?;
    runner.upload_f32(v, &vs)
}

fn zo_update(runner: &mut Runner, op: &ZoUpdate<TensorArg>) -> Result<()> {
    let [rows, cols] = op.param.spec.shape();
    let (coefficients, directions) = (runner.read_f32(&op.coefficients)?, runner.read_u32(&op.directions)?);
    for (i, word) in directions.iter().enumerate() {
        Direction::from_word(*word).map_err(|e| Error::execution(alloc::format!("directions[{i}]: {}", e.message())))?;
    }
    let params: NoiseParams = bytemuck::pod_read_unaligned(&runner.read_bytes(&op.noise)?);
    let noise = params.noise(0, op.site, Tier::detect());
    let mut grad = vec![0.0; rows * cols];
    for run in op.site.runs(rows, cols) {
        noise.accumulate(run.row, 0, &mut grad[run.start..][..run.len], &coefficients, &directions)?;
    }
    match (op.optimiser, &op.m, &op.v) {
        (Optimiser::AdamW, Some(m), Some(v)) => apply_adamw(runner, [&op.param, m, v], &grad, &op.hyper),
        _ => apply_sgd(runner, &op.param, &grad, &op.hyper),
    }
}
