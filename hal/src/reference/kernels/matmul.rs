//! Matrix products.

use super::primitive::{noise_params, z};
use crate::op::{Copies, Form, LoraMatMul, MatMul, Orientation, PerturbLoraMatMul};
use crate::perturb::{NoiseParams, Site};
use crate::reference::operand::{Live, Mat, Memory, load, load_matrix, load_opt, store};
use crate::{Result, TensorArg};

/// `a . b`
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `out += alpha x`
pub(super) fn add_scaled(out: &mut [f64], alpha: f64, x: &[f64]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o += alpha * x);
}

/// Row `x W^T`, with W as `[n, k]`.
pub(super) fn row_nt(x: &[f64], w: &Mat, out: &mut [f64]) {
    out.iter_mut().enumerate().for_each(|(j, o)| *o = dot(x, w.row(j)));
}

pub(super) fn matmul(op: &MatMul<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [m, n] = op.out.spec.shape();
    let (a, b, bias) = (load(mem, &op.a)?, load_matrix(mem, &op.b)?, load_opt(mem, &op.bias)?);
    let transposed = op.orientation == Orientation::Tn;
    let counted = if transposed { a.rows } else { m };
    let block = counted / op.copies.total();
    let live = Live::load(mem, &op.live, block)?;
    let mut product = Mat::zeros(m, n);
    match op.orientation {
        Orientation::Nt => live.rows(m).for_each(|i| row_nt(a.row(i), &b, product.row_mut(i))),
        Orientation::Nn => {
            for i in live.rows(m) {
                a.row(i).iter().enumerate().for_each(|(k, x)| add_scaled(product.row_mut(i), *x, b.row(k)));
            }
        }
        Orientation::Tn => {
            for k in live.rows(a.rows) {
                a.row(k).iter().enumerate().for_each(|(i, x)| add_scaled(product.row_mut(i), *x, b.row(k)));
            }
        }
    }
    let written = if transposed { Live::ALL } else { live };
    let old = if op.beta == 0.0 { None } else { Some(load(mem, &op.out)?) };
    for i in written.rows(m) {
        let row = product.row_mut(i);
        row.iter_mut().for_each(|x| *x *= f64::from(op.alpha));
        if let Some(old) = &old {
            add_scaled(row, op.beta.into(), old.row(i));
        }
        if let Some(bias) = &bias
            && (transposed || !op.copies.is_tangent(i / block))
        {
            add_scaled(row, 1.0, bias.row(0));
        }
    }
    store(mem, &op.out, &product, written)
}

/// A linear layer with its adapter, in f64.
struct Layer {
    w: Mat,
    a: Mat,
    b: Mat,
    bias: Option<Mat>,
    scale: f64,
}

impl Layer {
    /// `xa = x A^T`, then `out = x W^T + scale xa B^T` and the bias of a value.
    fn row(&self, x: &[f64], a: &Mat, b: &Mat, bias: bool, xa: &mut [f64], out: &mut [f64]) {
        row_nt(x, a, xa);
        for (j, o) in out.iter_mut().enumerate() {
            *o = dot(x, self.w.row(j)) + self.scale * dot(xa, b.row(j));
        }
        if let Some(m) = self.bias.as_ref().filter(|_| bias) {
            add_scaled(out, 1.0, m.row(0));
        }
    }
}

pub(super) fn lora_matmul(op: &LoraMatMul<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [rows, outputs] = op.out.spec.shape();
    let block = rows / op.copies.total();
    let live = Live::load(mem, &op.live, block)?;
    let x = load(mem, &op.x)?;
    let layer = Layer {
        w: load_matrix(mem, &op.w)?,
        a: load(mem, &op.a)?,
        b: load(mem, &op.b)?,
        bias: load_opt(mem, &op.bias)?,
        scale: op.scale.into(),
    };
    let (mut out, mut xa) = (Mat::zeros(rows, outputs), Mat::zeros(rows, layer.a.rows));
    for i in live.rows(rows) {
        let bias = !op.copies.is_tangent(i / block);
        layer.row(x.row(i), &layer.a, &layer.b, bias, xa.row_mut(i), out.row_mut(i));
    }
    store(mem, &op.out, &out, live)?;
    op.xa.as_ref().map_or(Ok(()), |t| store(mem, t, &xa, live))
}

