//! Backward ops.

use super::forward::{sigmoid, silu_slope};
use super::matmul::{add_scaled, dot};
use crate::op::{LoraMatMulBackward, RmsNormBackward, SwiGluBackward};
use crate::reference::operand::{Live, Mat, Memory, load, load_matrix, load_opt, store};
use crate::{Result, TensorArg};
use alloc::{vec, vec::Vec};

pub(super) fn rms_norm_backward(op: &RmsNormBackward<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [t, d] = op.x.spec.shape();
    let live = Live::load(mem, &op.live, t)?;
    let (h, gamma, dout) = (load(mem, &op.x)?, load(mem, &op.gamma)?, load(mem, &op.dout)?);
    let dresidual = load_opt(mem, &op.dresidual)?;
    let mut dx = Mat::zeros(t, d);
    for i in live.rows(t) {
        let h = h.row(i);
        let r = 1.0 / libm::sqrt(dot(h, h) / d as f64 + f64::from(op.eps));
        let u: Vec<f64> = gamma.row(0).iter().zip(dout.row(i)).map(|(g, d)| g * d).collect();
        let mean = dot(h, &u) / d as f64;
        for j in 0..d {
            dx.row_mut(i)[j] = r * (u[j] - h[j] * r * r * mean) + dresidual.as_ref().map_or(0.0, |m| m.row(i)[j]);
        }
    }
    store(mem, &op.dx, &dx, live)
}

pub(super) fn lora_matmul_backward(op: &LoraMatMulBackward<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [t, inputs] = op.x.spec.shape();
    let live = Live::load(mem, &op.live, t)?;
    let (x, xa, dout) = (load(mem, &op.x)?, load(mem, &op.xa)?, load(mem, &op.dout)?);
    let (a, b) = (load(mem, &op.a)?, load(mem, &op.b)?);
    let (mut da, mut db) = (load(mem, &op.da)?, load(mem, &op.db)?);
    let scale = f64::from(op.scale);
    let mut u = Mat::zeros(t, a.rows);
    for i in live.rows(t) {
        for (o, d) in dout.row(i).iter().enumerate() {
            add_scaled(u.row_mut(i), scale * d, b.row(o));
            add_scaled(db.row_mut(o), scale * d, xa.row(i));
        }
        for k in 0..a.rows {
            add_scaled(da.row_mut(k), u.row(i)[k], x.row(i));
        }
    }
    if let Some(dx) = &op.dx {
        let w = load_matrix(mem, &op.w)?;
        let old = if op.beta == 0.0 { None } else { Some(load(mem, dx)?) };
        let mut sum = Mat::zeros(t, inputs);
        for i in live.rows(t) {
            let mut row = vec![0.0; inputs];
            if let Some(old) = &old {
                add_scaled(&mut row, op.beta.into(), old.row(i));
            }
            dout.row(i).iter().enumerate().for_each(|(o, d)| add_scaled(&mut row, *d, w.row(o)));
            u.row(i).iter().enumerate().for_each(|(k, u)| add_scaled(&mut row, *u, a.row(k)));
            sum.row_mut(i).copy_from_slice(&row);
        }
        store(mem, dx, &sum, live)?;
    }
    if !op.factors {
        return Ok(());
    }
    store(mem, &op.da, &da, Live::ALL)?;
    store(mem, &op.db, &db, Live::ALL)
}

pub(super) fn swiglu_backward(op: &SwiGluBackward<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [t, f] = op.gate.spec.shape();
    let live = Live::load(mem, &op.live, t)?;
    let (gate, up, dout) = (load(mem, &op.gate)?, load(mem, &op.up)?, load(mem, &op.dout)?);
    let (mut dgate, mut dup) = (Mat::zeros(t, f), Mat::zeros(t, f));
    for i in live.rows(t) {
        for j in 0..f {
            let (g, u, d) = (gate.row(i)[j], up.row(i)[j], dout.row(i)[j]);
            dgate.row_mut(i)[j] = d * u * silu_slope(g);
            dup.row_mut(i)[j] = d * g * sigmoid(g);
        }
    }
    store(mem, &op.dgate, &dgate, live)?;
    store(mem, &op.dup, &dup, live)
}
