//! Where a model's parameters come from, and their import into a device, once per memory.

use alloc::{format, string::String, vec::Vec};
use core::fmt;

use half::{bf16, f16};
use zofo_hal::{DType, DeviceRef, Error, MemorySpace, Result, Uses, WeightData, WeightRef, WeightSpec, perturb::Projection, quant};

use super::{Cut, linear_name};
use crate::config::ModelConfig;

/// A parameter of the base model. Shown by its name in Hugging Face checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ParamName {
    /// Token embedding, `[vocab, hidden]`; the LM head too where they are tied.
    Embedding,
    /// Gain of the norm before the attention of a layer, `[1, hidden]`.
    InputNorm(usize),
    /// Gain of the norm before the feed-forward network of a layer, `[1, hidden]`.
    PostAttentionNorm(usize),
    /// Matrix of a projection of a layer, `[out, in]`.
    Weight(usize, Projection),
    /// Bias of a projection of a layer, `[1, out]`.
    Bias(usize, Projection),
    /// Gain of the norm before the head, `[1, hidden]`.
    FinalNorm,
    /// LM head, `[vocab, hidden]`.
    Head,
}

impl ParamName {
    /// `[rows, cols]` in a model of this configuration.
    pub fn shape(self, config: &ModelConfig) -> (usize, usize) {
        match self {
            Self::Embedding | Self::Head => (config.vocab, config.hidden),
            Self::InputNorm(_) | Self::PostAttentionNorm(_) | Self::FinalNorm => (1, config.hidden),
            Self::Weight(_, p) => linear_name(p).shape(config),
            Self::Bias(_, p) => (1, linear_name(p).shape(config).0),
        }
    }

    /// Every parameter of a model of this configuration.
    pub fn all(config: &ModelConfig) -> Vec<Self> {
        let mut all = alloc::vec![Self::Embedding];
        for layer in 0..config.layers {
            all.push(Self::InputNorm(layer));
            all.push(Self::PostAttentionNorm(layer));
            for p in Projection::ALL {
                all.push(Self::Weight(layer, p));
                if linear_name(p).has_bias(config) {
                    all.push(Self::Bias(layer, p));
                }
            }
        }
        all.push(Self::FinalNorm);
        if !config.tie_word_embeddings {
            all.push(Self::Head);
        }
        all
    }

    /// Where the LM head's matrix is.
    pub fn head_of(config: &ModelConfig) -> Self {
        if config.tie_word_embeddings { Self::Embedding } else { Self::Head }
    }
}

impl fmt::Display for ParamName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Embedding => f.write_str("model.embed_tokens.weight"),
            Self::InputNorm(l) => write!(f, "model.layers.{l}.input_layernorm.weight"),
            Self::PostAttentionNorm(l) => write!(f, "model.layers.{l}.post_attention_layernorm.weight"),
            Self::Weight(l, p) => write!(f, "model.layers.{l}.{}.weight", linear_name(p).hf_path()),
            Self::Bias(l, p) => write!(f, "model.layers.{l}.{}.bias", linear_name(p).hf_path()),
            Self::FinalNorm => f.write_str("model.norm.weight"),
            Self::Head => f.write_str("lm_head.weight"),
        }
    }
}

/// A parameter as its source holds it: row-major, little-endian; a vector is one row.
pub struct SourceTensor<'a> {
    /// Element type.
    pub dtype: DType,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// The bytes.
    pub data: WeightData<'a>,
    /// Which part of the model's parameter of that name it is.
    pub part: Cut,
}

impl SourceTensor<'_> {
    /// Bytes of a row.
    ///
    /// # Errors
    /// `Format` where the bytes are too few or too many.
    pub(super) fn row_bytes(&self) -> Result<usize> {
        let bytes = self.data.bytes()?;
        let row = self.dtype.bytes(self.cols).filter(|row| row.checked_mul(self.rows) == Some(bytes.len()));
        row.filter(|row| *row > 0)
            .ok_or_else(|| Error::format(format!("{} bytes for {}[{}, {}]", bytes.len(), self.dtype, self.rows, self.cols)))
    }

    /// That it has the shape of `name` in a model of this configuration.
    ///
    /// # Errors
    /// `Format`, with the name and both shapes.
    pub(super) fn expect(&self, name: ParamName, config: &ModelConfig) -> Result<()> {
        let shape = name.shape(config);
        if (self.rows, self.cols) != shape {
            return Err(Error::format(format!("tensor `{name}` is {:?}, the configuration asks for {shape:?}", (self.rows, self.cols))));
        }
        Ok(())
    }

    /// All elements in f32.
    ///
    /// # Errors
    /// `Format` where the bytes are too few or too many, `Unsupported` for a type that is no weight.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let (row, bytes) = (self.row_bytes()?, self.data.bytes()?);
        let mut values = alloc::vec![0.0; self.rows * self.cols];
        for (bytes, values) in bytes.chunks_exact(row).zip(values.chunks_exact_mut(self.cols)) {
            quant::dequantise_row(self.dtype, bytes, values)?;
        }
        Ok(values)
    }
}

/// A model's configuration and parameters: files, memory, the program image.
pub trait WeightSource {
    /// The model.
    fn config(&self) -> &ModelConfig;
    /// A parameter, or `None` where the source does not have it.
    ///
    /// # Errors
    /// What reading it gives.
    fn tensor(&self, name: ParamName) -> Result<Option<SourceTensor<'_>>>;

