//! The micro-kernel, and the functions of the product that are compiled per tier.

use super::NR;
use crate::{
    isa::Isa,
    simd::{self, Simd},
};

/// The compiled functions of a tier. A device chooses its table once.
pub(crate) struct Table {
    /// Accumulates `kc` steps of all `rows` with `np` panels, which are `distance` elements apart, into accumulators `c`, rows `ldc` apart.
    pub(crate) sweep:
        unsafe fn(kc: usize, rows: &[*const f32], b: *const f32, distance: usize, np: usize, c: *mut f32, ldc: usize, fresh: bool),
    /// `dst[j * 16 + i] = src[i * ld + j]` for 16 x 16 elements.
    pub(crate) transpose: unsafe fn(src: *const f32, ld: usize, dst: *mut f32),
}

impl Table {
    /// The table of a tier that is available.
    pub(crate) fn of(isa: Isa) -> &'static Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &avx512::TABLE,
            #[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
            Isa::Neon => &neon::TABLE,
            _ => &scalar::TABLE,
        }
    }
}

macro_rules! table {
    ($tier:ident, $simd:ty $(, $features:literal)?) => {
        mod $tier {
            use super::*;

            pub(super) static TABLE: Table = Table { sweep, transpose };

            // Safety: called only through the table of a tier that is available; the rest is the caller's promise.
            $(#[target_feature(enable = $features)])?
            #[allow(clippy::too_many_arguments)]
            unsafe fn sweep(
                kc: usize,
                rows: &[*const f32],
                b: *const f32,
                distance: usize,
                np: usize,
                c: *mut f32,
                ldc: usize,
                fresh: bool,
            ) {
                unsafe { super::sweep::<$simd>(kc, rows, b, distance, np, c, ldc, fresh) }
            }

            // Safety: as above.
            $(#[target_feature(enable = $features)])?
            unsafe fn transpose(src: *const f32, ld: usize, dst: *mut f32) {
                unsafe { <$simd>::transpose(src, ld, dst) }
            }
        }
    };
}

table!(scalar, simd::Scalar);
#[cfg(target_arch = "x86_64")]
table!(avx2, simd::Avx2, "avx2,fma");
#[cfg(target_arch = "x86_64")]
table!(avx512, simd::Avx512, "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl");
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
table!(neon, simd::Neon);

/// # Safety
/// Every row is valid for `kc` elements, every panel for `kc * 16`, `c` for all rows and panels; the tier's features are there.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn sweep<S: Simd>(kc: usize, rows: &[*const f32], b: *const f32, distance: usize, np: usize, c: *mut f32, ldc: usize, fresh: bool) {
    let whole = rows.len() - rows.len() % S::MR;
    // Safety: rows, panels and accumulators below are those of the caller's promise.
    unsafe {
        for p in 0..np {
            let (b, c) = (b.add(p * distance), c.add(p * NR));
            for i in (0..whole).step_by(S::MR) {
                let (a, c) = (rows.as_ptr().add(i), c.add(i * ldc));
                match S::MR {
                    12 => micro::<S, 12, 1>(kc, a, b, distance, c, ldc, fresh),
                    6 => micro::<S, 6, 1>(kc, a, b, distance, c, ldc, fresh),
                    _ => micro::<S, 2, 1>(kc, a, b, distance, c, ldc, fresh),
                }
            }
        }
        // A few rows alone: several panels at a time, so that there are chains enough to hide an addition's latency.
        let (a, c) = (rows.as_ptr().add(whole), c.add(whole * ldc));
        let rest = rows.len() - whole;
        let step = match rest {
            0 => return,
            1 => 4,
            2 | 3 => 2,
            _ => 1,
        };
        let mut p = 0;
        while p < np {
            let (b, c) = (b.add(p * distance), c.add(p * NR));
            let several = np - p >= step;
            macro_rules! run {
                ($m:literal, $n:literal) => {
                    micro::<S, $m, $n>(kc, a, b, distance, c, ldc, fresh)
                };
            }
            match rest {
                1 if several => run!(1, 4),
                2 if several => run!(2, 2),
                3 if several => run!(3, 2),
                1 => run!(1, 1),
                2 => run!(2, 1),
                3 => run!(3, 1),
                4 => run!(4, 1),
                5 => run!(5, 1),
                6 if S::MR > 6 => run!(6, 1),
                7 if S::MR > 6 => run!(7, 1),
                8 if S::MR > 6 => run!(8, 1),
                9 if S::MR > 6 => run!(9, 1),
                10 if S::MR > 6 => run!(10, 1),
                _ if S::MR > 6 => run!(11, 1),
                _ => {}
            }
            p += if several { step } else { 1 };
        }
    }
}

/// `M` rows by `P` panels, all accumulators in registers.
///
/// # Safety
/// As for [`sweep`], of `M` rows and `P` panels.
#[inline(always)]
unsafe fn micro<S: Simd, const M: usize, const P: usize>(
    kc: usize,
    rows: *const *const f32,
    b: *const f32,
    distance: usize,
    c: *mut f32,
    ldc: usize,
    fresh: bool,
) {
    // Safety: within what the caller promises.
    unsafe {
        let a: [*const f32; M] = core::array::from_fn(|i| *rows.add(i));
        let mut acc = [[S::zero(); P]; M];
        if !fresh {
            for (i, row) in acc.iter_mut().enumerate() {
                for (p, acc) in row.iter_mut().enumerate() {
                    *acc = S::load(c.add(i * ldc + p * NR));
                }
            }
        }
        for k in 0..kc {
            let v: [S::V; P] = core::array::from_fn(|p| S::load(b.add(p * distance + k * NR)));
            for (row, a) in acc.iter_mut().zip(&a) {
                let x = S::splat(a.add(k));
                for (acc, v) in row.iter_mut().zip(&v) {
                    *acc = S::fma(*acc, x, *v);
                }
            }
        }
        for (i, row) in acc.into_iter().enumerate() {
            for (p, acc) in row.into_iter().enumerate() {
                S::store(c.add(i * ldc + p * NR), acc);
            }
        }
    }
}
