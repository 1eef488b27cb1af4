//! What the command line looks like.

use std::{convert::Infallible, path::PathBuf};

use clap::{ArgMatches, Args, Parser, Subcommand, parser::ValueSource};
use zofo::TrainOptions;

use super::{
    data_args::{DataArgs, unescaped},
    train_args::{TRAIN_EXAMPLES, TrainArgs},
};

/// Fine-tune LLaMA-family models with LoRA over mixed edge accelerators.
///
/// Devices that can backpropagate train first-order, devices that can only run forward train zeroth-order, in one pipeline.
#[derive(Parser)]
#[command(name = "zofo", version, max_term_width = 80)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// What this host has, and what each device supports
    #[command(after_help = DEVICES_EXAMPLES)]
    Devices(DevicesArgs),
    /// Bring a model or a data set into the cache
    #[cfg(feature = "hub")]
    #[command(after_help = super::fetch::EXAMPLES)]
    Fetch(super::fetch::FetchArgs),
    /// Train an adapter
    #[command(after_help = TRAIN_EXAMPLES, args_override_self = true)]
    Train(Box<TrainArgs>),
    /// Decide who holds which layers, and in which order work is done
    #[command(after_help = super::plan::EXAMPLES, args_override_self = true)]
    Plan(super::plan::PlanArgs),
    /// Time a step of a plan, a schedule, or all planners side by side
    #[command(after_help = super::simulate::EXAMPLES, args_override_self = true)]
    Simulate(super::simulate::SimulateArgs),
    /// Score a model, with or without an adapter, on labelled examples or text
    #[command(after_help = EVAL_EXAMPLES, args_override_self = true)]
    Eval(Box<EvalArgs>),
    /// Compare runs on the same examples: scores, differences, intervals
    #[command(after_help = COMPARE_EXAMPLES, args_override_self = true)]
    Compare(CompareArgs),
    /// Continue a prompt, or reply to a message
    #[command(after_help = GENERATE_EXAMPLES, args_override_self = true)]
    Generate(GenerateArgs),
    /// Print a script that completes commands and options in a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions(CompletionsArgs),
}

const DEVICES_EXAMPLES: &str = "Examples:
  zofo devices
  zofo devices --json";

const COMPLETIONS_EXAMPLES: &str = "Examples:
  zofo completions bash > ~/.local/share/bash-completion/completions/zofo
  zofo completions zsh > ~/.zfunc/_zofo      (with ~/.zfunc in $fpath)
  zofo completions fish > ~/.config/fish/completions/zofo.fish
  zofo completions powershell >> $PROFILE";

const EVAL_EXAMPLES: &str = r"The loss is per label token: the mean of -ln p over the tokens that are to be
predicted.

Examples:
  zofo eval --model ../shared/models/stories260K/hf --adapter runs/1 \
    --data ../shared/data/ag_news/train.csv --template '{content}\nTopic:' \
    --label-column label --classes 1=World,2=Sports,3=Business,4=Sci/Tech
  zofo eval --model ../shared/models/stories260K/hf \
    --data ../shared/data/ag_news/train.csv --text-column content --json";

const GENERATE_EXAMPLES: &str = r"Examples:
  zofo generate --model ../shared/models/stories260K/hf \
    --prompt 'Once upon a time' --max-tokens 100
  zofo generate --model ../shared/models/stories260K/hf --adapter runs/1 \
    --prompt 'The match ended in a draw.\nTopic:' --temperature 0.8 --seed 7

  A message to a model that was trained for conversations:
    zofo generate --model SmolLM2-135M-Instruct.Q4_1.gguf --chat \
      --prompt 'What is 2+2?' --system 'Answer in one word.'";

const COMPARE_EXAMPLES: &str = r"Intervals hold 95 % of 10000 bootstrap draws of the examples, the same draws for
all runs: they show what other test examples would have given, not what other
seeds would.

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
pub struct CompletionsArgs {
    /// Which shell
    pub shell: clap_complete::Shell,
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

pub fn defaults() -> TrainOptions {
    TrainOptions::default()
}

pub fn by_name<T: Copy>(table: &[(&'static str, T)], name: &str) -> Result<T, String> {
    let known = || table.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
    table.iter().find(|(n, _)| *n == name).map(|(_, v)| *v).ok_or_else(|| format!("there are: {}", known()))
}

fn prompt(text: &str) -> Result<String, Infallible> {
    Ok(unescaped(text))
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
    fn help_fits_the_terminal_and_has_examples() {
        for text in [TRAIN_EXAMPLES, EVAL_EXAMPLES, COMPARE_EXAMPLES, GENERATE_EXAMPLES, COMPLETIONS_EXAMPLES] {
            assert!(text.lines().all(|l| l.chars().count() <= 80), "a command that is wrapped cannot be copied: {text}");
        }
        let mut command = Cli::command().term_width(80);
        command.build();
        for sub in command.get_subcommands_mut().filter(|s| s.get_name() != "help") {
            let help = sub.render_long_help().to_string();
            assert!(help.contains("Examples:"), "{} has no examples", sub.get_name());
            for line in help.lines() {
                assert!(line.chars().count() <= 80, "{}: {line}", sub.get_name());
            }
        }
    }
}
