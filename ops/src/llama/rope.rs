//! Rotary tables: cos and sin of every angle, made on the host so that all devices rotate by the same bits.

use alloc::vec::Vec;
use core::f32::consts::PI;

use crate::config::{ModelConfig, RopeScaling};

/// `(cos, sin)`, each `[positions, head_dim / 2]`, of the angles `position * frequency`.
///
/// Frequencies and angles are f32, as in Hugging Face transformers (`modeling_rope_utils`), the functions are evaluated in f64 and rounded
/// once.
pub fn rope_tables(config: &ModelConfig, positions: usize) -> (Vec<f32>, Vec<f32>) {
    let frequencies = rope_frequencies(config);
    let angles = || (0..positions).flat_map(|p| frequencies.iter().map(move |f| f64::from(p as f32 * f)));
    (angles().map(|a| libm::cos(a) as f32).collect(), angles().map(|a| libm::sin(a) as f32).collect())
}

/// `theta^(-2 i / head_dim)` for i below head_dim / 2, stretched as the configuration says.
pub(crate) fn rope_frequencies(config: &ModelConfig) -> Vec<f32> {
    let dim = config.head_dim as f32;
    (0..config.head_dim / 2)
        .map(|i| {
            let power = libm::pow(config.rope_theta.into(), f64::from((2 * i) as f32 / dim)) as f32;
            stretch(1.0 / power, config.rope_scaling)
        })
        .collect()
}

fn stretch(frequency: f32, scaling: RopeScaling) -> f32 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_max_positions } => {
            let original = original_max_positions as f32;
            let wavelength = 2.0 * PI / frequency;
            if wavelength < original / high {
                frequency
            } else if wavelength > original / low {
                frequency / factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::MemoryModel;

    #[test]
    fn unscaled_frequencies_follow_the_formula() {
        let config = ModelConfig { head_dim: 64, rope_theta: 500_000.0, ..MemoryModel::tiny_config() };
        let (cos, sin) = rope_tables(&config, 9);
        for p in 0..9 {
            for i in 0..32 {
                let angle = p as f64 * 500_000f64.powf(-2.0 * i as f64 / 64.0);
                // A frequency is rounded three times (exponent, power, reciprocal) and the angle once; the exponent's rounding is
                // multiplied by ln theta = 13. Angles are below 9.
                let tolerance = 9.0 * (13.0 + 3.0) * f64::from(f32::EPSILON);
                assert!((f64::from(cos[p * 32 + i]) - angle.cos()).abs() < tolerance);
                assert!((f64::from(sin[p * 32 + i]) - angle.sin()).abs() < tolerance);
            }
        }
    }

    /// Llama 3.1: factor 8, low 1, high 4, first trained at 8192. The borders are at wavelengths 2048 and 8192; the expected factors are
    /// worked out from the definition for one frequency on each side and one between.
    #[test]
    fn llama3_scaling_keeps_short_stretches_long_and_blends_between() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 8192 };
        let at = |wavelength: f64| {
            let f = (2.0 * core::f64::consts::PI / wavelength) as f32;
            f64::from(stretch(f, scaling) / f)
        };
        assert_eq!(at(2000.0), 1.0);
        assert_eq!(at(9000.0), 0.125);
        // 8192 / 4096 = 2; smooth = (2 - 1) / (4 - 1) = 1/3; factor = (2/3) / 8 + 1/3 = 5/12.
        assert!((at(4096.0) - 5.0 / 12.0).abs() < 1e-6, "{}", at(4096.0));
        // The blend meets both ends.
        assert!((at(2048.001) - 1.0).abs() < 1e-5 && (at(8191.99) - 0.125).abs() < 1e-5);
    }

    #[test]
    fn linear_scaling_divides() {
        assert_eq!(stretch(0.5, RopeScaling::Linear { factor: 4.0 }), 0.125);
    }
}
