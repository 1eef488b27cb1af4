//! What the command line looks like.

use std::{convert::Infallible, path::PathBuf};

use clap::{ArgMatches, Args, Parser, Subcommand, parser::ValueSource};
use zofo::{TrainOptions, estimator::EstimatorName, options::OptimiserName, order::ScheduleName};

use super::data_args::{DataArgs, EvalDataArgs, unescaped};

/// Fine-tune LLaMA-family models with LoRA over mixed edge accelerators.
///
/// Devices that can backpropagate train first-order, devices that can only run forward train zeroth-order, in one pipeline.
#[derive(Parser)]
#[command(name = "zofo", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// What this host has, and what each device supports
    Devices(DevicesArgs),
    /// Bring a model or a data set into the cache
    #[cfg(feature = "hub")]
    #[command(after_help = super::fetch::EXAMPLES)]
    Fetch(super::fetch::FetchArgs),
    /// Train an adapter
    #[command(after_help = TRAIN_EXAMPLES, args_override_self = true)]
    Train(Box<TrainArgs>),
    /// Score a model, with or without an adapter, on labelled examples or text
    #[command(after_help = EVAL_EXAMPLES, args_override_self = true)]
    Eval(Box<EvalArgs>),
    /// Compare runs on the same examples: scores, differences, intervals
    #[command(after_help = COMPARE_EXAMPLES, args_override_self = true)]
    Compare(CompareArgs),
    /// Continue a prompt
    #[command(after_help = GENERATE_EXAMPLES, args_override_self = true)]
    Generate(GenerateArgs),
}

pub const TRAIN_EXAMPLE: &str = "zofo train --model ../shared/models/stories260K/hf --data ../shared/data/ag_news/train.csv \
                                 --template '{content}\\nTopic:' --label-column label --classes 1=World,2=Sports,3=Business,4=Sci/Tech";

const TRAIN_EXAMPLES: &str = r#"Losses are per label token: the mean of -ln p over the tokens that are to be predicted.

Examples:
  Classify news, over two forward-only and two backpropagating virtual devices:
    zofo train --model ../shared/models/stories260K/hf --data ../shared/data/ag_news/train.csv \
      --template '{content}\nTopic:' --label-column label \
      --classes 1=World,2=Sports,3=Business,4=Sci/Tech --steps 200

  The same, scored on another file with other columns:
    zofo train --model ../shared/models/stories260K/hf --data ../shared/data/ag_news/train.csv \
      --template '{content}\nTopic:' --label-column label \
      --classes 1=World,2=Sports,3=Business,4=Sci/Tech --steps 200 \
      --eval-data ../shared/data/ag_news/test.csv --eval-template '{description}\nTopic:' \
      --eval-label-column class

  Language modelling on plain text:
    zofo train --model ../shared/models/stories260K/hf --data ../shared/data/ag_news/train.csv \
      --text-column content

  Devices of your own: write cluster.toml, in pipeline order, and add --cluster cluster.toml
    [[device]]
    name = "npu0"        # any name, unique
    kind = "bp-free"     # runs forward only; in front of those that backpropagate
    backend = "cpu"      # or "cpu:0"; several devices may share one [default: "cpu"]
    compute = "f32"      # activations: "f32", "bf16" or "f16" [default: --compute]
    layers = 2           # all devices say it or none [default: an even split]

    [[device]]
    name = "gpu0"
    kind = "bp"          # can backpropagate; the last device must
    backend = "cpu"
    threads = 2          # of a CPU device [default: --threads]
    memory = "4GiB"      # refuse a model that does not fit [default: not checked]
    layers = 3

  Go on after Ctrl-C:
    zofo train --resume runs/1"#;

const EVAL_EXAMPLES: &str = r"The loss is per label token: the mean of -ln p over the tokens that are to be predicted.

Examples:
  zofo eval --model ../shared/models/stories260K/hf --adapter runs/1/adapter \
    --data ../shared/data/ag_news/train.csv --template '{content}\nTopic:' --label-column label \
    --classes 1=World,2=Sports,3=Business,4=Sci/Tech --limit 200
  zofo eval --model ../shared/models/stories260K/hf --data ../shared/data/ag_news/train.csv \
    --text-column content --limit 200 --json";

const GENERATE_EXAMPLES: &str = r"Examples:
  zofo generate --model ../shared/models/stories260K/hf --prompt 'Once upon a time' --max-tokens 100
  zofo generate --model ../shared/models/stories260K/hf --adapter runs/1/adapter \
    --prompt 'The match ended in a draw.\nTopic:' --temperature 0.8 --seed 7

  A message to a model that was trained for conversations:
    zofo generate --model SmolLM2-135M-Instruct.Q4_1.gguf --chat \
      --prompt 'What is 2+2?' --system 'Answer in one word.'";

