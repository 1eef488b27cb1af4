//! Small models and safetensors files for the tests beside this.

use std::path::Path;

use safetensors::{Dtype, serialize, tensor::TensorView};
use serde_json::{Value, json};
use zofo_hal::{ErrorKind, Result};

/// A LLaMA of 2 layers whose widths all differ, so that a mixed-up dimension shows.
pub fn tiny_config() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 10, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": [2, 3],
    })
}

/// `tiny_config` with some keys replaced; null removes one.
pub fn changed(mut base: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        base[key] = value.clone();
    }
    base
}

/// Names and shapes of the tensors of `tiny_config`, head included.
pub fn tiny_tensors() -> Vec<(String, Vec<usize>)> {
    let mut all = vec![
        ("model.embed_tokens.weight".into(), vec![11, 12]),
        ("model.norm.weight".into(), vec![12]),
        ("lm_head.weight".into(), vec![11, 12]),
    ];
    for i in 0..2 {
        for (name, shape) in [
            ("input_layernorm", vec![12]),
            ("post_attention_layernorm", vec![12]),
            ("self_attn.q_proj", vec![8, 12]),
            ("self_attn.k_proj", vec![4, 12]),
            ("self_attn.v_proj", vec![4, 12]),
            ("self_attn.o_proj", vec![12, 8]),
            ("mlp.gate_proj", vec![10, 12]),
            ("mlp.up_proj", vec![10, 12]),
            ("mlp.down_proj", vec![12, 10]),
        ] {
            all.push((format!("model.layers.{i}.{name}.weight"), shape));
        }
    }
    all
}

/// A value for element `i` of tensor `name`, different between tensors.
pub fn value(name: &str, i: usize) -> f32 {
    (name.bytes().map(u32::from).sum::<u32>() % 97) as f32 + i as f32 / 128.0
}

/// A safetensors file of f32 tensors filled with [`value`].
pub fn tensors(list: &[(String, Vec<usize>)]) -> Vec<u8> {
    let data: Vec<_> = list
        .iter()
        .map(|(name, shape)| {
            let count = shape.iter().product();
            let bytes: Vec<u8> = (0..count).flat_map(|i| value(name, i).to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = data.iter().map(|(n, s, b)| (n.as_str(), TensorView::new(Dtype::F32, s.to_vec(), b).unwrap()));
    serialize(views, None).unwrap()
}

/// A file of a header as given and `data` zero bytes.
pub fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

pub fn write_model(folder: &Path, config: &Value, list: &[(String, Vec<usize>)]) {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.join("model.safetensors"), tensors(list)).unwrap();
}

/// Asserts that `result` is an error of `kind` that mentions all of `parts`.
#[track_caller]
pub fn refused<T>(result: Result<T>, kind: ErrorKind, parts: &[&str]) {
    let Err(error) = result else { panic!("accepted; expected an error with {parts:?}") };
    let text = error.to_string();
    assert_eq!(error.kind(), &kind, "{text}");
    for part in parts {
        assert!(text.contains(part), "`{text}` does not mention `{part}`");
    }
}
