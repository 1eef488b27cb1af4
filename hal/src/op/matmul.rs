//! Matrix products: plain, with LoRA, and with perturbed LoRA.
//!
//! In all of them a device may round the values of a block-quantised weight to the type of the activations they meet, where that has 16 bits:
//! units that multiply 16-bit numbers have no use for more. The reference device does not.
//!
//! A device that says [`crate::Features::int8_products`] rounds rows of `a` (`x`) to 8 bits where they meet a block-quantised weight as `x W^T`, in
//! blocks of 32: with `m` the largest magnitude of a block, each of its numbers is off by at most `m / 254`, up to roundings of f32. Factors of an
//! adapter and backward products are not affected. A block with a number that is not finite makes the row's results NaN.

use super::{Copies, Form, check, descriptor};
use crate::{Error, Operand, Result, perturb::Site};
use alloc::format;

/// Which operand of a product is transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Orientation {
    /// `a b^T`: `[m, k] x [n, k]`. The forward pass with a weight `[out, in]`.
    Nt,
    /// `a b`: `[m, k] x [k, n]`. Back through the same weight.
    Nn,
    /// `a^T b`: `[k, m] x [k, n]`. Gradients of factors; `live` counts rows of both.
    Tn,
}

descriptor! {
    /// `out = alpha op(a) op(b) + beta out + bias`, accumulated in f32 over k ascending or in an order that depends on k alone, so that a
    /// row's bits do not depend on the number of rows (not required of [`Orientation::Tn`], whose k is the rows).
    ///
    /// With beta 0 `out` is not read. `bias` is added to blocks that are not tangents. Tolerance: `k` roundings of f32 in any order.
    MatMul, "matmul", Primitive,
    reads {
        /// `[m, k]`, or `[k, m]` for `Tn`; float.
        a,
    },
    reads_opt {
        /// `[1, n]` float.
        bias,
        /// Live rows, u32 `[1, 1]`: of `a` and `out` for `Nt` and `Nn`, of `a` and `b` for `Tn`.
        live,
    },
    matrices {
        /// `[n, k]` for `Nt`, `[k, n]` for `Nn` and `Tn`; float tensor, or a weight for `Nt` and `Nn`.
        b,
    },
    updates {
        /// `[m, n]` float.
        out,
    },
    attributes {
        /// Which operand is transposed.
        orientation: Orientation,
    },
    options {
        /// Factor of the product.
        alpha: f32 = 1.0,
        /// Factor of what `out` holds.
        beta: f32 = 0.0,
        /// Blocks that `live` and `bias` apply to.
        copies: Copies = Copies::BASE,
    },
}

impl<T: Operand> MatMul<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [m, n] = self.out.spec().shape();
        let a = self.a.spec();
        check::float("out", &self.out, m, n)?;
        check::float_opt("bias", &self.bias, 1, n)?;
        check::live(&self.live)?;
        match self.orientation {
            Orientation::Nt => {
                check::float("a", &self.a, m, a.cols)?;
                check::matrix("b", &self.b, n, a.cols)?;
            }
            Orientation::Nn => {
                check::float("a", &self.a, m, a.cols)?;
                check::matrix("b", &self.b, a.cols, n)?;
            }
            Orientation::Tn => {
                check::float("a", &self.a, a.rows, m)?;
                check::matrix("b", &self.b, a.rows, n)?;
                if matches!(self.b, crate::Matrix::Weight(_)) {
                    return Err(Error::invalid("b of a Tn product is an activation, not a weight"));
                }
            }
        }
        let rows = if self.orientation == Orientation::Tn { a.rows } else { m };
        check::block_rows("a", rows, self.copies).map(drop)
    }
}

