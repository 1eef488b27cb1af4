//! The hostile device: everything that the contract lets a device do to its caller.

mod buffer;
mod config;
mod event;
mod memory;
mod queue;
mod scheduler;

pub use config::{Fault, HostileConfig};

use super::device::dtype_usage;
use super::storage::{ALIGNMENT, Allocator};
use super::{kernels, weight};
use crate::{
    DType, DTypeUsage, Device, DeviceInfo, DeviceKind, Error, ErrorKind, Features, Limits, MemorySpace, MemoryStats, Op, Queue, Result,
    Support, TensorSpec, WeightData, WeightRef, WeightSpec, sync::Mutex,
};
use alloc::{boxed::Box, sync::Arc};
use memory::HostileWeight;
use queue::HostileQueue;
use scheduler::{Shared, work};
use std::thread::{self, JoinHandle};

/// An asynchronous device that is as unhelpful as the contract permits.
///
/// - Buffers have addresses, not pointers: their memory is in a table that only the worker thread and mappings reach.
/// - `submit` checks and enqueues. Work sits until something forces it (a wait, a mapping, a full queue) or until chance lets it go; which
///   queue goes next is drawn from the seed. Only order within a queue, events and hand-overs hold.
/// - Errors surface where the host waits, and poison what is submitted afterwards.
/// - Fresh memory holds NaN and indices out of range; freed memory is overwritten before it is used again.
/// - Faults are injected as [`HostileConfig::faults`] says.
///
/// It runs the kernels of [`super::Reference`], so equal inputs give equal bits.
#[derive(Clone)]
pub struct Hostile(Arc<Core>);

/// What the device and its queues hold. Buffers, weights and events hold [`Shared`] alone: they need no worker once the queues are closed.
struct Core {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Core {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(worker) = self.worker.lock().take()
            && worker.thread().id() != thread::current().id()
        {
            // The worker catches what kernels throw; there is nothing to report and nowhere to report it.
            let _ = worker.join();
        }
    }
}

impl Hostile {
    /// A device with memory of its own. Its worker thread starts with the first queue.
    pub fn new(config: HostileConfig) -> Arc<Self> {
        let info = DeviceInfo::new(DeviceKind::Reference, "hostile");
        Arc::new(Self(Arc::new(Core { shared: Arc::new(Shared::new(info, config)), worker: Mutex::new(None) })))
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    fn start(&self) -> Result<()> {
        let mut worker = self.0.worker.lock();
        if worker.is_none() {
            let shared = self.shared().clone();
            let failed = |e| Error::new(ErrorKind::OutOfMemory { requested: 0, available: None }, alloc::format!("no worker thread: {e}"));
            *worker = Some(thread::Builder::new().name("hostile".into()).spawn(move || work(&shared)).map_err(failed)?);
        }
        Ok(())
    }
}

impl Device for Hostile {
    fn info(&self) -> &DeviceInfo {
        &self.shared().info
    }
    fn limits(&self) -> Limits {
        let memory_bytes = self.shared().allocator.lock().limit();
        Limits { alignment: ALIGNMENT, memory_bytes, ..Limits::default() }
    }
    fn features(&self) -> Features {
        Features {
            asynchronous: true,
            backward: true,
            row_invariant: true,
            deterministic: true,
            exact_updates: true,
            ..Features::default()
        }
    }
    fn space(&self) -> MemorySpace {
        self.shared().space
    }
    fn dtype_usage(&self, dtype: DType) -> DTypeUsage {
        dtype_usage(dtype)
    }
    fn supports(&self, op: &Op<TensorSpec>) -> Support {
        kernels::supports(op)
    }
    fn workspace(&self, _op: &Op<TensorSpec>) -> usize {
        0
    }
    fn create_queue(&self) -> Result<Box<dyn Queue>> {
        self.start()?;
        Ok(Box::new(HostileQueue::new(self.clone())?))
    }
    fn import_weight(&self, spec: &WeightSpec, data: WeightData<'_>) -> Result<WeightRef> {
        let import = || {
            let values = weight::values(spec, &data)?;
            self.shared().lock().before_import(values.len() * 4)?;
            HostileWeight::new(self.shared(), spec, values)
        };
        Ok(Arc::new(import().map_err(|e| self.shared().named(e))?))
    }
    fn memory(&self) -> MemoryStats {
        self.shared().allocator.lock().stats()
    }
}

impl Shared {
    fn new(info: DeviceInfo, config: HostileConfig) -> Self {
        let allocator = Mutex::new(Allocator::new(config.memory_limit));
        Self {
            info,
            space: MemorySpace::unique(),
            allocator,
            memory: Mutex::default(),
            sched: Mutex::new(scheduler::Sched::new(config)),
            changed: std::sync::Condvar::new(),
        }
    }
}
