//! A GGUF model as a source of weights: tensors by their names in ggml, block-quantised as they are stored.

use std::{collections::HashSet, path::Path, sync::Arc};

use zofo_hal::{Error, Result, WeightData, perturb::Projection};

use super::{Gguf, GgufTensor, config, missing};
use crate::{
    config::{Family, ModelConfig},
    llama::{Cut, ParamName, SourceTensor, WeightSource},
};

const EMBEDDING: &str = "token_embd.weight";

/// The name of a parameter in GGUF files of the llama and qwen2 architectures.
fn gguf_name(name: ParamName) -> String {
    let projection = |p| match p {
        Projection::Q => "attn_q",
        Projection::K => "attn_k",
        Projection::V => "attn_v",
        Projection::O => "attn_output",
        Projection::Gate => "ffn_gate",
        Projection::Up => "ffn_up",
        Projection::Down => "ffn_down",
    };
    match name {
        ParamName::Embedding => EMBEDDING.into(),
        ParamName::InputNorm(l) => format!("blk.{l}.attn_norm.weight"),
        ParamName::PostAttentionNorm(l) => format!("blk.{l}.ffn_norm.weight"),
        ParamName::Weight(l, p) => format!("blk.{l}.{}.weight", projection(p)),
        ParamName::Bias(l, p) => format!("blk.{l}.{}.bias", projection(p)),
        ParamName::FinalNorm => "output_norm.weight".into(),
        ParamName::Head => "output.weight".into(),
    }
}

/// A model in one GGUF file, whose every expected tensor is there, in the expected shape and in a supported type.
///
/// Weights stay in the type they are stored in. Files of the llama architecture hold the rows of q and k in pairs of neighbours, because ggml
/// turns neighbours there; the rows are put back into the order of the original checkpoint, so that adapters fit the model whichever file it came
/// from. A row keeps its blocks, so nothing is rounded.
#[derive(Debug)]
pub struct GgufModel {
    config: ModelConfig,
    file: Gguf,
}

impl GgufModel {
    /// Opens a file.
    ///
    /// # Errors
    /// Those of [`Gguf::open`]; `Format` where a tensor or key is missing or of another shape; `Unsupported` for architectures, tensors and types
    /// that are not computed here.
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(Gguf::open(path)?)
    }

    /// Takes a model from an open file. Errors are those of [`GgufModel::open`].
    pub fn new(file: Gguf) -> Result<Self> {
        let path = file.path().to_owned();
        Self::checked(file).map_err(|e| e.context(path.display()))
    }

    fn checked(file: Gguf) -> Result<Self> {
        let vocab = file.tensor(EMBEDDING)?.ok_or_else(|| missing(EMBEDDING))?.rows;
        let model = Self { config: config::config(&file, vocab)?, file };
        model.check()?;
        Ok(model)
    }

    /// The file.
    pub fn file(&self) -> &Gguf {
        &self.file
    }

    /// Whether the rows of this parameter are stored in rotary pairs.
    fn is_paired(&self, name: ParamName) -> bool {
        let rotated =
            matches!(name, ParamName::Weight(_, Projection::Q | Projection::K) | ParamName::Bias(_, Projection::Q | Projection::K));
        rotated && self.config.family == Family::Llama
    }

    fn check(&self) -> Result<()> {
        let mut expected = HashSet::from([config::ROPE_FACTORS.to_owned()]);
        for name in ParamName::all(&self.config) {
            let tensor = self.require(name)?;
            let norm =
                matches!(name, ParamName::InputNorm(_) | ParamName::PostAttentionNorm(_) | ParamName::FinalNorm | ParamName::Bias(..));
            if norm && !tensor.dtype.is_float() {
                return Err(Error::unsupported(format!(
                    "tensor `{}` is {}; norms and biases are read as floats",
                    gguf_name(name),
                    tensor.dtype
                )));
            }
            expected.insert(gguf_name(name));
        }
        let mut left: Vec<_> = self.file.names().filter(|n| !expected.contains(*n)).collect();
        left.sort_unstable();
        match left.first() {
            None => Ok(()),
            Some(first) => Err(Error::unsupported(format!(
                "tensor `{}` ({} such in all) has no place in a {} model; what it would change is not computed here",
                first.escape_debug(),
                left.len(),
                self.config.family
            ))),
        }
    }
}

impl WeightSource for GgufModel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, name: ParamName) -> Result<Option<SourceTensor<'_>>> {
        let Some(GgufTensor { dtype, rows, cols, bytes }) = self.file.tensor(&gguf_name(name))? else { return Ok(None) };
        let data = if self.is_paired(name) {
            // A bias is one row of the file, but each of its elements belongs to a row of the matrix.
            let row = if matches!(name, ParamName::Bias(..)) { dtype.bytes(1) } else { dtype.bytes(cols) };
            let unpaired = Arc::new(unpair(bytes.as_ref(), row.unwrap_or(0), self.config.head_dim));
            let length = unpaired.len();
            WeightData::Shared(unpaired, 0..length)
        } else {
            let length = bytes.len();
            WeightData::Shared(Arc::new(bytes), 0..length)
        };
        Ok(Some(SourceTensor { dtype, rows, cols, data, part: Cut::Whole }))
    }

    fn origin(&self) -> String {
        let order = if self.config.family == Family::Llama { ", rows of q and k put back into the checkpoint's order" } else { "" };
        format!("GGUF v{}{order}", self.file.version())
    }
}

/// Rows of each head from the order 0, n/2, 1, n/2 + 1, ... back to 0, 1, 2, ... Bytes that are no whole heads stay as they are; the shape check
/// refuses them.
fn unpair(bytes: &[u8], row: usize, head_dim: usize) -> Vec<u8> {
    let mut out = bytes.to_vec();
    if row == 0 {
        return out;
    }
    let half = head_dim / 2;
    for (from, to) in bytes.chunks_exact(row * head_dim).zip(out.chunks_exact_mut(row * head_dim)) {
        for (i, source) in from.chunks_exact(row).enumerate() {
            let place = (i % 2) * half + i / 2;
            to[place * row..][..row].copy_from_slice(source);
        }
    }
    out
}

/// All elements, in f32.
pub(super) fn floats(tensor: &GgufTensor) -> Result<Vec<f32>> {
    let data = WeightData::Borrowed(tensor.bytes.as_ref());
    SourceTensor { dtype: tensor.dtype, rows: tensor.rows, cols: tensor.cols, data, part: Cut::Whole }.to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_neighbours_become_halves() {
        // Two heads of 4 rows of one byte: the converter stored row j * 2 + i of (i, j) with i the half.
        assert_eq!(unpair(&[0, 2, 1, 3, 4, 6, 5, 7], 1, 4), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(unpair(&[0, 10, 2, 12, 1, 11, 3, 13], 2, 4), [0, 10, 1, 11, 2, 12, 3, 13]);
    }
}
