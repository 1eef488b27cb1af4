//! The NEON tier: four blocks per iteration.

use super::kernels::tier_table;
use super::lanes::Lanes;
use core::arch::aarch64::*;

/// Proof that the CPU has NEON.
#[derive(Clone, Copy)]
pub(super) struct Neon(());

impl Neon {
    /// # Safety
    /// The CPU must have NEON.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

tier_table!("neon", "neon", Neon);

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

/// Lane i stands for block i: the interleaving store does the transpose.
impl Lanes for Neon {
    type F = float32x4_t;
    type U = uint32x4_t;
    type P = uint32x4_t;
    const BLOCKS: usize = 4;

    ops! {
        blocks(first: u32) -> uint32x4_t { vaddq_u32(vdupq_n_u32(first), vld1q_u32([0, 1, 2, 3].as_ptr())) }
        splat_p(x: u32) -> uint32x4_t { vdupq_n_u32(x) }
        xor_p(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { veorq_u32(a, b) }
        product(a: uint32x4_t, m: u32) -> (uint32x4_t, uint32x4_t) {{
            let m = vdupq_n_u32(m);
            let low = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a), vget_low_u32(m)));
            let high = vreinterpretq_u32_u64(vmull_high_u32(a, m));
            (vuzp2q_u32(low, high), vuzp1q_u32(low, high))
        }}
        finish(a: uint32x4_t) -> uint32x4_t { a }
        splat(x: u32) -> uint32x4_t { vdupq_n_u32(x) }
        add_u(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { vaddq_u32(a, b) }
        and(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { vandq_u32(a, b) }
        or(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { vorrq_u32(a, b) }
        xor(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { veorq_u32(a, b) }
        shl1(a: uint32x4_t) -> uint32x4_t { vshlq_n_u32::<1>(a) }
        shl2(a: uint32x4_t) -> uint32x4_t { vshlq_n_u32::<2>(a) }
        shr1(a: uint32x4_t) -> uint32x4_t { vshrq_n_u32::<1>(a) }
        sar23(a: uint32x4_t) -> uint32x4_t { vreinterpretq_u32_s32(vshrq_n_s32::<23>(vreinterpretq_s32_u32(a))) }
        float(a: uint32x4_t) -> float32x4_t { vcvtq_f32_s32(vreinterpretq_s32_u32(a)) }
        bits(a: float32x4_t) -> uint32x4_t { vreinterpretq_u32_f32(a) }
        of_bits(a: uint32x4_t) -> float32x4_t { vreinterpretq_f32_u32(a) }
        add(a: float32x4_t, b: float32x4_t) -> float32x4_t { vaddq_f32(a, b) }
        mul(a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
        sqrt(a: float32x4_t) -> float32x4_t { vsqrtq_f32(a) }
        select(mask: uint32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
            vbslq_f32(vreinterpretq_u32_s32(vshrq_n_s32::<31>(vreinterpretq_s32_u32(mask))), b, a)
        }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const u32) -> uint32x4_t {
        // Safety: `self` proves NEON; the caller grants four words.
        unsafe { vld1q_u32(from) }
    }

    #[inline(always)]
    unsafe fn store(self, a: float32x4_t, to: *mut f32) {
        // Safety: `self` proves NEON; the caller grants four numbers.
        unsafe { vst1q_f32(to, a) }
    }

    #[inline(always)]
    unsafe fn store4(self, z: [float32x4_t; 4], to: *mut f32) {
        // Safety: `self` proves NEON; the caller grants 16 numbers.
        unsafe { vst4q_f32(to, float32x4x4_t(z[0], z[1], z[2], z[3])) }
    }
}
