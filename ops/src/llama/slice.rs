//! Contiguous layers of a model on one device.

use alloc::{format, sync::Arc, vec::Vec};
use core::ops::Range;

use zofo_hal::{
    DType, DeviceRef, Error, Result, TensorArg, Uses, WeightRef,
    op::{Copies, Embedding},
    perturb::Projection,
};

use super::{
    Collective, Importer, Input, ParamName, Perturbation, RankActivations, Saved, WeightSource,
    block::Stream,
    head::Head,
    linear_name,
    pass::{Act, Keys, Pass},
    rope_tables,
    saved::{LayerSaved, Plan},
    weights::union,
};
use crate::{
    batch::DeviceBatch,
    config::ModelConfig,
    lora::Adapters,
    run::{Runner, lookup_uses},
};

/// Which part of a model a slice is, and how it computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceSpec {
    /// The layers.
    pub layers: Range<usize>,
    /// Whether it starts from token ids.
    pub embed: bool,
    /// Whether it ends in the final norm and the LM head.
    pub head: bool,
    /// Whether it has an exit head, which is the final norm and the LM head applied to its output.
    pub exit_head: bool,
    /// Whether gradients go back through it.
    pub backward: bool,
    /// Whether the forward pass keeps each layer's input alone for them, and the backward pass recomputes the rest: less memory for more
    /// time, the same bits.
    pub recompute: bool,
    /// Type of activations other than the residual stream, which is f32.
    pub compute: DType,
    /// Tokens of the longest sequence.
    pub positions: usize,
}

impl SliceSpec {
    /// Longest sequence of a slice unless it is set: rotary tables are made for so many positions.
    pub const POSITIONS: usize = 2048;

    /// Layers `layers` of a model for forward passes in f32; the embedding and the head are its own where it has the first or last layer.
    pub fn new(config: &ModelConfig, layers: Range<usize>) -> Self {
        Self {
            embed: layers.start == 0,
            head: layers.end == config.layers,
            exit_head: false,
            backward: false,
            recompute: false,
            compute: DType::F32,
            positions: config.max_positions.min(Self::POSITIONS),
            layers,
        }
    }

    /// A whole model for forward passes in f32.
    pub fn whole(config: &ModelConfig) -> Self {
        Self::new(config, 0..config.layers)
    }

    /// The same with gradients.
    pub fn with_backward(self) -> Self {
        Self { backward: true, ..self }
    }

    /// The same, recomputing activations in the backward pass.
    pub fn with_recompute(self) -> Self {
        Self { recompute: true, ..self }
    }

    /// The same in another type.
    pub fn with_compute(self, compute: DType) -> Self {
        Self { compute, ..self }
    }

    /// The same with an exit head.
    pub fn with_exit_head(self) -> Self {
        Self { exit_head: true, ..self }
    }

