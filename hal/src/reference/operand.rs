//! Operands as kernels see them: copied out of device memory in f64, results copied back with one rounding.

use crate::{BufferRef, DType, Error, Matrix, Result, TensorArg, WeightRef};
use alloc::{format, sync::Arc, vec, vec::Vec};
use core::ops::Range;
use half::{bf16, f16};

/// Where operands live. Kernels reach device memory through this alone.
pub(super) trait Memory {
    /// Shows the bytes of a buffer.
    fn read(&self, buffer: &BufferRef, bytes: Range<usize>, f: &mut dyn FnMut(&[u8])) -> Result<()>;
    /// Lets the bytes of a buffer be changed.
    fn write(&self, buffer: &BufferRef, bytes: Range<usize>, f: &mut dyn FnMut(&mut [u8])) -> Result<()>;
    /// A weight as a row-major f32 matrix.
    fn weight(&self, weight: &WeightRef) -> Result<Arc<[f32]>>;
}

/// A row-major matrix in f64. Every float type converts to it exactly.
#[derive(Clone, Debug)]
pub(super) struct Mat {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<f64>,
}

impl Mat {
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: vec![0.0; rows * cols] }
    }

    pub fn row(&self, r: usize) -> &[f64] {
        &self.data[r * self.cols..][..self.cols]
    }

    pub fn row_mut(&mut self, r: usize) -> &mut [f64] {
        &mut self.data[r * self.cols..][..self.cols]
    }

    /// The exact f32 values of a matrix that was loaded from a float tensor.
    pub fn f32s(&self) -> Vec<f32> {
        self.data.iter().map(|x| *x as f32).collect()
    }
}

/// Which rows of each block count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    block: usize,
    live: usize,
}

impl Live {
    pub const ALL: Self = Self { block: 1, live: 1 };

    /// Reads the number of live rows of blocks of `block` rows.
    pub fn load(mem: &dyn Memory, live: &Option<TensorArg>, block: usize) -> Result<Self> {
        let Some(t) = live else { return Ok(Self::ALL) };
        let live = words(mem, t)?[0] as usize;
        if live > block {
            return Err(Error::execution(format!("{live} live rows in blocks of {block} rows")));
        }
        Ok(Self { block: block.max(1), live })
    }

    pub fn has(self, row: usize) -> bool {
        row % self.block < self.live
    }

    /// The live ones of `rows` rows.
    pub fn rows(self, rows: usize) -> impl Iterator<Item = usize> {
        (0..rows).filter(move |r| self.has(*r))
    }
}

/// A float tensor.
pub(super) fn load(mem: &dyn Memory, t: &TensorArg) -> Result<Mat> {
    let convert: fn(&[u8]) -> f64 = match t.spec.dtype {
        DType::F32 => |b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]).into(),
        DType::F16 => |b| f16::from_ne_bytes([b[0], b[1]]).to_f64(),
        DType::Bf16 => |b| bf16::from_ne_bytes([b[0], b[1]]).to_f64(),
        other => return Err(Error::unsupported(format!("{other} where a float type is needed"))),
    };
    let mut data = Vec::with_capacity(t.spec.len());
    let size = t.spec.dtype.block().1;
    each_row(mem, t, &mut |row| data.extend(row.chunks_exact(size).map(convert)))?;
    Ok(Mat { rows: t.spec.rows, cols: t.spec.cols, data })
}

/// An optional float tensor.
pub(super) fn load_opt(mem: &dyn Memory, t: &Option<TensorArg>) -> Result<Option<Mat>> {
    t.as_ref().map(|t| load(mem, t)).transpose()
}

/// A float tensor or a weight.
pub(super) fn load_matrix(mem: &dyn Memory, m: &Matrix<TensorArg>) -> Result<Mat> {
    match m {
        Matrix::Tensor(t) => load(mem, t),
        Matrix::Weight(w) => {
            let s = w.spec();
            Ok(Mat { rows: s.rows, cols: s.cols, data: mem.weight(w)?.iter().map(|x| f64::from(*x)).collect() })
        }
    }
}

/// A u32 tensor.
pub(super) fn words(mem: &dyn Memory, t: &TensorArg) -> Result<Vec<u32>> {
    let mut out = Vec::with_capacity(t.spec.len());
    each_row(mem, t, &mut |row| out.extend(row.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))))?;
    Ok(out)
}

/// Rows as bytes, for what must be moved bit for bit.
pub(super) fn load_bytes(mem: &dyn Memory, t: &TensorArg) -> Result<Vec<Vec<u8>>> {
    let mut out = Vec::with_capacity(t.spec.rows);
    each_row(mem, t, &mut |row| out.push(row.to_vec()))?;
    out.resize(t.spec.rows, Vec::new());
    Ok(out)
}

