//! Host bytes of tensors to and from f32, element by element, in the machine's byte order.
//!
//! Mapped device memory need not be aligned for anything, so elements are put together from bytes.

use half::{bf16, f16};
use zofo_hal::{DType, Error, Result};

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], f: impl Fn([u8; N]) -> f32) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *o = f(*b);
    }
}

fn each_mut<const N: usize>(values: &[f32], bytes: &mut [u8], f: impl Fn(f32) -> [u8; N]) {
    for (b, v) in bytes.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *b = f(*v);
    }
}

/// Elements of float type `dtype` as f32; exact.
///
/// # Errors
/// `InvalidArgument` for another type.
pub(crate) fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    match dtype {
        DType::F32 => each(bytes, out, f32::from_ne_bytes),
        DType::F16 => each(bytes, out, |b| f16::from_ne_bytes(b).to_f32()),
        DType::Bf16 => each(bytes, out, |b| bf16::from_ne_bytes(b).to_f32()),
        _ => return Err(Error::invalid(alloc::format!("{dtype} elements are not read as f32"))),
    }
    Ok(())
}

/// `values` rounded to nearest even as elements of float type `dtype`.
///
/// # Errors
/// `InvalidArgument` for another type.
pub(crate) fn encode(dtype: DType, values: &[f32], bytes: &mut [u8]) -> Result<()> {
    match dtype {
        DType::F32 => each_mut(values, bytes, f32::to_ne_bytes),
        DType::F16 => each_mut(values, bytes, |v| f16::from_f32(v).to_ne_bytes()),
        DType::Bf16 => each_mut(values, bytes, |v| bf16::from_f32(v).to_ne_bytes()),
        _ => return Err(Error::invalid(alloc::format!("f32 values are not written as {dtype}"))),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_at_any_alignment() {
        let values = [0.0, -0.0, 1.5, -2.0, 65504.0];
        for (dtype, size) in [(DType::F32, 4), (DType::F16, 2), (DType::Bf16, 2)] {
            let mut raw = [0u8; 32];
            encode(dtype, &values, &mut raw[1..1 + 5 * size]).unwrap();
            let mut back = [9.0; 5];
            decode(dtype, &raw[1..1 + 5 * size], &mut back).unwrap();
            let expected = values.map(|v| if dtype == DType::Bf16 { bf16::from_f32(v).to_f32() } else { v });
            assert_eq!(back.map(f32::to_bits), expected.map(f32::to_bits), "{dtype}");
        }
        assert!(encode(DType::U32, &values, &mut [0; 20]).is_err());
        assert!(decode(DType::Q8_0, &[0; 34], &mut [0.0; 32]).is_err());
    }
}
