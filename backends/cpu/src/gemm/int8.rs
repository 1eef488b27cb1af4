//! Products with activations of 8 bits.
//!
//! A row of the left operand becomes blocks of 32 signed bytes with a scale ([`quantise`]); a block-quantised weight gives its codes as they are.
//! Per block of 32 steps the codes' dot product is an exact integer, and
//!
//! ```text
//! out[i][j] = sum over blocks ascending, each step fused: scale_x (scale_w dot) [+ (scale_x sum of x codes) minimum_w]
//! ```
//!
//! so that every kernel of [`Int8::available`] gives the same bits, whatever it multiplies with, and a row's bits depend on that row alone.
//!
//! The kernels are [`micro`] over a [`Dot`] (what multiplies) and a [`Format`] (where codes and scales are). Few rows read the weight's panels as they
//! lie; more rows read [`Panel`]s, which are made once per tile and block of steps.

mod dot;
mod format;
mod rows;

pub(crate) use rows::{Block, quantise};

use super::{Acc, Extent, FEW, KC, MC, NC, NR, Packing, Right, Tile};
use crate::{isa::Isa, scratch::Slab, simd::Simd};
use core::cmp::min;
use dot::Dot;
use format::{Codes, Format, Kind, Minimum, Panel, Plain, Signed, Split};
use zofo_hal::DType;

/// Steps of a block.
pub(crate) const STEPS: usize = 32;

/// `dtype, blocks, rows, panels, bytes, np, acc`: accumulates all blocks of `rows` with `np` panels of a weight that are `bytes` apart.
type Few = unsafe fn(DType, usize, &[*const Block], *const u8, usize, usize, Acc);
/// `dtype, blocks, rows, panels, np, acc`: the same with panels that were prepared, each of `blocks` blocks.
type Sweep = unsafe fn(DType, usize, &[*const Block], *const Panel, usize, Acc);

/// The compiled functions of one way to multiply.
pub(crate) struct Int8 {
    /// What multiplies; part of the device's name.
    pub(crate) name: &'static str,
    /// For up to [`FEW`] rows.
    few: Few,
    /// For any number of rows.
    sweep: Sweep,
    /// Blocks `first .. first + n` of a weight's panel.
    prepare: unsafe fn(dtype: DType, panel: *const u8, first: usize, n: usize, out: *mut Panel),
}

/// The left operand of a product: all rows that the op has, in blocks.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) blocks: Slab<Block>,
    pub(crate) per_row: usize,
}

/// Accumulates the product of rows `first .. first + e.m` with `right` into `tile`.
///
/// # Safety
/// As for [`super::product`]; the rows are quantised and `right` is a quantised weight in panels, not transposed.
pub(crate) unsafe fn product(int8: &Int8, left: &Rows, first: usize, right: &Right<'_>, e: Extent, tile: Tile, packing: &Packing) {
    if e.m == 0 || e.n == 0 {
        return;
    }
    let (np, p0) = (e.n.div_ceil(NR), e.n0 / NR);
    assert!(e.n0.is_multiple_of(NR) && np * NR <= tile.ld && (e.m - 1) * tile.ld + np * NR <= tile.acc.len());
    assert!(e.right_k == 0 && e.k == left.per_row * STEPS && (first + e.m) * left.per_row <= left.blocks.len());
    let (dtype, panel) = (right.dtype(), |p: usize| right.panel(p0 + p));
    if left.per_row == 0 && e.fresh {
        // Safety: the caller's promise.
        (0..e.m).for_each(|i| unsafe { tile.row(i) }[..np * NR].fill(0.0));
    }
    let rows = |m0: usize, m: usize, block: usize| {
        // Safety: the caller's promise.
        let pointers = unsafe { packing.pointers(m) };
        for (i, p) in pointers.iter_mut().enumerate() {
            *p = left.blocks.ptr().wrapping_add((first + m0 + i) * left.per_row + block).cast_const();
        }
        &*pointers
    };
    // Safety: the caller's promises; panels are within the extent, and `packing` has room for NC columns of KC steps as f32, which take more
    // than as codes.
    unsafe {
        if e.m <= FEW {
            return (int8.few)(
                dtype,
                left.per_row,
                rows(0, e.m, 0),
                panel(0),
                right.panel_bytes(),
                np,
                Acc::new(tile.acc.ptr(), tile.ld, e.fresh),
            );
        }
        let room: Slab<Panel> = packing.codes();
        for (block, p) in (0..left.per_row).step_by(KC / STEPS).flat_map(|b| (0..np).step_by(NC / NR).map(move |p| (b, p))) {
            let (blocks, np) = (min(KC / STEPS, left.per_row - block), min(NC / NR, np - p));
            for i in 0..np {
                (int8.prepare)(dtype, panel(p + i), block, blocks, room.part(i * blocks, blocks).ptr());
            }
            for m0 in (0..e.m).step_by(MC) {
                let m = min(MC, e.m - m0);
                let acc = Acc::new(tile.acc.ptr(), tile.ld, e.fresh && block == 0).at(m0, p * NR);
                (int8.sweep)(dtype, blocks, rows(m0, m, block), room.ptr(), np, acc);
            }
        }
    }
}

