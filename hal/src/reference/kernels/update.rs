//! Optimiser updates: the documented f32 sequences, nothing else.

use super::primitive::{noise_params, z};
use crate::op::{AdamW, HyperParams, Optimiser, Sgd, ZoUpdate};
use crate::perturb::NoiseParams;
use crate::reference::operand::{Live, Mat, Memory, load, store, words};
use crate::{Result, TensorArg};
use alloc::{vec, vec::Vec};

fn load_f32(mem: &dyn Memory, t: &TensorArg) -> Result<Vec<f32>> {
    Ok(load(mem, t)?.f32s())
}

fn store_f32(mem: &dyn Memory, t: &TensorArg, values: &[f32]) -> Result<()> {
    let data = values.iter().map(|x| f64::from(*x)).collect();
    store(mem, t, &Mat { rows: t.spec.rows, cols: t.spec.cols, data }, Live::ALL)
}

fn hyper(mem: &dyn Memory, t: &TensorArg) -> Result<HyperParams> {
    Ok(bytemuck::cast_slice(&load_f32(mem, t)?)[0])
}

fn apply_sgd(mem: &dyn Memory, param: &TensorArg, grad: &[f32], h: &HyperParams) -> Result<()> {
    let mut p = load_f32(mem, param)?;
    for (p, g) in p.iter_mut().zip(grad) {
        let g = h.grad_scale * g;
        *p = h.decay * *p - h.step_size * g;
    }
    store_f32(mem, param, &p)
}

fn apply_adamw(mem: &dyn Memory, [param, m, v]: [&TensorArg; 3], grad: &[f32], h: &HyperParams) -> Result<()> {
    let (mut ps, mut ms, mut vs) = (load_f32(mem, param)?, load_f32(mem, m)?, load_f32(mem, v)?);
    for (((p, m), v), g) in ps.iter_mut().zip(&mut ms).zip(&mut vs).zip(grad) {
        let g = h.grad_scale * g;
        *p *= h.decay;
        *m = h.beta1 * *m + h.one_minus_beta1 * g;
        *v = h.beta2 * *v + h.one_minus_beta2 * g * g;
        let d = libm::sqrtf(*v) / h.sqrt_bias2 + h.eps;
        *p -= h.step_size * (*m / d);
    }
    store_f32(mem, param, &ps)?;
    store_f32(mem, m, &ms)?;
    store_f32(mem, v, &vs)
}

pub(super) fn sgd(op: &Sgd<TensorArg>, mem: &dyn Memory) -> Result<()> {
    apply_sgd(mem, &op.param, &load_f32(mem, &op.grad)?, &hyper(mem, &op.hyper)?)
}

pub(super) fn adamw(op: &AdamW<TensorArg>, mem: &dyn Memory) -> Result<()> {
    apply_adamw(mem, [&op.param, &op.m, &op.v], &load_f32(mem, &op.grad)?, &hyper(mem, &op.hyper)?)
}

pub(super) fn zo_update(op: &ZoUpdate<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [rows, cols] = op.param.spec.shape();
    let (coefficients, directions) = (load_f32(mem, &op.coefficients)?, words(mem, &op.directions)?);
    let params = noise_params(mem, &op.noise)?;
    let mut grad = vec![0.0f32; rows * cols];
    for (c, direction) in coefficients.iter().zip(directions) {
        let z = z(&NoiseParams { direction, ..params }, 0, op.site, rows, cols)?;
        grad.iter_mut().zip(z).for_each(|(g, z)| *g += c * z);
    }
    let h = hyper(mem, &op.hyper)?;
    match (op.optimiser, &op.m, &op.v) {
        (Optimiser::AdamW, Some(m), Some(v)) => apply_adamw(mem, [&op.param, m, v], &grad, &h),
        _ => apply_sgd(mem, &op.param, &grad, &h),
    }
}
