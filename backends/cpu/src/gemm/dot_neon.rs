//! Products of bf16 by bf16 on aarch64 with FEAT_BF16: `bfmmla` adds the products of four steps to 2 rows by 2 columns.
//!
//! Per pair of steps the sum of both products is rounded, to odd, and then the accumulator's, with subnormals taken for zero (Arm ARM,
//! `BFDotAdd`, FPCR.EBF = 0); the second pair follows the first. So an element is still one chain over k ascending and rows stay independent of
//! each other, and 2 roundings of 2 U each per pair are what one rounding of U per step and one per product allow.

use super::{
    NR,
    kernel::{Acc, Dot},
};
use crate::convert;
use core::{
    arch::{aarch64::*, asm},
    array::from_fn,
};

pub(super) static DOT: Dot = Dot { sweep, pair };

/// Rows at a time: 24 accumulators, 3 for the rows, 4 for the panel.
const ROWS: usize = 6;

/// # Safety
/// Rows are valid for `pairs` pairs, panels for `pairs * 16`, `acc` for all rows and panels; the processor has the feature.
#[target_feature(enable = "bf16")]
unsafe fn sweep(pairs: usize, rows: &[*const u32], b: *const u32, distance: usize, np: usize, acc: Acc) {
    for p in 0..np {
        for (i, rows) in rows.chunks(ROWS).enumerate() {
            // Safety: rows, panels and accumulators are those of the caller's promise.
            unsafe {
                let (b, acc) = (b.add(p * distance * NR), acc.at(i * ROWS, p * NR));
                match rows.len() {
                    1 | 2 => micro::<1>(pairs, rows, b, acc),
                    3 | 4 => micro::<2>(pairs, rows, b, acc),
                    _ => micro::<3>(pairs, rows, b, acc),
                }
            }
        }
    }
}

/// `M` twos of rows, of which the last may be one alone, by a panel.
///
/// # Safety
/// As for [`sweep`].
#[inline]
#[target_feature(enable = "bf16")]
unsafe fn micro<const M: usize>(pairs: usize, rows: &[*const u32], b: *const u32, place: Acc) {
    // Safety: within what the caller promises. A row without a second stands in for it, and is stored once.
    unsafe {
        let number: [[usize; 2]; M] = from_fn(|i| [2 * i, (2 * i + 1).min(rows.len() - 1)]);
        let x: [[*const u32; 2]; M] = number.map(|two| two.map(|i| rows[i]));
        let mut acc = [[vdupq_n_f32(0.0); NR / 2]; M];
        for (acc, [first, second]) in acc.iter_mut().zip(number) {
            if let (Some(first), Some(second)) = (place.from(first), place.from(second)) {
                for (j, acc) in acc.iter_mut().enumerate() {
                    *acc = vcombine_f32(vld1_f32(first.add(2 * j)), vld1_f32(second.add(2 * j)));
                }
            }
        }
        let none = vdup_n_u32(0);
        for k in (0..pairs).step_by(2) {
            let whole = k + 1 < pairs;
            let pair = |row: *const u32| if whole { vld1_u32(row.add(k)) } else { vset_lane_u32::<0>(row.add(k).read_unaligned(), none) };
            let x: [uint32x4_t; M] = x.map(|[first, second]| vcombine_u32(pair(first), pair(second)));
            for j in (0..NR / 2).step_by(2) {
                let near = vld1q_u32(b.add(k * NR + 2 * j));
                let far = if whole { vld1q_u32(b.add((k + 1) * NR + 2 * j)) } else { vdupq_n_u32(0) };
                let columns = [vzip1q_u32(near, far), vzip2q_u32(near, far)];
                for (acc, x) in acc.iter_mut().zip(x) {
                    acc[j] = bfmmla(acc[j], x, columns[0]);
                    acc[j + 1] = bfmmla(acc[j + 1], x, columns[1]);
                }
            }
        }
        for (acc, [first, second]) in acc.iter().zip(number) {
            for (j, acc) in acc.iter().enumerate() {
                store(place.to(first).add(2 * j), vget_low_f32(*acc), &place);
                if second > first {
                    store(place.to(second).add(2 * j), vget_high_f32(*acc), &place);
                }
            }
        }
    }
}

/// # Safety
/// `to` is valid for two elements.
#[inline(always)]
unsafe fn store(to: *mut f32, v: float32x2_t, place: &Acc) {
    // Safety: the caller's promise.
    unsafe { vst1_f32(to, if place.add() { vadd_f32(v, vld1_f32(to)) } else { v }) }
}

/// `acc[r][c] + sum over 4 steps of x[r] w[c]`, for 2 rows and 2 columns.
///
/// # Safety
/// The processor has the feature.
#[inline]
#[target_feature(enable = "bf16")]
unsafe fn bfmmla(mut acc: float32x4_t, x: uint32x4_t, w: uint32x4_t) -> float32x4_t {
    // Safety: the instruction reads and writes the named registers alone. Its intrinsic is not stable yet.
    unsafe {
        asm!(
            "bfmmla {0:v}.4s, {1:v}.8h, {2:v}.8h",
            inlateout(vreg) acc,
            in(vreg) x,
            in(vreg) w,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// # Safety
/// `src` is valid for `2 * pairs * 16` elements, `dst` for `pairs * 16`.
unsafe fn pair(src: *const f32, pairs: usize, dst: *mut u32) {
    for k in 0..pairs {
        for j in 0..NR {
            // Safety: the caller's promise. `dst` may be `src`: what is overwritten has been read.
            unsafe {
                let [low, high] = [2 * k, 2 * k + 1].map(|step| u32::from(convert::f32_to_bf16(*src.add(step * NR + j))));
                dst.add(k * NR + j).write(low | high << 16);
            }
        }
    }
}
