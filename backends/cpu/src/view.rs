//! Matrices as kernels see them.

use crate::{convert, memory::CpuBuffer};
use alloc::format;
use core::cmp::min;
use zofo_hal::{DType, Error, Result, TensorArg, op::NO_INDEX};

/// A matrix in a buffer of this backend.
///
/// It is a place, not a borrow: an output may be exactly one of the inputs, and threads write rows of one output at a time. So elements are
/// copied in and out, and no reference into the buffer outlives a call (except where a kernel knows that an operand is not written).
#[derive(Clone, Copy)]
pub(crate) struct Mat {
    ptr: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) stride: usize,
}

// Safety: see `Mat::of`; threads of one op write disjoint elements.
unsafe impl Send for Mat {}
// Safety: as above.
unsafe impl Sync for Mat {}

impl Mat {
    /// The matrix behind `t`.
    ///
    /// # Safety
    /// `t` is an operand of an op that passed `Op::check_submit`, the queue's lock is held while the matrix is used, its elements are
    /// written only if the op writes the operand, and by one thread each.
    pub(crate) unsafe fn of(t: &TensorArg) -> Result<Self> {
        let base = CpuBuffer::of(&t.buffer)?.ptr();
        let s = t.spec;
        Ok(Self { ptr: base.wrapping_add(t.offset), dtype: s.dtype, rows: s.rows, cols: s.cols, stride: s.stride })
    }

    /// As [`of`](Self::of), of an optional operand.
    ///
    /// # Safety
    /// As for `of`.
    pub(crate) unsafe fn of_opt(t: &Option<TensorArg>) -> Result<Option<Self>> {
        // Safety: the caller's promise.
        t.as_ref().map(|t| unsafe { Self::of(t) }).transpose()
    }

    /// An f32 matrix in scratch or in a weight.
    ///
    /// # Safety
    /// `ptr` is valid for the matrix while it is used; written by one thread per element.
    pub(crate) unsafe fn raw(ptr: *mut f32, rows: usize, cols: usize, stride: usize) -> Self {
        Self { ptr: ptr.cast(), dtype: DType::F32, rows, cols, stride }
    }

    /// Rows `row0 .. row0 + rows` and columns `col0 .. col0 + cols` of it.
    ///
    /// # Panics
    /// If they are not within it: a bug of this crate.
    pub(crate) fn part(&self, row0: usize, rows: usize, col0: usize, cols: usize) -> Self {
        assert!(row0 + rows <= self.rows && col0 + cols <= self.cols);
        Self { ptr: self.at(row0, col0), rows, cols, ..*self }
    }

    /// Bytes of an element.
    #[inline(always)]
    pub(crate) fn size(&self) -> usize {
        self.dtype.block().1
    }

    /// Address of an element; within the matrix, or one row past it.
    #[inline(always)]
    pub(crate) fn at(&self, r: usize, c: usize) -> *mut u8 {
        self.ptr.wrapping_add((r * self.stride + c) * self.size())
    }

    #[inline(always)]
    fn check(&self, r: usize, c: usize, n: usize) {
        assert!(r < self.rows && c + n <= self.cols, "row {r}, columns {c}.. of [{}, {}]", self.rows, self.cols);
    }

    /// Copies elements `(r, c ..)` out as f32.
    #[inline(always)]
    pub(crate) fn load(&self, r: usize, c: usize, out: &mut [f32]) {
        if out.is_empty() {
            return;
        }
        self.check(r, c, out.len());
        // Safety: in range; `of` promises that the elements are there and not written meanwhile.
        unsafe { convert::load(self.dtype, self.at(r, c), out) }
    }

    /// Calls `f(i, value)` for elements `(r, c + i)`, `i` in `0 .. n`.
    #[inline(always)]
    pub(crate) fn each(&self, r: usize, c: usize, n: usize, mut f: impl FnMut(usize, f32)) {
        let mut room = [0.0f32; 64];
        for first in (0..n).step_by(64) {
            let part = &mut room[..min(64, n - first)];
            self.load(r, c + first, part);
            part.iter().enumerate().for_each(|(i, x)| f(first + i, *x));
        }
    }

    /// Copies values to elements `(r, c ..)`, rounded once.
    #[inline(always)]
    pub(crate) fn store(&self, r: usize, c: usize, values: &[f32]) {
        if values.is_empty() {
            return;
        }
        self.check(r, c, values.len());
        // Safety: in range; `of` promises that this thread alone touches the elements.
        unsafe { convert::store(self.dtype, self.at(r, c), values) }
    }

    /// One element.
    #[inline(always)]
    pub(crate) fn get(&self, r: usize, c: usize) -> f32 {
        let mut x = [0.0];
        self.load(r, c, &mut x);
        x[0]
    }

