//! The shapes of a small LLaMA: SmolLM2-135M, and the batch that everything is measured on.

use zofo_hal::op::AttentionShape;
use zofo_ops::{
    config::{Family, RopeScaling},
    llama::ModelConfig,
};

/// Width of the residual stream.
pub const HIDDEN: usize = 576;
/// Query heads.
pub const HEADS: usize = 9;
/// Key and value heads.
pub const KV_HEADS: usize = 3;
/// Width of a head.
pub const HEAD_DIM: usize = 64;
/// Width of the feed-forward network.
pub const FFN: usize = 1536;
/// Tokens of the vocabulary.
pub const VOCAB: usize = 49152;
/// Layers.
pub const LAYERS: usize = 30;
/// Sequences of the batch.
pub const SEQUENCES: usize = 8;
/// Tokens of each of them.
pub const TOKENS: usize = 128;
/// Rows of the batch.
pub const ROWS: usize = SEQUENCES * TOKENS;
/// Rank of the adapters.
pub const RANK: usize = 8;

/// Products `[m, k, n]` that are measured: a square one, those of the model at several row counts, and one whose sizes suit no vector.
pub const PRODUCTS: [[usize; 3]; 10] = [
    [2048, 2048, 2048],
    [512, HIDDEN, FFN],
    [128, FFN, HIDDEN],
    [512, FFN, HIDDEN],
    [512, HIDDEN, VOCAB],
    [128, HIDDEN, HIDDEN],
    [32, HIDDEN, FFN],
    [1, HIDDEN, FFN],
    [1, HIDDEN, VOCAB],
    [77, 172, 172],
];

/// Its attention.
pub fn attention() -> AttentionShape {
    AttentionShape { heads: HEADS, kv_heads: KV_HEADS, head_dim: HEAD_DIM, scale: 1.0 / (HEAD_DIM as f32).sqrt(), causal: true }
}

/// The model.
pub fn model() -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        vocab: VOCAB,
        hidden: HIDDEN,
        layers: LAYERS,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        intermediate: FFN,
        rms_norm_eps: 1e-5,
        rope_theta: 100_000.0,
        rope_scaling: RopeScaling::None,
        tie_word_embeddings: true,
        max_positions: 8192,
        qkv_bias: false,
        sliding_window: None,
        bos: Some(1),
        eos: vec![2],
    }
}

/// A model so small that its ops are mostly what comes with an op: stories260K by its shapes.
pub fn tiny() -> ModelConfig {
    ModelConfig { vocab: 512, hidden: 64, layers: 5, heads: 8, kv_heads: 4, head_dim: 8, intermediate: 172, max_positions: 512, ..model() }
}
