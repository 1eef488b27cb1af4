//! The matrix product.
//!
//! `out[i][j] = sum over k ascending of left[i][k] right[k][j]`, one chain per element. Nothing splits k between threads or accumulators:
//! blocks of k are added to the same f32 accumulators in order, so a row's bits depend on that row alone.
//!
//! # Shape of the work
//! - **Tile**: up to [`MT`] rows and [`NC`] columns, accumulated in scratch that stays in the second-level cache, written out once by an
//!   [`Epilogue`]. Tiles are what threads take.
//! - **Block of k**: [`KC`] steps. Panels of the right operand are made once per block for all rows of the tile.
//! - **Block of rows**: [`MC`] rows pass all panels of the block while their steps stay in the second-level cache.
//! - **Micro-kernel**: as many rows and panels of 16 columns as the tier has registers for.
//!
//! The left operand is read where it lies (f32) or converted per block. The right one comes as panels `[k][16]`: where a weight has them
//! already they are used in place, else they are made for the block ([`pack`]). Up to [`FEW`] rows multiply panels of any type as they
//! lie, decoded in registers: such products wait for memory. On tiers with bf16 dot products, bf16 activations meet bf16 and quantised
//! weights as bf16 pairs ([`dot`]); a quantised weight is rounded to bf16 for it. On devices that round activations to 8 bits, quantised
//! weights are multiplied as the integers that they hold ([`int8`]).

#[cfg(target_arch = "x86_64")]
mod dot;
#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
mod dot_neon;
mod format;
mod int8;
mod job;
mod kernel;
mod pack;

pub(crate) use format::{panel_bytes, units};
pub(crate) use int8::{Int8, STEPS as INT8_STEPS};
pub(crate) use job::{Epilogue, Extension, Job, JobScratch, Left as JobLeft};
use kernel::FEW;
pub(crate) use kernel::{Acc, Panels, Table};
pub(crate) use pack::{Left, Packing, PackingSlabs, Right, pack_factor};

use crate::scratch::Slab;
use core::cmp::min;

/// Columns of a panel.
pub(crate) const NR: usize = 16;
/// Steps of k between which accumulators go through memory; a multiple of 32, which quantised weights are decoded by. Of so many the panels
/// and rows of the largest micro-kernel stay in a first-level cache, also where another thread takes part of it.
pub(crate) const KC: usize = 128;
/// Rows of a block; a multiple of every tier's micro-kernel.
pub(crate) const MC: usize = 108;
/// Rows of a tile; a multiple of [`MC`].
pub(crate) const MT: usize = 432;
/// Columns of a tile; a multiple of every tier's micro-kernel, in panels, and of the columns that a quantised weight is decoded by.
pub(crate) const NC: usize = 192;

/// Accumulators of a tile: rows `ld` apart, columns in whole panels.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) acc: Slab<f32>,
    pub(crate) ld: usize,
}

impl Tile {
    /// The accumulators of row `i`.
    ///
    /// # Safety
    /// The calling thread alone touches the tile.
    pub(crate) unsafe fn row<'s>(&self, i: usize) -> &'s mut [f32] {
        // Safety: the caller's promise.
        unsafe { self.acc.part(i * self.ld, self.ld).get_mut() }
    }
}

/// Where a product lies in its operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Rows.
    pub(crate) m: usize,
    /// First column of the right operand; a multiple of 16, and of 32 where it is quantised.
    pub(crate) n0: usize,
    /// Columns.
    pub(crate) n: usize,
    /// Steps.
    pub(crate) k: usize,
    /// First step in the right operand; the left one's is its own.
    pub(crate) right_k: usize,
    /// Whether accumulators start from 0, else from what they hold.
    pub(crate) fresh: bool,
}

/// Where finished sums go: f32 rows `ld` apart, in whole panels.
#[derive(Clone, Copy)]
pub(crate) struct Out {
    pub(crate) first: *mut f32,
    pub(crate) ld: usize,
    /// Whether they are added to what is there.
    pub(crate) add: bool,
}

/// Accumulates `left right` into `tile`.
///
/// # Safety
/// The operands hold the extent; the calling thread alone touches `tile` and `packing`, which were cut for this many rows and columns.
pub(crate) unsafe fn product(table: &Table, left: &Left<'_>, right: &Right<'_>, e: Extent, tile: Tile, packing: &Packing) {
    // Safety: the caller's promise.
    unsafe { product_into(table, left, right, e, tile, packing, None) }
}

/// The same, leaving sums in `out` where there is one; `tile` then holds what is unfinished. Writing them out between two micro-kernels takes no
/// time of its own.
///
/// # Safety
/// As for [`product`]; `out` is valid for all rows and panels, the calling thread alone touches it, and `e.k` is not 0.
pub(crate) unsafe fn product_into(
    table: &Table,
    left: &Left<'_>,
    right: &Right<'_>,
    e: Extent,
    tile: Tile,
    packing: &Packing,
    out: Option<Out>,
) {
    if e.m == 0 || e.n == 0 {
        return;
    }
    let np = e.n.div_ceil(NR);
    assert!(e.n0.is_multiple_of(NR) && np * NR <= tile.ld && (e.m - 1) * tile.ld + np * NR <= tile.acc.len());
    if e.k == 0 && e.fresh {
        // Safety: the caller's promise.
        (0..e.m).for_each(|i| unsafe { tile.row(i) }[..np * NR].fill(0.0));
    }
    let dot = table.dot.filter(|_| left.is_bf16_rows() && right.is_paired() && e.k.is_multiple_of(2));
    for (k0, first) in (0..e.k).step_by(KC).flat_map(|k0| (0..np).step_by(NC / NR).map(move |p| (k0, p))) {
        let (kc, np, p0) = (min(KC, e.k - k0), min(NC / NR, np - first), e.n0 / NR + first);
        let fresh = e.fresh && k0 == 0;
        let blocks = (0..e.m).step_by(MC).map(|m0| (m0, min(MC, e.m - m0)));
        // Safety: the caller's promises; panels p0 .. p0 + np and steps k0 .. k0 + kc are within the extent.
        unsafe {
            let acc = Acc::new(tile.acc.ptr(), tile.ld, fresh);
            let acc = match out {
                Some(out) if k0 + kc == e.k => acc.into(out.first, out.ld, out.add),
                _ => acc,
            };
            if let Some(dot) = dot {
                let (b, distance) = right.pairs(table, dot, e.right_k + k0, kc, p0, np, packing);
                for (m0, m) in blocks {
                    (dot.sweep)(kc / 2, left.pairs(k0, m0, m, packing), b, distance, np, acc.at(m0, first * NR));
                }
            } else if let (true, Some(panels)) = (e.m <= FEW, right.in_place(e.right_k + k0, kc, p0)) {
                (table.few)(left.block(table, k0, kc, 0, e.m, packing), panels, np, acc.at(0, first * NR));
            } else {
                let (b, distance) = right.panels(table, e.right_k + k0, kc, p0, np, packing);
                for (m0, m) in blocks {
                    (table.sweep)(kc, left.block(table, k0, kc, m0, m, packing), b, distance, np, acc.at(m0, first * NR));
                }
            }
        }
    }
}
