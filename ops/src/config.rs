//! What a LLaMA-family model looks like: counts, rotary parameters, switches. Plain data, read from files elsewhere.

use alloc::{format, string::String, vec::Vec};
use core::fmt;

use zofo_hal::{Error, Result};

/// Largest vocabulary accepted.
pub const MAX_VOCAB: usize = 1 << 24;
/// Largest feature width accepted: hidden, intermediate, or heads times head width.
pub const MAX_WIDTH: usize = 1 << 20;
/// Most layers accepted.
pub const MAX_LAYERS: usize = 1 << 12;
/// Largest width of one attention head accepted.
pub const MAX_HEAD_DIM: usize = 1 << 12;
/// Longest context accepted, in tokens.
pub const MAX_POSITIONS: usize = 1 << 28;
/// Largest LoRA rank accepted.
pub const MAX_LORA_RANK: usize = 1 << 12;

/// The architecture a checkpoint declares, by its `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// LLaMA 1 to 3, SmolLM, TinyLlama and others of `model_type` `llama`.
    Llama,
    /// Mistral: LLaMA with an optional sliding attention window.
    Mistral,
    /// Qwen2: LLaMA with biases on q, k and v.
    Qwen2,
}

impl Family {
    /// Every family, in declaration order.
    pub const ALL: [Family; 3] = [Self::Llama, Self::Mistral, Self::Qwen2];

    /// The `model_type` of its `config.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
        }
    }

    /// The family of a `model_type`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How rotary frequencies are stretched beyond the context a model was first trained on.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Frequencies as they are.
    #[default]
    None,
    /// All frequencies divided by `factor` (position interpolation, arXiv:2306.15595).
    Linear {
        /// Stretch, at least 1.
        factor: f32,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// Stretch of the long wavelengths, at least 1.
        factor: f32,
        /// Wavelengths above `original_max_positions / low_freq_factor` are stretched in full.
        low_freq_factor: f32,
        /// Wavelengths below `original_max_positions / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context length of the first training, in tokens.
        original_max_positions: usize,
    },
}

/// One of the seven linear layers of a block, in canonical order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinearName {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Attention output.
    O,
    /// Gate of the feed-forward network.
    Gate,
    /// Up projection of the feed-forward network.
    Up,
    /// Down projection of the feed-forward network.
    Down,
}

impl LinearName {
    /// All seven, in canonical order.
    pub const ALL: [LinearName; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];

    /// Position in [`LinearName::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Name in Hugging Face checkpoints and PEFT configurations: `q_proj`, ...
    pub const fn hf_name(self) -> &'static str {
        match self {
            Self::Q => "q_proj",
            Self::K => "k_proj",
            Self::V => "v_proj",
            Self::O => "o_proj",
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }

    /// Path below a layer: `self_attn.q_proj`, ...
    pub const fn hf_path(self) -> &'static str {
        match self {
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// The projection called `q_proj`, ...
    pub fn from_hf_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.hf_name() == name)
    }

    /// `(out, in)` features in a model of this configuration.
    pub fn shape(self, config: &ModelConfig) -> (usize, usize) {
        let (hidden, inner) = (config.hidden, config.intermediate);
        match self {
            Self::Q => (config.q_width(), hidden),
            Self::K | Self::V => (config.kv_width(), hidden),
            Self::O => (hidden, config.q_width()),
            Self::Gate | Self::Up => (inner, hidden),
            Self::Down => (hidden, inner),
        }
    }

    /// Whether it carries a bias in a model of this configuration.
    pub fn has_bias(self, config: &ModelConfig) -> bool {
        config.qkv_bias && matches!(self, Self::Q | Self::K | Self::V)
    }
}

impl fmt::Display for LinearName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.hf_name())
    }
}

/// Configuration of a LLaMA-family model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub family: Family,
    /// Rows of the embedding and of the LM head.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head; even, because rotary embedding turns pairs.
    pub head_dim: usize,
    /// Width of the feed-forward network.
    pub intermediate: usize,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f32,
    /// Rotary base.
    pub rope_theta: f32,
    /// Rotary stretch.
    pub rope_scaling: RopeScaling,
    /// Whether the LM head is the embedding.
    pub tie_word_embeddings: bool,
    /// Longest sequence the model was made for, in tokens.
    pub max_positions: usize,
    /// Whether q, k and v carry biases.
    pub qkv_bias: bool,
    /// Attention reaches back this many tokens at most, where set. Only sequences that fit are run: see [`ModelConfig::check_sequence`].
    pub sliding_window: Option<usize>,
    /// Token that begins a sequence.
    pub bos: Option<u32>,
    /// Tokens that end a sequence.
    pub eos: Vec<u32>,
}

