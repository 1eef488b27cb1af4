//! Drivers, devices, and what a device says of itself.
//!
//! # For callers
//! Ask [`Device::supports`] with the very op that will be submitted; never ask who the vendor is.
//!
//! # For backend authors
//! Answer `supports` from one table that `submit` also uses, so that asking and running cannot drift. An op that is unknown to you
//! (the enum is open) is [`Support::Unsupported`]. `zofo-conformance` checks both directions.

use crate::{BufferRef, DType, MemorySpace, Op, Queue, Result, TensorSpec, Usage, WeightData, WeightRef, WeightSpec};
use alloc::{borrow::Cow, boxed::Box, string::String, sync::Arc, vec::Vec};

/// A shared handle to a [`Device`].
pub type DeviceRef = Arc<dyn Device>;

/// What kind of thing a device is; for people. Behaviour follows from [`Device::supports`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceKind {
    /// Host processor.
    Cpu,
    /// Graphics processor.
    Gpu,
    /// Neural processor.
    Npu,
    /// A test device.
    Reference,
}

/// Names and versions.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// For people: `CPU, 2 threads, avx2`.
    pub name: String,
    /// For caches of measurements: equal where performance and results are.
    pub fingerprint: String,
    /// What it is.
    pub kind: DeviceKind,
    /// System on chip or processor model, where known.
    pub soc: Option<String>,
    /// Driver and runtime versions, where there are any.
    pub versions: Vec<(String, String)>,
}

impl DeviceInfo {
    /// A device of `kind` called `name`, whose fingerprint is the name until set otherwise.
    pub fn new(kind: DeviceKind, name: impl Into<String>) -> Self {
        let name = name.into();
        Self { fingerprint: name.clone(), name, kind, soc: None, versions: Vec::new() }
    }
}

/// Sizes a caller must respect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Alignment of a buffer's start, in bytes.
    pub alignment: usize,
    /// Largest single buffer, in bytes.
    pub max_buffer_bytes: u64,
    /// Queues that can exist at a time.
    pub max_queues: usize,
    /// Total memory, in bytes, where known.
    pub memory_bytes: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { alignment: 64, max_buffer_bytes: isize::MAX as u64, max_queues: usize::MAX, memory_bytes: None }
    }
}

/// What a device can do as a whole. The truth per op is [`Device::supports`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Features {
    /// `submit` returns before the op has run.
    pub asynchronous: bool,
    /// Backward ops run natively.
    pub backward: bool,
    /// A row's bits depend on that row alone, not on row count, copies or threads.
    pub row_invariant: bool,
    /// The same op on the same bits gives the same bits.
    pub deterministic: bool,
    /// Updates follow the documented f32 sequence bit for bit, so a seed journal can be replayed here.
    pub exact_updates: bool,
    /// Shared weight bytes are used in place.
    pub maps_weights: bool,
    /// Products `x W^T` with block-quantised weights round activations to 8 bits; see [`crate::op::MatMul`].
    pub int8_products: bool,
}

/// How far an element type is usable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DTypeUsage {
    /// Buffers and copies.
    pub storage: bool,
    /// Element-wise ops and reductions.
    pub arithmetic: bool,
    /// Left operand of a product, with f32 accumulation.
    pub matmul: bool,
    /// Imported weights.
    pub weight: bool,
}

/// What a device lacks for an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lacking {
    /// The op itself.
    Op,
    /// The element type.
    DType,
    /// This shape, stride or alignment.
    Layout,
    /// This size.
    Size,
    /// Backward ops as a class.
    Backward,
}

/// A device's answer about an op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// Runs, and passes conformance.
    Native,
    /// Runs, but not as the contract's ideal: slower, or with an intermediate in device memory.
    Emulated {
        /// What a user should know.
        note: Cow<'static, str>,
    },
    /// Does not run; `submit` answers [`crate::ErrorKind::Unsupported`].
    Unsupported {
        /// For people.
        reason: Cow<'static, str>,
        /// For programs.
        lacking: Lacking,
    },
}