const COMPARE_EXAMPLES: &str = r"Intervals hold 95 % of 10000 bootstrap draws of the examples, the same draws for all runs; they
show what other test examples would have given, not what other seeds would.

Examples:
  zofo compare runs/1 runs/2 --svg curves.svg
  zofo compare hybrid=runs/3 --gap frozen=runs/1 full=runs/2
  zofo eval --model M --data D ... --predictions base.jsonl
  zofo compare base.jsonl runs/1 --json";

/// Names of the arguments that stand on the command line.
pub fn given(matches: &ArgMatches) -> Vec<String> {
    let on_command_line = |id: &&clap::Id| {
        matches!(matches.try_contains_id(id.as_str()), Ok(true)) && matches.value_source(id.as_str()) == Some(ValueSource::CommandLine)
    };
    matches.ids().filter(on_command_line).map(|id| id.as_str().to_owned()).collect()
}

#[derive(Args)]
pub struct DevicesArgs {
    /// Print one JSON object, with the answer for each op
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct CompareArgs {
    /// Run folders, or files of predictions; NAME=PATH calls one NAME
    #[arg(value_name = "RUN", required_unless_present = "gap")]
    pub runs: Vec<String>,
    /// Show differences to this run [default: the first]
    #[arg(long, value_name = "RUN")]
    pub baseline: Option<String>,
    /// Show which share of the difference between two runs each other run makes up: (x - frozen) / (full - frozen)
    #[arg(long, num_args = 2, value_names = ["FROZEN", "FULL"])]
    pub gap: Option<Vec<String>>,
    /// Draw the training losses of the run folders
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

fn defaults() -> TrainOptions {
    TrainOptions::default()
}

fn by_name<T: Copy>(table: &[(&'static str, T)], name: &str) -> Result<T, String> {
    let known = || table.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
    table.iter().find(|(n, _)| *n == name).map(|(_, v)| *v).ok_or_else(|| format!("there are: {}", known()))
}

fn prompt(text: &str) -> Result<String, Infallible> {
    Ok(unescaped(text))
}

fn optimiser(name: &str) -> Result<OptimiserName, String> {
    by_name(&OptimiserName::ALL, name)
}

fn estimator(name: &str) -> Result<EstimatorName, String> {
    by_name(&EstimatorName::ALL, name)
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
    /// Order of work: single, gpipe, hybridop-head [default: by the cluster]
    #[arg(long, value_name = "NAME", value_parser = schedule, help_heading = "Pipeline")]
    pub schedule: Option<ScheduleName>,
    /// Threads of CPU devices [default: the physical cores]
    #[arg(long, value_name = "N", help_heading = "Pipeline")]
    pub threads: Option<usize>,
    /// Type of activations: f32, bf16, f16
    #[arg(long, value_name = "TYPE", default_value_t = defaults().compute, help_heading = "Pipeline")]
    pub compute: String,
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
    /// Adapted projections out of q,k,v,o,gate,up,down, or all [default: q,v; o,down for guided]
    #[arg(long, value_name = "q,v,...", help_heading = "Training")]
    pub targets: Option<String>,
    /// Seed of everything random
    #[arg(long, value_name = "S", default_value_t = defaults().seed, help_heading = "Training")]
    pub seed: u64,
    /// Learning rate of stages that backpropagate (AdamW)
    #[arg(long, value_name = "LR", allow_negative_numbers = true, default_value_t = defaults().lr, help_heading = "Training")]
    pub lr: f64,
    /// Largest norm of the exact gradient, 0 for any
    #[arg(long, value_name = "NORM", allow_negative_numbers = true, default_value_t = defaults().clip, help_heading = "Training")]
    pub clip: f64,
    /// Steps over which the learning rates rise from 0
    #[arg(long, value_name = "N", default_value_t = defaults().warmup, help_heading = "Training")]
    pub warmup: u32,
    /// Let the learning rates fall to 0 at the last step, in a line
    #[arg(long, help_heading = "Training")]
    pub decay: bool,
    /// Tokens of a sequence at most [default: 256, or the model's context]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub max_length: Option<usize>,
    /// Refuse texts that are too long instead of cutting them
    #[arg(long, help_heading = "Training")]
    pub no_truncate: bool,
    /// Gradients of stages that cannot backpropagate: cut-tangent, guided, cut-difference, loss-difference, early-exit, oracle
    #[arg(long, value_name = "NAME", value_parser = estimator, default_value = defaults().estimator.name(), help_heading = "Zeroth-order stages")]
    pub estimator: EstimatorName,
    /// Random directions per micro-batch
    #[arg(long, value_name = "Q", default_value_t = defaults().directions, help_heading = "Zeroth-order stages")]
    pub directions: u32,
    /// Their learning rate [default: that of the others for guided, else a fifth of it]
    #[arg(long, value_name = "LR", allow_negative_numbers = true, help_heading = "Zeroth-order stages")]
    pub zo_lr: Option<f64>,
    /// Their optimiser: adamw, sgd
    #[arg(long, value_name = "NAME", value_parser = optimiser, default_value = "adamw", help_heading = "Zeroth-order stages")]
    pub zo_optimizer: OptimiserName,
    /// Step of the difference estimators [default: the measured one]
    #[arg(long, value_name = "E", allow_negative_numbers = true, help_heading = "Zeroth-order stages")]
    pub eps: Option<f32>,
    /// Take differences to both sides
    #[arg(long, help_heading = "Zeroth-order stages")]
    pub two_sided: bool,
    /// Pull slopes in that are more than so many deviations from the median
    #[arg(long, value_name = "D", allow_negative_numbers = true, help_heading = "Zeroth-order stages")]
    pub winsorise: Option<f64>,
    /// Leave these stages untrained
    #[arg(long, help_heading = "Zeroth-order stages")]
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
        o.rank = self.rank;
        o.alpha = self.alpha;
        o.targets = self.targets.clone();
        o.seed = self.seed;
        o.lr = self.lr;
        o.zo_lr = self.zo_lr;
        o.zo_optimiser = self.zo_optimizer;
        o.warmup = self.warmup;
        o.decay = self.decay;
        o.clip = self.clip;
        o.winsorise = self.winsorise;
        o.eps = self.eps;
        o.two_sided = self.two_sided;
        o.schedule = self.schedule;
        o.freeze_head = self.freeze_head;
        o.threads = self.threads;
        o.compute = self.compute.clone();
        o.max_length = self.max_length;
        o.truncate = !self.no_truncate;
        o.eval_samples = self.eval_data.eval_samples;
        o.checkpoint_every = self.checkpoint_every;
        o
    }
}

/// Where a model runs as a whole.
#[derive(Args)]
pub struct DeviceArgs {
    /// Device, as `zofo devices` names it
    #[arg(long, value_name = "D", default_value = "cpu")]
    pub device: String,
    /// Threads of a CPU device [default: the physical cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Type of activations: f32, bf16, f16
    #[arg(long, value_name = "TYPE", default_value_t = defaults().compute)]
    pub compute: String,
}

#[derive(Args)]
pub struct EvalArgs {
    /// Base model: a GGUF file, a folder in Hugging Face layout, or the name of one that `zofo fetch` brought
    #[arg(long, value_name = "M")]
    pub model: PathBuf,
    /// Adapter folder in PEFT's format, or a run folder
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    #[command(flatten)]
    pub data: DataArgs,
    /// Seed of the sample that --limit takes
    #[arg(long, value_name = "S", default_value_t = defaults().seed)]
    pub seed: u64,
    /// Tokens of a sequence at most [default: 256, or the model's context]
    #[arg(long, value_name = "N")]
    pub max_length: Option<usize>,
    /// Refuse texts that are too long instead of cutting them
    #[arg(long)]
    pub no_truncate: bool,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Write what the model said to each example, for `zofo compare`; one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub predictions: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct GenerateArgs {
    /// Base model: a GGUF file, a folder in Hugging Face layout, or the name of one that `zofo fetch` brought
    #[arg(long, value_name = "M")]
    pub model: PathBuf,
    /// Adapter folder in PEFT's format, or a run folder
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Text to continue; as in a template, \n, \t and \\ stand for a line break, a tab and a backslash
    #[arg(long, value_name = "TEXT", value_parser = prompt)]
    pub prompt: String,
    /// Take --prompt as a message, and let the model reply: through the chat template that comes with it
    #[arg(long)]
    pub chat: bool,
    /// Instructions that stand before the conversation [default: the chat template's own, if any]
    #[arg(long, value_name = "TEXT", value_parser = prompt, requires = "chat")]
    pub system: Option<String>,
    /// Tokens to make at most
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_tokens: usize,
    /// 0 takes the likeliest token; above, tokens are drawn
    #[arg(long, value_name = "T", allow_negative_numbers = true, default_value_t = 0.0)]
    pub temperature: f64,
    /// Seed of the draws
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

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
        let Command::Train(args) = cli.command else { panic!("not train") };
        assert_eq!(args.options(), TrainOptions::default());
    }
}
