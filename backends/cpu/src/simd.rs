//! Vectors of 16 f32 as each tier has them.
//!
//! Sixteen is the width of a weight panel on every tier ([`crate::gemm::NR`]), so tiers share packed weights.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
mod neon;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
pub(crate) use neon::Neon;
pub(crate) use scalar::Scalar;

/// The vectors of a tier.
///
/// # Safety of all functions
/// The tier's features are there (see [`crate::isa::Tier`]) and pointers are valid for 16 elements, of any alignment of f32.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Simd: 'static {
    /// 16 f32.
    type V: Copy;
    /// One f32 in every lane of a register.
    type S: Copy;
    /// 16 words of 32 bits.
    type I: Copy;
    /// Rows of the largest micro-kernel.
    const MR: usize;
    /// Its panels. Rows times panels are as many accumulators as the registers hold.
    const PR: usize;

    unsafe fn zero() -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// The element at `p` (one is enough) in every lane.
    unsafe fn splat(p: *const f32) -> Self::S;
    /// `acc + s v`, fused where the tier has it.
    unsafe fn fma(acc: Self::V, s: Self::S, v: Self::V) -> Self::V;
    /// `acc + a b`, fused where the tier has it.
    unsafe fn fma_vector(acc: Self::V, a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// 16 f16 at `p`.
    unsafe fn half(p: *const u8) -> Self::V;

    /// 16 bytes at `p`, zero-extended.
    unsafe fn bytes(p: *const u8) -> Self::I;
    /// 16 bytes at `p`, sign-extended.
    unsafe fn signed_bytes(p: *const u8) -> Self::I;
    /// 16 words at `p`.
    unsafe fn words(p: *const u8) -> Self::I;
    unsafe fn store_words(p: *mut u32, v: Self::I);
    /// One word in every lane.
    unsafe fn splat_word(word: u32) -> Self::I;
    unsafe fn and(a: Self::I, mask: u32) -> Self::I;
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    /// `a - b`, wrapping.
    unsafe fn minus(a: Self::I, b: u32) -> Self::I;
    /// By a constant it is one instruction.
    unsafe fn shl(a: Self::I, n: u32) -> Self::I;
    /// Zeros come in. By a constant it is one instruction.
    unsafe fn shr(a: Self::I, n: u32) -> Self::I;
    /// Byte `n` of every word as its highest, over zeros.
    #[inline(always)]
    unsafe fn top(a: Self::I, n: u32) -> Self::I {
        // Safety: the caller's promise.
        unsafe { Self::and(Self::shl(a, 24 - 8 * n), 0xff00_0000) }
    }
    /// Signed integers as f32.
    unsafe fn float(a: Self::I) -> Self::V;
    /// The same bits as f32.
    unsafe fn bits(a: Self::I) -> Self::V;
    /// `dst[j * 16 + i] = src[i * ld + j]` for 16 rows and columns.
    #[inline(always)]
    unsafe fn transpose(src: *const f32, ld: usize, dst: *mut f32) {
        for i in 0..16 {
            for j in 0..16 {
                // Safety: 16 rows of 16 elements are the caller's promise.
                unsafe { *dst.add(j * 16 + i) = *src.add(i * ld + j) };
            }
        }
    }
}

/// `sum of a[i] b[i]`, in an order that depends on the length alone.
///
/// # Safety
/// The tier's features are there.
#[inline(always)]
pub(crate) unsafe fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len());
    let whole = n - n % 16;
    let mut lanes = [0.0f32; 16];
    // Safety: every load stays below `whole`.
    unsafe {
        let mut acc = S::zero();
        let mut i = 0;
        while i < whole {
            acc = S::fma_vector(acc, S::load(a.as_ptr().add(i)), S::load(b.as_ptr().add(i)));
            i += 16;
        }
        if whole < n {
            let (mut x, mut y) = ([0.0f32; 16], [0.0f32; 16]);
            x[..n - whole].copy_from_slice(&a[whole..n]);
            y[..n - whole].copy_from_slice(&b[whole..n]);
            acc = S::fma_vector(acc, S::load(x.as_ptr()), S::load(y.as_ptr()));
        }
        S::store(lanes.as_mut_ptr(), acc);
    }
    crate::math::sum_lanes(lanes)
}
