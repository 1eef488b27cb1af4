//! Optimisers over a slice's adapters: first-order from gradients, zeroth-order from seeds.
//!
//! Both take the same rules. Every update is a fixed f32 sequence (see [`zofo_hal::op::AdamW`], [`zofo_hal::op::ZoUpdate`]) whose scalars are
//! computed here in f64, so a step gives the same bits on every device, and a zeroth-order step can be replayed from its journal entry.

mod state;

use alloc::{vec, vec::Vec};

use zofo_hal::{
    DType, Error, Result, TensorArg, Usage,
    op::{self, HyperParams, Op, SumSquares},
    perturb::{Distribution, NoiseParams},
};

use crate::{
    llama::Factors,
    lora::{Adapters, Tensor},
    run::Runner,
};

/// How a gradient changes a parameter; the learning rate is given with each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Gradient descent without momentum.
    Sgd {
        /// Decay, times the learning rate.
        weight_decay: f64,
    },
    /// AdamW (Loshchilov & Hutter 2019).
    AdamW {
        /// Decay rates of both moments.
        betas: (f64, f64),
        /// Added to the root of the second moment.
        eps: f64,
        /// Decay, times the learning rate.
        weight_decay: f64,
    },
}

impl Rule {
    /// AdamW with PyTorch's constants.
    pub const ADAMW: Self = Self::AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01 };
    /// SGD without decay.
    pub const SGD: Self = Self::Sgd { weight_decay: 0.0 };

    fn hyper(&self, lr: f64, t: u32, grad_scale: f32) -> HyperParams {
        match *self {
            Self::Sgd { weight_decay } => HyperParams::sgd(lr, weight_decay, grad_scale),
            Self::AdamW { betas, eps, weight_decay } => HyperParams::adamw(lr, betas, eps, weight_decay, t, grad_scale),
        }
    }

    fn op(&self) -> op::Optimiser {
        match self {
            Self::Sgd { .. } => op::Optimiser::Sgd,
            Self::AdamW { .. } => op::Optimiser::AdamW,
        }
    }

    fn check(&self) -> Result<()> {
        let ok = match *self {
            Self::Sgd { weight_decay } => weight_decay >= 0.0 && weight_decay.is_finite(),
            Self::AdamW { betas: (b1, b2), eps, weight_decay } => {
                let rate = |b: f64| (0.0..1.0).contains(&b);
                rate(b1) && rate(b2) && eps > 0.0 && eps.is_finite() && weight_decay >= 0.0 && weight_decay.is_finite()
            }
        };
        if ok {
            Ok(())
        } else {
            Err(Error::invalid(alloc::format!("{self:?}: decay rates lie in 0 .. 1, eps above 0, decay at 0 or above")))
        }
    }
}

/// A zeroth-order step: the estimated gradient is the sum over i of `coefficients[i] z(directions[i])`.
#[derive(Clone, Copy, Debug)]
pub struct ZoStep<'a> {
    /// All that multiplies z: g after clipping, 1/Q, lambda.
    pub coefficients: &'a [f32],
    /// Direction words.
    pub directions: &'a [u32],
    /// Seed and step; direction and epsilon are not used.
    pub noise: NoiseParams,
    /// The law of z.
    pub distribution: Distribution,
}

struct Slot {
    tensor: Tensor,
    /// First and second moment, f32, shape of the parameter.
    moments: Option<(TensorArg, TensorArg)>,
}

/// Optimiser state of some tensors of a slice, in canonical order.
pub struct Optimiser {
    rule: Rule,
    /// Steps taken.
    t: u32,
    slots: Vec<Slot>,
    hyper: TensorArg,
    sums: TensorArg,
    noise: TensorArg,
    coefficients: TensorArg,
    directions: TensorArg,
}

impl Optimiser {
    /// An optimiser of the tensors that have a gradient ([`Adapters::enable_grads`]).
    ///
    /// # Errors
    /// `InvalidArgument` for constants out of range; `OutOfMemory`.
    pub fn first_order(runner: &mut Runner, adapters: &Adapters, rule: Rule) -> Result<Self> {
        Self::new(runner, adapters.tensors()?.into_iter().filter(|t| t.grad.is_some()), rule)
    }

    /// An optimiser of the factors that are perturbed.
    ///
    /// # Errors
    /// As [`Optimiser::first_order`].
    pub fn zeroth_order(runner: &mut Runner, adapters: &Adapters, rule: Rule, factors: Factors) -> Result<Self> {
        Self::new(runner, adapters.tensors()?.into_iter().filter(|t| factors.contains(t.id.factor())), rule)
    }

    fn new(runner: &mut Runner, tensors: impl Iterator<Item = Tensor>, rule: Rule) -> Result<Self> {
        rule.check()?;
        let mut slots = Vec::new();
        for tensor in tensors {
            let mut moment = || -> Result<TensorArg> {
                let [rows, cols] = tensor.param.spec.shape();
                let m = runner.alloc(DType::F32, rows, cols, Usage::Weights)?;
                runner.upload_f32(&m, &vec![0.0; rows * cols])?;
                Ok(m)
            };
            let moments = match rule {
                Rule::Sgd { .. } => None,
                Rule::AdamW { .. } => Some((moment()?, moment()?)),
            };
            slots.push(Slot { tensor, moments });
        }
        let mut parameters = |dtype, n| runner.alloc(dtype, 1, n, Usage::Parameters);
        Ok(Self {
            rule,
            t: 0,
            hyper: parameters(DType::F32, HyperParams::LEN)?,
            sums: parameters(DType::F32, slots.len())?,
            noise: parameters(DType::U32, NoiseParams::WORDS)?,
            coefficients: parameters(DType::F32, 0)?,
            directions: parameters(DType::U32, 0)?,
            slots,
        })
    }

