//! One safetensors file: its header, checked before any tensor is looked at.
//!
//! The header's JSON and its layout rules (no overlap, no holes, sizes that agree with shapes) are the `safetensors` crate's. The arithmetic around
//! them is done here with overflow checks, because the crate's own `read_metadata` adds offsets from the file unchecked.

use std::{
    collections::HashMap,
    ops::Range,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, tensor::Metadata};
use zofo_hal::{DType, Error, ErrorKind, Result};

use super::{checkpoint::TensorView, mapped::MappedBytes};

/// Bytes of the header's length field.
const LENGTH_BYTES: usize = 8;
/// Longest header accepted, the format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// An open file and where its tensors lie.
#[derive(Debug)]
pub(super) struct SafeTensorsFile {
    path: PathBuf,
    bytes: MappedBytes,
    entries: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    range: Range<usize>,
}

impl SafeTensorsFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        Self::parse(path, MappedBytes::map(path)?)
    }

    /// Parses bytes that were read from `path`, which is for errors only.
    pub(super) fn parse(path: &Path, bytes: MappedBytes) -> Result<Self> {
        let bad = |what: String| Error::format(format!("{}: {what}; fetch or convert the file again", path.display()));
        let all = bytes.as_ref();
        let Some((length, rest)) = all.split_first_chunk::<LENGTH_BYTES>() else {
            return Err(bad(format!("{} bytes long, too short for a safetensors header", all.len())));
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER {
            return Err(bad(format!("not a safetensors file: it announces a header of {length} bytes, more than the format allows")));
        }
        // At most MAX_HEADER, so it fits a 32-bit usize too.
        let length = length as usize;
        let Some(header) = rest.get(..length) else {
            return Err(bad(format!("truncated: the header is {length} bytes long, the file holds {} of them", rest.len())));
        };
        let metadata: Metadata = serde_json::from_slice(header).map_err(|e| bad(format!("malformed safetensors header: {e}")))?;
        let held = rest.len() - length;
        let described = metadata.data_len();
        if described > held {
            return Err(bad(format!("truncated: the header describes {described} bytes of tensors, the file holds {held}")));
        }
        if described < held {
            return Err(bad(format!("the header describes {described} bytes of tensors, the file holds {held}: something was appended")));
        }
        let base = LENGTH_BYTES + length;
        let entries = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let (start, end) = info.data_offsets;
                let entry = Entry {
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    // Cannot overflow: the largest `end` is `described`, which the file holds after `base`.
                    range: base + start..base + end,
                };
                (name, entry)
            })
            .collect();
        Ok(Self { path: path.to_owned(), bytes, entries })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The tensor, or `None` where this file has none of that name.
    pub(super) fn tensor(&self, name: &str) -> Result<Option<TensorView>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let dtype = match entry.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::Bf16,
            other => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "{}: tensor `{name}` is of type {other:?}; supported are F32, F16 and BF16, convert the checkpoint to one of them",
                        self.path.display()
                    ),
                ));
            }
        };
        let bytes = self
            .bytes
            .slice(entry.range.clone())
            .ok_or_else(|| Error::format(format!("{}: tensor `{name}` reaches past the end", self.path.display())))?;
        Ok(Some(TensorView { dtype, shape: entry.shape.clone(), bytes }))
    }
}