descriptor! {
    /// A linear layer with a LoRA adapter: `out = x W^T + bias + scale (x A^T) B^T` (Hu et al. 2021, eq. 3), accumulated in f32.
    ///
    /// `bias` is added to blocks that are not tangents; the rest is linear, so copies of either form are just more rows.
    LoraMatMul, "lora_matmul", Forward,
    reads {
        /// `[C T, in]` float.
        x,
        /// A, `[r, in]` float.
        a,
        /// B, `[out, r]` float.
        b,
    },
    reads_opt {
        /// `[1, out]` float.
        bias,
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    matrices {
        /// W, `[out, in]`.
        w,
    },
    writes {
        /// `[C T, out]` float.
        out,
    },
    writes_opt {
        /// `x A^T`, `[C T, r]` float, for the backward pass.
        xa,
    },
    attributes {
        /// alpha / r, or alpha / sqrt(r) for rsLoRA.
        scale: f32,
    },
    options {
        /// Blocks of rows.
        copies: Copies = Copies::BASE,
    },
}

impl<T: Operand> LoraMatMul<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [rows, inputs] = self.x.spec().shape();
        let [r, outputs] = [self.a.spec().rows, self.out.spec().cols];
        check::block_rows("x", rows, self.copies)?;
        check::float("x", &self.x, rows, inputs)?;
        check::float("a", &self.a, r, inputs)?;
        check::float("b", &self.b, outputs, r)?;
        check::float_opt("bias", &self.bias, 1, outputs)?;
        check::live(&self.live)?;
        check::matrix("w", &self.w, outputs, inputs)?;
        check::float("out", &self.out, rows, outputs)?;
        check::float_opt("xa", &self.xa, rows, r)
    }
}

descriptor! {
    /// A linear layer whose adapter is perturbed per copy, with z regenerated from seeds inside the kernel.
    ///
    /// Base block: as [`LoraMatMul`]. Perturbed block c, with A' = A + eps zA(q), B' = B + eps zB(q) and q = direction + c:
    /// - value form: `x W^T + bias + scale (x A'^T) B'^T`; A' and B' are rounded once to the type that the device multiplies in;
    /// - tangent form: `dx W^T + scale ((dx A^T + x zA^T) B^T + (x A^T) zB^T)`, with x the base block's row and dx the copy's; eps plays no part.
    ///
    /// A factor without a site is not perturbed. With `shared_input`, `x` has the rows of one block, which every copy starts from: the value
    /// form computes the base product once, and the tangent form has dx = 0. z is never in device global memory on a device that answers
    /// `Native`.
    PerturbLoraMatMul, "perturb_lora_matmul", Forward,
    reads {
        /// `[C T, in]`, or `[T, in]` with `shared_input`; float.
        x,
        /// A, `[r, in]` float.
        a,
        /// B, `[out, r]` float.
        b,
        /// [`crate::perturb::NoiseParams`] as u32 `[1, 8]`.
        noise,
    },
    reads_opt {
        /// `[1, out]` float.
        bias,
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    matrices {
        /// W, `[out, in]`.
        w,
    },
    writes {
        /// `[C T, out]` float.
        out,
    },
    writes_opt {
        /// `x A^T` of the base block, `[T, r]` float: what guided estimates need. Requires a base block.
        xa,
    },
    attributes {
        /// alpha / r, or alpha / sqrt(r) for rsLoRA.
        scale: f32,
        /// Blocks of rows.
        copies: Copies,
    },
    options {
        /// Where A lies in its unsharded tensor; `None` leaves it unperturbed.
        site_a: Option<Site> = None,
        /// Where B lies in its unsharded tensor; `None` leaves it unperturbed.
        site_b: Option<Site> = None,
        /// Whether all copies start from the same input.
        shared_input: bool = false,
    },
}

impl<T: Operand> PerturbLoraMatMul<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [rows, outputs] = self.out.spec().shape();
        let [r, inputs] = self.a.spec().shape();
        let block = check::block_rows("out", rows, self.copies)?;
        let x_rows = if self.shared_input { block } else { rows };
        check::float("x", &self.x, x_rows, inputs)?;
        check::float("a", &self.a, r, inputs)?;
        check::float("b", &self.b, outputs, r)?;
        check::indices("noise", &self.noise, 8)?;
        check::float_opt("bias", &self.bias, 1, outputs)?;
        check::live(&self.live)?;
        check::matrix("w", &self.w, outputs, inputs)?;
        check::float("out", &self.out, rows, outputs)?;
        check::float_opt("xa", &self.xa, block, r)?;
        if self.xa.is_some() && !self.copies.has_base {
            return Err(Error::invalid("xa is taken from the base block, which these copies do not have"));
        }
        if let Some(s) = &self.site_a {
            s.check(r, inputs).map_err(|e| e.context("site_a"))?;
        }
        if let Some(s) = &self.site_b {
            s.check(outputs, r).map_err(|e| e.context("site_b"))?;
        }
        match self.copies.form {
            Form::Tangent if self.copies.count == 0 => Err(Error::invalid(format!("{:?} has no tangent", self.copies))),
            _ => Ok(()),
        }
    }
}
