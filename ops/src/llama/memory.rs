//! A model whose parameters are in memory.

use alloc::{collections::BTreeMap, vec::Vec};

use zofo_hal::{DType, Result, WeightData, perturb::philox4x32_10};

use super::{
    Cut,
    weights::{ParamName, SourceTensor, WeightSource, encode},
};
use crate::config::{Family, ModelConfig, RopeScaling};

/// Domain bits of the words behind synthetic weights: apart from every direction of a perturbation, which use domains 0 and 1, and from
/// adapters' starting values, which use 3.
const DOMAIN: u32 = 2 << 30;

/// Parameters in memory.
#[derive(Clone, Debug)]
pub struct MemoryModel {
    config: ModelConfig,
    tensors: BTreeMap<ParamName, (DType, Vec<u8>)>,
}

impl MemoryModel {
    /// A model without parameters.
    pub fn new(config: ModelConfig) -> Self {
        Self { config, tensors: BTreeMap::new() }
    }

    /// A very small model with grouped queries: what tests and first steps need.
    pub fn tiny_config() -> ModelConfig {
        ModelConfig {
            family: Family::Llama,
            vocab: 40,
            hidden: 16,
            layers: 4,
            heads: 4,
            kv_heads: 2,
            head_dim: 4,
            intermediate: 24,
            rms_norm_eps: 1e-5,
            rope_theta: 10000.0,
            rope_scaling: RopeScaling::None,
            tie_word_embeddings: true,
            max_positions: 64,
            qkv_bias: false,
            sliding_window: None,
            bos: Some(1),
            eos: alloc::vec![2],
        }
    }

    /// Every parameter at random, in f32: matrices uniform with the variance 1 / in, gains in 0.75 .. 1.25, biases in -0.25 .. 0.25.
    ///
    /// # Errors
    /// Those of [`ModelConfig::validate`].
    pub fn random(config: ModelConfig, seed: u64) -> Result<Self> {
        config.validate()?;
        let mut model = Self::new(config);
        for (number, name) in ParamName::all(&model.config).into_iter().enumerate() {
            let (rows, cols) = name.shape(&model.config);
            let (centre, width) = match name {
                ParamName::Embedding | ParamName::Head | ParamName::Weight(..) => (0.0, libm::sqrtf(3.0 / cols as f32)),
                ParamName::Bias(..) => (0.0, 0.25),
                _ => (1.0, 0.25),
            };
            let values = uniform(seed, number as u32, DOMAIN, rows * cols).map(|u| centre + width * u);
            model.set_f32(name, &values.collect::<Vec<_>>());
        }
        Ok(model)
    }

    /// Sets a parameter from f32.
    pub fn set_f32(&mut self, name: ParamName, values: &[f32]) {
        self.set(name, DType::F32, encode(values, DType::F32));
    }

    /// Sets a parameter from bytes as they lie in a checkpoint.
    pub fn set(&mut self, name: ParamName, dtype: DType, bytes: Vec<u8>) {
        self.tensors.insert(name, (dtype, bytes));
    }

    /// The same model with every matrix rounded to a 16-bit type.
    ///
    /// # Errors
    /// `Unsupported` where a parameter is block-quantised.
    pub fn rounded(&self, dtype: DType) -> Result<Self> {
        let mut model = self.clone();
        for name in self.tensors.keys() {
            if let Some(t) = self.tensor(*name)?
                && t.rows > 1
            {
                model.set(*name, dtype, encode(&t.to_f32()?, dtype));
            }
        }
        Ok(model)
    }
}

/// `count` numbers in -1 .. 1, 23 bits each, none of them 0: a function of seed, tensor and domain.
pub(crate) fn uniform(seed: u64, tensor: u32, domain: u32, count: usize) -> impl Iterator<Item = f32> {
    let key = [seed as u32, (seed >> 32) as u32];
    (0..count.div_ceil(4) as u32)
        .flat_map(move |block| philox4x32_10([block, tensor, domain, 0], key))
        .take(count)
        .map(|word| ((word >> 9) as f32 + 0.5) * f32::from_bits(0x3480_0000) - 1.0)
}

impl WeightSource for MemoryModel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, name: ParamName) -> Result<Option<SourceTensor<'_>>> {
        let (rows, cols) = name.shape(&self.config);
        let tensor = self.tensors.get(&name);
        Ok(tensor.map(|(dtype, bytes)| SourceTensor { dtype: *dtype, rows, cols, data: WeightData::Borrowed(bytes), part: Cut::Whole }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_numbers_are_centred_and_inside() {
        let n = 20_000;
        let v: Vec<f32> = uniform(7, 3, DOMAIN, n).collect();
        assert_eq!(v.len(), n);
        assert!(v.iter().all(|x| *x > -1.0 && *x < 1.0 && *x != 0.0));
        let mean = v.iter().sum::<f32>() / n as f32;
        // The mean of n uniform numbers has the deviation 1 / sqrt(3 n).
        assert!(mean.abs() < 5.0 / libm::sqrtf(3.0 * n as f32), "{mean}");
    }
}
