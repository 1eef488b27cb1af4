//! Who goes next: commands of all queues of a device, one worker, and chance.

use super::config::{Fault, HostileConfig};
use super::event::{HostileEvent, Status};
use super::memory::{Table, WorkerMemory};
use crate::reference::{kernels, storage::Allocator};
use crate::{
    DeviceInfo, Error, ErrorKind, EventRef, MemorySpace, Op, QueueId, Result, TensorArg,
    record::Recorder,
    sync::{Mutex, MutexGuard},
};
use alloc::{
    boxed::Box,
    collections::{BTreeMap, VecDeque},
    format,
    sync::Arc,
    vec::Vec,
};
use core::time::Duration;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Condvar,
    time::Instant,
};

/// Commands that a queue holds before `submit` waits.
const DEPTH: usize = 96;
/// How long the worker looks at an event of another device before it looks at other queues again.
const GLANCE: Duration = Duration::from_millis(1);

/// The device without its worker thread.
pub(super) struct Shared {
    pub info: DeviceInfo,
    pub space: MemorySpace,
    pub allocator: Mutex<Allocator>,
    /// Locked last, and for a moment.
    pub memory: Mutex<Table>,
    pub sched: Mutex<Sched>,
    /// Something in `sched` or in an event changed.
    pub changed: Condvar,
}

/// One step of a queue.
pub(super) enum Command {
    Run(Box<Op<TensorArg>>, u64),
    Signal(Arc<HostileEvent>),
    Wait(EventRef),
}

/// A queue, from the inside.
#[derive(Default)]
pub(super) struct Lane {
    pub commands: VecDeque<Command>,
    /// Commands enqueued, done, and wanted: the worker touches a queue only while `done < demanded`.
    pub pushed: u64,
    pub done: u64,
    demanded: u64,
    /// Whether the worker has taken a command out.
    pub busy: bool,
    /// Resets so far.
    pub epoch: u64,
    pub sticky: Option<Error>,
    pub submitted: u64,
    pub recorder: Recorder,
    pub reserved: usize,
}

impl Lane {
    pub fn push(&mut self, command: Command) -> u64 {
        self.commands.push_back(command);
        self.pushed += 1;
        self.pushed
    }

    pub fn sticky(&self) -> Result<()> {
        self.sticky.clone().map_or(Ok(()), Err)
    }

    pub fn poisoned(&self) -> Result<()> {
        self.sticky.as_ref().map_or(Ok(()), |e| Err(e.poisoned()))
    }
}

/// Everything that the lock of a device guards.
pub(super) struct Sched {
    pub lanes: BTreeMap<u64, Lane>,
    pub lost: Option<Error>,
    faults: Vec<Fault>,
    random: u64,
    ran: u64,
    ran_of: BTreeMap<&'static str, u64>,
    allocated: u64,
    imported: u64,
    stop: bool,
}

/// What fate holds for one op.
#[derive(Default)]
struct Fate {
    fails: bool,
    lost: bool,
    stall: Option<Duration>,
}

impl Sched {
    pub fn new(config: HostileConfig) -> Self {
        Self {
            lanes: BTreeMap::new(),
            lost: None,
            faults: config.faults,
            random: config.seed,
            ran: 0,
            ran_of: BTreeMap::new(),
            allocated: 0,
            imported: 0,
            stop: false,
        }
    }

    /// SplitMix64 (Steele et al. 2014).
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.random;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// True once in `n`.
    pub fn chance(&mut self, n: u64) -> bool {
        self.random().is_multiple_of(n)
    }

    /// The device, if it is not lost.
    pub fn alive(&self) -> Result<()> {
        self.lost.clone().map_or(Ok(()), Err)
    }

    /// A queue that is open.
    pub fn lane(&mut self, queue: QueueId) -> Result<&mut Lane> {
        self.lanes.get_mut(&queue.0).ok_or_else(|| Error::invalid(format!("{queue:?} is closed")))
    }

    /// From now on the worker may go as far as `ticket`.
    pub fn demand(&mut self, queue: QueueId, ticket: u64) {
        if let Some(lane) = self.lanes.get_mut(&queue.0) {
            lane.demanded = lane.demanded.max(ticket);
        }
    }

    /// Once in a while, work proceeds before anybody needs it.
    pub fn perhaps_proceed(&mut self, queue: QueueId) {
        if self.chance(4) {
            let more = 1 + self.random() % 4;
            if let Some(lane) = self.lanes.get_mut(&queue.0) {
                lane.demanded = lane.demanded.max((lane.done + more).min(lane.pushed));
            }
        }
    }