impl ModelConfig {
    /// Width of all query heads together.
    pub const fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key heads together.
    pub const fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Checks every count against its limit, the relations between them, and that no tensor's byte size overflows `usize`.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field, its value and what is allowed. After `Ok`, [`ModelConfig::q_width`] and the shapes of
    /// [`LinearName::shape`] cannot overflow.
    pub fn validate(&self) -> Result<()> {
        for (name, value, limit) in [
            ("vocab", self.vocab, MAX_VOCAB),
            ("hidden", self.hidden, MAX_WIDTH),
            ("layers", self.layers, MAX_LAYERS),
            ("heads", self.heads, MAX_WIDTH),
            ("kv_heads", self.kv_heads, MAX_WIDTH),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("intermediate", self.intermediate, MAX_WIDTH),
            ("max_positions", self.max_positions, MAX_POSITIONS),
        ] {
            if value == 0 || value > limit {
                return Err(invalid(format!("{name} is {value}; it must be between 1 and {limit}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(invalid(format!("{} query heads do not divide evenly among {} key/value heads", self.heads, self.kv_heads)));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(invalid(format!("head_dim is {}; rotary embedding needs an even one", self.head_dim)));
        }
        // 4 bytes: the widest element type a weight may have.
        let bytes = |a: usize, b: usize| a.checked_mul(b).and_then(|n| n.checked_mul(4));
        match self.heads.checked_mul(self.head_dim) {
            Some(w) if w <= MAX_WIDTH => {}
            _ => {
                return Err(invalid(format!("{} heads of {} features are wider than {MAX_WIDTH}", self.heads, self.head_dim)));
            }
        }
        let widest = self.hidden.max(self.q_width()).max(self.intermediate);
        if bytes(self.vocab, self.hidden).is_none() || bytes(widest, widest).is_none() {
            return Err(invalid("a weight of this model does not fit the address space of this machine".into()));
        }
        for (name, value) in [("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(invalid(format!("{name} is {value}; it must be positive and finite")));
            }
        }
        self.rope_scaling.validate()?;
        if self.sliding_window == Some(0) {
            return Err(invalid("sliding_window is 0; attention would reach no token".into()));
        }
        for id in self.bos.iter().chain(&self.eos) {
            if *id as usize >= self.vocab {
                return Err(invalid(format!("special token {id} lies outside the vocabulary of {}", self.vocab)));
            }
        }
        Ok(())
    }

    /// Whether a sequence of `tokens` fits the context and the sliding window.
    ///
    /// # Errors
    /// `InvalidArgument` with both lengths.
    pub fn check_sequence(&self, tokens: usize) -> Result<()> {
        if tokens > self.max_positions {
            return Err(invalid(format!(
                "a sequence of {tokens} tokens is longer than the {} this model was made for; shorten or split the text",
                self.max_positions
            )));
        }
        match self.sliding_window {
            Some(window) if tokens > window => Err(invalid(format!(
                "a sequence of {tokens} tokens is longer than the sliding attention window of {window}, and windowed attention is not supported; \
                 shorten or split the text"
            ))),
            _ => Ok(()),
        }
    }

    /// Number of parameters of the base model.
    pub fn parameters(&self) -> u64 {
        let wide = |n: usize| n as u64;
        let linear = LinearName::ALL.iter().map(|p| {
            let (out, inp) = p.shape(self);
            wide(out) * wide(inp) + if p.has_bias(self) { wide(out) } else { 0 }
        });
        let block = linear.sum::<u64>() + 2 * wide(self.hidden);
        let head = if self.tie_word_embeddings { 1 } else { 2 };
        wide(self.layers) * block + head * wide(self.vocab) * wide(self.hidden) + wide(self.hidden)
    }
}

impl RopeScaling {
    fn validate(&self) -> Result<()> {
        let stretch = |factor: f32| {
            if factor.is_finite() && factor >= 1.0 {
                return Ok(());
            }
            Err(invalid(format!("the rotary scaling factor is {factor}; it must be finite and at least 1")))
        };
        match *self {
            Self::None => Ok(()),
            Self::Linear { factor } => stretch(factor),
            Self::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_max_positions: original } => {
                stretch(factor)?;
                if !(low.is_finite() && high.is_finite() && low > 0.0 && high > low) {
                    return Err(invalid(format!(
                        "llama3 rotary scaling needs 0 < low_freq_factor < high_freq_factor, not {low} and {high}"
                    )));
                }
                if original == 0 || original > MAX_POSITIONS {
                    return Err(invalid(format!(
                        "llama3 rotary scaling has original_max_position_embeddings {original}; it must be between 1 and {MAX_POSITIONS}"
                    )));
                }
                Ok(())
            }
        }
    }
}

fn invalid(message: String) -> Error {
    Error::invalid(message)
}
