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
    type I = __m512i;
    // 27 accumulators, 3 for the panels, 1 for the left operand: 12 loads per 27 FMAs leave the cache ports idle now and then.
    const MR: usize = 9;
    const PR: usize = 3;

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
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn half(p: *const u8) -> Self::V {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> Self::I {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn signed_bytes(p: *const u8) -> Self::I {
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn words(p: *const u8) -> Self::I {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_words(p: *mut u32, v: Self::I) {
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn splat_word(word: u32) -> Self::I {
        unsafe { _mm512_set1_epi32(word as i32) }
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, mask: u32) -> Self::I {
        unsafe { _mm512_and_si512(a, _mm512_set1_epi32(mask as i32)) }
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn minus(a: Self::I, b: u32) -> Self::I {
        unsafe { _mm512_sub_epi32(a, _mm512_set1_epi32(b as i32)) }
    }
    #[inline(always)]
    unsafe fn shl(a: Self::I, n: u32) -> Self::I {
        unsafe { _mm512_sll_epi32(a, _mm_cvtsi32_si128(n as i32)) }
    }
    #[inline(always)]
    unsafe fn shr(a: Self::I, n: u32) -> Self::I {
        unsafe { _mm512_srl_epi32(a, _mm_cvtsi32_si128(n as i32)) }
    }
    #[inline(always)]
    unsafe fn top(a: Self::I, n: u32) -> Self::I {
        // As in AVX2.
        unsafe {
            let words = _mm512_set4_epi32(12 << 24, 8 << 24, 4 << 24, 0);
            _mm512_shuffle_epi8(a, _mm512_or_si512(_mm512_set1_epi32(((n << 24) | 0x0080_8080) as i32), words))
        }
    }
    #[inline(always)]
    unsafe fn float(a: Self::I) -> Self::V {
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn bits(a: Self::I) -> Self::V {
        unsafe { _mm512_castsi512_ps(a) }
    }
}