/// `factor + eps z` in f32, or the factor itself where it has no site.
fn perturbed(factor: &Mat, params: &NoiseParams, copy: u32, site: Option<Site>) -> Result<Mat> {
    let mut out = factor.clone();
    if let Some(site) = site {
        let z = z(params, copy, site, factor.rows, factor.cols)?;
        out.data.iter_mut().zip(z).for_each(|(x, z)| *x = (*x as f32 + params.epsilon * z).into());
    }
    Ok(out)
}

/// z of a factor, 0 where it has no site.
fn direction(factor: &Mat, params: &NoiseParams, copy: u32, site: Option<Site>) -> Result<Mat> {
    let mut out = Mat::zeros(factor.rows, factor.cols);
    if let Some(site) = site {
        let z = z(params, copy, site, factor.rows, factor.cols)?;
        out.data.iter_mut().zip(z).for_each(|(x, z)| *x = z.into());
    }
    Ok(out)
}

pub(super) fn perturb_lora_matmul(op: &PerturbLoraMatMul<TensorArg>, mem: &dyn Memory) -> Result<()> {
    let [rows, outputs] = op.out.spec.shape();
    let copies: Copies = op.copies;
    let block = rows / copies.total();
    let live = Live::load(mem, &op.live, block)?;
    let params = noise_params(mem, &op.noise)?;
    let x = load(mem, &op.x)?;
    let layer = Layer {
        w: load_matrix(mem, &op.w)?,
        a: load(mem, &op.a)?,
        b: load(mem, &op.b)?,
        bias: load_opt(mem, &op.bias)?,
        scale: op.scale.into(),
    };
    let r = layer.a.rows;
    let mut out = Mat::zeros(rows, outputs);
    let mut xa = Mat::zeros(block, r);
    if copies.has_base {
        for i in live.rows(block) {
            layer.row(x.row(i), &layer.a, &layer.b, true, xa.row_mut(i), out.row_mut(i));
        }
    }
    for q in 0..copies.count {
        let first = (copies.first_copy() + q as usize) * block;
        // With a shared input there is one block of x: every copy's own in value form, the base's in tangent form.
        let own = if op.shared_input { 0 } else { first };
        match copies.form {
            Form::Value => {
                let a = perturbed(&layer.a, &params, q, op.site_a)?;
                let b = perturbed(&layer.b, &params, q, op.site_b)?;
                let mut xa = alloc::vec![0.0; r];
                for i in live.rows(block) {
                    layer.row(x.row(own + i), &a, &b, true, &mut xa, out.row_mut(first + i));
                }
            }
            Form::Tangent => {
                let za = direction(&layer.a, &params, q, op.site_a)?;
                let zb = direction(&layer.b, &params, q, op.site_b)?;
                let (mut dxa, mut x_za) = (alloc::vec![0.0; r], alloc::vec![0.0; r]);
                let still = alloc::vec![0.0; x.cols];
                for i in live.rows(block) {
                    let dx = if op.shared_input { &still } else { x.row(own + i) };
                    row_nt(dx, &layer.a, &mut dxa);
                    row_nt(x.row(i), &za, &mut x_za);
                    add_scaled(&mut dxa, 1.0, &x_za);
                    for (j, o) in out.row_mut(first + i).iter_mut().enumerate() {
                        let low_rank = dot(&dxa, layer.b.row(j)) + dot(xa.row(i), zb.row(j));
                        *o = dot(dx, layer.w.row(j)) + layer.scale * low_rank;
                    }
                }
            }
        }
    }
    store(mem, &op.out, &out, live)?;
    op.xa.as_ref().map_or(Ok(()), |t| store(mem, t, &xa, live))
}
