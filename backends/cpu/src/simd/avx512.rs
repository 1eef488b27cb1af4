//! AVX-512: 16 f32 are one register.

use super::{Simd, avx2};
use core::arch::x86_64::*;

/// AVX-512 F, BW, DQ, VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

// Safety of the blocks below: the caller promises the features, and pointers valid for 16 elements; unaligned loads and stores are used.
impl Simd for Avx512 {
    type V = __m512;
    type S = __m512;
    // Enough chains to hide the latency of two FMA units.
    const MR: usize = 12;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> __m512 {
        unsafe { _mm512_set1_ps(*p) }
    }
    #[inline(always)]
    unsafe fn fma(acc: Self::V, s: __m512, v: Self::V) -> Self::V {
        unsafe { _mm512_fmadd_ps(s, v, acc) }
    }
    #[inline(always)]
    unsafe fn fma_vector(acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_fmadd_ps(a, b, acc) }
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, ld: usize, dst: *mut f32) {
        unsafe {
            for i in [0, 8] {
                for j in [0, 8] {
                    avx2::transpose8(src.add(i * ld + j), ld, dst.add(j * 16 + i));
                }
            }
        }
    }
}
