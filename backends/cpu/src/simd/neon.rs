//! NEON: 16 f32 are four registers.

use super::Simd;
use crate::convert;
use core::{arch::aarch64::*, array::from_fn};

/// NEON, which every aarch64 target with floating point has.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

// Safety of the blocks below: NEON is part of the target, and pointers are valid for 16 elements.
impl Simd for Neon {
    type V = [float32x4_t; 4];
    type S = f32;
    type I = [uint32x4_t; 4];
    // 24 accumulators, 4 for the panel.
    const MR: usize = 6;
    const PR: usize = 1;

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
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { from_fn(|i| vmulq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { from_fn(|i| vaddq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { from_fn(|i| vsubq_f32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn half(p: *const u8) -> Self::V {
        // A loop that vectorises: conversion instructions would need a type that the language does not have yet.
        let x: [f32; 16] = from_fn(|i| convert::f16_to_f32(unsafe { p.cast::<u16>().add(i).read_unaligned() }));
        unsafe { Self::load(x.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> Self::I {
        unsafe {
            let b = vld1q_u8(p);
            let (low, high) = (vmovl_u8(vget_low_u8(b)), vmovl_high_u8(b));
            [vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)]
        }
    }
    #[inline(always)]
    unsafe fn signed_bytes(p: *const u8) -> Self::I {
        unsafe {
            let b = vld1q_s8(p.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(b)), vmovl_high_s8(b));
            [vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)]
                .map(|x| vreinterpretq_u32_s32(x))
        }
    }
    #[inline(always)]
    unsafe fn words(p: *const u8) -> Self::I {
        unsafe { from_fn(|i| vreinterpretq_u32_u8(vld1q_u8(p.add(16 * i)))) }
    }
    #[inline(always)]
    unsafe fn store_words(p: *mut u32, v: Self::I) {
        for (i, v) in v.into_iter().enumerate() {
            unsafe { vst1q_u32(p.add(4 * i), v) }
        }
    }
    #[inline(always)]
    unsafe fn splat_word(word: u32) -> Self::I {
        unsafe { [vdupq_n_u32(word); 4] }
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, mask: u32) -> Self::I {
        unsafe { from_fn(|i| vandq_u32(a[i], vdupq_n_u32(mask))) }
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        unsafe { from_fn(|i| vorrq_u32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn minus(a: Self::I, b: u32) -> Self::I {
        unsafe { from_fn(|i| vsubq_u32(a[i], vdupq_n_u32(b))) }
    }
    #[inline(always)]
    unsafe fn shl(a: Self::I, n: u32) -> Self::I {
        unsafe { from_fn(|i| vshlq_u32(a[i], vdupq_n_s32(n as i32))) }
    }
    #[inline(always)]
    unsafe fn shr(a: Self::I, n: u32) -> Self::I {
        unsafe { from_fn(|i| vshlq_u32(a[i], vdupq_n_s32(-(n as i32)))) }
    }
    #[inline(always)]
    unsafe fn float(a: Self::I) -> Self::V {
        unsafe { from_fn(|i| vcvtq_f32_s32(vreinterpretq_s32_u32(a[i]))) }
    }
    #[inline(always)]
    unsafe fn bits(a: Self::I) -> Self::V {
        unsafe { from_fn(|i| vreinterpretq_f32_u32(a[i])) }
    }
}
