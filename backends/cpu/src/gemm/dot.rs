//! Products of bf16 by bf16 with AVX512-BF16: `acc + a[2k] b[2k] + a[2k + 1] b[2k + 1]` in one instruction.
//!
//! The instruction rounds the sum of a pair into the accumulator and takes subnormals for zero; an element is still one chain over k
//! ascending, so rows stay independent of each other.

use super::{
    NR,
    kernel::{Acc, Dot, load, store, tiles},
};
use crate::simd::Avx512;
use core::arch::x86_64::*;

pub(super) static DOT: Dot = Dot { sweep, pair };

/// # Safety
/// Rows are valid for `pairs` pairs, panels for `pairs * 16`, `acc` for all rows and panels; the processor has the features.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn sweep(pairs: usize, rows: &[*const u32], b: *const u32, distance: usize, np: usize, acc: Acc) {
    macro_rules! run {
        ($m:literal, $p:literal, $i:expr, $at:expr) => {
            // Safety: rows, panels and accumulators are those of the caller's promise.
            unsafe { micro::<$m, $p>(pairs, rows.as_ptr().add($i), b.add($at * distance * NR), distance, acc.at($i, $at * NR)) }
        };
    }
    tiles!(9, 3, rows.len(), np, run);
}

/// `M` rows by `P` panels, all accumulators in registers.
///
/// # Safety
/// As for [`sweep`], of `M` rows and `P` panels.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn micro<const M: usize, const P: usize>(pairs: usize, rows: *const *const u32, b: *const u32, distance: usize, place: Acc) {
    // Safety: within what the caller promises; a vector of 32 bf16 is any 64 bytes.
    unsafe {
        let a: [*const u32; M] = core::array::from_fn(|i| *rows.add(i));
        let mut acc = load::<Avx512, M, P>(&place);
        for k in 0..pairs {
            let v: [__m512bh; P] =
                core::array::from_fn(|p| core::mem::transmute(_mm512_loadu_si512(b.add((p * distance + k) * NR).cast())));
            for (row, a) in acc.iter_mut().zip(&a) {
                let x: __m512bh = core::mem::transmute(_mm512_set1_epi32(a.add(k).read_unaligned() as i32));
                for (acc, v) in row.iter_mut().zip(&v) {
                    *acc = _mm512_dpbf16_ps(*acc, x, *v);
                }
            }
        }
        store::<Avx512, M, P>(acc, &place);
    }
}

/// # Safety
/// `src` is valid for `2 * pairs * 16` elements, `dst` for `pairs * 16`; the processor has the features.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn pair(src: *const f32, pairs: usize, dst: *mut u32) {
    // Safety: the caller's promise.
    unsafe {
        for k in 0..pairs {
            let (first, second) = (_mm512_loadu_ps(src.add(2 * k * NR)), _mm512_loadu_ps(src.add((2 * k + 1) * NR)));
            let narrow = |x: __m512| -> __m512i { _mm512_cvtepu16_epi32(core::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x))) };
            let both = _mm512_or_si512(narrow(first), _mm512_slli_epi32::<16>(narrow(second)));
            _mm512_storeu_si512(dst.add(k * NR).cast(), both);
        }
    }
}
