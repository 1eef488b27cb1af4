//! Row-wise forward ops.

use super::{Copies, check, descriptor};
use crate::{DType, Error, Operand, Result};
use alloc::format;

descriptor! {
    /// `out[t] = table[ids[t]]`, converted to the type of `out`. An id at or past the table's end is an execution error.
    Embedding, "embedding", Forward,
    reads {
        /// u32 `[1, T]`.
        ids,
    },
    reads_opt {
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    matrices {
        /// `[vocabulary, d]`; a weight imported for gathering, or a float tensor.
        table,
    },
    writes {
        /// `[T, d]` float.
        out,
    },
}

impl<T: Operand> Embedding<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [t, d] = self.out.spec().shape();
        check::indices("ids", &self.ids, t)?;
        check::live(&self.live)?;
        let [v, _] = self.table.shape();
        check::matrix("table", &self.table, v, d)?;
        check::float("out", &self.out, t, d)
    }
}

descriptor! {
    /// `out = gamma h / sqrt(mean(h^2) + eps)` with `h = x + residual` (Zhang & Sennrich 2019); h goes to `sum`.
    ///
    /// Tangent block, with r = 1 / sqrt(mean(h^2) + eps) of the base block: `gamma (dh r - h r^3 mean(h dh))`.
    /// h is rounded to the type of `sum` (where given) before it is used. Aliasing: `sum` may be `x` or `residual`.
    RmsNorm, "rms_norm", Forward,
    reads {
        /// `[C T, d]` float.
        x,
        /// `[1, d]` float.
        gamma,
    },
    reads_opt {
        /// `[C T, d]` float; absent means 0.
        residual,
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    writes {
        /// `[C T, d]` float.
        out,
    },
    writes_opt {
        /// `x + residual`, `[C T, d]` float.
        sum,
    },
    attributes {
        /// Added to the mean square.
        eps: f32,
    },
    options {
        /// Blocks of rows.
        copies: Copies = Copies::BASE,
    },
}

impl<T: Operand> RmsNorm<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [rows, d] = self.x.spec().shape();
        check::block_rows("x", rows, self.copies)?;
        check::float("x", &self.x, rows, d)?;
        check::float("gamma", &self.gamma, 1, d)?;
        check::float_opt("residual", &self.residual, rows, d)?;
        check::live(&self.live)?;
        check::float("out", &self.out, rows, d)?;
        check::float_opt("sum", &self.sum, rows, d)
    }
}

descriptor! {
    /// `out = silu(gate) up` with `silu(x) = x sigmoid(x)` (Shazeer 2020).
    ///
    /// Tangent block: `silu'(gate) dgate up + silu(gate) dup`, `silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x)))`. Aliasing: `out` may be `gate`
    /// or `up`.
    SwiGlu, "swiglu", Forward,
    reads {
        /// `[C T, f]` float.
        gate,
        /// `[C T, f]` float.
        up,
    },
    reads_opt {
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    writes {
        /// `[C T, f]` float.
        out,
    },
    options {
        /// Blocks of rows.
        copies: Copies = Copies::BASE,
    },
}

impl<T: Operand> SwiGlu<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [rows, f] = self.gate.spec().shape();
        check::block_rows("gate", rows, self.copies)?;
        check::float("gate", &self.gate, rows, f)?;
        check::float("up", &self.up, rows, f)?;
        check::live(&self.live)?;
        check::float("out", &self.out, rows, f)
    }
}

descriptor! {
    /// One block of rows becomes all copies: in value form each is the same, in tangent form the copies are 0. Exact.
    Spread, "spread", Forward,
    reads {
        /// `[T, d]` float.
        src,
    },
    reads_opt {
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    writes {
        /// `[C T, d]`, the type of `src`.
        out,
    },
    attributes {
        /// Blocks of rows.
        copies: Copies,
    },
}

impl<T: Operand> Spread<T> {
    pub(super) fn check(&self) -> Result<()> {
        let ([t, d], rows) = (self.src.spec().shape(), self.out.spec().rows);
        if check::block_rows("out", rows, self.copies)? != t {
            return Err(Error::invalid(format!("{t} rows cannot spread to {rows} in {} blocks", self.copies.total())));
        }
        check::float("src", &self.src, t, d)?;
        check::live(&self.live)?;
        check::typed("out", &self.out, self.src.spec().dtype, rows, d)
    }
}

descriptor! {
    /// `out[c] = sum over rows and columns of delta (h_c - base)`, in f32 or better, in an order that depends on the shape alone: the readout of
    /// a directional derivative at the cut.
    ///
    /// Without `base` (tangent form) it is `sum of delta h_c`.
    BoundaryDot, "boundary_dot", Forward,
    reads {
        /// `[T, d]` float: the gradient of the loss at the cut.
        delta,
        /// `[n T, d]` float: the perturbed copies, without a base block.
        h,
    },
    reads_opt {
        /// `[T, d]` float: the base block, for copies in value form.
        base,
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    writes {
        /// f32 `[1, n]`.
        out,
    },
}

impl<T: Operand> BoundaryDot<T> {
    pub(super) fn check(&self) -> Result<()> {
        let ([t, d], n) = (self.delta.spec().shape(), self.out.spec().cols);
        check::float("delta", &self.delta, t, d)?;
        check::float("h", &self.h, n.saturating_mul(t), d)?;
        check::float_opt("base", &self.base, t, d)?;
        check::live(&self.live)?;
        check::typed("out", &self.out, DType::F32, 1, n)
    }
}
