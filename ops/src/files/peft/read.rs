//! Reading an adapter.

use std::{collections::BTreeMap, path::Path};

use zofo_hal::{Error, ErrorKind, Result};

use super::{Adapter, KEY_PREFIX, LoraPair, Module, TENSOR_FILE, config::AdapterFile, module_path};
use crate::{
    config::{LinearName, MAX_LORA_RANK, ModelConfig},
    files::{checkpoint::TensorView, safetensors::SafeTensorsFile},
};

/// Reads the adapter in `folder`, made for `model`.
///
/// # Errors
/// `Io` where a file is missing, `Format` where it is malformed, half a pair is missing, a shape does not fit the base layer or a value is not
/// finite, `Unsupported` where it is more than plain LoRA; each names the file, the tensor or the option.
pub fn read_adapter(folder: &Path, model: &ModelConfig) -> Result<Adapter> {
    let settings = AdapterFile::read(folder)?;
    let path = folder.join(TENSOR_FILE);
    if !path.is_file() && folder.join("adapter_model.bin").is_file() {
        return Err(Error::new(
            ErrorKind::Io,
            format!("{}: only a pickled adapter_model.bin is here; save the adapter with `safe_serialization=True`", folder.display()),
        ));
    }
    let file = SafeTensorsFile::open(&path)?;
    let at = |e: Error| e.context(path.display());

    let mut names: Vec<&str> = file.names().collect();
    // Sorted, so that of several mistakes the same one is reported every time.
    names.sort_unstable();
    let mut found: BTreeMap<Module, [Option<TensorView>; 2]> = BTreeMap::new();
    for name in names {
        let (module, half) = parse_key(name).map_err(at)?;
        let view = file.tensor(name)?.ok_or_else(|| at(Error::format(format!("tensor `{name}` vanished"))))?;
        let slot = &mut found.entry(module).or_default()[half as usize];
        if slot.replace(view).is_some() {
            return Err(at(Error::format(format!("{} has two tensors for factor {}", module_path(module), half.letter()))));
        }
    }
    let mut modules = BTreeMap::new();
    for (module, halves) in found {
        modules.insert(module, pair(module, halves, model, &settings).map_err(at)?);
    }
    Adapter::new(settings.config.clone(), model, modules).map_err(|e| at(Error::format(e.message().to_owned())))
}

#[derive(Clone, Copy)]
enum Half {
    A,
    B,
}

impl Half {
    const fn letter(self) -> &'static str {
        match self {
            Self::A => "A",
            Self::B => "B",
        }
    }
}

/// What else may be in the file, and why it is refused.
const REFUSED: [(&str, &str); 5] = [
    ("lora_magnitude_vector", "DoRA (weight-decomposed LoRA) is not supported"),
    ("lora_embedding_", "LoRA on embeddings is not supported"),
    ("modules_to_save", "replacing whole modules of the base model is not supported"),
    (".bias", "trained biases are not supported"),
    ("lora_", "only lora_A and lora_B weights of the default adapter on q, k, v, o, gate, up and down projections are supported"),
];

/// Which factor of which layer a tensor is: `base_model.model.model.layers.{i}.{path}.lora_{A,B}[.default].weight`.
fn parse_key(name: &str) -> Result<(Module, Half)> {
    plain_key(name).ok_or_else(|| {
        let why = REFUSED
            .iter()
            .find(|(part, _)| name.contains(part))
            .map_or("it is no LoRA factor; replacing whole modules is not supported", |r| r.1);
        Error::unsupported(format!("tensor `{}`: {why}", name.escape_debug()))
    })
}

fn plain_key(name: &str) -> Option<(Module, Half)> {
    let rest = name.strip_prefix(KEY_PREFIX)?.strip_prefix("model.layers.")?;
    let (layer, rest) = rest.split_once('.')?;
    if !layer.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let layer = layer.parse().ok()?;
    let (path, factor) = rest.split_once(".lora_")?;
    let linear = LinearName::ALL.into_iter().find(|l| l.hf_path() == path)?;
    let half = match factor {
        "A.weight" | "A.default.weight" => Half::A,
        "B.weight" | "B.default.weight" => Half::B,
        _ => return None,
    };
    Some(((layer, linear), half))
}

fn pair(module: Module, halves: [Option<TensorView>; 2], model: &ModelConfig, settings: &AdapterFile) -> Result<LoraPair> {
    let path = module_path(module);
    let (layer, linear) = module;
    if layer >= model.layers {
        return Err(Error::format(format!(
            "{path} is adapted, but the model has {} layers; the adapter belongs to another model",
            model.layers
        )));
    }
    let (a, b) = match halves {
        [Some(a), Some(b)] => (a, b),
        [a, _] => {
            let (there, missing) = if a.is_some() { ("A", "B") } else { ("B", "A") };
            return Err(Error::format(format!(
                "{path} has lora_{there} but no lora_{missing}; the file is incomplete, save or fetch the adapter again"
            )));
        }
    };
    let (out, inp) = linear.shape(model);
    let rank = settings.rank(&path)?;
    check_shape(&path, Half::A, &a.shape, [rank, inp], 0)?;
    check_shape(&path, Half::B, &b.shape, [out, rank], 1)?;
    LoraPair::new(rank, settings.alpha(&path)?, (out, inp), a.to_f32(), b.to_f32())
        .map_err(|e| Error::format(format!("{path}: {}", e.message())))
}

/// Compares a factor's shape with the one wanted; dimension `rank_at` of it is the rank.
fn check_shape(path: &str, half: Half, found: &[usize], wanted: [usize; 2], rank_at: usize) -> Result<()> {
    if found == wanted {
        return Ok(());
    }
    let letter = half.letter();
    let width = wanted[1 - rank_at];
    let why = match *found {
        [x, y] if [y, x] == wanted => {
            let layout = if rank_at == 0 { "[r, in]" } else { "[out, r]" };
            format!("the factor is transposed, PEFT stores lora_{letter} as {layout}")
        }
        [x, y] if [x, y][1 - rank_at] == width => match [x, y][rank_at] {
            0 => "the rank is 0".into(),
            r if r > MAX_LORA_RANK => format!("the rank is {r}, above {MAX_LORA_RANK}"),
            r => format!("the factor has rank {r}, adapter_config.json says {}", wanted[rank_at]),
        },
        _ => "the adapter belongs to another model".into(),
    };
    Err(Error::format(format!("{path}: lora_{letter} has shape {found:?} instead of {wanted:?}: {why}")))
}
