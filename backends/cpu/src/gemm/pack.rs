//! Operands of a product, brought into the form that the micro-kernel reads.

use super::{
    KC, MC, NC, NR, Panels, Table,
    format::{granularity, panel_bytes},
    kernel::Dot,
};
use crate::{
    convert,
    scratch::{Carver, Plain, Slab, Slabs},
    view::Mat,
    weight::{CpuWeight, WeightView},
};
use core::{cmp::min, marker::PhantomData};
use zofo_hal::{DType, Error, Matrix, Result, TensorArg};

/// Scratch of one product at a time.
#[derive(Clone, Copy)]
pub(crate) struct Packing {
    /// Converted rows of a block of the left operand, `[m][KC]`.
    left: Slab<f32>,
    /// Panels of the right operand, `[NC / 16][KC][16]`.
    panels: Slab<f32>,
    /// 16 rows, or two squares of 16 x 16, before they are transposed.
    rows: Slab<f32>,
    pointers: Slab<*const f32>,
}

impl Packing {
    /// Cuts scratch for products of up to `m` rows and `n` columns.
    pub(crate) fn carve(c: &mut Carver<'_>, workers: usize, m: usize, n: usize) -> PackingSlabs {
        let (m, panels) = (m.min(MC), n.min(NC).div_ceil(NR));
        PackingSlabs {
            left: c.workers(workers, m * KC),
            panels: c.workers(workers, panels * KC * NR),
            rows: c.workers(workers, NR * KC),
            pointers: c.workers(workers, m),
        }
    }
}