/// `M` rows by `P` panels, all accumulators in registers.
///
/// # Safety
/// Rows have `blocks` blocks and panels as many from their address on, `acc` is valid for all rows and panels; the features of `D` are there.
#[inline(always)]
unsafe fn micro<D: Dot, F: Format, const M: usize, const P: usize>(
    blocks: usize,
    rows: *const *const Block,
    panels: [*const u8; P],
    place: Acc,
) {
    // Safety: within what the caller promises.
    unsafe {
        let rows: [*const Block; M] = core::array::from_fn(|i| *rows.add(i));
        let mut acc = super::kernel::load::<D::S, M, P>(&place);
        for b in 0..blocks {
            let x: [*const Block; M] = core::array::from_fn(|i| rows[i].add(b));
            let offset = F::Kind::OFFSET + if F::Kind::SIGNED { D::BIAS } else { 0 };
            if F::Kind::SPLIT {
                for half in 0..2 {
                    let dots =
                        dots::<D, F, M, P>(&x, &panels, b, 4 * half..4 * half + 4, core::array::from_fn(|i| -offset * (*x[i]).sums[half]));
                    scaled::<D, F, M, P>(&x, &panels, b, half, &dots, &mut acc);
                }
            } else {
                let dots =
                    dots::<D, F, M, P>(&x, &panels, b, 0..8, core::array::from_fn(|i| -offset * ((*x[i]).sums[0] + (*x[i]).sums[1])));
                scaled::<D, F, M, P>(&x, &panels, b, 0, &dots, &mut acc);
            }
            if F::Kind::MINIMUM {
                for p in 0..P {
                    let minimum = F::second::<D::S>(panels[p], b, 0);
                    for i in 0..M {
                        acc[i][p] = D::fused(acc[i][p], <D::S as Simd>::splat(&(*x[i]).scaled_sum), minimum);
                    }
                }
            }
        }
        super::kernel::store::<D::S, M, P>(acc, &place);
    }
}

/// `start + sum of codes`, over groups of four steps of a block.
///
/// # Safety
/// As for [`micro`].
#[inline(always)]
unsafe fn dots<D: Dot, F: Format, const M: usize, const P: usize>(
    x: &[*const Block; M],
    panels: &[*const u8; P],
    b: usize,
    groups: core::ops::Range<usize>,
    start: [i32; M],
) -> [[<D::S as Simd>::I; P]; M] {
    // Safety: the caller's promise.
    unsafe {
        let mut dots: [[<D::S as Simd>::I; P]; M] = core::array::from_fn(|i| [<D::S as Simd>::splat_word(start[i] as u32); P]);
        if let (Some(two), 2) = (D::TWO, M) {
            let count = groups.len();
            for p in 0..P {
                let mut codes = [<D::S as Simd>::splat_word(0); 8];
                for (g, codes) in groups.clone().zip(&mut codes) {
                    *codes = F::codes::<D>(panels[p], b, g);
                }
                let [first, second] = [0, 1].map(|i| &(&(*x[i]).codes)[groups.clone()]);
                [dots[0][p], dots[1][p]] = two([start[0], start[1]], &codes[..count], [first, second]);
            }
            return dots;
        }
        for g in groups {
            for p in 0..P {
                let codes = F::codes::<D>(panels[p], b, g);
                for i in 0..M {
                    let word = (*x[i]).codes[g];
                    dots[i][p] = if F::Kind::SIGNED { D::signed(dots[i][p], codes, word) } else { D::dot(dots[i][p], codes, word) };
                }
            }
        }
        dots
    }
}

