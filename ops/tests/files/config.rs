use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};
use zofo_hal::{ErrorKind, Result};
use zofo_ops::{
    config::{Family, LinearName, ModelConfig, RopeScaling},
    files::config::{MAX_CONFIG_BYTES, parse_config, read_config},
};

use crate::support::{changed, refused, tiny_config};

fn parse(json: &Value) -> Result<ModelConfig> {
    parse_config(Path::new("config.json"), json.to_string().as_bytes())
}

fn with(changes: Value) -> Result<ModelConfig> {
    parse(&changed(tiny_config(), changes))
}

#[test]
fn reads_every_field() {
    let c = with(json!({})).unwrap();
    assert_eq!(
        c,
        ModelConfig {
            family: Family::Llama,
            vocab: 11,
            hidden: 12,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 2,
            intermediate: 10,
            rms_norm_eps: 1e-5,
            rope_theta: 10000.0,
            rope_scaling: RopeScaling::None,
            tie_word_embeddings: false,
            max_positions: 64,
            qkv_bias: false,
            sliding_window: None,
            bos: Some(1),
            eos: vec![2, 3],
        }
    );
    assert_eq!(LinearName::O.shape(&c), (12, 8));
    // 2 x (q 96 + k 48 + v 48 + o 96 + gate 120 + up 120 + down 120 + norms 24) + embedding and head 132 each + norm 12
    assert_eq!(c.parameters(), 2 * 672 + 2 * 132 + 12);
}

#[test]
fn llama_defaults_as_transformers_has_them() {
    let c = with(json!({"hidden_size": 16, "num_key_value_heads": null, "head_dim": null, "hidden_act": null, "rms_norm_eps": null,
        "max_position_embeddings": null, "tie_word_embeddings": null, "bos_token_id": null, "eos_token_id": null}))
    .unwrap();
    assert_eq!((c.kv_heads, c.head_dim, c.rms_norm_eps, c.max_positions), (4, 4, 1e-6, 2048));
    assert_eq!((c.bos, c.eos.len(), c.tie_word_embeddings), (None, 0, false));
}

#[test]
fn llama3_scaling_in_both_layouts() {
    let numbers = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let expected = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 8192 };
    let old = with(json!({"rope_scaling": numbers, "rope_theta": 500000.0})).unwrap();
    let new = with(json!({"rope_parameters": changed(numbers, json!({"rope_theta": 500000.0}))})).unwrap();
    assert_eq!(old.rope_scaling, expected);
    assert_eq!(old.rope_theta, 500000.0);
    assert_eq!(old, new);
}

#[test]
fn linear_and_default_scaling() {
    let linear = with(json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
    assert_eq!(linear.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    let default = with(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})).unwrap();
    assert_eq!((default.rope_scaling, default.rope_theta), (RopeScaling::None, 1e6));
}

