//! What multiplies four codes by four codes in every lane.

use crate::simd::{self, Simd};

/// Exact dot products of bytes, and the one rounded step around them.
///
/// # Safety of all functions
/// The features are there.
#[allow(clippy::missing_safety_doc)]
pub(super) trait Dot: 'static {
    /// The vectors.
    type S: Simd;
    /// Rows of the largest micro-kernel: 6, 2 or 1.
    const ROWS: usize;
    /// Whether it takes two panels at a time.
    const PAIRS: bool;
    /// What [`biased`](Self::biased) adds to signed codes.
    const BIAS: i32;

    /// Signed codes as [`signed`](Self::signed) takes them.
    unsafe fn biased(codes: <Self::S as Simd>::I) -> <Self::S as Simd>::I;
    /// `acc + sum of four codes x`, for codes of 0 to 127.
    unsafe fn dot(acc: <Self::S as Simd>::I, codes: <Self::S as Simd>::I, x: u32) -> <Self::S as Simd>::I;
    /// The same for signed codes with [`BIAS`](Self::BIAS) added. No byte of `x` is -128.
    #[inline(always)]
    unsafe fn signed(acc: <Self::S as Simd>::I, codes: <Self::S as Simd>::I, x: u32) -> <Self::S as Simd>::I {
        // Safety: the caller's promise.
        unsafe { Self::dot(acc, codes, x) }
    }
    /// `acc + s v`, rounded once.
    #[inline(always)]
    unsafe fn fused(acc: <Self::S as Simd>::V, s: <Self::S as Simd>::S, v: <Self::S as Simd>::V) -> <Self::S as Simd>::V {
        // Safety: the caller's promise.
        unsafe { <Self::S as Simd>::fma(acc, s, v) }
    }
    /// [`dot`](Self::dot) or [`signed`](Self::signed) of two rows, over `N` groups of four steps from `start` on, if there is an instruction for
    /// two rows. `N` is even.
    const TWO: Option<Two<Self::S>> = None;
}

/// `start, codes, x`, see [`Dot::TWO`]; 4 or 8 groups.
pub(super) type Two<S> = unsafe fn([i32; 2], &[<S as Simd>::I], [&[u32]; 2]) -> [<S as Simd>::I; 2];

/// Plain loops: what the others must equal.
pub(super) struct Scalar;

