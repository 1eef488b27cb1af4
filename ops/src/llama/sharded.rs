//! One member's part of a source of weights.

use alloc::{format, string::String, sync::Arc, vec::Vec};
use core::ops::Range;

use zofo_hal::{DType, Error, Result, WeightData};

use super::{
    Cut, ParamName, Shard,
    weights::{SourceTensor, WeightSource, encode},
};
use crate::config::ModelConfig;

/// The parameters of one member of a group, cut out of a whole model's when they are asked for.
///
/// Rows keep the type of the source and are handed on in place where they lie together. Columns keep it where all ranges begin and end with
/// blocks of the type; otherwise they are f32, of the same values. Embedding, norms and head are the source's own.
///
/// A slice of it computes a part of every sum that the members form, and is the model's only once it has [joined](super::Slice::join) them.
pub struct ShardedSource<'a> {
    source: &'a dyn WeightSource,
    shard: Shard,
    config: ModelConfig,
}

impl<'a> ShardedSource<'a> {
    /// The part `shard` of `source`.
    ///
    /// # Errors
    /// Those of [`Shard::check`].
    pub fn new(source: &'a dyn WeightSource, shard: Shard) -> Result<Self> {
        shard.check(source.config())?;
        let config = shard.config(source.config());
        Ok(Self { source, shard, config })
    }

    /// The part it is.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }
}

impl WeightSource for ShardedSource<'_> {
    /// The member's own configuration, see [`Shard::config`].
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, name: ParamName) -> Result<Option<SourceTensor<'_>>> {
        let Some(tensor) = self.source.tensor(name)? else { return Ok(None) };
        let whole = self.source.config();
        let cut = match name {
            ParamName::Weight(_, p) => self.shard.weight(whole, p),
            // A bias is one row, with an element for each row of the matrix.
            ParamName::Bias(_, p) => match self.shard.weight(whole, p) {
                Cut::Rows(ranges) => Cut::Cols(ranges),
                other => other,
            },
            _ => Cut::Whole,
        };
        if cut == Cut::Whole {
            return Ok(Some(tensor));
        }
        tensor.expect(name, whole)?;
        if tensor.part != Cut::Whole {
            return Err(Error::invalid(format!("tensor `{name}` is a part already; cut the whole model instead")));
        }
        cut_out(tensor, cut).map(Some)
    }

    fn origin(&self) -> String {
        self.source.origin()
    }
}

fn cut_out(tensor: SourceTensor<'_>, part: Cut) -> Result<SourceTensor<'_>> {
    let SourceTensor { dtype, rows, cols, .. } = tensor;
    let row = tensor.row_bytes()?;
    let (elements, size) = dtype.block();
    // The same part of a matrix of bytes.
    let bytes = match &part {
        Cut::Whole => Some(Cut::Whole),
        Cut::Rows(ranges) => Some(Cut::Rows(ranges.clone())),
        Cut::Cols(ranges) => ranges.iter().map(|r| in_blocks(r, elements, size)).collect::<Option<Vec<_>>>().map(Cut::Cols),
    };
    let (dtype, data) = match bytes {
        Some(cut) => (dtype, bytes_of(tensor.data, &cut, (rows, row))?),
        None => (DType::F32, owned(encode(&part.take((rows, cols), &tensor.to_f32()?)?, DType::F32))),
    };
    let (rows, cols) = part.shape((rows, cols));
    Ok(SourceTensor { dtype, rows, cols, data, part })
}

/// A range of elements in bytes, where it begins and ends with blocks.
fn in_blocks(r: &Range<usize>, elements: usize, size: usize) -> Option<Range<usize>> {
    let whole = r.start.is_multiple_of(elements) && r.end.is_multiple_of(elements);
    whole.then(|| r.start / elements * size..r.end / elements * size)
}

fn bytes_of<'a>(data: WeightData<'a>, cut: &Cut, shape: (usize, usize)) -> Result<WeightData<'a>> {
    match (&cut.runs(shape)[..], data) {
        ([run], WeightData::Borrowed(bytes)) if run.end <= bytes.len() => Ok(WeightData::Borrowed(&bytes[run.clone()])),
        ([run], WeightData::Shared(bytes, all)) if run.end <= all.len() => {
            Ok(WeightData::Shared(bytes, all.start + run.start..all.start + run.end))
        }
        (_, data) => Ok(owned(cut.take(shape, data.bytes()?)?)),
    }
}

fn owned(bytes: Vec<u8>) -> WeightData<'static> {
    let all = 0..bytes.len();
    WeightData::Shared(Arc::new(bytes), all)
}
