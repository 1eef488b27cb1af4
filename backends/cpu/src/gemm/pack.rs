//! Operands of a product, brought into the form that the micro-kernel reads.

use super::{KC, NR, Table};
use crate::{
    convert,
    scratch::{Carver, Slab, Slabs},
    view::Mat,
    weight::{CpuWeight, WeightView},
};
use core::{cmp::min, marker::PhantomData};
use zofo_hal::{DType, Matrix, Operand, Result, TensorArg, quant::dequantise_row};

/// Scratch of one product at a time.
#[derive(Clone, Copy)]
pub(crate) struct Packing {
    /// Converted rows of the left operand, `[m][KC]`.
    left: Slab<f32>,
    /// Panels of the right operand, `[group][KC][16]`.
    panels: Slab<f32>,
    /// 16 rows, or one row of a group of panels, before they are transposed.
    rows: Slab<f32>,
    pointers: Slab<*const f32>,
}

impl Packing {
    /// Cuts scratch for products of up to `m` rows with a right operand of [`Right::group_of`] `group`.
    pub(crate) fn carve(c: &mut Carver<'_>, workers: usize, m: usize, group: usize) -> PackingSlabs {
        PackingSlabs {
            left: c.workers(workers, m * KC),
            panels: c.workers(workers, group * KC * NR),
            rows: c.workers(workers, NR * KC),
            pointers: c.workers(workers, m),
        }
    }
}

/// [`Packing`] of every worker.
#[derive(Clone, Copy)]
pub(crate) struct PackingSlabs {
    left: Slabs<f32>,
    panels: Slabs<f32>,
    rows: Slabs<f32>,
    pointers: Slabs<*const f32>,
}

impl PackingSlabs {
    pub(crate) fn of(&self, worker: usize) -> Packing {
        Packing {
            left: self.left.of(worker),
            panels: self.panels.of(worker),
            rows: self.rows.of(worker),
            pointers: self.pointers.of(worker),
        }
    }
}

/// The left operand of a tile.
pub(crate) enum Left<'a> {
    /// Rows by their addresses, from step 0 on.
    Rows {
        /// First element of each.
        rows: &'a [*const u8],
        /// Their type.
        dtype: DType,
    },
    /// Columns of a matrix `[k, m]`: the transposed operand of a gradient.
    Columns {
        /// The matrix.
        matrix: Mat,
        /// Column of the tile's first row.
        first: usize,
        /// Row of step 0.
        k0: usize,
    },
}

impl Left<'_> {
    /// Steps `k0 .. k0 + kc` of the first `m` rows, as f32.
    ///
    /// # Safety
    /// The operand has them; the calling thread alone uses `packing`.
    pub(crate) unsafe fn block<'p>(&self, k0: usize, kc: usize, m: usize, packing: &'p Packing) -> &'p [*const f32] {
        // Safety: the caller's promise.
        let pointers = unsafe { packing.pointers.part(0, m).get_mut() };
        match self {
            Left::Rows { rows, dtype: DType::F32 } => {
                for (p, row) in pointers.iter_mut().zip(*rows) {
                    *p = row.cast::<f32>().wrapping_add(k0);
                }
                return pointers;
            }
            Left::Rows { rows, dtype } => {
                for (i, row) in rows[..m].iter().enumerate() {
                    // Safety: the row has these elements; the slab is this thread's.
                    unsafe { convert::load(*dtype, row.add(k0 * dtype.block().1), packing.left.part(i * KC, kc).get_mut()) };
                }
            }
            Left::Columns { matrix, first, k0: base } => {
                // Safety: the slab is this thread's.
                let left = unsafe { packing.left.part(0, m * KC).get_mut() };
                let mut chunk = [0.0f32; 64];
                for k in 0..kc {
                    for i in (0..m).step_by(64) {
                        let n = min(64, m - i);
                        matrix.load(base + k0 + k, first + i, &mut chunk[..n]);
                        for (j, x) in chunk[..n].iter().enumerate() {
                            left[(i + j) * KC + k] = *x;
                        }
                    }
                }
            }
        }
        for (i, p) in pointers.iter_mut().enumerate() {
            *p = packing.left.part(i * KC, kc).ptr();
        }
        pointers
    }
}

/// The right operand: a matrix `[n, k]` (NT) or `[k, n]` (NN).
#[derive(Clone, Copy)]
pub(crate) struct Right<'a> {
    data: *const u8,
    dtype: DType,
    /// Rows are in panels of 16, else row-major.
    panels: bool,
    rows: usize,
    cols: usize,
    /// Bytes from row to row, if row-major.
    pitch: usize,
    nn: bool,
    life: PhantomData<&'a ()>,
}

