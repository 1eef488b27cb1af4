use std::{collections::BTreeMap, fs, path::Path};

use safetensors::{Dtype, serialize, tensor::TensorView};
use serde_json::{Value, json};
use zofo_hal::{ErrorKind, Result};
use zofo_ops::{
    config::{LinearName, ModelConfig},
    files::{Adapter, AdapterConfig, LoraPair, config::parse_config, read_adapter, write_adapter},
};

use crate::support::{changed, refused, tiny_config};

fn model() -> ModelConfig {
    parse_config(Path::new("config.json"), tiny_config().to_string().as_bytes()).unwrap()
}

const RANK: usize = 2;

fn settings() -> Value {
    json!({"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "lora_dropout": 0.0, "bias": "none", "target_modules": ["nothing", "real"],
        "use_rslora": false, "use_dora": false, "modules_to_save": null, "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": true,
        "fan_in_fan_out": false})
}

type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

fn filled(name: &str, shape: [usize; 2]) -> (String, Vec<usize>, Vec<f32>) {
    let values = (0..shape[0] * shape[1]).map(|i| (i as f32 + name.len() as f32) / 8.0).collect();
    (name.into(), shape.to_vec(), values)
}

const PREFIX: &str = "base_model.model.model.layers";

/// q of layer 0 ([8, 12]) and down of layer 1 ([12, 10]).
fn pairs() -> Tensors {
    vec![
        filled(&format!("{PREFIX}.0.self_attn.q_proj.lora_A.weight"), [RANK, 12]),
        filled(&format!("{PREFIX}.0.self_attn.q_proj.lora_B.weight"), [8, RANK]),
        filled(&format!("{PREFIX}.1.mlp.down_proj.lora_A.weight"), [RANK, 10]),
        filled(&format!("{PREFIX}.1.mlp.down_proj.lora_B.weight"), [12, RANK]),
    ]
}

fn file(tensors: &Tensors) -> Vec<u8> {
    let data: Vec<Vec<u8>> = tensors.iter().map(|t| t.2.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&data).map(|((n, s, _), d)| (n.as_str(), TensorView::new(Dtype::F32, s.clone(), d).unwrap()));
    serialize(views, None).unwrap()
}

fn read(changes: Value, edit: impl FnOnce(&mut Tensors)) -> Result<Adapter> {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = pairs();
    edit(&mut tensors);
    fs::write(folder.path().join("adapter_config.json"), changed(settings(), changes).to_string()).unwrap();
    fs::write(folder.path().join("adapter_model.safetensors"), file(&tensors)).unwrap();
    read_adapter(folder.path(), &model())
}

const Q: (usize, LinearName) = (0, LinearName::Q);
const DOWN: (usize, LinearName) = (1, LinearName::Down);

#[test]
fn keys_are_the_truth() {
    let adapter = read(json!({}), |_| {}).unwrap();
    assert_eq!(adapter.modules().keys().copied().collect::<Vec<_>>(), [Q, DOWN]);
    assert_eq!(adapter.targets(), [LinearName::Q, LinearName::Down]);
    let q = adapter.get(Q).unwrap();
    assert_eq!((q.rank(), q.shape(), q.alpha(), adapter.scale(q)), (2, (8, 12), 6.0, 3.0));
    assert_eq!((q.a(), q.b()), (pairs()[0].2.as_slice(), pairs()[1].2.as_slice()));
    assert_eq!(adapter.parameters(), 2 * (12 + 8) + 2 * (10 + 12));
    assert!(adapter.check_trainable().is_ok());
    for target_modules in [json!("all-linear"), json!(".*_proj"), json!(null), json!(["q_proj"])] {
        assert_eq!(read(json!({ "target_modules": target_modules }), |_| {}).unwrap(), adapter);
    }
}

#[test]
fn the_default_adapter_may_be_named() {
    let named = |t: &mut Tensors| t.iter_mut().for_each(|t| t.0 = t.0.replace(".weight", ".default.weight"));
    assert_eq!(read(json!({}), named).unwrap(), read(json!({}), |_| {}).unwrap());
    let twice = |t: &mut Tensors| t.push(filled(&t[0].0.replace(".weight", ".default.weight"), [RANK, 12]));
    refused(read(json!({}), twice), ErrorKind::Format, &["model.layers.0.self_attn.q_proj", "two tensors", "factor A"]);
}

