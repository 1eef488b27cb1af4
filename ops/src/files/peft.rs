//! LoRA adapters in the format of Hugging Face PEFT: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The tensors' names say which layers are adapted; `target_modules` and `layers_to_transform` of the configuration, which may be a pattern, are not
//! consulted. What changes the computation and is not computed here is refused by name.

mod config;
mod read;
mod write;

use std::collections::BTreeMap;

use zofo_hal::{Error, Result};

pub use config::AdapterConfig;
pub use read::read_adapter;
pub use write::write_adapter;

use crate::config::{LinearName, MAX_LORA_RANK, ModelConfig};

const CONFIG_FILE: &str = "adapter_config.json";
const TENSOR_FILE: &str = "adapter_model.safetensors";
/// PEFT wraps the model in `base_model.model`; the rest is the module's path in the model.
const KEY_PREFIX: &str = "base_model.model.";

/// One adapted layer: block index and which of its linear layers.
pub type Module = (usize, LinearName);

/// Path of a module below the model, as PEFT matches its patterns against.
fn module_path((layer, linear): Module) -> String {
    format!("model.layers.{layer}.{}", linear.hf_path())
}

/// The two factors of one adapted layer: `y = x W^T + scale (x A^T) B^T`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraPair {
    rank: usize,
    alpha: f32,
    in_features: usize,
    out_features: usize,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl LoraPair {
    /// Takes `a` as `[rank, in]` and `b` as `[out, rank]`, both row-major; `alpha` is the numerator of the scale.
    ///
    /// # Errors
    /// `InvalidArgument` where the rank is 0 or above [`MAX_LORA_RANK`], a length does not fit its shape, or a value is not finite.
    pub fn new(rank: usize, alpha: f32, (out_features, in_features): (usize, usize), a: Vec<f32>, b: Vec<f32>) -> Result<Self> {
        check_rank(rank)?;
        if !alpha.is_finite() {
            return Err(Error::invalid(format!("LoRA alpha is {alpha}; it must be finite")));
        }
        for (name, factor, width) in [("A", &a, in_features), ("B", &b, out_features)] {
            if width == 0 || width.checked_mul(rank) != Some(factor.len()) {
                return Err(Error::invalid(format!(
                    "factor {name} has {} elements where rank {rank} and {width} features need their product",
                    factor.len()
                )));
            }
            if let Some(at) = factor.iter().position(|v| !v.is_finite()) {
                return Err(Error::invalid(format!("factor {name} holds {} at element {at}", factor[at])));
            }
        }
        Ok(Self { rank, alpha, in_features, out_features, a, b })
    }

    /// Rank r.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Numerator of the scale.
    pub fn alpha(&self) -> f32 {
        self.alpha
    }

    /// `(out, in)` features of the adapted layer.
    pub fn shape(&self) -> (usize, usize) {
        (self.out_features, self.in_features)
    }

    /// `[rank, in]`.
    pub fn a(&self) -> &[f32] {
        &self.a
    }

    /// `[out, rank]`.
    pub fn b(&self) -> &[f32] {
        &self.b
    }

    /// `(A, B)`.
    pub fn into_factors(self) -> (Vec<f32>, Vec<f32>) {
        (self.a, self.b)
    }
}

/// A LoRA adapter of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    config: AdapterConfig,
    /// Blocks of the base model.
    layers: usize,
    modules: BTreeMap<Module, LoraPair>,
}

impl Adapter {
    /// Puts an adapter of `model` together.
    ///
    /// # Errors
    /// `InvalidArgument` where there is no module, a module is not in the model, or a pair does not have the base layer's shape.
    pub fn new(config: AdapterConfig, model: &ModelConfig, modules: BTreeMap<Module, LoraPair>) -> Result<Self> {
        config.validate()?;
        if modules.is_empty() {
            return Err(Error::invalid("an adapter needs at least one adapted layer"));
        }
        for (&(layer, linear), pair) in &modules {
            let path = module_path((layer, linear));
            if layer >= model.layers {
                return Err(Error::invalid(format!("{path} is adapted, but the model has {} layers", model.layers)));
            }
            let base = linear.shape(model);
            if pair.shape() != base {
                return Err(Error::invalid(format!(
                    "the factors of {path} fit a layer of {:?} (out, in) features, the base layer has {base:?}",
                    pair.shape()
                )));
            }
        }
        Ok(Self { config, layers: model.layers, modules })
    }

    /// The settings that hold for all modules.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// The adapted layers, by block and then in canonical order.
    pub fn modules(&self) -> &BTreeMap<Module, LoraPair> {
        &self.modules
    }

    /// The pair of one layer, where it is adapted.
    pub fn get(&self, module: Module) -> Option<&LoraPair> {
        self.modules.get(&module)
    }

    /// Takes the pairs out.
    pub fn into_modules(self) -> BTreeMap<Module, LoraPair> {
        self.modules
    }

    /// What the product of a module's factors is multiplied by: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732).
    pub fn scale(&self, pair: &LoraPair) -> f32 {
        self.config.scale(pair.rank, pair.alpha)
    }

    /// Which linear layers are adapted in any block, in canonical order.
    pub fn targets(&self) -> Vec<LinearName> {
        let mut all: Vec<_> = self.modules.keys().map(|m| m.1).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Number of trainable values.
    pub fn parameters(&self) -> usize {
        self.modules.values().map(|p| p.a.len() + p.b.len()).sum()
    }

    /// Whether training may start from this adapter; all others only run.
    ///
    /// # Errors
    /// `Unsupported` where it was made with LoRA dropout, which zofo does not train.
    pub fn check_trainable(&self) -> Result<()> {
        if self.config.dropout == 0.0 {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "this adapter trains with lora_dropout {}; only 0 is supported, set it to 0 in {CONFIG_FILE} to train on",
            self.config.dropout
        )))
    }
}

fn check_rank(rank: usize) -> Result<()> {
    if rank == 0 || rank > MAX_LORA_RANK {
        return Err(Error::invalid(format!("the LoRA rank is {rank}; it must be between 1 and {MAX_LORA_RANK}")));
    }
    Ok(())
}
