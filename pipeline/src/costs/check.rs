//! Whether costs make sense; every message names the culprit.

use super::{Costs, Links};
use crate::{cluster::Kind, estimator::EstimatorName, sim::Link};
use zofo_hal::{Error, Result};

/// More than any model or cluster has; beyond it a number is a mistake.
const MOST: usize = 100_000;

/// Larger amounts, and smaller rates, have no meaning in seconds, bytes or watts, and their sums would not be finite.
const LARGEST: f64 = 1e18;

/// More than any model has heads.
const UNITS: u32 = 4096;

fn amount(what: impl Fn() -> String, v: f64) -> Result<()> {
    match (0.0..=LARGEST).contains(&v) {
        true => Ok(()),
        false => Err(Error::invalid(format!("{} is {v}; it must be a number from 0 to {LARGEST:e}", what()))),
    }
}

fn positive(what: impl Fn() -> String, v: f64) -> Result<()> {
    match (1.0 / LARGEST..=LARGEST).contains(&v) {
        true => Ok(()),
        false => Err(Error::invalid(format!("{} is {v}; it must be a number above 0, up to {LARGEST:e}", what()))),
    }
}

impl Costs {
    /// Whether the costs make sense.
    ///
    /// # Errors
    /// `InvalidArgument` that names the layer, device, link or part.
    pub fn check(&self) -> Result<()> {
        if self.layers.is_empty() {
            return Err(Error::invalid("the costs name no layer"));
        }
        if self.devices.is_empty() {
            return Err(Error::invalid("the costs name no device"));
        }
        if self.layers.len() > MOST || self.devices.len() > MOST {
            return Err(Error::invalid(format!(
                "{} layers and {} devices; there may be {MOST} of each",
                self.layers.len(),
                self.devices.len()
            )));
        }
        if self.micro_batches == 0 {
            return Err(Error::invalid("micro_batches is 0; a step needs at least one"));
        }
        if self.group == 0 {
            return Err(Error::invalid("group is 0; directions go through a stage in groups of at least 1"));
        }
        if let Some(e) = self.estimator.filter(|e| self.exit_directions > 0 && *e != EstimatorName::EarlyExit) {
            return Err(Error::invalid(format!(
                "exit_directions is {}, and only `early-exit` takes any; the estimator is `{}`",
                self.exit_directions,
                e.name()
            )));
        }
        if self.tensor_units == 0 || self.tensor_units > UNITS {
            return Err(Error::invalid(format!("tensor_units is {}; a layer has 1 to {UNITS} parts", self.tensor_units)));
        }
        if let Some(q) = self.directions.into_iter().chain([self.exit_directions]).find(|q| *q > 0xffff) {
            return Err(Error::invalid(format!("{q} directions: at most 65535 fit the seed's counter")));
        }
        self.check_layers()?;
        self.check_devices()?;
        self.check_links()?;
        self.partition.as_ref().map_or(Ok(()), |_| self.check_partition())
    }

    fn check_layers(&self) -> Result<()> {
        for (i, l) in self.layers.iter().enumerate() {
            for (name, v) in [
                ("work", l.work),
                ("weight_bytes", l.weight_bytes),
                ("trainable_bytes", l.trainable_bytes),
                ("activation_bytes", l.activation_bytes),
                ("boundary_bytes", l.boundary_bytes),
            ] {
                amount(|| format!("{name} of layer {i}"), v)?;
            }
        }
        Ok(())
    }

