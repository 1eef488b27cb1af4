//! Tensors and weights on the host, as the kit makes and compares them.

use crate::rng::Rng;
use half::{bf16, f16};
use zofo_hal::DType;

/// A dense row-major matrix: its bytes, and what they mean.
#[derive(Clone, Debug)]
pub struct HostTensor {
    /// Element type; block-quantised for weights only.
    pub dtype: DType,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Rows one after the other.
    pub bytes: Vec<u8>,
}

impl HostTensor {
    /// Values uniform in `[-scale, scale)`, rounded to `dtype`; weights of block-quantised types have random blocks of that size.
    pub fn random(rng: &mut Rng, dtype: DType, rows: usize, cols: usize, scale: f64) -> Self {
        if dtype.is_quantised() {
            let bytes = crate::quantised::random_blocks(rng, dtype, rows * cols / dtype.block().0, scale);
            return Self { dtype, rows, cols, bytes };
        }
        Self::from_fn(dtype, rows, cols, |_, _| rng.unit() * scale)
    }

    /// Element by element, rounded to `dtype`.
    pub fn from_fn(dtype: DType, rows: usize, cols: usize, mut f: impl FnMut(usize, usize) -> f64) -> Self {
        let mut bytes = Vec::with_capacity(rows * cols * dtype.block().1);
        for r in 0..rows {
            for c in 0..cols {
                encode(dtype, f(r, c), &mut bytes);
            }
        }
        Self { dtype, rows, cols, bytes }
    }

    /// A `[1, n]` vector of u32.
    pub fn indices(values: &[u32]) -> Self {
        Self { dtype: DType::U32, rows: 1, cols: values.len(), bytes: bytemuck::cast_slice(values).to_vec() }
    }

    /// A `[1, n]` vector of f32.
    pub fn f32s(values: &[f32]) -> Self {
        Self { dtype: DType::F32, rows: 1, cols: values.len(), bytes: bytemuck::cast_slice(values).to_vec() }
    }

    /// Every element as f64, exactly.
    pub fn values(&self) -> Vec<f64> {
        if self.dtype.is_quantised() {
            let (n, size) = self.dtype.block();
            let mut out = Vec::with_capacity(self.rows * self.cols);
            for block in self.bytes.chunks_exact(size) {
                crate::quantised::decode(self.dtype, block, &mut out);
            }
            debug_assert_eq!(out.len(), self.bytes.len() / size * n);
            return out;
        }
        self.bytes.chunks_exact(self.dtype.block().1).map(|b| decode(self.dtype, b)).collect()
    }

    /// Overwrites row `row` with all-one bits, which are a NaN in every float type: for rows that nobody may read.
    pub fn poison_row(&mut self, row: usize) {
        let pitch = self.cols * self.dtype.block().1;
        self.bytes[row * pitch..(row + 1) * pitch].fill(0xff);
    }

    /// The rows at `index`, in that order.
    pub fn take_rows(&self, index: &[usize]) -> Self {
        let pitch = self.bytes.len().checked_div(self.rows).unwrap_or(0);
        let bytes = index.iter().flat_map(|&r| self.bytes[r * pitch..(r + 1) * pitch].iter().copied()).collect();
        Self { dtype: self.dtype, rows: index.len(), cols: self.cols, bytes }
    }
}

/// Appends `value` rounded to nearest even.
pub fn encode(dtype: DType, value: f64, out: &mut Vec<u8>) {
    match dtype {
        DType::F32 => out.extend((value as f32).to_le_bytes()),
        DType::F16 => out.extend(f16::from_f64(round(dtype, value)).to_le_bytes()),
        DType::Bf16 => out.extend(bf16::from_f64(round(dtype, value)).to_le_bytes()),
        DType::U32 => out.extend((value as u32).to_le_bytes()),
        _ => unreachable!("{dtype} has no single elements"),
    }
}

/// One element, exactly.
pub fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        (DType::U32, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]).into(),
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).into(),
        (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).into(),
        _ => unreachable!("{} bytes of {dtype}", bytes.len()),
    }
}

/// `value` rounded to nearest even in `dtype`, as f64. The conversions of the `half` crate drop the low bits of an f64 first, which turns
/// what lies just above a tie into a tie.
pub fn round(dtype: DType, value: f64) -> f64 {
    let (precision, min_exponent, max) = match dtype {
        DType::F32 => return (value as f32).into(),
        DType::F16 => (11, -14, f64::from(f16::MAX)),
        DType::Bf16 => (8, -126, f64::from(bf16::MAX)),
        _ => return value,
    };
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let exponent = ((value.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(min_exponent);
    let quantum = 2f64.powi(exponent - precision + 1);
    let rounded = (value / quantum).round_ties_even() * quantum;
    if rounded.abs() > max { f64::INFINITY.copysign(value) } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_number_rounds_to_itself() {
        for bits in 0..=u16::MAX {
            for (dtype, v) in [(DType::F16, f64::from(f16::from_bits(bits))), (DType::Bf16, f64::from(bf16::from_bits(bits)))] {
                assert!(round(dtype, v) == v || v.is_nan(), "{dtype} {bits:#x}");
            }
        }
    }

    #[test]
    fn f32_rounds_to_bf16() {
        assert_eq!(round(DType::Bf16, f64::from(0.1f32)), 0.10009765625);
    }

    #[test]
    fn ties_go_to_even_and_neighbours_do_not() {
        let tie = 1.0 + 2f64.powi(-11);
        assert_eq!(round(DType::F16, tie), 1.0);
        assert_eq!(round(DType::F16, tie + 2f64.powi(-40)), 1.0 + 2f64.powi(-10));
        assert_eq!(round(DType::F16, 65519.9), 65504.0);
        assert_eq!(round(DType::F16, -65520.0), f64::NEG_INFINITY);
        assert_eq!(round(DType::F16, 2f64.powi(-24)), 2f64.powi(-24));
        assert_eq!(round(DType::F16, 2f64.powi(-26)), 0.0);
    }
}
