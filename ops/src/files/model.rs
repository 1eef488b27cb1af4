//! A Hugging Face model folder: configuration and tensors, checked against each other.

use std::{collections::HashSet, path::Path};

use zofo_hal::{Error, Result};

use super::{
    checkpoint::{Checkpoint, TensorView},
    config::read_config,
};
use crate::config::{LinearName, ModelConfig};

const EMBED: &str = "model.embed_tokens.weight";
const FINAL_NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";

/// A linear layer's tensors.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: TensorView,
    /// `[out]`, where the configuration asks for one.
    pub bias: Option<TensorView>,
}

/// The tensors of one block. Norms are `[hidden]`.
#[derive(Clone, Debug)]
pub struct LayerTensors {
    /// Norm before attention.
    pub input_norm: TensorView,
    /// Norm before the feed-forward network.
    pub post_attention_norm: TensorView,
    linears: [Linear; 7],
}

impl LayerTensors {
    /// One of the seven linear layers.
    pub fn linear(&self, name: LinearName) -> &Linear {
        &self.linears[name.index()]
    }
}

/// A model folder whose every expected tensor is there, in the expected shape and in a supported type.
#[derive(Debug)]
pub struct ModelFiles {
    config: ModelConfig,
    embed: TensorView,
    layers: Vec<LayerTensors>,
    final_norm: TensorView,
    lm_head: Option<TensorView>,
}

impl ModelFiles {
    /// Opens a folder with `config.json` and its safetensors.
    ///
    /// # Errors
    /// Those of [`read_config`] and [`Checkpoint::open`]; `Format` where a tensor is missing, left over or of another shape than the configuration
    /// says, with its name and both shapes.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        if !path.is_file() {
            return Err(Error::new(
                zofo_hal::ErrorKind::Io,
                format!("{}: no config.json is here; give a model folder in Hugging Face layout", folder.display()),
            ));
        }
        Self::from_parts(read_config(&path)?, &Checkpoint::open(folder)?)
    }

    /// Takes the tensors a configuration asks for from an open checkpoint. Errors are those of [`ModelFiles::open`].
    pub fn from_parts(mut config: ModelConfig, checkpoint: &Checkpoint) -> Result<Self> {
        config.validate()?;
        let mut reader = Reader { checkpoint, taken: HashSet::new() };
        // A head that is stored beside a tied embedding is the embedding again; one that is missing can only be the embedding.
        config.tie_word_embeddings |= !checkpoint.contains(HEAD);
        let hidden = config.hidden;
        let embed = reader.take(EMBED.into(), &[config.vocab, hidden])?;
        let layers = (0..config.layers).map(|i| reader.layer(i, &config)).collect::<Result<_>>()?;
        let final_norm = reader.take(FINAL_NORM.into(), &[hidden])?;
        let lm_head = if config.tie_word_embeddings { None } else { Some(reader.take(HEAD.into(), &[config.vocab, hidden])?) };
        reader.refuse_leftovers()?;
        Ok(Self { config, embed, layers, final_norm, lm_head })
    }

    /// The configuration; `tie_word_embeddings` is true also where the checkpoint merely lacks a head.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Token embedding, `[vocab, hidden]`.
    pub fn embed(&self) -> &TensorView {
        &self.embed
    }

    /// Norm before the head, `[hidden]`.
    pub fn final_norm(&self) -> &TensorView {
        &self.final_norm
    }

    /// LM head, `[vocab, hidden]`; `None` where it is the embedding.
    pub fn lm_head(&self) -> Option<&TensorView> {
        self.lm_head.as_ref()
    }

    /// The tensors of block `index`.
    ///
    /// # Errors
    /// `InvalidArgument` where there is no such block.
    pub fn layer(&self, index: usize) -> Result<&LayerTensors> {
        self.layers.get(index).ok_or_else(|| Error::invalid(format!("there is no layer {index}; the model has {}", self.layers.len())))
    }
}

struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    taken: HashSet<String>,
}

impl Reader<'_> {
    fn take(&mut self, name: String, shape: &[usize]) -> Result<TensorView> {
        let view = self.checkpoint.tensor(&name)?;
        if view.shape != shape {
            return Err(Error::format(format!(
                "{}: tensor `{name}` has shape {:?}, config.json asks for {shape:?}; weights and configuration are of different models",
                self.checkpoint.describe(),
                view.shape
            )));
        }
        self.taken.insert(name);
        Ok(view)
    }

    fn layer(&mut self, index: usize, config: &ModelConfig) -> Result<LayerTensors> {
        let path = |part: &str| format!("model.layers.{index}.{part}");
        let mut linears = Vec::with_capacity(LinearName::ALL.len());
        for name in LinearName::ALL {
            let (out, inp) = name.shape(config);
            let weight = self.take(path(&format!("{}.weight", name.hf_path())), &[out, inp])?;
            let bias = if name.has_bias(config) { Some(self.take(path(&format!("{}.bias", name.hf_path())), &[out])?) } else { None };
            linears.push(Linear { weight, bias });
        }
        let linears = linears.try_into().map_err(|_| Error::invalid("a block has seven linear layers"))?;
        Ok(LayerTensors {
            input_norm: self.take(path("input_layernorm.weight"), &[config.hidden])?,
            post_attention_norm: self.take(path("post_attention_layernorm.weight"), &[config.hidden])?,
            linears,
        })
    }

    /// A tensor of the decoder that nothing reads (a bias, a norm of q, a layer too many) would be ignored and the model computed wrongly.
    fn refuse_leftovers(&self) -> Result<()> {
        let left = self
            .checkpoint
            .names()
            .filter(|n| n.starts_with("model.") && !n.ends_with("rotary_emb.inv_freq") && !self.taken.contains(*n))
            .min();
        match left {
            None => Ok(()),
            Some(name) => Err(Error::format(format!(
                "{}: tensor `{name}` has no place in the model that config.json describes; weights and configuration are of different models",
                self.checkpoint.describe()
            ))),
        }
    }
}
