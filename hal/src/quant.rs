//! Rows of checkpoint weights as f32: plain floats and the block formats of GGUF (ggml `ggml-quants.c`, `dequantize_row_*`).
//!
//! A block format is *defined* by the f32 sequence given here, every operation rounded separately, so all backends start from the same numbers.

use crate::{DType, Error, Result};
use alloc::format;

/// Converts one row of `out.len()` elements from its little-endian checkpoint form.
///
/// # Errors
/// `Unsupported` for a type that is no weight; `InvalidArgument` where `bytes` is not exactly that row.
pub fn dequantise_row(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let block: fn(&[u8], &mut [f32]) = match dtype {
        DType::F32 => |b, y| y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => |b, y| y[0] = f16(b),
        DType::Bf16 => |b, y| y[0] = half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::Q8_0 => q8_0,
        DType::Q4_0 => q4_0,
        DType::Q4_1 => q4_1,
        DType::Q5_0 => q5_0,
        DType::Q5_1 => q5_1,
        DType::Q4K => q4_k,
        DType::Q6K => q6_k,
        DType::U32 => return Err(Error::unsupported("u32 is no weight type")),
    };
    if dtype.bytes(out.len()) != Some(bytes.len()) {
        return Err(Error::invalid(format!("{} bytes are not {} elements of {dtype}", bytes.len(), out.len())));
    }
    let (elements, size) = dtype.block();
    for (b, y) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(elements)) {
        block(b, y);
    }
    Ok(())
}

fn f16(b: &[u8]) -> f32 {
    half::f16::from_le_bytes([b[0], b[1]]).to_f32()
}

fn q8_0(b: &[u8], y: &mut [f32]) {
    let d = f16(b);
    for (q, y) in b[2..].iter().zip(y) {
        *y = f32::from(*q as i8) * d;
    }
}

/// Writes 16 bytes of nibbles: the low ones are elements 0..16, the high ones 16..32.
fn nibbles(qs: &[u8], y: &mut [f32], value: impl Fn(usize, u8) -> f32) {
    for (j, q) in qs.iter().enumerate() {
        y[j] = value(j, q & 0xF);
        y[j + 16] = value(j + 16, q >> 4);
    }
}

fn q4_0(b: &[u8], y: &mut [f32]) {
    let d = f16(b);
    nibbles(&b[2..], y, |_, q| f32::from(q as i8 - 8) * d);
}

fn q4_1(b: &[u8], y: &mut [f32]) {
    let (d, m) = (f16(b), f16(&b[2..]));
    nibbles(&b[4..], y, |_, q| f32::from(q) * d + m);
}

/// Bit `j` of the packed fifth bits, in place.
fn fifth(qh: &[u8], j: usize) -> u8 {
    ((qh[j / 8] >> (j % 8)) & 1) << 4
}

fn q5_0(b: &[u8], y: &mut [f32]) {
    let (d, qh) = (f16(b), &b[2..6]);
    nibbles(&b[6..], y, |j, q| f32::from((q | fifth(qh, j)) as i8 - 16) * d);
}

fn q5_1(b: &[u8], y: &mut [f32]) {
    let (d, m, qh) = (f16(b), f16(&b[2..]), &b[4..8]);
    nibbles(&b[8..], y, |j, q| f32::from(q | fifth(qh, j)) * d + m);
}

/// The 6-bit scale and minimum of sub-block `j` of eight.
fn scale_min(j: usize, s: &[u8]) -> (f32, f32) {
    let (scale, min) =
        if j < 4 { (s[j] & 63, s[j + 4] & 63) } else { ((s[j + 4] & 0xF) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4)) };
    (scale.into(), min.into())
}

fn q4_k(b: &[u8], y: &mut [f32]) {
    let (d, dmin, scales) = (f16(b), f16(&b[2..]), &b[4..16]);
    // 32 bytes hold two sub-blocks: the low nibbles are the even one, the high nibbles the odd one.
    for (pair, (qs, y)) in b[16..].chunks_exact(32).zip(y.chunks_exact_mut(64)).enumerate() {
        for (half, y) in y.chunks_exact_mut(32).enumerate() {
            let (scale, min) = scale_min(2 * pair + half, scales);
            let (scale, min) = (d * scale, dmin * min);
            for (q, y) in qs.iter().zip(y) {
                *y = scale * f32::from((q >> (4 * half)) & 0xF) - min;
            }
        }
    }
}

fn q6_k(b: &[u8], y: &mut [f32]) {
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], f16(&b[208..]));
    for (i, y) in y.iter_mut().enumerate() {
        // Half of 128, quarter of 32 within it: quarters share 64 bytes of low nibbles and 32 bytes of bit pairs.
        let (half, quarter, l) = (i / 128, i % 128 / 32, i % 32);
        let nibble = (low[64 * half + 32 * (quarter % 2) + l] >> (4 * (quarter / 2))) & 0xF;
        let pair = (high[32 * half + l] >> (2 * quarter)) & 3;
        let q = (nibble | (pair << 4)) as i8 - 32;
        *y = d * f32::from(scales[i / 16] as i8) * f32::from(q);
    }
}