/// Adds the dot products of a block, or of half of one, times both scales.
///
/// # Safety
/// As for [`micro`].
#[inline(always)]
unsafe fn scaled<D: Dot, F: Format, const M: usize, const P: usize>(
    x: &[*const Block; M],
    panels: &[*const u8; P],
    b: usize,
    half: usize,
    dots: &[[<D::S as Simd>::I; P]; M],
    acc: &mut [[<D::S as Simd>::V; P]; M],
) {
    // Safety: the caller's promise.
    unsafe {
        for p in 0..P {
            let scale = if half == 0 { F::scale::<D::S>(panels[p], b) } else { F::second::<D::S>(panels[p], b, 1) };
            for i in 0..M {
                let product = <D::S as Simd>::mul(<D::S as Simd>::float(dots[i][p]), scale);
                acc[i][p] = D::fused(acc[i][p], <D::S as Simd>::splat(&(*x[i]).scale), product);
            }
        }
    }
}

/// # Safety
/// As for [`micro`], of all rows (`MANY` or up to [`FEW`]) and of `np` panels that are `distance` bytes apart.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tiles<D: Dot, F: Format, const MANY: bool>(
    blocks: usize,
    rows: &[*const Block],
    panels: *const u8,
    distance: usize,
    np: usize,
    acc: Acc,
) {
    macro_rules! run {
        ($m:literal, $p:literal, $i:expr, $at:expr) => {
            // Safety: rows, panels and accumulators are those of the caller's promise.
            unsafe {
                let panels: [*const u8; $p] = core::array::from_fn(|p| panels.wrapping_add(($at + p) * distance));
                micro::<D, F, $m, $p>(blocks, rows.as_ptr().add($i), panels, acc.at($i, $at * NR))
            }
        };
    }
    let mut p = 0;
    while p < np {
        let pair = D::PAIRS && np - p >= 2;
        let mut i = 0;
        while i < rows.len() {
            let m = [6, 2, 1].into_iter().find(|m| (*m <= 2 || MANY) && *m <= D::ROWS && *m <= rows.len() - i).unwrap_or(1);
            match (m, pair) {
                (6, true) if MANY && D::ROWS >= 6 && D::PAIRS => run!(6, 2, i, p),
                (6, _) if MANY && D::ROWS >= 6 => run!(6, 1, i, p),
                (2, true) if D::ROWS >= 2 && D::PAIRS => run!(2, 2, i, p),
                (2, _) if D::ROWS >= 2 => run!(2, 1, i, p),
                (_, true) if D::PAIRS => run!(1, 2, i, p),
                _ => run!(1, 1, i, p),
            }
            i += m;
        }
        p += if pair { 2 } else { 1 };
    }
}

/// Runs `$run!` with the format of a quantised type.
macro_rules! formats {
    ($dtype:expr, $run:ident) => {
        match $dtype {
            DType::Q8_0 => $run!(format::Q8_0),
            DType::Q4_0 => $run!(format::Q4_0),
            DType::Q4_1 => $run!(format::Q4_1),
            DType::Q5_0 => $run!(format::Q5_0),
            DType::Q5_1 => $run!(format::Q5_1),
            DType::Q4K => $run!(format::Q4K),
            DType::Q6K => $run!(format::Q6K),
            _ => unreachable!("{} is no block-quantised type", $dtype),
        }
    };
}

/// # Safety
/// As for [`Int8::few`].
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn few<D: Dot>(dtype: DType, blocks: usize, rows: &[*const Block], panels: *const u8, bytes: usize, np: usize, acc: Acc) {
    macro_rules! run {
        ($format:ty) => {
            // Safety: the caller's promise.
            unsafe { tiles::<D, $format, false>(blocks, rows, panels, bytes, np, acc) }
        };
    }
    formats!(dtype, run);
}

/// # Safety
/// As for [`Int8::sweep`].
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn sweep<D: Dot>(dtype: DType, blocks: usize, rows: &[*const Block], panels: *const Panel, np: usize, acc: Acc) {
    macro_rules! run {
        ($kind:ty) => {
            // Safety: the caller's promise.
            unsafe { tiles::<D, Codes<$kind>, true>(blocks, rows, panels.cast(), blocks * size_of::<Panel>(), np, acc) }
        };
    }
    match dtype {
        DType::Q8_0 => run!(Signed),
        DType::Q4_0 => run!(Plain<8>),
        DType::Q5_0 => run!(Plain<16>),
        DType::Q6K => run!(Split<32>),
        _ => run!(Minimum),
    }
}

/// # Safety
/// As for [`Int8::prepare`].
#[inline(always)]
unsafe fn prepare<D: Dot>(dtype: DType, panel: *const u8, first: usize, n: usize, out: *mut Panel) {
    macro_rules! run {
        ($format:ty) => {
            for b in 0..n {
                // Safety: the caller's promise.
                unsafe { format::prepare::<D, $format>(panel, first + b, &mut *out.add(b)) };
            }
        };
    }
    formats!(dtype, run);
}

