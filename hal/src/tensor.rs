//! Tensors as ops see them: matrices of packed rows.
//!
//! Everything a LLaMA step touches is `[rows, columns]`: activations are `[tokens, features]`, a KV cache is `[slots, heads * head_dim]`,
//! a vector of n values is `[1, n]`. Columns are contiguous; rows may be further apart than their length, so a block of columns or of
//! rows is a view and needs no copy.

use crate::{BufferRef, DType, Error, Result, WeightRef, WeightSpec};
use alloc::format;
use core::fmt;

/// Element type and layout of a matrix; what a device is asked about.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorSpec {
    /// Element type; never block-quantised (see [`crate::Weight`]).
    pub dtype: DType,
    /// Number of rows; may be 0.
    pub rows: usize,
    /// Number of columns; may be 0.
    pub cols: usize,
    /// Elements from one row's start to the next; at least `cols`.
    pub stride: usize,
}

impl TensorSpec {
    /// A contiguous `[rows, cols]` matrix.
    pub const fn new(dtype: DType, rows: usize, cols: usize) -> Self {
        Self { dtype, rows, cols, stride: cols }
    }

    /// A vector of `n` elements, `[1, n]`.
    pub const fn vector(dtype: DType, n: usize) -> Self {
        Self::new(dtype, 1, n)
    }

    /// The same matrix with rows `stride` elements apart.
    pub const fn with_stride(mut self, stride: usize) -> Self {
        self.stride = stride;
        self
    }

    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Whether there is no element.
    pub const fn is_empty(&self) -> bool {
        self.rows == 0 || self.cols == 0
    }

    /// Bytes from the first element to past the last one: what a buffer must hold behind the tensor's offset.
    pub const fn span_bytes(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        ((self.rows - 1) * self.stride + self.cols) * self.dtype.block().1
    }

    /// Whether rows follow each other without a gap.
    pub const fn is_contiguous(&self) -> bool {
        self.stride == self.cols || self.rows <= 1
    }

    /// `[rows, cols]`.
    pub const fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    /// That the layout can exist: one element per unit, stride no shorter than a row, sizes that do not overflow.
    pub fn check(&self) -> Result<()> {
        if self.dtype.is_quantised() {
            return Err(Error::invalid(format!("a tensor cannot be {}: import it as a weight", self.dtype)));
        }
        if self.stride < self.cols {
            return Err(Error::invalid(format!("row stride {} is shorter than a row of {} elements", self.stride, self.cols)));
        }
        // Rows and columns are numbered by u32, also those of an empty tensor.
        if self.rows.max(self.cols) > u32::MAX as usize {
            return Err(Error::invalid(format!("{self:?} has more than 2^32 rows or columns")));
        }
        self.rows
            .checked_mul(self.stride)
            .and_then(|n| n.checked_mul(4))
            .filter(|n| *n <= isize::MAX as usize)
            .map(drop)
            .ok_or_else(|| Error::invalid(format!("{self:?} does not fit the address space")))
    }
}

impl fmt::Debug for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}, {}]", self.dtype, self.rows, self.cols)?;
        if !self.is_contiguous() {
            write!(f, "(stride {})", self.stride)?;
        }
        Ok(())
    }
}

/// A matrix in a buffer: what a queue runs an op on.
#[derive(Clone)]
pub struct TensorArg {
    /// The memory; an asynchronous queue keeps this clone until the op is done.
    pub buffer: BufferRef,
    /// Bytes from the buffer's start to the first element; a multiple of the element size.
    pub offset: usize,
    /// Type and layout.
    pub spec: TensorSpec,
}

impl TensorArg {
    /// A tensor at the start of `buffer`.
    pub fn new(buffer: BufferRef, spec: TensorSpec) -> Self {
        Self { buffer, offset: 0, spec }
    }

    /// Rows `first .. first + rows` as a view.
    ///
    /// # Panics
    /// If they are not within the tensor: a bug of the caller.
    pub fn rows(&self, first: usize, rows: usize) -> Self {
        assert!(first + rows <= self.spec.rows, "rows {first}..{} of {:?}", first + rows, self.spec);
        let mut t = self.clone();
        t.offset += first * self.spec.stride * self.spec.dtype.block().1;
        t.spec.rows = rows;
        t
    }

