//! Tensors by name, from one safetensors file or from the shards an index lists.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Component, Path, PathBuf},
};

use half::{bf16, f16};
use zofo_hal::{DType, Error, ErrorKind, Result};

use super::{json::Object, mapped::MappedBytes, safetensors::SafeTensorsFile};

/// Largest index read, in bytes.
pub const MAX_INDEX_BYTES: u64 = 64 << 20;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// One tensor: contiguous, row-major, little-endian, at any address.
#[derive(Clone, Debug)]
pub struct TensorView {
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Sizes of its dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Exactly as many bytes as shape and type need.
    pub bytes: MappedBytes,
}

impl TensorView {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        // The file's header was checked: the product is the byte length over the element size.
        self.bytes.len() / self.dtype.block().1
    }

    /// All elements, widened to f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let bytes = self.bytes.as_ref();
        let halves = |widen: fn([u8; 2]) -> f32| {
            let (pairs, _) = bytes.as_chunks::<2>();
            pairs.iter().map(|b| widen(*b)).collect()
        };
        match self.dtype {
            DType::F16 => halves(|b| f16::from_le_bytes(b).to_f32()),
            DType::Bf16 => halves(|b| bf16::from_le_bytes(b).to_f32()),
            // A view is F32, F16 or BF16; nothing else is constructed.
            _ => {
                let (words, _) = bytes.as_chunks::<4>();
                words.iter().map(|b| f32::from_le_bytes(*b)).collect()
            }
        }
    }
}

/// The tensors of a model, memory-mapped.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<SafeTensorsFile>,
    /// Which file holds a tensor.
    place: HashMap<String, usize>,
}

impl Checkpoint {
    /// Opens a folder with `model.safetensors` or `model.safetensors.index.json` and its shards, or a single `.safetensors` file.
    ///
    /// # Errors
    /// `Io` where nothing is found or readable, `Format` where a file is truncated, inconsistent or hostile.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Self::from_files(vec![SafeTensorsFile::open(path)?]);
        }
        let (single, index) = (path.join(SINGLE), path.join(INDEX));
        if single.is_file() {
            Self::from_files(vec![SafeTensorsFile::open(&single)?])
        } else if index.is_file() {
            Self::open_shards(path, &index)
        } else {
            let pickled = path.join("pytorch_model.bin").is_file() || path.join("pytorch_model.bin.index.json").is_file();
            let advice = if pickled {
                "the folder holds pickled weights only: save the model with `safe_serialization=True`"
            } else {
                "give a folder in Hugging Face layout"
            };
            Err(Error::new(ErrorKind::Io, format!("{}: neither {SINGLE} nor {INDEX} is here; {advice}", path.display())))
        }
    }

    /// A single safetensors file that is in memory already; `name` is used in errors.
    ///
    /// # Errors
    /// `Format`, as for [`Checkpoint::open`].
    pub fn from_bytes(name: &str, bytes: MappedBytes) -> Result<Self> {
        Self::from_files(vec![SafeTensorsFile::parse(Path::new(name), bytes)?])
    }

    fn from_files(files: Vec<SafeTensorsFile>) -> Result<Self> {
        let place = files.iter().enumerate().flat_map(|(i, f)| f.names().map(move |n| (n.to_owned(), i))).collect();
        Ok(Self { files, place })
    }

    fn open_shards(folder: &Path, index: &Path) -> Result<Self> {
        let json = Object::read(index, MAX_INDEX_BYTES)?;
        let map = json.required("weight_map", json.object("weight_map")?)?;
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        let mut files = Vec::new();
        let mut place = HashMap::new();
        for (tensor, file) in map.entries() {
            let name = file.as_str().ok_or_else(|| json.wrong(tensor, "the name of a file", file))?;
            let number = match numbers.get(name) {
                Some(n) => *n,
                None => {
                    let path = shard_path(folder, name).ok_or_else(|| {
                        json.error(format!(
                            "shard `{}` is not the plain name of a .safetensors file in the same folder; \
                             an index that points elsewhere is refused",
                            name.escape_debug()
                        ))
                    })?;
                    files.push(SafeTensorsFile::open(&path)?);
                    numbers.insert(name, files.len() - 1);
                    files.len() - 1
                }
            };
            if !files[number].contains(tensor) {
                return Err(json.error(format!(
                    "tensor `{tensor}` should be in {name}, which has none of that name; index and shards are of different checkpoints"
                )));
            }
            place.insert(tensor.to_owned(), number);
        }
        if place.is_empty() {
            return Err(json.error("`weight_map` is empty"));
        }
        Ok(Self { files, place })
    }

    /// Names of all tensors, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.place.keys().map(String::as_str)
    }

    /// Whether there is a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.place.contains_key(name)
    }

    /// The tensor called `name`. No bytes are copied, and they may outlive the checkpoint.
    ///
    /// # Errors
    /// `Format` where there is none of that name, `Unsupported` where its type is none of F32, F16, BF16.
    pub fn tensor(&self, name: &str) -> Result<TensorView> {
        let found = match self.place.get(name) {
            Some(&i) => self.files[i].tensor(name)?,
            None => None,
        };
        found.ok_or_else(|| Error::format(format!("{}: there is no tensor `{name}`", self.describe())))
    }

    /// The file or files, as shown in errors.
    pub(super) fn describe(&self) -> String {
        match self.files.as_slice() {
            [one] => one.path().display().to_string(),
            [first, rest @ ..] => format!("{} and {} more shards", first.path().display(), rest.len()),
            [] => "an empty checkpoint".into(),
        }
    }
}

/// Where a shard lies, or `None` where its name is more than a plain file name.
fn shard_path(folder: &Path, name: &str) -> Option<PathBuf> {
    // `\` and `:` separate paths on other systems than this one; no shard has them in its name.
    if name.contains(['/', '\\', ':', '\0']) || !name.ends_with(".safetensors") {
        return None;
    }
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(part)), None) => Some(folder.join(part)),
        _ => None,
    }
}