// Safety: a place that is only read; see the constructors.
unsafe impl Send for Right<'_> {}
// Safety: as above.
unsafe impl Sync for Right<'_> {}

impl<'a> Right<'a> {
    /// A weight, or a tensor in a buffer. `nn` for `[k, n]`.
    ///
    /// # Safety
    /// As for [`Mat::of`].
    pub(crate) unsafe fn of(m: &'a Matrix<TensorArg>, nn: bool) -> Result<Self> {
        Ok(match m {
            // Safety: the caller's promise.
            Matrix::Tensor(t) => Self::matrix(unsafe { Mat::of(t) }?, nn),
            Matrix::Weight(w) => Self::weight(CpuWeight::of(w)?.view()?, nn),
        })
    }

    pub(crate) fn weight(w: WeightView<'a>, nn: bool) -> Self {
        let pitch = w.spec.dtype.bytes(w.spec.cols).unwrap_or(0);
        let (rows, cols) = (w.spec.rows, w.spec.cols);
        Self { data: w.bytes.as_ptr(), dtype: w.spec.dtype, panels: w.panels, rows, cols, pitch, nn, life: PhantomData }
    }

    pub(crate) fn matrix(m: Mat, nn: bool) -> Self {
        let (dtype, pitch) = (m.dtype, m.stride * m.size());
        Self { data: m.at(0, 0), dtype, panels: false, rows: m.rows, cols: m.cols, pitch, nn, life: PhantomData }
    }

    /// f32 panels of an `[n, k]` matrix, as [`pack_factor`] makes them.
    ///
    /// # Safety
    /// They are there and not written while the operand is used.
    pub(crate) unsafe fn packed(data: *const f32, n: usize, k: usize) -> Self {
        Self { data: data.cast(), dtype: DType::F32, panels: true, rows: n, cols: k, pitch: 0, nn: false, life: PhantomData }
    }

    /// Panels that are made at a time.
    pub(crate) fn group(&self) -> usize {
        Self::group_of_type(self.dtype, self.nn)
    }

    /// As [`group`](Self::group), before there is data.
    pub(crate) fn group_of<T: Operand>(m: &Matrix<T>, nn: bool) -> usize {
        Self::group_of_type(m.dtype(), nn)
    }

    /// Four serve the kernels of few rows. Of a quantised `[k, n]` matrix a block of 256 columns is unpacked at once.
    fn group_of_type(dtype: DType, nn: bool) -> usize {
        if nn && dtype.is_quantised() { 256 / NR } else { 4 }
    }

    /// Panels `p0 .. p0 + np`, steps `k0 .. k0 + kc`: address and distance between panels.
    ///
    /// # Safety
    /// The operand has them; `np` is at most [`group`](Self::group); the calling thread alone uses `packing`.
    pub(crate) unsafe fn panels(
        &self,
        table: &Table,
        k0: usize,
        kc: usize,
        p0: usize,
        np: usize,
        packing: &Packing,
    ) -> (*const f32, usize) {
        if self.panels && !self.nn && self.dtype == DType::F32 {
            return (self.data.cast::<f32>().wrapping_add((p0 * self.cols + k0) * NR), self.cols * NR);
        }
        let distance = KC * NR;
        // Safety: the caller's promise.
        unsafe {
            if self.nn && !self.panels {
                self.split_rows(k0, kc, p0, np, packing);
            } else {
                for p in 0..np {
                    let dst = packing.panels.part(p * distance, distance);
                    match (self.panels, self.nn) {
                        (true, false) => self.widen(k0, kc, p0 + p, dst),
                        (true, true) => self.transpose_panels(table, k0, kc, p0 + p, dst, packing),
                        (false, _) => self.transpose_rows(table, k0, kc, p0 + p, dst, packing),
                    }
                }
            }
        }
        (packing.panels.ptr(), distance)
    }

    /// A 16-bit panel of `x W^T`.
    unsafe fn widen(&self, k0: usize, kc: usize, p: usize, dst: Slab<f32>) {
        let src = self.data.wrapping_add((p * self.cols + k0) * NR * self.dtype.block().1);
        // Safety: the panel has these steps; `dst` is this thread's.
        unsafe { convert::load(self.dtype, src, dst.part(0, kc * NR).get_mut()) }
    }

