//! `adapter_config.json`: what is read of it, and what is refused.

use std::path::Path;

use serde_json::Value;
use zofo_hal::{Error, Result};

use super::{CONFIG_FILE, check_rank};
use crate::files::json::{Object, brief};

/// Largest `adapter_config.json` read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Settings of an adapter that hold for all its modules.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// Rank where a module does not have its own.
    pub rank: usize,
    /// Alpha where a module does not have its own.
    pub alpha: f32,
    /// Whether the scale is alpha / sqrt(r) instead of alpha / r.
    pub rslora: bool,
    /// Dropout in front of A while training. It has no effect on inference.
    pub dropout: f32,
}

impl AdapterConfig {
    /// Plain LoRA: scale alpha / r, no dropout.
    pub fn new(rank: usize, alpha: f32) -> Self {
        Self { rank, alpha, rslora: false, dropout: 0.0 }
    }

    /// The scale of a module of this rank and alpha.
    pub fn scale(&self, rank: usize, alpha: f32) -> f32 {
        let rank = rank as f32;
        alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    pub(super) fn validate(&self) -> Result<()> {
        check_rank(self.rank)?;
        if !self.alpha.is_finite() {
            return Err(Error::invalid(format!("lora_alpha is {}; it must be finite", self.alpha)));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::invalid(format!("lora_dropout is {}; it must be at least 0 and below 1", self.dropout)));
        }
        Ok(())
    }
}

/// The configuration and the exceptions it makes for single modules.
pub(super) struct AdapterFile {
    pub(super) config: AdapterConfig,
    ranks: Patterns,
    alphas: Patterns,
    json: Object,
}

impl AdapterFile {
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let json = Object::read(&folder.join(CONFIG_FILE), MAX_BYTES)?;
        refuse_options(&json)?;
        let config = AdapterConfig {
            rank: json.required("r", json.count("r")?)?,
            alpha: json.required("lora_alpha", json.float("lora_alpha")?)?,
            rslora: json.flag("use_rslora")?.unwrap_or(false),
            dropout: json.float("lora_dropout")?.unwrap_or(0.0),
        };
        config.validate().map_err(|e| json.error(e.message()))?;
        Ok(Self { config, ranks: Patterns::read(&json, "rank_pattern")?, alphas: Patterns::read(&json, "alpha_pattern")?, json })
    }

    /// Rank the configuration gives the module at `path`.
    pub(super) fn rank(&self, path: &str) -> Result<usize> {
        let rank = match self.ranks.find(&self.json, path)? {
            Some(r) if r.fract() == 0.0 && r >= 0.0 => r as usize,
            Some(r) => return Err(self.json.error(format!("`rank_pattern` gives {path} the rank {r}"))),
            None => self.config.rank,
        };
        check_rank(rank).map_err(|e| self.json.error(format!("{path}: {}", e.message())))?;
        Ok(rank)
    }

    /// Alpha of the module at `path`.
    pub(super) fn alpha(&self, path: &str) -> Result<f32> {
        Ok(self.alphas.find(&self.json, path)?.unwrap_or(self.config.alpha))
    }
}

/// Values for modules whose path is a key or ends with `.` and a key, as PEFT matches `(.*\.)?(key)$`.
struct Patterns {
    key: &'static str,
    entries: Vec<(String, f32)>,
}

impl Patterns {
    fn read(json: &Object, key: &'static str) -> Result<Self> {
        let mut entries = Vec::new();
        if let Some(object) = json.object(key)? {
            for (pattern, _) in object.entries() {
                let plain = pattern.strip_prefix('^').unwrap_or(pattern);
                if plain.is_empty() || !plain.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'.') {
                    return Err(json.unsupported(format!(
                        "`{key}` has the regular expression `{}`; only module names and their dotted endings are supported",
                        pattern.escape_debug()
                    )));
                }
                if let Some(value) = object.float(pattern)? {
                    entries.push((pattern.to_owned(), value));
                }
            }
        }
        Ok(Self { key, entries })
    }

    fn find(&self, json: &Object, path: &str) -> Result<Option<f32>> {
        let mut found: Option<(&str, f32)> = None;
        for (pattern, value) in &self.entries {
            if !matches(pattern, path) {
                continue;
            }
            match found {
                // PEFT takes the first of the file, an order that JSON objects do not have.
                Some((other, first)) if first != *value => {
                    return Err(json.unsupported(format!(
                        "`{}` gives {path} both {first} (`{other}`) and {value} (`{pattern}`); leave one of them",
                        self.key
                    )));
                }
                _ => found = Some((pattern, *value)),
            }
        }
        Ok(found.map(|(_, value)| value))
    }
}

fn matches(pattern: &str, path: &str) -> bool {
    match pattern.strip_prefix('^') {
        Some(whole) => path == whole,
        None => path.strip_suffix(pattern).is_some_and(|before| before.is_empty() || before.ends_with('.')),
    }
}

/// Refuses every option that changes the computation away from plain LoRA on linear layers.
fn refuse_options(json: &Object) -> Result<()> {
    if let Some(kind) = json.text("peft_type")?
        && kind != "LORA"
    {
        return Err(json.unsupported(format!("`peft_type` is {kind}; only LORA is supported")));
    }
    if let Some(bias) = json.text("bias")?
        && bias != "none"
    {
        return Err(json.unsupported(format!("`bias` is {bias}; trained biases are not supported")));
    }
    for (key, what) in [
        ("use_dora", "DoRA (weight-decomposed LoRA)"),
        ("use_qalora", "QALoRA"),
        ("use_bdlora", "block-diagonal LoRA"),
        ("lora_bias", "a bias on factor B"),
        ("fan_in_fan_out", "base weights stored as [in, out]"),
        ("layer_replication", "repeating layers of the base model"),
        ("modules_to_save", "replacing whole modules of the base model"),
        ("trainable_token_indices", "trained token embeddings"),
        ("target_parameters", "adapting bare parameters"),
        ("alora_invocation_tokens", "activated LoRA"),
        ("arrow_config", "Arrow routing"),
        ("megatron_config", "Megatron layers"),
    ] {
        match json.get(key) {
            None | Some(Value::Bool(false)) => {}
            Some(Value::Array(list)) if list.is_empty() => {}
            Some(Value::Object(map)) if map.is_empty() => {}
            Some(value) => {
                return Err(json.unsupported(format!("`{key}` is {}; {what} is not supported", brief(value))));
            }
        }
    }
    // Initialisations that also change the base weights: the factors alone are not the adapter.
    match json.get("init_lora_weights") {
        Some(Value::String(init)) if !["gaussian", "eva", "orthogonal"].contains(&init.as_str()) => Err(json.unsupported(format!(
            "`init_lora_weights` is {}; it changes the base weights too, so save the adapter converted to plain LoRA",
            init.escape_debug()
        ))),
        _ => Ok(()),
    }
}