    /// Counts an allocation, which may be the one that fails.
    pub fn before_alloc(&mut self, bytes: usize) -> Result<()> {
        let nth = self.allocated;
        self.allocated += 1;
        self.may_take(bytes, &Fault::AllocFailure { nth })
    }

    /// Counts an import, which may be the one that fails.
    pub fn before_import(&mut self, bytes: usize) -> Result<()> {
        let nth = self.imported;
        self.imported += 1;
        self.may_take(bytes, &Fault::ImportFailure { nth })
    }

    fn may_take(&self, bytes: usize, fault: &Fault) -> Result<()> {
        self.alive()?;
        if self.faults.contains(fault) {
            let kind = ErrorKind::OutOfMemory { requested: bytes as u64, available: None };
            return Err(Error::new(kind, format!("injected fault {fault:?}")));
        }
        Ok(())
    }

    /// Counts an op that is about to run.
    fn fate(&mut self, op: &'static str) -> Fate {
        let nth_of = self.ran_of.entry(op).or_default();
        let (ran, ran_of) = (self.ran, *nth_of);
        self.ran += 1;
        *nth_of += 1;
        let mut fate = Fate::default();
        for fault in &self.faults {
            match *fault {
                Fault::Execution { nth } => fate.fails |= nth == ran,
                Fault::ExecutionOf { op: name, nth } => fate.fails |= name == op && nth == ran_of,
                Fault::DeviceLost { after } => fate.lost |= ran >= after,
                Fault::Stall { nth, duration } if nth == ran => fate.stall = Some(duration),
                _ => {}
            }
        }
        fate
    }

    /// The queue that goes next, if any may.
    fn choose(&mut self) -> Option<u64> {
        // A wait that is wanted makes its event wanted, and that may go on to a third queue.
        loop {
            let wanted = |lane: &Lane| match lane.commands.front() {
                Some(Command::Wait(event)) if lane.done < lane.demanded => {
                    let event = event.as_any().downcast_ref::<HostileEvent>().filter(|e| e.is_pending())?;
                    Some((event.queue.0, event.ticket))
                }
                _ => None,
            };
            let wanted: Vec<(u64, u64)> = self.lanes.values().filter_map(wanted).collect();
            let mut changed = false;
            for (queue, ticket) in wanted {
                if let Some(lane) = self.lanes.get_mut(&queue).filter(|lane| lane.demanded < ticket) {
                    lane.demanded = ticket;
                    changed = true;
                }
            }
            if !changed {
                break;
            }
        }
        let ready = |lane: &Lane| match lane.commands.front() {
            None => false,
            Some(_) if lane.done >= lane.demanded => false,
            // Events of other devices are looked at by the worker, outside the lock.
            Some(Command::Wait(event)) if lane.sticky.is_none() => {
                event.as_any().downcast_ref::<HostileEvent>().is_none_or(|e| !e.is_pending() || !self.lanes.contains_key(&e.queue.0))
            }
            Some(_) => true,
        };
        let ready: Vec<u64> = self.lanes.iter().filter(|(_, lane)| ready(lane)).map(|(id, _)| *id).collect();
        if ready.is_empty() {
            return None;
        }
        let i = self.random() % ready.len() as u64;
        Some(ready[i as usize])
    }

    /// The end of the device: every queue fails.
    fn lose(&mut self, error: &Error) {
        self.lost = Some(error.clone());
        for lane in self.lanes.values_mut() {
            lane.sticky = Some(error.clone());
            lane.demanded = lane.pushed;
        }
    }
}

