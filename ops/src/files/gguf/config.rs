//! [`ModelConfig`] from a GGUF file's metadata.

use zofo_hal::{Error, Result};

use super::{Gguf, missing};
use crate::config::{Family, ModelConfig, RopeScaling};

/// What the metadata may leave out, by architecture (llama.cpp's defaults).
const DEFAULT_ROPE_BASE: f64 = 10_000.0;

/// Frequency factors of long contexts, which converters write for Llama 3.1 and later.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Constants that Llama 3.1 and later are published with; only the stretch differs between them (32 for 3.2, 8 for the others).
const LLAMA3: (f32, f32, usize) = (1.0, 4.0, 8192);
/// Relative difference that rounding may make between frequency factors and the formula they came from: the ramp subtracts numbers of like size,
/// and loses a few of f32's 24 bits.
const FACTOR_TOLERANCE: f64 = 1e-4;

struct Keys<'a> {
    file: &'a Gguf,
    arch: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    fn count(&self, name: &str) -> Result<Option<usize>> {
        let key = self.key(name);
        match self.file.metadata().count(&key)? {
            None => Ok(None),
            Some(n) => {
                usize::try_from(n).map(Some).map_err(|_| Error::format(format!("metadata `{key}` is {n}, more than can be counted here")))
            }
        }
    }

    fn need(&self, name: &str) -> Result<usize> {
        self.count(name)?.ok_or_else(|| missing(&self.key(name)))
    }

    fn float(&self, name: &str) -> Result<Option<f64>> {
        self.file.metadata().number(&self.key(name))
    }
}

/// Reads the configuration. `vocab` is the number of rows of the embedding.
pub(super) fn config(file: &Gguf, vocab: usize) -> Result<ModelConfig> {
    let metadata = file.metadata();
    let arch = metadata.text("general.architecture")?.ok_or_else(|| missing("general.architecture"))?;
    let family = match arch {
        // Converters write LLaMA, Mistral and SmolLM under one name.
        "llama" => Family::Llama,
        "qwen2" => Family::Qwen2,
        other => {
            return Err(Error::unsupported(format!("architecture `{}` is not supported; llama and qwen2 are", other.escape_debug())));
        }
    };
    let keys = Keys { file, arch };
    if let Some(n) = keys.count("expert_count")?.filter(|n| *n > 0) {
        return Err(Error::unsupported(format!("the model has {n} experts; mixtures of experts are not supported")));
    }
    let hidden = keys.need("embedding_length")?;
    let heads = keys.need("attention.head_count")?;
    let head_dim = match keys.count("attention.key_length")?.or(keys.count("rope.dimension_count")?) {
        Some(width) => width,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(Error::format(format!("`embedding_length` {hidden} is no multiple of `head_count` {heads}"))),
    };
    for (key, width) in [("attention.value_length", head_dim), ("rope.dimension_count", head_dim)] {
        if let Some(found) = keys.count(key)?.filter(|found| *found != width) {
            return Err(Error::unsupported(format!(
                "`{}` is {found} where heads are {width} wide; all of a head is read alike",
                keys.key(key)
            )));
        }
    }
    if let Some(listed) = keys.count("vocab_size")?.filter(|n| *n != vocab) {
        return Err(Error::format(format!("`{}` is {listed}, but the embedding has {vocab} rows", keys.key("vocab_size"))));
    }
    let theta = keys.float("rope.freq_base")?.unwrap_or(DEFAULT_ROPE_BASE);
    let mut config = ModelConfig {
        family,
        vocab,
        hidden,
        layers: keys.need("block_count")?,
        heads,
        kv_heads: keys.count("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        intermediate: keys.need("feed_forward_length")?,
        rms_norm_eps: match keys.float("attention.layer_norm_rms_epsilon")? {
            Some(eps) => eps as f32,
            None => return Err(missing(&keys.key("attention.layer_norm_rms_epsilon"))),
        },
        rope_theta: theta as f32,
        rope_scaling: scaling(&keys)?,
        tie_word_embeddings: !file.contains("output.weight"),
        max_positions: keys.need("context_length")?,
        qkv_bias: file.contains("blk.0.attn_q.bias"),
        sliding_window: keys.count("attention.sliding_window")?.filter(|n| *n > 0),
        bos: token(file, "tokenizer.ggml.bos_token_id")?,
        eos: Vec::new(),
    };
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        config.eos.extend(token(file, key)?.filter(|id| !config.eos.contains(id)));
    }
    config.validate().map_err(|e| Error::format(e.message().to_owned()))?;
    if let Some(factors) = file.tensor(ROPE_FACTORS)? {
        config.rope_scaling = scaling_of_factors(&config, &super::model::floats(&factors)?)?;
    }
    Ok(config)
}

fn token(file: &Gguf, key: &str) -> Result<Option<u32>> {
    match file.metadata().count(key)? {
        None => Ok(None),
        Some(id) => u32::try_from(id).map(Some).map_err(|_| Error::format(format!("metadata `{key}` is {id}, which is no token"))),
    }
}

fn scaling(keys: &Keys<'_>) -> Result<RopeScaling> {
    let kind = keys.key("rope.scaling.type");
    let kind = keys.file.metadata().text(&kind)?;
    // `rope.scale_linear` is what older converters wrote.
    let factor = match keys.float("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.float("rope.scale_linear")?,
    };
    match (kind, factor) {
        (Some("none"), _) | (None, None) => Ok(RopeScaling::None),
        (Some("linear") | None, Some(factor)) => {
            Ok(if factor == 1.0 { RopeScaling::None } else { RopeScaling::Linear { factor: factor as f32 } })
        }
        (Some("linear"), None) => Err(missing(&keys.key("rope.scaling.factor"))),
        (Some(other), _) => Err(Error::unsupported(format!(
            "rotary scaling `{}` is not supported; none, linear and that of Llama 3 are",
            other.escape_debug()
        ))),
    }
}

/// The published constants that give the frequency factors of the file.
fn scaling_of_factors(config: &ModelConfig, factors: &[f32]) -> Result<RopeScaling> {
    let (low_freq_factor, high_freq_factor, original_max_positions) = LLAMA3;
    let factor = factors.iter().copied().fold(f32::NAN, f32::max);
    let found = RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions };
    let unscaled = ModelConfig { rope_scaling: RopeScaling::None, ..config.clone() };
    let scaled = ModelConfig { rope_scaling: found, ..config.clone() };
    let fits = scaled.validate().is_ok() && factors.len() == config.head_dim / 2;
    let (plain, stretched) = (crate::llama::rope_frequencies(&unscaled), crate::llama::rope_frequencies(&scaled));
    let near = plain.iter().zip(&stretched).zip(factors).all(|((plain, stretched), factor)| {
        let expected = f64::from(*plain) / f64::from(*stretched);
        (expected - f64::from(*factor)).abs() <= FACTOR_TOLERANCE * expected
    });
    if fits && near {
        return Ok(found);
    }
    Err(Error::unsupported(format!(
        "the frequency factors in `{ROPE_FACTORS}` are not those of Llama 3; other rotary scalings are not supported"
    )))
}
