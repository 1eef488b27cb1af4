//! GGUF, the file format of llama.cpp: metadata and tensors of a whole model in one file, versions 2 and 3 (ggml `docs/gguf.md`).
//!
//! | module | what |
//! |---|---|
//! | [`metadata`] | keys and values |
//! | `config` | [`ModelConfig`](crate::config::ModelConfig) from them |
//! | [`model`] | tensors as a [source of weights](crate::llama::WeightSource), block-quantised as they are stored |
//!
//! The file is untrusted. Every count is checked against the bytes that are left before memory is taken for it, and tensors may neither overlap
//! nor reach outside the file.

mod config;
pub mod metadata;
pub mod model;
mod reader;

use std::{
    collections::HashMap,
    ops::Range,
    path::{Path, PathBuf},
};

use zofo_hal::{DType, Error, Result};

use self::reader::Reader;
use super::mapped::MappedBytes;

pub use metadata::Metadata;
pub use model::GgufModel;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSIONS: [u32; 2] = [2, 3];
/// Data are aligned to this many bytes where the file says nothing.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment accepted: a page of any system.
const MAX_ALIGNMENT: u64 = 1 << 16;
/// Most dimensions of a tensor, the format's limit.
const MAX_DIMENSIONS: u32 = 4;
/// Longest tensor name, the format's limit is 64; some converters wrote longer ones.
const MAX_TENSOR_NAME: usize = 256;
/// Fewest bytes that describe a tensor: its name's length, number of dimensions, one dimension, type and offset.
const LEAST_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;

/// Type numbers of ggml that are read, and those that are only named in errors.
const TYPES: [(u32, &str, Option<DType>); 30] = [
    (0, "F32", Some(DType::F32)),
    (1, "F16", Some(DType::F16)),
    (2, "Q4_0", Some(DType::Q4_0)),
    (3, "Q4_1", Some(DType::Q4_1)),
    (6, "Q5_0", Some(DType::Q5_0)),
    (7, "Q5_1", Some(DType::Q5_1)),
    (8, "Q8_0", Some(DType::Q8_0)),
    (9, "Q8_1", None),
    (10, "Q2_K", None),
    (11, "Q3_K", None),
    (12, "Q4_K", Some(DType::Q4K)),
    (13, "Q5_K", None),
    (14, "Q6_K", Some(DType::Q6K)),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", None),
    (17, "IQ2_XS", None),
    (18, "IQ3_XXS", None),
    (19, "IQ1_S", None),
    (20, "IQ4_NL", None),
    (21, "IQ3_S", None),
    (22, "IQ2_S", None),
    (23, "IQ4_XS", None),
    (24, "I8", None),
    (25, "I16", None),
    (26, "I32", None),
    (27, "I64", None),
    (28, "F64", None),
    (29, "IQ1_M", None),
    (30, "BF16", Some(DType::Bf16)),
    (39, "MXFP4", None),
];

/// A tensor: rows of a type's blocks, one after the other.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    /// Element or block type.
    pub dtype: DType,
    /// Number of rows; 1 for a vector.
    pub rows: usize,
    /// Elements of a row, a whole number of blocks.
    pub cols: usize,
    /// Exactly as many bytes as shape and type need.
    pub bytes: MappedBytes,
}

#[derive(Debug)]
struct Entry {
    type_number: u32,
    rows: u64,
    cols: u64,
    offset: u64,
    range: Range<usize>,
}

/// An open GGUF file: its metadata, and where its tensors lie.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    version: u32,
    metadata: Metadata,
    bytes: MappedBytes,
    entries: HashMap<String, Entry>,
}

impl Gguf {
    /// Maps a file and checks its header.
    ///
    /// # Errors
    /// `Io` where it cannot be read; `Format` where it is cut short, inconsistent or hostile; `Unsupported` for other versions, byte orders and
    /// files that are one part of several.
    pub fn open(path: &Path) -> Result<Self> {
        Self::parse(path, MappedBytes::map(path)?)
    }

    /// Parses bytes that were read from `path`, which is for errors only. Errors are those of [`Gguf::open`].
    pub fn parse(path: &Path, bytes: MappedBytes) -> Result<Self> {
        Self::read(path, bytes).map_err(|e| e.context(path.display()))
    }

    fn read(path: &Path, bytes: MappedBytes) -> Result<Self> {
        let mut reader = Reader::new(&bytes);
        let version = version(&mut reader)?;
        let tensors = reader.u64("the number of tensors")?;
        let keys = reader.u64("the number of metadata keys")?;
        let metadata = Metadata::read(&mut reader, keys)?;
        if let Some(parts) = metadata.count("split.count")?.filter(|n| *n > 1) {
            return Err(Error::unsupported(format!(
                "this file is one of {parts} parts of a model; join them first (`llama-gguf-split --merge`)"
            )));
        }
        let alignment = metadata.count("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
        if !(alignment.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&alignment)) {
            return Err(Error::format(format!(
                "`general.alignment` is {alignment}; it must be a power of two between 8 and {MAX_ALIGNMENT}"
            )));
        }
        let mut entries = HashMap::new();
        reader.check_count(tensors, LEAST_TENSOR_BYTES, "tensors")?;
        for _ in 0..tensors {
            let (name, entry) = tensor_info(&mut reader)?;
            if entries.insert(name.clone(), entry).is_some() {
                return Err(Error::format(format!("there are two tensors `{}`", name.escape_debug())));
            }
        }
        place(&mut entries, reader.position(), alignment, bytes.len())?;
        Ok(Self { path: path.to_owned(), version, metadata, bytes, entries })
    }

