//! The cluster file: which devices there are, in pipeline order.
//!
//! ```toml
//! [[device]]
//! name = "npu0"
//! kind = "bp-free"     # or "bp"
//! backend = "cpu"      # or "cpu:0", "cuda:1"; several devices may be virtual ones over one backend
//! threads = 1          # of a CPU device; shared by all virtual devices over it when left out
//! compute = "f32"      # or "f16", "bf16": type of the activations
//! int8 = true          # products with block-quantised weights round activations to 8 bits: faster, less exact; left out: they do not
//! memory = "4GiB"      # refuses a model that does not fit; left out: not checked
//! layers = 2           # a given split; either all devices say it or none
//! board = "jetson-orin-nx"   # for `zofo plan`: speed and memory by the board's data sheet
//! flops = 1e12         # for `zofo plan`: speed in FLOP per second, where it is known better
//!
//! [link]               # for `zofo plan`: what lies between any two devices; left out: transfers take no time
//! latency_s = 2e-4
//! bytes_per_s = 1.1e8  # 1 Gbit/s, less what protocols take
//! ```

use crate::costs::LinkCosts;
use serde::{Deserialize, Deserializer, Serialize};
use zofo_hal::{DType, Error, Result};

/// What a device can do for training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Can backpropagate.
    Bp,
    /// Forward passes only.
    BpFree,
}

/// One device of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct DeviceEntry {
    /// Unique name.
    pub name: String,
    /// What it can do.
    pub kind: Kind,
    /// Backend and index, as for [`zofo_hal::Registry::open`].
    #[serde(default = "cpu")]
    pub backend: String,
    /// Threads of a CPU device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Type of activations, except the residual stream, which is f32.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "compute", serialize_with = "compute_name")]
    pub compute: Option<DType>,
    /// Whether products with block-quantised weights round activations to 8 bits, which not every backend does.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub int8: bool,
    /// Memory limit in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "size")]
    pub memory: Option<u64>,
    /// Number of layers, for a given split.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<usize>,
    /// What board it is, for plans made from data sheets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub board: Option<String>,
    /// Speed of matrix products in FLOP per second, for plans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flops: Option<f64>,
}

impl DeviceEntry {
    /// A virtual device over the CPU backend.
    pub fn virtual_cpu(name: impl Into<String>, kind: Kind) -> Self {
        Self {
            name: name.into(),
            kind,
            backend: cpu(),
            threads: None,
            compute: None,
            int8: false,
            memory: None,
            layers: None,
            board: None,
            flops: None,
        }
    }
}

/// Devices in pipeline order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Cluster {
    /// The devices; the first gets the embedding, the last the head.
    #[serde(rename = "device", default)]
    pub devices: Vec<DeviceEntry>,
    /// What a transfer between any two takes, for plans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkCosts>,
}

impl Cluster {
    /// A cluster of these devices.
    pub fn new(devices: Vec<DeviceEntry>) -> Self {
        Self { devices, link: None }
    }

    /// `bp_free` forward-only virtual devices (`npu0`, ...) followed by `bp` backpropagating ones (`gpu0`, ...), all on the host's CPU.
    pub fn virtual_cpus(bp_free: usize, bp: usize) -> Self {
        let free = (0..bp_free).map(|i| DeviceEntry::virtual_cpu(format!("npu{i}"), Kind::BpFree));
        let capable = (0..bp).map(|i| DeviceEntry::virtual_cpu(format!("gpu{i}"), Kind::Bp));
        Self::new(free.chain(capable).collect())
    }

    /// Reads a cluster file's text.
    ///
    /// # Errors
    /// `Format` with line and column; `InvalidArgument` for a cluster that makes no sense.
    pub fn parse(text: &str) -> Result<Self> {
        let cluster: Self = toml::from_str(text).map_err(|e| Error::format(format!("cluster file: {}", e.to_string().trim_end())))?;
        cluster.check()?;
        Ok(cluster)
    }

