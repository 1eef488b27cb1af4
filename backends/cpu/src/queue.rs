//! An eager queue: an op has run when its submit returns.

use crate::{
    device::Core,
    kernels::{self, Context},
    memory::{Block, CpuBuffer},
    sync::Lock,
    weight::CpuWeight,
};
use alloc::{boxed::Box, format, sync::Arc};
use core::{any::Any, time::Duration};
use zofo_hal::{
    BufferRef, Device, Error, ErrorKind, Event, EventRef, MemorySpace, Op, Queue, QueueId, RecordingRef, Result, Support, TensorArg, Usage,
    op::OperandRef,
    record::{OpList, Recorder},
};

/// What a queue shares with its buffers. Its lock is held while an op runs.
pub(crate) struct QueueState {
    pub(crate) id: QueueId,
    state: Lock<State>,
}

impl QueueState {
    pub(crate) fn lock(&self) -> impl core::ops::DerefMut<Target = State> + '_ {
        self.state.lock()
    }
}

pub(crate) struct State {
    sticky: Option<Error>,
    submitted: u64,
    pub(crate) recorder: Recorder,
    /// Scratch; grows to the largest op, so a steady state allocates nothing.
    workspace: Block,
}

impl State {
    /// The error that stuck.
    pub(crate) fn sticky(&self) -> Result<()> {
        self.sticky.clone().map_or(Ok(()), Err)
    }

    /// The error that stuck, as those get it who come after the failure.
    fn poisoned(&self) -> Result<()> {
        self.sticky.as_ref().map_or(Ok(()), |e| Err(e.poisoned()))
    }
}

pub(crate) struct CpuQueue {
    device: Arc<dyn Device>,
    core: Arc<Core>,
    shared: Arc<QueueState>,
}

impl CpuQueue {
    pub(crate) fn new(device: Arc<dyn Device>, core: Arc<Core>) -> Result<Self> {
        let workspace = Block::new(0, &core.counters, "a workspace")?;
        let state = State { sticky: None, submitted: 0, recorder: Recorder::default(), workspace };
        Ok(Self { device, core, shared: Arc::new(QueueState { id: QueueId::unique(), state: Lock::new(state) }) })
    }

    /// Everything that is the caller's fault. The caller holds the queue's lock, so what is seen here holds until the op has run.
    fn check(&self, op: &Op<TensorArg>) -> Result<()> {
        op.check_submit(self.shared.id, MemorySpace::HOST)?;
        if let Support::Unsupported { reason, .. } = kernels::supports(op) {
            return Err(Error::unsupported(reason));
        }
        let mut result = Ok(());
        op.visit(&mut |name, _, operand| {
            if result.is_ok() {
                let checked = match operand {
                    OperandRef::Tensor(t) => CpuBuffer::of(&t.buffer).and_then(CpuBuffer::check_unmapped),
                    OperandRef::Weight(w) => CpuWeight::of(w).map(drop),
                };
                result = checked.map_err(|e| e.context(name));
            }
        });
        result
    }

    /// Makes room for the scratch of `op`.
    fn make_room(&self, state: &mut State, op: &Op<TensorArg>) -> Result<()> {
        self.grow(state, kernels::workspace(op, &self.core))
    }

    fn grow(&self, state: &mut State, bytes: usize) -> Result<()> {
        if bytes > state.workspace.bytes() {
            // The old block goes first: its contents are of no use.
            state.workspace = Block::new(0, &self.core.counters, "a workspace")?;
            state.workspace = Block::new(bytes, &self.core.counters, "a workspace")?;
        }
        Ok(())
    }

    fn named(&self, op: &Op<TensorArg>, sequence: Option<u64>, e: Error) -> Error {
        e.with_op(op.name(), sequence).with_device(self.core.info.name.clone())
    }

    fn run(&self, state: &mut State, op: &Op<TensorArg>) -> u64 {
        let sequence = state.submitted;
        state.submitted += 1;
        // After a failure within a replay the rest never runs.
        if state.sticky.is_none() {
            let cx = Context::new(&self.core, &state.workspace);
            // Safety: `check` and `make_room` have passed under the lock that is still held.
            if let Err(e) = unsafe { kernels::run(op, &cx) } {
                state.sticky = Some(self.named(op, Some(sequence), e));
            }
        }
        sequence
    }

    /// The state of a queue that is asked for something it cannot do while recording.
    fn running(&self, what: &str) -> Result<impl core::ops::DerefMut<Target = State> + '_> {
        let state = self.shared.lock();
        state.recorder.refuse(what)?;
        Ok(state)
    }
}

impl Queue for CpuQueue {
    fn id(&self) -> QueueId {
        self.shared.id
    }
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn alloc(&self, bytes: usize, usage: Usage) -> Result<BufferRef> {
        drop(self.running("alloc")?);
        let buffer = CpuBuffer::new(bytes, usage, &self.core.counters, &self.shared);
        Ok(Arc::new(buffer.map_err(|e| e.with_device(self.core.info.name.clone()))?))
    }

    fn submit(&self, op: &Op<TensorArg>) -> Result<u64> {
        let mut state = self.shared.lock();
        state.poisoned()?;
        self.check(op).map_err(|e| self.named(op, None, e))?;
        self.make_room(&mut state, op).map_err(|e| self.named(op, None, e))?;
        if let Some(place) = state.recorder.push(op) {
            return Ok(place);
        }
        Ok(self.run(&mut state, op))
    }

    fn reserve(&self, workspace_bytes: usize) -> Result<()> {
        let mut state = self.running("reserve")?;
        self.grow(&mut state, workspace_bytes).map_err(|e| e.with_device(self.core.info.name.clone()))
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
        if buffer.space() != MemorySpace::HOST {
            let m = format!("the buffer is in {:?}, the queue works in {:?}", buffer.space(), MemorySpace::HOST);
            return Err(Error::new(ErrorKind::ForeignBuffer, m));
        }
        let ours = CpuBuffer::of(buffer)?;
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
        for op in ops {
            self.check(op).and_then(|()| self.make_room(&mut state, op)).map_err(|e| self.named(op, None, e))?;
        }
        for op in ops {
            self.run(&mut state, op);
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.shared.lock().sticky()
    }
}

impl Drop for CpuQueue {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        // An unfinished recording holds buffers, which hold this state.
        state.recorder.cancel();
        // Buffers may outlive the queue; its scratch need not.
        if let Ok(empty) = Block::new(0, &self.core.counters, "a workspace") {
            state.workspace = empty;
        }
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