#[test]
fn qwen2_has_biases_and_a_switched_off_window() {
    let c = with(json!({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": false})).unwrap();
    assert!(c.qkv_bias && LinearName::K.has_bias(&c) && !LinearName::O.has_bias(&c));
    assert_eq!(c.sliding_window, None);
    let on = with(json!({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": true})).unwrap();
    assert_eq!(on.sliding_window, Some(4));
}

#[test]
fn mistral_window_null_absent_and_set() {
    let mistral = json!({"model_type": "mistral"});
    assert_eq!(with(changed(mistral.clone(), json!({"sliding_window": null}))).unwrap().sliding_window, None);
    assert_eq!(with(mistral.clone()).unwrap().sliding_window, Some(4096));
    let c = with(changed(mistral, json!({"sliding_window": 8}))).unwrap();
    assert!(c.check_sequence(8).is_ok());
    refused(c.check_sequence(9), ErrorKind::InvalidArgument, &["9 tokens", "window of 8"]);
}

#[test]
fn sequences_longer_than_the_context_are_refused() {
    refused(with(json!({})).unwrap().check_sequence(65), ErrorKind::InvalidArgument, &["65", "64", "shorten"]);
}

#[test]
fn unsupported_options_are_named() {
    for (change, parts) in [
        (json!({"model_type": "gpt2"}), ["unknown architecture `gpt2`", "llama, mistral, qwen2"]),
        (json!({"hidden_act": "gelu"}), ["hidden_act", "gelu"]),
        (json!({"mlp_bias": true}), ["mlp_bias", "not supported"]),
        (json!({"attention_bias": true}), ["attention_bias", "not supported"]),
        (json!({"quantization_config": {"bits": 4}}), ["quantization_config", "unquantised"]),
        (json!({"partial_rotary_factor": 0.5}), ["partial_rotary_factor", "0.5"]),
        (json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), ["yarn", "not supported"]),
        (json!({"rope_scaling": {"type": "dynamic", "factor": 4.0}}), ["dynamic", "not supported"]),
        (json!({"rope_parameters": {"rope_type": "longrope"}}), ["longrope", "not supported"]),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}), ["rope_parameters", "differ"]),
    ] {
        refused(with(change), ErrorKind::Unsupported, &parts);
    }
}

#[test]
fn malformed_values_are_named() {
    for (change, parts) in [
        (json!({"model_type": null}), ["model_type", "missing"]),
        (json!({"vocab_size": null}), ["vocab_size", "missing"]),
        (json!({"model_type": "qwen2", "num_key_value_heads": null}), ["num_key_value_heads", "missing"]),
        (json!({"hidden_size": "64"}), ["hidden_size", "whole number"]),
        (json!({"hidden_size": -1}), ["hidden_size", "whole number"]),
        (json!({"num_hidden_layers": 0}), ["layers is 0", "between 1"]),
        (json!({"num_hidden_layers": 1u64 << 40}), ["layers", "between 1"]),
        (json!({"vocab_size": u64::MAX}), ["vocab", "1"]),
        (json!({"head_dim": 3}), ["head_dim is 3", "even"]),
        (json!({"num_attention_heads": 3}), ["3 query heads", "2"]),
        (json!({"num_attention_heads": 0, "head_dim": null}), ["num_attention_heads", "0"]),
        (json!({"num_attention_heads": 1 << 20, "head_dim": 4096}), ["heads", "wider"]),
        (json!({"rms_norm_eps": -1.0}), ["rms_norm_eps", "positive"]),
        (json!({"rms_norm_eps": 1e300}), ["rms_norm_eps", "finite"]),
        (json!({"rope_theta": "big"}), ["rope_theta", "number"]),
        (json!({"rope_scaling": {"rope_type": "linear"}}), ["factor", "missing"]),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}), ["0.5", "at least 1"]),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1,
            "original_max_position_embeddings": 1}}),
            ["low_freq_factor", "high_freq_factor"],
        ),
        (json!({"bos_token_id": 11}), ["11", "outside"]),
        (json!({"eos_token_id": "x"}), ["eos_token_id", "token id"]),
        (json!({"tie_word_embeddings": 1}), ["tie_word_embeddings", "true or false"]),
    ] {
        refused(with(change), ErrorKind::Format, &parts);
    }
}

#[test]
fn long_missing_and_nested_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    refused(read_config(&path), ErrorKind::Io, &["config.json"]);
    std::fs::write(&path, vec![b' '; MAX_CONFIG_BYTES as usize + 1]).unwrap();
    refused(read_config(&path), ErrorKind::Format, &["larger than"]);
    std::fs::write(&path, "[".repeat(500_000)).unwrap();
    refused(read_config(&path), ErrorKind::Format, &["not valid JSON"]);
    std::fs::write(&path, "[1]").unwrap();
    refused(read_config(&path), ErrorKind::Format, &["not a JSON object"]);
}

/// Any JSON value that a mutation may put in place of another.
fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(|v| json!(v)),
        any::<u64>().prop_map(|v| json!(v)),
        (0u64..5000).prop_map(|v| json!(v)),
        any::<i64>().prop_map(|v| json!(v)),
        any::<f64>().prop_map(|v| json!(v)),
        ".{0,8}".prop_map(|v| json!(v)),
        Just(json!([1, "a", {}])),
        Just(json!({"rope_type": "llama3", "factor": -1})),
    ]
}

proptest! {
    #[test]
    fn mutated_fields_never_panic(index in 0usize..20, value in any_value()) {
        let mut config = changed(tiny_config(), json!({"rope_scaling": null, "rope_parameters": null, "sliding_window": null}));
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        config[&keys[index % keys.len()]] = value;
        for family in Family::ALL {
            config["model_type"] = if index % 5 == 0 { config["model_type"].clone() } else { json!(family.name()) };
            if let Ok(c) = parse(&config) {
                prop_assert!(c.validate().is_ok());
                let _ = c.parameters();
            }
        }
    }

    #[test]
    fn mutated_bytes_never_panic(at in 0usize..300, byte in any::<u8>(), cut in 0usize..400) {
        let mut bytes = tiny_config().to_string().into_bytes();
        let n = bytes.len();
        bytes[at % n] = byte;
        let _ = parse_config(Path::new("x"), &bytes);
        let _ = parse_config(Path::new("x"), &bytes[..cut.min(n)]);
    }
}

#[test]
fn stories260k() {
    let path = zofo_testkit::shared_or_skip!("models/stories260K/hf/config.json");
    let c = read_config(&path).unwrap();
    assert_eq!((c.vocab, c.hidden, c.layers, c.heads, c.kv_heads, c.head_dim, c.intermediate), (512, 64, 5, 8, 4, 8, 172));
    assert!(c.tie_word_embeddings);
    assert_eq!(c.eos, [2]);
}
