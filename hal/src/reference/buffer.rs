//! Buffers of the reference device.

use super::queue::{QueueState, State};
use super::storage::{Allocator, Block, Mappings, check_range};
use crate::{Buffer, BufferRef, Error, ErrorKind, Home, MapRead, MapWrite, MemorySpace, Result, Usage, sync::Mutex};
use alloc::sync::Arc;
use core::{
    any::Any,
    ops::{Deref, DerefMut, Range},
};

/// A buffer in host memory, reached through the queue that owns it.
pub(super) struct RefBuffer {
    bytes: usize,
    usage: Usage,
    space: MemorySpace,
    allocator: Arc<Mutex<Allocator>>,
    cell: Mutex<Cell>,
}

struct Cell {
    /// `None` once frozen.
    home: Option<Arc<QueueState>>,
    mappings: Mappings,
    /// Shared with read mappings, taken by a write mapping.
    block: Arc<Block>,
}

impl RefBuffer {
    pub fn new(bytes: usize, usage: Usage, space: MemorySpace, allocator: &Arc<Mutex<Allocator>>, home: &Arc<QueueState>) -> Result<Self> {
        allocator.lock().take(bytes, super::storage::usage_name(usage))?;
        let block = Block::new(bytes).inspect_err(|_| allocator.lock().give(bytes))?;
        let cell = Cell { home: Some(home.clone()), mappings: Mappings::default(), block: Arc::new(block) };
        Ok(Self { bytes, usage, space, allocator: allocator.clone(), cell: Mutex::new(cell) })
    }

    /// The buffer behind a handle, if this backend made it.
    pub fn of(buffer: &BufferRef) -> Result<&Self> {
        let foreign = || Error::new(ErrorKind::ForeignBuffer, "a buffer of another backend: allocate it on this device's queue");
        // The object itself is asked, not `as_any`: a wrapper that forwards to one of ours is not one of ours.
        (&**buffer as &dyn core::any::Any).downcast_ref().ok_or_else(foreign)
    }

    /// That an op may use it now. A frozen buffer may be read while it is mapped: nothing about it can change.
    pub fn check_unmapped(&self) -> Result<()> {
        let cell = self.cell.lock();
        if cell.mappings.is_free() || cell.home.is_none() {
            return Ok(());
        }
        Err(Error::invalid("the buffer is mapped: drop the mapping first"))
    }

    pub fn read(&self, bytes: Range<usize>, f: &mut dyn FnMut(&[u8])) {
        f(&self.cell.lock().block.bytes()[bytes]);
    }

    pub fn write(&self, bytes: Range<usize>, f: &mut dyn FnMut(&mut [u8])) {
        f(&mut Arc::make_mut(&mut self.cell.lock().block).bytes_mut()[bytes]);
    }

    /// Runs `f` on the cell while the home queue, which passed `check`, can neither run an op nor change.
    fn at_home<R>(&self, check: impl Fn(&State) -> Result<()>, f: impl FnOnce(&mut Cell) -> Result<R>) -> Result<R> {
        loop {
            let home = self.cell.lock().home.clone();
            let Some(home) = home else { return f(&mut self.cell.lock()) };
            let state = home.lock();
            let mut cell = self.cell.lock();
            // Handed over between the two locks: look again.
            if cell.home.as_ref().is_none_or(|now| !Arc::ptr_eq(now, &home)) {
                continue;
            }
            check(&state)?;
            return f(&mut cell);
        }
    }

    /// Moves the buffer to another queue.
    pub fn hand_over(&self, from: crate::QueueId, to: &Arc<QueueState>) -> Result<()> {
        // What the old home did after the event, failing included, is no matter of this buffer.
        self.at_home(
            |home| home.recorder.refuse("hand_over"),
            |cell| {
                match &cell.home {
                    None => return Err(Error::invalid("the buffer is frozen: any queue may read it, none can own it")),
                    Some(home) if home.id != from => {
                        let m = alloc::format!("the event is of {from:?}, the buffer belongs to {:?}: record the event there", home.id);
                        return Err(Error::invalid(m));
                    }
                    Some(_) if !cell.mappings.is_free() => return Err(Error::invalid("the buffer is mapped: drop the mapping first")),
                    Some(_) => {}
                }
                cell.home = Some(to.clone());
                Ok(())
            },
        )
    }
}

impl Buffer for RefBuffer {
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn space(&self) -> MemorySpace {
        self.space
    }
    fn usage(&self) -> Usage {
        self.usage
    }
    fn home(&self) -> Home {
        self.cell.lock().home.as_ref().map_or(Home::Frozen, |home| Home::Queue(home.id))
    }

    fn freeze(&self) -> Result<()> {
        self.at_home(
            |home| home.waited("freeze"),
            |cell| {
                if cell.home.is_some() && !cell.mappings.is_free() {
                    return Err(Error::invalid("the buffer is mapped: drop the mapping before freezing it"));
                }
                cell.home = None;
                Ok(())
            },
        )
    }

    fn map_read(&self, range: Range<usize>) -> Result<MapRead<'_>> {
        check_range(&range, self.bytes)?;
        self.at_home(
            |home| home.waited("map_read"),
            |cell| {
                cell.mappings.start_read()?;
                Ok(MapRead::new(ReadGuard { buffer: self, block: cell.block.clone(), range }))
            },
        )
    }

    fn map_write(&self, range: Range<usize>) -> Result<MapWrite<'_>> {
        check_range(&range, self.bytes)?;
        self.at_home(
            |home| home.waited("map_write"),
            |cell| {
                if cell.home.is_none() {
                    return Err(Error::invalid("the buffer is frozen: it cannot be mapped for writing"));
                }
                cell.mappings.start_write()?;
                Ok(MapWrite::new(WriteGuard { buffer: self, block: core::mem::take(&mut cell.block), range }))
            },
        )
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for RefBuffer {
    fn drop(&mut self) {
        self.allocator.lock().give(self.bytes);
    }
}

struct ReadGuard<'a> {
    buffer: &'a RefBuffer,
    block: Arc<Block>,
    range: Range<usize>,
}

impl Deref for ReadGuard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.block.bytes()[self.range.clone()]
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        // Before the count falls, so that the next writer finds the block unshared.
        self.block = Arc::default();
        self.buffer.cell.lock().mappings.end_read();
    }
}

struct WriteGuard<'a> {
    buffer: &'a RefBuffer,
    block: Arc<Block>,
    range: Range<usize>,
}

impl Deref for WriteGuard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.block.bytes()[self.range.clone()]
    }
}

impl DerefMut for WriteGuard<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut Arc::make_mut(&mut self.block).bytes_mut()[self.range.clone()]
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        let mut cell = self.buffer.cell.lock();
        cell.block = core::mem::take(&mut self.block);
        cell.mappings.end_write();
    }
}
