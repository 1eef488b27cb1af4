//! The AVX2 tier: eight blocks per iteration.

use super::kernels::tier_table;
use super::lanes::Lanes;
use core::arch::x86_64::*;

/// Proof that the CPU has AVX2.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU must have AVX2.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

tier_table!("avx2", "avx2", Avx2);

macro_rules! ops {
    ($($f:ident($($arg:ident: $t:ty),*) -> $r:ty { $body:expr })*) => {
        $(
            #[inline(always)]
            // Safe where the whole crate is compiled for the instructions.
            #[allow(unused_unsafe)]
            fn $f(self, $($arg: $t),*) -> $r {
                // Safety: `self` proves that the CPU has the instructions.
                unsafe { $body }
            }
        )*
    };
}

/// `P` is a pair of registers of four 64-bit lanes, the word in each lane's low half. What the high halves hold does not matter: the
/// multiplication ignores them, so the low half of a product needs no extraction.
///
/// Once joined, 32-bit lane i of 128-bit half h stands for block `2 i + h`; the transpose within halves then yields blocks in order.
impl Lanes for Avx2 {
    type F = __m256;
    type U = __m256i;
    type P = [__m256i; 2];
    const BLOCKS: usize = 8;

    ops! {
        blocks(first: u32) -> [__m256i; 2] {{
            let first = _mm256_set1_epi64x(first as i64);
            [
                _mm256_add_epi32(first, _mm256_setr_epi64x(0, 4, 1, 5)),
                _mm256_add_epi32(first, _mm256_setr_epi64x(2, 6, 3, 7)),
            ]
        }}
        splat_p(x: u32) -> [__m256i; 2] { [_mm256_set1_epi32(x as i32); 2] }
        xor_p(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_xor_si256(a[0], b[0]), _mm256_xor_si256(a[1], b[1])]
        }
        product(a: [__m256i; 2], m: u32) -> ([__m256i; 2], [__m256i; 2]) {{
            let m = _mm256_set1_epi32(m as i32);
            let p = [_mm256_mul_epu32(a[0], m), _mm256_mul_epu32(a[1], m)];
            ([_mm256_srli_epi64::<32>(p[0]), _mm256_srli_epi64::<32>(p[1])], p)
        }}
        finish(a: [__m256i; 2]) -> __m256i {
            _mm256_blend_epi32::<0b1010_1010>(a[0], _mm256_slli_epi64::<32>(a[1]))
        }
        splat(x: u32) -> __m256i { _mm256_set1_epi32(x as i32) }
        add_u(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        and(a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        or(a: __m256i, b: __m256i) -> __m256i { _mm256_or_si256(a, b) }
        xor(a: __m256i, b: __m256i) -> __m256i { _mm256_xor_si256(a, b) }
        shl1(a: __m256i) -> __m256i { _mm256_slli_epi32::<1>(a) }
        shl2(a: __m256i) -> __m256i { _mm256_slli_epi32::<2>(a) }
        shr1(a: __m256i) -> __m256i { _mm256_srli_epi32::<1>(a) }
        sar23(a: __m256i) -> __m256i { _mm256_srai_epi32::<23>(a) }
        float(a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
        bits(a: __m256) -> __m256i { _mm256_castps_si256(a) }
        of_bits(a: __m256i) -> __m256 { _mm256_castsi256_ps(a) }
        add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        sqrt(a: __m256) -> __m256 { _mm256_sqrt_ps(a) }
        select(mask: __m256i, a: __m256, b: __m256) -> __m256 { _mm256_blendv_ps(a, b, _mm256_castsi256_ps(mask)) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const u32) -> __m256i {
        // Safety: `self` proves AVX2; the caller grants eight words.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store(self, a: __m256, to: *mut f32) {
        // Safety: `self` proves AVX2; the caller grants eight numbers.
        unsafe { _mm256_storeu_ps(to, a) }
    }

    #[inline(always)]
    unsafe fn store4(self, z: [__m256; 4], to: *mut f32) {
        // Safety: `self` proves AVX2; the caller grants 32 numbers.
        unsafe {
            let (a, b) = (_mm256_unpacklo_ps(z[0], z[1]), _mm256_unpackhi_ps(z[0], z[1]));
            let (c, d) = (_mm256_unpacklo_ps(z[2], z[3]), _mm256_unpackhi_ps(z[2], z[3]));
            let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
            let (c, d) = (_mm256_castps_pd(c), _mm256_castps_pd(d));
            let to = to.cast::<f64>();
            _mm256_storeu_pd(to, _mm256_unpacklo_pd(a, c));
            _mm256_storeu_pd(to.add(4), _mm256_unpackhi_pd(a, c));
            _mm256_storeu_pd(to.add(8), _mm256_unpacklo_pd(b, d));
            _mm256_storeu_pd(to.add(12), _mm256_unpackhi_pd(b, d));
        }
    }
}
