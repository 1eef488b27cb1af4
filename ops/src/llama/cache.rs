//! Decoding: keys and values of the tokens so far are kept, so a new token costs one row.

use alloc::{format, vec::Vec};

use zofo_hal::{DType, Error, Result, TensorArg, Usage, op::Copies};

use super::{
    block::Stream,
    pass::{Act, Keys, Pass},
    slice::Slice,
};
use crate::{lora::Adapters, run::Runner};

/// What a slice decodes next.
#[derive(Clone, Copy, Debug)]
pub enum CachedInput<'a> {
    /// New tokens.
    Tokens(&'a [u32]),
    /// Their hidden states from the slice before, f32 `[n, d]`.
    Hidden(&'a TensorArg),
}

/// Keys and values of one sequence in the layers of one slice, in its compute type.
pub struct KvCache {
    layers: Vec<(TensorArg, TensorArg)>,
    ids: TensorArg,
    positions: TensorArg,
    cu_q: TensorArg,
    cu_kv: TensorArg,
    capacity: usize,
    tokens: usize,
}

impl KvCache {
    /// Room for `capacity` tokens.
    ///
    /// # Errors
    /// `InvalidArgument` where that is more than the slice has positions for; `OutOfMemory`.
    pub fn new(runner: &mut Runner, slice: &Slice, capacity: usize) -> Result<Self> {
        slice.config.check_sequence(capacity)?;
        if capacity == 0 || capacity > slice.spec.positions {
            return Err(Error::invalid(format!(
                "a cache of {capacity} tokens, in a slice loaded for sequences of 1 to {}",
                slice.spec.positions
            )));
        }
        let width = slice.config.kv_width();
        let mut layers = Vec::with_capacity(slice.layers.len());
        for _ in &slice.layers {
            let mut cache = || runner.alloc(slice.spec.compute, capacity, width, Usage::Activations);
            layers.push((cache()?, cache()?));
        }
        let mut words = |n: usize| runner.alloc(DType::U32, 1, n, Usage::Parameters);
        let (ids, positions, cu_q, cu_kv) = (words(capacity)?, words(capacity)?, words(2)?, words(2)?);
        Ok(Self { layers, ids, positions, cu_q, cu_kv, capacity, tokens: 0 })
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.tokens
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Tokens there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets the tokens behind the first `tokens`; 0 starts a new sequence.
    pub fn truncate(&mut self, tokens: usize) {
        self.tokens = self.tokens.min(tokens);
    }
}

impl Slice {
    /// Hidden states of new tokens at the slice's end, f32 `[n, d]`; their keys and values are added to the cache.
    ///
    /// # Errors
    /// `InvalidArgument` where there is no new token, the cache is full, the input does not suit the slice, or the slice shares its layers
    /// with others; those of [`Runner::run`].
    pub fn forward_cached(
        &self,
        runner: &mut Runner,
        adapters: &Adapters,
        cache: &mut KvCache,
        input: CachedInput<'_>,
    ) -> Result<TensorArg> {
        if self.peers.is_some() {
            return Err(Error::invalid(format!(
                "layers {:?} are shared by several devices, which do not decode with a cache; load the slice whole for it",
                self.spec.layers
            )));
        }
        let (n, first) = match input {
            CachedInput::Tokens(ids) => (ids.len(), cache.tokens),
            CachedInput::Hidden(h) => (h.spec.rows, cache.tokens),
        };
        let end = first + n;
        if n == 0 || end > cache.capacity {
            return Err(Error::invalid(format!("{n} new tokens behind {first} in a cache of {}", cache.capacity)));
        }
        let positions: Vec<u32> = (first as u32..end as u32).collect();
        let row_positions = cache.positions.cols(0, n);
        runner.upload_u32(&row_positions, &positions)?;
        runner.upload_u32(&cache.cu_q, &[0, n as u32])?;
        runner.upload_u32(&cache.cu_kv, &[0, end as u32])?;
        let stream = match input {
            CachedInput::Tokens(ids) => {
                let row_ids = cache.ids.cols(0, n);
                runner.upload_u32(&row_ids, ids)?;
                Stream::new(Act { tensor: self.embed(runner, &row_ids, None)?, shared: true }, true)
            }
            CachedInput::Hidden(h) => Stream::new(Act { tensor: h.clone(), shared: true }, false),
        };
        let mut stream = stream;
        let mut pass = Pass {
            runner,
            slice: self,
            rows: n,
            live_rows: n,
            live: None,
            positions: row_positions.clone(),
            // A token's slot is its position.
            keys: Keys::Cached { slots: &row_positions, cu_q: &cache.cu_q, cu_kv: &cache.cu_kv, layers: &cache.layers },
            adapters,
            copies: Copies::BASE,
            perturbation: None,
            keep: None,
        };
        for layer in &self.layers {
            pass.layer(layer, &mut stream, None)?;
        }
        let out = pass.end(stream)?.tensor;
        cache.tokens = end;
        Ok(out)
    }
}