    /// Columns `first .. first + cols` as a view.
    ///
    /// # Panics
    /// If they are not within the tensor: a bug of the caller.
    pub fn cols(&self, first: usize, cols: usize) -> Self {
        assert!(first + cols <= self.spec.cols, "columns {first}..{} of {:?}", first + cols, self.spec);
        let mut t = self.clone();
        t.offset += first * self.spec.dtype.block().1;
        t.spec.cols = cols;
        t
    }

    /// The same contiguous elements in another shape.
    ///
    /// # Panics
    /// If the tensor is not contiguous or the sizes differ: a bug of the caller.
    pub fn reshape(&self, rows: usize, cols: usize) -> Self {
        assert!(self.spec.is_contiguous() && rows * cols == self.spec.len(), "{:?} as [{rows}, {cols}]", self.spec);
        let mut t = self.clone();
        t.spec = TensorSpec::new(self.spec.dtype, rows, cols);
        t
    }

    /// The bytes of the buffer that the tensor may touch.
    pub fn byte_range(&self) -> core::ops::Range<usize> {
        self.offset..self.offset + self.spec.span_bytes()
    }
}

impl fmt::Debug for TensorArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}@{}", self.spec, self.offset)
    }
}

mod private {
    pub trait Sealed {}
    impl Sealed for super::TensorSpec {}
    impl Sealed for super::TensorArg {}
}

/// What an op's operands are: [`TensorSpec`] when a device is asked, [`TensorArg`] when a queue runs it. Sealed.
pub trait Operand: Clone + fmt::Debug + private::Sealed {
    /// The matching form of a weight.
    type Weight: Clone + fmt::Debug;
    /// Type and layout of a tensor.
    fn spec(&self) -> TensorSpec;
    /// Type and shape of a weight.
    fn weight_spec(weight: &Self::Weight) -> WeightSpec;
}

impl Operand for TensorSpec {
    type Weight = WeightSpec;
    fn spec(&self) -> TensorSpec {
        *self
    }
    fn weight_spec(weight: &WeightSpec) -> WeightSpec {
        *weight
    }
}

impl Operand for TensorArg {
    type Weight = WeightRef;
    fn spec(&self) -> TensorSpec {
        self.spec
    }
    fn weight_spec(weight: &WeightRef) -> WeightSpec {
        weight.spec()
    }
}

/// The right-hand matrix of a product or the table of a look-up: a plain tensor, or a frozen weight in the device's own layout.
#[derive(Clone, Debug)]
pub enum Matrix<T: Operand> {
    /// A tensor in a buffer.
    Tensor(T),
    /// An imported weight.
    Weight(T::Weight),
}

impl<T: Operand> Matrix<T> {
    /// `[rows, cols]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Tensor(t) => t.spec().shape(),
            Self::Weight(w) => {
                let s = T::weight_spec(w);
                [s.rows, s.cols]
            }
        }
    }

    /// Element type as imported.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Tensor(t) => t.spec().dtype,
            Self::Weight(w) => T::weight_spec(w).dtype,
        }
    }
}

impl From<TensorArg> for Matrix<TensorArg> {
    fn from(t: TensorArg) -> Self {
        Self::Tensor(t)
    }
}

impl From<WeightRef> for Matrix<TensorArg> {
    fn from(w: WeightRef) -> Self {
        Self::Weight(w)
    }
}

impl From<&WeightRef> for Matrix<TensorArg> {
    fn from(w: &WeightRef) -> Self {
        Self::Weight(w.clone())
    }
}

impl From<TensorSpec> for Matrix<TensorSpec> {
    fn from(t: TensorSpec) -> Self {
        Self::Tensor(t)
    }
}

impl From<WeightSpec> for Matrix<TensorSpec> {
    fn from(w: WeightSpec) -> Self {
        Self::Weight(w)
    }
}