    fn check_devices(&self) -> Result<()> {
        let mut names = std::collections::HashSet::new();
        for (i, d) in self.devices.iter().enumerate() {
            if d.name.is_empty() {
                return Err(Error::invalid(format!("device {i} has an empty name")));
            }
            if d.name.chars().count() > 64 || d.name.chars().any(char::is_control) {
                return Err(Error::invalid(format!(
                    "the name of device {i} is longer than 64 characters, or has some that cannot be shown"
                )));
            }
            if !names.insert(&d.name) {
                return Err(Error::invalid(format!("two devices are called `{}`", d.name)));
            }
            let of = |name: &str| format!("{name} of device `{}`", d.name);
            positive(|| of("speed"), d.speed)?;
            if let Some(v) = d.fo_speed {
                positive(|| of("fo_speed"), v)?;
                if d.kind == Kind::Bp {
                    return Err(Error::invalid(format!(
                        "device `{}` backpropagates, so it has no fo_speed: that is the price of a bp-free device made to",
                        d.name
                    )));
                }
            }
            for (name, v) in [
                ("memory_bytes", d.memory_bytes),
                ("backward_ratio", Some(d.backward_ratio)),
                ("weight_gradient_ratio", d.weight_gradient_ratio),
                ("perturbed_ratio", Some(d.perturbed_ratio)),
                ("perturbed.alpha_s", d.perturbed.map(|p| p.alpha_s)),
                ("perturbed.beta_s", d.perturbed.map(|p| p.beta_s)),
                ("exit_s", Some(d.exit_s)),
                ("power_idle_w", d.power_idle_w),
                ("power_busy_w", d.power_busy_w),
            ] {
                v.map_or(Ok(()), |v| amount(|| of(name), v))?;
            }
            if d.weight_gradient_ratio.is_some_and(|w| w > d.backward_ratio) {
                return Err(Error::invalid(format!("{} exceeds backward_ratio, which it is a part of", of("weight_gradient_ratio"))));
            }
            if let Some(times) = &d.layer_forward_s {
                if times.len() != self.layers.len() {
                    return Err(Error::invalid(format!(
                        "device `{}` has forward times of {} layers, the model has {}",
                        d.name,
                        times.len(),
                        self.layers.len()
                    )));
                }
                for (i, t) in times.iter().enumerate() {
                    amount(|| format!("layer_forward_s[{i}] of device `{}`", d.name), *t)?;
                }
            }
        }
        Ok(())
    }

    fn check_links(&self) -> Result<()> {
        let sound = |which: &dyn Fn() -> String, l: &Link| -> Result<()> {
            amount(|| format!("latency_s of {}", which()), l.latency_s)?;
            if l.bytes_per_s != f64::INFINITY {
                positive(|| format!("bytes_per_s of {}", which()), l.bytes_per_s)?;
            }
            match (0.0..=1.0).contains(&l.overlap) {
                true => Ok(()),
                false => Err(Error::invalid(format!("overlap of {} is {}; it must be between 0 and 1", which(), l.overlap))),
            }
        };
        match &self.links {
            Links::Uniform(l) => sound(&|| "the links".into(), &l.link()),
            Links::Pairs(pairs) => {
                for (i, p) in pairs.iter().enumerate() {
                    let (from, to) = match (&p.from, &p.to) {
                        (Some(from), Some(to)) => (from, to),
                        (None, None) => {
                            sound(&|| format!("link {i}"), &p.costs.link())?;
                            continue;
                        }
                        _ => return Err(Error::invalid(format!("link {i} names one end only; name `from` and `to`, or neither"))),
                    };
                    for end in [from, to] {
                        if !self.devices.iter().any(|d| d.name == *end) {
                            return Err(Error::invalid(format!("link {i} names device `{end}`, which is not among the devices")));
                        }
                    }
                    sound(&|| format!("the link from `{from}` to `{to}`"), &p.costs.link())?;
                }
                Ok(())
            }
        }
    }

    fn check_partition(&self) -> Result<()> {
        let parts = self.partition.as_deref().unwrap_or_default();
        let mut at = 0;
        for (i, (name, first, end)) in parts.iter().enumerate() {
            if !self.devices.iter().any(|d| d.name == *name) {
                return Err(Error::invalid(format!("part {i} of the partition names device `{name}`, which is not among the devices")));
            }
            if parts[..i].iter().any(|p| p.0 == *name) {
                return Err(Error::invalid(format!("the partition names device `{name}` twice")));
            }
            if *first != at {
                let what = if *first > at { "a gap" } else { "an overlap" };
                return Err(Error::invalid(format!("the partition has {what}: `{name}` starts at layer {first}, but {at} is the next")));
            }
            if end <= first {
                return Err(Error::invalid(format!("the partition gives `{name}` no layer: {first} to {end}")));
            }
            at = *end;
        }
        match at == self.layers.len() {
            true => Ok(()),
            false => Err(Error::invalid(format!("the partition ends at layer {at}, the model has {}", self.layers.len()))),
        }
    }
}