macro_rules! table {
    ($tier:ident, $name:literal, $dot:ty $(, $features:literal)?) => {
        mod $tier {
            use super::*;

            pub(super) static INT8: Int8 = Int8 { name: $name, few, sweep, prepare };

            // Safety: called only through a table that `Int8` gives out where its features are there; the rest is the caller's promise.
            $(#[target_feature(enable = $features)])?
            #[allow(clippy::too_many_arguments)]
            unsafe fn few(
                dtype: DType,
                blocks: usize,
                rows: &[*const Block],
                panels: *const u8,
                bytes: usize,
                np: usize,
                acc: Acc,
            ) {
                unsafe { super::few::<$dot>(dtype, blocks, rows, panels, bytes, np, acc) }
            }

            // Safety: as above.
            $(#[target_feature(enable = $features)])?
            #[allow(clippy::too_many_arguments)]
            unsafe fn sweep(
                dtype: DType,
                blocks: usize,
                rows: &[*const Block],
                panels: *const Panel,
                np: usize,
                acc: Acc,
            ) {
                unsafe { super::sweep::<$dot>(dtype, blocks, rows, panels, np, acc) }
            }

            // Safety: as above.
            $(#[target_feature(enable = $features)])?
            unsafe fn prepare(dtype: DType, panel: *const u8, first: usize, n: usize, out: *mut Panel) {
                unsafe { super::prepare::<$dot>(dtype, panel, first, n, out) }
            }
        }
    };
}

table!(scalar, "scalar", dot::Scalar);
#[cfg(target_arch = "x86_64")]
table!(avx2, "avx2", dot::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
table!(avx_vnni, "avx-vnni", dot::AvxVnni, "avx2,fma,f16c,avxvnni");
#[cfg(target_arch = "x86_64")]
table!(avx512_vnni, "avx512-vnni", dot::Avx512Vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni");
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
table!(neon, "neon", dot::Neon);
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
table!(neon_dot, "neon-dot", dot::NeonDot, "dotprod");
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
table!(neon_matrix, "neon-i8mm", dot::NeonMatrix, "dotprod,i8mm");

/// A way to multiply if its features are there, with the tier that uses it.
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_feature = "neon")))]
fn with(there: bool, isa: Isa, int8: &'static Int8) -> Option<(Isa, &'static Int8)> {
    there.then_some((isa, int8))
}

impl Int8 {
    /// The fastest way to multiply that a tier allows: with less than its instructions it does not use others.
    pub(crate) fn of(isa: Isa) -> &'static Self {
        Self::all().into_iter().flatten().rfind(|(tier, _)| *tier == isa).map_or(&scalar::INT8, |(_, int8)| int8)
    }

    /// The ways of this machine with the tiers that use them, slower ones first.
    #[cfg(target_arch = "x86_64")]
    fn all() -> [Option<(Isa, &'static Self)>; 7] {
        use crate::isa::x86_has;
        let (avx2, avx512, bf16) = (Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16);
        let base = x86_has!("avx2", "fma", "f16c");
        let vnni = base && x86_has!("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni");
        [
            with(true, Isa::Scalar, &scalar::INT8),
            with(base, avx2, &avx2::INT8),
            with(base, avx512, &avx2::INT8),
            with(base, bf16, &avx2::INT8),
            with(base && x86_has!("avxvnni"), avx2, &avx_vnni::INT8),
            with(vnni, avx512, &avx512_vnni::INT8),
            with(vnni, bf16, &avx512_vnni::INT8),
        ]
    }

    /// As above.
    #[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
    fn all() -> [Option<(Isa, &'static Self)>; 7] {
        use crate::isa::aarch64_has;
        let (neon, bf16) = (Isa::Neon, Isa::NeonBf16);
        let (dot, matrix) = (aarch64_has!("dotprod"), aarch64_has!("dotprod", "i8mm"));
        [
            with(true, Isa::Scalar, &scalar::INT8),
            with(true, neon, &neon::INT8),
            with(true, bf16, &neon::INT8),
            with(dot, neon, &neon_dot::INT8),
            with(dot, bf16, &neon_dot::INT8),
            with(matrix, neon, &neon_matrix::INT8),
            with(matrix, bf16, &neon_matrix::INT8),
        ]
    }

    /// As above.
    #[cfg(not(any(target_arch = "x86_64", all(target_arch = "aarch64", target_feature = "neon"))))]
    fn all() -> [Option<(Isa, &'static Self)>; 1] {
        [Some((Isa::Scalar, &scalar::INT8))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::{panel_bytes, units};
    use alloc::{vec, vec::Vec};

    /// Offsets of the high bytes of f16 scales, in whose exponents one bit is cleared to keep them finite.
    const TYPES: [(DType, &[usize]); 7] = [
        (DType::Q8_0, &[1]),
        (DType::Q4_0, &[1]),
        (DType::Q4_1, &[1, 3]),
        (DType::Q5_0, &[1]),
        (DType::Q5_1, &[1, 3]),
        (DType::Q4K, &[1, 3]),
        (DType::Q6K, &[209]),
    ];

    struct Random(u64);

    impl Random {
        fn byte(&mut self) -> u8 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 56) as u8
        }

        fn panels(&mut self, dtype: DType, scales: &[usize], cols: usize, np: usize) -> Vec<u8> {
            let (panel, (block, size)) = (panel_bytes(dtype, cols).unwrap(), dtype.block());
            let mut out = vec![0; panel * np];
            for (p, r) in (0..np).flat_map(|p| (0..NR).map(move |r| (p, r))) {
                let mut row: Vec<u8> = (0..cols / block * size).map(|_| self.byte()).collect();
                row.chunks_exact_mut(size).for_each(|b| scales.iter().for_each(|at| b[*at] &= !0x40));
                units(dtype, cols, r, |from, to, size| out[p * panel + to..][..size].copy_from_slice(&row[from..from + size]));
            }
            out
        }

        fn row(&mut self, blocks: usize) -> Vec<Block> {
            let block = |_| {
                // The extremes are among the codes.
                let codes = core::array::from_fn(|_| u32::from_le_bytes(core::array::from_fn(|_| (self.byte() as i8).max(-127) as u8)));
                let sum = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).map(|b| i32::from(b as i8)).sum();
                let (sums, scale) = ([sum(&codes[..4]), sum(&codes[4..])], f32::from(self.byte()) / 300.0);
                Block { codes, scale, scaled_sum: scale * (sums[0] + sums[1]) as f32, sums }
            };
            (0..blocks).map(block).collect()
        }
    }

    fn few(int8: &Int8, dtype: DType, rows: &[*const Block], blocks: usize, panels: &[u8], np: usize) -> Vec<f32> {
        let (ld, distance) = (np * NR, panel_bytes(dtype, blocks * STEPS).unwrap());
        let mut c = vec![0.5; rows.len() * ld];
        // Safety: rows, panels and accumulators are as large as is said; the kernel is one of this machine.
        unsafe { (int8.few)(dtype, blocks, rows, panels.as_ptr(), distance, np, Acc::new(c.as_mut_ptr(), ld, false)) };
        c
    }

    fn sweep(int8: &Int8, dtype: DType, rows: &[*const Block], blocks: usize, panels: &[u8], np: usize) -> Vec<f32> {
        let (ld, distance) = (np * NR, panel_bytes(dtype, blocks * STEPS).unwrap());
        let (mut c, mut room) = (vec![0.5; rows.len() * ld], vec![Panel::ZERO; np * blocks]);
        // Safety: as above.
        unsafe {
            for p in 0..np {
                (int8.prepare)(dtype, panels.as_ptr().add(p * distance), 0, blocks, room.as_mut_ptr().add(p * blocks));
            }
            (int8.sweep)(dtype, blocks, rows, room.as_ptr(), np, Acc::new(c.as_mut_ptr(), ld, false));
        }
        c
    }

    #[test]
    fn every_kernel_gives_the_bits_of_the_scalar_one() {
        let mut random = Random(1);
        let (blocks, np) = (8, 3);
        for (dtype, scales) in TYPES {
            let panels = random.panels(dtype, scales, blocks * STEPS, np);
            let rows: Vec<Vec<Block>> = (0..13).map(|_| random.row(blocks)).collect();
            let rows: Vec<*const Block> = rows.iter().map(|r| r.as_ptr()).collect();
            let want = few(&scalar::INT8, dtype, &rows, blocks, &panels, np);
            assert!(want.iter().all(|x| x.is_finite()) && want.iter().any(|x| *x != 0.5));
            for (isa, int8) in Int8::all().into_iter().flatten() {
                for m in [1, 2, 3, 4, 5, 13] {
                    for (what, got) in [
                        ("few", few(int8, dtype, &rows[..m], blocks, &panels, np)),
                        ("sweep", sweep(int8, dtype, &rows[..m], blocks, &panels, np)),
                    ] {
                        let same = got.iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits());
                        assert!(same, "{what} of {isa} by {}, {dtype}, {m} rows", int8.name);
                    }
                }
            }
        }
    }
}
