//! Threads that wait for work: first awake, for as long as the next op of a step usually takes to come, then asleep.
//!
//! A step of a small model is hundreds of ops of some microseconds each. Waking a sleeping thread takes as long as such an op, so a thread
//! stays awake for [`AWAKE`] looks at the gate before it sleeps; a device that is idle, or whose ops are too small to share, costs nothing.
//!
//! One word, the gate, says it all: the number of the run, whether it is open, and how many workers are in it. A worker comes in by
//! counting itself while the run is open, so the submitting thread, once it has no task left, closes the run and waits only for those who
//! are in. A worker that woke too late finds the gate closed and goes back to waiting.

use core::sync::atomic::{
    AtomicBool, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};
use std::{
    cell::UnsafeCell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, TryLockError},
    thread::{self, JoinHandle, Thread},
    time::Duration,
    vec::Vec,
};
use zofo_hal::{Error, ErrorKind, Result};

/// Looks at the gate before a thread sleeps: some 30 microseconds.
const AWAKE: u32 = 600;
/// Bits of the gate: workers in the run, open, and above them the number of the run.
const OPEN: usize = 1 << 12;
const RUN: usize = OPEN << 1;
const INSIDE: usize = OPEN - 1;

/// What the workers of a run call: `f(task, worker)`.
type Work = dyn Fn(usize, usize) + Sync;

struct Shared {
    gate: AtomicUsize,
    /// The work of the open run, good for as long as it is open, and how many tasks it has.
    work: UnsafeCell<Option<(*const Work, usize)>>,
    /// The next task.
    next: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    asleep: Vec<AtomicBool>,
}

// Safety: `work` is written by the thread that holds `Workers::turn`, while no worker is inside; workers read it inside, and the pointer is
// to something `Sync` that outlives the run.
unsafe impl Sync for Shared {}
// Safety: as above.
unsafe impl Send for Shared {}

/// Threads of a pool, beside the one that submits.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<Thread>,
    handles: Vec<JoinHandle<()>>,
    /// Held by the run in progress.
    turn: Mutex<()>,
}

impl core::fmt::Debug for Workers {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Workers").field("threads", &self.threads.len()).finish()
    }
}

impl Workers {
    /// # Errors
    /// `OutOfMemory` where the system refuses a thread.
    pub(crate) fn start(count: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            gate: AtomicUsize::new(0),
            work: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            asleep: (0..count).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut workers = Self { shared, threads: Vec::new(), handles: Vec::new(), turn: Mutex::new(()) };
        for i in 0..count {
            let shared = workers.shared.clone();
            let spawned = thread::Builder::new().name(std::format!("zofo-cpu-{}", i + 1)).spawn(move || shared.serve(i));
            // Dropping `workers` ends those that are there.
            let handle = spawned.map_err(|e| {
                let kind = ErrorKind::OutOfMemory { requested: 0, available: None };
                Error::new(kind, std::format!("cannot start {count} worker threads: {e}; ask for fewer"))
            })?;
            workers.threads.push(handle.thread().clone());
            workers.handles.push(handle);
        }
        Ok(workers)
    }

