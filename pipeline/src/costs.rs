//! What a step costs: `costs.json`, the input of planners and of the simulator.
//!
//! ```json
//! {"layers": [{"work": 1.0, "weight_bytes": 0, "trainable_bytes": 0, "activation_bytes": 0, "boundary_bytes": 0}],
//!  "devices": [{"name": "npu0", "kind": "bp-free", "speed": 0.5, "memory_bytes": null, "backward_ratio": 2.0,
//!               "perturbed_ratio": 1.0, "fo_speed": 0.33}],
//!  "links": {"latency_s": 0, "bytes_per_s": null},
//!  "micro_batches": 4, "directions": 1, "estimator": "loss-difference"}
//! ```
//!
//! A layer's forward pass of one micro-batch takes `work / speed` seconds, its backward pass `backward_ratio` times that, one perturbed copy
//! `perturbed_ratio` times. A bp-free device that is made to backpropagate does everything at `fo_speed`.

mod check;
mod links;

pub use links::{LinkCosts, Links, PairCosts};

use crate::{cluster::Kind, estimator::EstimatorName};
use serde::{Deserialize, Serialize};
use zofo_hal::{Error, Result};

/// A layer of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct LayerCosts {
    /// Work of a micro-batch's forward pass, in the unit that speeds are per second of.
    pub work: f64,
    /// Bytes of base weights.
    #[serde(default)]
    pub weight_bytes: f64,
    /// Bytes of what is trained, with its gradients and the optimiser's state.
    #[serde(default)]
    pub trainable_bytes: f64,
    /// Bytes that a micro-batch's forward pass keeps for its backward pass.
    #[serde(default)]
    pub activation_bytes: f64,
    /// Bytes of a micro-batch's output.
    #[serde(default)]
    pub boundary_bytes: f64,
}

impl LayerCosts {
    /// A layer of this work that takes no memory.
    pub fn new(work: f64) -> Self {
        Self { work, ..Self::default() }
    }
}

/// Perturbed copies in one action: `alpha_s + beta_s * n` seconds a layer for n copies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerturbedCosts {
    /// Seconds per layer and action.
    pub alpha_s: f64,
    /// Seconds per layer and copy.
    pub beta_s: f64,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct DeviceCosts {
    /// Unique name.
    pub name: String,
    /// What it can do.
    pub kind: Kind,
    /// Work per second.
    pub speed: f64,
    /// Memory limit; none: not checked.
    #[serde(default)]
    pub memory_bytes: Option<f64>,
    /// Backward over forward time. 2 where all weights are trained; with LoRA, which needs no gradient of frozen weights, 1.0 to 1.3.
    #[serde(default = "two")]
    pub backward_ratio: f64,
    /// Of the backward time, what makes gradients of parameters and can wait, over forward time. Left out: what `backward_ratio` exceeds 1 by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_gradient_ratio: Option<f64>,
    /// One perturbed copy's forward time over that of a plain one.
    #[serde(default = "one")]
    pub perturbed_ratio: f64,
    /// Measured times of perturbed copies, instead of `perturbed_ratio`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perturbed: Option<PerturbedCosts>,
    /// Speed of a bp-free device that is made to backpropagate; left out: it cannot be made to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fo_speed: Option<f64>,
    /// Measured forward seconds of each layer, instead of work over speed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_forward_s: Option<Vec<f64>>,
    /// Seconds of the exit head on one copy.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub exit_s: f64,
    /// Power while idle, in watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_idle_w: Option<f64>,
    /// Power while computing, in watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_busy_w: Option<f64>,
}

impl DeviceCosts {
    /// A device of this speed with the paper's ratios and no memory limit.
    pub fn new(name: impl Into<String>, kind: Kind, speed: f64) -> Self {
        Self {
            name: name.into(),
            kind,
            speed,
            memory_bytes: None,
            backward_ratio: 2.0,
            weight_gradient_ratio: None,
            perturbed_ratio: 1.0,
            perturbed: None,
            fo_speed: None,
            layer_forward_s: None,
            exit_s: 0.0,
            power_idle_w: None,
            power_busy_w: None,
        }
    }

    /// Whether it can backpropagate, at whatever price.
    pub fn can_backpropagate(&self) -> bool {
        self.kind == Kind::Bp || self.fo_speed.is_some()
    }

    /// Whether another device is the same but for its name.
    pub fn is_like(&self, other: &Self) -> bool {
        Self { name: String::new(), ..self.clone() } == Self { name: String::new(), ..other.clone() }
    }
}

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Costs {
    /// In the order of the model.
    pub layers: Vec<LayerCosts>,
    /// In any order, unless `partition` gives one.
    pub devices: Vec<DeviceCosts>,
    /// Between devices.
    #[serde(default)]
    pub links: Links,
    /// Micro-batches per step.
    pub micro_batches: u32,
    /// Directions (Q) of every micro-batch on zeroth-order stages; 0 freezes them. Left out: a planner may choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directions: Option<u32>,
    /// How slopes are estimated. Left out: a planner may choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimator: Option<EstimatorName>,
    /// Directions that go through a stage as one action, at most.
    #[serde(default = "one_direction", skip_serializing_if = "is_one")]
    pub group: u32,
    /// Whether the base pass goes through zeroth-order stages with the first directions, as one action; left out: whichever is faster for
    /// differences, and always for tangents, which need it beside them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge_base: Option<bool>,
    /// Further directions that end at the exit head (Q').
    #[serde(default, skip_serializing_if = "is_none_asked")]
    pub exit_directions: u32,
    /// Equal parts that a layer can be cut into across devices (its attention heads).
    #[serde(default = "heads", skip_serializing_if = "is_default_heads")]
    pub tensor_units: u32,
    /// A given split: device, first layer, end; in pipeline order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<Vec<(String, usize, usize)>>,
}

fn one() -> f64 {
    1.0
}

fn two() -> f64 {
    2.0
}

fn one_direction() -> u32 {
    1
}

fn heads() -> u32 {
    32
}

fn is_zero(v: &f64) -> bool {
    *v == 0.0
}

fn is_one(v: &u32) -> bool {
    *v == 1
}

fn is_none_asked(v: &u32) -> bool {
    *v == 0
}

fn is_default_heads(v: &u32) -> bool {
    *v == heads()
}

impl Costs {
    /// Costs of these layers and devices, with links that cost nothing.
    pub fn new(layers: Vec<LayerCosts>, devices: Vec<DeviceCosts>, micro_batches: u32) -> Self {
        Self {
            layers,
            devices,
            links: Links::default(),
            micro_batches,
            directions: None,
            estimator: None,
            group: 1,
            merge_base: None,
            exit_directions: 0,
            tensor_units: heads(),
            partition: None,
        }
    }

    /// Reads a file's text.
    ///
    /// # Errors
    /// `Format` with line and column, `InvalidArgument` that names the layer, device or link with a value that makes no sense.
    pub fn parse(text: &str) -> Result<Self> {
        let costs: Self = serde_json::from_str(text).map_err(|e| Error::format(format!("costs: {e}")))?;
        costs.check()?;
        Ok(costs)
    }

    /// The file's text.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data has a JSON form")
    }
}
