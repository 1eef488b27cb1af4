//! Which instruction set generates.

use super::kernels::Table;
use super::scalar;
use core::fmt;

/// An instruction set that this CPU has. All tiers give the same bits; they differ in speed.
///
/// With the feature `std` the CPU is asked; without it a tier is there iff the crate was compiled for it
/// (`-C target-feature=+avx2`, or an aarch64 target with NEON).
#[derive(Clone, Copy)]
pub struct Tier(&'static Table);

/// `true` where the CPU has the feature, as far as this build can know.
#[cfg(target_arch = "x86_64")]
macro_rules! has {
    ($feature:tt) => {{
        #[cfg(feature = "std")]
        let has = std::arch::is_x86_feature_detected!($feature);
        #[cfg(not(feature = "std"))]
        let has = cfg!(target_feature = $feature);
        has
    }};
}

impl Tier {
    /// Plain code, which every CPU runs.
    pub const SCALAR: Self = Self(&scalar::TABLE);

    /// Every tier of this CPU, fastest first; [`Tier::SCALAR`] is the last.
    pub fn available() -> impl Iterator<Item = Self> {
        let tiers = [
            #[cfg(target_arch = "x86_64")]
            has!("avx512f").then_some(Self(&super::avx512::TABLE)),
            #[cfg(target_arch = "x86_64")]
            has!("avx2").then_some(Self(&super::avx2::TABLE)),
            #[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
            Some(Self(&super::neon::TABLE)),
            Some(Self::SCALAR),
        ];
        tiers.into_iter().flatten()
    }

    /// The fastest tier of this CPU.
    pub fn detect() -> Self {
        Self::available().next().unwrap_or(Self::SCALAR)
    }

    /// `scalar`, `avx2`, `avx512` or `neon`.
    pub const fn name(self) -> &'static str {
        self.0.name
    }

    /// [`radius`](super::normal::radius) of each word, over the shorter of the two; for tests that compare tiers and devices word by word.
    pub fn radius_into(self, words: &[u32], out: &mut [f32]) {
        let n = words.len().min(out.len());
        // Safety: a tier exists only where the CPU has its instructions.
        unsafe { (self.0.radius)(&words[..n], &mut out[..n]) }
    }

    /// [`cos_sin`](super::normal::cos_sin) of each word, over the shortest of the three; for tests as [`Tier::radius_into`].
    pub fn cos_sin_into(self, words: &[u32], cos: &mut [f32], sin: &mut [f32]) {
        let n = words.len().min(cos.len()).min(sin.len());
        // Safety: a tier exists only where the CPU has its instructions.
        unsafe { (self.0.cos_sin)(&words[..n], &mut cos[..n], &mut sin[..n]) }
    }

    pub(super) const fn table(self) -> &'static Table {
        self.0
    }
}

impl PartialEq for Tier {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Tier {}

impl fmt::Debug for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tier({})", self.name())
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
