//! What a forward pass carries: copies, perturbation, activations that are still the same in all copies.

use alloc::{collections::BTreeMap, format};

use zofo_hal::{
    DType, Error, Result, TensorArg, Usage,
    op::{Attention, AttentionShape, Copies, KvAppend, LoraMatMul, MatMul, Orientation, Pairing, PerturbLoraMatMul, Rope, Spread},
    perturb::{Distribution, Factor, NoiseParams, Projection, Site, TensorId},
};

use super::slice::{Layer, Slice};
use crate::{
    lora::{Adapters, LoraTensors},
    run::Runner,
};

/// What a slice starts from.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// The batch's token ids, looked up in the slice's embedding.
    Tokens,
    /// Hidden states of the slice before, f32 `[T, d]` or `[C T, d]`.
    Hidden(&'a TensorArg),
}

/// Which factors are perturbed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Factors {
    /// B alone. While B is 0 the gradient of A is 0, so noise in A would teach nothing.
    #[default]
    B,
    /// A and B.
    Ab,
}

impl Factors {
    /// Whether `factor` is perturbed.
    pub fn contains(self, factor: Factor) -> bool {
        self == Self::Ab || factor == Factor::B
    }
}

/// Directions along which adapters are perturbed.
#[derive(Clone, Debug)]
pub struct Perturbation {
    /// [`NoiseParams`] as u32 `[1, 8]`: seed, step, direction of the first copy, epsilon.
    pub noise: TensorArg,
    /// Which factors.
    pub factors: Factors,
    /// The law of z.
    pub distribution: Distribution,
}

impl Perturbation {
    /// Directions in a parameter buffer of the runner's queue.
    ///
    /// # Errors
    /// `OutOfMemory`; the queue's sticky error.
    pub fn new(runner: &mut Runner, params: &NoiseParams, factors: Factors, distribution: Distribution) -> Result<Self> {
        let noise = runner.alloc(DType::U32, 1, NoiseParams::WORDS, Usage::Parameters)?;
        let perturbation = Self { noise, factors, distribution };
        perturbation.set(runner, params)?;
        Ok(perturbation)
    }

    /// Other directions in the same buffer.
    ///
    /// # Errors
    /// The queue's sticky error.
    pub fn set(&self, runner: &mut Runner, params: &NoiseParams) -> Result<()> {
        runner.upload_u32(&self.noise, bytemuck::cast_slice(core::slice::from_ref(params)))
    }

    fn site(&self, layer: usize, projection: Projection, factor: Factor, tensor: &TensorArg) -> Result<Option<Site>> {
        if !self.factors.contains(factor) {
            return Ok(None);
        }
        let id = TensorId::new(layer as u32, projection, factor)?;
        Ok(Some(Site::new(id, tensor.spec.cols as u32).with(self.distribution)))
    }
}

/// `x A^T` of the projections that write to the residual stream, f32 `[T, r]`: all that a forward pass keeps for guided estimates.
#[derive(Clone, Debug, Default)]
pub struct RankActivations(BTreeMap<(usize, Projection), TensorArg>);

impl RankActivations {
    /// Nothing kept yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// That of one projection.
    pub fn get(&self, layer: usize, projection: Projection) -> Option<&TensorArg> {
        self.0.get(&(layer, projection))
    }

    /// Bytes they take.
    pub fn bytes(&self) -> usize {
        self.0.values().map(|t| t.spec.span_bytes()).sum()
    }
}

/// An activation: one block that is still the same in all copies, or all copies.
///
/// A shared block stands for equal copies in value form and for zero tangents in tangent form; as long as nothing perturbed was met, copies
/// cost nothing.
#[derive(Clone, Debug)]
pub(super) struct Act {
    pub tensor: TensorArg,
    pub shared: bool,
}

/// Where queries find their keys.
pub(super) enum Keys<'a> {
    /// Among the rows of the pass itself.
    Packed(TensorArg),
    /// In a cache, to which the rows of the pass are added first.
    Cached {
        slots: &'a TensorArg,
        cu_q: &'a TensorArg,
        cu_kv: &'a TensorArg,
        /// Keys and values of each layer of the slice.
        layers: &'a [(TensorArg, TensorArg)],
    },
}

