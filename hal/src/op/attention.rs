//! Rotary embedding, KV cache, attention.

use super::{Copies, check, descriptor};
use crate::{DType, Error, Operand, Result};
use alloc::format;

/// Which elements of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// i with i + head_dim / 2: Hugging Face checkpoints.
    Half,
    /// 2 i with 2 i + 1: the original LLaMA and GGUF.
    Interleaved,
}

descriptor! {
    /// Rotary position embedding (Su et al. 2021): pair (u, v) at angle i becomes (u cos - v sin, u sin + v cos).
    ///
    /// The tables hold cos and sin per position, so every scaling of the frequencies (linear, Llama-3) is the caller's and bit-equal on all
    /// devices. The map is linear, so tangents rotate like values. `inverse` rotates back, which is also the backward pass.
    ///
    /// Aliasing: `out` may be `x`.
    Rope, "rope", Forward,
    reads {
        /// `[C T, heads * head_dim]` float.
        x,
        /// u32 `[1, T]`, each below P.
        positions,
        /// f32 `[P, head_dim / 2]`.
        cos,
        /// f32 `[P, head_dim / 2]`.
        sin,
    },
    reads_opt {
        /// Live rows, u32 `[1, 1]`.
        live,
    },
    writes {
        /// Shape of `x`, float.
        out,
    },
    attributes {
        /// Features of a head; even.
        head_dim: usize,
        /// Which elements rotate together.
        pairing: Pairing,
    },
    options {
        /// Rotates by minus the angle.
        inverse: bool = false,
        /// Blocks of rows.
        copies: Copies = Copies::BASE,
    },
}

impl<T: Operand> Rope<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [rows, cols] = self.x.spec().shape();
        let p = self.cos.spec().rows;
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) || cols % self.head_dim != 0 {
            return Err(Error::invalid(format!("{cols} columns are no whole number of heads of (even) size {}", self.head_dim)));
        }
        let t = check::block_rows("x", rows, self.copies)?;
        check::float("x", &self.x, rows, cols)?;
        check::indices("positions", &self.positions, t)?;
        check::typed("cos", &self.cos, DType::F32, p, self.head_dim / 2)?;
        check::typed("sin", &self.sin, DType::F32, p, self.head_dim / 2)?;
        check::live(&self.live)?;
        check::float("out", &self.out, rows, cols)
    }
}

descriptor! {
    /// Writes new keys and values into a cache: `k_cache[slots[i]] = k[i]`, the same for v, rounded to the cache's type. Slots are distinct;
    /// [`super::NO_INDEX`] skips a row.
    KvAppend, "kv_append", Forward,
    reads {
        /// `[T, kv_heads * head_dim]` float.
        k,
        /// `[T, kv_heads * head_dim]` float.
        v,
        /// u32 `[1, T]`, each below S.
        slots,
    },
    updates {
        /// `[S, kv_heads * head_dim]` float.
        k_cache,
        /// `[S, kv_heads * head_dim]` float.
        v_cache,
    },
}

impl<T: Operand> KvAppend<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [t, d] = self.k.spec().shape();
        let s = self.k_cache.spec().rows;
        check::float("k", &self.k, t, d)?;
        check::float("v", &self.v, t, d)?;
        check::indices("slots", &self.slots, t)?;
        check::float("k_cache", &self.k_cache, s, d)?;
        check::float("v_cache", &self.v_cache, s, d)
    }
}

/// Heads of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads; head h reads `h / (heads / kv_heads)` (grouped-query attention).
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Factor of the scores, usually 1 / sqrt(head_dim).
    pub scale: f32,
    /// Whether query i of a sequence with n queries and s keys sees keys `0 ..= i + s - n` only.
    pub causal: bool,
}

impl AttentionShape {
    /// Columns of q; more than any tensor has where the product overflows.
    fn wide(&self) -> usize {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Columns of k and v, likewise.
    fn narrow(&self) -> usize {
        self.kv_heads.saturating_mul(self.head_dim)
    }

    fn check(&self) -> Result<()> {
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) || self.head_dim == 0 {
            return Err(Error::invalid(format!("{self:?}: heads must be a multiple of kv_heads, head_dim positive")));
        }
        Ok(())
    }
}

fn cu_seqlens<T: Operand>(q: &T, kv: &T) -> Result<()> {
    let n = q.spec().cols;
    if n == 0 {
        return Err(Error::invalid("cu_q has no element; it starts with 0"));
    }
    check::indices("cu_q", q, n)?;
    check::indices("cu_kv", kv, n)
}

descriptor! {
    /// Softmax of `scale * scores` over the keys that a query of one head sees, 0 elsewhere: the primitive that attention decomposes into.
    ///
    /// Row i of sequence s (rows `cu_q[s] .. cu_q[s+1]`) sees columns from `cu_kv[s]` to its causal end. Rows outside every sequence are not
    /// touched. Aliasing: `out` may be `scores`.
    MaskedSoftmax, "masked_softmax", Primitive,
    reads {
        /// `[T, S]` float.
        scores,
        /// u32 `[1, n + 1]`, ascending from 0, last at most T.
        cu_q,
        /// u32 `[1, n + 1]`, ascending from 0, last at most S.
        cu_kv,
    },
    writes {
        /// `[T, S]` float.
        out,
    },
    writes_opt {
        /// Log of the sum of exponentials per row, f32 `[T, 1]`.
        lse,
    },
    attributes {
        /// Factor of the scores.
        scale: f32,
        /// As in [`AttentionShape`].
        causal: bool,
    },
}

