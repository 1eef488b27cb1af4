//! From settings to a run that can start: every mistake that can be found before work begins is found here.

use std::path::{Path, PathBuf};

use zofo_hal::{Error, Result};
use zofo_pipeline::{
    cluster::Cluster,
    devices,
    estimator::{EstimatorName, Scope},
    order::ScheduleName,
    plan::Plan,
};

use super::{Out, Record, Trainer, memory};
use crate::{
    cancel::CancelToken,
    data::{DataSpec, Dataset},
    devices::registry,
    events::{Event, Listener},
    model::Model,
    options::{OptimiserName, TrainOptions},
    planning::PlanFile,
    run_folder::RunFolder,
    tokens,
};

/// Where a model comes from.
#[derive(Clone)]
#[non_exhaustive]
pub enum ModelSource {
    /// A folder.
    Path(PathBuf),
    /// One that is open.
    Open(Model),
}

impl<P: AsRef<Path> + ?Sized> From<&P> for ModelSource {
    fn from(path: &P) -> Self {
        Self::Path(path.as_ref().to_owned())
    }
}

impl From<PathBuf> for ModelSource {
    fn from(path: PathBuf) -> Self {
        Self::Path(path)
    }
}

impl From<Model> for ModelSource {
    fn from(model: Model) -> Self {
        Self::Open(model)
    }
}

/// Where data come from.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum DataSource {
    /// A file.
    File(DataSpec),
    /// Examples in memory.
    Memory(Dataset),
}

impl From<DataSpec> for DataSource {
    fn from(spec: DataSpec) -> Self {
        Self::File(spec)
    }
}

impl From<Dataset> for DataSource {
    fn from(data: Dataset) -> Self {
        Self::Memory(data)
    }
}

impl DataSource {
    fn spec(&self) -> Option<DataSpec> {
        match self {
            Self::File(spec) => Some(spec.clone()),
            Self::Memory(_) => None,
        }
    }
}

/// Describes a run. Without a model and data, those of `embedded` are taken, with the feature of this name; its `options` suit them. Everything
/// else has a default: see [`TrainOptions`], and [`TrainerBuilder::cluster`].
#[derive(Default)]
pub struct TrainerBuilder {
    model: Option<ModelSource>,
    data: Option<DataSource>,
    eval_data: Option<DataSource>,
    cluster: Option<Cluster>,
    plan: Option<PlanFile>,
    options: TrainOptions,
    out: Option<PathBuf>,
    out_numbered: Option<PathBuf>,
    resume: Option<PathBuf>,
    extend_to: Option<u32>,
    on_event: Option<Listener>,
    cancel: CancelToken,
}

macro_rules! options {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $($field:ident)|+ = $value:expr;)*) => {
        $($(#[$doc])*
        pub fn $name(mut self, $name: $type) -> Self {
            $(self.options.$field = $value;)+
            self
        })*
    };
}

impl TrainerBuilder {
    /// The base model: a path, or a [`Model`].
    pub fn model(mut self, model: impl Into<ModelSource>) -> Self {
        self.model = Some(model.into());
        self
    }

    /// The training data: a [`DataSpec`], or a [`Dataset`].
    pub fn data(mut self, data: impl Into<DataSource>) -> Self {
        self.data = Some(data.into());
        self
    }

    /// Data to evaluate on; otherwise a tenth of the training data is held out. Classes that are not given are those of the training data.
    pub fn eval_data(mut self, data: impl Into<DataSource>) -> Self {
        self.eval_data = Some(data.into());
        self
    }

    /// The devices; otherwise two forward-only and two backpropagating virtual devices over the CPU, fewer for a model of fewer layers.
    pub fn cluster(mut self, cluster: Cluster) -> Self {
        self.cluster = Some(cluster);
        self
    }

    /// Trains a plan as it is, on its devices, which the cluster describes; without one they are virtual ones over the CPU. Settings that the plan is
    /// not for are refused; [`PlanFile::settle`] makes them fit.
    pub fn plan(mut self, plan: PlanFile) -> Self {
        self.plan = Some(plan);
        self
    }

    /// All other settings at once.
    pub fn options(mut self, options: TrainOptions) -> Self {
        self.options = options;
        self
    }

