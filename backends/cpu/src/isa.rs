//! Instruction-set tiers: which exist here, and running a kernel compiled for one.

use crate::simd::{self, Simd};
use alloc::{format, vec::Vec};
use core::fmt;
use zofo_hal::{Error, Result};

/// A set of instructions that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Isa {
    /// What the compiler may use anyway; products without fused multiply-add.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same with AVX512-BF16: products of bf16 by bf16 in one instruction.
    Avx512Bf16,
    /// aarch64 with NEON.
    Neon,
    /// The same with FEAT_BF16: products of bf16 by bf16 in one instruction.
    NeonBf16,
}

impl Isa {
    /// Every tier, slowest first.
    pub const ALL: [Self; 6] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Neon, Self::NeonBf16];

    /// Tiers that this machine runs, slowest first. Without feature `std` these are the ones that the crate was compiled for.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The tier called `name`, if this machine runs it.
    ///
    /// # Errors
    /// `InvalidArgument`, with the tiers that it does run.
    pub fn named(name: &str) -> Result<Self> {
        Self::available().into_iter().find(|isa| isa.name() == name).ok_or_else(|| Self::lacking(name))
    }

    pub(crate) fn lacking(name: &str) -> Error {
        let has: Vec<&str> = Self::available().into_iter().map(Self::name).collect();
        Error::invalid(format!("this CPU or build has no {name}; it has {}", has.join(", ")))
    }

    /// The name used in device names, tables and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Neon => "neon",
            Self::NeonBf16 => "neon-bf16",
        }
    }

    /// Whether it is faster than the tiers before it. The dot product of bf16 pairs takes AMD's Zen 4 as long as one FMA, and Intel's Emerald
    /// Rapids as long as four (`docs/performance.md`).
    fn is_worthwhile(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Avx512Bf16 {
            let vendor = core::arch::x86_64::__cpuid(0);
            return [vendor.ebx, vendor.edx, vendor.ecx]
                == [u32::from_le_bytes(*b"Auth"), u32::from_le_bytes(*b"enti"), u32::from_le_bytes(*b"cAMD")];
        }
        true
    }

    fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => x86_has!("avx2", "fma", "f16c"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Self::Avx2.is_available() && x86_has!("avx512f", "avx512bw", "avx512dq", "avx512vl"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Self::Avx512.is_available() && x86_has!("avx512bf16"),
            Self::Neon => cfg!(all(target_arch = "aarch64", target_feature = "neon")),
            #[cfg(target_arch = "aarch64")]
            Self::NeonBf16 => Self::Neon.is_available() && aarch64_has!("bf16"),
            _ => false,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether the processor (with `std`) or the compilation target has all these features.
#[cfg(target_arch = "x86_64")]
macro_rules! x86_has {
    ($($feature:tt),*) => {{
        #[cfg(feature = "std")]
        { $(std::arch::is_x86_feature_detected!($feature))&&* }
        #[cfg(not(feature = "std"))]
        { $(cfg!(target_feature = $feature))&&* }
    }};
}
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_has;

/// As [`x86_has`].
#[cfg(target_arch = "aarch64")]
macro_rules! aarch64_has {
    ($($feature:tt),*) => {{
        #[cfg(feature = "std")]
        { $(std::arch::is_aarch64_feature_detected!($feature))&&* }
        #[cfg(not(feature = "std"))]
        { $(cfg!(target_feature = $feature))&&* }
    }};
}
#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64_has;

/// A tier that is known to run here: the proof that its kernels may be called.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tier(Isa);

/// Code to be compiled once per tier. `run` must be `#[inline(always)]`, so that it takes on the features of the tier's wrapper.
pub(crate) trait Task {
    /// What it gives back.
    type Output;
    /// The code, over the tier's vectors.
    fn run<S: Simd>(self) -> Self::Output;
}

/// Declares a function whose body is compiled once per tier: `name(tier, arguments)`. In the body `S` is the tier's [`Simd`].
///
/// Bodies that do without `S` are plain loops, which the compiler vectorises for the tier; as nothing contracts products and sums, they
/// give the same bits on every tier.
macro_rules! tiered {
    ($(#[$meta:meta])* fn $name:ident $(<$life:lifetime>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        fn $name $(<$life>)? (tier: $crate::isa::Tier, $($arg: $ty),*) $(-> $out)? {
            struct Kernel $(<$life>)? { $($arg: $ty),* }
            impl $(<$life>)? $crate::isa::Task for Kernel $(<$life>)? {
                type Output = $crate::isa::output!($($out)?);
                #[inline(always)]
                fn run<S: $crate::simd::Simd>(self) -> Self::Output {
                    let Self { $($arg),* } = self;
                    $body
                }
            }
            tier.run(Kernel { $($arg),* })
        }
    };
}
pub(crate) use tiered;

/// The type, or nothing as `()`.
macro_rules! output {
    () => {
        ()
    };
    ($out:ty) => {
        $out
    };
}
pub(crate) use output;

impl Tier {
    /// The proof, if `isa` is available.
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        isa.is_available().then_some(Self(isa))
    }

    /// The fastest tier of this machine.
    pub(crate) fn best() -> Self {
        Self(Isa::ALL.into_iter().rev().find(|isa| isa.is_available() && isa.is_worthwhile()).unwrap_or(Isa::Scalar))
    }

    pub(crate) fn isa(self) -> Isa {
        self.0
    }

    /// Runs `task` as compiled for this tier.
    #[inline]
    pub(crate) fn run<T: Task>(self, task: T) -> T::Output {
        match self.0 {
            // Safety: a `Tier` exists only where its features do.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2(task) },
            // Safety: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 => unsafe { avx512(task) },
            #[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
            Isa::Neon | Isa::NeonBf16 => task.run::<simd::Neon>(),
            _ => task.run::<simd::Scalar>(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<T: Task>(task: T) -> T::Output {
    task.run::<simd::Avx2>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn avx512<T: Task>(task: T) -> T::Output {
    task.run::<simd::Avx512>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalar_is_always_there_and_first() {
        assert_eq!(Isa::available()[0], Isa::Scalar);
        assert!(Isa::available().contains(&Tier::best().isa()));
    }

    #[test]
    fn a_tier_of_another_architecture_is_refused() {
        let foreign = if cfg!(target_arch = "aarch64") { Isa::Avx2 } else { Isa::Neon };
        assert!(Tier::new(foreign).is_none());
        for name in [foreign.name(), "mmx"] {
            let e = Isa::named(name).unwrap_err();
            assert!(e.message().contains(name) && e.message().contains("it has scalar"), "{e}");
        }
    }

    #[test]
    fn names_find_their_tiers() {
        for isa in Isa::available() {
            assert_eq!(Isa::named(isa.name()).unwrap(), isa);
        }
    }
}
