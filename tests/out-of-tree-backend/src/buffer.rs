//! Memory, its home, and how the host looks into it.

use crate::{
    device::{ToyDevice, Words, lock},
    queue::QueueState,
};
use std::{
    any::Any,
    mem,
    ops::{Deref, DerefMut, Range},
    sync::{Arc, Mutex},
};
use zofo_hal::{Buffer, BufferRef, Device, Error, ErrorKind, Home, MapRead, MapWrite, MemorySpace, Result, Usage};

/// A buffer in host memory.
pub(crate) struct ToyBuffer {
    device: ToyDevice,
    bytes: usize,
    usage: Usage,
    cell: Mutex<Cell>,
}

struct Cell {
    /// The queue that owns it; `None` once frozen.
    home: Option<Arc<QueueState>>,
    words: Arc<Words>,
    readers: usize,
    written: bool,
}

impl ToyBuffer {
    pub fn new(device: &ToyDevice, bytes: usize, usage: Usage, home: &Arc<QueueState>) -> Result<Self> {
        let words = Arc::new(device.allocate(bytes)?);
        let cell = Cell { home: Some(home.clone()), words, readers: 0, written: false };
        Ok(Self { device: device.clone(), bytes, usage, cell: Mutex::new(cell) })
    }

    /// The buffer behind a handle, if this backend made it. The space alone does not tell: anybody can name one.
    pub fn of(buffer: &BufferRef) -> Result<&Self> {
        let foreign = || Error::new(ErrorKind::ForeignBuffer, "a buffer of another backend: allocate it on this device's queue");
        buffer.as_any().downcast_ref().ok_or_else(foreign)
    }

    /// That an op may use it now.
    pub fn check_unmapped(&self) -> Result<()> {
        lock(&self.cell).check_unmapped()
    }

    /// Reads for a kernel.
    pub fn read<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        f(bytemuck::cast_slice(&lock(&self.cell).words))
    }

    /// Writes for a kernel.
    pub fn write<R>(&self, f: impl FnOnce(&mut [u8]) -> R) -> R {
        f(bytemuck::cast_slice_mut(Arc::make_mut(&mut lock(&self.cell).words).as_mut_slice()))
    }

    /// Moves it to the queue `to`; `from` is the queue of the event.
    pub fn hand_over(&self, from: zofo_hal::QueueId, to: &Arc<QueueState>) -> Result<()> {
        let mut cell = lock(&self.cell);
        cell.check_unmapped()?;
        match &cell.home {
            None => Err(Error::invalid("the buffer is frozen: any queue may read it, none can own it")),
            Some(home) if home.id != from => {
                Err(Error::invalid(format!("the event is of {from:?}, the buffer belongs to {:?}: record the event there", home.id)))
            }
            Some(_) => {
                cell.home = Some(to.clone());
                Ok(())
            }
        }
    }

    /// What host access needs: a range inside the buffer, and a home queue that is neither recording nor failed.
    fn access(&self, what: &str, range: &Range<usize>) -> Result<()> {
        if range.start > range.end || range.end > self.bytes {
            return Err(Error::invalid(format!("{what} of bytes {}..{} of a buffer of {}", range.start, range.end, self.bytes)));
        }
        // Not under the lock of the cell: a queue that runs an op locks its state first, then the buffers.
        let home = lock(&self.cell).home.clone();
        home.map_or(Ok(()), |home| home.waited(what))
    }
}

impl Cell {
    fn check_unmapped(&self) -> Result<()> {
        if self.readers > 0 || self.written {
            return Err(Error::invalid("the buffer is mapped: drop the mapping first"));
        }
        Ok(())
    }
}

impl Buffer for ToyBuffer {
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn space(&self) -> MemorySpace {
        self.device.space()
    }
    fn usage(&self) -> Usage {
        self.usage
    }
    fn home(&self) -> Home {
        lock(&self.cell).home.as_ref().map_or(Home::Frozen, |home| Home::Queue(home.id))
    }

    fn freeze(&self) -> Result<()> {
        self.access("freeze", &(0..0))?;
        let mut cell = lock(&self.cell);
        cell.check_unmapped()?;
        cell.home = None;
        Ok(())
    }

    fn map_read(&self, range: Range<usize>) -> Result<MapRead<'_>> {
        self.access("map_read", &range)?;
        let mut cell = lock(&self.cell);
        if cell.written {
            return Err(Error::invalid("the buffer is mapped for writing: drop that mapping first"));
        }
        cell.readers += 1;
        Ok(MapRead::new(Reading { buffer: self, words: cell.words.clone(), range }))
    }

    fn map_write(&self, range: Range<usize>) -> Result<MapWrite<'_>> {
        self.access("map_write", &range)?;
        let mut cell = lock(&self.cell);
        cell.check_unmapped()?;
        if cell.home.is_none() {
            return Err(Error::invalid("the buffer is frozen: it cannot be mapped for writing"));
        }
        cell.written = true;
        // The mapping takes the memory, so that its borrow needs no lock; nothing else may look until it is back.
        Ok(MapWrite::new(Writing { buffer: self, words: mem::take(&mut cell.words), range }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for ToyBuffer {
    fn drop(&mut self) {
        self.device.free(self.bytes);
    }
}

struct Reading<'a> {
    buffer: &'a ToyBuffer,
    words: Arc<Words>,
    range: Range<usize>,
}

impl Deref for Reading<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.range.clone()]
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        // Before the count falls, so that the next writer finds the memory unshared and does not copy it.
        self.words = Arc::default();
        lock(&self.buffer.cell).readers -= 1;
    }
}

struct Writing<'a> {
    buffer: &'a ToyBuffer,
    words: Arc<Words>,
    range: Range<usize>,
}

impl Deref for Writing<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.range.clone()]
    }
}

impl DerefMut for Writing<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(Arc::make_mut(&mut self.words).as_mut_slice())[self.range.clone()]
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut cell = lock(&self.buffer.cell);
        cell.words = mem::take(&mut self.words);
        cell.written = false;
    }
}