#[test]
fn rslora_scales_by_the_root() {
    let adapter = read(json!({"use_rslora": true}), |_| {}).unwrap();
    assert_eq!(adapter.scale(adapter.get(Q).unwrap()), 6.0 / 2f32.sqrt());
}

#[test]
fn dropout_runs_but_does_not_train() {
    let adapter = read(json!({"lora_dropout": 0.25}), |_| {}).unwrap();
    refused(adapter.check_trainable(), ErrorKind::Unsupported, &["lora_dropout 0.25", "set it to 0"]);
    refused(read(json!({"lora_dropout": 1.5}), |_| {}), ErrorKind::Format, &["lora_dropout", "below 1"]);
}

#[test]
fn patterns_give_modules_their_own_rank_and_alpha() {
    let rank3 = |t: &mut Tensors| {
        t[2] = filled(&t[2].0, [3, 10]);
        t[3] = filled(&t[3].0, [12, 3]);
    };
    for key in ["down_proj", "mlp.down_proj", "model.layers.1.mlp.down_proj", "^model.layers.1.mlp.down_proj"] {
        let changes = json!({"rank_pattern": {key: 3}, "alpha_pattern": {key: 12.0}});
        let adapter = read(changes, rank3).unwrap();
        let (q, down) = (adapter.get(Q).unwrap(), adapter.get(DOWN).unwrap());
        assert_eq!((adapter.scale(q), adapter.scale(down), down.rank()), (3.0, 4.0, 3), "{key}");
    }
    // An ending inside a name does not match.
    refused(read(json!({"rank_pattern": {"own_proj": 3}}), rank3), ErrorKind::Format, &["lora_A", "rank 3", "says 2"]);
    refused(
        read(json!({"rank_pattern": {"layers\\.[01]\\..*": 3}}), rank3),
        ErrorKind::Unsupported,
        &["rank_pattern", "regular expression"],
    );
    let both = json!({"alpha_pattern": {"down_proj": 3, "mlp.down_proj": 4}});
    refused(read(both, |_| {}), ErrorKind::Unsupported, &["alpha_pattern", "mlp.down_proj", "both"]);
    refused(read(json!({"rank_pattern": {"q_proj": 0}}), |_| {}), ErrorKind::Format, &["rank is 0"]);
    refused(read(json!({"rank_pattern": {"q_proj": 1.5}}), |_| {}), ErrorKind::Format, &["1.5"]);
}

#[test]
fn more_than_plain_lora_is_refused_by_name() {
    for (changes, parts) in [
        (json!({"peft_type": "IA3"}), ["peft_type", "IA3"]),
        (json!({"bias": "lora_only"}), ["bias", "lora_only"]),
        (json!({"use_dora": true}), ["use_dora", "DoRA"]),
        (json!({"lora_bias": true}), ["lora_bias", "not supported"]),
        (json!({"fan_in_fan_out": true}), ["fan_in_fan_out", "not supported"]),
        (json!({"modules_to_save": ["lm_head"]}), ["modules_to_save", "lm_head"]),
        (json!({"layer_replication": [[0, 1]]}), ["layer_replication", "not supported"]),
        (json!({"trainable_token_indices": [1]}), ["trainable_token_indices", "not supported"]),
        (json!({"init_lora_weights": "pissa"}), ["init_lora_weights", "pissa"]),
    ] {
        refused(read(changes, |_| {}), ErrorKind::Unsupported, &parts);
    }
    for (key, part) in [
        (format!("{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector"), "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A".into(), "embeddings"),
        ("base_model.model.lm_head.weight".into(), "replacing whole modules"),
        ("base_model.model.lm_head.modules_to_save.weight".into(), "replacing whole modules"),
        (format!("{PREFIX}.0.self_attn.q_proj.lora_B.bias"), "biases"),
        (format!("{PREFIX}.0.self_attn.q_proj.lora_A.other.weight"), "default adapter"),
        (format!("{PREFIX}.0.self_attn.qkv_proj.lora_A.weight"), "q, k, v, o"),
        (format!("{PREFIX}.-1.self_attn.q_proj.lora_A.weight"), "q, k, v, o"),
        (format!("{PREFIX}.99999999999999999999999.self_attn.q_proj.lora_A.weight"), "q, k, v, o"),
        ("base_model.model.lm_head.lora_A.weight".into(), "q, k, v, o"),
    ] {
        refused(read(json!({}), |t| t.push(filled(&key, [1, 1]))), ErrorKind::Unsupported, &[&key, part, "adapter_model.safetensors"]);
    }
}

