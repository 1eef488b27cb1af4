//! Estimators of the gradient of stages that cannot backpropagate: a form of the copies and a place where the slope is read.
//!
//! | name | form | readout | g |
//! |---|---|---|---|
//! | `loss-difference` | value | loss | `(sum l_q - sum l_0) / eps` (HybridOP eq. 2) |
//! | `cut-difference` | value | cut | `<delta, h_q - h_0> / eps` |
//! | `cut-tangent` | tangent | cut | `<delta, dh_q>`, the exact slope |
//! | `early-exit` | value | loss | as `loss-difference`, and further directions against the exit head's own base loss, weighted by lambda |
//! | `guided` | - | guide | none: gradient factors from delta itself |
//! | `oracle` | - | - | `<exact gradient, z>`: a test tool that costs one first-order step |
//!
//! The estimate is `sum over m of (1/Q) sum_q g_{m,q} z_{m,q}`. With Gaussian z its mean is the gradient (to first order in eps for the
//! differences), and its cosine with the gradient is about `sqrt(Q / d)` for d trained parameters.

use crate::ir::{Readout, Role, Workload};
use serde::{Deserialize, Serialize};
use zofo_hal::{DType, Error, Result, op::Form};

/// An estimator by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum EstimatorName {
    /// Finite difference of the loss.
    LossDifference,
    /// Finite difference of the activations at the cut, against the gradient there.
    CutDifference,
    /// Exact directional derivative at the cut.
    CutTangent,
    /// Gradient factors from the gradient at the cut.
    Guided,
    /// Finite difference of the loss, and of an early exit's.
    EarlyExit,
    /// Exact gradient projected on the directions.
    Oracle,
}

impl EstimatorName {
    /// All names, as on the command line.
    pub const ALL: [(&'static str, Self); 6] = [
        ("cut-tangent", Self::CutTangent),
        ("guided", Self::Guided),
        ("cut-difference", Self::CutDifference),
        ("loss-difference", Self::LossDifference),
        ("early-exit", Self::EarlyExit),
        ("oracle", Self::Oracle),
    ];

    /// The name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, e)| *e == self).map_or("?", |(n, _)| n)
    }

    /// The estimator called `name`.
    ///
    /// # Errors
    /// `InvalidArgument` that lists the names there are.
    pub fn parse(name: &str) -> Result<Self> {
        Self::ALL.iter().find(|(n, _)| *n == name).map(|(_, e)| *e).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|(n, _)| *n).collect();
            Error::invalid(format!("no estimator is called `{name}`; there are: {}", known.join(", ")))
        })
    }

    /// Form of the copies.
    pub fn form(self) -> Form {
        match self {
            Self::CutTangent => Form::Tangent,
            _ => Form::Value,
        }
    }

    /// Where the slope is read.
    pub fn readout(self) -> Readout {
        match self {
            Self::LossDifference | Self::EarlyExit => Readout::Loss,
            Self::CutDifference | Self::CutTangent | Self::Oracle => Readout::Cut,
            Self::Guided => Readout::Guide,
        }
    }

    /// Whether it divides by eps.
    pub fn is_difference(self) -> bool {
        matches!(self, Self::LossDifference | Self::CutDifference | Self::EarlyExit)
    }
}

/// The smallest eps at which rounding leaves a difference of `compute` activations a relative error below one half, by the measurement in
/// `docs/estimators.md`; infinite where there is none.
fn least_eps(compute: DType, two_sided: bool) -> Option<f32> {
    match (compute, two_sided) {
        (DType::Bf16, false) => Some(f32::INFINITY),
        (DType::Bf16, true) => Some(3e-3),
        (DType::F16, _) => Some(1e-3),
        _ => None,
    }
}

/// Which micro-batches share a z.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// None: more directions for the same work, each with the slope of its own micro-batch's part of the loss.
    MicroBatch,
    /// All of the mini-batch, as the papers have it: slopes of its whole loss, whatever the number of micro-batches.
    MiniBatch,
}

impl Scope {
    /// All scopes, as on the command line.
    pub const ALL: [(&'static str, Self); 2] = [("mini-batch", Self::MiniBatch), ("micro-batch", Self::MicroBatch)];

    /// The name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, s)| *s == self).map_or("?", |(n, _)| n)
    }
}

/// Which factors of an adapter are perturbed and trained by a zeroth-order stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Factors {
    /// B alone: with B = 0 at the start the gradient of A is 0, and its directions are noise.
    B,
    /// Both.
    #[serde(rename = "AB")]
    Ab,
}

/// An estimator and its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EstimatorSpec {
    /// Which one.
    pub name: EstimatorName,
    /// Directions (Q) that every micro-batch takes.
    pub directions: u32,
    /// Directions per action at most; memory grows with it.
    pub group: u32,
    /// Step of the differences.
    pub eps: f32,
    /// Takes the difference to both sides.
    pub two_sided: bool,
    /// Who shares a z.
    pub scope: Scope,
    /// Which factors are perturbed.
    pub factors: Factors,
    /// Slopes further than this many median absolute deviations from the median are pulled in; `None` leaves them.
    pub winsorise: Option<f64>,
    /// Further directions per micro-batch that end at the exit head (Q'), for `early-exit`.
    pub exit_directions: u32,
    /// Weight of the exit directions' estimate.
    pub exit_lambda: f32,
}

