//! The arguments of `zofo train`.

use std::path::PathBuf;

use clap::{ArgAction, Args, Command, CommandFactory};
use zofo::{
    TrainOptions,
    estimator::{EstimatorName, Scope},
    options::OptimiserName,
    order::ScheduleName,
};

use super::{
    args::{Cli, by_name, defaults},
    data_args::{DataArgs, EvalDataArgs},
};

/// What the command takes, for who reads its arguments from elsewhere.
pub fn train_command() -> Command {
    Cli::command().find_subcommand("train").cloned().unwrap_or_default()
}

pub const TRAIN_EXAMPLE: &str = "zofo train --model ../shared/models/stories260K/hf --data ../shared/data/ag_news/train.csv \
                                 --template '{content}\\nTopic:' --label-column label --classes 1=World,2=Sports,3=Business,4=Sci/Tech";

pub const TRAIN_EXAMPLES: &str = r#"Losses are per label token: the mean of -ln p over the tokens that are to be
predicted.

Examples:
  Classify news, over two forward-only and two backpropagating virtual devices:
    zofo train --model ../shared/models/stories260K/hf \
      --data ../shared/data/ag_news/train.csv --template '{content}\nTopic:' \
      --label-column label --classes 1=World,2=Sports,3=Business,4=Sci/Tech

  The same, scored on another file with other columns:
    zofo train --model ../shared/models/stories260K/hf \
      --data ../shared/data/ag_news/train.csv --template '{content}\nTopic:' \
      --label-column label --classes 1=World,2=Sports,3=Business,4=Sci/Tech \
      --eval-data ../shared/data/ag_news/test.csv \
      --eval-template '{description}\nTopic:' --eval-label-column class

  Language modelling on plain text:
    zofo train --model ../shared/models/stories260K/hf \
      --data ../shared/data/ag_news/train.csv --text-column content

  Settings in a file (configs/ has some); what is on the command line wins:
    zofo train --config configs/agnews-smollm2.toml --steps 50
    zofo train --config mine.toml --print-config > complete.toml

  Train what was planned; without --cluster on virtual devices over the CPU:
    zofo plan --costs costs.json --trainable --out plan.json
    zofo train --plan plan.json --cluster cluster.toml
    (a device's board or flops, and [link], are for `zofo plan`)

  Devices of your own: write cluster.toml, in pipeline order, and add
  --cluster cluster.toml; or write the same into a configuration file
    [[device]]
    name = "npu0"      # any name, unique
    kind = "bp-free"   # runs forward only; before those that backpropagate
    backend = "cpu"    # or "cpu:0"; several may share one [default: "cpu"]
    compute = "f32"    # activations: "f32", "bf16", "f16" [default: --compute]
    layers = 2         # all devices say it or none [default: an even split]

    [[device]]
    name = "gpu0"
    kind = "bp"        # can backpropagate; the last device must
    backend = "cpu"
    threads = 2        # of a CPU device [default: --threads]
    int8 = false       # true: 8-bit products with quantised weights, inexact
    memory = "4GiB"    # refuse a model that does not fit [default: unchecked]
    layers = 3

  Go on after Ctrl-C:
    zofo train --resume runs/1"#;

fn optimiser(name: &str) -> Result<OptimiserName, String> {
    by_name(&OptimiserName::ALL, name)
}

fn estimator(name: &str) -> Result<EstimatorName, String> {
    by_name(&EstimatorName::ALL, name)
}

fn scope(name: &str) -> Result<Scope, String> {
    by_name(&Scope::ALL, name)
}

fn schedule(name: &str) -> Result<ScheduleName, String> {
    by_name(&ScheduleName::ALL, name)
}

#[derive(Args)]
pub struct TrainArgs {
    /// Base model: a GGUF file, a folder in Hugging Face layout, or the name of one that `zofo fetch` brought
    #[arg(long, value_name = "M")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub data: DataArgs,
    #[command(flatten)]
    pub eval_data: EvalDataArgs,
    /// Cluster file [default: 2 forward-only and 2 backpropagating virtual devices over the CPU]
    #[arg(long, value_name = "C.toml", help_heading = "Pipeline")]
    pub cluster: Option<PathBuf>,
    /// Train this plan, which `zofo plan --out` wrote, on the cluster's devices: its stages, placement and order
    #[arg(long, value_name = "FILE", help_heading = "Pipeline")]
    pub plan: Option<PathBuf>,
    /// Order of work: single, gpipe, 1f1b, interleaved-1f1b, chimera, zb-h1, dapple, hybridop-head [default: by the cluster]
    #[arg(long, value_name = "NAME", value_parser = schedule, help_heading = "Pipeline")]
    pub schedule: Option<ScheduleName>,
    /// Threads of CPU devices [default: the physical cores]
    #[arg(long, value_name = "N", help_heading = "Pipeline")]
    pub threads: Option<usize>,
    /// Type of activations: f32, bf16, f16
    #[arg(long, value_name = "TYPE", default_value_t = defaults().compute, help_heading = "Pipeline")]
    pub compute: String,
    /// Keep each layer's input alone on stages that backpropagate, and recompute the rest: less memory for more time, the same result
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL", hide_default_value = true, hide_possible_values = true, action = ArgAction::Set, help_heading = "Pipeline")]
    pub recompute: bool,
    /// Optimiser steps
    #[arg(long, value_name = "N", default_value_t = defaults().steps, help_heading = "Training")]
    pub steps: u32,
    /// Sequences per step
    #[arg(long, value_name = "B", default_value_t = defaults().batch, help_heading = "Training")]
    pub batch: usize,
    /// Micro-batches per step
    #[arg(long, value_name = "M", default_value_t = defaults().micro_batches, help_heading = "Training")]
    pub micro_batches: u32,
    /// LoRA rank
    #[arg(long, value_name = "R", default_value_t = defaults().rank, help_heading = "Training")]
    pub rank: usize,
    /// LoRA alpha [default: twice the rank]
    #[arg(long, value_name = "A", allow_negative_numbers = true, help_heading = "Training")]
    pub alpha: Option<f32>,
    /// Scale adapters by alpha / sqrt(rank) instead of alpha / rank
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL", hide_default_value = true, hide_possible_values = true, action = ArgAction::Set, help_heading = "Training")]
    pub rslora: bool,
    /// Adapted projections out of q,k,v,o,gate,up,down, or all [default: q,v; o,down for guided]
    #[arg(long, value_name = "q,v,...", help_heading = "Training")]
    pub targets: Option<String>,
    /// Seed of everything random
    #[arg(long, value_name = "S", default_value_t = defaults().seed, help_heading = "Training")]
    pub seed: u64,
    /// Optimiser of stages that backpropagate: adamw, sgd
    #[arg(long, value_name = "NAME", value_parser = optimiser, default_value = "adamw", help_heading = "Training")]
    pub optimizer: OptimiserName,
    /// Learning rate of stages that backpropagate
    #[arg(long, value_name = "LR", allow_negative_numbers = true, default_value_t = defaults().lr, help_heading = "Training")]
    pub lr: f64,
    /// Largest norm of the exact gradient, 0 for any
    #[arg(long, value_name = "NORM", allow_negative_numbers = true, default_value_t = defaults().clip, help_heading = "Training")]
    pub clip: f64,
    /// Steps over which the learning rates rise from 0
    #[arg(long, value_name = "N", default_value_t = defaults().warmup, help_heading = "Training")]
    pub warmup: u32,
    /// Let the learning rates fall to 0 at the last step, in a line
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL", hide_default_value = true, hide_possible_values = true, action = ArgAction::Set, help_heading = "Training")]
    pub decay: bool,
    /// Tokens of a sequence at most [default: 256, or the model's context]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub max_length: Option<usize>,
    /// Refuse texts that are too long instead of cutting them
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL", hide_default_value = true, hide_possible_values = true, action = ArgAction::Set, help_heading = "Training")]
    pub no_truncate: bool,
    /// Gradients of stages that cannot backpropagate: cut-tangent, guided, cut-difference, loss-difference, early-exit, oracle
    #[arg(long, value_name = "NAME", value_parser = estimator, default_value = defaults().estimator.name(), help_heading = "Zeroth-order stages")]
    pub estimator: EstimatorName,
    /// Random directions that every micro-batch takes
    #[arg(long, value_name = "Q", default_value_t = defaults().directions, help_heading = "Zeroth-order stages")]
    pub directions: u32,
    /// Further directions that early-exit takes as far as its exit head [default: as many]
    #[arg(long, value_name = "Q", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Zeroth-order stages")]
    pub exit_directions: Option<u32>,
    /// Take the same directions for the micro-batches of a mini-batch, or new ones for each micro-batch
    #[arg(long, value_name = "SCOPE", value_parser = scope, default_value = defaults().scope.name(), help_heading = "Zeroth-order stages")]
    pub scope: Scope,
    /// Their learning rate [default: that of the others for guided, else 0.01 with sgd, a fifth of the others' with adamw]
    #[arg(long, value_name = "LR", allow_negative_numbers = true, help_heading = "Zeroth-order stages")]
    pub zo_lr: Option<f64>,
    /// Their optimiser: adamw, sgd [default: adamw for guided, else sgd]
    #[arg(long, value_name = "NAME", value_parser = optimiser, help_heading = "Zeroth-order stages")]
    pub zo_optimizer: Option<OptimiserName>,
    /// Step of the difference estimators [default: the measured one]
    #[arg(long, value_name = "E", allow_negative_numbers = true, help_heading = "Zeroth-order stages")]
    pub eps: Option<f32>,
    /// Take differences to both sides
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL", hide_default_value = true, hide_possible_values = true, action = ArgAction::Set, help_heading = "Zeroth-order stages")]
    pub two_sided: bool,
    /// Pull slopes in that are more than so many deviations from the median
    #[arg(long, value_name = "D", allow_negative_numbers = true, help_heading = "Zeroth-order stages")]
    pub winsorise: Option<f64>,
    /// Leave these stages untrained
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL", hide_default_value = true, hide_possible_values = true, action = ArgAction::Set, help_heading = "Zeroth-order stages")]
    pub freeze_head: bool,
    /// Run folder [default: runs/N]
    #[arg(long, value_name = "RUN", help_heading = "Results")]
    pub out: Option<PathBuf>,
    /// Steps between checkpoints; 0 saves at the end alone
    #[arg(long, value_name = "N", default_value_t = defaults().checkpoint_every, help_heading = "Results")]
    pub checkpoint_every: u32,
    /// Continue a run from its checkpoint, with the settings it was started with; --steps may be raised
    #[arg(long, value_name = "RUN", help_heading = "Results")]
    pub resume: Option<PathBuf>,
    /// Read settings from a file: names as here, in sections [data], [eval_data] and [train], and [[device]] as in a cluster file; paths are relative to it
    #[arg(long, value_name = "FILE.toml", help_heading = "Configuration")]
    pub config: Option<PathBuf>,
    /// Print the settings in force as a configuration file, and do nothing else
    #[arg(long, help_heading = "Configuration")]
    pub print_config: bool,
    /// Print one JSON object, the summary
    #[arg(long, help_heading = "Results")]
    pub json: bool,
}

impl TrainArgs {
    pub fn options(&self) -> TrainOptions {
        let mut o = TrainOptions::default();
        o.steps = self.steps;
        o.batch = self.batch;
        o.micro_batches = self.micro_batches;
        o.estimator = self.estimator;
        o.directions = self.directions;
        o.scope = self.scope;
        o.rank = self.rank;
        o.alpha = self.alpha;
        o.rslora = self.rslora;
        o.optimiser = self.optimizer;
        o.targets = self.targets.clone();
        o.seed = self.seed;
        o.lr = self.lr;
        o.zo_lr = self.zo_lr;
        o.zo_optimiser = self.zo_optimizer;
        o.warmup = self.warmup;
        o.decay = self.decay;
        o.clip = self.clip;
        o.winsorise = self.winsorise;
        o.exit_directions = self.exit_directions;
        o.eps = self.eps;
        o.two_sided = self.two_sided;
        o.schedule = self.schedule;
        o.freeze_head = self.freeze_head;
        o.recompute = self.recompute;
        o.threads = self.threads;
        o.compute = self.compute.clone();
        o.max_length = self.max_length;
        o.truncate = !self.no_truncate;
        o.eval_samples = self.eval_data.eval_samples;
        o.checkpoint_every = self.checkpoint_every;
        o
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn the_cluster_of_the_help_is_one() {
        let (_, rest) = TRAIN_EXAMPLES.split_once("[[device]]").unwrap();
        let (text, _) = rest.split_once("  Go on").unwrap();
        let cluster = zofo::cluster::Cluster::parse(&format!("[[device]]{text}")).unwrap();
        // As many layers as the model of the examples has.
        assert_eq!(cluster.split(5).unwrap(), [2, 3]);
    }

    #[test]
    fn defaults_are_those_of_the_library() {
        let cli = Cli::try_parse_from(["zofo", "train"]).unwrap();
        let crate::cli::args::Command::Train(args) = cli.command else { panic!("not train") };
        assert_eq!(args.options(), TrainOptions::default());
    }
}
