//! Memory: buffers, their homes, and how the host looks into them.

use crate::{QueueId, Result};
use alloc::{boxed::Box, sync::Arc};
use core::{
    any::Any,
    fmt,
    ops::{Deref, DerefMut, Range},
};

/// A shared handle to a [`Buffer`].
pub type BufferRef = Arc<dyn Buffer>;

/// Where memory is. Devices of one host share [`MemorySpace::HOST`], so their virtual devices share one copy of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemorySpace(pub u64);

impl MemorySpace {
    /// Host memory that a CPU addresses directly.
    pub const HOST: Self = Self(0);

    /// A space unlike any other of this process, for a device with memory of its own.
    pub fn unique() -> Self {
        Self(crate::unique::next())
    }
}

/// What a buffer is for; statistics are kept per use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Usage {
    /// Frozen or trained weights.
    Weights,
    /// Activations and gradients of a step.
    Activations,
    /// Scratch of one op or decomposition.
    Workspace,
    /// Small values that the host rewrites between submits: seeds, lengths, learning rates.
    Parameters,
}

/// Who may touch a buffer now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// Only ops of this queue, and the host between them.
    Queue(QueueId),
    /// Nobody writes it any more; any queue of the space may read it.
    Frozen,
}

/// A block of device memory.
///
/// # Ownership
/// A mutable buffer has one home queue, which [`crate::Queue::submit`] checks; [`crate::Queue::hand_over`] moves it.
/// Queues keep clones of the handles that their unfinished ops use, so dropping a handle early is safe.
///
/// # Host access
/// Only through [`map_read`](Self::map_read) and [`map_write`](Self::map_write), which first wait for the queued ops that touch the
/// buffer and then lock it: a submit that needs it while it is mapped is refused with `InvalidArgument`.
/// On a CPU device a mapping is a plain borrow of the memory.
pub trait Buffer: Send + Sync + Any {
    /// Usable bytes.
    fn bytes(&self) -> usize;
    /// Where it is.
    fn space(&self) -> MemorySpace;
    /// What it is for.
    fn usage(&self) -> Usage;
    /// Who may touch it.
    fn home(&self) -> Home;
    /// Makes it read-only for good, once its queued writes are done.
    ///
    /// # Errors
    /// The sticky error of its home queue.
    fn freeze(&self) -> Result<()>;
    /// The bytes of `range`, once the queued writes to the buffer are done.
    ///
    /// # Errors
    /// `InvalidArgument` for a range outside the buffer or a buffer mapped for writing; the sticky error of its home queue.
    fn map_read(&self, range: Range<usize>) -> Result<MapRead<'_>>;
    /// The bytes of `range` to change, once the queued uses of the buffer are done. They hold the present contents; the device sees
    /// the change when the mapping is dropped.
    ///
    /// # Errors
    /// As for [`map_read`](Self::map_read); `InvalidArgument` for a frozen or mapped buffer.
    fn map_write(&self, range: Range<usize>) -> Result<MapWrite<'_>>;
    /// For the backend's own downcast.
    fn as_any(&self) -> &dyn Any;
}

impl fmt::Debug for dyn Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes, {:?}, {:?}, {:?})", self.bytes(), self.usage(), self.space(), self.home())
    }
}

/// A buffer mapped for reading.
pub struct MapRead<'a>(Box<dyn Deref<Target = [u8]> + 'a>);

impl<'a> MapRead<'a> {
    /// Wraps a backend's guard.
    pub fn new(guard: impl Deref<Target = [u8]> + 'a) -> Self {
        Self(Box::new(guard))
    }

    /// The bytes as elements of `P`.
    ///
    /// # Panics
    /// If the range is misaligned for `P` or no whole number of elements: a bug of the caller.
    pub fn cast<P: bytemuck::AnyBitPattern>(&self) -> &[P] {
        bytemuck::cast_slice(self)
    }
}

impl Deref for MapRead<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// A buffer mapped for writing; dropping it hands the bytes to the device.
pub struct MapWrite<'a>(Box<dyn DerefMut<Target = [u8]> + 'a>);

impl<'a> MapWrite<'a> {
    /// Wraps a backend's guard.
    pub fn new(guard: impl DerefMut<Target = [u8]> + 'a) -> Self {
        Self(Box::new(guard))
    }

    /// The bytes as elements of `P`.
    ///
    /// # Panics
    /// As [`MapRead::cast`].
    pub fn cast<P: bytemuck::Pod>(&mut self) -> &mut [P] {
        bytemuck::cast_slice_mut(self)
    }
}

impl Deref for MapWrite<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for MapWrite<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
