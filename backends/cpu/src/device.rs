//! The CPU as a device.

use crate::{
    gemm::Int8,
    isa::{Isa, Tier},
    kernels,
    memory::{ALIGNMENT, Counters},
    pool::Pool,
    queue::CpuQueue,
    weight::CpuWeight,
};
use alloc::{
    boxed::Box,
    format,
    string::{String, ToString},
    sync::{Arc, Weak},
    vec,
    vec::Vec,
};
use zofo_hal::{
    DType, DTypeUsage, Device, DeviceInfo, DeviceKind, DeviceRef, Driver, Error, Features, Limits, MemorySpace, MemoryStats, Op,
    OpenOptions, Queue, Result, Support, TensorSpec, WeightData, WeightRef, WeightSpec, perturb,
};

/// How to make a CPU device.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads, the submitting one included. `None`: the physical cores that the affinity mask and the cgroup allow (1 without `std`).
    pub threads: Option<usize>,
    /// Instruction set. `None`: the fastest that is available.
    pub isa: Option<Isa>,
    /// Whether products `x W^T` with block-quantised weights round activations to 8 bits, per row and block of 32: faster, less exact
    /// ([`Features::int8_products`]). All tiers give the same bits.
    pub int8: bool,
}

/// What a device, its queues and its weights share.
pub(crate) struct Core {
    pub(crate) info: DeviceInfo,
    pub(crate) tier: Tier,
    pub(crate) noise: perturb::Tier,
    pub(crate) pool: Pool,
    pub(crate) int8: Option<&'static Int8>,
    pub(crate) counters: Arc<Counters>,
    memory_bytes: Option<u64>,
}

/// A CPU with threads of its own. All CPU devices of a process share [`MemorySpace::HOST`], so they share weights and frozen buffers.
pub struct CpuDevice {
    core: Arc<Core>,
    this: Weak<Self>,
}

/// More threads than the largest hosts have cores only fill memory with stacks.
const MAX_THREADS: usize = 1024;

impl CpuDevice {
    /// A device.
    ///
    /// # Errors
    /// `InvalidArgument` for 0 threads or an instruction set that this machine lacks; `OutOfMemory` where a thread cannot be started.
    pub fn new(options: CpuOptions) -> Result<Arc<Self>> {
        let tier = match options.isa {
            None => Tier::best(),
            Some(isa) => Tier::new(isa).ok_or_else(|| Isa::lacking(isa.name()))?,
        };
        let threads = options.threads.unwrap_or_else(default_threads);
        if threads > MAX_THREADS {
            return Err(Error::invalid(format!("{threads} threads; a CPU device takes at most {MAX_THREADS}")));
        }
        let pool = Pool::new(threads)?;
        let int8 = options.int8.then(|| Int8::of(tier.isa()));
        let core = Core {
            info: info(threads, tier.isa(), int8),
            tier,
            int8,
            noise: noise_tier(tier.isa()),
            pool,
            counters: Arc::default(),
            memory_bytes: memory_bytes(),
        };
        Ok(Arc::new_cyclic(|this| Self { core: Arc::new(core), this: this.clone() }))
    }

    /// The instruction set that its kernels use.
    pub fn isa(&self) -> Isa {
        self.core.tier.isa()
    }

    /// Its number of threads, the submitting one included.
    pub fn threads(&self) -> usize {
        self.core.pool.threads()
    }
}

fn default_threads() -> usize {
    #[cfg(feature = "std")]
    return crate::host::physical_cores();
    #[cfg(not(feature = "std"))]
    1
}

fn memory_bytes() -> Option<u64> {
    #[cfg(feature = "std")]
    return crate::host::memory_bytes();
    #[cfg(not(feature = "std"))]
    None
}

fn model_name() -> Option<String> {
    #[cfg(feature = "std")]
    return crate::host::model_name();
    #[cfg(not(feature = "std"))]
    None
}

fn info(threads: usize, isa: Isa, int8: Option<&Int8>) -> DeviceInfo {
    let s = if threads == 1 { "" } else { "s" };
    let int8 = int8.map(|int8| format!(", int8 by {}", int8.name)).unwrap_or_default();
    let mut info = DeviceInfo::new(DeviceKind::Cpu, format!("CPU, {threads} thread{s}, {isa}{int8}"));
    info.soc = model_name();
    if let Some(model) = &info.soc {
        info.fingerprint = format!("{}, {model}", info.name);
    }
    info.versions = vec![("zofo-cpu".to_string(), env!("CARGO_PKG_VERSION").to_string())];
    info
}

/// The generator's tier of the same name; its bits are the same on every tier, so a missing one costs only time.
fn noise_tier(isa: Isa) -> perturb::Tier {
    // The generator has no use for bf16.
    let name = match isa {
        Isa::Avx512Bf16 => Isa::Avx512.name(),
        Isa::NeonBf16 => Isa::Neon.name(),
        other => other.name(),
    };
    perturb::Tier::available().find(|t| t.name() == name).unwrap_or(perturb::Tier::SCALAR)
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.core.info
    }
    fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        limits.alignment = ALIGNMENT;
        limits.memory_bytes = self.core.memory_bytes;
        limits
    }
    fn features(&self) -> Features {
        let mut f = Features::default();
        f.backward = true;
        f.row_invariant = true;
        f.deterministic = true;
        f.exact_updates = true;
        f.maps_weights = true;
        f.int8_products = self.core.int8.is_some();
        f
    }
    fn space(&self) -> MemorySpace {
        MemorySpace::HOST
    }
    fn dtype_usage(&self, dtype: DType) -> DTypeUsage {
        let float = dtype.is_float();
        DTypeUsage { storage: float || dtype == DType::U32, arithmetic: float, matmul: float, weight: float || dtype.is_quantised() }
    }
    fn supports(&self, op: &Op<TensorSpec>) -> Support {
        kernels::supports(op)
    }
    fn workspace(&self, op: &Op<TensorSpec>) -> usize {
        kernels::workspace(op, &self.core)
    }
    fn create_queue(&self) -> Result<Box<dyn Queue>> {
        let device = self.this.upgrade().ok_or_else(|| Error::invalid("the device is being dropped"))?;
        Ok(Box::new(CpuQueue::new(device, self.core.clone())?))
    }
    fn import_weight(&self, spec: &WeightSpec, data: WeightData<'_>) -> Result<WeightRef> {
        let weight = CpuWeight::import(spec, data, &self.core.pool, &self.core.counters);
        Ok(Arc::new(weight.map_err(|e| e.with_device(self.core.info.name.clone()))?))
    }
    fn memory(&self) -> MemoryStats {
        self.core.counters.stats()
    }
}

/// Opens [`CpuDevice`]s. There is one CPU; opening it again gives another device with threads of its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuDriver;

impl Driver for CpuDriver {
    fn name(&self) -> &'static str {
        "cpu"
    }
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![info(default_threads(), Tier::best().isa(), None)])
    }
    fn open(&self, index: usize, options: &OpenOptions) -> Result<DeviceRef> {
        match index {
            0 => Ok(CpuDevice::new(CpuOptions { threads: options.threads, isa: None, int8: options.int8 })?),
            _ => Err(Error::invalid(format!("CPU device {index} of 1: only cpu:0 is there"))),
        }
    }
}
