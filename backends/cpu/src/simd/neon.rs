//! NEON: 16 f32 are four registers.

use super::Simd;
use core::{arch::aarch64::*, array::from_fn};

/// NEON, which every aarch64 target with floating point has.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

// Safety of the blocks below: NEON is part of the target, and pointers are valid for 16 elements.
impl Simd for Neon {
    type V = [float32x4_t; 4];
    type S = f32;
    // 24 accumulators, 4 for the panel.
    const MR: usize = 6;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        unsafe { [vdupq_n_f32(0.0); 4] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { from_fn(|i| vld1q_f32(p.add(4 * i))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        for (i, v) in v.into_iter().enumerate() {
            unsafe { vst1q_f32(p.add(4 * i), v) }
        }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> f32 {
        unsafe { *p }
    }
    #[inline(always)]
    unsafe fn fma(acc: Self::V, s: f32, v: Self::V) -> Self::V {
        unsafe { from_fn(|i| vfmaq_n_f32(acc[i], v[i], s)) }
    }
    #[inline(always)]
    unsafe fn fma_vector(acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
        unsafe { from_fn(|i| vfmaq_f32(acc[i], a[i], b[i])) }
    }
}