    /// The cluster as a file's text.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("plain data has a TOML form")
    }

    /// Whether names are unique and a given split is complete.
    ///
    /// # Errors
    /// `InvalidArgument` naming the device.
    pub fn check(&self) -> Result<()> {
        if self.devices.is_empty() {
            return Err(Error::invalid("the cluster has no device; add at least one [[device]] with kind = \"bp\""));
        }
        for (i, d) in self.devices.iter().enumerate() {
            if d.name.is_empty() {
                return Err(Error::invalid(format!("device {i} of the cluster has an empty name")));
            }
            if self.devices[..i].iter().any(|o| o.name == d.name) {
                return Err(Error::invalid(format!("two devices of the cluster are called `{}`", d.name)));
            }
            if d.threads == Some(0) {
                return Err(Error::invalid(format!("device `{}` has threads = 0; leave it out for the default", d.name)));
            }
            if d.layers.is_some() != self.devices[0].layers.is_some() {
                let (has, lacks) = if d.layers.is_some() { (d, &self.devices[0]) } else { (&self.devices[0], d) };
                return Err(Error::invalid(format!(
                    "device `{}` says how many layers it takes but `{}` does not; either all do or none",
                    has.name, lacks.name
                )));
            }
        }
        Ok(())
    }

    /// Layers per device: as given, or as even as can be with the earlier devices taking the remainder.
    ///
    /// # Errors
    /// `InvalidArgument` where the split does not add up to `layers` or a device gets none.
    pub fn split(&self, layers: usize) -> Result<Vec<usize>> {
        let n = self.devices.len();
        if n > layers {
            return Err(Error::invalid(format!(
                "the cluster has {n} devices but the model only {layers} layers; each device needs at least one"
            )));
        }
        let Some(given) = self.devices.iter().map(|d| d.layers).collect::<Option<Vec<_>>>() else {
            return Ok((0..n).map(|i| layers / n + usize::from(i < layers % n)).collect());
        };
        if let Some(d) = self.devices.iter().find(|d| d.layers == Some(0)) {
            return Err(Error::invalid(format!("device `{}` takes 0 layers; remove it from the cluster instead", d.name)));
        }
        let sum = given.iter().fold(0usize, |a, b| a.saturating_add(*b));
        if sum != layers {
            return Err(Error::invalid(format!("the cluster's devices take {sum} layers together, the model has {layers}")));
        }
        Ok(given)
    }

    /// The devices called `names`, in that order.
    ///
    /// # Errors
    /// `InvalidArgument` naming the one that is not there.
    pub fn only(&self, names: &[&str]) -> Result<Self> {
        let entry = |name: &&str| {
            let found = self.devices.iter().find(|d| d.name == **name).cloned();
            found.ok_or_else(|| Error::invalid(format!("the cluster has no device `{name}`")))
        };
        Ok(Self::new(names.iter().map(entry).collect::<Result<_>>()?))
    }
}

fn cpu() -> String {
    "cpu".into()
}

/// Reads `f32`, `f16` or `bf16`.
///
/// # Errors
/// `InvalidArgument` listing the three.
pub fn parse_compute(name: &str) -> Result<DType> {
    [DType::F32, DType::F16, DType::Bf16]
        .into_iter()
        .find(|d| d.name() == name)
        .ok_or_else(|| Error::invalid(format!("`{name}` is no compute type; there are f32, f16 and bf16")))
}

fn compute<'de, D: Deserializer<'de>>(d: D) -> Result<Option<DType>, D::Error> {
    let name = String::deserialize(d)?;
    parse_compute(&name).map(Some).map_err(serde::de::Error::custom)
}

fn compute_name<S: serde::Serializer>(d: &Option<DType>, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(d.unwrap_or(DType::F32).name())
}

fn size<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Size {
        Bytes(u64),
        Text(String),
    }
    match Size::deserialize(d)? {
        Size::Bytes(b) => Ok(Some(b)),
        Size::Text(t) => parse_size(&t).map(Some).map_err(serde::de::Error::custom),
    }
}

/// Reads `512MiB`, `4GiB`, `3.5GB` or plain bytes.
///
/// # Errors
/// `InvalidArgument` with the form expected.
pub fn parse_size(text: &str) -> Result<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let factor = match text[digits..].trim() {
        "" | "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1_048_576.0,
        "GiB" => 1_073_741_824.0,
        "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        _ => return Err(Error::invalid(format!("`{text}` is no size; write for example 512MiB or 4GiB"))),
    };
    match text[..digits].parse::<f64>() {
        Ok(n) if n * factor < 1.8e19 => Ok((n * factor) as u64),
        _ => Err(Error::invalid(format!("`{text}` is no size; write for example 512MiB or 4GiB"))),
    }
}