impl<T: Operand> MaskedSoftmax<T> {
    pub(super) fn check(&self) -> Result<()> {
        let [t, s] = self.scores.spec().shape();
        check::float("scores", &self.scores, t, s)?;
        cu_seqlens(&self.cu_q, &self.cu_kv)?;
        check::float("out", &self.out, t, s)?;
        self.lse.as_ref().map_or(Ok(()), |l| check::typed("lse", l, DType::F32, t, 1))
    }
}

descriptor! {
    /// Scaled dot-product attention over packed sequences, with grouped queries, causal, with query and key lengths of their own (bottom-right
    /// aligned, as in FlashAttention's varlen form): `softmax(scale q k^T) v` per head and sequence.
    ///
    /// Sequence s has queries `cu_q[s] .. cu_q[s+1]` and keys `cu_kv[s] .. cu_kv[s+1]`; equal neighbours are an empty sequence, so unused
    /// entries repeat the last. A query that sees no key gives 0. Rows outside every sequence are neither read nor written. Tangent block c:
    /// with p the base block's probabilities and ds = scale (dq k^T + q dk^T),  `dout = (p (ds - sum p ds)) v + p dv`.
    Attention, "attention", Forward,
    reads {
        /// `[C T, heads * head_dim]` float.
        q,
        /// `[C S, kv_heads * head_dim]` float.
        k,
        /// `[C S, kv_heads * head_dim]` float.
        v,
        /// u32 `[1, n + 1]`, ascending from 0, last at most T.
        cu_q,
        /// u32 `[1, n + 1]`, ascending from 0, last at most S.
        cu_kv,
    },
    writes {
        /// `[C T, heads * head_dim]` float.
        out,
    },
    writes_opt {
        /// Log of the sum of exponentials, f32 `[T, heads]`, of the base block; for the backward pass.
        lse,
    },
    attributes {
        /// Heads.
        shape: AttentionShape,
    },
    options {
        /// Blocks of rows.
        copies: Copies = Copies::BASE,
    },
}

impl<T: Operand> Attention<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = &self.shape;
        s.check()?;
        let [rows, kv_rows] = [self.q.spec().rows, self.k.spec().rows];
        let t = check::block_rows("q", rows, self.copies)?;
        check::block_rows("k", kv_rows, self.copies)?;
        check::float("q", &self.q, rows, s.wide())?;
        check::float("k", &self.k, kv_rows, s.narrow())?;
        check::float("v", &self.v, kv_rows, s.narrow())?;
        cu_seqlens(&self.cu_q, &self.cu_kv)?;
        check::float("out", &self.out, rows, s.wide())?;
        if self.lse.is_some() && !self.copies.has_base {
            return Err(Error::invalid("lse is taken from the base block, which these copies do not have"));
        }
        self.lse.as_ref().map_or(Ok(()), |l| check::typed("lse", l, DType::F32, t, s.heads))
    }
}

descriptor! {
    /// Gradients of [`Attention`] (base block) with respect to q, k and v, from the saved output and log-sum-exp (Dao 2023, algorithm 2):
    /// p = exp(scale q k^T - lse), dv = p^T dout, ds = p (dout v^T - rowsum(dout out)), dq = scale ds k, dk = scale ds^T q; key heads sum over
    /// their query heads in ascending order.
    AttentionBackward, "attention_backward", Backward,
    reads {
        /// `[T, heads * head_dim]` float.
        q,
        /// `[S, kv_heads * head_dim]` float.
        k,
        /// `[S, kv_heads * head_dim]` float.
        v,
        /// `[T, heads * head_dim]` float, as the forward pass wrote it.
        out,
        /// f32 `[T, heads]`, as the forward pass wrote it.
        lse,
        /// `[T, heads * head_dim]` float.
        dout,
        /// As in [`Attention`].
        cu_q,
        /// As in [`Attention`].
        cu_kv,
    },
    writes {
        /// Shape of `q`, float.
        dq,
        /// Shape of `k`, float.
        dk,
        /// Shape of `v`, float.
        dv,
    },
    attributes {
        /// Heads.
        shape: AttentionShape,
    },
}

impl<T: Operand> AttentionBackward<T> {
    pub(super) fn check(&self) -> Result<()> {
        let s = &self.shape;
        s.check()?;
        let [t, kv] = [self.q.spec().rows, self.k.spec().rows];
        let (wide, narrow) = (s.wide(), s.narrow());
        for (name, x) in [("q", &self.q), ("out", &self.out), ("dout", &self.dout), ("dq", &self.dq)] {
            check::float(name, x, t, wide)?;
        }
        for (name, x) in [("k", &self.k), ("v", &self.v), ("dk", &self.dk), ("dv", &self.dv)] {
            check::float(name, x, kv, narrow)?;
        }
        cu_seqlens(&self.cu_q, &self.cu_kv)?;
        check::typed("lse", &self.lse, DType::F32, t, s.heads)
    }
}
