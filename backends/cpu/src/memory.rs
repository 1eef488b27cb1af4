//! Host memory: counted aligned blocks, and the buffers made of them.
//!
//! # Who may touch the bytes of a buffer
//! - Ops of its home queue, which hold that queue's lock while they run.
//! - Mappings, which begin and end under the same lock; an op of a mapped buffer is refused.
//! - Once it is frozen, anybody, for reading.
//!
//! A buffer's home changes only under the lock of the queue that it leaves.

use crate::{queue::QueueState, sync::Lock};
use alloc::{
    alloc::{alloc_zeroed, dealloc},
    format,
    sync::Arc,
};
use core::{
    alloc::Layout,
    any::Any,
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};
use zofo_hal::{Buffer, BufferRef, Error, ErrorKind, Home, MapRead, MapWrite, MemorySpace, MemoryStats, QueueId, Result, Usage};

/// Alignment of every block: a cache line, and the widest vector.
pub(crate) const ALIGNMENT: usize = 64;

/// Counters of a device's allocations.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    in_use: AtomicUsize,
    peak: AtomicUsize,
    allocations: AtomicUsize,
}

impl Counters {
    /// Counts `bytes` more.
    pub(crate) fn take(&self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let now = self.in_use.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(now, Relaxed);
        self.allocations.fetch_add(1, Relaxed);
    }

    /// Counts `bytes` less.
    pub(crate) fn give(&self, bytes: usize) {
        self.in_use.fetch_sub(bytes, Relaxed);
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let mut s = MemoryStats::default();
        s.in_use = self.in_use.load(Relaxed) as u64;
        s.peak = self.peak.load(Relaxed) as u64;
        s.allocations = self.allocations.load(Relaxed) as u64;
        s.owner = core::ptr::from_ref(self).addr() as u64;
        s
    }
}

/// An aligned block of initialised bytes, counted while it lives.
pub(crate) struct Block {
    ptr: NonNull<u8>,
    layout: Layout,
    counters: Arc<Counters>,
}

// Safety: a block owns its bytes; who may touch them is its owner's business (see above).
unsafe impl Send for Block {}
// Safety: as above.
unsafe impl Sync for Block {}

impl Block {
    /// A block of zeros.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(crate) fn new(bytes: usize, counters: &Arc<Counters>, what: &str) -> Result<Self> {
        let out_of_memory = || {
            let m = format!("no host memory for {what}: free something, or use a smaller batch");
            Error::new(ErrorKind::OutOfMemory { requested: bytes as u64, available: None }, m)
        };
        let layout = Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| out_of_memory())?;
        let ptr = if bytes == 0 {
            // Aligned, never dereferenced.
            NonNull::new(core::ptr::without_provenance_mut(ALIGNMENT)).ok_or_else(out_of_memory)?
        } else {
            // Safety: the size is not 0. Zeroed, so that a mapping shows initialised bytes.
            NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(out_of_memory)?
        };
        counters.take(bytes);
        Ok(Self { ptr, layout, counters: counters.clone() })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.layout.size()
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The bytes of a block that is no longer written, such as a packed weight.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // Safety: initialised since its birth. A block that is written through its pointer is never borrowed this way.
        unsafe { core::slice::from_raw_parts(self.ptr(), self.bytes()) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.bytes() > 0 {
            // Safety: allocated in `new` with this layout.
            unsafe { dealloc(self.ptr(), self.layout) }
        }
        self.counters.give(self.bytes());
    }
}

/// A buffer in host memory.
pub(crate) struct CpuBuffer {
    block: Block,
    usage: Usage,
    state: Lock<State>,
}

struct State {
    /// `None` once frozen.
    home: Option<Arc<QueueState>>,
    readers: usize,
    writer: bool,
}

impl CpuBuffer {
    pub(crate) fn new(bytes: usize, usage: Usage, counters: &Arc<Counters>, home: &Arc<QueueState>) -> Result<Self> {
        let what = match usage {
            Usage::Weights => "a buffer of weights",
            Usage::Activations => "a buffer of activations",
            Usage::Workspace => "a workspace",
            Usage::Parameters => "a buffer of parameters",
            _ => "a buffer",
        };
        let state = State { home: Some(home.clone()), readers: 0, writer: false };
        Ok(Self { block: Block::new(bytes, counters, what)?, usage, state: Lock::new(state) })
    }

    /// The buffer behind a handle, if this backend made it.
    ///
    /// # Errors
    /// `ForeignBuffer`.
    pub(crate) fn of(buffer: &BufferRef) -> Result<&Self> {
        let foreign = || Error::new(ErrorKind::ForeignBuffer, "a buffer of another backend: allocate it on a queue of this device");
        // The object itself is asked, not `as_any`: a wrapper that forwards to one of ours is not one of ours.
        (&**buffer as &dyn core::any::Any).downcast_ref().ok_or_else(foreign)
    }