#[test]
fn factors_must_fit_the_base_layer() {
    let set = |at: usize, shape: [usize; 2]| move |t: &mut Tensors| t[at] = filled(&t[at].0.clone(), shape);
    for (edit, parts) in [
        ((0, [12, RANK]), ["lora_A", "transposed", "[r, in]"]),
        ((1, [RANK, 8]), ["lora_B", "transposed", "[out, r]"]),
        ((0, [RANK, 13]), ["[2, 13]", "[2, 12]", "another model"]),
        ((3, [10, RANK]), ["[10, 2]", "[12, 2]", "another model"]),
        ((0, [3, 12]), ["rank 3", "says 2", "q_proj"]),
        ((0, [0, 12]), ["rank is 0", "lora_A", "q_proj"]),
    ] {
        refused(read(json!({}), set(edit.0, edit.1)), ErrorKind::Format, &parts);
    }
}

#[test]
fn incomplete_and_foreign_files() {
    refused(read(json!({}), |t| drop(t.remove(3))), ErrorKind::Format, &["layers.1.mlp.down_proj", "lora_A but no lora_B"]);
    refused(read(json!({}), |t| drop(t.remove(0))), ErrorKind::Format, &["layers.0.self_attn.q_proj", "lora_B but no lora_A"]);
    refused(read(json!({}), Vec::clear), ErrorKind::Format, &["at least one"]);
    let beyond = |t: &mut Tensors| t.iter_mut().for_each(|t| t.0 = t.0.replace("layers.1", "layers.7"));
    refused(read(json!({}), beyond), ErrorKind::Format, &["layers.7", "has 2 layers", "another model"]);
    for bad in [f32::NAN, f32::INFINITY] {
        refused(read(json!({}), |t| t[1].2[5] = bad), ErrorKind::Format, &["q_proj", "factor B", "element 5"]);
    }
    refused(read(json!({"r": 0}), |_| {}), ErrorKind::Format, &["rank is 0"]);
    refused(read(json!({"r": 1u64 << 40}), |_| {}), ErrorKind::Format, &["rank is"]);
    refused(read(json!({"r": null}), |_| {}), ErrorKind::Format, &["`r` is missing"]);
    refused(read(json!({"lora_alpha": 1e300}), |_| {}), ErrorKind::Format, &["lora_alpha", "finite"]);

    let folder = tempfile::tempdir().unwrap();
    refused(read_adapter(folder.path(), &model()), ErrorKind::Io, &["adapter_config.json"]);
    fs::write(folder.path().join("adapter_config.json"), settings().to_string()).unwrap();
    refused(read_adapter(folder.path(), &model()), ErrorKind::Io, &["adapter_model.safetensors"]);
    fs::write(folder.path().join("adapter_model.bin"), "").unwrap();
    refused(read_adapter(folder.path(), &model()), ErrorKind::Io, &["pickled", "safe_serialization"]);
}

fn made(modules: &[(usize, LinearName, usize, f32)], config: AdapterConfig) -> Adapter {
    let model = model();
    let pair = |&(layer, name, rank, alpha): &(usize, LinearName, usize, f32)| {
        let (out, inp) = name.shape(&model);
        let fill = |n: usize| (0..n).map(|i| i as f32 * 0.1 - layer as f32).collect();
        ((layer, name), LoraPair::new(rank, alpha, (out, inp), fill(rank * inp), fill(out * rank)).unwrap())
    };
    Adapter::new(config, &model, modules.iter().map(pair).collect()).unwrap()
}

fn round_trip(adapter: &Adapter) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("run/adapter");
    // Twice: the second write replaces the first.
    write_adapter(&inner, adapter, "other").unwrap();
    write_adapter(&inner, adapter, "tiny").unwrap();
    assert_eq!(&read_adapter(&inner, &model()).unwrap(), adapter);
    let mut names: Vec<_> = fs::read_dir(&inner).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort_unstable();
    assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors"]);
    serde_json::from_slice(&fs::read(inner.join("adapter_config.json")).unwrap()).unwrap()
}