    /// That a model has such a slice.
    ///
    /// # Errors
    /// `InvalidArgument`, naming what is wrong.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        let Range { start, end } = self.layers;
        if start > end || end > config.layers {
            return Err(Error::invalid(format!("layers {start}..{end} of a model that has {}", config.layers)));
        }
        if self.embed && start != 0 || self.head && end != config.layers {
            return Err(Error::invalid(format!(
                "layers {start}..{end} of {} cannot start from tokens ({}) or end in the head ({})",
                config.layers, self.embed, self.head
            )));
        }
        if !self.compute.is_float() {
            return Err(Error::invalid(format!("{} is no type to compute in; choose f32, bf16 or f16", self.compute)));
        }
        if self.positions == 0 || self.positions > config.max_positions {
            return Err(Error::invalid(format!(
                "sequences of up to {} tokens were asked for, the model was made for 1 to {}",
                self.positions, config.max_positions
            )));
        }
        Ok(())
    }

    /// The matrices it needs and what for; one that is needed twice is listed twice.
    pub fn weights(&self, config: &ModelConfig) -> Vec<(ParamName, Uses)> {
        let product = Uses { nt: true, nn: self.backward, gather: false };
        let mut all = Vec::new();
        if self.embed {
            all.push((ParamName::Embedding, Uses { gather: true, ..Uses::default() }));
        }
        for layer in self.layers.clone() {
            all.extend(Projection::ALL.map(|p| (ParamName::Weight(layer, p), product)));
        }
        if self.head {
            // Gathered for the scores of a few candidates.
            all.push((ParamName::head_of(config), Uses { gather: true, ..product }));
        }
        if self.exit_head {
            all.push((ParamName::head_of(config), Uses::FORWARD));
        }
        all
    }

    /// Tells an importer what this slice will ask of it on `device`, see [`Importer`].
    pub fn announce(&self, importer: &mut Importer, device: &DeviceRef, config: &ModelConfig) {
        for (name, mut uses) in self.weights(config) {
            if name == ParamName::Embedding && self.embed {
                // On a device without the op a look-up is a product.
                uses = union(uses, lookup_uses(&**device, self.compute, config.vocab, config.hidden));
            }
            importer.announce(device, name, uses);
        }
    }
}

pub(super) struct Layer {
    pub index: usize,
    pub input_norm: TensorArg,
    pub post_attention_norm: TensorArg,
    linears: Vec<(WeightRef, Option<TensorArg>)>,
}

impl Layer {
    pub fn weight(&self, p: Projection) -> &WeightRef {
        &self.linears[p as usize].0
    }

    pub fn bias(&self, p: Projection) -> Option<TensorArg> {
        self.linears[p as usize].1.clone()
    }
}

/// Cos and sin, f32 `[positions, head_dim / 2]`.
pub(super) struct Tables {
    pub cos: TensorArg,
    pub sin: TensorArg,
}

/// Contiguous layers of a model on one device.
pub struct Slice {
    pub(super) config: ModelConfig,
    pub(super) spec: SliceSpec,
    embedding: Option<WeightRef>,
    pub(super) layers: Vec<Layer>,
    pub(super) rope: Tables,
    pub(super) head: Option<Head>,
    pub(super) exit: Option<Head>,
    /// The other members of a group that share its layers.
    pub(super) peers: Option<Arc<dyn Collective>>,
}

impl Slice {
    /// Imports what the slice needs into the runner's device.
    ///
    /// # Errors
    /// Those of [`SliceSpec::check`]; `Format` for parameters that are missing or of another shape; those of
    /// [`zofo_hal::Device::import_weight`].
    pub fn load(runner: &mut Runner, importer: &mut Importer, source: &dyn WeightSource, spec: &SliceSpec) -> Result<Self> {
        let config = source.config();
        config.validate()?;
        spec.check(config)?;
        let device = runner.device().clone();
        if !device.dtype_usage(spec.compute).storage {
            return Err(Error::unsupported(format!("it cannot hold {} activations", spec.compute)).with_device(device.info().name.clone()));
        }
        spec.announce(importer, &device, config);
        let mut import = |name, uses| importer.weight(&device, source, name, uses, spec.compute);
        let wanted = spec.weights(config);
        let mut find = |name: ParamName| {
            let uses = wanted.iter().find(|(n, _)| *n == name).map_or(Uses::FORWARD, |(_, u)| *u);
            import(name, uses)
        };
        let mut vector = |name: ParamName| {
            let tensor = source.require(name)?;
            runner.constant_f32(1, tensor.cols, &tensor.to_f32().map_err(|e| e.context(name))?)
        };
        let mut layers = Vec::with_capacity(spec.layers.len());
        for index in spec.layers.clone() {
            let mut linears = Vec::with_capacity(Projection::ALL.len());
            for p in Projection::ALL {
                let bias = linear_name(p).has_bias(config).then(|| vector(ParamName::Bias(index, p))).transpose()?;
                linears.push((find(ParamName::Weight(index, p))?, bias));
            }
            let input_norm = vector(ParamName::InputNorm(index))?;
            let post_attention_norm = vector(ParamName::PostAttentionNorm(index))?;
            layers.push(Layer { index, input_norm, post_attention_norm, linears });
        }
        let embedding = spec.embed.then(|| find(ParamName::Embedding)).transpose()?;
        let mut head = |wanted: bool| -> Result<Option<Head>> {
            let load = || Ok(Head { norm: vector(ParamName::FinalNorm)?, weight: find(ParamName::head_of(config))? });
            wanted.then(load).transpose()
        };
        let (head, exit) = (head(spec.head)?, head(spec.exit_head)?);
        let (cos, sin) = rope_tables(config, spec.positions);
        let mut table = |values: &[f32]| runner.constant_f32(spec.positions, config.head_dim / 2, values);
        let rope = Tables { cos: table(&cos)?, sin: table(&sin)? };
        Ok(Self { config: config.clone(), spec: spec.clone(), embedding, layers, rope, head, exit, peers: None })
    }

