//! The result of a run in numbers: `summary.json`.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Result of a training run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Summary {
    /// Whether all steps were done.
    pub finished: bool,
    /// Steps done.
    pub steps: u32,
    /// Mean training loss of the first steps: a tenth of them, at most ten.
    pub loss_first: Option<f64>,
    /// Mean training loss of the last steps: a tenth of them, at most ten.
    pub loss_last: Option<f64>,
    /// Macro-F1 on the evaluation data before training; `None` for data without classes.
    pub f1_before: Option<f64>,
    /// Macro-F1 after training.
    pub f1_after: Option<f64>,
    /// Accuracy before training.
    pub accuracy_before: Option<f64>,
    /// Accuracy after training.
    pub accuracy_after: Option<f64>,
    /// F1 of each class after training, by its word; `None` for a class that is neither in the evaluation data nor predicted.
    #[serde(default)]
    pub f1_by_class: BTreeMap<String, Option<f64>>,
    /// Loss per label token on the evaluation data before training.
    pub eval_loss_before: Option<f64>,
    /// Loss per label token on the evaluation data after training.
    pub eval_loss_after: Option<f64>,
    /// Examples of the evaluation.
    pub eval_examples: usize,
    /// Training sequences per second of training.
    pub samples_per_second: f64,
    /// Mean share of time that devices compute during training, communication excluded.
    pub compute_utilisation: f64,
    /// Largest memory use of the process, where the system tells.
    pub peak_rss_bytes: Option<u64>,
    /// Device memory at the peak of a step, as planned before the first: weights, adapters, optimisers, activations, scratch. `None` where the
    /// run was too long to look ahead.
    pub planned_bytes: Option<u64>,
    /// Highest use of device memory while training.
    pub device_peak_bytes: u64,
    /// Time of the whole run, evaluation included.
    pub seconds: f64,
    /// Time of the training steps.
    pub train_seconds: f64,
    /// Where times come from: the clock (`measured`) or a model of a device (`modelled`).
    pub times: String,
    /// The run folder, as it was named; `None` where nothing is written.
    #[serde(default)]
    pub run_folder: Option<PathBuf>,
    /// The adapter's folder in it.
    #[serde(default)]
    pub adapter: Option<PathBuf>,
    /// Base model.
    pub model: String,
    /// Training data.
    pub data: String,
    /// Estimator.
    pub estimator: String,
    /// Schedule.
    pub schedule: String,
    /// Adapted projections.
    pub targets: String,
    /// LoRA rank.
    pub rank: usize,
    /// Trained values.
    pub trainable_parameters: usize,
    /// Seed.
    pub seed: u64,
    /// Names and versions of what made it.
    pub versions: Vec<(String, String)>,
}

impl Summary {
    /// Steps that `loss_first` and `loss_last` are each the mean of: a tenth of all, at least one and at most ten.
    pub fn loss_steps(&self) -> usize {
        end(self.steps as usize)
    }
}

fn end(steps: usize) -> usize {
    steps.div_ceil(10).min(10)
}

/// Largest resident size of this process so far, in bytes.
pub(crate) fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Mean over the first and over the last tenth of the losses, at least one and at most ten.
pub(crate) fn ends(losses: &[f64]) -> (Option<f64>, Option<f64>) {
    let n = end(losses.len());
    let mean = |l: &[f64]| (!l.is_empty()).then(|| l.iter().sum::<f64>() / l.len() as f64);
    (mean(&losses[..n]), mean(&losses[losses.len() - n..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_at_the_ends_are_means_over_a_tenth() {
        assert_eq!(ends(&[]), (None, None));
        assert_eq!(ends(&[3.0]), (Some(3.0), Some(3.0)));
        let falling: Vec<f64> = (0..20).rev().map(f64::from).collect();
        assert_eq!(ends(&falling), (Some(18.5), Some(0.5)));
        let long: Vec<f64> = (0..1000).map(f64::from).collect();
        assert_eq!(ends(&long), (Some(4.5), Some(994.5)));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_is_known() {
        assert!(peak_rss_bytes().unwrap() > 1 << 20);
    }
}
