//! The scalar tier: [`normal`](mod@super::normal) and [`philox4x32_10`](super::philox4x32_10) as they stand.

use super::kernels::{self, Table};
use super::normal;
use super::philox::Stream;

pub(super) static TABLE: Table = Table { name: "scalar", words, normals, signs, scaled_add, accumulate, radius, cos_sin };

fn each<T>(s: &Stream, block: u32, out: &mut [[T; 4]], stage: impl Fn([u32; 4]) -> [T; 4]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = stage(s.block(block.wrapping_add(i as u32)));
    }
}

fn words(s: &Stream, block: u32, out: &mut [[u32; 4]]) {
    each(s, block, out, |w| w);
}

fn normals(s: &Stream, block: u32, out: &mut [[f32; 4]]) {
    each(s, block, out, normal::normals);
}

fn signs(s: &Stream, block: u32, out: &mut [[f32; 4]]) {
    each(s, block, out, |w| w.map(normal::rademacher));
}

fn scaled_add(a: &[f32], c: f32, z: &[f32], out: &mut [f32]) {
    kernels::scaled_add((), a, c, z, out);
}

fn accumulate(acc: &mut [f32], c: f32, z: &[f32]) {
    kernels::accumulate((), acc, c, z);
}

fn radius(words: &[u32], out: &mut [f32]) {
    for (&w, out) in words.iter().zip(out) {
        *out = normal::radius(w);
    }
}

fn cos_sin(words: &[u32], cos: &mut [f32], sin: &mut [f32]) {
    for (&w, out) in words.iter().zip(cos.iter_mut().zip(sin)) {
        (*out.0, *out.1) = normal::cos_sin(w);
    }
}
