//! Adapters between their form in files and the one that is computed with.

use alloc::{collections::BTreeMap, format};

use zofo_hal::{Error, Result, perturb::Projection};

use super::{HostAdapter, HostLora, LoraSpec, scale};
use crate::{
    config::ModelConfig,
    files::{Adapter, AdapterConfig, LoraPair},
    llama::linear_name,
};

impl From<&Adapter> for HostAdapter {
    fn from(adapter: &Adapter) -> Self {
        let modules = adapter.modules().iter().map(|(&(layer, linear), pair)| {
            let scale = scale(pair.rank(), pair.alpha(), adapter.config().rslora);
            ((layer, Projection::ALL[linear.index()]), HostLora { rank: pair.rank(), scale, a: pair.a().to_vec(), b: pair.b().to_vec() })
        });
        Self { modules: modules.collect() }
    }
}

impl HostAdapter {
    /// The adapter in the form that is written to files; `spec` gives alpha and the rule of the scale.
    ///
    /// # Errors
    /// Those of [`Adapter::new`]; `InvalidArgument` where a module's scale is not the one that `spec` gives for its rank.
    pub fn to_files(&self, config: &ModelConfig, spec: &LoraSpec) -> Result<Adapter> {
        let mut modules = BTreeMap::new();
        for (&(layer, p), m) in &self.modules {
            if m.scale != scale(m.rank, spec.alpha, spec.rslora) {
                return Err(Error::invalid(format!(
                    "layer {layer}, {}: scale {} is not that of alpha {} at rank {}",
                    p.name(),
                    m.scale,
                    spec.alpha,
                    m.rank
                )));
            }
            let linear = linear_name(p);
            let pair = LoraPair::new(m.rank, spec.alpha, linear.shape(config), m.a.clone(), m.b.clone())?;
            modules.insert((layer, linear), pair);
        }
        let mut header = AdapterConfig::new(spec.rank, spec.alpha);
        header.rslora = spec.rslora;
        Adapter::new(header, config, modules)
    }
}
