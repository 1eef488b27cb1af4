//! Workspace: one block of a queue, cut into slabs for the duration of an op.
//!
//! An op describes its slabs once, in a function that takes a [`Carver`]; run on [`Carver::measure`] it says how many bytes the op needs,
//! run on a queue's block it gives the slabs.

use crate::memory::{ALIGNMENT, Block};
use core::{marker::PhantomData, ptr};

/// What scratch may hold: types for which any initialised bytes are a value.
///
/// # Safety
/// They are.
pub(crate) unsafe trait Plain: Copy {}
// Safety: any bit pattern is a value.
unsafe impl Plain for f32 {}
// Safety: any bit pattern is a value.
unsafe impl Plain for f64 {}
// Safety: any bit pattern is a value.
unsafe impl Plain for u32 {}
// Safety: as its elements.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}
// Safety: any bit pattern is a pointer that nobody need follow.
unsafe impl Plain for *const u8 {}
// Safety: as above.
unsafe impl Plain for *const f32 {}

/// Cuts slabs off a block, or counts what they would take.
pub(crate) struct Carver<'a> {
    base: *mut u8,
    capacity: usize,
    used: usize,
    int8: bool,
    block: PhantomData<&'a Block>,
}

impl<'a> Carver<'a> {
    /// A carver that only counts.
    pub(crate) fn measure(int8: bool) -> Self {
        Self { base: ptr::null_mut(), capacity: usize::MAX, used: 0, int8, block: PhantomData }
    }

    /// A carver of `block`.
    pub(crate) fn of(block: &'a Block, int8: bool) -> Self {
        Self { base: block.ptr(), capacity: block.bytes(), used: 0, int8, block: PhantomData }
    }

    /// Whether the device multiplies activations of 8 bits where it can.
    pub(crate) fn int8(&self) -> bool {
        self.int8
    }

    /// Bytes cut so far.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Room for `n` elements for each of `workers`, in cache lines of their own.
    ///
    /// # Panics
    /// If the block is too small: an op that measures less than it takes, a bug of this crate.
    pub(crate) fn workers<T: Plain>(&mut self, workers: usize, n: usize) -> Slabs<T> {
        let each = n.saturating_mul(size_of::<T>()).checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX / 2);
        let end = each.saturating_mul(workers).saturating_add(self.used);
        assert!(end <= self.capacity, "an op needs {end} bytes of scratch and has {}", self.capacity);
        let slabs = Slabs { base: self.base.wrapping_add(self.used).cast(), each, n, workers };
        self.used = end;
        slabs
    }

    /// Room for `n` elements that all workers share.
    pub(crate) fn shared<T: Plain>(&mut self, n: usize) -> Slab<T> {
        let slabs = self.workers(1, n);
        Slab { ptr: slabs.base, len: n }
    }
}

/// `n` elements per worker.
#[derive(Clone, Copy)]
pub(crate) struct Slabs<T> {
    base: *mut T,
    each: usize,
    n: usize,
    workers: usize,
}

/// A run of elements in scratch. Contents are unspecified but initialised.
#[derive(Clone, Copy)]
pub(crate) struct Slab<T> {
    ptr: *mut T,
    len: usize,
}

// Safety: a slab is a place in the queue's scratch; methods that reach into it say who may.
unsafe impl<T> Send for Slabs<T> {}
// Safety: as above.
unsafe impl<T> Sync for Slabs<T> {}
// Safety: as above.
unsafe impl<T> Send for Slab<T> {}
// Safety: as above.
unsafe impl<T> Sync for Slab<T> {}

impl<T: Plain> Slabs<T> {
    /// The elements of `worker`.
    pub(crate) fn of(&self, worker: usize) -> Slab<T> {
        assert!(worker < self.workers);
        Slab { ptr: self.base.cast::<u8>().wrapping_add(worker * self.each).cast(), len: self.n }
    }
}

impl<T: Plain> Slab<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn ptr(&self) -> *mut T {
        self.ptr
    }

    /// The same room for other elements, as many as fit; of no stricter alignment.
    pub(crate) fn cast<U: Plain>(self) -> Slab<U> {
        const { assert!(align_of::<U>() <= align_of::<T>()) };
        Slab { ptr: self.ptr.cast(), len: self.len * size_of::<T>() / size_of::<U>() }
    }

    /// Elements `first ..` as a slab of `n`.
    ///
    /// # Panics
    /// If they are not within it: a bug of this crate.
    pub(crate) fn part(&self, first: usize, n: usize) -> Self {
        assert!(first + n <= self.len);
        Self { ptr: self.ptr.wrapping_add(first), len: n }
    }

    /// The elements, to read.
    ///
    /// # Safety
    /// The slab was cut from a block that is still there, and nobody writes these elements meanwhile.
    pub(crate) unsafe fn get<'s>(self) -> &'s [T] {
        // Safety: within the block, aligned by its cache lines, initialised since the block's birth; the rest is the caller's promise.
        unsafe { core::slice::from_raw_parts(self.ptr, self.len) }
    }

    /// The elements, to write.
    ///
    /// # Safety
    /// The slab was cut from a block that is still there, and nobody else touches these elements meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn get_mut<'s>(self) -> &'s mut [T] {
        // Safety: as in `get`.
        unsafe { core::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}