    /// The file, as in errors.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Keys and values.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Names of all tensors, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Whether there is a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The tensor, or `None` where there is none of that name. No bytes are copied, and they may outlive the file's handle.
    ///
    /// # Errors
    /// `Unsupported` where its type is not computed here, with the types that are.
    pub fn tensor(&self, name: &str) -> Result<Option<GgufTensor>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let Some(dtype) = known(entry.type_number).and_then(|(_, dtype)| dtype) else {
            let readable = TYPES.iter().filter(|t| t.2.is_some()).map(|t| t.1).collect::<Vec<_>>().join(", ");
            return Err(Error::unsupported(format!(
                "tensor `{name}` is of type {}; supported are {readable}, quantise the model to one of them",
                known(entry.type_number).map_or_else(|| format!("number {}", entry.type_number), |(name, _)| name.into())
            )));
        };
        let bytes = self.bytes.slice(entry.range.clone());
        let bytes = bytes.ok_or_else(|| Error::format(format!("tensor `{name}` reaches past the end")))?;
        // `place` found the tensor's bytes in the file, so its counts fit.
        Ok(Some(GgufTensor { dtype, rows: entry.rows as usize, cols: entry.cols as usize, bytes }))
    }
}

fn known(type_number: u32) -> Option<(&'static str, Option<DType>)> {
    TYPES.iter().find(|t| t.0 == type_number).map(|t| (t.1, t.2))
}

fn version(reader: &mut Reader<'_>) -> Result<u32> {
    if reader.bytes(MAGIC.len(), "the file's mark").ok() != Some(MAGIC.as_slice()) {
        return Err(Error::format("not a GGUF file: it does not begin with `GGUF`"));
    }
    let version = reader.u32("the version")?;
    match version {
        v if VERSIONS.contains(&v) => Ok(v),
        v if VERSIONS.contains(&v.swap_bytes()) => {
            Err(Error::unsupported("this GGUF file is big-endian; convert the model again for a little-endian machine"))
        }
        v => Err(Error::unsupported(format!("version {v} of GGUF is not supported, 2 and 3 are; convert the model again"))),
    }
}

fn tensor_info(reader: &mut Reader<'_>) -> Result<(String, Entry)> {
    let name = reader.text(MAX_TENSOR_NAME, "a tensor's name")?.to_owned();
    let shown = || format!("tensor `{}`", name.escape_debug());
    let dimensions = reader.u32("a tensor's number of dimensions")?;
    if dimensions == 0 || dimensions > MAX_DIMENSIONS {
        return Err(Error::format(format!("{} has {dimensions} dimensions; a tensor has 1 to {MAX_DIMENSIONS}", shown())));
    }
    // Innermost first.
    let cols = reader.u64("a tensor's size")?;
    let mut rows = 1u64;
    for _ in 1..dimensions {
        let size = reader.u64("a tensor's size")?;
        rows = rows.checked_mul(size).ok_or_else(|| Error::format(format!("{} has more elements than can be counted", shown())))?;
    }
    let type_number = reader.u32("a tensor's type")?;
    let offset = reader.u64("a tensor's offset")?;
    Ok((name, Entry { type_number, rows, cols, offset, range: 0..0 }))
}

/// Finds every tensor's bytes behind the header, which ends at `header`.
fn place(entries: &mut HashMap<String, Entry>, header: usize, alignment: u64, file: usize) -> Result<()> {
    let data = (header as u64).next_multiple_of(alignment);
    let mut taken = Vec::with_capacity(entries.len());
    for (name, entry) in entries.iter_mut() {
        let shown = || format!("tensor `{}`", name.escape_debug());
        if !entry.offset.is_multiple_of(alignment) {
            return Err(Error::format(format!("{} begins at {}, which is not aligned to {alignment} bytes", shown(), entry.offset)));
        }
        // The size of other types is not known; such a tensor is refused when it is asked for.
        let Some(dtype) = known(entry.type_number).and_then(|t| t.1) else { continue };
        let (elements, bytes) = dtype.block();
        let (elements, bytes) = (elements as u64, bytes as u64);
        if !entry.cols.is_multiple_of(elements) {
            return Err(Error::format(format!(
                "{} has rows of {}, which are no whole number of {dtype} blocks of {elements}",
                shown(),
                entry.cols
            )));
        }
        let size = (entry.cols / elements).checked_mul(bytes).and_then(|row| row.checked_mul(entry.rows));
        let start = data.checked_add(entry.offset);
        let end = start.zip(size).and_then(|(start, size)| start.checked_add(size));
        let (Some(start), Some(end)) = (start, end.filter(|end| *end <= file as u64)) else {
            return Err(Error::format(format!(
                "{} of {} x {} {dtype} elements reaches past the end of the file, which has {file} bytes; it may be cut short, fetch it again",
                shown(),
                entry.rows,
                entry.cols
            )));
        };
        // Both lie in the file, so they fit a usize.
        entry.range = start as usize..end as usize;
        taken.push((entry.range.clone(), name));
    }
    taken.sort_by_key(|(range, _)| (range.start, range.end));
    for pair in taken.windows(2) {
        let [(first, a), (second, b)] = pair else { continue };
        if first.end > second.start {
            return Err(Error::format(format!("tensors `{}` and `{}` overlap", a.escape_debug(), b.escape_debug())));
        }
    }
    Ok(())
}

/// What is wrong with a file that lacks a key.
fn missing(key: &str) -> Error {
    Error::format(format!("`{key}` is missing; is it a language model?"))
}
