//! Queues of the hostile device: they check, enqueue and wait.

use super::Hostile;
use super::buffer::HostileBuffer;
use super::event::{HostileEvent, Status};
use super::memory::HostileWeight;
use super::scheduler::{Command, Lane, Sched, Shared, timed_out};
use crate::{
    BufferRef, Device, Error, ErrorKind, EventRef, Op, Queue, QueueId, RecordingRef, Result, Support, TensorArg, Usage,
    op::OperandRef,
    record::OpList,
    sync::{Mutex, MutexGuard},
};
use alloc::{boxed::Box, collections::VecDeque, format, sync::Arc};
use core::{mem, time::Duration};
use std::time::Instant;

/// A queue.
pub(super) struct HostileQueue {
    device: Hostile,
    id: QueueId,
}

/// The own event behind a handle.
fn own(event: &EventRef) -> Option<&HostileEvent> {
    event.as_any().downcast_ref()
}

impl HostileQueue {
    pub fn new(device: Hostile) -> Result<Self> {
        let id = QueueId::unique();
        let mut sched = device.shared().lock();
        sched.alive()?;
        sched.lanes.insert(id.0, Lane::default());
        drop(sched);
        Ok(Self { device, id })
    }

    fn shared(&self) -> &Arc<Shared> {
        self.device.shared()
    }

    /// The scheduler, if this queue can take another command now.
    fn ready(&self, what: &str) -> Result<MutexGuard<'_, Sched>> {
        let mut sched = self.shared().lock();
        let lane = sched.lane(self.id)?;
        lane.recorder.refuse(what)?;
        lane.poisoned()?;
        sched.alive()?;
        Ok(sched)
    }

    fn named(&self, op: &Op<TensorArg>, e: Error) -> Error {
        self.shared().named(e.with_op(op.name(), None))
    }

    /// Everything that is the caller's fault. The scheduler is locked, so no mapping or hand-over comes between this and the enqueuing.
    fn check(&self, _sched: &Sched, op: &Op<TensorArg>) -> Result<()> {
        op.check_submit(self.id, self.device.space())?;
        if let Support::Unsupported { reason, .. } = self.device.supports(&op.spec()) {
            return Err(Error::unsupported(reason));
        }
        let mut result = Ok(());
        op.visit(&mut |name, _, operand| {
            if result.is_ok() {
                let checked = match operand {
                    OperandRef::Tensor(t) => HostileBuffer::of(&t.buffer).and_then(HostileBuffer::check_unmapped),
                    OperandRef::Weight(w) => HostileWeight::of(&**w).map(drop),
                };
                result = checked.map_err(|e| e.context(name));
            }
        });
        result
    }

    fn enqueue(&self, sched: &mut Sched, command: Command) -> Result<u64> {
        let ticket = sched.lane(self.id)?.push(command);
        sched.perhaps_proceed(self.id);
        self.shared().changed.notify_all();
        Ok(ticket)
    }

    fn run(&self, sched: &mut Sched, op: &Op<TensorArg>) -> Result<u64> {
        let lane = sched.lane(self.id)?;
        let sequence = lane.submitted;
        lane.submitted += 1;
        self.enqueue(sched, Command::Run(Box::new(op.clone()), sequence))?;
        Ok(sequence)
    }

    /// Waits for everything, gives up what the queue holds and forgets it.
    fn finish(&self) -> Result<()> {
        let (mut sched, _) = self.shared().drain(self.shared().lock(), self.id, None);
        let Some(lane) = sched.lanes.get_mut(&self.id.0) else { return Ok(()) };
        lane.recorder.cancel();
        let (result, reserved) = (lane.sticky(), mem::take(&mut lane.reserved));
        // A queue that failed stays known: its error is still what mapping its buffers gives.
        if result.is_ok() {
            sched.lanes.remove(&self.id.0);
        }
        drop(sched);
        self.shared().allocator.lock().give(reserved);
        result
    }
}

/// Whether `command` touches the buffer at `address`.
fn touches(command: &Command, address: u64) -> bool {
    let Command::Run(op, _) = command else { return false };
    let mut touches = false;
    op.visit(&mut |_, _, operand| {
        if let OperandRef::Tensor(t) = operand {
            touches |= HostileBuffer::of(&t.buffer).is_ok_and(|b| b.address() == address);
        }
    });
    touches
}

/// That no op of `lane` behind the event at `ticket` touches the buffer.
fn check_last_use(lane: &Lane, ticket: u64, address: u64) -> Result<()> {
    let first = lane.pushed - lane.commands.len() as u64;
    let behind = lane.commands.iter().enumerate().filter(|(i, _)| first + *i as u64 >= ticket);
    match behind.map(|(_, command)| command).find(|command| touches(command, address)) {
        Some(_) => Err(Error::invalid("the old home uses the buffer after the event: record the event after the last use")),
        None => Ok(()),
    }
}

impl Queue for HostileQueue {
    fn id(&self) -> QueueId {
        self.id
    }
    fn device(&self) -> &dyn Device {
        &self.device
    }

