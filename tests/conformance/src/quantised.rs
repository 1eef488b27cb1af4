//! The GGUF block formats, decoded here once more and independently of any backend (ggml `ggml-common.h` and `dequantize_row_*`).

use crate::rng::Rng;
use half::f16;
use zofo_hal::DType;

fn half_at(block: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([block[at], block[at + 1]]).into()
}

/// Offsets of the f16 fields of a block.
fn halves(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4K => &[0, 2],
        DType::Q6K => &[208],
        _ => &[0],
    }
}

/// The largest magnitude that the integer part of a block can have, so that random blocks keep to a scale.
fn reach(dtype: DType) -> f64 {
    match dtype {
        DType::Q8_0 => 128.0,
        DType::Q4_0 => 8.0,
        DType::Q4_1 | DType::Q5_0 => 16.0,
        DType::Q5_1 => 32.0,
        DType::Q4K => 63.0 * 16.0,
        _ => 127.0 * 32.0,
    }
}

/// Blocks of random bits whose scales keep values within about `scale`.
pub fn random_blocks(rng: &mut Rng, dtype: DType, blocks: usize, scale: f64) -> Vec<u8> {
    let size = dtype.block().1;
    let mut bytes: Vec<u8> = (0..blocks * size).map(|_| rng.bits() as u8).collect();
    for block in bytes.chunks_exact_mut(size) {
        for &at in halves(dtype) {
            let d = f16::from_f64(rng.unit() * scale / reach(dtype));
            block[at..at + 2].copy_from_slice(&d.to_le_bytes());
        }
    }
    bytes
}

/// Appends the values of one block.
pub fn decode(dtype: DType, block: &[u8], out: &mut Vec<f64>) {
    let d = half_at(block, halves(dtype)[0]);
    let nibble = |bytes: &[u8], i: usize| (bytes[i % 16] >> (4 * (i / 16)) & 15) as i32;
    let fifth = |bytes: &[u8], i: usize| ((u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) >> i & 1) << 4) as i32;
    match dtype {
        DType::Q8_0 => out.extend(block[2..34].iter().map(|&q| d * f64::from(q as i8))),
        DType::Q4_0 => out.extend((0..32).map(|i| d * f64::from(nibble(&block[2..], i) - 8))),
        DType::Q4_1 => out.extend((0..32).map(|i| d * f64::from(nibble(&block[4..], i)) + half_at(block, 2))),
        DType::Q5_0 => out.extend((0..32).map(|i| d * f64::from((nibble(&block[6..], i) | fifth(&block[2..], i)) - 16))),
        DType::Q5_1 => out.extend((0..32).map(|i| d * f64::from(nibble(&block[8..], i) | fifth(&block[4..], i)) + half_at(block, 2))),
        DType::Q4K => {
            let (scales, min) = (&block[4..16], half_at(block, 2));
            for i in 0..256 {
                let (sc, m) = scale_and_min(scales, i / 32);
                let q = block[16 + i / 64 * 32 + i % 32] >> (4 * (i / 32 % 2)) & 15;
                out.push(d * f64::from(sc) * f64::from(q) - min * f64::from(m));
            }
        }
        DType::Q6K => {
            let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
            for i in 0..256 {
                let (half, quarter, l) = (i / 128, i / 32 % 4, i % 32);
                let lo = low[half * 64 + quarter % 2 * 32 + l] >> (4 * (quarter / 2)) & 15;
                let hi = high[half * 32 + l] >> (2 * quarter) & 3;
                let q = i32::from(lo | hi << 4) - 32;
                out.push(d * f64::from(scales[i / 16] as i8) * f64::from(q));
            }
        }
        _ => unreachable!("{dtype} is not quantised"),
    }
}

/// The 6-bit scale and minimum of sub-block `j`, packed in 12 bytes.
fn scale_and_min(s: &[u8], j: usize) -> (u8, u8) {
    if j < 4 { (s[j] & 63, s[j + 4] & 63) } else { (s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4) }
}

/// Size of the parts of each value: what a factorised product sums over. `None` where values have one part.
pub fn sizes(t: &crate::host::HostTensor) -> Option<Vec<f64>> {
    let minimum: fn(&[u8], usize) -> f64 = match t.dtype {
        DType::Q4_1 | DType::Q5_1 => |block, _| half_at(block, 2).abs(),
        DType::Q4K => |block, i| (half_at(block, 2) * f64::from(scale_and_min(&block[4..16], i / 32).1)).abs(),
        _ => return None,
    };
    let (n, size) = t.dtype.block();
    let minimums = t.bytes.chunks_exact(size).flat_map(|block| (0..n).map(move |i| minimum(block, i)));
    // |scale q| <= |value| + |minimum|.
    Some(t.values().into_iter().zip(minimums).map(|(v, m)| v.abs() + 2.0 * m).collect())
}
