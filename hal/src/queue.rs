//! Queues, events and recordings: order, errors, replay.

use crate::{BufferRef, Device, Op, Result, TensorArg, Usage};
use alloc::{boxed::Box, sync::Arc};
use core::{any::Any, time::Duration};

/// A shared handle to an [`Event`].
pub type EventRef = Arc<dyn Event>;
/// A shared handle to a [`Recording`].
pub type RecordingRef = Arc<dyn Recording>;

/// Names a queue for the lifetime of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId(pub u64);

impl QueueId {
    /// An identifier unlike any other of this process.
    pub fn unique() -> Self {
        Self(crate::unique::next())
    }
}

/// A point in a queue's order.
pub trait Event: Send + Sync + Any {
    /// Whether everything before it is done.
    fn is_complete(&self) -> bool;
    /// Waits on the host.
    ///
    /// # Errors
    /// `Timeout`; the sticky error of the queue if it arose before the event.
    fn wait(&self, timeout: Option<Duration>) -> Result<()>;
    /// The queue it was recorded on.
    fn queue(&self) -> QueueId;
    /// For the backend's own downcast.
    fn as_any(&self) -> &dyn Any;
}

/// Ops recorded once and replayed with other parameter values.
pub trait Recording: Send + Sync + Any {
    /// Number of ops.
    fn len(&self) -> usize;
    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// For the backend's own downcast.
    fn as_any(&self) -> &dyn Any;
}

/// An in-order, possibly asynchronous stream of ops.
///
/// # Errors
/// `submit` reports what is wrong with the request. What goes wrong while an op runs sticks to the queue with the op's name and sequence
/// number, fails later submits with `Execution { poisoned: true }`, and is returned by [`synchronize`](Self::synchronize), by event waits
/// and by mappings of the queue's buffers, until [`reset`](Self::reset) clears it or answers `DeviceLost`.
pub trait Queue: Send + Sync {
    /// Its name.
    fn id(&self) -> QueueId;
    /// Its device.
    fn device(&self) -> &dyn Device;
    /// A buffer of `bytes` (0 is allowed) whose home is this queue. Contents are unspecified.
    ///
    /// # Errors
    /// `OutOfMemory`; `InvalidArgument` while recording.
    fn alloc(&self, bytes: usize, usage: Usage) -> Result<BufferRef>;
    /// Runs or enqueues `op`; returns its sequence number.
    ///
    /// # Errors
    /// `InvalidArgument` where [`Op::check`] or the buffers' homes, ranges or overlap are wrong; `ForeignBuffer`; `Unsupported`;
    /// the poisoned sticky error.
    fn submit(&self, op: &Op<TensorArg>) -> Result<u64>;
    /// Scratch for the largest op to come, so that a steady-state step allocates nothing.
    ///
    /// # Errors
    /// `OutOfMemory`.
    fn reserve(&self, workspace_bytes: usize) -> Result<()>;
    /// The point after everything submitted so far.
    ///
    /// # Errors
    /// The poisoned sticky error.
    fn record_event(&self) -> Result<EventRef>;
    /// Ops submitted from now on start after `event`, which may be of another queue or backend.
    ///
    /// # Errors
    /// The poisoned sticky error, or the error of the event's queue.
    fn wait_event(&self, event: &EventRef) -> Result<()>;
    /// Makes this queue the home of `buffer` once `event`, recorded on the old home after its last use, is done.
    ///
    /// # Errors
    /// `InvalidArgument` for a frozen buffer or an event of a queue that is not its home; `ForeignBuffer`.
    fn hand_over(&self, buffer: &BufferRef, event: &EventRef) -> Result<()>;
    /// Waits for everything submitted.
    ///
    /// # Errors
    /// `Timeout`; the sticky error.
    fn synchronize(&self, timeout: Option<Duration>) -> Result<()>;
    /// Drops what has not run and clears the sticky error.
    ///
    /// # Errors
    /// `DeviceLost` where the device cannot go on.
    fn reset(&self) -> Result<()>;
    /// From now on submits are recorded, not run; allocation, mapping and waiting are refused until [`end_recording`](Self::end_recording).
    ///
    /// # Errors
    /// `InvalidArgument` while recording already; `Unsupported`.
    fn begin_recording(&self) -> Result<()>;
    /// The ops since [`begin_recording`](Self::begin_recording).
    ///
    /// # Errors
    /// `InvalidArgument` while not recording.
    fn end_recording(&self) -> Result<RecordingRef>;
    /// Runs or enqueues a recording made on this queue; parameter buffers are read as they are when each op runs.
    ///
    /// # Errors
    /// As for [`submit`](Self::submit); `ForeignBuffer` for a recording of another queue.
    fn replay(&self, recording: &RecordingRef) -> Result<()>;
    /// Waits, then frees the queue. Dropping it does the same and loses the error.
    ///
    /// # Errors
    /// The sticky error.
    fn close(self: Box<Self>) -> Result<()>;
}