    /// Makes it one member of a group that computes these layers together; it was loaded from a [`super::ShardedSource`]. What the members'
    /// passes write to the residual stream, and gradients that come back to it, are then sums over all of them, so every member must run
    /// every pass.
    ///
    /// Perturbed passes and decoding with a cache are refused from then on.
    pub fn join(&mut self, peers: Arc<dyn Collective>) {
        self.peers = Some(peers);
    }

    /// The configuration of the source that it was loaded from: the whole model's, or a member's own.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What it was loaded as.
    pub fn spec(&self) -> &SliceSpec {
        &self.spec
    }

    /// The layers it has.
    pub fn layers(&self) -> Range<usize> {
        self.spec.layers.clone()
    }

    /// The base model, or the adapted one: hidden states at the slice's end, f32 `[T, d]`. Nothing is kept.
    ///
    /// # Errors
    /// `InvalidArgument` where the input does not suit the slice or a sequence is longer than its positions; those of [`Runner::run`].
    pub fn forward(&self, runner: &mut Runner, batch: &DeviceBatch, adapters: &Adapters, input: Input<'_>) -> Result<TensorArg> {
        self.forward_copies(runner, batch, adapters, input, Copies::BASE, None, None)
    }

    /// Copies of the hidden states at the slice's end, f32 `[C T, d]`.
    ///
    /// With a perturbation the adapters of copy c are those at direction c (value form), or the copy carries the derivative along it (tangent
    /// form); without one all copies run on through the adapters as they are. The input has the rows of one block, which all copies start
    /// from (work is not repeated until they part), or those of all copies. Nothing is kept but the rank-r activations of the base block,
    /// where `keep` is given.
    ///
    /// # Errors
    /// As [`Slice::forward`]; `InvalidArgument` where `keep` is given and there is no base block; `Unsupported` where adapters are to be
    /// perturbed in a slice that shares its layers.
    #[allow(clippy::too_many_arguments)]
    pub fn forward_copies(
        &self,
        runner: &mut Runner,
        batch: &DeviceBatch,
        adapters: &Adapters,
        input: Input<'_>,
        copies: Copies,
        perturbation: Option<&Perturbation>,
        keep: Option<&mut RankActivations>,
    ) -> Result<TensorArg> {
        let (mut stream, mut pass) = self.begin(runner, batch, adapters, input, copies)?;
        pass.perturbation = perturbation.filter(|_| copies.count > 0);
        if self.peers.is_some() && pass.perturbation.is_some() {
            // A member's factors are parts of the tensors over which noise is defined, and have no sites there.
            return Err(Error::unsupported(format!(
                "adapters of layers {:?} cannot be perturbed: devices share these layers; train them first-order, or on one device",
                self.spec.layers
            )));
        }
        pass.keep = keep;
        for layer in &self.layers {
            pass.layer(layer, &mut stream, None)?;
        }
        let out = pass.end(stream)?;
        Ok(pass.spread(out)?.tensor)
    }

