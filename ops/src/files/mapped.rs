//! Bytes that many owners share without a copy: a range of a memory-mapped file, of a vector, or of the program image.

use std::{fmt, fs::File, ops::Range, path::Path, sync::Arc};

use memmap2::Mmap;
use zofo_hal::{Error, Result};

/// A shared, immutable range of bytes. Cloning copies no bytes; the owner lives as long as its last clone.
///
/// Nothing is known about alignment: a tensor of a safetensors file may start at any address. Use [`MappedBytes::cast`].
#[derive(Clone)]
pub struct MappedBytes {
    owner: Owner,
    range: Range<usize>,
}

#[derive(Clone)]
enum Owner {
    File(Arc<Mmap>),
    Heap(Arc<Vec<u8>>),
    Image(&'static [u8]),
}

impl Owner {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::File(map) => map,
            Self::Heap(vec) => vec,
            Self::Image(bytes) => bytes,
        }
    }
}

impl MappedBytes {
    /// Maps a whole file, read-only. An empty file gives an empty range.
    ///
    /// # Errors
    /// `Io` where it cannot be opened or mapped, or is no regular file.
    pub fn map(path: &Path) -> Result<Self> {
        let io = |e| Error::io(path, e);
        let file = File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() {
            return Err(Error::new(zofo_hal::ErrorKind::Io, format!("{}: not a regular file", path.display())));
        }
        if meta.len() == 0 {
            return Ok(Self::from(Vec::new()));
        }
        // Safety: the map is private and read-only, and only read as plain bytes, for which every value is valid. A file that another
        // process rewrites meanwhile gives other bytes, one that it shortens raises SIGBUS: the price of mapping, as for every such reader.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let range = 0..map.len();
        Ok(Self { owner: Owner::File(Arc::new(map)), range })
    }

    /// The part of these bytes at `range`, or `None` where it reaches past the end.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.len() {
            return None;
        }
        let base = self.range.start;
        Some(Self { owner: self.owner.clone(), range: base + range.start..base + range.end })
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// These bytes as a slice of `T`, or `None` where address or length does not suit `T` and the caller must copy.
    ///
    /// Files are little-endian; on a big-endian host this answers `None` for anything wider than a byte.
    pub fn cast<T: bytemuck::AnyBitPattern>(&self) -> Option<&[T]> {
        if cfg!(target_endian = "big") && size_of::<T>() > 1 {
            return None;
        }
        bytemuck::try_cast_slice(self.as_ref()).ok()
    }
}

impl AsRef<[u8]> for MappedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.owner.bytes()[self.range.clone()]
    }
}

impl From<Vec<u8>> for MappedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { owner: Owner::Heap(Arc::new(bytes)), range }
    }
}

impl From<&'static [u8]> for MappedBytes {
    fn from(bytes: &'static [u8]) -> Self {
        Self { owner: Owner::Image(bytes), range: 0..bytes.len() }
    }
}

impl fmt::Debug for MappedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedBytes({} bytes)", self.len())
    }
}
