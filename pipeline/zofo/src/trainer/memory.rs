//! Whether the devices of a cluster have room for what they are to hold.

use zofo_hal::{DType, Error, Result};
use zofo_ops::llama::{ParamName, SliceSpec, WeightSource};
use zofo_pipeline::{
    cluster::{Cluster, DeviceEntry},
    plan::{Plan, StagePlan},
    planner::Split,
};

/// Compares each device's stated memory with the base weights of its stages, which are the least that it must hold.
///
/// # Errors
/// `InvalidArgument` naming the device, with both sizes.
pub(super) fn check(cluster: &Cluster, plan: &Plan, source: &dyn WeightSource, default_compute: DType) -> Result<()> {
    for entry in &cluster.devices {
        let Some(memory) = entry.memory else { continue };
        let needed = weights(entry, plan, source, default_compute)?;
        if needed > memory {
            let layers: Vec<String> = stages(entry, plan).map(|s| format!("{}..{}", s.layers.start, s.layers.end)).collect();
            return Err(short(entry, memory, &format!("the weights of its layers {} take {needed}", layers.join(", "))));
        }
    }
    Ok(())
}

/// The same with what a step takes beside the weights; `step_bytes` in the order of the plan's devices.
///
/// # Errors
/// As [`check`].
pub(super) fn check_peak(
    cluster: &Cluster,
    plan: &Plan,
    source: &dyn WeightSource,
    default_compute: DType,
    step_bytes: &[u64],
) -> Result<()> {
    for (name, step) in plan.devices().into_iter().zip(step_bytes) {
        let Some(entry) = cluster.devices.iter().find(|d| d.name == name) else { continue };
        let Some(memory) = entry.memory else { continue };
        let weights = weights(entry, plan, source, default_compute)?;
        if weights.saturating_add(*step) > memory {
            return Err(short(entry, memory, &format!("its weights take {weights} and the activations of a step {step}")));
        }
    }
    Ok(())
}

fn short(entry: &DeviceEntry, memory: u64, takes: &str) -> Error {
    Error::invalid(format!(
        "device `{}` has {memory} bytes of memory, but {takes}; give it fewer layers (`layers = ...`, or another plan), add a device, take more \
         micro-batches, recompute (--recompute), or compute in 16 bits",
        entry.name
    ))
}

fn stages<'a>(entry: &'a DeviceEntry, plan: &'a Plan) -> impl Iterator<Item = &'a StagePlan> {
    plan.stages.iter().filter(|s| s.has(&entry.name))
}

/// Bytes of the base weights that a device holds, each once.
fn weights(entry: &DeviceEntry, plan: &Plan, source: &dyn WeightSource, default_compute: DType) -> Result<u64> {
    let config = source.config();
    let mut held: Vec<(ParamName, f64)> = Vec::new();
    for stage in stages(entry, plan) {
        let member = stage.members.iter().find(|m| m.device == entry.name);
        let share = member.filter(|_| stage.split == Split::Tensor).map_or(1.0, |m| m.share);
        held.extend(SliceSpec::new(config, stage.layers.clone()).weights(config).into_iter().map(|(name, _)| match name {
            ParamName::Weight(..) => (name, share),
            // Embedding and head are whole on every member.
            _ => (name, 1.0),
        }));
    }
    held.sort_by_key(|(name, _)| *name);
    held.dedup_by_key(|(name, _)| *name);
    let compute = entry.compute.unwrap_or(default_compute);
    let mut needed = 0u64;
    for (name, share) in held {
        let Some(tensor) = source.tensor(name)? else { continue };
        let dtype = if tensor.dtype == DType::F32 { compute } else { tensor.dtype };
        let bytes = dtype.bytes(tensor.rows * tensor.cols).unwrap_or(usize::MAX) as f64;
        needed = needed.saturating_add((share * bytes) as u64);
    }
    Ok(needed)
}
