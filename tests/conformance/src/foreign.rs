//! Handles of a backend that does not exist, to see what a device does with what is not its own.

use std::{any::Any, ops::Range, time::Duration};
use zofo_hal::{
    Buffer, DType, Error, Event, Home, MapRead, MapWrite, MemorySpace, QueueId, Recording, Result, Usage, Uses, Weight, WeightSpec,
};

/// A buffer that claims the device's own space and queue, so that only a check of its type can tell.
pub struct ForeignBuffer {
    pub space: MemorySpace,
    pub home: QueueId,
    pub bytes: usize,
}

impl Buffer for ForeignBuffer {
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn space(&self) -> MemorySpace {
        self.space
    }
    fn usage(&self) -> Usage {
        Usage::Activations
    }
    fn home(&self) -> Home {
        Home::Queue(self.home)
    }
    fn freeze(&self) -> Result<()> {
        Err(Error::invalid("a foreign buffer"))
    }
    fn map_read(&self, _: Range<usize>) -> Result<MapRead<'_>> {
        Err(Error::invalid("a foreign buffer"))
    }
    fn map_write(&self, _: Range<usize>) -> Result<MapWrite<'_>> {
        Err(Error::invalid("a foreign buffer"))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An f32 weight `[4, 4]` that claims the device's own space.
pub struct ForeignWeight(pub MemorySpace);

impl Weight for ForeignWeight {
    fn spec(&self) -> WeightSpec {
        WeightSpec { dtype: DType::F32, rows: 4, cols: 4, uses: Uses::ALL }
    }
    fn bytes(&self) -> usize {
        64
    }
    fn space(&self) -> MemorySpace {
        self.0
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An event of another backend, which is complete.
pub struct ForeignEvent(pub QueueId);

impl Event for ForeignEvent {
    fn is_complete(&self) -> bool {
        true
    }
    fn wait(&self, _: Option<Duration>) -> Result<()> {
        Ok(())
    }
    fn queue(&self) -> QueueId {
        self.0
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A recording of another backend.
pub struct ForeignRecording;

impl Recording for ForeignRecording {
    fn len(&self) -> usize {
        1
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