    /// Where the parameters come from and what was done to them, in a few words for people.
    fn origin(&self) -> String {
        "memory".into()
    }

    /// A parameter that the model cannot do without, in the shape that its configuration says.
    ///
    /// # Errors
    /// `Format` where it is missing or of another shape, with its name.
    fn require(&self, name: ParamName) -> Result<SourceTensor<'_>> {
        let Some(t) = self.tensor(name)? else {
            return Err(Error::format(format!("the model has no tensor `{name}`, which its configuration asks for")));
        };
        t.expect(name, self.config())?;
        Ok(t)
    }
}

/// Elements of `values` as bytes of a float type.
pub(super) fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

#[derive(Clone, PartialEq)]
struct Key {
    space: MemorySpace,
    layout: String,
    name: ParamName,
    /// Which part of it: members of a group that share a memory have some of one parameter each.
    part: Cut,
    dtype: DType,
    /// Type in the source.
    stored: DType,
}

/// How some weights were read: from which type into which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WeightTypes {
    /// Element type in the source.
    pub stored: DType,
    /// Element type on the devices.
    pub held: DType,
    /// Number of parameters.
    pub parameters: usize,
    /// Bytes that they take on the devices.
    pub bytes: usize,
}

/// Imported weights of one model, shared by all devices that have their memory and their [weight layout](zofo_hal::Device::weight_layout) in
/// common: virtual devices of one host hold one copy between them. [Parts](Cut) of a parameter are weights of their own.
///
/// A device may lay a weight out differently for each use, so a weight that several slices use in different ways (a tied embedding: looked up
/// in the first, multiplied in the last) is best announced by all of them before the first is loaded: [`super::SliceSpec::announce`].
#[derive(Default)]
pub struct Importer {
    weights: Vec<(Key, WeightRef)>,
    announced: Vec<(MemorySpace, String, ParamName, Uses)>,
}

pub(super) fn union(a: Uses, b: Uses) -> Uses {
    Uses { nt: a.nt || b.nt, nn: a.nn || b.nn, gather: a.gather || b.gather }
}

impl Importer {
    /// An importer that holds nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes a use to come.
    pub fn announce(&mut self, device: &DeviceRef, name: ParamName, uses: Uses) {
        let (space, layout) = (device.space(), device.weight_layout());
        match self.announced.iter_mut().find(|a| a.0 == space && a.1 == layout && a.2 == name) {
            Some(a) => a.3 = union(a.3, uses),
            None => self.announced.push((space, layout.into(), name, uses)),
        }
    }

    /// The weight `name` on `device`, imported unless it is there already.
    ///
    /// It keeps the type of the checkpoint, except that f32 becomes `compute` where that is a 16-bit type, and that a type the device cannot
    /// multiply becomes `compute`, or else f32.
    ///
    /// # Errors
    /// Those of [`WeightSource::require`] and [`zofo_hal::Device::import_weight`], with the parameter's name.
    pub fn weight(
        &mut self,
        device: &DeviceRef,
        source: &dyn WeightSource,
        name: ParamName,
        uses: Uses,
        compute: DType,
    ) -> Result<WeightRef> {
        let (space, layout) = (device.space(), String::from(device.weight_layout()));
        let tensor = source.require(name)?;
        let dtype = match tensor.dtype {
            DType::F32 => compute,
            t if device.dtype_usage(t).weight => t,
            _ if device.dtype_usage(compute).weight => compute,
            _ => DType::F32,
        };
        let announced = self.announced.iter().find(|a| a.0 == space && a.1 == layout && a.2 == name);
        let uses = announced.map_or(uses, |a| union(a.3, uses));
        let key = Key { space, layout, name, part: tensor.part.clone(), dtype, stored: tensor.dtype };
        let found = self.weights.iter().find(|(k, w)| *k == key && union(w.spec().uses, uses) == w.spec().uses);
        if let Some((_, weight)) = found {
            return Ok(weight.clone());
        }
        let spec = WeightSpec { dtype, rows: tensor.rows, cols: tensor.cols, uses };
        let import = |data: WeightData<'_>| device.import_weight(&spec, data);
        let weight = if dtype == tensor.dtype {
            import(tensor.data)
        } else {
            tensor.to_f32().and_then(|values| import(WeightData::Borrowed(&encode(&values, dtype))))
        };
        let weight = weight.map_err(|e| e.context(name))?;
        self.weights.retain(|(k, _)| *k != key);
        self.weights.push((key, weight.clone()));
        Ok(weight)
    }

    /// What was read as what, largest first.
    pub fn types(&self) -> Vec<WeightTypes> {
        let mut types: Vec<WeightTypes> = Vec::new();
        for (key, weight) in &self.weights {
            let same = types.iter_mut().find(|t| (t.stored, t.held) == (key.stored, key.dtype));
            match same {
                Some(t) => (t.parameters, t.bytes) = (t.parameters + 1, t.bytes + weight.bytes()),
                None => types.push(WeightTypes { stored: key.stored, held: key.dtype, parameters: 1, bytes: weight.bytes() }),
            }
        }
        types.sort_by_key(|t| core::cmp::Reverse(t.bytes));
        types
    }

    /// Bytes that the weights take, each counted once.
    pub fn bytes(&self) -> usize {
        self.weights.iter().map(|(_, w)| w.bytes()).sum()
    }
}
