//! Events of the hostile device.

use super::scheduler::{Shared, timed_out};
use crate::{Error, Event, QueueId, Result, sync::Mutex};
use alloc::sync::Arc;
use core::{any::Any, time::Duration};
use std::time::Instant;

/// How far the queue got.
#[derive(Clone, Debug, Default)]
pub(super) enum Status {
    #[default]
    Pending,
    Done,
    /// An op before the event failed, or the queue was reset.
    Failed(Error),
}

/// A point in a queue's order.
pub(super) struct HostileEvent {
    pub shared: Arc<Shared>,
    pub queue: QueueId,
    /// Commands of the queue up to and including this one.
    pub ticket: u64,
    /// Locked while the scheduler is locked, never the other way round.
    pub status: Mutex<Status>,
}

impl HostileEvent {
    pub fn status(&self) -> Status {
        self.status.lock().clone()
    }

    pub fn is_pending(&self) -> bool {
        matches!(*self.status.lock(), Status::Pending)
    }

    pub fn settle(&self, status: Status) {
        *self.status.lock() = status;
    }
}

impl Event for HostileEvent {
    /// Asking helps a little, or nobody who polls would ever see an end.
    fn is_complete(&self) -> bool {
        let mut sched = self.shared.lock();
        if self.is_pending() && sched.chance(2) {
            sched.demand(self.queue, self.ticket);
            self.shared.changed.notify_all();
        }
        !self.is_pending()
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut sched = self.shared.lock();
        sched.demand(self.queue, self.ticket);
        self.shared.changed.notify_all();
        let (_sched, in_time) = self.shared.wait_until(sched, deadline, |_| !self.is_pending());
        match self.status() {
            Status::Failed(e) => Err(e),
            _ if !in_time => Err(self.shared.named(timed_out("an event"))),
            _ => Ok(()),
        }
    }

    fn queue(&self) -> QueueId {
        self.queue
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
