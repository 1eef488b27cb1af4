//! Adapters on the host: started afresh, read from files, compared, moved between devices.

use alloc::{collections::BTreeMap, format, vec, vec::Vec};
use core::ops::Range;

use zofo_hal::{
    Error, Result,
    perturb::{Factor, Projection, TensorId},
};

use super::LoraSpec;
use crate::{
    config::ModelConfig,
    llama::{linear_name, uniform},
};

/// Domain bits of the words behind A's starting values: apart from every direction of a perturbation and from synthetic weights.
const DOMAIN: u32 = 3 << 30;

/// The factors of one adapted projection, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct HostLora {
    /// Rank r.
    pub rank: usize,
    /// What the product of the factors is multiplied by.
    pub scale: f32,
    /// A, `[r, in]`.
    pub a: Vec<f32>,
    /// B, `[out, r]`.
    pub b: Vec<f32>,
}

/// The adapter of a model, or of some of its layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostAdapter {
    /// Factors by layer and projection, which is the canonical order.
    pub modules: BTreeMap<(usize, Projection), HostLora>,
}

impl HostAdapter {
    /// The adapter that training starts from, as PEFT makes it: A uniform in -1/sqrt(in) .. 1/sqrt(in) (Kaiming with a = sqrt 5), B zero.
    ///
    /// A value is a function of seed, layer, projection and place alone, so it does not depend on how layers are split.
    ///
    /// # Errors
    /// Those of [`LoraSpec::check`]; `InvalidArgument` for layers that the model does not have.
    pub fn init(config: &ModelConfig, layers: Range<usize>, spec: &LoraSpec, seed: u64) -> Result<Self> {
        spec.check()?;
        if layers.end > config.layers {
            return Err(Error::invalid(format!("layers {layers:?} of a model that has {}", config.layers)));
        }
        let mut modules = BTreeMap::new();
        for layer in layers {
            for p in spec.targets.iter() {
                let (outputs, inputs) = linear_name(p).shape(config);
                let tensor = TensorId::new(layer as u32, p, Factor::A)?;
                let bound = 1.0 / libm::sqrtf(inputs as f32);
                let a = uniform(seed, tensor.word(), DOMAIN, spec.rank * inputs).map(|u| u * bound).collect();
                modules.insert((layer, p), HostLora { rank: spec.rank, scale: spec.scale(), a, b: vec![0.0; outputs * spec.rank] });
            }
        }
        Ok(Self { modules })
    }

    /// That every module is in the model and its factors fit.
    ///
    /// # Errors
    /// `InvalidArgument` with the module's name.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        for (&(layer, p), m) in &self.modules {
            let (outputs, inputs) = linear_name(p).shape(config);
            let bad = |what| Err(Error::invalid(format!("the adapter of layer {layer}, {}: {what}", p.name())));
            if layer >= config.layers {
                return bad(format!("the model has {} layers", config.layers));
            }
            if m.rank == 0 || m.a.len() != m.rank * inputs || m.b.len() != m.rank * outputs {
                return bad(format!(
                    "{} and {} elements do not make factors [{rank}, {inputs}] and [{outputs}, {rank}] of a rank above 0",
                    m.a.len(),
                    m.b.len(),
                    rank = m.rank
                ));
            }
        }
        Ok(())
    }

    /// The part of some layers.
    pub fn layers(&self, layers: Range<usize>) -> Self {
        let inside = self.modules.iter().filter(|(k, _)| layers.contains(&k.0));
        Self { modules: inside.map(|(k, m)| (*k, m.clone())).collect() }
    }

    /// Adds the modules of `other`, which replace those that are there.
    pub fn merge(&mut self, other: Self) {
        self.modules.extend(other.modules);
    }

    /// Number of trained values.
    pub fn parameters(&self) -> usize {
        self.modules.values().map(|m| m.a.len() + m.b.len()).sum()
    }

    /// A factor, `None` where its projection is not adapted.
    pub fn factor(&self, tensor: TensorId) -> Option<&[f32]> {
        let m = self.modules.get(&(tensor.layer() as usize, tensor.projection()))?;
        Some(match tensor.factor() {
            Factor::A => &m.a,
            Factor::B => &m.b,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{llama::MemoryModel, lora::Targets};

    #[test]
    fn starting_values_do_not_depend_on_the_split() {
        let config = MemoryModel::tiny_config();
        let spec = LoraSpec::new(3, 6.0, Targets::ALL);
        let whole = HostAdapter::init(&config, 0..4, &spec, 11).unwrap();
        let mut parts = HostAdapter::init(&config, 0..1, &spec, 11).unwrap();
        parts.merge(HostAdapter::init(&config, 1..4, &spec, 11).unwrap());
        assert_eq!(whole, parts);
        assert_eq!(whole.layers(0..1), HostAdapter::init(&config, 0..1, &spec, 11).unwrap());
        assert_ne!(whole, HostAdapter::init(&config, 0..4, &spec, 12).unwrap());
        assert!(whole.check(&config).is_ok());
    }

    #[test]
    fn a_is_bounded_and_b_is_zero() {
        let config = MemoryModel::tiny_config();
        let h = HostAdapter::init(&config, 0..4, &LoraSpec::new(8, 8.0, Targets::ALL), 1).unwrap();
        for ((_, p), m) in &h.modules {
            let inputs = linear_name(*p).shape(&config).1;
            let bound = 1.0 / (inputs as f32).sqrt();
            assert!(m.a.iter().all(|v| v.abs() < bound));
            assert!(m.b.iter().all(|v| *v == 0.0));
        }
        let a: Vec<f32> = h.modules.values().flat_map(|m| m.a.iter().map(|v| v * libm::sqrtf((m.a.len() / m.rank) as f32))).collect();
        let n = a.len() as f32;
        let variance = a.iter().map(|v| v * v).sum::<f32>() / n;
        // Uniform in -1 .. 1: variance 1/3, and the variance of the square is 4/45.
        assert!((variance - 1.0 / 3.0).abs() < 5.0 * libm::sqrtf(4.0 / 45.0 / n), "{variance}");
    }

    #[test]
    fn rank_zero_is_refused() {
        assert!(HostAdapter::init(&MemoryModel::tiny_config(), 0..4, &LoraSpec::new(0, 8.0, Targets::ALL), 1).is_err());
    }
}
