//! Links between devices.

use crate::sim::Link;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::Value;

/// What a transfer costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct LinkCosts {
    /// Seconds from the last byte's departure to its arrival.
    #[serde(default)]
    pub latency_s: f64,
    /// Bytes per second; none: transfers take no time but the latency.
    #[serde(default)]
    pub bytes_per_s: Option<f64>,
    /// How much of a transfer goes on beside computing: 1 all of it, 0 none, as where one processor does both.
    #[serde(default = "all")]
    pub overlap: f64,
    /// Whether both directions share the rate.
    #[serde(default)]
    pub half_duplex: bool,
}

fn all() -> f64 {
    1.0
}

impl Default for LinkCosts {
    fn default() -> Self {
        Self { latency_s: 0.0, bytes_per_s: None, overlap: 1.0, half_duplex: false }
    }
}

impl LinkCosts {
    /// The link as the simulator has it.
    pub fn link(&self) -> Link {
        let bytes_per_s = self.bytes_per_s.unwrap_or(f64::INFINITY);
        Link { latency_s: self.latency_s, bytes_per_s, overlap: self.overlap, half_duplex: self.half_duplex }
    }
}

/// A link between two named devices, both ways unless the way back is named too.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PairCosts {
    /// Sender; left out together with `to`: all pairs that are not named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Receiver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// What a transfer costs; in the file its keys stand beside `from` and `to`.
    #[serde(flatten)]
    pub costs: LinkCosts,
}

// By hand, because a flattened part cannot refuse unknown keys.
impl<'de> Deserialize<'de> for PairCosts {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let mut rest = serde_json::Map::deserialize(d)?;
        let mut end = |name: &str| rest.remove(name).map_or(Ok(None), serde_json::from_value::<Option<String>>).map_err(D::Error::custom);
        let (from, to) = (end("from")?, end("to")?);
        let costs = serde_json::from_value(Value::Object(rest)).map_err(D::Error::custom)?;
        Ok(Self { from, to, costs })
    }
}

/// All links: one kind, or a list by pair.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Links {
    /// The same between all devices.
    Uniform(LinkCosts),
    /// By pair.
    Pairs(Vec<PairCosts>),
}

impl Default for Links {
    fn default() -> Self {
        Self::Uniform(LinkCosts::default())
    }
}

// By hand, because an untagged enum only says that nothing fitted.
impl<'de> Deserialize<'de> for Links {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        match Value::deserialize(d)? {
            list @ Value::Array(_) => serde_json::from_value(list).map(Self::Pairs),
            other => serde_json::from_value(other).map(Self::Uniform),
        }
        .map_err(|e| D::Error::custom(format!("links: {e}")))
    }
}

impl Links {
    /// The link from one device to another.
    pub fn between(&self, from: &str, to: &str) -> LinkCosts {
        match self {
            Self::Uniform(link) => *link,
            Self::Pairs(pairs) => {
                let named = |a: &str, b: &str| pairs.iter().find(|p| p.from.as_deref() == Some(a) && p.to.as_deref() == Some(b));
                let rest = || pairs.iter().find(|p| p.from.is_none() && p.to.is_none());
                named(from, to).or_else(|| named(to, from)).or_else(rest).map_or(LinkCosts::default(), |p| p.costs)
            }
        }
    }
}
