//! Queues of the reference device: every op runs within `submit`.

use super::buffer::RefBuffer;
use super::device::Reference;
use super::kernels;
use super::operand::Memory;
use super::weight::RefWeight;
use crate::{
    BufferRef, Device, Error, Event, EventRef, Op, Queue, QueueId, RecordingRef, Result, Support, TensorArg, Usage, WeightRef,
    op::OperandRef,
    record::{OpList, Recorder},
    sync::{Mutex, MutexGuard},
};
use alloc::{borrow::ToOwned, boxed::Box, sync::Arc};
use core::{any::Any, ops::Range, time::Duration};

/// What a queue shares with its buffers.
pub(super) struct QueueState {
    pub id: QueueId,
    state: Mutex<State>,
}

impl QueueState {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[derive(Default)]
pub(super) struct State {
    sticky: Option<Error>,
    submitted: u64,
    pub recorder: Recorder,
    reserved: usize,
}

impl State {
    /// The sticky error.
    fn sticky(&self) -> Result<()> {
        self.sticky.clone().map_or(Ok(()), Err)
    }

    /// What waiting for the queue, in order to do `what`, gives.
    pub fn waited(&self, what: &str) -> Result<()> {
        self.recorder.refuse(what)?;
        self.sticky()
    }

    /// The sticky error, as those get it who come after the failure.
    fn poisoned(&self) -> Result<()> {
        self.sticky.as_ref().map_or(Ok(()), |e| Err(e.poisoned()))
    }
}

/// A queue.
pub(super) struct RefQueue {
    device: Reference,
    shared: Arc<QueueState>,
}

/// Kernels reach buffers by their handles; `check_operands` has seen that all are of this backend.
struct HostMemory;

impl Memory for HostMemory {
    fn read(&self, buffer: &BufferRef, bytes: Range<usize>, f: &mut dyn FnMut(&[u8])) -> Result<()> {
        RefBuffer::of(buffer).map(|b| b.read(bytes, f))
    }
    fn write(&self, buffer: &BufferRef, bytes: Range<usize>, f: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        RefBuffer::of(buffer).map(|b| b.write(bytes, f))
    }
    fn weight(&self, weight: &WeightRef) -> Result<Arc<[f32]>> {
        RefWeight::of(&**weight)
    }
}

impl RefQueue {
    pub fn new(device: Reference) -> Self {
        Self { device, shared: Arc::new(QueueState { id: QueueId::unique(), state: Mutex::default() }) }
    }

    /// Everything that is the caller's fault.
    fn check(&self, op: &Op<TensorArg>) -> Result<()> {
        op.check_submit(self.shared.id, self.device.space())?;
        if let Support::Unsupported { reason, .. } = self.device.supports(&op.spec()) {
            return Err(Error::unsupported(reason));
        }
        let mut result = Ok(());
        op.visit(&mut |name, _, operand| {
            if result.is_ok() {
                let checked = match operand {
                    OperandRef::Tensor(t) => RefBuffer::of(&t.buffer).and_then(RefBuffer::check_unmapped),
                    OperandRef::Weight(w) => RefWeight::of(&**w).map(drop),
                };
                result = checked.map_err(|e| e.context(name));
            }
        });
        result
    }

    fn named(&self, op: &Op<TensorArg>, sequence: Option<u64>, e: Error) -> Error {
        e.with_op(op.name(), sequence).with_device(self.device.info().name.to_owned())
    }

    fn run(&self, state: &mut State, op: &Op<TensorArg>) -> u64 {
        let sequence = state.submitted;
        state.submitted += 1;
        // After a failure within a replay the rest never runs.
        if state.sticky.is_none()
            && let Err(e) = kernels::run(op, &HostMemory)
        {
            state.sticky = Some(self.named(op, Some(sequence), e));
        }
        sequence
    }

