//! Device memory behind fake addresses.

use super::buffer::HostileBuffer;
use super::scheduler::Shared;
use crate::reference::{operand::Memory, storage::Block};
use crate::{BufferRef, Error, ErrorKind, MemorySpace, Result, Weight, WeightRef, WeightSpec};
use alloc::{collections::BTreeMap, sync::Arc, vec::Vec};
use core::{any::Any, ops::Range};

/// What freed memory holds: NaN as f32, an index past the end of anything, and easily seen in a dump.
const FREED: [u8; 4] = 0xFFFF_DEAD_u32.to_le_bytes();
/// Freed blocks kept for reuse.
const RECYCLED: usize = 16;
/// Not a canonical x86 address, and past the end of any other machine's.
const FIRST_ADDRESS: u64 = 0xDEAD_0000_0000_0000;
const STEP: u64 = 1 << 20;

/// Buffers and weights by address.
#[derive(Default)]
pub(super) struct Table {
    blocks: BTreeMap<u64, Block>,
    weights: BTreeMap<u64, Arc<[f32]>>,
    recycled: Vec<Block>,
    given: u64,
}

impl Table {
    fn address(&mut self) -> u64 {
        self.given += 1;
        FIRST_ADDRESS + self.given * STEP
    }

    /// A new block: a freed one of that size, with what its last owner's death left in it, or a fresh one.
    pub fn alloc(&mut self, bytes: usize) -> Result<u64> {
        let recycled = self.recycled.iter().position(|b| b.bytes().len() == bytes);
        let block = recycled.map_or_else(|| Block::new(bytes), |i| Ok(self.recycled.swap_remove(i)))?;
        let address = self.address();
        self.blocks.insert(address, block);
        Ok(address)
    }

    pub fn free(&mut self, address: u64) {
        if let Some(mut block) = self.blocks.remove(&address) {
            block.fill(FREED);
            self.recycled.truncate(RECYCLED - 1);
            self.recycled.insert(0, block);
        }
    }

    pub fn block(&mut self, address: u64) -> Result<&mut Block> {
        self.blocks.get_mut(&address).ok_or_else(|| no_memory_at(address))
    }
}

fn no_memory_at(address: u64) -> Error {
    Error::execution(alloc::format!("no memory at {address:#x}"))
}

/// A weight that is a number in its table.
pub(super) struct HostileWeight {
    shared: Arc<Shared>,
    spec: WeightSpec,
    address: u64,
}

impl HostileWeight {
    pub fn new(shared: &Arc<Shared>, spec: &WeightSpec, values: Vec<f32>) -> Result<Self> {
        shared.allocator.lock().take(values.len() * 4, "a weight")?;
        let mut table = shared.memory.lock();
        let address = table.address();
        table.weights.insert(address, values.into());
        Ok(Self { shared: shared.clone(), spec: *spec, address })
    }

    /// The weight of this kind behind a handle.
    pub fn of(weight: &dyn Weight) -> Result<&Self> {
        let foreign = || Error::new(ErrorKind::ForeignBuffer, "a weight of another backend: import it on this device");
        weight.as_any().downcast_ref().ok_or_else(foreign)
    }
}

impl Weight for HostileWeight {
    fn spec(&self) -> WeightSpec {
        self.spec
    }
    fn bytes(&self) -> usize {
        self.spec.rows * self.spec.cols * 4
    }
    fn space(&self) -> MemorySpace {
        self.shared.space
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for HostileWeight {
    fn drop(&mut self) {
        self.shared.memory.lock().weights.remove(&self.address);
        self.shared.allocator.lock().give(self.bytes());
    }
}

/// The worker's view of memory.
pub(super) struct WorkerMemory<'a>(pub &'a Shared);

impl Memory for WorkerMemory<'_> {
    fn read(&self, buffer: &BufferRef, bytes: Range<usize>, f: &mut dyn FnMut(&[u8])) -> Result<()> {
        let address = HostileBuffer::of(buffer)?.address();
        f(&self.0.memory.lock().block(address)?.bytes()[bytes]);
        Ok(())
    }
    fn write(&self, buffer: &BufferRef, bytes: Range<usize>, f: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let address = HostileBuffer::of(buffer)?.address();
        f(&mut self.0.memory.lock().block(address)?.bytes_mut()[bytes]);
        Ok(())
    }
    fn weight(&self, weight: &WeightRef) -> Result<Arc<[f32]>> {
        let address = HostileWeight::of(&**weight)?.address;
        self.0.memory.lock().weights.get(&address).cloned().ok_or_else(|| no_memory_at(address))
    }
}
