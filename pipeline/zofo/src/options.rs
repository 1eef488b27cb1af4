//! Everything about a training run but model, data and cluster.

use serde::{Deserialize, Serialize};
use zofo_hal::{DType, Error, Result};
use zofo_ops::{
    lora::{LoraSpec, Targets},
    optim::Rule,
};
use zofo_pipeline::{
    cluster::{Cluster, parse_compute},
    estimator::{EstimatorName, EstimatorSpec, Scope},
    order::ScheduleName,
    plan::PlanRequest,
    train::{Decay, OptimiserSpec, TrainSpec},
};

/// Sequences of one step at most: all of them are in memory at once.
const MAX_BATCH: usize = 1 << 14;

/// An optimiser by name, with its usual constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimiserName {
    /// AdamW with PyTorch's constants.
    AdamW,
    /// Gradient descent.
    Sgd,
}

impl OptimiserName {
    /// All names, as on the command line.
    pub const ALL: [(&'static str, Self); 2] = [("adamw", Self::AdamW), ("sgd", Self::Sgd)];

    /// The name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, o)| *o == self).map_or("?", |(n, _)| n)
    }

    /// The rule it stands for.
    pub fn rule(self) -> Rule {
        match self {
            Self::AdamW => Rule::ADAMW,
            Self::Sgd => Rule::SGD,
        }
    }
}

/// Settings of a training run. The defaults are those of `zofo train`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct TrainOptions {
    /// Optimiser steps.
    pub steps: u32,
    /// Sequences per step.
    pub batch: usize,
    /// Micro-batches that a step's sequences are divided into.
    pub micro_batches: u32,
    /// How stages that cannot backpropagate estimate their gradient.
    pub estimator: EstimatorName,
    /// Random directions (Q) that every micro-batch takes.
    pub directions: u32,
    /// Whether the micro-batches of a step take the same directions.
    pub scope: Scope,
    /// LoRA rank.
    pub rank: usize,
    /// LoRA alpha; `None` is twice the rank.
    pub alpha: Option<f32>,
    /// Scales by alpha / sqrt(rank) instead of alpha / rank.
    pub rslora: bool,
    /// Adapted projections, as in `q,v` or `all`; `None` is `q,v`, or `o,down` for the estimator `guided`, which trains those alone.
    pub targets: Option<String>,
    /// Decides starting values, directions, data order and samples.
    pub seed: u64,
    /// Learning rate of stages that backpropagate.
    pub lr: f64,
    /// Learning rate of the others; `None` follows estimator and optimiser.
    pub zo_lr: Option<f64>,
    /// Optimiser of stages that backpropagate.
    pub optimiser: OptimiserName,
    /// Optimiser of the others; `None` is SGD for random directions, and AdamW for `guided`.
    pub zo_optimiser: Option<OptimiserName>,
    /// Steps over which the learning rates rise from 0.
    pub warmup: u32,
    /// Whether the learning rates fall to 0 at the last step, in a line.
    pub decay: bool,
    /// Largest norm of the exact gradient; 0 does not clip.
    pub clip: f64,
    /// Slopes beyond this many deviations are pulled in; `None` leaves them.
    pub winsorise: Option<f64>,
    /// Further directions that `early-exit` takes as far as its exit head; `None` is as many as `directions`.
    pub exit_directions: Option<u32>,
    /// Step of the difference estimators; `None` is the measured default.
    pub eps: Option<f32>,
    /// Takes differences to both sides.
    pub two_sided: bool,
    /// The order of work; `None` chooses it.
    pub schedule: Option<ScheduleName>,
    /// Leaves the stages that cannot backpropagate, and those before them, untrained.
    pub freeze_head: bool,
    /// Whether stages that backpropagate keep each layer's input alone and recompute the rest: less memory for more time, the same bits.
    pub recompute: bool,
    /// Threads of CPU devices for which the cluster says nothing; `None` is the number of physical cores.
    pub threads: Option<usize>,
    /// Type of activations (`f32`, `bf16`, `f16`) on devices for which the cluster says nothing.
    pub compute: String,
    /// Tokens of a sequence at most; `None` is 256, or the model's context where that is shorter.
    pub max_length: Option<usize>,
    /// Cuts texts that are too long; otherwise they are an error.
    pub truncate: bool,
    /// Examples to evaluate on at most; 0 does not evaluate.
    pub eval_samples: usize,
    /// Steps between checkpoints; 0 saves at the end alone.
    pub checkpoint_every: u32,
}