    /// A u32 element.
    #[inline(always)]
    pub(crate) fn word(&self, r: usize, c: usize) -> u32 {
        self.check(r, c, 1);
        debug_assert_eq!(self.dtype, DType::U32);
        // Safety: in range, and a buffer's elements are aligned.
        unsafe { self.at(r, c).cast::<u32>().read() }
    }

    /// Writes a u32 element.
    #[inline(always)]
    pub(crate) fn set_word(&self, r: usize, c: usize, word: u32) {
        self.check(r, c, 1);
        debug_assert_eq!(self.dtype, DType::U32);
        // Safety: in range and aligned; this thread alone touches the element.
        unsafe { self.at(r, c).cast::<u32>().write(word) }
    }

    /// Row `r` of `src` to row `to`, bit for bit.
    #[inline(always)]
    pub(crate) fn copy_row(&self, to: usize, src: &Mat, r: usize) {
        if self.cols == 0 {
            return;
        }
        self.check(to, 0, self.cols);
        src.check(r, 0, self.cols);
        assert_eq!(self.dtype, src.dtype);
        // Safety: both rows are in range; an output overlaps no input, and this thread alone writes the row.
        unsafe { core::ptr::copy_nonoverlapping(src.at(r, 0), self.at(to, 0), self.cols * self.size()) }
    }

    /// Row `r` becomes 0.
    #[inline(always)]
    pub(crate) fn zero_row(&self, r: usize) {
        if self.cols == 0 {
            return;
        }
        self.check(r, 0, self.cols);
        // Safety: in range, and this thread alone touches the row.
        unsafe { core::ptr::write_bytes(self.at(r, 0), 0, self.cols * self.size()) }
    }

    /// Elements `(r, c .. c + n)` as they lie, for an f32 matrix.
    ///
    /// # Safety
    /// Nobody writes the elements while the slice lives.
    #[inline(always)]
    pub(crate) unsafe fn slice<'s>(&self, r: usize, c: usize, n: usize) -> &'s [f32] {
        if n == 0 {
            return &[];
        }
        self.check(r, c, n);
        assert_eq!(self.dtype, DType::F32);
        // Safety: in range, aligned, initialised; not written by the caller's promise.
        unsafe { core::slice::from_raw_parts(self.at(r, c).cast(), n) }
    }

    /// Elements `(r, c .. c + n)` as f32: where they lie if they are f32, else converted into `room`.
    ///
    /// # Safety
    /// Nobody writes the elements while the slice lives.
    #[inline(always)]
    pub(crate) unsafe fn read<'s>(&self, r: usize, c: usize, n: usize, room: &'s mut [f32]) -> &'s [f32] {
        if self.dtype == DType::F32 {
            // Safety: the caller's promise.
            return unsafe { self.slice(r, c, n) };
        }
        self.load(r, c, &mut room[..n]);
        &room[..n]
    }
}

/// Which rows of an activation count, numbered without gaps: block c, row i is number `c * live + i`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) blocks: usize,
    /// Rows of a block.
    pub(crate) height: usize,
    /// Rows of a block that count.
    pub(crate) live: usize,
}

impl Rows {
    /// All of `rows` rows in `blocks` blocks, or as many of each as the scalar `live` says.
    ///
    /// # Errors
    /// `Execution` where it says more than there are.
    pub(crate) fn new(rows: usize, blocks: usize, live: Option<Mat>) -> Result<Self> {
        let height = rows / blocks.max(1);
        let live = live.map_or(height, |l| l.word(0, 0) as usize);
        if live > height {
            return Err(Error::execution(format!("{live} live rows in blocks of {height} rows")));
        }
        Ok(Self { blocks, height, live })
    }

    /// How many count.
    pub(crate) fn len(&self) -> usize {
        self.blocks * self.live
    }

    /// Row of number `i`.
    #[inline(always)]
    pub(crate) fn at(&self, i: usize) -> usize {
        if self.live == self.height { i } else { i / self.live * self.height + i % self.live }
    }

    /// Block of number `i`.
    #[inline(always)]
    pub(crate) fn block(&self, i: usize) -> usize {
        i / self.live.max(1)
    }
}

/// `index` as a row below `end`.
///
/// # Errors
/// `Execution`.
pub(crate) fn below(what: &str, at: usize, index: u32, end: usize) -> Result<usize> {
    let i = index as usize;
    if i < end { Ok(i) } else { Err(Error::execution(format!("{what}[{at}] is {index}, which is not below {end}"))) }
}

/// That the first `n` indices are below `end`, or "none" where that is allowed.
///
/// # Errors
/// `Execution`, naming the first that is not.
pub(crate) fn check_indices(what: &str, index: &Mat, n: usize, end: usize, none_allowed: bool) -> Result<()> {
    (0..n).map(|i| (i, index.word(0, i))).filter(|(_, w)| !(none_allowed && *w == NO_INDEX)).try_for_each(|(i, w)| {
        below(what, i, w, end)?;
        Ok(())
    })
}
