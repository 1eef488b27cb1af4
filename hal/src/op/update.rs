//! Optimiser updates. Each is a fixed sequence of separately rounded f32 operations per element, so that every device that reports
//! [`crate::Features::exact_updates`] gives the same bits and a seed journal can be replayed anywhere.

use super::{check, descriptor};
use crate::{DType, Error, Operand, Result, perturb::Site};
use alloc::format;
use bytemuck::{Pod, Zeroable};

/// Scalars of an update, computed in f64 on the host and kept in a device parameter buffer: `[1, 12]` f32 in this order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct HyperParams {
    /// 1 - lr * weight_decay.
    pub decay: f32,
    /// lr for SGD; lr / (1 - beta1^t) for AdamW.
    pub step_size: f32,
    /// Factor of the gradient: what is left after clipping.
    pub grad_scale: f32,
    /// AdamW.
    pub beta1: f32,
    /// 1 - beta1, from f64.
    pub one_minus_beta1: f32,
    /// AdamW.
    pub beta2: f32,
    /// 1 - beta2, from f64.
    pub one_minus_beta2: f32,
    /// sqrt(1 - beta2^t).
    pub sqrt_bias2: f32,
    /// AdamW's eps, added outside the root.
    pub eps: f32,
    /// Reserved; 0.
    pub reserved: [f32; 3],
}

impl HyperParams {
    /// Number of f32 values.
    pub const LEN: usize = 12;

    /// SGD without momentum.
    pub fn sgd(lr: f64, weight_decay: f64, grad_scale: f32) -> Self {
        Self { decay: (1.0 - lr * weight_decay) as f32, step_size: lr as f32, grad_scale, ..Self::default() }
    }

    /// AdamW (Loshchilov & Hutter 2019) at step `t`, counted from 1.
    pub fn adamw(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, t: u32, grad_scale: f32) -> Self {
        let (b1, b2) = betas;
        Self {
            decay: (1.0 - lr * weight_decay) as f32,
            step_size: (lr / (1.0 - libm::pow(b1, t.into()))) as f32,
            grad_scale,
            beta1: b1 as f32,
            one_minus_beta1: (1.0 - b1) as f32,
            beta2: b2 as f32,
            one_minus_beta2: (1.0 - b2) as f32,
            sqrt_bias2: libm::sqrt(1.0 - libm::pow(b2, t.into())) as f32,
            eps: eps as f32,
            reserved: [0.0; 3],
        }
    }
}

/// Which rule an update follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Optimiser {
    /// [`Sgd`]
    Sgd,
    /// [`AdamW`]
    AdamW,
}

fn hyper<T: Operand>(t: &T) -> Result<()> {
    check::typed("hyper", t, DType::F32, 1, HyperParams::LEN)
}

descriptor! {
    /// `g' = grad_scale g;  p = decay p - step_size g'`. Sequence: `mul(decay, p)`, `mul(step_size, g')`, `sub`. Bit-exact.
    Sgd, "sgd", Update,
    reads {
        /// f32 `[rows, cols]`.
        grad,
        /// [`HyperParams`].
        hyper,
    },
    updates {
        /// f32 `[rows, cols]`.
        param,
    },
}

impl<T: Operand> Sgd<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [r, c] = self.param.spec().shape();
        check::typed("param", &self.param, DType::F32, r, c)?;
        check::typed("grad", &self.grad, DType::F32, r, c)?;
        hyper(&self.hyper)
    }
}

descriptor! {
    /// AdamW (Loshchilov & Hutter 2019), in PyTorch's order:
    /// `g' = mul(grad_scale, g)`; `p = mul(decay, p)`; `m = add(mul(beta1, m), mul(one_minus_beta1, g'))`;
    /// `v = add(mul(beta2, v), mul(mul(one_minus_beta2, g'), g'))`; `d = add(div(sqrt(v), sqrt_bias2), eps)`;
    /// `p = sub(p, mul(step_size, div(m, d)))`. Bit-exact.
    AdamW, "adamw", Update,
    reads {
        /// f32 `[rows, cols]`.
        grad,
        /// [`HyperParams`].
        hyper,
    },
    updates {
        /// f32 `[rows, cols]`.
        param,
        /// First moment, f32 `[rows, cols]`.
        m,
        /// Second moment, f32 `[rows, cols]`.
        v,
    },
}

impl<T: Operand> AdamW<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [r, c] = self.param.spec().shape();
        for (name, x) in [("param", &self.param), ("grad", &self.grad), ("m", &self.m), ("v", &self.v)] {
            check::typed(name, x, DType::F32, r, c)?;
        }
        hyper(&self.hyper)
    }
}

descriptor! {
    /// A zeroth-order update: `grad = sum over i ascending of coefficients[i] z(directions[i])`, each `grad = add(grad, mul(c, z))` in f32 from
    /// +0, then the rule of [`Sgd`] or [`AdamW`]. z is regenerated from seeds; `noise` gives seed and step, its direction and eps are not used.
    /// Bit-exact.
    ///
    /// The coefficients hold everything: g after clipping, 1/Q, lambda.
    ZoUpdate, "zo_update", Update,
    reads {
        /// f32 `[1, n]`.
        coefficients,
        /// Direction words, u32 `[1, n]`.
        directions,
        /// [`crate::perturb::NoiseParams`] as u32 `[1, 8]`.
        noise,
        /// [`HyperParams`].
        hyper,
    },
    updates {
        /// f32 `[rows, cols]`.
        param,
    },
    updates_opt {
        /// First moment, f32 `[rows, cols]`; AdamW only.
        m,
        /// Second moment, f32 `[rows, cols]`; AdamW only.
        v,
    },
    attributes {
        /// Which part of which tensor this is.
        site: Site,
        /// The rule.
        optimiser: Optimiser,
    },
}

impl<T: Operand> ZoUpdate<T> {
    pub(super) fn check(&self) -> Result<()> {
        let ([r, c], n) = (self.param.spec().shape(), self.coefficients.spec().cols);
        check::typed("param", &self.param, DType::F32, r, c)?;
        check::typed("coefficients", &self.coefficients, DType::F32, 1, n)?;
        check::indices("directions", &self.directions, n)?;
        check::indices("noise", &self.noise, 8)?;
        hyper(&self.hyper)?;
        for (name, x) in [("m", &self.m), ("v", &self.v)] {
            match (self.optimiser, x) {
                (Optimiser::AdamW, Some(x)) => check::typed(name, x, DType::F32, r, c)?,
                (Optimiser::AdamW, None) => return Err(Error::invalid(format!("AdamW needs {name}"))),
                (Optimiser::Sgd, None) => {}
                (Optimiser::Sgd, Some(_)) => return Err(Error::invalid(format!("SGD has no {name}"))),
            }
        }
        self.site.check(r, c)
    }
}