#[test]
fn what_is_written_is_read_back() {
    use LinearName::{Gate, Q, V};
    let whole = made(&[(0, Q, 2, 6.0), (0, V, 2, 6.0), (1, Q, 2, 6.0), (1, V, 2, 6.0)], AdapterConfig::new(2, 6.0));
    let json = round_trip(&whole);
    assert_eq!(json["target_modules"], json!(["q_proj", "v_proj"]));
    assert_eq!(json["layers_to_transform"], json!(null));
    assert_eq!((&json["r"], &json["lora_alpha"], &json["base_model_name_or_path"]), (&json!(2), &json!(6), &json!("tiny")));

    let one_layer = round_trip(&made(&[(1, Q, 2, 6.0), (1, V, 2, 6.0)], AdapterConfig::new(2, 6.0)));
    assert_eq!((&one_layer["target_modules"], &one_layer["layers_to_transform"]), (&json!(["q_proj", "v_proj"]), &json!([1])));

    let mixed = AdapterConfig { rslora: true, dropout: 0.1, ..AdapterConfig::new(2, 6.5) };
    let json = round_trip(&made(&[(0, Q, 2, 6.5), (1, Gate, 4, 1.5)], mixed));
    assert_eq!(json["target_modules"], json!(["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj"]));
    assert_eq!(json["rank_pattern"], json!({"model.layers.1.mlp.gate_proj": 4}));
    assert_eq!(json["alpha_pattern"], json!({"model.layers.1.mlp.gate_proj": 1.5}));
    assert_eq!((&json["use_rslora"], &json["lora_alpha"]), (&json!(true), &json!(6.5)));
}

#[test]
fn an_unwritable_folder_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let blocked = folder.path().join("file");
    fs::write(&blocked, "").unwrap();
    let adapter = made(&[(0, LinearName::Q, 1, 1.0)], AdapterConfig::new(1, 1.0));
    refused(write_adapter(&blocked, &adapter, "tiny"), ErrorKind::Io, &["file"]);
}

#[test]
fn wrong_pairs_cannot_be_made() {
    let invalid = ErrorKind::InvalidArgument;
    refused(LoraPair::new(0, 1.0, (2, 2), vec![], vec![]), invalid.clone(), &["rank is 0"]);
    refused(LoraPair::new(1, 1.0, (2, 2), vec![0.0; 3], vec![0.0; 2]), invalid.clone(), &["factor A", "3 elements"]);
    refused(LoraPair::new(1, f32::NAN, (2, 2), vec![0.0; 2], vec![0.0; 2]), invalid.clone(), &["alpha"]);
    let pair = LoraPair::new(1, 1.0, (2, 2), vec![0.0; 2], vec![0.0; 2]).unwrap();
    let at = |module| Adapter::new(AdapterConfig::new(1, 1.0), &model(), BTreeMap::from([(module, pair.clone())]));
    refused(at((0, LinearName::Q)), invalid.clone(), &["(2, 2)", "(8, 12)"]);
    refused(at((2, LinearName::Q)), invalid, &["has 2 layers"]);
}

/// An adapter that PEFT wrote: read, written, and the same tensors and settings as before.
#[test]
fn an_adapter_of_peft_comes_back_the_same() {
    let folder = zofo_testkit::shared_or_skip!("models/stories260K/peft_adapter_r4");
    let model = zofo_testkit::shared_or_skip!("models/stories260K/hf/config.json");
    let model = zofo_ops::files::config::read_config(&model).unwrap();
    let adapter = read_adapter(&folder, &model).unwrap();
    assert_eq!((adapter.modules().len(), adapter.targets()), (10, vec![LinearName::Q, LinearName::V]));
    let first = adapter.get((0, LinearName::V)).unwrap();
    assert_eq!((first.shape(), first.rank(), adapter.scale(first)), ((32, 64), 4, 2.0));

    let copy = tempfile::tempdir().unwrap();
    write_adapter(copy.path(), &adapter, "stories260K").unwrap();
    let load = |folder: &Path| {
        let bytes = fs::read(folder.join("adapter_model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let all = file.iter().map(|(n, t)| (n.to_owned(), (t.dtype(), t.shape().to_vec(), t.data().to_vec())));
        all.collect::<BTreeMap<_, _>>()
    };
    assert_eq!(load(copy.path()), load(&folder));
    let settings = |folder: &Path| -> Value { serde_json::from_slice(&fs::read(folder.join("adapter_config.json")).unwrap()).unwrap() };
    assert_eq!(settings(copy.path()), settings(&folder));
}