impl EstimatorSpec {
    /// Step of the differences where none is given: the best of the measurement in `docs/estimators.md` for activations of type `compute`.
    pub fn default_eps(compute: DType, two_sided: bool) -> f32 {
        match (compute, two_sided) {
            (DType::F32, false) => 1e-4,
            (DType::F32, true) => 1e-3,
            (_, false) => 3e-3,
            (_, true) => 1e-2,
        }
    }

    /// The estimator `name` with `directions` directions and defaults.
    pub fn new(name: EstimatorName, directions: u32) -> Self {
        Self {
            name,
            directions,
            group: 8,
            eps: Self::default_eps(DType::F32, false),
            two_sided: false,
            scope: Scope::MiniBatch,
            factors: Factors::B,
            winsorise: None,
            exit_directions: if name == EstimatorName::EarlyExit { directions } else { 0 },
            exit_lambda: 0.5,
        }
    }

    /// Whether the settings make sense together, and with activations of type `compute`.
    ///
    /// # Errors
    /// `InvalidArgument` that names the setting; `Unsupported` for a pair of estimator and type whose result would be noise.
    pub fn check(&self, compute: DType) -> Result<()> {
        let name = self.name.name();
        if self.directions > 0xffff || self.exit_directions > 0xffff {
            return Err(Error::invalid(format!(
                "{} directions: at most 65535 fit the seed's counter",
                self.directions.max(self.exit_directions)
            )));
        }
        if self.group == 0 {
            return Err(Error::invalid("directions go through a stage in groups of at least 1"));
        }
        if self.name.is_difference() && !(self.eps.is_finite() && self.eps > 0.0) {
            return Err(Error::invalid(format!("eps {} of `{name}` must be positive and finite", self.eps)));
        }
        if self.two_sided && !self.name.is_difference() {
            return Err(Error::invalid(format!("`{name}` takes no difference, so it cannot be two-sided")));
        }
        if let Some(limit) = self.winsorise
            && !(limit.is_finite() && limit > 0.0)
        {
            return Err(Error::invalid(format!("winsorising beyond {limit} deviations: give a finite number above 0, or leave it out")));
        }
        if self.name == EstimatorName::EarlyExit && self.exit_directions == 0 {
            return Err(Error::invalid("`early-exit` needs at least one exit direction"));
        }
        if self.name.is_difference()
            && let Some(least) = least_eps(compute, self.two_sided)
            && self.eps < least
        {
            let sides = if self.two_sided { "two-sided" } else { "one-sided" };
            let remedy = match (least.is_finite(), self.two_sided) {
                (true, _) => format!("take eps of at least {least}"),
                (false, _) => "take it two-sided".into(),
            };
            return Err(Error::unsupported(format!(
                "`{name}` {sides} with eps {} in {compute} is mostly rounding error (docs/estimators.md); use cut-tangent or guided, compute in \
                 f32, or {remedy}",
                self.eps
            )));
        }
        Ok(())
    }

    /// The workload that it asks for, with `cut` zeroth-order stages; roles and micro-batches are the plan's to fill in.
    pub fn workload(&self, cut: usize) -> Workload {
        Workload {
            roles: vec![Role::ZerothOrder; cut],
            directions: self.directions,
            group: self.group,
            form: self.name.form(),
            readout: self.name.readout(),
            two_sided: self.two_sided,
            exit_directions: self.exit_directions,
            ..Workload::first_order(cut, 1)
        }
    }

    /// The slope from what was measured: `plus` and, two-sided, `minus` are sums of loss differences or dots against the base.
    pub fn slope(&self, plus: f64, minus: Option<f64>) -> f64 {
        match (self.name.is_difference(), minus) {
            (false, _) => plus,
            (true, None) => plus / f64::from(self.eps),
            (true, Some(minus)) => (plus - minus) / (2.0 * f64::from(self.eps)),
        }
    }

    /// Pulls outliers in, in place: beyond `winsorise` median absolute deviations (scaled to a normal's sigma) from the median.
    pub fn winsorise(&self, slopes: &mut [f64]) {
        let Some(limit) = self.winsorise else { return };
        if slopes.len() < 4 {
            return;
        }
        let median = |v: &mut [f64]| {
            v.sort_by(f64::total_cmp);
            let (a, b) = (v[(v.len() - 1) / 2], v[v.len() / 2]);
            0.5 * (a + b)
        };
        let centre = median(&mut slopes.to_vec());
        let mut spread: Vec<f64> = slopes.iter().map(|g| (g - centre).abs()).collect();
        let sigma = 1.4826 * median(&mut spread);
        if sigma > 0.0 && sigma.is_finite() && limit > 0.0 {
            for g in slopes {
                *g = g.clamp(centre - limit * sigma, centre + limit * sigma);
            }
        }
    }
}