impl Dot for Scalar {
    type S = simd::Scalar;
    const ROWS: usize = 1;
    const PAIRS: bool = false;
    const BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn biased(codes: [u32; 16]) -> [u32; 16] {
        codes
    }
    // A call: 16 lanes of plain code at every place would be most of the crate.
    #[inline(never)]
    unsafe fn dot(acc: [u32; 16], codes: [u32; 16], x: u32) -> [u32; 16] {
        let x = x.to_le_bytes().map(|x| i32::from(x as i8));
        core::array::from_fn(|i| {
            let codes = codes[i].to_le_bytes().map(|c| i32::from(c as i8));
            acc[i].wrapping_add((codes[0] * x[0] + codes[1] * x[1] + codes[2] * x[2] + codes[3] * x[3]) as u32)
        })
    }
    #[inline(never)]
    unsafe fn fused(acc: [f32; 16], s: f32, v: [f32; 16]) -> [f32; 16] {
        core::array::from_fn(|i| crate::math::fma(s, v[i], acc[i]))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use core::arch::x86_64::*;

    /// Products of bytes as pairs in 16 bits: 2 * 127 * 127 and, for signed codes by their magnitude, 2 * 128 * 127 do not overflow.
    pub(crate) struct Avx2;

    // Safety of the blocks below: the features are the caller's promise.
    impl Dot for Avx2 {
        type S = simd::Avx2;
        const ROWS: usize = 2;
        const PAIRS: bool = false;
        const BIAS: i32 = 0;

        #[inline(always)]
        unsafe fn biased(codes: [__m256i; 2]) -> [__m256i; 2] {
            codes
        }
        #[inline(always)]
        unsafe fn dot(acc: [__m256i; 2], codes: [__m256i; 2], x: u32) -> [__m256i; 2] {
            unsafe {
                let (x, ones) = (_mm256_set1_epi32(x as i32), _mm256_set1_epi16(1));
                let add = |acc, codes| _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), ones));
                [add(acc[0], codes[0]), add(acc[1], codes[1])]
            }
        }
        #[inline(always)]
        unsafe fn signed(acc: [__m256i; 2], codes: [__m256i; 2], x: u32) -> [__m256i; 2] {
            unsafe {
                let (x, ones) = (_mm256_set1_epi32(x as i32), _mm256_set1_epi16(1));
                let add = |acc, codes| {
                    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
                    _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, ones))
                };
                [add(acc[0], codes[0]), add(acc[1], codes[1])]
            }
        }
    }

    /// `vpdpbusd` of AVX-VNNI.
    pub(crate) struct AvxVnni;

    // Safety of the blocks below: as above.
    impl Dot for AvxVnni {
        type S = simd::Avx2;
        const ROWS: usize = 2;
        const PAIRS: bool = false;
        const BIAS: i32 = 128;

        #[inline(always)]
        unsafe fn biased(codes: [__m256i; 2]) -> [__m256i; 2] {
            unsafe { codes.map(|c| _mm256_xor_si256(c, _mm256_set1_epi8(-128))) }
        }
        #[inline(always)]
        unsafe fn dot(acc: [__m256i; 2], codes: [__m256i; 2], x: u32) -> [__m256i; 2] {
            unsafe {
                let x = _mm256_set1_epi32(x as i32);
                [_mm256_dpbusd_avx_epi32(acc[0], codes[0], x), _mm256_dpbusd_avx_epi32(acc[1], codes[1], x)]
            }
        }
    }

    /// `vpdpbusd` of AVX512-VNNI.
    pub(crate) struct Avx512Vnni;

    // Safety of the blocks below: as above.
    impl Dot for Avx512Vnni {
        type S = simd::Avx512;
        // 12 dot products and 12 sums.
        const ROWS: usize = 6;
        const PAIRS: bool = true;
        const BIAS: i32 = 128;

        #[inline(always)]
        unsafe fn biased(codes: __m512i) -> __m512i {
            unsafe { _mm512_xor_si512(codes, _mm512_set1_epi8(-128)) }
        }
        #[inline(always)]
        unsafe fn dot(acc: __m512i, codes: __m512i, x: u32) -> __m512i {
            unsafe { _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(x as i32)) }
        }
    }
}
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512Vnni, AvxVnni};

#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
mod neon {
    use super::*;
    use core::arch::{aarch64::*, asm};

    /// Products of bytes in 16 bits, added in pairs twice.
    pub(crate) struct Neon;

    // Safety of the blocks below: NEON is part of the target; the other features are the caller's promise.
    impl Dot for Neon {
        type S = simd::Neon;
        const ROWS: usize = 2;
        const PAIRS: bool = false;
        const BIAS: i32 = 0;

