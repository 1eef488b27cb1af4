//! The matrix product.
//!
//! `out[i][j] = sum over k ascending of left[i][k] right[k][j]`, one chain per element. Nothing splits k between threads or accumulators:
//! blocks of k are added to the same f32 accumulators in order, so a row's bits depend on that row alone.
//!
//! # Shape of the work
//! - **Tile**: up to [`MC`] rows and [`NC`] columns, accumulated in scratch that stays in the second-level cache, written out once by an
//!   [`Epilogue`]. Tiles are what threads take.
//! - **Block of k**: [`KC`] steps, so that a right-hand panel of `KC x 16` stays in the first-level cache while all rows of the tile pass.
//! - **Micro-kernel**: as many rows as the tier has registers for, 16 columns.
//!
//! The left operand is read where it lies (f32) or converted per block of k. The right one comes as panels `[k][16]`: where a weight has
//! them already they are used in place, else they are made for the tile ([`pack`]).

mod job;
mod kernel;
mod pack;

pub(crate) use job::{Epilogue, Extension, Job, JobScratch, Left as JobLeft};
pub(crate) use kernel::Table;
pub(crate) use pack::{Left, Packing, PackingSlabs, Right, pack_factor};

use crate::scratch::Slab;
use core::cmp::min;

/// Columns of a panel.
pub(crate) const NR: usize = 16;
/// Steps of k between which accumulators go through memory; a multiple of every quantisation block.
pub(crate) const KC: usize = 256;
/// Rows of a tile; a multiple of every tier's micro-kernel.
pub(crate) const MC: usize = 96;
/// Columns of a tile; a multiple of every quantisation block.
pub(crate) const NC: usize = 256;

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
    /// First column of the right operand; a multiple of 16, and of [`NC`] where it is quantised.
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

/// Accumulates `left right` into `tile`.
///
/// # Safety
/// The operands hold the extent; the calling thread alone touches `tile` and `packing`, which were cut for this many rows and this right
/// operand.
pub(crate) unsafe fn product(table: &Table, left: &Left<'_>, right: &Right<'_>, e: Extent, tile: Tile, packing: &Packing) {
    let panels = e.n.div_ceil(NR);
    assert!(e.n0.is_multiple_of(NR) && panels * NR <= tile.ld && e.m.saturating_sub(1) * tile.ld + panels * NR <= tile.acc.len());
    if e.k == 0 && e.fresh {
        // Safety: the caller's promise.
        (0..e.m).for_each(|i| unsafe { tile.row(i) }[..panels * NR].fill(0.0));
    }
    let group = right.group();
    for k0 in (0..e.k).step_by(KC) {
        let kc = min(KC, e.k - k0);
        // Safety: the caller's promises; panels p0 .. p0 + np and steps k0 .. k0 + kc are within the extent.
        unsafe {
            let rows = left.block(k0, kc, e.m, packing);
            for p0 in (0..panels).step_by(group) {
                let np = min(group, panels - p0);
                let (b, distance) = right.panels(table, e.right_k + k0, kc, e.n0 / NR + p0, np, packing);
                (table.sweep)(kc, rows, b, distance, np, tile.acc.ptr().add(p0 * NR), tile.ld, e.fresh && k0 == 0);
            }
        }
    }
}
