//! Frozen weights, packed once into the layout that the device likes best.

use crate::{DType, Error, MemorySpace, Result};
use alloc::{format, sync::Arc};
use core::{any::Any, fmt, ops::Range};

/// A shared handle to a [`Weight`].
pub type WeightRef = Arc<dyn Weight>;

/// What a weight will be used for; the device picks one layout that serves all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Uses {
    /// `x W^T`: the forward pass.
    pub nt: bool,
    /// `dy W`: the backward pass.
    pub nn: bool,
    /// Rows looked up by index: an embedding table, also when the LM head is tied to it.
    pub gather: bool,
}

impl Uses {
    /// The forward pass alone.
    pub const FORWARD: Self = Self { nt: true, nn: false, gather: false };
    /// Forward and backward.
    pub const TRAINING: Self = Self { nt: true, nn: true, gather: false };
    /// Everything: a tied head.
    pub const ALL: Self = Self { nt: true, nn: true, gather: true };
}

/// Type and shape of a weight `[rows, cols]` = `[out_features, in_features]`, row-major as in checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightSpec {
    /// Element type in the checkpoint.
    pub dtype: DType,
    /// Output features, or table entries.
    pub rows: usize,
    /// Input features, or width of an entry.
    pub cols: usize,
    /// What it will be used for.
    pub uses: Uses,
}

impl WeightSpec {
    /// Bytes of the row-major matrix.
    ///
    /// # Errors
    /// `InvalidArgument` where a row is no whole number of quantisation blocks or the size overflows.
    pub fn host_bytes(&self) -> Result<usize> {
        self.dtype
            .bytes(self.cols)
            .and_then(|row| row.checked_mul(self.rows))
            .filter(|n| *n <= isize::MAX as usize)
            .ok_or_else(|| Error::invalid(format!("a {} weight [{}, {}] has no valid size", self.dtype, self.rows, self.cols)))
    }
}

/// Bytes that several owners share, such as a memory-mapped file.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Where a weight's host bytes come from.
#[derive(Clone)]
pub enum WeightData<'a> {
    /// Bytes that the device must copy or convert before it returns.
    Borrowed(&'a [u8]),
    /// A range of shared bytes, which the device may keep and use in place.
    Shared(SharedBytes, Range<usize>),
}

impl WeightData<'_> {
    /// The bytes.
    ///
    /// # Errors
    /// `InvalidArgument` for a range outside the shared bytes.
    pub fn bytes(&self) -> Result<&[u8]> {
        match self {
            Self::Borrowed(b) => Ok(b),
            Self::Shared(b, r) => {
                let all = (**b).as_ref();
                all.get(r.clone()).ok_or_else(|| Error::invalid(format!("weight bytes {}..{} of {}", r.start, r.end, all.len())))
            }
        }
    }
}

/// A frozen weight on a device. Read-only, so any queue of its memory space whose backend made it may use it.
pub trait Weight: Send + Sync + Any {
    /// Type, shape and uses as imported.
    fn spec(&self) -> WeightSpec;
    /// Bytes held for it, mapped file pages included.
    fn bytes(&self) -> usize;
    /// Where it is.
    fn space(&self) -> MemorySpace;
    /// For the backend's own downcast.
    fn as_any(&self) -> &dyn Any;
}

impl fmt::Debug for dyn Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.spec();
        write!(f, "Weight({}[{}, {}], {} bytes)", s.dtype, s.rows, s.cols, self.bytes())
    }
}
