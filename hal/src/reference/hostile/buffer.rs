//! Buffers of the hostile device: an address, and whose it is.

use super::scheduler::{Sched, Shared};
use crate::reference::storage::{Block, Mappings, check_range, usage_name};
use crate::{Buffer, BufferRef, Error, ErrorKind, Home, MapRead, MapWrite, MemorySpace, QueueId, Result, Usage, sync::Mutex};
use alloc::sync::Arc;
use core::{
    any::Any,
    ops::{Deref, DerefMut, Range},
};

/// A buffer.
pub(super) struct HostileBuffer {
    shared: Arc<Shared>,
    address: u64,
    bytes: usize,
    usage: Usage,
    /// Changed only while the scheduler is locked.
    state: Mutex<State>,
}

struct State {
    home: Home,
    mappings: Mappings,
}

impl HostileBuffer {
    pub fn new(shared: &Arc<Shared>, bytes: usize, usage: Usage, home: QueueId) -> Result<Self> {
        shared.allocator.lock().take(bytes, usage_name(usage))?;
        let address = shared.memory.lock().alloc(bytes);
        let address = address.inspect_err(|_| shared.allocator.lock().give(bytes))?;
        let state = Mutex::new(State { home: Home::Queue(home), mappings: Mappings::default() });
        Ok(Self { shared: shared.clone(), address, bytes, usage, state })
    }

    /// The buffer behind a handle, if this backend made it.
    pub fn of(buffer: &BufferRef) -> Result<&Self> {
        let foreign = || Error::new(ErrorKind::ForeignBuffer, "a buffer of another backend: allocate it on this device's queue");
        buffer.as_any().downcast_ref().ok_or_else(foreign)
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    /// That an op may use it now. A frozen buffer may be read while it is mapped: nothing about it can change.
    pub fn check_unmapped(&self) -> Result<()> {
        let state = self.state.lock();
        if state.mappings.is_free() || state.home == Home::Frozen {
            return Ok(());
        }
        Err(Error::invalid("the buffer is mapped: drop the mapping first"))
    }

    /// Moves it from one queue to another, while the scheduler is locked.
    pub fn hand_over(&self, _sched: &mut Sched, from: QueueId, to: QueueId) -> Result<()> {
        self.check_unmapped()?;
        let mut state = self.state.lock();
        match state.home {
            Home::Frozen => Err(Error::invalid("the buffer is frozen: any queue may read it, none can own it")),
            Home::Queue(home) if home != from => {
                let m = alloc::format!("the event is of {from:?}, the buffer belongs to {home:?}: record the event there");
                Err(Error::invalid(m))
            }
            Home::Queue(_) => {
                state.home = Home::Queue(to);
                Ok(())
            }
        }
    }

    /// What a mapping does before it touches memory: registers itself, then waits for the home queue. It registers first, so that no submit
    /// can come between.
    fn map(&self, what: &str, start: impl FnOnce(&mut State) -> Result<()>, end: impl FnOnce(&mut Mappings)) -> Result<()> {
        let sched = self.shared.lock();
        sched.alive()?;
        let home = self.state.lock().home;
        if let Home::Queue(queue) = home
            && let Some(lane) = sched.lanes.get(&queue.0)
        {
            lane.recorder.refuse(what)?;
        }
        start(&mut self.state.lock())?;
        let Home::Queue(queue) = home else { return Ok(()) };
        let (sched, _) = self.shared.drain(sched, queue, None);
        let failed = sched.lanes.get(&queue.0).map_or(Ok(()), |lane| lane.sticky());
        failed.inspect_err(|_| end(&mut self.state.lock().mappings))
    }

    /// A copy of some bytes.
    fn copy(&self, range: &Range<usize>) -> Result<Block> {
        let mut copy = Block::new(range.len())?;
        copy.bytes_mut().copy_from_slice(&self.shared.memory.lock().block(self.address)?.bytes()[range.clone()]);
        Ok(copy)
    }
}

impl Buffer for HostileBuffer {
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn space(&self) -> MemorySpace {
        self.shared.space
    }
    fn usage(&self) -> Usage {
        self.usage
    }
    fn home(&self) -> Home {
        self.state.lock().home
    }

    fn freeze(&self) -> Result<()> {
        let mut sched = self.shared.lock();
        loop {
            let Home::Queue(queue) = self.home() else { return Ok(()) };
            self.check_unmapped()?;
            let Some(lane) = sched.lanes.get(&queue.0) else { break };
            lane.recorder.refuse("freeze")?;
            lane.sticky()?;
            if lane.done >= lane.pushed {
                break;
            }
            sched = self.shared.drain(sched, queue, None).0;
        }
        self.state.lock().home = Home::Frozen;
        drop(sched);
        Ok(())
    }

    fn map_read(&self, range: Range<usize>) -> Result<MapRead<'_>> {
        check_range(&range, self.bytes)?;
        self.map("map_read", |state| state.mappings.start_read(), Mappings::end_read)?;
        let block = self.copy(&range).inspect_err(|_| self.state.lock().mappings.end_read())?;
        Ok(MapRead::new(ReadGuard { buffer: self, block }))
    }

    fn map_write(&self, range: Range<usize>) -> Result<MapWrite<'_>> {
        check_range(&range, self.bytes)?;
        let start = |state: &mut State| match state.home {
            Home::Frozen => Err(Error::invalid("the buffer is frozen: it cannot be mapped for writing")),
            Home::Queue(_) => state.mappings.start_write(),
        };
        self.map("map_write", start, Mappings::end_write)?;
        let block = self.copy(&range).inspect_err(|_| self.state.lock().mappings.end_write())?;
        Ok(MapWrite::new(WriteGuard { buffer: self, block, range }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for HostileBuffer {
    fn drop(&mut self) {
        self.shared.memory.lock().free(self.address);
        self.shared.allocator.lock().give(self.bytes);
    }
}

struct ReadGuard<'a> {
    buffer: &'a HostileBuffer,
    block: Block,
}

impl Deref for ReadGuard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.block.bytes()
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        self.buffer.state.lock().mappings.end_read();
    }
}

struct WriteGuard<'a> {
    buffer: &'a HostileBuffer,
    block: Block,
    range: Range<usize>,
}

impl Deref for WriteGuard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.block.bytes()
    }
}

impl DerefMut for WriteGuard<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.block.bytes_mut()
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        // The handle that the guard borrows keeps the address alive.
        if let Ok(block) = self.buffer.shared.memory.lock().block(self.buffer.address) {
            block.bytes_mut()[self.range.clone()].copy_from_slice(self.block.bytes());
        }
        self.buffer.state.lock().mappings.end_write();
    }
}
