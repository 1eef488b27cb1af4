//! Seeded numbers in the form that files have them.

use half::{bf16, f16, slice::HalfFloatSliceExt};
use zofo_hal::{
    DType, Error, Result,
    perturb::{Direction, Noise, Site, TensorId, Tier},
};

/// The generator of one operand.
fn noise(seed: u64) -> Result<Noise> {
    Ok(Noise::new(seed, 0, Direction::default(), Site::new(TensorId::from_word(0)?, u32::MAX), Tier::detect()))
}

/// `count` normal numbers of deviation `deviation`.
pub fn normals(seed: u64, count: usize, deviation: f32) -> Result<Vec<f32>> {
    let mut values = vec![0.0; count];
    noise(seed)?.z_into(0, 0, &mut values);
    values.iter_mut().for_each(|v| *v *= deviation);
    Ok(values)
}

/// The same as bytes of a float type.
///
/// # Errors
/// `Unsupported` for another type.
pub fn floats(seed: u64, dtype: DType, count: usize, deviation: f32) -> Result<Vec<u8>> {
    let values = normals(seed, count, deviation)?;
    Ok(match dtype {
        DType::F32 => bytemuck::cast_slice(&values).to_vec(),
        DType::Bf16 => {
            let mut rounded = vec![bf16::ZERO; count];
            rounded.convert_from_f32_slice(&values);
            bytemuck::cast_slice(&rounded).to_vec()
        }
        DType::F16 => {
            let mut rounded = vec![f16::ZERO; count];
            rounded.convert_from_f32_slice(&values);
            bytemuck::cast_slice(&rounded).to_vec()
        }
        _ => return Err(Error::unsupported(format!("{dtype} is no float type"))),
    })
}

/// `count` tokens of a vocabulary of so many.
pub fn tokens(seed: u64, count: usize, vocab: usize) -> Result<Vec<u32>> {
    let mut words = vec![0; count];
    noise(seed)?.words_into(0, 0, &mut words);
    Ok(words.into_iter().map(|w| w % vocab as u32).collect())
}

/// A weight `[rows, cols]`: numbers of deviation 1 / sqrt(cols), so that a product has that of its input.
///
/// # Errors
/// `InvalidArgument` where a row is no whole number of blocks, `Unsupported` for a type that is no weight.
pub fn weight(seed: u64, dtype: DType, rows: usize, cols: usize) -> Result<Vec<u8>> {
    let deviation = 1.0 / (cols as f32).sqrt();
    let Some(block) = Block::of(dtype) else {
        return floats(seed, dtype, rows * cols, deviation);
    };
    let bytes = dtype.bytes(cols).ok_or_else(|| Error::invalid(format!("{cols} columns are no whole number of {dtype} blocks")))? * rows;
    let mut words = vec![0u32; bytes.div_ceil(4)];
    noise(seed)?.words_into(0, 0, &mut words);
    let mut bytes = bytemuck::cast_slice(&words)[..bytes].to_vec();
    let scale = f16::from_f32(deviation / block.deviation);
    let minimum = f16::from_f32(block.minimum * deviation / block.deviation);
    for b in bytes.chunks_exact_mut(dtype.block().1) {
        b[block.scale..block.scale + 2].copy_from_slice(&scale.to_le_bytes());
        if block.minimum != 0.0 {
            b[block.scale + 2..block.scale + 4].copy_from_slice(&minimum.to_le_bytes());
        }
    }
    Ok(bytes)
}

/// What makes random bits of a block format numbers around 0.
struct Block {
    /// Where its f16 scale is; a minimum follows it.
    scale: usize,
    /// Deviation of the values at scale 1.
    deviation: f32,
    /// The minimum at scale 1 that centres them; 0 where there is none.
    minimum: f32,
}

impl Block {
    /// `None` for plain floats.
    fn of(dtype: DType) -> Option<Self> {
        let (scale, deviation, minimum) = match dtype {
            DType::Q8_0 => (0, 74.0, 0.0),
            DType::Q4_0 => (0, 4.6, 0.0),
            DType::Q4_1 => (0, 4.6, -7.5),
            DType::Q5_0 => (0, 9.2, 0.0),
            DType::Q5_1 => (0, 9.2, -15.5),
            // Its minimum is subtracted; both are multiplied by 6-bit numbers.
            DType::Q4K => (0, 250.0, 7.5),
            DType::Q6K => (208, 1360.0, 0.0),
            _ => return None,
        };
        Some(Self { scale, deviation, minimum })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zofo_hal::quant::dequantise_row;

    #[test]
    fn weights_of_every_type_have_the_deviation_of_trained_ones() {
        let (rows, cols) = (16, 1024);
        for dtype in DType::ALL.into_iter().filter(|d| *d != DType::U32) {
            let bytes = weight(3, dtype, rows, cols).unwrap();
            let mut values = vec![0.0; rows * cols];
            dequantise_row(dtype, &bytes, &mut values).unwrap();
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            let deviation = (values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32).sqrt();
            let unit = deviation * (cols as f32).sqrt();
            assert!((0.8..1.25).contains(&unit), "{dtype}: deviation {unit}");
            // The zero of some formats is half a step from the middle of their range.
            assert!(mean.abs() < 0.15 * deviation, "{dtype}: mean {mean}");
        }
    }
}
