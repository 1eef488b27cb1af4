//! The AVX-512 tier (foundation subset only): sixteen blocks per iteration.

use super::kernels::tier_table;
use super::lanes::Lanes;
use core::arch::x86_64::*;

/// Proof that the CPU has AVX-512F.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The CPU must have AVX-512F.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

tier_table!("avx512", "avx512f", Avx512);

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

/// `P` is a pair of registers of eight 64-bit lanes, the word in each lane's low half. What the high halves hold does not matter: the
/// multiplication ignores them, so the low half of a product needs no extraction.
///
/// Once joined, 32-bit lane i of 128-bit quarter h stands for block `4 i + h`; the transpose within quarters then yields blocks in order.
impl Lanes for Avx512 {
    type F = __m512;
    type U = __m512i;
    type P = [__m512i; 2];
    const BLOCKS: usize = 16;

    ops! {
        blocks(first: u32) -> [__m512i; 2] {{
            let first = _mm512_set1_epi64(first as i64);
            [
                _mm512_add_epi32(first, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11)),
                _mm512_add_epi32(first, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15)),
            ]
        }}
        splat_p(x: u32) -> [__m512i; 2] { [_mm512_set1_epi32(x as i32); 2] }
        xor_p(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512i; 2] {
            [_mm512_xor_si512(a[0], b[0]), _mm512_xor_si512(a[1], b[1])]
        }
        product(a: [__m512i; 2], m: u32) -> ([__m512i; 2], [__m512i; 2]) {{
            let m = _mm512_set1_epi32(m as i32);
            let p = [_mm512_mul_epu32(a[0], m), _mm512_mul_epu32(a[1], m)];
            ([_mm512_srli_epi64::<32>(p[0]), _mm512_srli_epi64::<32>(p[1])], p)
        }}
        finish(a: [__m512i; 2]) -> __m512i {
            _mm512_mask_blend_epi32(0b1010_1010_1010_1010, a[0], _mm512_slli_epi64::<32>(a[1]))
        }
        splat(x: u32) -> __m512i { _mm512_set1_epi32(x as i32) }
        add_u(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        and(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        xor(a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
        shl1(a: __m512i) -> __m512i { _mm512_slli_epi32::<1>(a) }
        shl2(a: __m512i) -> __m512i { _mm512_slli_epi32::<2>(a) }
        shr1(a: __m512i) -> __m512i { _mm512_srli_epi32::<1>(a) }
        sar23(a: __m512i) -> __m512i { _mm512_srai_epi32::<23>(a) }
        float(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        bits(a: __m512) -> __m512i { _mm512_castps_si512(a) }
        of_bits(a: __m512i) -> __m512 { _mm512_castsi512_ps(a) }
        add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        sqrt(a: __m512) -> __m512 { _mm512_sqrt_ps(a) }
        select(mask: __m512i, a: __m512, b: __m512) -> __m512 {
            _mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(mask, _mm512_setzero_si512()), a, b)
        }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const u32) -> __m512i {
        // Safety: `self` proves AVX-512F; the caller grants sixteen words.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store(self, a: __m512, to: *mut f32) {
        // Safety: `self` proves AVX-512F; the caller grants sixteen numbers.
        unsafe { _mm512_storeu_ps(to, a) }
    }

    #[inline(always)]
    unsafe fn store4(self, z: [__m512; 4], to: *mut f32) {
        // Safety: `self` proves AVX-512F; the caller grants 64 numbers.
        unsafe {
            let (a, b) = (_mm512_unpacklo_ps(z[0], z[1]), _mm512_unpackhi_ps(z[0], z[1]));
            let (c, d) = (_mm512_unpacklo_ps(z[2], z[3]), _mm512_unpackhi_ps(z[2], z[3]));
            let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
            let (c, d) = (_mm512_castps_pd(c), _mm512_castps_pd(d));
            let to = to.cast::<f64>();
            _mm512_storeu_pd(to, _mm512_unpacklo_pd(a, c));
            _mm512_storeu_pd(to.add(8), _mm512_unpackhi_pd(a, c));
            _mm512_storeu_pd(to.add(16), _mm512_unpacklo_pd(b, d));
            _mm512_storeu_pd(to.add(24), _mm512_unpackhi_pd(b, d));
        }
    }
}
