//! How hostile.

use alloc::vec::Vec;
use core::time::Duration;

/// Settings of a [`super::Hostile`] device.
#[derive(Clone, Debug, Default)]
pub struct HostileConfig {
    /// Seed of the order in which queues proceed.
    pub seed: u64,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// Bytes of memory; `None` is without limit.
    pub memory_limit: Option<u64>,
}

impl HostileConfig {
    /// Without faults.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// With one more fault.
    pub fn fault(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }

    /// With `bytes` of memory.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }
}

/// Something that goes wrong. Counts start at 0 and go over the whole device, in the order in which things happen there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The nth op that runs fails.
    Execution {
        /// Ops that run before it.
        nth: u64,
    },
    /// The nth op of a name fails.
    ExecutionOf {
        /// For example `matmul`.
        op: &'static str,
        /// Ops of that name that run before it.
        nth: u64,
    },
    /// The device works on the nth op for so long before it runs it.
    Stall {
        /// Ops that run before it.
        nth: u64,
        /// How long nothing else runs either.
        duration: Duration,
    },
    /// The device is lost.
    DeviceLost {
        /// Ops that run before.
        after: u64,
    },
    /// The nth buffer is out of memory.
    AllocFailure {
        /// Buffers allocated before it.
        nth: u64,
    },
    /// The nth weight is out of memory.
    ImportFailure {
        /// Weights imported before it.
        nth: u64,
    },
}
