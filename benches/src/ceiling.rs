//! What the machine can do at most, measured: multiply-adds out of registers, and reads of memory that is in no cache.

#[cfg(target_arch = "aarch64")]
#[path = "ceiling/aarch64.rs"]
mod kernels;
#[cfg(target_arch = "x86_64")]
#[path = "ceiling/x86_64.rs"]
mod kernels;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
#[path = "ceiling/portable.rs"]
mod kernels;

use rayon::{ThreadPool, ThreadPoolBuilder};
use std::{
    hint::black_box,
    time::{Duration, Instant},
};

/// A loop of one kind of instruction, as many in flight as its latency asks for.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// `fma-avx512`, `vdpbf16ps`, ...
    pub name: &'static str,
    /// Operations of a round.
    flops: u64,
    /// Runs so many rounds.
    run: unsafe fn(u64),
}

impl Kernel {
    /// Operations of `rounds` rounds on one thread.
    pub fn flops(&self, rounds: u64) -> u64 {
        self.flops * rounds
    }

    /// Rounds that take about this long on one thread.
    pub fn rounds(&self, time: Duration) -> u64 {
        const TRIAL: u64 = 10_000;
        let start = Instant::now();
        self.run(TRIAL);
        let one = start.elapsed().as_secs_f64() / TRIAL as f64;
        (time.as_secs_f64() / one) as u64 + 1
    }

    /// Runs on the calling thread.
    pub fn run(&self, rounds: u64) {
        // Safety: `kernels` lists only what the processor has.
        unsafe { (self.run)(rounds) }
    }

    /// Multiply-adds of f32, widest instructions first; never empty.
    pub fn fma() -> Vec<Self> {
        kernels::fma()
    }

    /// Products of bf16 pairs added up in f32, where the processor has them.
    pub fn bf16() -> Option<Self> {
        kernels::bf16()
    }
}

/// Larger than any cache that one process has to itself.
pub const READ_BYTES: usize = 512 << 20;

/// The ceilings of a number of threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// FLOP/s of f32 multiply-adds.
    pub fma: f64,
    /// FLOP/s of bf16 products, where the processor has them.
    pub bf16: Option<f64>,
    /// Bytes/s of reads from memory.
    pub read: f64,
}

/// [`READ_BYTES`] to read.
pub struct Memory(Vec<u64>);

impl Memory {
    /// Memory with something in every page: pages that were never written are all the same one.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self((0..(READ_BYTES / 8) as u64).collect())
    }
}

/// Measures ceilings on threads of its own.
pub struct Probe {
    pool: ThreadPool,
    fma: Kernel,
}

impl Probe {
    /// A probe of so many threads.
    ///
    /// # Panics
    /// If threads cannot be started.
    pub fn new(threads: usize) -> Self {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads of a probe");
        Self { pool, fma: Kernel::fma()[0] }
    }

    /// Its threads.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs a kernel on every thread.
    pub fn run(&self, kernel: &Kernel, rounds: u64) {
        self.pool.broadcast(|_| kernel.run(rounds));
    }

    /// Reads all of it, a part on each thread.
    pub fn read(&self, memory: &Memory) {
        let sums = self.pool.broadcast(|t| {
            let n = memory.0.len() / t.num_threads();
            sum(&memory.0[t.index() * n..][..n])
        });
        black_box(sums);
    }

    /// FLOP/s of a kernel on all threads: the best of several short runs.
    pub fn flops(&self, kernel: &Kernel) -> f64 {
        let rounds = kernel.rounds(Duration::from_millis(4));
        let flops = kernel.flops(rounds) * self.threads() as u64;
        flops as f64 / best(5, || self.run(kernel, rounds))
    }

    /// FLOP/s of f32 multiply-adds now; takes a few hundredths of a second.
    pub fn fma(&self) -> f64 {
        self.flops(&self.fma)
    }

    /// All ceilings.
    pub fn ceilings(&self) -> Ceilings {
        let memory = Memory::new();
        let read = READ_BYTES as f64 / best(5, || self.read(&memory));
        Ceilings { fma: self.fma(), bf16: Kernel::bf16().map(|k| self.flops(&k)), read }
    }
}

/// Seconds of the fastest run.
fn best(runs: usize, mut f: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    };
    (0..runs).map(time).fold(f64::INFINITY, f64::min)
}

/// Eight sums at a time, which the compiler turns into vectors: enough to keep up with memory.
fn sum(values: &[u64]) -> u64 {
    let (chunks, rest) = values.as_chunks::<8>();
    let mut sums = [0u64; 8];
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(s, v)| *s = s.wrapping_add(*v));
    }
    sums.iter().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}
