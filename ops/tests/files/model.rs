use serde_json::json;
use zofo_hal::{ErrorKind, Result};
use zofo_ops::{config::LinearName, files::ModelFiles};

use crate::support::{changed, refused, tiny_config, tiny_tensors, value, write_model};

type Tensors = Vec<(String, Vec<usize>)>;

fn open(changes: serde_json::Value, edit: impl FnOnce(&mut Tensors)) -> Result<ModelFiles> {
    let folder = tempfile::tempdir().unwrap();
    let mut list = tiny_tensors();
    edit(&mut list);
    write_model(folder.path(), &changed(tiny_config(), changes), &list);
    ModelFiles::open(folder.path())
}

#[test]
fn every_tensor_in_its_place() {
    let files = open(json!({}), |_| {}).unwrap();
    assert_eq!(files.embed().shape, [11, 12]);
    assert_eq!(files.final_norm().shape, [12]);
    assert_eq!(files.lm_head().unwrap().to_f32()[5], value("lm_head.weight", 5));
    for i in 0..2 {
        let layer = files.layer(i).unwrap();
        for name in LinearName::ALL {
            let full = format!("model.layers.{i}.{}.weight", name.hf_path());
            assert_eq!(layer.linear(name).weight.to_f32()[3], value(&full, 3), "{full}");
            assert!(layer.linear(name).bias.is_none());
        }
        let norm = format!("model.layers.{i}.post_attention_layernorm.weight");
        assert_eq!(layer.post_attention_norm.to_f32()[2], value(&norm, 2));
        assert_eq!(layer.input_norm.shape, [12]);
    }
    refused(files.layer(2).map(|_| ()), ErrorKind::InvalidArgument, &["no layer 2", "has 2"]);
}

#[test]
fn tied_by_flag_or_by_absence() {
    let flagged = open(json!({"tie_word_embeddings": true}), |_| {}).unwrap();
    let absent = open(json!({}), |t| t.retain(|(n, _)| n != "lm_head.weight")).unwrap();
    for files in [flagged, absent] {
        assert!(files.lm_head().is_none() && files.config().tie_word_embeddings);
    }
}

fn biases(list: &mut Tensors) {
    for i in 0..2 {
        for (name, width) in [("q", 8), ("k", 4), ("v", 4)] {
            list.push((format!("model.layers.{i}.self_attn.{name}_proj.bias"), vec![width]));
        }
    }
}

#[test]
fn qwen2_biases_are_read() {
    let files = open(json!({"model_type": "qwen2"}), biases).unwrap();
    let layer = files.layer(1).unwrap();
    assert_eq!(layer.linear(LinearName::K).bias.as_ref().unwrap().shape, [4]);
    assert!(layer.linear(LinearName::O).bias.is_none());
    refused(open(json!({"model_type": "qwen2"}), |_| {}), ErrorKind::Format, &["no tensor `model.layers.0.self_attn.q_proj.bias`"]);
}

#[test]
fn what_would_be_ignored_is_refused() {
    refused(open(json!({}), biases), ErrorKind::Format, &["model.layers.0.self_attn.k_proj.bias", "no place"]);
    refused(open(json!({"num_hidden_layers": 1}), |_| {}), ErrorKind::Format, &["model.layers.1.", "no place"]);
    let harmless = |t: &mut Tensors| {
        t.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), vec![1]));
        t.push(("score.weight".into(), vec![1]));
    };
    assert!(open(json!({}), harmless).is_ok());
}

#[test]
fn wrong_shapes_and_missing_tensors_are_named() {
    let shape = |t: &mut Tensors| t.iter_mut().find(|(n, _)| n.ends_with("1.self_attn.k_proj.weight")).unwrap().1 = vec![12, 4];
    refused(
        open(json!({}), shape),
        ErrorKind::Format,
        &["model.layers.1.self_attn.k_proj.weight", "[12, 4]", "[4, 12]", "model.safetensors"],
    );
    let missing = |t: &mut Tensors| t.retain(|(n, _)| n != "model.norm.weight");
    refused(open(json!({}), missing), ErrorKind::Format, &["no tensor `model.norm.weight`"]);
    refused(open(json!({"num_hidden_layers": 3}), |_| {}), ErrorKind::Format, &["model.layers.2."]);
    refused(open(json!({"vocab_size": 12}), |_| {}), ErrorKind::Format, &["embed_tokens", "[11, 12]", "[12, 12]"]);
}

#[test]
fn a_folder_without_a_configuration_says_so() {
    let folder = tempfile::tempdir().unwrap();
    refused(ModelFiles::open(folder.path()), ErrorKind::Io, &["no config.json", "Hugging Face"]);
}

#[test]
fn stories260k() {
    let folder = zofo_testkit::shared_or_skip!("models/stories260K/hf");
    let files = ModelFiles::open(&folder).unwrap();
    assert!(files.lm_head().is_none());
    assert_eq!(files.embed().shape, [512, 64]);
    let stored: usize = [files.embed().elements(), files.final_norm().elements()].iter().sum::<usize>()
        + (0..5)
            .map(|i| {
                let layer = files.layer(i).unwrap();
                let linear: usize = LinearName::ALL.iter().map(|n| layer.linear(*n).weight.elements()).sum();
                linear + layer.input_norm.elements() + layer.post_attention_norm.elements()
            })
            .sum::<usize>();
    assert_eq!(stored as u64, files.config().parameters());
    assert!(files.layer(4).unwrap().linear(LinearName::Down).weight.to_f32().iter().all(|v| v.is_finite()));
}