fn each_row(mem: &dyn Memory, t: &TensorArg, f: &mut dyn FnMut(&[u8])) -> Result<()> {
    if t.spec.is_empty() {
        return Ok(());
    }
    let size = t.spec.dtype.block().1;
    let (pitch, width) = (t.spec.stride * size, t.spec.cols * size);
    mem.read(&t.buffer, t.byte_range(), &mut |bytes| (0..t.spec.rows).for_each(|r| f(&bytes[r * pitch..][..width])))
}

/// Writes the rows that count, each element rounded once. Other rows, and what lies between rows, keep their bytes.
pub(super) fn store(mem: &dyn Memory, t: &TensorArg, values: &Mat, live: Live) -> Result<()> {
    debug_assert_eq!(t.spec.shape(), [values.rows, values.cols]);
    let dtype = t.spec.dtype;
    let size = dtype.block().1;
    store_rows(mem, t, live.rows(values.rows), &mut |r, row| {
        for (b, x) in row.chunks_exact_mut(size).zip(values.row(r)) {
            round_into(dtype, *x, b);
        }
    })
}

/// Writes u32 rows, all of them.
pub(super) fn store_words(mem: &dyn Memory, t: &TensorArg, values: &[u32]) -> Result<()> {
    store_rows(mem, t, 0..t.spec.rows, &mut |r, row| {
        for (b, x) in row.chunks_exact_mut(4).zip(&values[r * t.spec.cols..]) {
            b.copy_from_slice(&x.to_ne_bytes());
        }
    })
}

/// Lets `f` fill the bytes of some rows.
pub(super) fn store_rows(
    mem: &dyn Memory,
    t: &TensorArg,
    rows: impl Iterator<Item = usize>,
    f: &mut dyn FnMut(usize, &mut [u8]),
) -> Result<()> {
    if t.spec.is_empty() {
        return Ok(());
    }
    let size = t.spec.dtype.block().1;
    let (pitch, width) = (t.spec.stride * size, t.spec.cols * size);
    let mut rows = Some(rows);
    mem.write(&t.buffer, t.byte_range(), &mut |bytes| {
        for r in rows.take().into_iter().flatten() {
            f(r, &mut bytes[r * pitch..][..width]);
        }
    })
}

/// `x` rounded once, to nearest even, as the bytes of a float type (or, for whole numbers, u32).
pub(super) fn round_into(dtype: DType, x: f64, bytes: &mut [u8]) {
    match dtype {
        DType::F16 => bytes.copy_from_slice(&f16::from_f32(round_to_odd(x)).to_ne_bytes()),
        DType::Bf16 => bytes.copy_from_slice(&bf16::from_f32(round_to_odd(x)).to_ne_bytes()),
        DType::U32 => bytes.copy_from_slice(&(x as u32).to_ne_bytes()),
        _ => bytes.copy_from_slice(&(x as f32).to_ne_bytes()),
    }
}

/// f64 to f32 such that a second rounding, to 16 bits, equals a single one: an inexact result gets an odd last bit (Boldo & Melquiond 2008).
fn round_to_odd(x: f64) -> f32 {
    let y = x as f32;
    let inexact = f64::from(y) != x && !x.is_nan();
    if !inexact || y.to_bits() & 1 == 1 {
        return y;
    }
    // An even neighbour was chosen; the odd one lies on the other side of x.
    let towards_zero = f64::from(y).abs() > x.abs();
    f32::from_bits(if towards_zero { y.to_bits() - 1 } else { y.to_bits() + 1 })
}

/// What is wrong with an index read from device memory.
pub(super) fn out_of_range(what: &str, at: usize, index: u32, end: usize) -> Error {
    Error::execution(format!("{what}[{at}] is {index}, which is not below {end}"))
}

/// `index` as a usize below `end`.
pub(super) fn below(what: &str, at: usize, index: u32, end: usize) -> Result<usize> {
    let i = index as usize;
    if i < end { Ok(i) } else { Err(out_of_range(what, at, index, end)) }
}

/// Indices below `end`, or `None` for [`crate::op::NO_INDEX`]; a repeated index breaks the ops that want distinct ones.
pub(super) fn distinct_or_none(what: &str, indices: &[u32], end: usize) -> Result<Vec<Option<usize>>> {
    let mut seen = alloc::collections::BTreeSet::new();
    let mut out = Vec::with_capacity(indices.len());
    for (at, i) in indices.iter().enumerate() {
        if *i == crate::op::NO_INDEX {
            out.push(None);
            continue;
        }
        let index = below(what, at, *i, end)?;
        if !seen.insert(index) {
            return Err(Error::execution(format!("{what}[{at}] is {index}, which an earlier entry also is; they must be distinct")));
        }
        out.push(Some(index));
    }
    Ok(out)
}
