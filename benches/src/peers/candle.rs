//! candle's forward pass of the same model, and the loss of the same labels.
//!
//! Its model ends in the logits of each sequence's last row. The head over the labelled rows is run behind it on random hidden states, which
//! takes the same time as on the model's own.

use super::takes_part;
use crate::{Case, Run, Work, random, shapes, synthetic::Synthetic};
use candle_core::{DType, Device, Tensor, utils::get_num_threads};
use candle_nn::{VarBuilder, loss::cross_entropy};
use candle_transformers::models::llama::{Cache, Config, Llama};
use std::collections::HashMap;
use zofo_hal::{Error, Result};
use zofo_ops::llama::{ParamName, WeightSource};

/// Cases of a group of forward passes with loss, in f32.
pub fn cases(group: &str, work: Work) -> Option<Case> {
    takes_part("candle", get_num_threads(), "RAYON_NUM_THREADS").then(|| Case::new(group, "candle", work, forward_loss))
}

fn forward_loss() -> Result<Run> {
    let (model, labels) = (Model::load().map_err(error)?, shapes::SEQUENCES * (shapes::TOKENS - 1));
    let hidden = tensor(&random::normals(2, labels * shapes::HIDDEN, 1.0)?, (labels, shapes::HIDDEN)).map_err(error)?;
    let targets = Tensor::new(random::tokens(3, labels, shapes::VOCAB)?, &Device::Cpu).map_err(error)?;
    let ids = Tensor::from_vec(random::tokens(1, shapes::ROWS, shapes::VOCAB)?, (shapes::SEQUENCES, shapes::TOKENS), &Device::Cpu)
        .map_err(error)?;
    Ok(Box::new(move || {
        let loss = || -> candle_core::Result<f32> {
            let mut cache = Cache::new(false, DType::F32, &model.config, &Device::Cpu)?;
            model.llama.forward(&ids, 0, &mut cache)?;
            cross_entropy(&hidden.matmul(&model.head)?, &targets)?.to_scalar()
        };
        loss().map(drop).map_err(error)
    }))
}

fn error(e: candle_core::Error) -> Error {
    Error::execution(format!("candle: {e}"))
}

fn tensor(values: &[f32], shape: (usize, usize)) -> candle_core::Result<Tensor> {
    Tensor::from_slice(values, shape, &Device::Cpu)
}

struct Model {
    llama: Llama,
    config: Config,
    /// The LM head, transposed.
    head: Tensor,
}

impl Model {
    fn load() -> candle_core::Result<Self> {
        let source = Synthetic::new(shapes::model(), zofo_hal::DType::F32);
        let c = source.config();
        let config = Config {
            hidden_size: c.hidden,
            intermediate_size: c.intermediate,
            vocab_size: c.vocab,
            num_hidden_layers: c.layers,
            num_attention_heads: c.heads,
            num_key_value_heads: c.kv_heads,
            use_flash_attn: false,
            rms_norm_eps: c.rms_norm_eps.into(),
            rope_theta: c.rope_theta,
            bos_token_id: None,
            eos_token_id: None,
            rope_scaling: None,
            max_position_embeddings: c.max_positions,
            tie_word_embeddings: c.tie_word_embeddings,
        };
        let mut tensors = HashMap::new();
        for name in ParamName::all(c) {
            let t = source.require(name).and_then(|t| Ok((t.to_f32()?, t.rows, t.cols))).map_err(candle_core::Error::wrap)?;
            let (values, rows, cols) = t;
            let shape = if rows == 1 { vec![cols] } else { vec![rows, cols] };
            tensors.insert(name.to_string(), Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        let head = tensors[&ParamName::head_of(c).to_string()].t()?;
        let llama = Llama::load(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu), &config)?;
        Ok(Self { llama, config, head })
    }
}