    options! {
        /// Optimiser steps.
        steps: u32 => steps = steps;
        /// Sequences per step.
        batch: usize => batch = batch;
        /// Micro-batches per step.
        micro_batches: u32 => micro_batches = micro_batches;
        /// The estimator.
        estimator: EstimatorName => estimator = estimator;
        /// Random directions that every micro-batch takes.
        directions: u32 => directions = directions;
        /// Whether the micro-batches of a step take the same directions.
        scope: Scope => scope = scope;
        /// LoRA rank.
        rank: usize => rank = rank;
        /// LoRA alpha.
        alpha: f32 => alpha = Some(alpha);
        /// Adapted projections, as in `q,v` or `all`.
        targets: impl Into<String> => targets = Some(targets.into());
        /// The seed of everything random.
        seed: u64 => seed = seed;
        /// Learning rate of stages that backpropagate.
        lr: f64 => lr = lr;
        /// Learning rate of stages that do not.
        zo_lr: f64 => zo_lr = Some(zo_lr);
        /// Optimiser of stages that do not backpropagate.
        zo_optimiser: OptimiserName => zo_optimiser = Some(zo_optimiser);
        /// Largest norm of the exact gradient, 0 for any.
        clip: f64 => clip = clip;
        /// Step of the difference estimators.
        eps: f32 => eps = Some(eps);
        /// The order of work.
        schedule: ScheduleName => schedule = Some(schedule);
        /// Whether the stages in front of the first-order ones stay untrained.
        freeze_head: bool => freeze_head = freeze_head;
        /// Whether stages that backpropagate recompute activations: less memory for more time, the same bits.
        recompute: bool => recompute = recompute;
        /// Threads of CPU devices.
        threads: usize => threads = Some(threads);
        /// Type of activations: `f32`, `bf16` or `f16`.
        compute: impl Into<String> => compute = compute.into();
        /// Tokens of a sequence at most.
        max_length: usize => max_length = Some(max_length);
        /// Whether texts that are too long are cut.
        truncate: bool => truncate = truncate;
        /// Examples to evaluate on at most, 0 for no evaluation.
        eval_samples: usize => eval_samples = eval_samples;
        /// Steps between checkpoints.
        checkpoint_every: u32 => checkpoint_every = checkpoint_every;
    }

    /// The folder to write the run to; otherwise nothing is written.
    pub fn out(mut self, folder: impl Into<PathBuf>) -> Self {
        self.out = Some(folder.into());
        self
    }

    /// Writes the run to a new numbered folder in `parent`.
    pub fn out_numbered(mut self, parent: impl Into<PathBuf>) -> Self {
        self.out_numbered = Some(parent.into());
        self
    }

    /// Continues the run in `folder` from its checkpoint, bit for bit. Settings given here are replaced by those it was started with; model and
    /// data need to be given only where they were values in memory.
    pub fn resume(mut self, folder: impl Into<PathBuf>) -> Self {
        self.resume = Some(folder.into());
        self
    }

    /// More steps for a run that is resumed.
    pub fn extend_to(mut self, steps: u32) -> Self {
        self.extend_to = Some(steps);
        self
    }

    /// Who hears of events, on the thread that runs.
    pub fn on_event(mut self, f: impl FnMut(&Event) + Send + 'static) -> Self {
        self.on_event = Some(Box::new(f));
        self
    }

    /// How the run can be asked to stop.
    pub fn cancel_token(mut self, token: CancelToken) -> Self {
        self.cancel = token;
        self
    }

    /// Checks everything, opens the model and the devices, reads the data.
    ///
    /// # Errors
    /// `InvalidArgument` for settings that are out of range or do not fit together, the model or the cluster; those of [`Model::open`],
    /// [`DataSpec::load`], [`RunFolder::create`] and of opening devices.
    pub fn build(mut self) -> Result<Trainer> {
        let resumed = match &self.resume {
            Some(path) => {
                let folder = RunFolder::open(path)?;
                let lock = folder.lock()?;
                let record: Record = RunFolder::read_record(path)?;
                let steps = record.options.steps;
                self.take_up(record);
                self.check_extension(&folder, steps)?;
                Some((folder, lock))
            }
            None => None,
        };
        #[cfg(feature = "embedded")]
        if resumed.is_none() && self.model.is_none() && self.data.is_none() {
            let (train, held_out) = crate::embedded::data()?;
            self.model = Some(ModelSource::Open(crate::embedded::model()?));
            (self.data, self.eval_data) = (Some(train.into()), Some(held_out.into()));
        }
        self.options.check()?;
        let model = match self.model.take() {
            Some(ModelSource::Open(model)) => model,
            Some(ModelSource::Path(path)) => Model::open(path)?,
            None => return Err(Error::invalid("no model is given; give a GGUF file or a folder in Hugging Face layout")),
        };
        let max_length = tokens::max_length(model.config(), self.options.max_length)?;
        let layers = model.config().layers;
        let default_cluster = || self.plan.as_ref().map_or_else(|| default_cluster(layers), PlanFile::cluster);
        let mut cluster = self.cluster.take().unwrap_or_else(default_cluster);
        if let Some(threads) = self.options.threads {
            cluster.devices.iter_mut().filter(|d| d.backend.split(':').next() == Some("cpu")).for_each(|d| {
                d.threads.get_or_insert(threads);
            });
        }
        let plan = self.divide(&cluster, layers)?;
        let cluster = cluster.only(&plan.devices())?;
        memory::check(&cluster, &plan, &**model.source(), self.options.compute()?)?;
        let Some(data) = self.data.take() else {
            return Err(Error::invalid("no training data are given; give a file in CSV or JSONL"));
        };
        let record = Record {
            model: model.path().map(Path::to_owned),
            data: data.spec().map(absolute),
            eval_data: self.eval_data.as_ref().and_then(DataSource::spec).map(absolute),
            cluster: cluster.clone(),
            plan: self.plan.clone(),
            options: self.options.clone(),
        };
        let (train, eval) = self.load(data)?;
        let exact = self.options.estimator == EstimatorName::Oracle;
        let devices = devices::open(&registry(), &cluster, self.options.compute()?, exact)?;
        // Last, so that nothing is left behind by a run that cannot start.
        let out = match (&resumed, self.out, self.out_numbered) {
            (Some((folder, _)), ..) => Out::Resumed(folder.clone()),
            (None, Some(path), _) => Out::New(RunFolder::create(&path)?),
            (None, None, Some(parent)) => Out::New(RunFolder::numbered(&parent)?),
            (None, None, None) => Out::Nothing,
        };
        let lock = match resumed {
            Some((_, lock)) => Some(lock),
            None => out.folder().map(RunFolder::lock).transpose()?,
        };
        Ok(Trainer {
            model,
            train,
            eval,
            cluster,
            plan,
            devices,
            options: self.options,
            max_length,
            record,
            out,
            _lock: lock,
            on_event: self.on_event.unwrap_or_else(|| Box::new(|_| {})),
            cancel: self.cancel,
        })
    }

