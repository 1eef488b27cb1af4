//! Activations in 8 bits.

use super::STEPS;
use crate::{isa::tiered, scratch::Plain, view::Mat};

/// 32 steps of a row: `x = scale * code`, rounded to nearest even.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Block {
    /// Signed bytes within [-127, 127], four to a word, the first lowest.
    pub(super) codes: [u32; 8],
    pub(super) scale: f32,
    /// `scale` times the sum of all codes: what a weight's minimum is multiplied with.
    pub(super) scaled_sum: f32,
    /// Sums of codes, of 16 each.
    pub(super) sums: [i32; 2],
}

// Safety: any bit pattern is a value.
unsafe impl Plain for Block {}

/// Blocks whose values are all smaller count as zeros: 127 over such a number may not be finite.
const SMALL: f32 = f32::from_bits((127 - 100) << 23);

tiered! {
    /// Columns of row `r` of `x`, which are whole blocks. Where one is not finite, the scale of its block is NaN.
    fn quantise_row<'a>(x: &'a Mat, r: usize, out: &'a mut [Block]) {
        let mut values = [0.0f32; STEPS];
        for (b, block) in out.iter_mut().enumerate() {
            x.load(r, b * STEPS, &mut values);
            *block = one(&values);
        }
    }
}

/// Row `r` of `x` into `out`.
pub(crate) fn quantise(tier: crate::isa::Tier, x: &Mat, r: usize, out: &mut [Block]) {
    quantise_row(tier, x, r, out);
}

#[inline(always)]
fn one(values: &[f32; STEPS]) -> Block {
    /// Added, it leaves an integer in the low bits, rounded to nearest even.
    const SHIFT: f32 = 12_582_912.0;
    // As integers, magnitudes compare like the numbers, and any order of comparisons gives the same.
    let largest = values.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7fff_ffff));
    let largest = f32::from_bits(largest);
    let (scale, inverse) = match largest {
        m if !m.is_finite() => (f32::NAN, 0.0),
        m if m < SMALL => (0.0, 0.0),
        m => (m / 127.0, 127.0 / m),
    };
    let codes: [i32; STEPS] =
        core::array::from_fn(|i| ((values[i] * inverse + SHIFT).to_bits() as i32).wrapping_sub(SHIFT.to_bits() as i32));
    let sums = [codes[..16].iter().fold(0, |s: i32, c| s.wrapping_add(*c)), codes[16..].iter().fold(0, |s: i32, c| s.wrapping_add(*c))];
    let bytes = codes.map(|c| c as u8);
    let codes = core::array::from_fn(|g| u32::from_le_bytes([bytes[4 * g], bytes[4 * g + 1], bytes[4 * g + 2], bytes[4 * g + 3]]));
    Block { codes, scale, scaled_sum: scale * sums[0].wrapping_add(sums[1]) as f32, sums }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(b: &Block, i: usize) -> i32 {
        i32::from(b.codes[i / 4].to_le_bytes()[i % 4] as i8)
    }

    #[test]
    fn a_block_is_within_half_a_code() {
        for exponent in [-99, -60, 0, 30, 127] {
            let unit = f32::from_bits(((127 + exponent) << 23) as u32);
            let values: [f32; STEPS] = core::array::from_fn(|i| ((i * 37 % 64) as f32 / 33.0 - 0.95) * unit);
            let (b, largest) = (one(&values), values.iter().fold(0.0f32, |m, x| m.max(x.abs())));
            for (i, x) in values.iter().enumerate() {
                assert!((-127..=127).contains(&code(&b, i)));
                let error = (f64::from(*x) - f64::from(b.scale) * f64::from(code(&b, i))).abs();
                assert!(error <= f64::from(largest) * (1.0 / 254.0 + 2f64.powi(-21)), "2^{exponent}, {i}: {error:e} of {largest:e}");
            }
            assert_eq!(b.sums[0], (0..16).map(|i| code(&b, i)).sum());
            assert_eq!(b.sums[1], (16..32).map(|i| code(&b, i)).sum());
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_and_nothing_is_zero() {
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; STEPS];
            values[9] = x;
            let b = one(&values);
            assert!(b.scale.is_nan() && b.scaled_sum.is_nan());
        }
        for x in [0.0, -0.0, 1e-40, 1e-31] {
            let b = one(&[x; STEPS]);
            assert!((b.scale, b.scaled_sum, b.codes, b.sums) == (0.0, 0.0, [0; 8], [0; 2]));
        }
    }
}
