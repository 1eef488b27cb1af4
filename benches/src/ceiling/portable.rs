//! Any other processor: what the compiler makes of a loop.

use super::Kernel;
use std::hint::black_box;

const LANES: usize = 64;

pub fn fma() -> Vec<Kernel> {
    vec![Kernel { name: "mul-add", flops: (LANES * 2) as u64, run: mul_add }]
}

pub fn bf16() -> Option<Kernel> {
    None
}

fn mul_add(rounds: u64) {
    let [a, b] = black_box([0.5f32, 0.25]);
    let mut acc = [0.0f32; LANES];
    for _ in 0..rounds {
        acc.iter_mut().for_each(|x| *x = *x * a + b);
    }
    black_box(acc);
}
