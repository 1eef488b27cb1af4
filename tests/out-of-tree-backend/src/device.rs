//! What the device is, and its weights.

use crate::{ops, queue::ToyQueue};
use std::{
    any::Any,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use zofo_hal::{
    DType, DTypeUsage, Device, DeviceInfo, DeviceKind, DeviceRef, Error, ErrorKind, Features, Limits, MemorySpace, MemoryStats, Op, Queue,
    Result, Support, TensorSpec, Weight, WeightData, WeightRef, WeightSpec,
};

/// Locks, whether or not another thread panicked: no critical section of this crate leaves its data invalid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device that computes on the host. A handle: queues and buffers hold clones.
#[derive(Clone)]
pub struct ToyDevice(Arc<Shared>);

struct Shared {
    info: DeviceInfo,
    space: MemorySpace,
    memory: Mutex<MemoryStats>,
}

pub(crate) fn info() -> DeviceInfo {
    DeviceInfo::new(DeviceKind::Cpu, "toy")
}

impl ToyDevice {
    /// Opens the device. Its memory is its own, although it lies on the host: no other backend could use it.
    pub fn open() -> DeviceRef {
        Arc::new(Self(Arc::new(Shared { info: info(), space: MemorySpace::unique(), memory: Mutex::default() })))
    }

    /// Memory of `bytes` bytes in whole words, counted.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Words> {
        let mut words = Vec::new();
        words.try_reserve_exact(bytes.div_ceil(8)).map_err(|_| {
            let kind = ErrorKind::OutOfMemory { requested: bytes as u64, available: None };
            Error::new(kind, "the host has not enough memory for a buffer").with_device("toy")
        })?;
        words.resize(bytes.div_ceil(8), 0);
        let mut memory = lock(&self.0.memory);
        memory.in_use += bytes as u64;
        memory.peak = memory.peak.max(memory.in_use);
        memory.allocations += 1;
        Ok(words)
    }

    /// The counterpart of [`allocate`](Self::allocate).
    pub(crate) fn free(&self, bytes: usize) {
        lock(&self.0.memory).in_use -= bytes as u64;
    }
}

/// Memory in units that suit every element type.
pub(crate) type Words = Vec<u64>;

impl Device for ToyDevice {
    fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        limits.alignment = align_of::<u64>();
        limits
    }

    // Say only what is true: conformance tests row invariance, determinism and exact updates where they are claimed.
    fn features(&self) -> Features {
        let mut features = Features::default();
        features.row_invariant = true;
        features.deterministic = true;
        features
    }

    fn space(&self) -> MemorySpace {
        self.0.space
    }

    fn dtype_usage(&self, dtype: DType) -> DTypeUsage {
        let f32 = dtype == DType::F32;
        DTypeUsage { storage: f32 || dtype == DType::U32, arithmetic: f32, matmul: f32, weight: f32 }
    }

    fn supports(&self, op: &Op<TensorSpec>) -> Support {
        ops::supports(op)
    }

    // Kernels of this device need no scratch.
    fn workspace(&self, _: &Op<TensorSpec>) -> usize {
        0
    }

    fn create_queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(ToyQueue::new(self.clone())))
    }

    fn import_weight(&self, spec: &WeightSpec, data: WeightData<'_>) -> Result<WeightRef> {
        if spec.dtype != DType::F32 {
            return Err(Error::unsupported(format!("toy imports f32 weights, not {}", spec.dtype)).with_device("toy"));
        }
        let (bytes, expected) = (data.bytes()?, spec.host_bytes()?);
        if bytes.len() != expected {
            return Err(Error::invalid(format!("{spec:?} has {expected} bytes, {} were given", bytes.len())));
        }
        // A device of more ambition packs the weight for its kernels here, once. Checkpoints align nothing: read byte by byte.
        let values = bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        drop(self.allocate(expected)?);
        Ok(Arc::new(ToyWeight { device: self.clone(), spec: *spec, values }))
    }

    fn memory(&self) -> MemoryStats {
        *lock(&self.0.memory)
    }
}

/// An f32 matrix, row-major.
pub(crate) struct ToyWeight {
    device: ToyDevice,
    spec: WeightSpec,
    pub values: Vec<f32>,
}

impl ToyWeight {
    /// The weight behind a handle, if this backend made it.
    pub fn of(weight: &WeightRef) -> Result<&Self> {
        let foreign = || Error::new(ErrorKind::ForeignBuffer, "a weight of another backend: import it on this device");
        weight.as_any().downcast_ref().ok_or_else(foreign)
    }
}

impl Weight for ToyWeight {
    fn spec(&self) -> WeightSpec {
        self.spec
    }
    fn bytes(&self) -> usize {
        self.values.len() * 4
    }
    fn space(&self) -> MemorySpace {
        self.device.space()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for ToyWeight {
    fn drop(&mut self) {
        self.device.free(self.values.len() * 4);
    }
}