impl Default for TrainOptions {
    fn default() -> Self {
        Self {
            steps: 100,
            batch: 8,
            micro_batches: 4,
            estimator: EstimatorName::CutTangent,
            directions: 8,
            scope: Scope::MiniBatch,
            rank: 8,
            alpha: None,
            rslora: false,
            targets: None,
            seed: 0,
            lr: 5e-4,
            zo_lr: None,
            optimiser: OptimiserName::AdamW,
            zo_optimiser: None,
            warmup: 0,
            decay: false,
            clip: 1.0,
            winsorise: None,
            exit_directions: None,
            eps: None,
            two_sided: false,
            schedule: None,
            freeze_head: false,
            recompute: false,
            threads: None,
            compute: "f32".into(),
            max_length: None,
            truncate: true,
            eval_samples: 400,
            checkpoint_every: 50,
        }
    }
}

impl TrainOptions {
    /// Whether all settings are in range and fit together.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported`, naming the setting.
    pub fn check(&self) -> Result<()> {
        let positive = |name: &str, value: usize| {
            if value > 0 { Ok(()) } else { Err(Error::invalid(format!("{name} is 0; it must be at least 1"))) }
        };
        positive("the number of steps", self.steps as usize)?;
        positive("the batch size", self.batch)?;
        positive("the number of micro-batches", self.micro_batches as usize)?;
        if self.batch > MAX_BATCH {
            return Err(Error::invalid(format!("a batch of {} sequences is more than the {MAX_BATCH} that one step takes", self.batch)));
        }
        if self.batch < self.micro_batches as usize {
            return Err(Error::invalid(format!(
                "a batch of {} sequences cannot be divided into {} micro-batches; raise the batch size or lower the number of micro-batches",
                self.batch, self.micro_batches
            )));
        }
        if let Some(threads) = self.threads {
            positive("the number of threads", threads)?;
        }
        for (name, lr) in [("learning rate", Some(self.lr)), ("zeroth-order learning rate", self.zo_lr)] {
            if let Some(lr) = lr.filter(|lr| !(lr.is_finite() && *lr >= 0.0)) {
                return Err(Error::invalid(format!("the {name} is {lr}; it must be finite and at least 0")));
            }
        }
        if !(self.clip.is_finite() && self.clip >= 0.0) {
            return Err(Error::invalid(format!("the clipping norm is {}; it must be finite, and 0 for no clipping", self.clip)));
        }
        let lora = self.lora()?;
        if self.estimator == EstimatorName::Guided && !self.freeze_head {
            let writes_to_stream: Targets = "o,down".parse()?;
            if !lora.targets.iter().any(|p| writes_to_stream.contains(p)) {
                return Err(Error::invalid(format!(
                    "the estimator `guided` trains o and down projections alone, and the targets are {}; add o or down, or choose cut-tangent (and plan anew by it, where the run is planned)",
                    lora.targets
                )));
            }
        }
        if let Some(q) = self.exit_directions.filter(|_| self.estimator != EstimatorName::EarlyExit) {
            return Err(Error::invalid(format!(
                "{q} exit directions were asked for, and only `early-exit` takes any; the estimator is `{}`",
                self.estimator.name()
            )));
        }
        self.estimator_spec().check(self.compute()?)
    }

    /// The adapters.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank, alpha or targets that cannot be.
    pub fn lora(&self) -> Result<LoraSpec> {
        let default = if self.estimator == EstimatorName::Guided { "o,down" } else { "q,v" };
        let targets: Targets = self.targets.as_deref().unwrap_or(default).parse()?;
        let mut spec = LoraSpec::new(self.rank, self.alpha.unwrap_or(2.0 * self.rank as f32), targets);
        spec.rslora = self.rslora;
        // The rank first: with rank 0 the default alpha is 0 too, which is not what is wrong.
        LoraSpec { alpha: 1.0, ..spec }.check()?;
        spec.check()?;
        Ok(spec)
    }

