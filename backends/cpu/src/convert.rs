//! f16 and bf16 to f32 and back, without branches so that loops over them vectorise on every tier.

use zofo_hal::DType;

/// bf16 bits to f32; exact.
#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// f32 to bf16 bits, to nearest even; NaN stays NaN.
#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> u16 {
    let b = x.to_bits();
    let rounded = b.wrapping_add(0x7fff + ((b >> 16) & 1)) >> 16;
    let nan = (b >> 16) | 0x40;
    (if b & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

/// f16 bits to f32; exact (the two-case method of the FP16 library: rebias by a multiplication, subnormals by a subtraction).
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let w = u32::from(bits) << 16;
    let twice = w.wrapping_add(w);
    let normal = f32::from_bits((twice >> 4).wrapping_add(0xe0 << 23)) * f32::from_bits(0x0780_0000);
    let subnormal = f32::from_bits((twice >> 17) | (126 << 23)) - 0.5;
    let magnitude = if twice < 1 << 27 { subnormal.to_bits() } else { normal.to_bits() };
    f32::from_bits((w & 0x8000_0000) | magnitude)
}

/// f32 to f16 bits, to nearest even; out of range becomes infinity, NaN stays NaN (the FP16 library's method: let an addition round).
#[inline(always)]
pub(crate) fn f32_to_f16(x: f32) -> u16 {
    let w = x.to_bits();
    let twice = w.wrapping_add(w);
    let magnitude = f32::from_bits(w & 0x7fff_ffff);
    // Times 2^112 and 2^-110: what is too large becomes infinite on the way.
    let base = magnitude * f32::from_bits(0x7780_0000) * f32::from_bits(0x0880_0000);
    let bias = (twice & 0xff00_0000).max(0x7100_0000);
    let bits = (f32::from_bits((bias >> 1).wrapping_add(0x0780_0000)) + base).to_bits();
    let finite = ((bits >> 13) & 0x7c00).wrapping_add(bits & 0x0fff);
    let body = if twice > 0xff00_0000 { 0x7e00 } else { finite };
    ((w & 0x8000_0000) >> 16 | body) as u16
}

/// Reads `out.len()` elements of float type `dtype` at `p`.
///
/// # Safety
/// `p` is valid for that many elements; it need not be aligned.
#[inline(always)]
pub(crate) unsafe fn load(dtype: DType, p: *const u8, out: &mut [f32]) {
    // Safety: element i of `out.len()` is within what the caller promises.
    unsafe {
        match dtype {
            DType::Bf16 => out.iter_mut().enumerate().for_each(|(i, o)| *o = bf16_to_f32(p.cast::<u16>().add(i).read_unaligned())),
            DType::F16 => out.iter_mut().enumerate().for_each(|(i, o)| *o = f16_to_f32(p.cast::<u16>().add(i).read_unaligned())),
            _ => core::ptr::copy_nonoverlapping(p, out.as_mut_ptr().cast::<u8>(), size_of_val(out)),
        }
    }
}

/// Writes `values` as float type `dtype` at `p`, rounded to nearest even.
///
/// # Safety
/// `p` is valid for writes of that many elements; it need not be aligned.
#[inline(always)]
pub(crate) unsafe fn store(dtype: DType, p: *mut u8, values: &[f32]) {
    // Safety: element i of `values.len()` is within what the caller promises.
    unsafe {
        match dtype {
            DType::Bf16 => values.iter().enumerate().for_each(|(i, v)| p.cast::<u16>().add(i).write_unaligned(f32_to_bf16(*v))),
            DType::F16 => values.iter().enumerate().for_each(|(i, v)| p.cast::<u16>().add(i).write_unaligned(f32_to_f16(*v))),
            _ => core::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), p, size_of_val(values)),
        }
    }
}

/// Rounds f32 values to float type `dtype` in place.
#[inline(always)]
pub(crate) fn round(dtype: DType, values: &mut [f32]) {
    match dtype {
        DType::Bf16 => values.iter_mut().for_each(|v| *v = bf16_to_f32(f32_to_bf16(*v))),
        DType::F16 => values.iter_mut().for_each(|v| *v = f16_to_f32(f32_to_f16(*v))),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn widening_is_exact_for_every_half() {
        for bits in 0..=u16::MAX {
            let (a, b) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
            assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "f16 {bits:#x}: {a} {b}");
            let (a, b) = (bf16_to_f32(bits), bf16::from_bits(bits).to_f32());
            assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "bf16 {bits:#x}: {a} {b}");
        }
    }

    #[test]
    fn narrowing_rounds_to_nearest_even() {
        // Every exponent, with mantissas around the halfway points of both types.
        let tails =
            [0u32, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1_8000, 0x7f_ffff, 0x7f_f000];
        for exponent in 0..=255u32 {
            for tail in tails {
                for sign in [0, 1 << 31] {
                    let x = f32::from_bits(sign | exponent << 23 | tail);
                    let (a, b) = (f16::from_bits(f32_to_f16(x)), f16::from_f32(x));
                    assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{x:e}: {a} {b}");
                    let (a, b) = (bf16::from_bits(f32_to_bf16(x)), bf16::from_f32(x));
                    assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{x:e}: {a} {b}");
                }
            }
        }
    }
}