    /// A panel of `dy W` from panels of W's rows: 16 x 16 squares, transposed.
    unsafe fn transpose_panels(&self, table: &Table, k0: usize, kc: usize, p: usize, dst: Slab<f32>, packing: &Packing) {
        let size = self.dtype.block().1;
        let valid = min(NR, self.cols - p * NR);
        // Safety: the square at row k0 + k, column 16 p is `valid` runs of 16 within the weight; scratch is this thread's.
        unsafe {
            let square = packing.rows.part(0, NR * NR).get_mut();
            if valid < NR {
                square.fill(0.0);
            }
            assert!(k0.is_multiple_of(NR));
            for k in (0..kc).step_by(NR) {
                let src = self.data.add((((k0 + k) / NR) * self.cols + p * NR) * NR * size);
                let to = dst.part(k * NR, NR * NR).ptr();
                if self.dtype == DType::F32 && valid == NR {
                    (table.transpose)(src.cast(), NR, to);
                } else {
                    convert::load(self.dtype, src, &mut square[..valid * NR]);
                    (table.transpose)(square.as_ptr(), NR, to);
                }
            }
        }
    }

    /// A panel of `x W^T` from row-major rows.
    unsafe fn transpose_rows(&self, table: &Table, k0: usize, kc: usize, p: usize, dst: Slab<f32>, packing: &Packing) {
        let valid = min(NR, self.rows - p * NR);
        let row = |j: usize| self.data.wrapping_add((p * NR + j) * self.pitch);
        // Safety: rows and steps are within the operand; scratch is this thread's and as large as the block.
        unsafe {
            let mut done = 0;
            if self.dtype == DType::F32 && valid == NR && self.pitch.is_multiple_of(4) {
                while done + NR <= kc {
                    (table.transpose)(row(0).cast::<f32>().add(k0 + done), self.pitch / 4, dst.part(done * NR, NR * NR).ptr());
                    done += NR;
                }
            }
            if done == kc {
                return;
            }
            let (block, bytes) = self.dtype.block();
            for j in 0..NR {
                let out = packing.rows.part(j * KC, KC).get_mut();
                let n = kc - done;
                if j >= valid {
                    out[..n].fill(0.0);
                } else if self.dtype.is_quantised() {
                    let from = row(j).add((k0 + done) / block * bytes);
                    // Whole blocks of a type that import accepted.
                    let _ = dequantise_row(self.dtype, core::slice::from_raw_parts(from, n / block * bytes), &mut out[..n]);
                } else {
                    convert::load(self.dtype, row(j).add((k0 + done) * bytes), &mut out[..n]);
                }
            }
            for k in (done..kc).step_by(NR) {
                (table.transpose)(packing.rows.ptr().add(k - done), KC, dst.part(k * NR, NR * NR).ptr());
            }
        }
    }

    /// Panels of a row-major `[k, n]` matrix.
    unsafe fn split_rows(&self, k0: usize, kc: usize, p0: usize, np: usize, packing: &Packing) {
        let (first, end) = (p0 * NR, min((p0 + np) * NR, self.cols));
        let n = end - first;
        let (block, bytes) = self.dtype.block();
        // Safety: rows k0 .. k0 + kc and columns first .. end are within the operand; scratch is this thread's. A quantised group begins
        // with a block (see `Extent::n0`) and ends with one or with the row.
        unsafe {
            let panels = packing.panels.part(0, np * KC * NR).get_mut();
            let row = packing.rows.part(0, NR * NR).get_mut();
            row[n..np * NR].fill(0.0);
            for k in 0..kc {
                let from = self.data.add((k0 + k) * self.pitch + first / block * bytes);
                if self.dtype.is_quantised() {
                    let _ = dequantise_row(self.dtype, core::slice::from_raw_parts(from, n / block * bytes), &mut row[..n]);
                } else {
                    convert::load(self.dtype, from, &mut row[..n]);
                }
                for p in 0..np {
                    panels[(p * KC + k) * NR..][..NR].copy_from_slice(&row[p * NR..][..NR]);
                }
            }
        }
    }
}

/// Packs `n` rows of `k` values, as `row(j, first, values)` gives them, into panels `[n / 16][k][16]`, filled up with zeros.
#[inline(always)]
pub(crate) fn pack_factor(n: usize, k: usize, dst: &mut [f32], mut row: impl FnMut(usize, usize, &mut [f32])) {
    let mut chunk = [0.0f32; 128];
    for (p, panel) in dst.chunks_exact_mut((k * NR).max(1)).take(n.div_ceil(NR)).enumerate() {
        for j in 0..NR {
            for first in (0..k).step_by(128) {
                let len = min(128, k - first);
                if p * NR + j < n {
                    row(p * NR + j, first, &mut chunk[..len]);
                } else {
                    chunk.fill(0.0);
                }
                for (i, x) in chunk[..len].iter().enumerate() {
                    panel[(first + i) * NR + j] = *x;
                }
            }
        }
    }
}