    /// The rule.
    pub fn rule(&self) -> Rule {
        self.rule
    }

    /// Steps taken.
    pub fn steps(&self) -> u32 {
        self.t
    }

    /// The tensors it changes, in canonical order.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.slots.iter().map(|s| &s.tensor)
    }

    /// Sum of squares of each gradient, in canonical order: partial sums of the norm that clipping looks at.
    ///
    /// # Errors
    /// `InvalidArgument` for a tensor without gradient; the queue's sticky error.
    pub fn sum_squares(&self, runner: &mut Runner) -> Result<Vec<f32>> {
        for (i, slot) in self.slots.iter().enumerate() {
            runner.run(SumSquares::new(slot.grad()?, self.sums.cols(i, 1)))?;
        }
        runner.read_f32(&self.sums)
    }

    /// A first-order step along the gradients times `grad_scale`, which is what is left after clipping. Gradients stay as they are.
    ///
    /// # Errors
    /// `InvalidArgument` for a tensor without gradient; those of [`Runner::run`].
    pub fn step(&mut self, runner: &mut Runner, lr: f64, grad_scale: f32) -> Result<()> {
        self.begin(runner, lr, grad_scale)?;
        for slot in &self.slots {
            let (grad, hyper, param) = (slot.grad()?, self.hyper.clone(), slot.tensor.param.clone());
            let update: Op<TensorArg> = match &slot.moments {
                None => op::Sgd::new(grad, hyper, param).into(),
                Some((m, v)) => op::AdamW::new(grad, hyper, param, m.clone(), v.clone()).into(),
            };
            runner.run(update)?;
        }
        Ok(())
    }

    /// A zeroth-order step.
    ///
    /// # Errors
    /// `InvalidArgument` where coefficients and directions differ in number; those of [`Runner::run`].
    pub fn step_zo(&mut self, runner: &mut Runner, lr: f64, step: &ZoStep<'_>) -> Result<()> {
        let n = step.coefficients.len();
        if n != step.directions.len() {
            return Err(Error::invalid(alloc::format!("{n} coefficients for {} directions", step.directions.len())));
        }
        if n > self.coefficients.spec.cols {
            self.coefficients = runner.alloc(DType::F32, 1, n, Usage::Parameters)?;
            self.directions = runner.alloc(DType::U32, 1, n, Usage::Parameters)?;
        }
        let (coefficients, directions) = (self.coefficients.cols(0, n), self.directions.cols(0, n));
        runner.upload_f32(&coefficients, step.coefficients)?;
        runner.upload_u32(&directions, step.directions)?;
        runner.upload_u32(&self.noise, bytemuck::cast_slice(core::slice::from_ref(&step.noise)))?;
        self.begin(runner, lr, 1.0)?;
        for slot in &self.slots {
            let update = op::ZoUpdate::new(
                coefficients.clone(),
                directions.clone(),
                self.noise.clone(),
                self.hyper.clone(),
                slot.tensor.param.clone(),
                slot.tensor.site(step.distribution),
                self.rule.op(),
            );
            let (m, v) = slot.moments.clone().unzip();
            runner.run(update.m(m).v(v))?;
        }
        Ok(())
    }

    fn begin(&mut self, runner: &mut Runner, lr: f64, grad_scale: f32) -> Result<()> {
        self.t = self.t.checked_add(1).ok_or_else(|| Error::invalid("more than 2^32 optimiser steps"))?;
        let hyper = self.rule.hyper(lr, self.t, grad_scale);
        runner.upload_f32(&self.hyper, bytemuck::cast_slice(core::slice::from_ref(&hyper)))
    }
}

impl Slot {
    fn grad(&self) -> Result<TensorArg> {
        self.tensor.grad.clone().ok_or_else(|| {
            Error::invalid("a first-order step needs gradients: enable them, and make the optimiser with `Optimiser::first_order`")
        })
    }
}

/// The norm behind `sum_squares` (of all stages, in canonical order), and the factor that keeps it within `max_norm`, as PyTorch's
/// `clip_grad_norm_` computes it. `max_norm` 0 or below means no clipping.
/// A norm that is not finite is returned as it is; no factor mends such gradients, so do not step then.
pub fn clip(sum_squares: &[f32], max_norm: f64) -> (f64, f32) {
    let norm = libm::sqrt(sum_squares.iter().map(|s| f64::from(*s)).sum());
    let scale = if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) as f32 } else { 1.0 };
    (norm, scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_shortens_and_never_lengthens() {
        assert_eq!(clip(&[9.0, 16.0], 0.0), (5.0, 1.0));
        assert_eq!(clip(&[9.0, 16.0], 6.0), (5.0, 1.0));
        let (norm, scale) = clip(&[9.0, 16.0], 1.0);
        assert_eq!(norm, 5.0);
        assert!((scale - 0.2).abs() < 1e-6);
    }

    #[test]
    fn constants_out_of_range_are_refused() {
        assert!(Rule::ADAMW.check().is_ok() && Rule::SGD.check().is_ok());
        assert!(Rule::AdamW { betas: (1.0, 0.999), eps: 1e-8, weight_decay: 0.0 }.check().is_err());
        assert!(Rule::AdamW { betas: (0.9, 0.999), eps: 0.0, weight_decay: 0.0 }.check().is_err());
        assert!(Rule::Sgd { weight_decay: f64::NAN }.check().is_err());
    }
}
