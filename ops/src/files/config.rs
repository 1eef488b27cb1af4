//! [`ModelConfig`] from a Hugging Face `config.json`.

use std::path::Path;

use serde_json::Value;
use zofo_hal::Result;

use super::json::{Object, brief};
use crate::config::{Family, ModelConfig, RopeScaling};

/// Largest `config.json` read, in bytes.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// What a family assumes where `config.json` says nothing (the defaults of transformers' configuration classes).
struct Defaults {
    kv_heads_as_heads: bool,
    max_positions: usize,
    qkv_bias: bool,
    sliding_window: Option<usize>,
}

const fn defaults(family: Family) -> Defaults {
    match family {
        Family::Llama => Defaults { kv_heads_as_heads: true, max_positions: 2048, qkv_bias: false, sliding_window: None },
        Family::Mistral => Defaults { kv_heads_as_heads: false, max_positions: 4096 * 32, qkv_bias: false, sliding_window: Some(4096) },
        Family::Qwen2 => Defaults { kv_heads_as_heads: false, max_positions: 32768, qkv_bias: true, sliding_window: None },
    }
}

/// Reads a `config.json`.
///
/// # Errors
/// `Io` where it cannot be read, `Format` where it is malformed or out of range, `Unsupported` where it asks for an architecture or an option
/// that zofo does not compute, named.
pub fn read_config(path: &Path) -> Result<ModelConfig> {
    from_object(&Object::read(path, MAX_CONFIG_BYTES)?)
}

/// Parses the text of a `config.json`; `name` is used in errors. Errors are those of [`read_config`].
pub fn parse_config(name: &Path, bytes: &[u8]) -> Result<ModelConfig> {
    from_object(&Object::parse(name, bytes)?)
}

fn from_object(json: &Object) -> Result<ModelConfig> {
    let family = family(json)?;
    let defaults = defaults(family);
    refuse_unknown_options(json)?;

    let need = |key| json.required(key, json.count(key)?);
    let hidden = need("hidden_size")?;
    let heads = need("num_attention_heads")?;
    let kv_heads = match json.count("num_key_value_heads")? {
        None if defaults.kv_heads_as_heads => heads,
        value => json.required("num_key_value_heads", value)?,
    };
    let head_dim = match json.count("head_dim")? {
        Some(width) => width,
        None if heads != 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(
                json.error(format!("`hidden_size` {hidden} is no multiple of `num_attention_heads` {heads}, and there is no `head_dim`"))
            );
        }
    };
    let (rope_theta, rope_scaling) = rope(json)?;
    let config = ModelConfig {
        family,
        vocab: need("vocab_size")?,
        hidden,
        layers: need("num_hidden_layers")?,
        heads,
        kv_heads,
        head_dim,
        intermediate: need("intermediate_size")?,
        rms_norm_eps: json.float("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta,
        rope_scaling,
        tie_word_embeddings: json.flag("tie_word_embeddings")?.unwrap_or(false),
        max_positions: json.count("max_position_embeddings")?.unwrap_or(defaults.max_positions),
        qkv_bias: defaults.qkv_bias,
        sliding_window: sliding_window(json, family, defaults.sliding_window)?,
        bos: token_ids(json, "bos_token_id")?.first().copied(),
        eos: token_ids(json, "eos_token_id")?,
    };
    config.validate().map_err(|e| json.error(e.message()))?;
    Ok(config)
}

fn family(json: &Object) -> Result<Family> {
    let known = || Family::ALL.map(Family::name).join(", ");
    match json.text("model_type")? {
        Some(name) => {
            Family::from_name(name).ok_or_else(|| json.unsupported(format!("unknown architecture `{name}`; supported are {}", known())))
        }
        None => Err(json.error(format!("`model_type` is missing; it must be one of {}", known()))),
    }
}

/// Options that change what the model computes, and the only value of each that is computed here.
fn refuse_unknown_options(json: &Object) -> Result<()> {
    if let Some(act) = json.text("hidden_act")?
        && act != "silu"
    {
        return Err(json.unsupported(format!("`hidden_act` is `{act}`; only silu is supported")));
    }
    for (key, what) in
        [("mlp_bias", "biases in the feed-forward network are"), ("attention_bias", "biases on all four attention projections are")]
    {
        if json.flag(key)? == Some(true) {
            return Err(json.unsupported(format!("`{key}` is true; {what} not supported")));
        }
    }
    if json.get("quantization_config").is_some() {
        return Err(json.unsupported("`quantization_config` is set; use the unquantised checkpoint of this model"));
    }
    if let Some(part) = json.float("partial_rotary_factor")?
        && part != 1.0
    {
        return Err(json.unsupported(format!("`partial_rotary_factor` is {part}; only 1 is supported")));
    }
    Ok(())
}

/// Rotary base and stretch, from `rope_theta` and `rope_scaling`, or from the `rope_parameters` that newer versions of transformers write.
fn rope(json: &Object) -> Result<(f32, RopeScaling)> {
    let parameters = json.object("rope_parameters")?;
    if let Some(parameters) = &parameters
        && parameters.entries().any(|(_, v)| v.is_object())
    {
        return Err(json.unsupported("`rope_parameters` differ between layers; one setting for all is supported"));
    }
    let outer = json.float("rope_theta")?;
    let inner = match &parameters {
        Some(p) => p.float("rope_theta")?,
        None => None,
    };
    let theta = inner.or(outer).unwrap_or(10000.0);
    let scaling = match parameters.or(json.object("rope_scaling")?) {
        Some(object) => rope_scaling(&object)?,
        None => RopeScaling::None,
    };
    Ok((theta, scaling))
}

fn rope_scaling(json: &Object) -> Result<RopeScaling> {
    let kind = match json.text("rope_type")? {
        Some(kind) => kind,
        None => json.text("type")?.unwrap_or("default"),
    };
    let need = |key| json.required(key, json.float(key)?);
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: need("factor")? }),
        "llama3" => {
            let key = "original_max_position_embeddings";
            Ok(RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_positions: json.required(key, json.count(key)?)?,
            })
        }
        other => Err(json.unsupported(format!("rotary scaling `{other}` is not supported; supported are default, linear and llama3"))),
    }
}

/// The window, which Qwen2 keeps in its configuration even where it is switched off.
fn sliding_window(json: &Object, family: Family, default: Option<usize>) -> Result<Option<usize>> {
    match family {
        Family::Llama => Ok(None),
        Family::Mistral if json.entries().any(|(k, v)| k == "sliding_window" && v.is_null()) => Ok(None),
        Family::Mistral => Ok(json.count("sliding_window")?.or(default)),
        Family::Qwen2 if json.flag("use_sliding_window")? == Some(true) => json.count("sliding_window"),
        Family::Qwen2 => Ok(None),
    }
}

/// One id or a list of them.
fn token_ids(json: &Object, key: &str) -> Result<Vec<u32>> {
    let one = |v: &Value| {
        v.as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .ok_or_else(|| json.error(format!("`{key}` must be a token id or a list of them, not {}", brief(v))))
    };
    match json.get(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(value) => Ok(vec![one(value)?]),
    }
}
