//! The reference device and its driver.

use super::kernels;
use super::queue::RefQueue;
use super::storage::{ALIGNMENT, Allocator};
use super::weight::RefWeight;
use crate::{
    DType, DTypeUsage, Device, DeviceInfo, DeviceKind, DeviceRef, Driver, Error, Features, Limits, MemorySpace, MemoryStats, Op,
    OpenOptions, Queue, Result, Support, TensorSpec, WeightData, WeightRef, WeightSpec, sync::Mutex,
};
use alloc::{boxed::Box, format, sync::Arc, vec, vec::Vec};

/// The reference device: eager, one thread, plain loops, f64 accumulation.
#[derive(Clone)]
pub struct Reference(Arc<Core>);

struct Core {
    info: DeviceInfo,
    space: MemorySpace,
    allocator: Arc<Mutex<Allocator>>,
}

impl Reference {
    /// A device with memory of its own.
    pub fn new() -> Arc<Self> {
        Self::build(MemorySpace::unique(), None)
    }

    /// A device with `bytes` of memory, past which it answers `OutOfMemory`.
    pub fn with_memory_limit(bytes: u64) -> Arc<Self> {
        Self::build(MemorySpace::unique(), Some(bytes))
    }

    /// `devices` devices that share one memory: they use each other's weights and frozen buffers, and hand buffers over.
    pub fn group(devices: usize) -> Vec<Arc<Self>> {
        let space = MemorySpace::unique();
        (0..devices).map(|_| Self::build(space, None)).collect()
    }

    fn build(space: MemorySpace, limit: Option<u64>) -> Arc<Self> {
        let info = DeviceInfo::new(DeviceKind::Reference, "reference");
        Arc::new(Self(Arc::new(Core { info, space, allocator: Arc::new(Mutex::new(Allocator::new(limit))) })))
    }

    pub(super) fn allocator(&self) -> &Arc<Mutex<Allocator>> {
        &self.0.allocator
    }
}

/// Every float type computes, every weight type imports.
pub(super) fn dtype_usage(dtype: DType) -> DTypeUsage {
    let float = dtype.is_float();
    DTypeUsage { storage: !dtype.is_quantised(), arithmetic: float, matmul: float, weight: dtype != DType::U32 }
}

impl Device for Reference {
    fn info(&self) -> &DeviceInfo {
        &self.0.info
    }
    fn limits(&self) -> Limits {
        let memory_bytes = self.0.allocator.lock().limit();
        Limits { alignment: ALIGNMENT, memory_bytes, ..Limits::default() }
    }
    fn features(&self) -> Features {
        Features { backward: true, row_invariant: true, deterministic: true, exact_updates: true, ..Features::default() }
    }
    fn space(&self) -> MemorySpace {
        self.0.space
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
        Ok(Box::new(RefQueue::new(self.clone())))
    }
    fn import_weight(&self, spec: &WeightSpec, data: WeightData<'_>) -> Result<WeightRef> {
        let weight = RefWeight::import(spec, &data, self.0.space, &self.0.allocator);
        Ok(Arc::new(weight.map_err(|e| e.with_device(self.0.info.name.clone()))?))
    }
    fn memory(&self) -> MemoryStats {
        self.0.allocator.lock().stats()
    }
}

/// Opens [`Reference`] devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceDriver;

impl Driver for ReferenceDriver {
    fn name(&self) -> &'static str {
        "reference"
    }
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![DeviceInfo::new(DeviceKind::Reference, "reference")])
    }
    fn open(&self, index: usize, _options: &OpenOptions) -> Result<DeviceRef> {
        match index {
            0 => Ok(Reference::new()),
            _ => Err(Error::invalid(format!("reference device {index} of 1"))),
        }
    }
}
