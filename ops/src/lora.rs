//! LoRA adapters (Hu et al. 2021, arXiv:2106.09685): what is adapted, the factors on the host, the factors on a device.
//!
//! The canonical order of an adapter's tensors, in which norms are summed and state is stored, is by layer, then projection in the order of
//! [`Projection::ALL`], then A before B: the order of [`zofo_hal::perturb::TensorId`].

mod adapters;
#[cfg(feature = "std")]
mod files;
mod host;

use core::{fmt, str::FromStr};

use alloc::format;
use zofo_hal::{Error, Result, perturb::Projection};

pub use adapters::{Adapters, GradScope, LoraTensors, Tensor};
pub use host::{HostAdapter, HostLora};

use crate::config::MAX_LORA_RANK;

/// A set of projections.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Targets(u8);

impl Targets {
    /// None of the projections.
    pub const NONE: Self = Self(0);
    /// All seven projections.
    pub const ALL: Self = Self(0x7f);

    /// Whether `projection` is in the set.
    pub const fn contains(self, projection: Projection) -> bool {
        self.0 >> (projection as u8) & 1 == 1
    }

    /// The set with `projection` too.
    pub const fn with(self, projection: Projection) -> Self {
        Self(self.0 | 1 << projection as u8)
    }

    /// Whether nothing is in the set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The projections in canonical order.
    pub fn iter(self) -> impl Iterator<Item = Projection> {
        Projection::ALL.into_iter().filter(move |p| self.contains(*p))
    }
}

impl FromIterator<Projection> for Targets {
    fn from_iter<I: IntoIterator<Item = Projection>>(projections: I) -> Self {
        projections.into_iter().fold(Self::NONE, Self::with)
    }
}

impl From<&[Projection]> for Targets {
    fn from(projections: &[Projection]) -> Self {
        projections.iter().copied().collect()
    }
}

impl FromStr for Targets {
    type Err = Error;

    /// `q,v`, `q_proj,v_proj` or `all`.
    fn from_str(text: &str) -> Result<Self> {
        if text.trim() == "all" {
            return Ok(Self::ALL);
        }
        text.split(',')
            .map(|name| {
                let name = name.trim();
                let found = Projection::ALL.into_iter().find(|p| p.name() == name || p.name().strip_suffix("_proj") == Some(name));
                found.ok_or_else(|| {
                    Error::invalid(format!("`{name}` is no projection of a LLaMA layer; choose from q, k, v, o, gate, up, down, or all"))
                })
            })
            .collect()
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, p) in self.iter().enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { "," }, p.name())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Targets({self})")
    }
}

/// What a new adapter looks like, the same in every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraSpec {
    /// Rank r of the factors.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f32,
    /// Whether the scale is alpha / sqrt(r) (arXiv:2312.03732) instead of alpha / r.
    pub rslora: bool,
    /// The adapted projections.
    pub targets: Targets,
}

impl LoraSpec {
    /// Plain LoRA.
    pub fn new(rank: usize, alpha: f32, targets: impl Into<Targets>) -> Self {
        Self { rank, alpha, rslora: false, targets: targets.into() }
    }

    /// What the product of the factors is multiplied by.
    pub fn scale(&self) -> f32 {
        scale(self.rank, self.alpha, self.rslora)
    }

    /// That such an adapter can be made.
    ///
    /// # Errors
    /// `InvalidArgument`, naming what is wrong.
    pub fn check(&self) -> Result<()> {
        if self.rank == 0 || self.rank > MAX_LORA_RANK {
            return Err(Error::invalid(format!("the LoRA rank is {}; it must be between 1 and {MAX_LORA_RANK}", self.rank)));
        }
        if !self.alpha.is_finite() || self.alpha == 0.0 {
            return Err(Error::invalid(format!("LoRA alpha is {}; it must be finite and not 0", self.alpha)));
        }
        if self.targets.is_empty() {
            return Err(Error::invalid("no projection is adapted; choose some of q, k, v, o, gate, up, down, or all"));
        }
        Ok(())
    }
}

fn scale(rank: usize, alpha: f32, rslora: bool) -> f32 {
    let rank = rank as f32;
    alpha / if rslora { libm::sqrtf(rank) } else { rank }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn targets_read_and_show_in_canonical_order() {
        let t: Targets = "v, q_proj,down".parse().unwrap();
        assert_eq!(t.to_string(), "q_proj,v_proj,down_proj");
        assert_eq!("all".parse::<Targets>().unwrap(), Targets::ALL);
        assert!("q,x".parse::<Targets>().unwrap_err().to_string().contains("`x`"));
    }

    #[test]
    fn a_spec_that_cannot_be_is_refused() {
        let ok = LoraSpec::new(8, 16.0, Targets::ALL);
        assert_eq!(ok.scale(), 2.0);
        assert_eq!(LoraSpec { rslora: true, rank: 4, ..ok }.scale(), 8.0);
        assert!(ok.check().is_ok());
        for bad in [
            LoraSpec { rank: 0, ..ok },
            LoraSpec { rank: MAX_LORA_RANK + 1, ..ok },
            LoraSpec { alpha: f32::NAN, ..ok },
            LoraSpec { targets: Targets::NONE, ..ok },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
