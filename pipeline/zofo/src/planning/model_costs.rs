//! Costs of a model on the devices of a cluster, where nothing has been measured: work by counting, speeds by data sheet.

use zofo_hal::{Error, Result};
use zofo_ops::llama::{ParamName, WeightSource};
use zofo_pipeline::{
    cluster::{Cluster, Kind},
    costs::{Costs, DeviceCosts, LayerCosts, Links},
};

/// A board by its data sheet: nominal figures, which no real step reaches; what they are good for is the ratio between boards.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Board {
    /// Name in a cluster file.
    pub name: &'static str,
    /// What it can do.
    pub kind: Kind,
    /// Peak of 16-bit matrix products, in FLOP per second.
    pub flops: f64,
    /// The same where it is made to backpropagate.
    pub fo_flops: Option<f64>,
    /// Memory in bytes, shared with the operating system.
    pub memory: f64,
}

const GIB: f64 = 1_073_741_824.0;

/// Boards that a cluster file may name with `board`.
///
/// Atlas 200I DK A2: 4 TFLOP/s in 16 bits and 4 GB by its product page; backpropagation at 2.4 of 20 TOPS as HybridOP measured (section 1). Jetson
/// boards: half the dense 8-bit rate of the GPU alone (20, 30 and 12 TOPS), to the best of our knowledge.
pub const BOARDS: [Board; 4] = [
    Board { name: "atlas-200i-dk-a2", kind: Kind::BpFree, flops: 4e12, fo_flops: Some(4e12 * 2.4 / 20.0), memory: 4.0 * GIB },
    Board { name: "jetson-orin-nano", kind: Kind::Bp, flops: 10e12, fo_flops: None, memory: 8.0 * GIB },
    Board { name: "jetson-orin-nx", kind: Kind::Bp, flops: 15e12, fo_flops: None, memory: 16.0 * GIB },
    Board { name: "jetson-xavier-nx", kind: Kind::Bp, flops: 6e12, fo_flops: None, memory: 8.0 * GIB },
];

impl Board {
    /// The board called `name`.
    ///
    /// # Errors
    /// `InvalidArgument` that lists the names there are.
    pub fn named(name: &str) -> Result<Self> {
        BOARDS.into_iter().find(|b| b.name == name).ok_or_else(|| {
            let known: Vec<_> = BOARDS.iter().map(|b| b.name).collect();
            Error::invalid(format!(
                "no board is called `{name}`; there are: {}; for another give `flops` and `memory` instead",
                known.join(", ")
            ))
        })
    }
}

/// Costs of `source` on `cluster`: `tokens` per micro-batch, LoRA with `rank` on all projections.
///
/// A layer's work is its products' FLOP, forward; the first has the embedding's memory, the last the head's work and memory. With LoRA a
/// backward pass is one product per weight, as the forward pass is: a ratio of 1.1, weight gradients 0.1.
///
/// # Errors
/// `InvalidArgument` naming a device that says neither its board nor its `flops`; what reading the model's tensors gives.
pub fn model_costs(source: &dyn WeightSource, cluster: &Cluster, tokens: usize, rank: usize, micro_batches: u32) -> Result<Costs> {
    let c = source.config();
    let t = tokens as f64;
    let (d, f, kv, q) = (c.hidden as f64, c.intermediate as f64, c.kv_width() as f64, c.q_width() as f64);
    let products = d * (q + 2.0 * kv) + q * d + 3.0 * d * f;
    let mut layer = LayerCosts::new(2.0 * t * products + 2.0 * t * t * q);
    let adapters = rank as f64 * (7.0 * d + 2.0 * q + 2.0 * kv + 3.0 * f);
    layer.trainable_bytes = 16.0 * adapters;
    // Inputs of the products, in 16 bits, and the residual stream in 32.
    layer.activation_bytes = t * (2.0 * (3.0 * d + 2.0 * q + 2.0 * kv + 3.0 * f) + 4.0 * 2.0 * d);
    layer.boundary_bytes = 4.0 * t * d;
    let mut layers = vec![layer; c.layers];
    let last = c.layers - 1;
    // As stored: quantised weights stay quantised.
    let bytes = |name: ParamName| -> Result<f64> {
        let Some(t) = source.tensor(name)? else { return Ok(0.0) };
        Ok(t.dtype.bytes(t.cols).map_or(0.0, |row| (row * t.rows) as f64))
    };
    for name in ParamName::all(c) {
        let at = match name {
            ParamName::Embedding => 0,
            ParamName::InputNorm(l) | ParamName::PostAttentionNorm(l) | ParamName::Weight(l, _) | ParamName::Bias(l, _) => l,
            _ => last,
        };
        layers[at].weight_bytes += bytes(name)?;
    }
    layers[last].work += 2.0 * t * d * c.vocab as f64;
    if c.tie_word_embeddings && c.layers > 1 {
        layers[last].weight_bytes += bytes(ParamName::Embedding)?;
    }
    let mut devices = Vec::new();
    for entry in &cluster.devices {
        let board = entry.board.as_deref().map(Board::named).transpose()?;
        let flops = entry.flops.or(board.map(|b| b.flops)).ok_or_else(|| {
            Error::invalid(format!(
                "device `{}` says neither what board it is nor how fast: give it `board` ({}) or `flops`, or plan from costs.json",
                entry.name,
                BOARDS.map(|b| b.name).join(", ")
            ))
        })?;
        let mut device = DeviceCosts::new(entry.name.clone(), entry.kind, flops);
        device.memory_bytes = entry.memory.map(|m| m as f64).or(board.map(|b| b.memory));
        (device.backward_ratio, device.weight_gradient_ratio) = (1.1, Some(0.1));
        device.fo_speed = if entry.kind == Kind::BpFree { board.and_then(|b| b.fo_flops) } else { None };
        devices.push(device);
    }
    let mut costs = Costs::new(layers, devices, micro_batches);
    costs.tensor_units = c.heads as u32;
    costs.links = Links::Uniform(cluster.link.unwrap_or_default());
    costs.check()?;
    Ok(costs)
}