        #[inline(always)]
        unsafe fn biased(codes: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
            codes
        }
        #[inline(always)]
        unsafe fn dot(acc: [uint32x4_t; 4], codes: [uint32x4_t; 4], x: u32) -> [uint32x4_t; 4] {
            unsafe {
                let x = vreinterpretq_s8_u32(vdupq_n_u32(x));
                core::array::from_fn(|i| {
                    let codes = vreinterpretq_s8_u32(codes[i]);
                    let low = vpaddlq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(x)));
                    let high = vpaddlq_s16(vmull_high_s8(codes, x));
                    vaddq_u32(acc[i], vreinterpretq_u32_s32(vpaddq_s32(low, high)))
                })
            }
        }
    }

    /// `sdot`.
    pub(crate) struct NeonDot;

    // Safety of the blocks below: as above. The instruction reads and writes the named registers alone.
    impl Dot for NeonDot {
        type S = simd::Neon;
        const ROWS: usize = 2;
        const PAIRS: bool = false;
        const BIAS: i32 = 0;

        #[inline(always)]
        unsafe fn biased(codes: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
            codes
        }
        #[inline(always)]
        unsafe fn dot(acc: [uint32x4_t; 4], codes: [uint32x4_t; 4], x: u32) -> [uint32x4_t; 4] {
            unsafe {
                let x = vdupq_n_u32(x);
                core::array::from_fn(|i| {
                    let mut acc = acc[i];
                    // The intrinsic is not stable yet; neither is its feature part of every assembler's base.
                    asm!(
                        ".arch_extension dotprod",
                        "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
                        inlateout(vreg) acc,
                        in(vreg) codes[i],
                        in(vreg) x,
                        options(pure, nomem, nostack, preserves_flags)
                    );
                    acc
                })
            }
        }
    }

    /// `smmla`, and `sdot` for a row without a second.
    pub(crate) struct NeonMatrix;

    // Safety of the blocks below: as above.
    impl Dot for NeonMatrix {
        type S = simd::Neon;
        const ROWS: usize = 2;
        const PAIRS: bool = false;
        const BIAS: i32 = 0;
        const TWO: Option<Two<simd::Neon>> = Some(two);

        #[inline(always)]
        unsafe fn biased(codes: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
            codes
        }
        #[inline(always)]
        unsafe fn dot(acc: [uint32x4_t; 4], codes: [uint32x4_t; 4], x: u32) -> [uint32x4_t; 4] {
            unsafe { NeonDot::dot(acc, codes, x) }
        }
    }

    /// Two groups of steps at a time: 8 steps of 2 rows by 8 steps of 2 columns.
    ///
    /// # Safety
    /// The features are there.
    unsafe fn two(start: [i32; 2], codes: &[[uint32x4_t; 4]], x: [&[u32]; 2]) -> [[uint32x4_t; 4]; 2] {
        unsafe {
            let start = start.map(|s| vdup_n_u32(s as u32));
            // By two columns: both of the first row, both of the second.
            let mut acc = [vcombine_u32(start[0], start[1]); 8];
            for g in (0..codes.len()).step_by(2) {
                let rows = vcombine_u32(vld1_u32(x[0].as_ptr().add(g)), vld1_u32(x[1].as_ptr().add(g)));
                for i in 0..4 {
                    let (near, far) = (codes[g][i], codes[g + 1][i]);
                    acc[2 * i] = smmla(acc[2 * i], rows, vzip1q_u32(near, far));
                    acc[2 * i + 1] = smmla(acc[2 * i + 1], rows, vzip2q_u32(near, far));
                }
            }
            let row =
                |half: unsafe fn(uint32x4_t) -> uint32x2_t| core::array::from_fn(|i| vcombine_u32(half(acc[2 * i]), half(acc[2 * i + 1])));
            [row(vget_low_u32), row(vget_high_u32)]
        }
    }

    /// `acc[r][c] + sum over 8 steps of x[r] w[c]`, for 2 rows and 2 columns of signed bytes.
    ///
    /// # Safety
    /// The processor has the feature.
    #[inline(always)]
    unsafe fn smmla(mut acc: uint32x4_t, x: uint32x4_t, w: uint32x4_t) -> uint32x4_t {
        // Safety: the instruction reads and writes the named registers alone. Its intrinsic is not stable yet.
        unsafe {
            asm!(
                ".arch_extension i8mm",
                "smmla {0:v}.4s, {1:v}.16b, {2:v}.16b",
                inlateout(vreg) acc,
                in(vreg) x,
                in(vreg) w,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        acc
    }
}
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
pub(super) use neon::{Neon, NeonDot, NeonMatrix};