impl Packing {
    /// Room for the addresses of `m` rows, whatever they point to.
    ///
    /// # Safety
    /// The calling thread alone uses `self`.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn pointers<T>(&self, m: usize) -> &mut [*const T] {
        // Safety: the caller's promise; pointers are alike.
        unsafe { core::slice::from_raw_parts_mut(self.pointers.part(0, m).ptr().cast(), m) }
    }

    /// The room of the panels, for codes.
    pub(crate) fn codes<T: Plain>(&self) -> Slab<T> {
        self.panels.cast()
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
    /// Whether pairs of steps can be read where they lie.
    pub(crate) fn is_bf16_rows(&self) -> bool {
        matches!(self, Left::Rows { dtype: DType::Bf16, .. })
    }

    /// Steps from `k0` on of the bf16 rows `m0 .. m0 + m`, in pairs.
    ///
    /// # Safety
    /// The calling thread alone uses `packing`.
    pub(crate) unsafe fn pairs<'p>(&self, k0: usize, m0: usize, m: usize, packing: &'p Packing) -> &'p [*const u32] {
        // Safety: the caller's promise.
        let pointers = unsafe { packing.pointers(m) };
        if let Left::Rows { rows, .. } = self {
            pointers.iter_mut().zip(&rows[m0..]).for_each(|(p, row)| *p = row.wrapping_add(2 * k0).cast());
        }
        pointers
    }

    /// Steps `k0 .. k0 + kc` of the rows `m0 .. m0 + m`, as f32.
    ///
    /// # Safety
    /// The operand has them; the calling thread alone uses `packing`.
    pub(crate) unsafe fn block<'p>(
        &self,
        table: &Table,
        k0: usize,
        kc: usize,
        m0: usize,
        m: usize,
        packing: &'p Packing,
    ) -> &'p [*const f32] {
        // Safety: the caller's promise.
        let pointers = unsafe { packing.pointers(m) };
        match self {
            Left::Rows { rows, dtype: DType::F32 } => {
                for (p, row) in pointers.iter_mut().zip(&rows[m0..]) {
                    *p = row.cast::<f32>().wrapping_add(k0);
                }
                return pointers;
            }
            Left::Rows { rows, dtype } => {
                for (i, row) in rows[m0..m0 + m].iter().enumerate() {
                    // Safety: the row has these elements; the slab is this thread's.
                    unsafe { convert::load(*dtype, row.add(k0 * dtype.block().1), packing.left.part(i * KC, kc).get_mut()) };
                }
            }
            Left::Columns { matrix, first, k0: base } => {
                let (first, base) = (first + m0, base + k0);
                let mut square = [0.0f32; NR * NR];
                let mut turned = [0.0f32; NR * NR];
                // Safety: the slab is this thread's; squares are 16 x 16.
                unsafe {
                    let left = packing.left.part(0, m * KC).get_mut();
                    for k in (0..kc).step_by(NR) {
                        for i in (0..m).step_by(NR) {
                            let (height, width) = (min(NR, kc - k), min(NR, m - i));
                            for (r, row) in square.chunks_exact_mut(NR).take(height).enumerate() {
                                matrix.load(base + k + r, first + i, &mut row[..width]);
                            }
                            (table.transpose)(square.as_ptr(), NR, turned.as_mut_ptr());
                            for (j, row) in turned.chunks_exact(NR).take(width).enumerate() {
                                left[(i + j) * KC + k..][..height].copy_from_slice(&row[..height]);
                            }
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
            Matrix::Weight(w) => Self::weight(CpuWeight::of(w)?.view()?, nn)?,
        })
    }

    fn weight(w: WeightView<'a>, nn: bool) -> Result<Self> {
        if !w.panels && w.spec.dtype.is_quantised() {
            return Err(Error::invalid("a quantised weight that was imported for look-ups alone has no product"));
        }
        let pitch = w.spec.dtype.bytes(w.spec.cols).unwrap_or(0);
        let (rows, cols) = (w.spec.rows, w.spec.cols);
        Ok(Self { data: w.bytes.as_ptr(), dtype: w.spec.dtype, panels: w.panels, rows, cols, pitch, nn, life: PhantomData })
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

    /// Whether products of bf16 pairs serve it: weights that are bf16, or coarser.
    pub(crate) fn is_paired(&self) -> bool {
        self.panels && (self.dtype == DType::Bf16 || self.dtype.is_quantised())
    }

    /// Its type.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Panel `p` as it lies.
    pub(crate) fn panel(&self, p: usize) -> *const u8 {
        self.data.wrapping_add(p * self.panel_bytes())
    }

    /// Bytes of a panel of a weight.
    pub(crate) fn panel_bytes(&self) -> usize {
        // It fitted the address space when the weight was packed.
        panel_bytes(self.dtype, self.cols).unwrap_or(0)
    }

    /// Panels from `p0` on, steps `k0 .. k0 + kc`, as they lie, for `x W^T`.
    pub(crate) fn in_place(&self, k0: usize, kc: usize, p0: usize) -> Option<Panels> {
        (self.panels && !self.nn).then(|| self.stored(k0, kc, p0))
    }

    fn stored(&self, k0: usize, kc: usize, p: usize) -> Panels {
        Panels { data: self.panel(p), dtype: self.dtype, bytes: self.panel_bytes(), k0, kc }
    }

    /// Panels `p0 .. p0 + np`, steps `k0 .. k0 + kc`, as f32: address and distance between panels.
    ///
    /// # Safety
    /// The operand has them; `np` is at most what `packing` was cut for, and the calling thread alone uses it.
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
            match (self.panels, self.nn) {
                (true, false) => {
                    (0..np).for_each(|p| (table.decode)(self.stored(k0, kc, p0 + p), packing.panels.part(p * distance, distance).ptr()));
                }
                (true, true) => self.transpose_panels(table, k0, kc, p0, np, packing),
                (false, true) => self.split_rows(k0, kc, p0, np, packing),
                (false, false) => {
                    (0..np).for_each(|p| self.transpose_rows(table, k0, kc, p0 + p, packing.panels.part(p * distance, distance), packing));
                }
            }
        }
        (packing.panels.ptr(), distance)
    }

    /// As [`panels`](Self::panels), as pairs of bf16; the distance counts pairs of 16.
    ///
    /// # Safety
    /// As for `panels`; `kc` is even and [`is_paired`](Self::is_paired).
    #[allow(clippy::too_many_arguments)]
    pub(crate) unsafe fn pairs(
        &self,
        table: &Table,
        dot: &Dot,
        k0: usize,
        kc: usize,
        p0: usize,
        np: usize,
        packing: &Packing,
    ) -> (*const u32, usize) {
        if self.dtype == DType::Bf16 && !self.nn {
            let p = self.stored(k0, kc, p0);
            return (p.data.wrapping_add(k0 * NR * 2).cast(), p.bytes / (4 * NR));
        }
        // Safety: the caller's promise. Each panel's pairs take the first half of its own place, behind which its reader is always ahead.
        unsafe {
            let (made, distance) = self.panels(table, k0, kc, p0, np, packing);
            for p in 0..np {
                let panel = made.add(p * distance);
                (dot.pair)(panel, kc / 2, panel.cast::<u32>().cast_mut());
            }
            (made.cast(), distance / NR)
        }
    }

    /// Panels of `dy W` from panels of W's rows: 16 x 16 squares, transposed.
    unsafe fn transpose_panels(&self, table: &Table, k0: usize, kc: usize, p0: usize, np: usize, packing: &Packing) {
        assert!(k0.is_multiple_of(NR));
        // Columns that are decoded together; of a quantised weight two panels are.
        let wide = granularity(self.dtype).max(NR);
        // Safety: the squares at row k0 + k are within the weight, whose panels are filled up to 16 rows; scratch is this thread's.
        unsafe {
            let room = packing.rows.part(0, 2 * NR * NR).get_mut();
            for p in (0..np).step_by(wide / NR) {
                let first = (p0 + p) * NR;
                let valid = min(wide, self.cols - first);
                room[valid * NR..].fill(0.0);
                for k in (0..kc).step_by(NR) {
                    let stored = self.stored(first, valid, (k0 + k) / NR);
                    let squares = match self.dtype {
                        DType::F32 if valid == NR => stored.data.cast::<f32>().add(first * NR),
                        _ => {
                            (table.decode)(stored, room.as_mut_ptr());
                            room.as_ptr()
                        }
                    };
                    for half in 0..min(wide / NR, np - p) {
                        let to = packing.panels.part(((p + half) * KC + k) * NR, NR * NR);
                        (table.transpose)(squares.add(half * NR * NR), NR, to.ptr());
                    }
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
            let size = self.dtype.block().1;
            for j in 0..NR {
                let out = packing.rows.part(j * KC, KC).get_mut();
                let n = kc - done;
                if j >= valid {
                    out[..n].fill(0.0);
                } else {
                    convert::load(self.dtype, row(j).add((k0 + done) * size), &mut out[..n]);
                }
            }
            for k in (done..kc).step_by(NR) {
                (table.transpose)(packing.rows.ptr().add(k - done), KC, dst.part(k * NR, NR * NR).ptr());
            }
        }
    }

    /// Panels of a row-major `[k, n]` matrix.
    unsafe fn split_rows(&self, k0: usize, kc: usize, p0: usize, np: usize, packing: &Packing) {
        let size = self.dtype.block().1;
        // Safety: rows k0 .. k0 + kc and the valid columns of each panel are within the operand; scratch is this thread's.
        unsafe {
            for p in 0..np {
                let first = (p0 + p) * NR;
                let valid = min(NR, self.cols - first);
                let panel = packing.panels.part(p * KC * NR, kc * NR).get_mut();
                for (k, step) in panel.chunks_exact_mut(NR).enumerate() {
                    convert::load(self.dtype, self.data.add((k0 + k) * self.pitch + first * size), &mut step[..valid]);
                    step[valid..].fill(0.0);
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
