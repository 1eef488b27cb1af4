//! aarch64: NEON, which every such processor has.

use super::Kernel;
use std::{arch::aarch64::*, hint::black_box};

/// Accumulators: more than four units with a latency of 4 keep busy, and with the operands no more than there are registers.
const CHAINS: usize = 24;

pub fn fma() -> Vec<Kernel> {
    vec![Kernel { name: "fma-neon", flops: (CHAINS * 4 * 2) as u64, run: neon }]
}

/// The instructions have no stable intrinsics yet.
pub fn bf16() -> Option<Kernel> {
    None
}

#[target_feature(enable = "neon")]
fn neon(rounds: u64) {
    let [a, b] = black_box([0.5f32, 0.25]).map(|v| vdupq_n_f32(v));
    let mut acc = [vdupq_n_f32(0.0); CHAINS];
    for _ in 0..rounds {
        for x in &mut acc {
            *x = vfmaq_f32(*x, a, b);
        }
    }
    black_box(acc);
}
