//! Writing an adapter so that PEFT loads it.

use std::{collections::BTreeSet, fs, path::Path};

use safetensors::{Dtype, serialize, tensor::TensorView};
use serde_json::{Map, Value, json};
use zofo_hal::{Error, Result};

use super::{Adapter, CONFIG_FILE, KEY_PREFIX, TENSOR_FILE, module_path};
use crate::{config::LinearName, files::write::write_atomic};

/// Writes `adapter` into `folder`, which is made where it is missing. `base_model` goes into the configuration, for PEFT to find the base model.
///
/// Factors are stored as f32. Each of the two files is replaced whole or not at all.
///
/// # Errors
/// `Io` where the folder or a file cannot be written.
pub fn write_adapter(folder: &Path, adapter: &Adapter, base_model: &str) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    write_atomic(folder, TENSOR_FILE, &tensors(adapter)?)?;
    let mut config = format!("{:#}", config(adapter, base_model));
    config.push('\n');
    write_atomic(folder, CONFIG_FILE, config.as_bytes())
}

fn tensors(adapter: &Adapter) -> Result<Vec<u8>> {
    let wrong = |e| Error::format(format!("{TENSOR_FILE}: {e}"));
    let mut named = Vec::new();
    for (module, pair) in &adapter.modules {
        let (out, inp) = pair.shape();
        for (letter, shape, values) in [("A", [pair.rank, inp], &pair.a), ("B", [out, pair.rank], &pair.b)] {
            let name = format!("{KEY_PREFIX}{}.lora_{letter}.weight", module_path(*module));
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            named.push((name, shape.to_vec(), bytes));
        }
    }
    let views = named
        .iter()
        .map(|(name, shape, bytes)| Ok((name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, _>>()
        .map_err(wrong)?;
    // transformers refuses files that do not say which framework's layout they have.
    let format = [("format".to_owned(), "pt".to_owned())].into();
    serialize(views, Some(format)).map_err(wrong)
}

fn config(adapter: &Adapter, base_model: &str) -> Value {
    let settings = &adapter.config;
    let (targets, layers) = targets(adapter);
    let exceptions = |differs: &dyn Fn(&super::LoraPair) -> Option<Value>| -> Map<String, Value> {
        let listed = adapter.modules.iter();
        listed.filter_map(|(m, pair)| Some((module_path(*m), differs(pair)?))).collect()
    };
    let ranks = exceptions(&|p| (p.rank != settings.rank).then(|| json!(p.rank)));
    let alphas = exceptions(&|p| (p.alpha != settings.alpha).then(|| number(p.alpha)));
    json!({
        "alpha_pattern": alphas,
        "auto_mapping": null,
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": layers,
        "lora_alpha": number(settings.alpha),
        "lora_dropout": number(settings.dropout),
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": settings.rank,
        "rank_pattern": ranks,
        "revision": null,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": settings.rslora,
    })
}

/// A whole number where it is one, as PEFT writes and types alpha.
fn number(value: f32) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e9 && value != 0.0 { json!(value as i64) } else { json!(value) }
}

/// `target_modules` and `layers_to_transform` under which PEFT adapts exactly these modules.
fn targets(adapter: &Adapter) -> (Vec<String>, Option<Vec<usize>>) {
    let names = adapter.targets();
    let layers: BTreeSet<usize> = adapter.modules.keys().map(|m| m.0).collect();
    if names.len() * layers.len() != adapter.modules.len() {
        return (adapter.modules.keys().map(|m| module_path(*m)).collect(), None);
    }
    let names = names.into_iter().map(LinearName::hf_name).map(str::to_owned).collect();
    let layers = (layers.len() != adapter.layers).then(|| layers.into_iter().collect());
    (names, layers)
}