impl Support {
    /// [`Support::Unsupported`].
    pub fn lacking(lacking: Lacking, reason: impl Into<Cow<'static, str>>) -> Self {
        Self::Unsupported { reason: reason.into(), lacking }
    }

    /// Whether a submit can succeed.
    pub fn runs(&self) -> bool {
        !matches!(self, Self::Unsupported { .. })
    }
}

/// Counters of a device's allocator, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Held by live buffers, weights and reserved workspace.
    pub in_use: u64,
    /// Highest `in_use` so far.
    pub peak: u64,
    /// Allocations made so far; constant over steady-state training steps.
    pub allocations: u64,
    /// Whose counters these are: devices that are views of one, and so count the same memory, give the same number. 0: the device's own.
    pub owner: u64,
}

/// A device: a place where queues run ops.
///
/// # Life cycle
/// 1. A [`Driver`] opens it. 2. Weights are imported, queues made. 3. Queues allocate buffers and run ops. 4. Queues are closed.
///    Buffers, weights and queues keep what they need of the device alive.
pub trait Device: Send + Sync {
    /// Names and versions.
    fn info(&self) -> &DeviceInfo;
    /// Sizes to respect.
    fn limits(&self) -> Limits;
    /// What it can do as a whole.
    fn features(&self) -> Features;
    /// Where its memory is.
    fn space(&self) -> MemorySpace;
    /// How far `dtype` is usable.
    fn dtype_usage(&self, dtype: DType) -> DTypeUsage;
    /// Whether it runs `op`, which passed [`Op::check`].
    fn supports(&self, op: &Op<TensorSpec>) -> Support;
    /// Bytes of device scratch that running `op` needs; see [`Queue::reserve`].
    fn workspace(&self, op: &Op<TensorSpec>) -> usize;
    /// A new in-order queue.
    ///
    /// # Errors
    /// `OutOfMemory`, `DeviceLost`, or `InvalidArgument` past [`Limits::max_queues`].
    fn create_queue(&self) -> Result<Box<dyn Queue>>;
    /// Packs or converts a frozen weight once.
    ///
    /// # Errors
    /// `InvalidArgument` where the bytes do not match `spec`, `Unsupported` for the type, `OutOfMemory`.
    fn import_weight(&self, spec: &WeightSpec, data: WeightData<'_>) -> Result<WeightRef>;
    /// Names how weights are laid out: devices of one memory space that give the same name can use each other's imported weights.
    fn weight_layout(&self) -> &str {
        &self.info().fingerprint
    }
    /// Allocator counters.
    fn memory(&self) -> MemoryStats;
}

/// How to open a device.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Threads of a CPU device; `None` is the number of physical cores that the affinity mask and the cgroup allow.
    pub threads: Option<usize>,
    /// Whether the device may round activations to 8 bits; one that does says [`Features::int8_products`].
    pub int8: bool,
}

impl OpenOptions {
    /// A stated number of threads.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Whether activations may be rounded to 8 bits.
    pub fn int8(mut self, int8: bool) -> Self {
        self.int8 = int8;
        self
    }
}

/// A backend library: finds devices and opens them.
pub trait Driver: Send + Sync {
    /// Short name: `cpu`, `cuda`, `ascend`.
    fn name(&self) -> &'static str;
    /// The devices present.
    ///
    /// # Errors
    /// `BackendUnavailable` where the library or the driver is missing; never a panic.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;
    /// Opens the device at `index` of [`devices`](Self::devices).
    ///
    /// # Errors
    /// `InvalidArgument` for an index past the end, `BackendUnavailable`, `OutOfMemory`.
    fn open(&self, index: usize, options: &OpenOptions) -> Result<DeviceRef>;
}

/// Allocates `spec` on `queue` and returns it as a tensor.
///
/// # Errors
/// Those of [`Queue::alloc`].
pub fn alloc_tensor(queue: &dyn Queue, spec: TensorSpec, usage: Usage) -> Result<crate::TensorArg> {
    spec.check()?;
    let buffer: BufferRef = queue.alloc(spec.span_bytes(), usage)?;
    Ok(crate::TensorArg::new(buffer, spec))
}
