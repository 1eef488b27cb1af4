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
    type I = [__m256i; 2];
    // 12 accumulators, 2 for the panel, 2 left.
    const MR: usize = 6;
    const PR: usize = 1;

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
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn half(p: *const u8) -> Self::V {
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast()))] }
    }

    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> Self::I {
        unsafe { [_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())), _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast()))] }
    }
    #[inline(always)]
    unsafe fn signed_bytes(p: *const u8) -> Self::I {
        unsafe { [_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())), _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()))] }
    }
    #[inline(always)]
    unsafe fn words(p: *const u8) -> Self::I {
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn store_words(p: *mut u32, v: Self::I) {
        unsafe {
            _mm256_storeu_si256(p.cast(), v[0]);
            _mm256_storeu_si256(p.add(8).cast(), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn splat_word(word: u32) -> Self::I {
        unsafe { [_mm256_set1_epi32(word as i32); 2] }
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, mask: u32) -> Self::I {
        unsafe { [_mm256_and_si256(a[0], _mm256_set1_epi32(mask as i32)), _mm256_and_si256(a[1], _mm256_set1_epi32(mask as i32))] }
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn minus(a: Self::I, b: u32) -> Self::I {
        unsafe { [_mm256_sub_epi32(a[0], _mm256_set1_epi32(b as i32)), _mm256_sub_epi32(a[1], _mm256_set1_epi32(b as i32))] }
    }
    #[inline(always)]
    unsafe fn shl(a: Self::I, n: u32) -> Self::I {
        unsafe { [_mm256_sll_epi32(a[0], _mm_cvtsi32_si128(n as i32)), _mm256_sll_epi32(a[1], _mm_cvtsi32_si128(n as i32))] }
    }
    #[inline(always)]
    unsafe fn shr(a: Self::I, n: u32) -> Self::I {
        unsafe { [_mm256_srl_epi32(a[0], _mm_cvtsi32_si128(n as i32)), _mm256_srl_epi32(a[1], _mm_cvtsi32_si128(n as i32))] }
    }
    #[inline(always)]
    unsafe fn top(a: Self::I, n: u32) -> Self::I {
        // Of a lane's 16 places the top ones take byte n of their words, others zero.
        unsafe {
            let places = _mm256_or_si256(
                _mm256_set1_epi32(((n << 24) | 0x0080_8080) as i32),
                _mm256_set_epi32(12 << 24, 8 << 24, 4 << 24, 0, 12 << 24, 8 << 24, 4 << 24, 0),
            );
            a.map(|a| _mm256_shuffle_epi8(a, places))
        }
    }
    #[inline(always)]
    unsafe fn float(a: Self::I) -> Self::V {
        unsafe { [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])] }
    }
    #[inline(always)]
    unsafe fn bits(a: Self::I) -> Self::V {
        unsafe { [_mm256_castsi256_ps(a[0]), _mm256_castsi256_ps(a[1])] }
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
