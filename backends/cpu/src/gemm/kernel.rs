//! The micro-kernels, and the functions of the product that are compiled per tier.

#[cfg(target_arch = "x86_64")]
use super::dot;
use super::{NR, format};
use crate::{
    isa::Isa,
    simd::{self, Simd},
};
use zofo_hal::DType;

/// Rows up to which a product decodes panels in the micro-kernel ([`Table::few`]) instead of making f32 panels first.
pub(crate) const FEW: usize = 4;

/// The compiled functions of a tier. A device chooses its table once.
pub(crate) struct Table {
    /// Accumulates `kc` steps of all `rows` with `np` f32 panels, which are `distance` elements apart.
    pub(crate) sweep: unsafe fn(kc: usize, rows: &[*const f32], b: *const f32, distance: usize, np: usize, acc: Acc),
    /// The same for at most [`FEW`] rows, with panels as they lie in a weight.
    pub(crate) few: unsafe fn(rows: &[*const f32], panels: Panels, np: usize, acc: Acc),
    /// Steps of a weight's panel as f32, `[kc][16]`.
    pub(crate) decode: unsafe fn(panels: Panels, dst: *mut f32),
    /// `dst[j * 16 + i] = src[i * ld + j]` for 16 x 16 elements.
    pub(crate) transpose: unsafe fn(src: *const f32, ld: usize, dst: *mut f32),
    /// Products of bf16 pairs, where the tier has the instruction.
    pub(crate) dot: Option<&'static Dot>,
}

/// Products of bf16 by bf16, two steps at a time.
pub(crate) struct Dot {
    /// As [`Table::sweep`], for `pairs` pairs of steps; `distance` counts pairs of 16.
    pub(crate) sweep: unsafe fn(pairs: usize, rows: &[*const u32], b: *const u32, distance: usize, np: usize, acc: Acc),
    /// `2 * pairs` steps of an f32 panel as pairs `[pairs][16][2]`, rounded to nearest even.
    pub(crate) pair: unsafe fn(src: *const f32, pairs: usize, dst: *mut u32),
}

/// Where accumulators come from and where they go: two matrices of f32, or one.
#[derive(Clone, Copy)]
pub(crate) struct Acc {
    /// Not read where `fresh`.
    from: *const f32,
    from_ld: usize,
    to: *mut f32,
    to_ld: usize,
    /// Whether they start from 0.
    fresh: bool,
    /// Whether what is there already is added to them when they go.
    add: bool,
}

impl Acc {
    /// Accumulators at `c`, rows `ld` apart.
    pub(crate) fn new(c: *mut f32, ld: usize, fresh: bool) -> Self {
        Self { from: c, from_ld: ld, to: c, to_ld: ld, fresh, add: false }
    }

    /// The same, leaving their sums elsewhere.
    pub(crate) fn into(self, to: *mut f32, to_ld: usize, add: bool) -> Self {
        Self { to, to_ld, add, ..self }
    }

    /// Those from row `i` and column `j` on.
    #[inline(always)]
    pub(crate) fn at(self, i: usize, j: usize) -> Self {
        Self { from: self.from.wrapping_add(i * self.from_ld + j), to: self.to.wrapping_add(i * self.to_ld + j), ..self }
    }

    /// The first of row `i`, unless they start from 0.
    #[inline(always)]
    pub(super) fn from(&self, i: usize) -> Option<*const f32> {
        (!self.fresh).then(|| self.from.wrapping_add(i * self.from_ld))
    }

    /// Whether what is where they go is added to them.
    #[inline(always)]
    pub(super) fn add(&self) -> bool {
        self.add
    }

    /// Where row `i` goes.
    #[inline(always)]
    pub(super) fn to(&self, i: usize) -> *mut f32 {
        self.to.wrapping_add(i * self.to_ld)
    }
}

/// Steps `k0 .. k0 + kc` of panels as they lie in a weight.
#[derive(Clone, Copy)]
pub(crate) struct Panels {
    pub(crate) data: *const u8,
    pub(crate) dtype: DType,
    /// Bytes from panel to panel.
    pub(crate) bytes: usize,
    pub(crate) k0: usize,
    pub(crate) kc: usize,
}

impl Table {
    /// The table of a tier that is available.
    pub(crate) fn of(isa: Isa) -> &'static Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &avx512::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => &AVX512_BF16,
            #[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
            Isa::Neon => &neon::TABLE,
            #[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
            Isa::NeonBf16 => &NEON_BF16,
            _ => &scalar::TABLE,
        }
    }
}

