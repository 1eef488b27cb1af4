//! The part of an address that changes from step to step, as it lies in a device parameter buffer.

use super::{Direction, Noise, Site, Tier};
use bytemuck::{Pod, Zeroable};

/// What a recorded perturbation op reads at run time: eight 32-bit words, little-endian like the rest of the buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct NoiseParams {
    /// Low half of the run's seed: word 0 of the Philox key.
    pub seed_lo: u32,
    /// High half of the run's seed: word 1 of the Philox key.
    pub seed_hi: u32,
    /// Optimiser step: word 3 of the Philox counter.
    pub step: u32,
    /// Packed [`Direction`] of the first copy; copy i has this plus i.
    pub direction: u32,
    /// Step along z, where the op's form has one.
    pub epsilon: f32,
    /// Zero.
    pub reserved: [u32; 3],
}

impl NoiseParams {
    /// Words it takes in a parameter buffer.
    pub const WORDS: usize = size_of::<Self>() / 4;

    /// The parameters of `step`; `direction` is the first copy's.
    pub const fn new(seed: u64, step: u32, direction: Direction, epsilon: f32) -> Self {
        Self { seed_lo: seed as u32, seed_hi: (seed >> 32) as u32, step, direction: direction.word(), epsilon, reserved: [0; 3] }
    }

    /// The generator of copy `copy` at `site`. That the direction of the last copy fits its field was checked when the op was made
    /// ([`Direction::copy`]).
    pub const fn noise(&self, copy: u32, site: Site, tier: Tier) -> Noise {
        Noise { seed: [self.seed_lo, self.seed_hi], step: self.step, direction: self.direction.wrapping_add(copy), site, tier }
    }
}