pub(super) struct Pass<'a> {
    pub runner: &'a mut Runner,
    pub slice: &'a Slice,
    /// Rows of one block.
    pub rows: usize,
    /// How many of them count.
    pub live_rows: usize,
    pub live: Option<TensorArg>,
    pub positions: TensorArg,
    pub keys: Keys<'a>,
    pub adapters: &'a Adapters,
    pub copies: Copies,
    pub perturbation: Option<&'a Perturbation>,
    pub keep: Option<&'a mut RankActivations>,
}

impl Pass<'_> {
    /// The blocks of an activation.
    pub fn blocks(&self, shared: bool) -> Copies {
        if shared { Copies::BASE } else { self.copies }
    }

    /// A new activation, in the compute type.
    pub fn act(&mut self, cols: usize, shared: bool) -> Result<Act> {
        self.typed(self.slice.spec.compute, cols, shared)
    }

    pub fn typed(&mut self, dtype: DType, cols: usize, shared: bool) -> Result<Act> {
        let tensor = self.runner.temp(dtype, self.rows * self.blocks(shared).total(), cols)?;
        Ok(Act { tensor, shared })
    }

    /// All copies of an activation.
    pub fn spread(&mut self, act: Act) -> Result<Act> {
        if !act.shared {
            return Ok(act);
        }
        if self.copies.total() == 1 {
            return Ok(Act { shared: false, ..act });
        }
        let out = self.typed(act.tensor.spec.dtype, act.tensor.spec.cols, false)?;
        self.runner.run(Spread::new(act.tensor, out.tensor.clone(), self.copies).live(self.live.clone()))?;
        Ok(out)
    }

    /// Activations that meet in one op: all shared, or all spread.
    pub fn meet<const N: usize>(&mut self, acts: [Act; N]) -> Result<[Act; N]> {
        if acts.iter().all(|a| a.shared) {
            return Ok(acts);
        }
        let mut met = acts;
        for act in &mut met {
            *act = self.spread(act.clone())?;
        }
        Ok(met)
    }

    /// A projection with its adapter, perturbed where the pass says so. `x A^T` is returned if asked for, f32 `[T, r]` of the base block.
    pub fn linear(&mut self, layer: &Layer, p: Projection, x: &Act, want_xa: bool) -> Result<(Act, Option<TensorArg>)> {
        let adapters = self.adapters;
        let Some(lora) = adapters.get(layer.index, p) else {
            let out = self.act(layer.weight(p).spec().rows, x.shared)?;
            let product = MatMul::new(x.tensor.clone(), layer.weight(p), out.tensor.clone(), Orientation::Nt);
            self.runner.run(product.bias(layer.bias(p)).live(self.live.clone()).copies(self.blocks(x.shared)))?;
            return Ok((out, None));
        };
        let keep = self.keep.is_some() && matches!(p, Projection::O | Projection::Down);
        if keep && !self.copies.has_base {
            return Err(Error::invalid("rank-r activations are kept from the base block, which these copies do not have"));
        }
        let (out, xa) = match self.perturbation {
            Some(_) => self.perturbed(layer, p, x, lora, want_xa || keep)?,
            None => self.adapted(layer, p, x, lora, want_xa || keep)?,
        };
        if keep && let (Some(kept), Some(xa)) = (&mut self.keep, &xa) {
            kept.0.insert((layer.index, p), xa.clone());
        }
        Ok((out, xa.filter(|_| want_xa)))
    }

    fn adapted(&mut self, layer: &Layer, p: Projection, x: &Act, lora: &LoraTensors, want_xa: bool) -> Result<(Act, Option<TensorArg>)> {
        let out = self.act(layer.weight(p).spec().rows, x.shared)?;
        let xa = want_xa.then(|| self.typed(DType::F32, lora.rank, x.shared)).transpose()?.map(|a| a.tensor);
        let product = LoraMatMul::new(x.tensor.clone(), lora.a.clone(), lora.b.clone(), layer.weight(p), out.tensor.clone(), lora.scale);
        let product = product.bias(layer.bias(p)).live(self.live.clone()).xa(xa.clone()).copies(self.blocks(x.shared));
        self.runner.run(product)?;
        Ok((out, xa.map(|xa| xa.rows(0, self.rows))))
    }

    fn perturbed(&mut self, layer: &Layer, p: Projection, x: &Act, lora: &LoraTensors, want_xa: bool) -> Result<(Act, Option<TensorArg>)> {
        let Some(perturbation) = self.perturbation else {
            return self.adapted(layer, p, x, lora, want_xa);
        };
        let out = self.act(layer.weight(p).spec().rows, false)?;
        let xa = want_xa.then(|| self.typed(DType::F32, lora.rank, true)).transpose()?.map(|a| a.tensor);
        let product = PerturbLoraMatMul::new(
            x.tensor.clone(),
            lora.a.clone(),
            lora.b.clone(),
            perturbation.noise.clone(),
            layer.weight(p),
            out.tensor.clone(),
            lora.scale,
            self.copies,
        );
        let product = product
            .site_a(perturbation.site(layer.index, p, Factor::A, &lora.a)?)
            .site_b(perturbation.site(layer.index, p, Factor::B, &lora.b)?)
            .shared_input(x.shared)
            .bias(layer.bias(p))
            .live(self.live.clone())
            .xa(xa.clone());
        self.runner.run(product)?;
        Ok((out, xa))
    }

    /// Sums what a projection wrote over the members that share its inputs.
    pub fn all_reduce(&mut self, act: &Act) -> Result<()> {
        match &self.slice.peers {
            Some(peers) => peers.all_reduce(self.runner, &act.tensor, self.rows, self.live_rows),
            None => Ok(()),
        }
    }

    /// Rotates queries or keys in place.
    pub fn rope(&mut self, x: &Act) -> Result<()> {
        let (tables, t) = (&self.slice.rope, &x.tensor);
        let (cos, sin) = (tables.cos.clone(), tables.sin.clone());
        let rope = Rope::new(t.clone(), self.positions.clone(), cos, sin, t.clone(), self.slice.config.head_dim, Pairing::Half);
        self.runner.run(rope.live(self.live.clone()).copies(self.blocks(x.shared)))
    }

    /// Attention of met activations; `lse` of the base block goes where it is given.
    pub fn attention(&mut self, layer: &Layer, [q, k, v]: [&Act; 3], lse: Option<TensorArg>) -> Result<Act> {
        let out = self.act(q.tensor.spec.cols, q.shared)?;
        let (keys, values, cu_q, cu_kv) = match &self.keys {
            Keys::Packed(cu) => (k.tensor.clone(), v.tensor.clone(), cu.clone(), cu.clone()),
            Keys::Cached { slots, cu_q, cu_kv, layers } => {
                let number = layer.index - self.slice.spec.layers.start;
                let Some((keys, values)) = layers.get(number) else {
                    return Err(Error::invalid(format!("the cache has no layer {}; make it for this slice", layer.index)));
                };
                let append = KvAppend::new(k.tensor.clone(), v.tensor.clone(), (*slots).clone(), keys.clone(), values.clone());
                self.runner.run(append)?;
                (keys.clone(), values.clone(), (*cu_q).clone(), (*cu_kv).clone())
            }
        };
        let shape = shape(self.slice);
        let attention = Attention::new(q.tensor.clone(), keys, values, cu_q, cu_kv, out.tensor.clone(), shape);
        self.runner.run(attention.lse(lse).copies(self.blocks(q.shared)))?;
        Ok(out)
    }
}

/// The heads of a slice's attention.
pub(super) fn shape(slice: &Slice) -> AttentionShape {
    let c = &slice.config;
    AttentionShape { heads: c.heads, kv_heads: c.kv_heads, head_dim: c.head_dim, scale: 1.0 / libm::sqrtf(c.head_dim as f32), causal: true }
}
