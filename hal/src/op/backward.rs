//! Backward ops: only what LoRA needs, which is dX through frozen weights, dA and dB.

use super::{check, descriptor};
use crate::{Operand, Result};

descriptor! {
    /// Gradient of [`super::RmsNorm`] with respect to h: with r = 1 / sqrt(mean(h^2) + eps) and u = gamma dout,
    /// `dx = r (u - h r^2 mean(h u)) + dresidual`. Aliasing: `dx` may be `dresidual`.
    RmsNormBackward, "rms_norm_backward", Backward,
    reads {
        /// h, `[T, d]` float.
        x,
        /// `[1, d]` float.
        gamma,
        /// `[T, d]` float.
        dout,
    },
    reads_opt {
        /// Gradient that reaches h on the residual path, `[T, d]` float.
        dresidual,
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    writes {
        /// `[T, d]` float.
        dx,
    },
    attributes {
        /// As in the forward pass.
        eps: f32,
    },
}

impl<T: Operand> RmsNormBackward<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [t, d] = self.x.spec().shape();
        check::float("x", &self.x, t, d)?;
        check::float("gamma", &self.gamma, 1, d)?;
        check::float("dout", &self.dout, t, d)?;
        check::float_opt("dresidual", &self.dresidual, t, d)?;
        check::live(&self.live)?;
        check::float("dx", &self.dx, t, d)
    }
}

descriptor! {
    /// Gradients of [`super::LoraMatMul`]: with u = scale dout B (`[T, r]`),
    /// `dx = beta dx + dout W + u A`, `da += u^T x`, `db += scale dout^T xa`.
    ///
    /// `da` and `db` accumulate over micro-batches; `beta` lets projections that share an input add up. The op in two, without `factors` for `dx` and
    /// without `dx` for `da` and `db`, gives the same bits as in one.
    LoraMatMulBackward, "lora_matmul_backward", Backward,
    reads {
        /// `[T, in]` float, as in the forward pass.
        x,
        /// `x A^T`, `[T, r]` float, as the forward pass wrote it.
        xa,
        /// A, `[r, in]` float.
        a,
        /// B, `[out, r]` float.
        b,
        /// `[T, out]` float.
        dout,
    },
    reads_opt {
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    matrices {
        /// W, `[out, in]`.
        w,
    },
    updates {
        /// f32 `[r, in]`.
        da,
        /// f32 `[out, r]`.
        db,
    },
    updates_opt {
        /// `[T, in]` float; absent where nothing upstream is trained.
        dx,
    },
    attributes {
        /// As in the forward pass.
        scale: f32,
    },
    options {
        /// Factor of what `dx` holds; 0 means it is not read.
        beta: f32 = 0.0,
        /// Whether `da` and `db` are added to; otherwise they stay as they are.
        factors: bool = true,
    },
}

impl<T: Operand> LoraMatMulBackward<T> {
    pub(super) fn check(&self) -> Result<()> {
        let ([t, inputs], [outputs, r]) = (self.x.spec().shape(), self.b.spec().shape());
        check::float("x", &self.x, t, inputs)?;
        check::float("xa", &self.xa, t, r)?;
        check::float("a", &self.a, r, inputs)?;
        check::float("b", &self.b, outputs, r)?;
        check::float("dout", &self.dout, t, outputs)?;
        check::live(&self.live)?;
        check::matrix("w", &self.w, outputs, inputs)?;
        check::typed("da", &self.da, crate::DType::F32, r, inputs)?;
        check::typed("db", &self.db, crate::DType::F32, outputs, r)?;
        check::float_opt("dx", &self.dx, t, inputs)
    }
}

descriptor! {
    /// Gradients of [`super::SwiGlu`]: `dgate = dout up silu'(gate)`, `dup = dout silu(gate)`.
    ///
    /// Aliasing: `dgate` may be `gate` or `dout`, `dup` may be `up` or `dout` (not both `dout`).
    SwiGluBackward, "swiglu_backward", Backward,
    reads {
        /// `[T, f]` float.
        gate,
        /// `[T, f]` float.
        up,
        /// `[T, f]` float.
        dout,
    },
    reads_opt {
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    writes {
        /// `[T, f]` float.
        dgate,
        /// `[T, f]` float.
        dup,
    },
}

impl<T: Operand> SwiGluBackward<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [t, f] = self.gate.spec().shape();
        for (name, x) in [("gate", &self.gate), ("up", &self.up), ("dout", &self.dout), ("dgate", &self.dgate), ("dup", &self.dup)] {
            check::float(name, x, t, f)?;
        }
        check::live(&self.live)
    }
}