    /// The estimator.
    pub fn estimator_spec(&self) -> EstimatorSpec {
        let mut spec = EstimatorSpec::new(self.estimator, self.directions);
        spec.scope = self.scope;
        spec.eps = self.eps.unwrap_or(spec.eps);
        spec.two_sided = self.two_sided;
        spec.winsorise = self.winsorise;
        if self.estimator == EstimatorName::EarlyExit {
            spec.exit_directions = self.exit_directions.unwrap_or(self.directions);
        }
        spec
    }

    /// What the work is to be divided by, over `cluster` and `layers` layers of a model.
    pub fn plan_request<'a>(&self, cluster: &'a Cluster, layers: usize, estimator: &'a EstimatorSpec) -> PlanRequest<'a> {
        let mut request = PlanRequest::new(cluster, layers, self.micro_batches, estimator);
        (request.schedule, request.freeze_head) = (self.schedule, self.freeze_head);
        request
    }

    /// The default type of activations.
    ///
    /// # Errors
    /// `InvalidArgument` listing the types.
    pub fn compute(&self) -> Result<DType> {
        parse_compute(&self.compute)
    }

    /// The optimiser of stages that do not backpropagate.
    ///
    /// A guided estimate is a gradient, if not the exact one. A random one is mostly noise, to which AdamW gives steps as long as to a gradient;
    /// SGD's are as long as the slopes are steep (`docs/convergence.md` has the sweep).
    pub fn zeroth_order_optimiser(&self) -> OptimiserName {
        self.zo_optimiser.unwrap_or(match self.estimator {
            EstimatorName::Guided => OptimiserName::AdamW,
            _ => OptimiserName::Sgd,
        })
    }

    /// The learning rate of stages that do not backpropagate.
    pub fn zeroth_order_lr(&self) -> f64 {
        self.zo_lr.unwrap_or(match (self.estimator, self.zeroth_order_optimiser()) {
            (EstimatorName::Guided, _) => self.lr,
            (_, OptimiserName::AdamW) => self.lr / 5.0,
            (_, OptimiserName::Sgd) => 1e-2,
        })
    }

    /// What the pipeline is to be trained by, in sequences of at most `positions` tokens.
    ///
    /// # Errors
    /// As [`TrainOptions::lora`].
    pub fn train_spec(&self, positions: usize) -> Result<TrainSpec> {
        let mut spec = TrainSpec::new(self.lora()?, self.estimator_spec(), self.lr, self.zeroth_order_lr());
        spec.first_order = OptimiserSpec::new(self.optimiser.rule(), self.lr);
        spec.zeroth_order = OptimiserSpec::new(self.zeroth_order_optimiser().rule(), self.zeroth_order_lr());
        spec.decay = if self.decay { Decay::Linear { steps: self.steps } } else { Decay::Constant };
        (spec.warmup, spec.clip, spec.seed, spec.positions) = (self.warmup, self.clip, self.seed, Some(positions));
        spec.recompute = self.recompute;
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_in_range_and_survive_json() {
        let options = TrainOptions::default();
        options.check().unwrap();
        let json = serde_json::to_string(&options).unwrap();
        assert_eq!(serde_json::from_str::<TrainOptions>(&json).unwrap(), options);
        assert_eq!(serde_json::from_str::<TrainOptions>("{}").unwrap(), options);
        assert!(serde_json::from_str::<TrainOptions>("{\"step\":1}").is_err());
    }

    #[test]
    fn what_cannot_be_is_named() {
        let d = TrainOptions::default;
        for (options, part) in [
            (TrainOptions { rank: 0, ..d() }, "rank is 0"),
            (TrainOptions { steps: 0, ..d() }, "steps is 0"),
            (TrainOptions { batch: 3, ..d() }, "4 micro-batches"),
            (TrainOptions { targets: Some("q,x".into()), ..d() }, "`x`"),
            (TrainOptions { lr: f64::NAN, ..d() }, "learning rate is NaN"),
            (TrainOptions { clip: -1.0, ..d() }, "clipping norm"),
            (TrainOptions { compute: "f64".into(), ..d() }, "f32, f16 and bf16"),
            (TrainOptions { threads: Some(0), ..d() }, "threads is 0"),
            (TrainOptions { estimator: EstimatorName::Guided, targets: Some("q".into()), ..d() }, "guided"),
            (TrainOptions { estimator: EstimatorName::CutDifference, compute: "bf16".into(), ..d() }, "rounding error"),
        ] {
            let e = options.check().unwrap_err();
            assert!(e.message().contains(part), "{e}");
        }
    }
}