    fn alloc(&self, bytes: usize, usage: Usage) -> Result<BufferRef> {
        let alloc = || {
            let mut sched = self.shared().lock();
            sched.lane(self.id)?.recorder.refuse("alloc")?;
            sched.before_alloc(bytes)?;
            drop(sched);
            HostileBuffer::new(self.shared(), bytes, usage, self.id)
        };
        Ok(Arc::new(alloc().map_err(|e| self.shared().named(e))?))
    }

    fn submit(&self, op: &Op<TensorArg>) -> Result<u64> {
        let mut sched = self.shared().lock();
        sched.lane(self.id)?.poisoned()?;
        sched.alive()?;
        self.check(&sched, op).map_err(|e| self.named(op, e))?;
        if let Some(place) = sched.lane(self.id)?.recorder.push(op) {
            return Ok(place);
        }
        let sequence = self.run(&mut sched, op)?;
        drop(self.shared().limit_depth(sched, self.id));
        Ok(sequence)
    }

    fn reserve(&self, workspace_bytes: usize) -> Result<()> {
        let mut sched = self.ready("reserve")?;
        let lane = sched.lane(self.id)?;
        if let Some(more) = workspace_bytes.checked_sub(lane.reserved).filter(|more| *more > 0) {
            self.shared().allocator.lock().take(more, "a workspace").map_err(|e| self.shared().named(e))?;
            lane.reserved = workspace_bytes;
        }
        Ok(())
    }

    fn record_event(&self) -> Result<EventRef> {
        let mut sched = self.ready("record_event")?;
        let ticket = sched.lane(self.id)?.pushed + 1;
        let status = Mutex::new(Status::Pending);
        let event = Arc::new(HostileEvent { shared: self.shared().clone(), queue: self.id, ticket, status });
        self.enqueue(&mut sched, Command::Signal(event.clone()))?;
        Ok(event)
    }

    fn wait_event(&self, event: &EventRef) -> Result<()> {
        let mut sched = self.ready("wait_event")?;
        if let Some(Status::Failed(e)) = own(event).map(HostileEvent::status) {
            return Err(e);
        }
        self.enqueue(&mut sched, Command::Wait(event.clone()))?;
        Ok(())
    }

    fn hand_over(&self, buffer: &BufferRef, event: &EventRef) -> Result<()> {
        let mut sched = self.ready("hand_over")?;
        let ours = HostileBuffer::of(buffer)?;
        if buffer.space() != self.device.space() {
            let m = format!("the buffer is in {:?}, the queue works in {:?}", buffer.space(), self.device.space());
            return Err(Error::new(ErrorKind::ForeignBuffer, m));
        }
        if let Some(Status::Failed(e)) = own(event).map(HostileEvent::status) {
            return Err(e);
        }
        if let (Some(lane), Some(event)) = (sched.lanes.get(&event.queue().0), own(event)) {
            lane.recorder.refuse("hand_over")?;
            check_last_use(lane, event.ticket, ours.address())?;
        }
        ours.hand_over(&mut sched, event.queue(), self.id)?;
        self.enqueue(&mut sched, Command::Wait(event.clone()))?;
        Ok(())
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut sched = self.shared().lock();
        sched.lane(self.id)?.recorder.refuse("synchronize")?;
        let (mut sched, in_time) = self.shared().drain(sched, self.id, deadline);
        sched.lane(self.id)?.sticky()?;
        sched.alive()?;
        if in_time { Ok(()) } else { Err(self.shared().named(timed_out("the queue"))) }
    }

    fn reset(&self) -> Result<()> {
        let mut sched = self.shared().lock();
        sched.alive()?;
        let lane = sched.lane(self.id)?;
        lane.epoch += 1;
        let dropped: VecDeque<Command> = mem::take(&mut lane.commands);
        let (mut sched, _) = self.shared().wait_until(sched, None, |sched| sched.lanes.get(&self.id.0).is_none_or(|lane| !lane.busy));
        // The device may have been lost by the op that was running.
        sched.alive()?;
        let lane = sched.lane(self.id)?;
        // What another thread submitted meanwhile stays.
        lane.done = lane.pushed - lane.commands.len() as u64;
        lane.sticky = None;
        lane.recorder.cancel();
        for command in &dropped {
            if let Command::Signal(event) = command {
                event.settle(Status::Failed(self.shared().named(Error::new(ErrorKind::Cancelled, "the queue was reset before the event"))));
            }
        }
        self.shared().changed.notify_all();
        drop(sched);
        drop(dropped);
        Ok(())
    }

    fn begin_recording(&self) -> Result<()> {
        self.ready("begin_recording")?.lane(self.id)?.recorder.begin()
    }

    fn end_recording(&self) -> Result<RecordingRef> {
        self.shared().lock().lane(self.id)?.recorder.end(self.id)
    }

    fn replay(&self, recording: &RecordingRef) -> Result<()> {
        let mut sched = self.ready("replay")?;
        let ops = OpList::of(recording, self.id)?;
        // Homes and mappings may have changed since: all of it is enqueued, or nothing.
        ops.iter().try_for_each(|op| self.check(&sched, op).map_err(|e| self.named(op, e)))?;
        for op in ops {
            self.run(&mut sched, op)?;
        }
        drop(self.shared().limit_depth(sched, self.id));
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.finish()
    }
}

impl Drop for HostileQueue {
    fn drop(&mut self) {
        // Whoever wants to know the error closes the queue.
        let _ = self.finish();
    }
}