    /// The first byte. To be dereferenced only by who may touch the bytes, see above.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.block.ptr()
    }

    /// That no mapping forbids an op to use it; the caller holds the lock of its home.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub(crate) fn check_unmapped(&self) -> Result<()> {
        let s = self.state.lock();
        if s.home.is_some() && (s.writer || s.readers > 0) {
            return Err(Error::invalid("the buffer is mapped: drop the mapping first"));
        }
        Ok(())
    }

    /// Makes `to` the home of a buffer that belongs to queue `from`.
    ///
    /// # Errors
    /// `InvalidArgument` where it does not, or is frozen or mapped; the sticky error of its home.
    pub(crate) fn hand_over(&self, from: QueueId, to: &Arc<QueueState>) -> Result<()> {
        self.at_home("hand_over", |s| {
            let home = s.home.as_ref().ok_or_else(|| Error::invalid("the buffer is frozen: any queue may read it, none can own it"))?;
            if home.id != from {
                let m = format!("the event is of {from:?}, the buffer belongs to {:?}: record the event there", home.id);
                return Err(Error::invalid(m));
            }
            if s.writer || s.readers > 0 {
                return Err(Error::invalid("the buffer is mapped: drop the mapping first"));
            }
            s.home = Some(to.clone());
            Ok(())
        })
    }

    /// Runs `f` while the home queue can neither run an op nor change.
    fn at_home<R>(&self, what: &str, f: impl FnOnce(&mut State) -> Result<R>) -> Result<R> {
        loop {
            let home = self.state.lock().home.clone();
            // A frozen buffer stays frozen.
            let Some(home) = home else { return f(&mut self.state.lock()) };
            let queue = home.lock();
            let mut state = self.state.lock();
            // Handed over between the two locks: look again.
            if state.home.as_ref().is_some_and(|now| !Arc::ptr_eq(now, &home)) {
                continue;
            }
            queue.recorder.refuse(what)?;
            queue.sticky()?;
            return f(&mut state);
        }
    }

    fn check_range(&self, range: &Range<usize>) -> Result<()> {
        if range.start > range.end || range.end > self.bytes() {
            return Err(Error::invalid(format!("bytes {}..{} of a buffer of {}", range.start, range.end, self.bytes())));
        }
        Ok(())
    }
}

impl Buffer for CpuBuffer {
    fn bytes(&self) -> usize {
        self.block.bytes()
    }
    fn space(&self) -> MemorySpace {
        MemorySpace::HOST
    }
    fn usage(&self) -> Usage {
        self.usage
    }
    fn home(&self) -> Home {
        self.state.lock().home.as_ref().map_or(Home::Frozen, |q| Home::Queue(q.id))
    }

    fn freeze(&self) -> Result<()> {
        self.at_home("freeze", |s| {
            if s.writer || (s.home.is_some() && s.readers > 0) {
                return Err(Error::invalid("the buffer is mapped: drop the mapping before freezing it"));
            }
            s.home = None;
            Ok(())
        })
    }

    fn map_read(&self, range: Range<usize>) -> Result<MapRead<'_>> {
        self.check_range(&range)?;
        self.at_home("map_read", |s| {
            if s.writer {
                return Err(Error::invalid("the buffer is mapped for writing: drop that mapping first"));
            }
            s.readers += 1;
            Ok(MapRead::new(ReadGuard { buffer: self, range }))
        })
    }

    fn map_write(&self, range: Range<usize>) -> Result<MapWrite<'_>> {
        self.check_range(&range)?;
        self.at_home("map_write", |s| {
            if s.home.is_none() {
                return Err(Error::invalid("the buffer is frozen: it cannot be mapped for writing"));
            }
            if s.writer || s.readers > 0 {
                return Err(Error::invalid("the buffer is mapped already: drop that mapping first"));
            }
            s.writer = true;
            Ok(MapWrite::new(WriteGuard { buffer: self, range }))
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct ReadGuard<'a> {
    buffer: &'a CpuBuffer,
    range: Range<usize>,
}

impl Deref for ReadGuard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // Safety: the range is within the block, whose bytes are initialised; while `readers` counts this guard no op runs on a mutable
        // buffer and no write mapping begins, and a frozen buffer is never written.
        unsafe { core::slice::from_raw_parts(self.buffer.ptr().add(self.range.start), self.range.len()) }
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        self.buffer.state.lock().readers -= 1;
    }
}

struct WriteGuard<'a> {
    buffer: &'a CpuBuffer,
    range: Range<usize>,
}

impl Deref for WriteGuard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // Safety: as in `deref_mut`.
        unsafe { core::slice::from_raw_parts(self.buffer.ptr().add(self.range.start), self.range.len()) }
    }
}

impl DerefMut for WriteGuard<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // Safety: the range is within the block; while `writer` is set no op runs on the buffer and no other mapping begins.
        unsafe { core::slice::from_raw_parts_mut(self.buffer.ptr().add(self.range.start), self.range.len()) }
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        self.buffer.state.lock().writer = false;
    }
}