macro_rules! table {
    ($tier:ident, $simd:ty $(, $features:literal)?) => {
        mod $tier {
            use super::*;

            pub(super) const TABLE: Table = Table { sweep, few, decode, transpose, dot: None };

            // Safety: called only through the table of a tier that is available; the rest is the caller's promise.
            $(#[target_feature(enable = $features)])?
            unsafe fn sweep(kc: usize, rows: &[*const f32], b: *const f32, distance: usize, np: usize, acc: Acc) {
                unsafe { super::sweep::<$simd>(kc, rows, b, distance, np, acc) }
            }

            // Safety: as above.
            $(#[target_feature(enable = $features)])?
            unsafe fn few(rows: &[*const f32], panels: Panels, np: usize, acc: Acc) {
                unsafe { super::few::<$simd>(rows, panels, np, acc) }
            }

            // Safety: as above.
            $(#[target_feature(enable = $features)])?
            unsafe fn decode(p: Panels, dst: *mut f32) {
                unsafe { format::each::<$simd, 1>(p.dtype, [p.data], p.k0, p.kc, &mut Unpack(dst)) }
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
table!(avx2, simd::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
table!(avx512, simd::Avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");
#[cfg(target_arch = "x86_64")]
static AVX512_BF16: Table = Table { dot: Some(&dot::DOT), ..avx512::TABLE };
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
table!(neon, simd::Neon);
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
static NEON_BF16: Table = Table { dot: Some(&super::dot_neon::DOT), ..neon::TABLE };

/// Runs `$run!(rows, panels)` over blocks of `$mr` rows by `$pr` panels, and what is left over at the edges. Of few rows several panels are
/// taken at a time, so that there are chains enough to hide an addition's latency.
macro_rules! tiles {
    ($mr:expr, $pr:expr, $m:expr, $np:expr, $run:ident) => {{
        let (m, np) = ($m, $np);
        // Panels of the next step: two twos are faster than three and one.
        let step = |left: usize, wide: usize| match (left, wide) {
            (4, 3) => 2,
            _ if left >= wide => wide,
            (2.., 3..) if $pr > 1 => 2,
            _ => 1,
        };
        let whole = m - m % $mr;
        let mut p = 0;
        while p < np {
            let step = step(np - p, $pr);
            for i in (0..whole).step_by($mr) {
                match ($mr, step) {
                    (9, 3) => $run!(9, 3, i, p),
                    (9, 2) => $run!(9, 2, i, p),
                    (9, _) => $run!(9, 1, i, p),
                    (6, _) => $run!(6, 1, i, p),
                    _ => $run!(2, 1, i, p),
                }
            }
            p += step;
        }
        let rest = m - whole;
        let wide = match (rest, $pr > 1) {
            (1, _) | (2, true) => 4,
            (2 | 3, false) => 2,
            _ => $pr,
        };
        let mut p = if rest == 0 { np } else { 0 };
        while p < np {
            let step = step(np - p, wide);
            match (rest, step) {
                (1, 4) => $run!(1, 4, whole, p),
                (1, 2) if $mr > 6 => $run!(1, 2, whole, p),
                (1, _) => $run!(1, 1, whole, p),
                (2, 4) if $mr > 6 => $run!(2, 4, whole, p),
                (2, 2) if $mr > 2 => $run!(2, 2, whole, p),
                (2, _) if $mr > 2 => $run!(2, 1, whole, p),
                (3, 3) if $mr > 6 => $run!(3, 3, whole, p),
                (3, 2) if $mr > 2 => $run!(3, 2, whole, p),
                (3, _) if $mr > 2 => $run!(3, 1, whole, p),
                (4, 3) if $mr > 6 => $run!(4, 3, whole, p),
                (4, 2) if $mr > 6 => $run!(4, 2, whole, p),
                (4, _) if $mr > 2 => $run!(4, 1, whole, p),
                (5, 3) if $mr > 6 => $run!(5, 3, whole, p),
                (5, 2) if $mr > 6 => $run!(5, 2, whole, p),
                (5, _) if $mr > 2 => $run!(5, 1, whole, p),
                (6, 3) if $mr > 6 => $run!(6, 3, whole, p),
                (6, 2) if $mr > 6 => $run!(6, 2, whole, p),
                (6, _) if $mr > 6 => $run!(6, 1, whole, p),
                (7, 3) if $mr > 6 => $run!(7, 3, whole, p),
                (7, 2) if $mr > 6 => $run!(7, 2, whole, p),
                (7, _) if $mr > 6 => $run!(7, 1, whole, p),
                (_, 3) if $mr > 6 => $run!(8, 3, whole, p),
                (_, 2) if $mr > 6 => $run!(8, 2, whole, p),
                (_, _) if $mr > 6 => $run!(8, 1, whole, p),
                _ => {}
            }
            p += step;
        }
    }};
}
#[cfg(target_arch = "x86_64")]
pub(super) use tiles;

/// # Safety
/// Every row is valid for `kc` elements, every panel for `kc * 16`, `acc` for all rows and panels; the tier's features are there.
#[inline(always)]
unsafe fn sweep<S: Simd>(kc: usize, rows: &[*const f32], b: *const f32, distance: usize, np: usize, acc: Acc) {
    macro_rules! run {
        ($m:literal, $p:literal, $i:expr, $at:expr) => {
            // Safety: rows, panels and accumulators are those of the caller's promise.
            unsafe { micro::<S, $m, $p>(kc, rows.as_ptr().add($i), b.add($at * distance), distance, acc.at($i, $at * NR)) }
        };
    }
    tiles!(S::MR, S::PR, rows.len(), np, run);
}

/// `M` rows by `P` panels, all accumulators in registers.
///
/// # Safety
/// As for [`sweep`], of `M` rows and `P` panels.
#[inline(always)]
unsafe fn micro<S: Simd, const M: usize, const P: usize>(kc: usize, rows: *const *const f32, b: *const f32, distance: usize, place: Acc) {
    // Safety: within what the caller promises.
    unsafe {
        let a: [*const f32; M] = core::array::from_fn(|i| *rows.add(i));
        let mut acc = load::<S, M, P>(&place);
        for k in 0..kc {
            let v: [S::V; P] = core::array::from_fn(|p| S::load(b.add(p * distance + k * NR)));
            for (row, a) in acc.iter_mut().zip(&a) {
                let x = S::splat(a.add(k));
                for (acc, v) in row.iter_mut().zip(&v) {
                    *acc = S::fma(*acc, x, *v);
                }
            }
        }
        store::<S, M, P>(acc, &place);
    }
}

/// Accumulators as they start.
///
/// # Safety
/// `place` is valid for them.
#[inline(always)]
pub(super) unsafe fn load<S: Simd, const M: usize, const P: usize>(place: &Acc) -> [[S::V; P]; M] {
    // Safety: the caller's promise.
    unsafe {
        let mut acc = [[S::zero(); P]; M];
        for (i, row) in acc.iter_mut().enumerate() {
            if let Some(from) = place.from(i) {
                for (p, acc) in row.iter_mut().enumerate() {
                    *acc = S::load(from.add(p * NR));
                }
            }
        }
        acc
    }
}

/// # Safety
/// `place` is valid for the accumulators.
#[inline(always)]
pub(super) unsafe fn store<S: Simd, const M: usize, const P: usize>(acc: [[S::V; P]; M], place: &Acc) {
    for (i, row) in acc.into_iter().enumerate() {
        for (p, acc) in row.into_iter().enumerate() {
            // Safety: the caller's promise.
            unsafe {
                let to = place.to(i).add(p * NR);
                S::store(to, if place.add() { S::add(acc, S::load(to)) } else { acc });
            }
        }
    }
}

/// # Safety
/// As for [`sweep`], with panels of a weight.
#[inline(always)]
unsafe fn few<S: Simd>(rows: &[*const f32], panels: Panels, np: usize, acc: Acc) {
    let mut p = 0;
    while p < np {
        let pair = np - p >= 2;
        macro_rules! run {
            ($($m:literal)*) => {
                // Safety: rows, panels and accumulators are those of the caller's promise.
                match (rows.len(), pair) {
                    $(
                        ($m, true) => unsafe { few_micro::<S, $m, 2>(rows.as_ptr(), panels, p, acc.at(0, p * NR)) },
                        ($m, false) => unsafe { few_micro::<S, $m, 1>(rows.as_ptr(), panels, p, acc.at(0, p * NR)) },
                    )*
                    _ => unreachable!("a product of few rows has at most {FEW}"),
                }
            };
        }
        run!(1 2 3 4);
        p += if pair { 2 } else { 1 };
    }
}

/// `M` rows by `P` panels from number `at`.
///
/// # Safety
/// As for [`few`].
#[inline(always)]
unsafe fn few_micro<S: Simd, const M: usize, const P: usize>(rows: *const *const f32, panels: Panels, at: usize, place: Acc) {
    // Safety: within what the caller promises.
    unsafe {
        let a: [*const f32; M] = core::array::from_fn(|i| *rows.add(i));
        let data: [*const u8; P] = core::array::from_fn(|p| panels.data.wrapping_add((at + p) * panels.bytes));
        let mut products = Products::<S, M, P> { rows: a, acc: load::<S, M, P>(&place) };
        format::each::<S, P>(panels.dtype, data, panels.k0, panels.kc, &mut products);
        store::<S, M, P>(products.acc, &place);
    }
}

/// Accumulators of `M` rows and `P` panels, which every step is added to.
struct Products<S: Simd, const M: usize, const P: usize> {
    rows: [*const f32; M],
    acc: [[S::V; P]; M],
}

impl<S: Simd, const M: usize, const P: usize> format::Sink<S, P> for Products<S, M, P> {
    #[inline(always)]
    unsafe fn step(&mut self, k: usize, v: [S::V; P]) {
        for i in 0..M {
            // Safety: the rows have as many steps as the panels.
            let x = unsafe { S::splat(self.rows[i].add(k)) };
            for (acc, v) in self.acc[i].iter_mut().zip(&v) {
                // Safety: the tier's features are there.
                *acc = unsafe { S::fma(*acc, x, *v) };
            }
        }
    }
}

/// Steps become an f32 panel.
struct Unpack(*mut f32);

impl<S: Simd> format::Sink<S, 1> for Unpack {
    #[inline(always)]
    unsafe fn step(&mut self, k: usize, [v]: [S::V; 1]) {
        // Safety: there is room for the steps that were asked for.
        unsafe { S::store(self.0.add(k * NR), v) }
    }
}