    /// The state of a queue that is asked to wait or to allocate.
    fn running(&self, what: &str) -> Result<MutexGuard<'_, State>> {
        let state = self.shared.lock();
        state.recorder.refuse(what)?;
        Ok(state)
    }
}

impl Queue for RefQueue {
    fn id(&self) -> QueueId {
        self.shared.id
    }
    fn device(&self) -> &dyn Device {
        &self.device
    }

    fn alloc(&self, bytes: usize, usage: Usage) -> Result<BufferRef> {
        drop(self.running("alloc")?);
        let buffer = RefBuffer::new(bytes, usage, self.device.space(), self.device.allocator(), &self.shared);
        Ok(Arc::new(buffer.map_err(|e| e.with_device(self.device.info().name.to_owned()))?))
    }

    fn submit(&self, op: &Op<TensorArg>) -> Result<u64> {
        let mut state = self.shared.lock();
        state.poisoned()?;
        self.check(op).map_err(|e| self.named(op, None, e))?;
        match state.recorder.push(op) {
            Some(place) => Ok(place),
            None => Ok(self.run(&mut state, op)),
        }
    }

    fn reserve(&self, workspace_bytes: usize) -> Result<()> {
        let mut state = self.running("reserve")?;
        if let Some(more) = workspace_bytes.checked_sub(state.reserved).filter(|more| *more > 0) {
            self.device.allocator().lock().take(more, "a workspace")?;
            state.reserved = workspace_bytes;
        }
        Ok(())
    }

    fn record_event(&self) -> Result<EventRef> {
        self.running("record_event")?.poisoned()?;
        Ok(Arc::new(Done(self.shared.id)))
    }

    fn wait_event(&self, event: &EventRef) -> Result<()> {
        self.running("wait_event")?.poisoned()?;
        event.wait(None)
    }

    fn hand_over(&self, buffer: &BufferRef, event: &EventRef) -> Result<()> {
        self.running("hand_over")?.poisoned()?;
        let ours = RefBuffer::of(buffer)?;
        if buffer.space() != self.device.space() {
            let m = alloc::format!("the buffer is in {:?}, the queue works in {:?}", buffer.space(), self.device.space());
            return Err(Error::new(crate::ErrorKind::ForeignBuffer, m));
        }
        event.wait(None)?;
        ours.hand_over(event.queue(), &self.shared)
    }

    fn synchronize(&self, _timeout: Option<Duration>) -> Result<()> {
        self.running("synchronize")?.sticky()
    }

    fn reset(&self) -> Result<()> {
        let mut state = self.shared.lock();
        state.sticky = None;
        state.recorder.cancel();
        Ok(())
    }

    fn begin_recording(&self) -> Result<()> {
        let mut state = self.shared.lock();
        state.poisoned()?;
        state.recorder.begin()
    }

    fn end_recording(&self) -> Result<RecordingRef> {
        self.shared.lock().recorder.end(self.shared.id)
    }

    fn replay(&self, recording: &RecordingRef) -> Result<()> {
        let mut state = self.running("replay")?;
        state.poisoned()?;
        let ops = OpList::of(recording, self.shared.id)?;
        // Homes and mappings may have changed since: all of it runs, or nothing.
        ops.iter().try_for_each(|op| self.check(op).map_err(|e| self.named(op, None, e)))?;
        for op in ops {
            self.run(&mut state, op);
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.shared.lock().sticky()
    }
}

impl Drop for RefQueue {
    fn drop(&mut self) {
        let reserved = core::mem::take(&mut self.shared.lock().reserved);
        self.device.allocator().lock().give(reserved);
    }
}

/// An event of a queue whose ops are done as soon as they are submitted.
struct Done(QueueId);

impl Event for Done {
    fn is_complete(&self) -> bool {
        true
    }
    fn wait(&self, _timeout: Option<Duration>) -> Result<()> {
        Ok(())
    }
    fn queue(&self) -> QueueId {
        self.0
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