    /// Runs `f(task, worker)` for every task, on the calling thread (worker 0) and those of the workers that come in time. False, and
    /// nothing done, where another thread has the workers.
    ///
    /// # Panics
    /// If `f` does.
    pub(crate) fn run(&self, tasks: usize, f: &(dyn Fn(usize, usize) + Sync)) -> bool {
        let _turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let shared = &*self.shared;
        // Safety: the gate is closed and nobody is inside: the last run waited for that. The pointer is used inside this run alone, which
        // ends before `f` does.
        unsafe {
            let work: *const Work = core::mem::transmute::<*const (dyn Fn(usize, usize) + Sync + '_), *const Work>(f);
            *shared.work.get() = Some((work, tasks));
        }
        shared.next.store(0, Relaxed);
        let run = (shared.gate.load(Relaxed) & !(RUN - 1)).wrapping_add(RUN);
        shared.gate.store(run | OPEN, SeqCst);
        for (thread, asleep) in self.threads.iter().zip(&shared.asleep).take(tasks - 1) {
            if asleep.load(SeqCst) {
                thread.unpark();
            }
        }
        {
            // Also on the way out of a panic: no worker may be left with a pointer to what is gone.
            let _closed = Close(shared);
            shared.take_tasks(f, tasks, 0);
        }
        assert!(!shared.panicked.swap(false, Relaxed), "a worker thread of the CPU device panicked");
        true
    }
}

/// Closes the run, and waits for the workers inside.
struct Close<'a>(&'a Shared);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        let mut looks = 0;
        let mut inside = self.0.gate.fetch_and(!OPEN, SeqCst) & INSIDE;
        while inside > 0 {
            looks += 1;
            match looks {
                0..=AWAKE => core::hint::spin_loop(),
                // Their tasks are long, or their cores are busy with something else.
                _ => thread::park_timeout(Duration::from_micros(20)),
            }
            inside = self.0.gate.load(Acquire) & INSIDE;
        }
    }
}

impl Shared {
    fn take_tasks(&self, f: &(dyn Fn(usize, usize) + Sync), tasks: usize, worker: usize) {
        loop {
            let task = self.next.fetch_add(1, Relaxed);
            if task >= tasks {
                return;
            }
            f(task, worker);
        }
    }

    /// The life of worker `i`.
    fn serve(&self, i: usize) {
        let mut last = 0;
        let mut looks = 0;
        while !self.stop.load(Relaxed) {
            let gate = self.gate.load(SeqCst);
            if gate & OPEN == 0 || gate & !(RUN - 1) == last {
                looks += 1;
                if looks < AWAKE {
                    core::hint::spin_loop();
                    continue;
                }
                self.asleep[i].store(true, SeqCst);
                // What was opened before the flag was seen, its opener did not wake anyone for.
                let again = self.gate.load(SeqCst);
                if (again & OPEN == 0 || again & !(RUN - 1) == last) && !self.stop.load(SeqCst) {
                    thread::park();
                }
                self.asleep[i].store(false, SeqCst);
                looks = 0;
                continue;
            }
            if self.gate.compare_exchange(gate, gate + 1, Acquire, Relaxed).is_err() {
                continue;
            }
            last = gate & !(RUN - 1);
            // Safety: the run is open with this worker inside, so the work is there until it leaves.
            if let Some((work, tasks)) = unsafe { *self.work.get() } {
                // Safety: as above.
                let work = AssertUnwindSafe(|| self.take_tasks(unsafe { &*work }, tasks, i + 1));
                if catch_unwind(work).is_err() {
                    self.panicked.store(true, Relaxed);
                }
            }
            self.gate.fetch_sub(1, Release);
            looks = 0;
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.threads.iter().for_each(Thread::unpark);
        for handle in self.handles.drain(..) {
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_short_runs_miss_no_task() {
        let workers = Workers::start(3).unwrap();
        for run in 0..20_000 {
            let (count, tasks) = (AtomicUsize::new(0), 2 + run % 7);
            assert!(workers.run(tasks, &|task, worker| {
                assert!(worker < 4);
                count.fetch_add(task + 1, Relaxed);
            }));
            assert_eq!(count.into_inner(), tasks * (tasks + 1) / 2);
            if run % 1000 == 0 {
                // Long enough for the workers to fall asleep.
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_threads_go_on() {
        let workers = Workers::start(2).unwrap();
        for _ in 0..50 {
            let run = || workers.run(64, &|task, _| assert!(task != 40, "task 40"));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
            let count = AtomicUsize::new(0);
            assert!(workers.run(64, &|_, _| {
                count.fetch_add(1, Relaxed);
            }));
            assert_eq!(count.into_inner(), 64);
        }
    }

    #[test]
    fn a_second_caller_is_told_to_work_alone() {
        let workers = Workers::start(1).unwrap();
        assert!(workers.run(2, &|_, _| assert!(!workers.run(2, &|_, _| ()))));
    }
}
