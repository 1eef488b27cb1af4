//! Training as a library call.
//!
//! ```no_run
//! use zofo::{Trainer, data::DataSpec};
//! let data = DataSpec::new("train.csv").template("{content}\nTopic:")?.labels("label", "World,Sports".parse()?);
//! let run = Trainer::builder().model("models/llama").data(data).steps(100).out("runs/first").build()?.run()?;
//! println!("F1 {:?} -> {:?}", run.summary.f1_before, run.summary.f1_after);
//! # Ok::<(), zofo::Error>(())
//! ```

mod builder;
mod memory;
mod report;
mod run;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use zofo_ops::lora::HostAdapter;
use zofo_pipeline::{cluster::Cluster, executor::StageDevice, plan::Plan};

pub use builder::{DataSource, ModelSource, TrainerBuilder};

use crate::{
    cancel::CancelToken,
    data::{DataSpec, Dataset},
    eval::Evaluation,
    events::Listener,
    model::Model,
    options::TrainOptions,
    planning::PlanFile,
    run_folder::{RunFolder, RunLock},
    summary::Summary,
    tokens::Encoder,
};

/// A training run, checked and ready.
pub struct Trainer {
    model: Model,
    train: Dataset,
    eval: Option<Dataset>,
    cluster: Cluster,
    plan: Plan,
    devices: Vec<StageDevice>,
    options: TrainOptions,
    max_length: usize,
    record: Record,
    out: Out,
    /// Held until the run ends.
    _lock: Option<RunLock>,
    on_event: Listener,
    cancel: CancelToken,
}

/// What a run leaves on disk.
enum Out {
    Nothing,
    New(RunFolder),
    Resumed(RunFolder),
}

impl Out {
    fn folder(&self) -> Option<&RunFolder> {
        match self {
            Self::Nothing => None,
            Self::New(f) | Self::Resumed(f) => Some(f),
        }
    }
}

/// What `run.json` holds: enough to continue the run. What was given as values in memory is `None`.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Record {
    model: Option<PathBuf>,
    data: Option<DataSpec>,
    eval_data: Option<DataSpec>,
    cluster: Cluster,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    plan: Option<PlanFile>,
    options: TrainOptions,
}

/// A run that has ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Run {
    /// The result in numbers.
    pub summary: Summary,
    /// Scores after training, where the run has evaluation data and was not stopped.
    pub evaluation: Option<Evaluation>,
    /// The adapters.
    pub adapter: HostAdapter,
    /// Where it is on disk.
    pub folder: Option<RunFolder>,
    /// Whether it was stopped before the last step; its checkpoint can be continued.
    pub cancelled: bool,
}

impl Trainer {
    /// A run to be described.
    pub fn builder() -> TrainerBuilder {
        TrainerBuilder::default()
    }

    /// How the work is divided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The settings.
    pub fn options(&self) -> &TrainOptions {
        &self.options
    }

    /// The file that is evaluated on, or that a part is held out of; `None` for data that were values in memory.
    pub fn eval_spec(&self) -> Option<&DataSpec> {
        self.record.eval_data.as_ref().or(self.record.data.as_ref())
    }

    /// Whether [`Trainer::eval_spec`] names the training data, for want of others.
    pub fn eval_is_held_out(&self) -> bool {
        self.record.eval_data.is_none()
    }

    /// The prompt of an example of the evaluation data, or of the training data where there are none, each of its fields cut to `characters`.
    pub fn sample_prompt(&self, characters: usize) -> Option<String> {
        let data = self.eval.as_ref().unwrap_or(&self.train);
        let text = data.template.render(&data.examples.first()?.fields, characters);
        Some(text.trim_end_matches(' ').to_owned())
    }

    /// Tokens of the longest class word; `None` for data without classes.
    pub fn label_tokens(&self) -> Option<usize> {
        let encoder = Encoder::new(self.model.tokenizer(), &self.train, self.max_length, true).ok()?;
        encoder.labels().iter().map(Vec::len).max()
    }

    /// The devices' descriptions.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }
}