    /// As [`Slice::forward`], keeping what the backward pass needs. With `input_grad` that includes the gradient at the slice's input.
    ///
    /// The input is kept by its handle: its contents must stay as they are until the backward pass.
    ///
    /// # Errors
    /// As [`Slice::forward`]; `InvalidArgument` where the slice was loaded without backward.
    pub fn forward_saving(
        &self,
        runner: &mut Runner,
        batch: &DeviceBatch,
        adapters: &Adapters,
        input: Input<'_>,
        input_grad: bool,
    ) -> Result<(TensorArg, Saved)> {
        if !self.spec.backward {
            return Err(Error::invalid("this slice was loaded for forward passes only; load it with `backward`"));
        }
        let plan = Plan::new(self.layers().map(|l| (l, adapters.trained(l))), input_grad);
        let (mut stream, mut pass) = self.begin(runner, batch, adapters, input, Copies::BASE)?;
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let mut saved = LayerSaved::of_forward(&self.spec, &plan, layer.index, adapters.trained(layer.index));
            pass.layer(layer, &mut stream, Some(&mut saved))?;
            layers.push(saved);
        }
        let out = pass.end(stream)?.tensor;
        Ok((out, Saved { plan, layers }))
    }

    fn begin<'a>(
        &'a self,
        runner: &'a mut Runner,
        batch: &DeviceBatch,
        adapters: &'a Adapters,
        input: Input<'_>,
        copies: Copies,
    ) -> Result<(Stream, Pass<'a>)> {
        if batch.longest() > self.spec.positions {
            return Err(Error::invalid(format!(
                "a sequence of {} tokens is longer than the {} this slice was loaded for; shorten it, or load the slice for more positions",
                batch.longest(),
                self.spec.positions
            )));
        }
        let rows = batch.block_rows();
        let start = match input {
            Input::Tokens => {
                let h = self.embed(runner, &batch.ids, Some(&batch.live))?;
                Stream::new(Act { tensor: h, shared: true }, true)
            }
            Input::Hidden(h) => {
                let shared = h.spec.rows == rows;
                if !shared && h.spec.rows != rows * copies.total() || h.spec.cols != self.config.hidden {
                    return Err(Error::invalid(format!(
                        "hidden states are {:?}; expected [{rows}, {d}], or [{}, {d}] for {} copies",
                        h.spec,
                        rows * copies.total(),
                        copies.total(),
                        d = self.config.hidden
                    )));
                }
                Stream::new(Act { tensor: h.clone(), shared }, false)
            }
        };
        Ok((start, self.pass(runner, batch, adapters, copies)))
    }

    /// A pass over a batch's rows, which attend to each other.
    pub(super) fn pass<'a>(&'a self, runner: &'a mut Runner, batch: &DeviceBatch, adapters: &'a Adapters, copies: Copies) -> Pass<'a> {
        Pass {
            runner,
            slice: self,
            rows: batch.block_rows(),
            live_rows: batch.rows(),
            live: Some(batch.live.clone()),
            positions: batch.positions.clone(),
            keys: Keys::Packed(batch.cu_seqlens.clone()),
            adapters,
            copies,
            perturbation: None,
            keep: None,
        }
    }

    /// Rows of the embedding, f32.
    pub(super) fn embed(&self, runner: &mut Runner, ids: &TensorArg, live: Option<&TensorArg>) -> Result<TensorArg> {
        let Some(table) = &self.embedding else {
            return Err(Error::invalid("token ids were given to a slice that has no embedding; give it hidden states"));
        };
        let out = runner.temp(DType::F32, ids.spec.cols, self.config.hidden)?;
        runner.run(Embedding::new(ids.clone(), table, out.clone()).live(live.cloned()))?;
        Ok(out)
    }
}
