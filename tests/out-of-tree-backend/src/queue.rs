//! Order, sticky errors, recording. This device runs every op inside `submit`; an asynchronous one enqueues it there instead.

use crate::{
    buffer::ToyBuffer,
    device::{ToyDevice, ToyWeight, lock},
    ops,
};
use std::{
    any::Any,
    sync::{Arc, Mutex},
    time::Duration,
};
use zofo_hal::{
    BufferRef, Device, Error, Event, EventRef, Op, Queue, QueueId, RecordingRef, Result, Support, TensorArg, Usage,
    op::OperandRef,
    record::{OpList, Recorder},
};

/// What a queue shares with the buffers that live on it.
pub(crate) struct QueueState {
    pub id: QueueId,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// The first failure; whatever comes later does not run.
    sticky: Option<Error>,
    submitted: u64,
    recorder: Recorder,
}

impl QueueState {
    /// What a host that waits for the queue gets: the failure itself.
    pub fn waited(&self, what: &str) -> Result<()> {
        let inner = lock(&self.inner);
        inner.recorder.refuse(what)?;
        inner.sticky.clone().map_or(Ok(()), Err)
    }
}

impl Inner {
    /// What those get who ask for more work after the failure: its echo.
    fn healthy(&self) -> Result<()> {
        self.sticky.as_ref().map_or(Ok(()), |e| Err(e.poisoned()))
    }

    fn run(&mut self, op: &Op<TensorArg>) -> u64 {
        let sequence = self.submitted;
        self.submitted += 1;
        if self.sticky.is_none() {
            self.sticky = ops::run(op).err().map(|e| e.with_op(op.name(), Some(sequence)).with_device("toy"));
        }
        sequence
    }
}

pub(crate) struct ToyQueue {
    device: ToyDevice,
    state: Arc<QueueState>,
}

impl ToyQueue {
    pub fn new(device: ToyDevice) -> Self {
        Self { device, state: Arc::new(QueueState { id: QueueId::unique(), inner: Mutex::default() }) }
    }

    /// Everything that is wrong with a request, found before anything runs.
    fn check(&self, op: &Op<TensorArg>) -> Result<()> {
        op.check_submit(self.state.id, self.device.space())?;
        // The table that `Device::supports` answers from.
        if let Support::Unsupported { reason, .. } = ops::supports(&op.spec()) {
            return Err(Error::unsupported(reason).with_op(op.name(), None).with_device("toy"));
        }
        let mut result = Ok(());
        op.visit(&mut |name, _, operand| {
            let checked = match operand {
                OperandRef::Tensor(t) => ToyBuffer::of(&t.buffer).and_then(ToyBuffer::check_unmapped),
                OperandRef::Weight(w) => ToyWeight::of(w).map(drop),
            };
            if let (Ok(()), Err(e)) = (&result, checked) {
                result = Err(e.context(name).with_op(op.name(), None));
            }
        });
        result
    }

    /// That the queue is not recording, for calls that need it to run.
    fn running(&self, what: &str) -> Result<()> {
        lock(&self.state.inner).recorder.refuse(what)
    }
}

impl Queue for ToyQueue {
    fn id(&self) -> QueueId {
        self.state.id
    }

    fn device(&self) -> &dyn Device {
        &self.device
    }

    fn alloc(&self, bytes: usize, usage: Usage) -> Result<BufferRef> {
        self.running("alloc")?;
        Ok(Arc::new(ToyBuffer::new(&self.device, bytes, usage, &self.state)?))
    }

    fn submit(&self, op: &Op<TensorArg>) -> Result<u64> {
        let mut inner = lock(&self.state.inner);
        inner.healthy()?;
        self.check(op)?;
        match inner.recorder.push(op) {
            Some(place) => Ok(place),
            None => Ok(inner.run(op)),
        }
    }

    fn reserve(&self, _workspace_bytes: usize) -> Result<()> {
        self.running("reserve")
    }

    fn record_event(&self) -> Result<EventRef> {
        self.running("record_event")?;
        lock(&self.state.inner).healthy()?;
        Ok(Arc::new(Done(self.state.id)))
    }

    fn wait_event(&self, event: &EventRef) -> Result<()> {
        self.running("wait_event")?;
        lock(&self.state.inner).healthy()?;
        event.wait(None)
    }

    fn hand_over(&self, buffer: &BufferRef, event: &EventRef) -> Result<()> {
        self.running("hand_over")?;
        let ours = ToyBuffer::of(buffer)?;
        if buffer.space() != self.device.space() {
            let kind = zofo_hal::ErrorKind::ForeignBuffer;
            return Err(Error::new(kind, "the buffer belongs to another device: copy it through the host"));
        }
        event.wait(None)?;
        ours.hand_over(event.queue(), &self.state)
    }

    fn synchronize(&self, _timeout: Option<Duration>) -> Result<()> {
        self.state.waited("synchronize")
    }

    fn reset(&self) -> Result<()> {
        let mut inner = lock(&self.state.inner);
        inner.sticky = None;
        inner.recorder.cancel();
        Ok(())
    }

    fn begin_recording(&self) -> Result<()> {
        let mut inner = lock(&self.state.inner);
        inner.healthy()?;
        inner.recorder.begin()
    }

    fn end_recording(&self) -> Result<RecordingRef> {
        lock(&self.state.inner).recorder.end(self.state.id)
    }

    fn replay(&self, recording: &RecordingRef) -> Result<()> {
        let mut inner = lock(&self.state.inner);
        inner.recorder.refuse("replay")?;
        inner.healthy()?;
        let ops = OpList::of(recording, self.state.id)?;
        // Homes and mappings may have changed since it was recorded: all of it runs, or nothing.
        ops.iter().try_for_each(|op| self.check(op))?;
        for op in ops {
            inner.run(op);
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.state.waited("close")
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
