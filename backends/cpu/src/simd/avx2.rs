//! AVX2 with FMA: 16 f32 are two registers.

use super::Simd;
use core::arch::x86_64::*;

/// AVX2 and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

// Safety of the blocks below: the caller promises AVX2 and FMA, and pointers valid for 16 elements; unaligned loads and stores are used.
impl Simd for Avx2 {
    type V = [__m256; 2];
    type S = __m256;
    // 12 accumulators, 2 for the panel, 2 left.
    const MR: usize = 6;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        unsafe { [_mm256_setzero_ps(); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> __m256 {
        unsafe { _mm256_broadcast_ss(&*p) }
    }
    #[inline(always)]
    unsafe fn fma(acc: Self::V, s: __m256, v: Self::V) -> Self::V {
        unsafe { [_mm256_fmadd_ps(s, v[0], acc[0]), _mm256_fmadd_ps(s, v[1], acc[1])] }
    }
    #[inline(always)]
    unsafe fn fma_vector(acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], acc[0]), _mm256_fmadd_ps(a[1], b[1], acc[1])] }
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, ld: usize, dst: *mut f32) {
        unsafe {
            for i in [0, 8] {
                for j in [0, 8] {
                    transpose8(src.add(i * ld + j), ld, dst.add(j * 16 + i));
                }
            }
        }
    }
}

/// `dst[j * 16 + i] = src[i * ld + j]` for 8 rows and columns.
#[inline(always)]
pub(super) unsafe fn transpose8(src: *const f32, ld: usize, dst: *mut f32) {
    // Safety: as above.
    unsafe {
        let r: [__m256; 8] = core::array::from_fn(|i| _mm256_loadu_ps(src.add(i * ld)));
        let (a0, a1) = (_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
        let (a2, a3) = (_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
        let (a4, a5) = (_mm256_unpacklo_ps(r[4], r[5]), _mm256_unpackhi_ps(r[4], r[5]));
        let (a6, a7) = (_mm256_unpacklo_ps(r[6], r[7]), _mm256_unpackhi_ps(r[6], r[7]));
        let (b0, b1) = (_mm256_shuffle_ps(a0, a2, 0x44), _mm256_shuffle_ps(a0, a2, 0xee));
        let (b2, b3) = (_mm256_shuffle_ps(a1, a3, 0x44), _mm256_shuffle_ps(a1, a3, 0xee));
        let (b4, b5) = (_mm256_shuffle_ps(a4, a6, 0x44), _mm256_shuffle_ps(a4, a6, 0xee));
        let (b6, b7) = (_mm256_shuffle_ps(a5, a7, 0x44), _mm256_shuffle_ps(a5, a7, 0xee));
        _mm256_storeu_ps(dst, _mm256_permute2f128_ps(b0, b4, 0x20));
        _mm256_storeu_ps(dst.add(16), _mm256_permute2f128_ps(b1, b5, 0x20));
        _mm256_storeu_ps(dst.add(32), _mm256_permute2f128_ps(b2, b6, 0x20));
        _mm256_storeu_ps(dst.add(48), _mm256_permute2f128_ps(b3, b7, 0x20));
        _mm256_storeu_ps(dst.add(64), _mm256_permute2f128_ps(b0, b4, 0x31));
        _mm256_storeu_ps(dst.add(80), _mm256_permute2f128_ps(b1, b5, 0x31));
        _mm256_storeu_ps(dst.add(96), _mm256_permute2f128_ps(b2, b6, 0x31));
        _mm256_storeu_ps(dst.add(112), _mm256_permute2f128_ps(b3, b7, 0x31));
    }
}
