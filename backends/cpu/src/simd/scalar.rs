//! Portable vectors; the compiler maps them to what its target has.

use super::Simd;
use core::array::from_fn;

/// Arrays, with products and sums rounded separately.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

impl Simd for Scalar {
    type V = [f32; 16];
    type S = f32;
    const MR: usize = 2;

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
}