/// That a wait ended too early.
pub(super) fn timed_out(what: &str) -> Error {
    Error::new(ErrorKind::Timeout, format!("{what} did not complete in time"))
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, Sched> {
        self.sched.lock()
    }

    /// Names the device in an error.
    pub fn named(&self, e: Error) -> Error {
        e.with_device(self.info.name.clone())
    }

    /// Ends the worker once the last queue is closed.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// Waits until `done`, or until the deadline; says which.
    pub fn wait_until<'a>(
        &'a self,
        mut sched: MutexGuard<'a, Sched>,
        deadline: Option<Instant>,
        mut done: impl FnMut(&mut Sched) -> bool,
    ) -> (MutexGuard<'a, Sched>, bool) {
        loop {
            if done(&mut sched) {
                return (sched, true);
            }
            sched = match deadline {
                None => self.changed.wait(sched).unwrap_or_else(std::sync::PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return (sched, false);
                    }
                    self.changed.wait_timeout(sched, left).unwrap_or_else(std::sync::PoisonError::into_inner).0
                }
            };
        }
    }

    /// Forces everything that `queue` holds now; a closed queue holds nothing.
    pub fn drain<'a>(
        &'a self,
        mut sched: MutexGuard<'a, Sched>,
        queue: QueueId,
        deadline: Option<Instant>,
    ) -> (MutexGuard<'a, Sched>, bool) {
        let Some(ticket) = sched.lanes.get(&queue.0).map(|lane| lane.pushed) else { return (sched, true) };
        sched.demand(queue, ticket);
        self.changed.notify_all();
        self.wait_until(sched, deadline, |sched| sched.lanes.get(&queue.0).is_none_or(|lane| lane.done >= ticket))
    }

    /// A full queue makes its caller wait until half of it is done.
    pub fn limit_depth<'a>(&'a self, mut sched: MutexGuard<'a, Sched>, queue: QueueId) -> MutexGuard<'a, Sched> {
        let Some(lane) = sched.lanes.get(&queue.0).filter(|lane| lane.commands.len() > DEPTH) else { return sched };
        let ticket = lane.pushed - DEPTH as u64 / 2;
        sched.demand(queue, ticket);
        self.changed.notify_all();
        self.wait_until(sched, None, |sched| sched.lanes.get(&queue.0).is_none_or(|lane| lane.done >= ticket)).0
    }

    fn run(&self, op: &Op<TensorArg>, fate: &Fate) -> Result<()> {
        if let Some(duration) = fate.stall {
            std::thread::sleep(duration);
        }
        if fate.lost {
            return Err(Error::new(ErrorKind::DeviceLost, "injected fault: the device is lost"));
        }
        if fate.fails {
            return Err(Error::execution("injected fault"));
        }
        let panicked = |_| Err(Error::execution("the kernel panicked, which is a bug of the reference device"));
        catch_unwind(AssertUnwindSafe(|| kernels::run(op, &WorkerMemory(self)))).unwrap_or_else(panicked)
    }
}

/// What became of a command.
enum Outcome {
    Done(Result<()>),
    NotYet,
}

/// The worker thread.
pub(super) fn work(shared: &Shared) {
    let mut sched = shared.lock();
    while !sched.stop {
        let Some(id) = sched.choose() else {
            sched = shared.changed.wait(sched).unwrap_or_else(std::sync::PoisonError::into_inner);
            continue;
        };
        let Some(lane) = sched.lanes.get_mut(&id) else { continue };
        let Some(command) = lane.commands.pop_front() else { continue };
        lane.busy = true;
        let (epoch, sticky) = (lane.epoch, lane.sticky.clone());
        let fate = match &command {
            Command::Run(op, _) if sticky.is_none() => sched.fate(op.name()),
            _ => Fate::default(),
        };
        drop(sched);

        let outcome = match &command {
            Command::Signal(event) => {
                event.settle(sticky.map_or(Status::Done, Status::Failed));
                Outcome::Done(Ok(()))
            }
            // After a failure nothing runs.
            _ if sticky.is_some() => Outcome::Done(Ok(())),
            Command::Run(op, sequence) => {
                let result = shared.run(op, &fate);
                Outcome::Done(result.map_err(|e| shared.named(e.with_op(op.name(), Some(*sequence)))))
            }
            Command::Wait(event) => match event.wait(Some(GLANCE)) {
                Err(e) if *e.kind() == ErrorKind::Timeout => Outcome::NotYet,
                result => Outcome::Done(result.map_err(|e| e.context("waiting for an event of a queue that failed"))),
            },
        };

        sched = shared.lock();
        if fate.lost
            && let Outcome::Done(Err(e)) = &outcome
        {
            sched.lose(e);
        }
        let mut spent = Some(command);
        if let Some(lane) = sched.lanes.get_mut(&id) {
            lane.busy = false;
            match outcome {
                // A reset in the meantime dropped the command.
                Outcome::NotYet if lane.epoch == epoch => spent.take().into_iter().for_each(|c| lane.commands.push_front(c)),
                Outcome::NotYet => {}
                Outcome::Done(result) => {
                    lane.done += 1;
                    if let Err(e) = result {
                        lane.sticky.get_or_insert(e);
                    }
                }
            }
        }
        shared.changed.notify_all();
        if spent.is_some() {
            // The last handle to a buffer may go with the command; its memory is freed outside the lock.
            drop(sched);
            drop(spent);
            sched = shared.lock();
        }
    }
}
