//! `x W^T` in f32 by libraries that only multiply matrices.

use super::{takes_part, variable};
use crate::{Case, Run, Work, random, threads};
use faer::{Accum, MatMut, MatRef, Par};
use rayon::ThreadPool;
use std::sync::{Arc, OnceLock};
use zofo_hal::Result;

/// Row-major operands.
struct Operands {
    m: usize,
    k: usize,
    n: usize,
    /// `[m, k]`
    x: Vec<f32>,
    /// `[n, k]`
    w: Vec<f32>,
    /// `[m, n]`
    out: Vec<f32>,
}

impl Operands {
    fn new([m, k, n]: [usize; 3]) -> Result<Self> {
        let (x, w) = (random::normals(1, m * k, 1.0)?, random::normals(2, n * k, 1.0 / (k as f32).sqrt())?);
        Ok(Self { m, k, n, x, w, out: vec![0.0; m * n] })
    }
}

/// Cases of a group of products `[m, k, n]`.
pub fn cases(group: &str, work: Work, shape: [usize; 3]) -> Vec<Case> {
    let case = |who: &str, multiply: fn(&mut Operands)| {
        Case::new(group, who, work, move || {
            let mut operands = Operands::new(shape)?;
            let pool = pool();
            let run: Run = Box::new(move || {
                pool.install(|| multiply(&mut operands));
                Ok(())
            });
            Ok(run)
        })
    };
    let mut cases = vec![case("gemm", by_gemm), case("faer", by_faer)];
    if takes_part_matrixmultiply() {
        cases.push(case("matrixmultiply", by_matrixmultiply));
    }
    cases
}

/// The pool that libraries built on rayon run in.
fn pool() -> Arc<ThreadPool> {
    static POOL: OnceLock<Arc<ThreadPool>> = OnceLock::new();
    let build = || rayon::ThreadPoolBuilder::new().num_threads(threads()).build().expect("threads of the peers");
    POOL.get_or_init(|| Arc::new(build())).clone()
}

fn takes_part_matrixmultiply() -> bool {
    static TAKES_PART: OnceLock<bool> = OnceLock::new();
    let own = || variable("MATMUL_NUM_THREADS").unwrap_or_else(crate::physical_cores).clamp(1, 4);
    *TAKES_PART.get_or_init(|| takes_part("matrixmultiply", own(), "MATMUL_NUM_THREADS"))
}

fn by_gemm(o: &mut Operands) {
    let (m, k, n) = (o.m, o.k, o.n);
    // Safety: the strides stay within the operands, which are as long as their shapes say.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            o.out.as_mut_ptr(),
            1,
            n as isize,
            false,
            o.x.as_ptr(),
            1,
            k as isize,
            // W^T: its columns are the rows of W.
            o.w.as_ptr(),
            k as isize,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(threads()),
        );
    }
}

fn by_faer(o: &mut Operands) {
    let out = MatMut::from_row_major_slice_mut(&mut o.out, o.m, o.n);
    let x = MatRef::from_row_major_slice(&o.x, o.m, o.k);
    let w = MatRef::from_row_major_slice(&o.w, o.n, o.k);
    faer::linalg::matmul::matmul(out, Accum::Replace, x, w.transpose(), 1.0, Par::rayon(threads()));
}

fn by_matrixmultiply(o: &mut Operands) {
    let (m, k, n) = (o.m, o.k, o.n);
    let row = |cols: usize| cols as isize;
    // Safety: as for gemm.
    unsafe {
        let (x, w, out) = (o.x.as_ptr(), o.w.as_ptr(), o.out.as_mut_ptr());
        matrixmultiply::sgemm(m, k, n, 1.0, x, row(k), 1, w, 1, row(k), 0.0, out, row(n), 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_peers_compute_the_same_product() {
        let shape = [5, 7, 3];
        let by = |multiply: fn(&mut Operands)| {
            let mut o = Operands::new(shape).unwrap();
            multiply(&mut o);
            o
        };
        let one = by(by_gemm);
        for r in 0..one.m {
            for c in 0..one.n {
                let expected: f32 = (0..one.k).map(|i| one.x[r * one.k + i] * one.w[c * one.k + i]).sum();
                for out in [&one.out, &by(by_faer).out, &by(by_matrixmultiply).out] {
                    assert!((out[r * one.n + c] - expected).abs() < 1e-5);
                }
            }
        }
    }
}