    fn take_up(&mut self, record: Record) {
        if self.model.is_none() {
            self.model = record.model.map(ModelSource::Path);
        }
        if self.data.is_none() {
            self.data = record.data.map(DataSource::File);
            self.eval_data = self.eval_data.take().or(record.eval_data.map(DataSource::File));
        }
        self.cluster = Some(record.cluster);
        self.plan = record.plan;
        self.options = record.options;
        if let Some(steps) = self.extend_to {
            self.options.steps = steps;
        }
    }

    /// Refuses fewer steps than are done, and others than the `planned` ones where the learning rate falls to 0 with the last of them.
    fn check_extension(&self, folder: &RunFolder, planned: u32) -> Result<()> {
        if let Some(asked) = self.extend_to.filter(|asked| self.options.decay && *asked != planned) {
            return Err(Error::invalid(format!(
                "{}: the learning rate of this run falls to 0 with its step {planned} (decay), so it cannot have {asked}; leave the number out, or \
                 start another run",
                folder.path().display()
            )));
        }
        let (Some(asked), Ok(summary)) = (self.extend_to, folder.read_summary()) else { return Ok(()) };
        if asked < summary.steps {
            return Err(Error::invalid(format!(
                "{}: this run has done {} steps, and {asked} in all are asked for; ask for more, or leave the number out",
                folder.path().display(),
                summary.steps
            )));
        }
        Ok(())
    }

    fn divide(&self, cluster: &Cluster, layers: usize) -> Result<Plan> {
        match &self.plan {
            Some(file) => file.plan(cluster, layers, &self.options),
            None => self.options.plan_request(cluster, layers, &self.options.estimator_spec()).plan(),
        }
    }

    /// Training and evaluation data.
    fn load(&self, data: DataSource) -> Result<(Dataset, Option<Dataset>)> {
        let (seed, samples) = (self.options.seed, self.options.eval_samples);
        let train = match data {
            DataSource::File(spec) => spec.load()?,
            DataSource::Memory(data) => data,
        };
        if samples == 0 {
            return Ok((train, None));
        }
        let eval = match &self.eval_data {
            None => {
                let tenth = train.examples.len() / 10;
                let (train, eval) = train.split(tenth.min(samples), seed)?;
                return Ok((train, Some(eval)));
            }
            Some(DataSource::Memory(data)) => data.clone(),
            Some(DataSource::File(spec)) => {
                let mut spec = spec.clone();
                if spec.label_column.is_some() && spec.classes.is_none() {
                    spec.classes = train.classes.clone();
                }
                spec.limit = Some(spec.limit.unwrap_or(samples).min(samples));
                spec.load()?
            }
        };
        if let (Some(a), Some(b)) = (&train.classes, &eval.classes)
            && !a.iter().map(|c| &c.word).eq(b.iter().map(|c| &c.word))
        {
            return Err(Error::invalid(format!(
                "training data have the classes {a}, evaluation data {b}; the words and their order must be the same"
            )));
        }
        if train.classes.is_some() != eval.classes.is_some() {
            let lacks = if eval.classes.is_none() { "evaluation" } else { "training" };
            return Err(Error::invalid(format!("the {lacks} data have no labels, the other data do; name the label column of both")));
        }
        Ok((train, Some(eval)))
    }
}

/// Two forward-only and two backpropagating devices, fewer where the model has fewer than four layers.
fn default_cluster(layers: usize) -> Cluster {
    let devices = layers.clamp(1, 4);
    Cluster::virtual_cpus(devices / 2, devices - devices / 2)
}

fn absolute(mut spec: DataSpec) -> DataSpec {
    if spec.name().is_none() {
        spec.path = spec.path.canonicalize().unwrap_or(spec.path);
    }
    spec
}
