//! The threads of a device.
//!
//! The thread that submits works too, so a device of n threads owns n - 1 workers. Work is handed out by a counter: which thread runs a
//! task is open, what the task computes is not. Where another queue of the device has the workers, the caller does all of its work itself.

use core::ops::Range;
use zofo_hal::{Error, Result};

/// A stated number of threads.
#[derive(Debug)]
pub(crate) struct Pool {
    threads: usize,
    #[cfg(feature = "std")]
    workers: Option<crate::workers::Workers>,
}

/// Work below this many units (about one element-wise operation on an f32 each) is done by the caller alone: waking a worker costs as much.
const GATE: usize = 1 << 16;

impl Pool {
    /// # Errors
    /// `InvalidArgument` for no thread, or more than one without `std`; `OutOfMemory` where the system refuses a thread.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        if threads == 0 {
            return Err(Error::invalid("a CPU device with 0 threads: give at least 1, or none for the default"));
        }
        #[cfg(feature = "std")]
        {
            let workers = (threads > 1).then(|| crate::workers::Workers::start(threads - 1)).transpose()?;
            Ok(Self { threads, workers })
        }
        #[cfg(not(feature = "std"))]
        match threads {
            1 => Ok(Self { threads }),
            _ => Err(Error::invalid("without feature `std` a CPU device has one thread")),
        }
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f(task, worker)` for every task below `tasks`; `worker` is below [`threads`](Self::threads), and no two calls at a time share
    /// one.
    pub(crate) fn run(&self, tasks: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        #[cfg(feature = "std")]
        if let (Some(workers), true) = (&self.workers, tasks > 1)
            && workers.run(tasks, f)
        {
            return;
        }
        for task in 0..tasks {
            f(task, 0);
        }
    }

    /// Splits `0..n` into ranges and calls `f(range, worker)` for each; `cost` is the work per item in units of [`GATE`].
    pub(crate) fn split(&self, n: usize, cost: usize, f: &(dyn Fn(Range<usize>, usize) + Sync)) {
        let total = n.saturating_mul(cost.max(1));
        if n == 0 {
            return;
        }
        if self.threads == 1 || total < GATE {
            return f(0..n, 0);
        }
        let tasks = n.min(self.threads * 4).min((total / (GATE / 4)).max(1));
        self.run(tasks, &|i, worker| f(i * n / tasks..(i + 1) * n / tasks, worker));
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_task_runs_once_and_workers_do_not_clash() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads).unwrap();
            let count: std::vec::Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            let busy: std::vec::Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            pool.run(100, &|task, worker| {
                assert_eq!(busy[worker].fetch_add(1, Ordering::SeqCst), 0);
                count[task].fetch_add(1, Ordering::SeqCst);
                busy[worker].fetch_sub(1, Ordering::SeqCst);
            });
            assert!(count.iter().all(|c| c.load(Ordering::SeqCst) == 1));
        }
    }

    #[test]
    fn a_split_covers_the_range() {
        let pool = Pool::new(2).unwrap();
        for n in [0, 1, 7, 1000] {
            let sum = AtomicUsize::new(0);
            pool.split(n, 1 << 12, &|r, _| {
                sum.fetch_add(r.sum::<usize>(), Ordering::SeqCst);
            });
            assert_eq!(sum.into_inner(), n * n.saturating_sub(1) / 2);
        }
    }

    #[test]
    fn no_thread_is_refused() {
        assert!(Pool::new(0).is_err());
    }
}
