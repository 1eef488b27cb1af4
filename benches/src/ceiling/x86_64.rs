//! x86-64: AVX-512, AVX2, or what the compiler may use anyway.

use super::Kernel;
use std::{
    arch::{is_x86_feature_detected, x86_64::*},
    hint::black_box,
};

/// Accumulators: more than two units with a latency of 5 keep busy, and with the operands no more than there are registers.
const WIDE: usize = 24;
const NARROW: usize = 12;

pub fn fma() -> Vec<Kernel> {
    let mut all = Vec::new();
    if is_x86_feature_detected!("avx512f") {
        all.push(Kernel { name: "fma-avx512", flops: (WIDE * 16 * 2) as u64, run: avx512 });
    }
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        all.push(Kernel { name: "fma-avx2", flops: (NARROW * 8 * 2) as u64, run: avx2 });
    }
    if all.is_empty() {
        all.push(Kernel { name: "mul-add-sse2", flops: (NARROW * 4 * 2) as u64, run: sse2 });
    }
    all
}

pub fn bf16() -> Option<Kernel> {
    let has = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
    has.then_some(Kernel { name: "vdpbf16ps", flops: (WIDE * 32 * 2) as u64, run: vdpbf16ps })
}

#[target_feature(enable = "avx512f")]
fn avx512(rounds: u64) {
    let [a, b] = black_box([0.5f32, 0.25]).map(|v| _mm512_set1_ps(v));
    let mut acc = [_mm512_setzero_ps(); WIDE];
    for _ in 0..rounds {
        for x in &mut acc {
            *x = _mm512_fmadd_ps(*x, a, b);
        }
    }
    black_box(acc);
}

#[target_feature(enable = "avx2,fma")]
fn avx2(rounds: u64) {
    let [a, b] = black_box([0.5f32, 0.25]).map(|v| _mm256_set1_ps(v));
    let mut acc = [_mm256_setzero_ps(); NARROW];
    for _ in 0..rounds {
        for x in &mut acc {
            *x = _mm256_fmadd_ps(*x, a, b);
        }
    }
    black_box(acc);
}

fn sse2(rounds: u64) {
    let [a, b] = black_box([0.5f32, 0.25]);
    let mut acc = [[0.0f32; 4]; NARROW];
    for _ in 0..rounds {
        for x in acc.as_flattened_mut() {
            *x = *x * a + b;
        }
    }
    black_box(acc);
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn vdpbf16ps(rounds: u64) {
    let a = _mm512_set1_ps(black_box(0.25));
    let a = _mm512_cvtne2ps_pbh(a, a);
    let mut acc = [_mm512_setzero_ps(); WIDE];
    for _ in 0..rounds {
        for x in &mut acc {
            *x = _mm512_dpbf16_ps(*x, a, a);
        }
    }
    black_box(acc);
}
