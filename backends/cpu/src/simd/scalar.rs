//! Portable vectors; the compiler maps them to what its target has.

use super::Simd;
use crate::convert;
use core::array::from_fn;

/// Arrays, with products and sums rounded separately.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

impl Simd for Scalar {
    type V = [f32; 16];
    type S = f32;
    type I = [u32; 16];
    const MR: usize = 2;
    const PR: usize = 1;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        [0.0; 16]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // Safety: valid for 16 elements.
        unsafe { p.cast::<Self::V>().read() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // Safety: valid for 16 elements.
        unsafe { p.cast::<Self::V>().write(v) }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> f32 {
        // Safety: valid for one element.
        unsafe { *p }
    }
    #[inline(always)]
    unsafe fn fma(acc: Self::V, s: f32, v: Self::V) -> Self::V {
        from_fn(|i| acc[i] + s * v[i])
    }
    #[inline(always)]
    unsafe fn fma_vector(acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| acc[i] + a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn half(p: *const u8) -> Self::V {
        // Safety: valid for 16 elements.
        from_fn(|i| convert::f16_to_f32(unsafe { p.cast::<u16>().add(i).read_unaligned() }))
    }

    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> Self::I {
        // Safety: valid for 16 elements.
        from_fn(|i| unsafe { *p.add(i) }.into())
    }
    #[inline(always)]
    unsafe fn signed_bytes(p: *const u8) -> Self::I {
        // Safety: valid for 16 elements.
        from_fn(|i| i32::from(unsafe { *p.add(i) } as i8) as u32)
    }
    #[inline(always)]
    unsafe fn words(p: *const u8) -> Self::I {
        // Safety: valid for 16 elements.
        unsafe { p.cast::<Self::I>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_words(p: *mut u32, v: Self::I) {
        // Safety: valid for 16 elements.
        unsafe { p.cast::<Self::I>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn splat_word(word: u32) -> Self::I {
        [word; 16]
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, mask: u32) -> Self::I {
        a.map(|x| x & mask)
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    unsafe fn minus(a: Self::I, b: u32) -> Self::I {
        a.map(|x| x.wrapping_sub(b))
    }
    #[inline(always)]
    unsafe fn shl(a: Self::I, n: u32) -> Self::I {
        a.map(|x| x << n)
    }
    #[inline(always)]
    unsafe fn shr(a: Self::I, n: u32) -> Self::I {
        a.map(|x| x >> n)
    }
    #[inline(always)]
    unsafe fn float(a: Self::I) -> Self::V {
        a.map(|x| x as i32 as f32)
    }
    #[inline(always)]
    unsafe fn bits(a: Self::I) -> Self::V {
        a.map(f32::from_bits)
    }
}
