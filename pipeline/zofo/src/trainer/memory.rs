//! Whether the devices of a cluster have room for what they are to hold.

use zofo_hal::{DType, Error, Result};
use zofo_ops::llama::{ParamName, SliceSpec, WeightSource};
use zofo_pipeline::{cluster::Cluster, plan::Plan};

/// Compares each device's stated memory with the base weights of its stages, which are the least that it must hold.
///
/// # Errors
/// `InvalidArgument` naming the device, with both sizes.
pub(super) fn check(cluster: &Cluster, plan: &Plan, source: &dyn WeightSource, default_compute: DType) -> Result<()> {
    let config = source.config();
    for entry in &cluster.devices {
        let Some(memory) = entry.memory else { continue };
        let stages: Vec<_> =
            plan.stages.iter().filter(|s| s.members.iter().any(|m| m.device == entry.name)).map(|s| s.layers.clone()).collect();
        let weights = stages.iter().flat_map(|layers| SliceSpec::new(config, layers.clone()).weights(config));
        let mut names: Vec<ParamName> = weights.map(|(n, _)| n).collect();
        names.sort_unstable();
        names.dedup();
        let compute = entry.compute.unwrap_or(default_compute);
        let mut needed = 0u64;
        for name in names {
            let Some(tensor) = source.tensor(name)? else { continue };
            let dtype = if tensor.dtype == DType::F32 { compute } else { tensor.dtype };
            needed = needed.saturating_add(dtype.bytes(tensor.rows * tensor.cols).unwrap_or(usize::MAX) as u64);
        }
        if needed > memory {
            return Err(Error::invalid(format!(
                "device `{}` has {memory} bytes of memory, but the weights of its layers {:?} take {needed}; give it fewer layers (`layers = ...`), add a \
                 device, or compute in 16 bits",
                entry.name, stages
            )));
        }
    }
    Ok(())
}
