//! The fused language-model head: losses, their gradient, scores.

use super::{Copies, check, descriptor};
use crate::{DType, Error, Operand, Result};

descriptor! {
    /// Next-token cross entropy with the LM head fused in and streamed over the vocabulary, for the labelled rows alone:
    /// `losses[c, i] = logsumexp(h_r W^T) - (h_r W^T)[targets[i]]` with r = `rows[i]` of block c. Logits are never in memory as a whole.
    ///
    /// Tangent block: `sum_v p_v dlogit_v - dlogit[target]`, `dlogit = dh_r W^T`, p of the base block. A row of [`super::NO_INDEX`] is padding:
    /// its loss is 0. Labelled rows are distinct. Accumulates in f32.
    CrossEntropy, "cross_entropy", Forward,
    reads {
        /// `[C T, d]` float, after the final norm.
        h,
        /// u32 `[1, R]`, each below T or `NO_INDEX`.
        rows,
        /// u32 `[1, R]`, each below V.
        targets,
    },
    matrices {
        /// LM head, `[V, d]`.
        head,
    },
    writes {
        /// f32 `[C, R]`.
        losses,
    },
    writes_opt {
        /// Gradient of each loss with respect to its row, `sum_v p_v W_v - W[targets[i]]`, f32 `[R, d]`; 0 for padding. Of a base pass alone. Formed
        /// while the logits pass, which are then needed only once.
        slope,
    },
    options {
        /// Blocks of rows.
        copies: Copies = Copies::BASE,
    },
}

impl<T: Operand> CrossEntropy<T> {
    pub(super) fn check(&self) -> Result<()> {
        let ([rows, d], r) = (self.h.spec().shape(), self.rows.spec().cols);
        check::block_rows("h", rows, self.copies)?;
        check::float("h", &self.h, rows, d)?;
        check::indices("rows", &self.rows, r)?;
        check::indices("targets", &self.targets, r)?;
        check::matrix("head", &self.head, self.head.shape()[0], d)?;
        check::typed("losses", &self.losses, DType::F32, self.copies.total(), r)?;
        if self.slope.is_some() && self.copies != Copies::BASE {
            return Err(Error::invalid("slope is that of a base pass, and these are copies"));
        }
        self.slope.as_ref().map_or(Ok(()), |s| check::typed("slope", s, DType::F32, r, d))
    }
}

descriptor! {
    /// Gradient of `scale * sum of losses` with respect to all rows: `dh_r = scale slope_i` with r = `rows[i]`, 0 on rows without a label. Labelled
    /// rows are distinct.
    CrossEntropyBackward, "cross_entropy_backward", Backward,
    reads {
        /// f32 `[R, d]`, as the forward pass wrote it.
        slope,
        /// u32 `[1, R]`, each below T or `NO_INDEX`.
        rows,
        /// f32 `[1, 1]`: 1 over the label count of the mini-batch.
        scale,
    },
    writes {
        /// `[T, d]` float.
        dh,
    },
}

impl<T: Operand> CrossEntropyBackward<T> {
    pub(super) fn check(&self) -> Result<()> {
        let ([t, d], r) = (self.dh.spec().shape(), self.rows.spec().cols);
        check::typed("slope", &self.slope, DType::F32, r, d)?;
        check::indices("rows", &self.rows, r)?;
        check::typed("scale", &self.scale, DType::F32, 1, 1)?;
        check::float("dh", &self.dh, t, d)
    }
}

descriptor! {
    /// Logits of a few candidate tokens: `out[i, j] = h[rows[i]] . head[candidates[j]]`, without the rest of the vocabulary. Accumulates in f32.
    CandidateScores, "candidate_scores", Forward,
    reads {
        /// `[T, d]` float, after the final norm.
        h,
        /// u32 `[1, R]`, each below T.
        rows,
        /// u32 `[1, K]`, each below V.
        candidates,
    },
    matrices {
        /// LM head, `[V, d]`; a weight imported for gathering, or a float tensor.
        head,
    },
    writes {
        /// f32 `[R, K]`.
        out,
    },
}

impl<T: Operand> CandidateScores<T> {
    pub(super) fn check(&self) -> Result<()> {
        let ([t, d], [r, k]) = (self.h.spec().shape(), self.out.spec().shape());
        check::float("h", &self.h, t, d)?;
        check::indices("rows", &self.rows, r)?;
        check::indices("candidates", &self.candidates, k)?;
        check::matrix("head", &self.head, self.head.shape()[0], d)?;
        check::typed("out", &self.out, DType::F32, r, k)
    }
}

descriptor! {
    /// Index of the largest element of each row; the lowest of equals, and the first NaN if there is one. Exact.
    ArgMax, "argmax", Primitive,
    reads {
        /// `[rows, cols]` float, at least one column unless there are no rows.
        x,
    },
    writes {
        /// u32 `[1, rows]`.
        out,
    },
}

impl<T: Operand> ArgMax<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [rows, cols] = self.x.spec().shape();
        check::float("x", &self.x, rows, cols)?;
        if rows > 0 && cols == 0 {
            return Err(Error::invalid("x has no column to choose"));
        }
        check::indices("out", &self.out, rows)
    }
}
