//! The course of a run: evaluate, train, save, evaluate.

use std::time::Instant;

use zofo_hal::{Error, ErrorKind, Result};
use zofo_ops::{
    batch::{Capacity, Sequence},
    files::write_adapter,
    lora::HostAdapter,
};
use zofo_pipeline::{
    estimator::EstimatorName,
    events::Span,
    ir::Role,
    train::{Session, capacity_of},
};

use super::{Out, Run, Trainer, report::report};
use crate::{
    curves::{Chart, Curve},
    data::Dataset,
    eval::{Evaluation, evaluate},
    events::{Event, When},
    inference::Inference,
    run_folder::{Logs, Metrics, RunFolder, write_atomic},
    shuffle::{Purpose, Stream, permutation},
    summary::{Summary, ends, peak_rss_bytes},
    timeline::Timeline,
    tokens::Encoder,
};

/// Sequences that are looked at before a run for its largest micro-batch: three seconds of tokenising news texts.
const LOOK_AHEAD: u64 = 1 << 16;

impl Trainer {
    /// Trains. Where the run is asked to stop it finishes the step it is in, saves a checkpoint, and returns with `cancelled` set; a second
    /// evaluation then does not take place.
    ///
    /// # Errors
    /// Those of the executor, of evaluation and of writing the run folder.
    pub fn run(mut self) -> Result<Run> {
        let began = Instant::now();
        let mut progress = Progress::new(&self)?;
        if let Out::New(folder) = &self.out {
            folder.write_record(&self.record)?;
            folder.write_plan(&self.plan, self.model.config().layers)?;
        }
        let mut session = self.session()?;
        if let Some(step) = session.step_bytes() {
            super::memory::check_peak(&self.cluster, &self.plan, &**self.model.source(), self.options.compute()?, step)?;
        }
        let parameters = session.adapter()?.parameters();
        (self.on_event)(&Event::Started {
            plan: self.plan.clone(),
            parameters,
            examples: self.train.examples.len(),
            eval_examples: self.eval.as_ref().map_or(0, |e| e.examples.len()),
            first_step: session.steps(),
            steps: self.options.steps,
        });
        for note in self.idle_members() {
            (self.on_event)(&Event::Note(note));
        }
        (self.on_event)(&Event::Loaded(self.model.describe_weights(&session.weight_types())));
        if let Some(bytes) = session.planned_bytes() {
            (self.on_event)(&Event::Memory { planned_bytes: bytes });
        }
        progress.summary.planned_bytes = session.planned_bytes();
        progress.summary.trainable_parameters = parameters;
        if let Out::Resumed(folder) = &self.out {
            progress.take_up(folder)?;
            if session.steps() < self.options.steps {
                folder.outdated()?;
            }
        }
        // A run that was stopped before its first step has no scores yet.
        if session.steps() == 0
            && progress.summary.eval_loss_before.is_none()
            && let Some(scores) = self.evaluate(When::Before, None)?
        {
            if !scores.loss.is_finite() {
                self.model.check_finite()?;
            }
            progress.before(&scores);
        }
        progress.logs = self.out.folder().map(|f| f.logs(session.steps(), self.journals())).transpose()?;
        for note in progress.logs.iter_mut().flat_map(|l| std::mem::take(&mut l.notes)) {
            (self.on_event)(&Event::Note(note));
        }
        progress.earlier();
        self.train(&mut session, &mut progress, began)?;

        let cancelled = session.steps() < self.options.steps;
        let adapter = session.adapter()?;
        session.finish()?;
        self.write_adapter(&adapter)?;
        let scores = if cancelled { None } else { self.evaluate(When::After, Some(&adapter))? };
        if let Some(scores) = &scores {
            progress.after(scores);
        }
        progress.finish(!cancelled, began);
        self.draw(&progress)?;
        if let Some(folder) = self.out.folder() {
            folder.write_summary(&progress.summary)?;
        }
        Ok(Run { summary: progress.summary, adapter, evaluation: scores, folder: self.out.folder().cloned(), cancelled })
    }

    /// What to say of devices that share micro-batches of too few sequences for each to have one.
    fn idle_members(&self) -> Vec<String> {
        let sequences = self.options.batch / self.plan.schedule.workload.micro_batches.max(1) as usize;
        let shared = self.plan.stages.iter().filter(|s| s.members.len() > 1);
        let idle = shared.flat_map(|s| s.members.iter().zip(s.sequences(sequences)).filter(|(_, n)| *n == 0).map(move |(m, _)| (m, s)));
        idle.map(|(member, stage)| {
            format!(
                "{} has {:.0} % of every micro-batch of layers {}..{}, which is no whole sequence of {sequences}: it is idle most of the time. Take a \
                 larger --batch, or plan with fewer micro-batches",
                member.device,
                100.0 * member.share,
                stage.layers.start,
                stage.layers.end
            )
        })
        .collect()
    }

    fn session(&self) -> Result<Session> {
        let mut spec = self.options.train_spec(self.max_length)?;
        spec.capacity = self.capacity()?;
        let (plan, devices, source) = (self.plan.clone(), self.devices.clone(), self.model.source().clone());
        match &self.out {
            Out::Resumed(folder) => Session::resume(plan, devices, source, spec, &folder.checkpoint()),
            _ => Session::start(plan, devices, source, spec),
        }
    }

    /// The largest micro-batch of the run. `None` for a run so long that looking through it first would take too long.
    fn capacity(&self) -> Result<Option<Capacity>> {
        let o = &self.options;
        if u64::from(o.steps).saturating_mul(o.batch as u64) > LOOK_AHEAD {
            return Ok(None);
        }
        // What is too long is an error where it is read.
        let encoder = Encoder::new(self.model.tokenizer(), &self.train, self.max_length, true)?;
        let mut order = Order::new(&self.train, o.seed);
        let micro_batches = self.plan.schedule.workload.micro_batches;
        let of_step = |step| capacity_of(&order.batch(&encoder, step, o.batch)?, micro_batches);
        let all = (0..o.steps).map(of_step).collect::<Result<Vec<_>>>()?;
        Ok(all.into_iter().reduce(Capacity::max))
    }

    fn train(&mut self, session: &mut Session, progress: &mut Progress, began: Instant) -> Result<()> {
        let encoder = Encoder::new(self.model.tokenizer(), &self.train, self.max_length, self.options.truncate)?;
        let mut order = Order::new(&self.train, self.options.seed);
        if !self.options.truncate {
            // A text that is too long must not end a run in its middle.
            self.train.examples.iter().try_for_each(|e| encoder.sequence(e).map(drop))?;
        }
        let (steps, every) = (self.options.steps, self.options.checkpoint_every);
        let mut saved = session.steps();
        while session.steps() < steps && !self.cancel.is_cancelled() {
            let batch = order.batch(&encoder, session.steps(), self.options.batch)?;
            let report = match session.step(&batch) {
                // Before anything is learnt, only the base model can be at fault.
                Err(e) if session.steps() == 0 => return Err(self.model.check_finite().err().unwrap_or(e)),
                report => report?,
            };
            progress.summary.device_peak_bytes = progress.summary.device_peak_bytes.max(session.device_bytes());
            let metrics = Metrics::from(&report);
            let journal = session.take_journal();
            if let Some(logs) = &mut progress.logs {
                logs.step(&metrics, &journal)?;
            }
            progress.step(&metrics);
            let finite = report.loss.is_finite();
            let event = Event::Step(report);
            (self.on_event)(&event);
            if let Event::Step(report) = event {
                progress.last = Some(report.timeline);
            }
            if !finite {
                return Err(Error::execution(format!(
                    "the loss of step {} is not a number; lower the learning rates, or compute in f32",
                    metrics.step
                )));
            }
            if every > 0 && session.steps().is_multiple_of(every) {
                save(session, &self.out, progress, &mut self.on_event, began)?;
                saved = session.steps();
            }
        }
        if saved < session.steps() || session.steps() == 0 {
            save(session, &self.out, progress, &mut self.on_event, began)?;
        }
        Ok(())
    }

    /// Scores on the evaluation data, where there are any.
    fn evaluate(&mut self, when: When, adapter: Option<&HostAdapter>) -> Result<Option<Evaluation>> {
        let Some(data) = &self.eval else { return Ok(None) };
        let encoder = Encoder::new(self.model.tokenizer(), data, self.max_length, self.options.truncate)?;
        // The last stage can backpropagate, so its device runs every op of a whole model.
        let last = self.plan.schedule.placement.last().and_then(|worker| self.devices.get(self.plan.first_rank(*worker)));
        let Some(stage) = last else { return Ok(None) };
        let mut inference = Inference::load(stage.device.clone(), &self.model, adapter, self.max_length, stage.compute)?;
        let on_event = &mut self.on_event;
        let result = evaluate(&mut inference, &encoder, data, &self.cancel, &mut |done, total| {
            on_event(&Event::Evaluating { when, done, total });
        });
        match result {
            Ok(scores) => {
                if let Some(folder) = self.out.folder() {
                    scores.write_predictions(&folder.predictions(when))?;
                }
                on_event(&Event::Evaluated { when, scores: scores.clone() });
                Ok(Some(scores))
            }
            // What is trained is saved, and scores can be had later.
            Err(e) if *e.kind() == ErrorKind::Cancelled => {
                on_event(&Event::Note(e.message().to_owned()));
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// Whether each step leaves a line in the journal: `guided` updates are not made of seeds.
    fn journals(&self) -> bool {
        self.options.estimator != EstimatorName::Guided && self.plan.stages.iter().any(|s| s.role == Role::ZerothOrder)
    }

    fn curves(&self, folder: &RunFolder, losses: &[f64]) -> Chart {
        let points = losses.iter().zip(1u32..).map(|(loss, step)| (f64::from(step), *loss)).collect();
        let name = folder.path().file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        let curve = Curve::new(name, points);
        let model = self.model.name().rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
        Chart::losses(format!("Training loss, {model}"), vec![curve])
    }

    /// Pictures of the run.
    fn draw(&self, progress: &Progress) -> Result<()> {
        let Some(folder) = self.out.folder() else { return Ok(()) };
        let curves = self.curves(folder, &progress.losses);
        curves.save(&folder.curves())?;
        let timeline = progress.last.as_deref().map(|spans| Timeline::measured(&self.plan, spans));
        if let Some(timeline) = &timeline {
            write_atomic(&folder.trace(), format!("{}\n", timeline.trace()).as_bytes())?;
        }
        write_atomic(&folder.report(), report(&self.plan, &progress.summary, &curves.to_svg(), timeline.as_ref()).as_bytes())
    }

    fn write_adapter(&self, adapter: &HostAdapter) -> Result<()> {
        let Some(folder) = self.out.folder() else { return Ok(()) };
        let files = adapter.to_files(self.model.config(), &self.options.lora()?)?;
        let base = self.model.path().map_or_else(|| self.model.name().to_owned(), |p| p.display().to_string());
        write_adapter(&folder.adapter(), &files, &base)
    }
}

/// Lines first, then the state they lead to, then the summary so far.
fn save(session: &mut Session, out: &Out, progress: &mut Progress, on_event: &mut dyn FnMut(&Event), began: Instant) -> Result<()> {
    let Some(folder) = out.folder() else { return Ok(()) };
    if let Some(logs) = &mut progress.logs {
        logs.sync()?;
    }
    let path = folder.prepare_checkpoint()?;
    session.save(&path)?;
    progress.finish(false, began);
    folder.write_summary(&progress.summary)?;
    on_event(&Event::Checkpoint { step: session.steps(), path });
    Ok(())
}

/// The order of examples: a new permutation for each pass over the data, a function of seed and step alone.
struct Order<'a> {
    data: &'a Dataset,
    seed: u64,
    epoch: Option<(usize, Vec<usize>)>,
}

impl<'a> Order<'a> {
    fn new(data: &'a Dataset, seed: u64) -> Self {
        Self { data, seed, epoch: None }
    }

    fn batch(&mut self, encoder: &Encoder<'_>, step: u32, size: usize) -> Result<Vec<Sequence>> {
        let n = self.data.examples.len();
        let first = step as usize * size;
        (first..first + size).map(|i| encoder.sequence(&self.data.examples[self.index(i / n, i % n)])).collect()
    }

    fn index(&mut self, epoch: usize, place: usize) -> usize {
        if self.epoch.as_ref().is_none_or(|(e, _)| *e != epoch) {
            let stream = Stream::new(self.seed, Purpose::Epoch, epoch as u32);
            self.epoch = Some((epoch, permutation(self.data.examples.len(), stream)));
        }
        self.epoch.as_ref().map_or(0, |(_, order)| order[place])
    }
}

/// What is known of a run so far.
struct Progress {
    summary: Summary,
    logs: Option<Logs>,
    losses: Vec<f64>,
    samples: usize,
    utilisation: f64,
    /// What devices did in the last step that was made here.
    last: Option<Vec<Vec<Span>>>,
    /// Time of an interrupted part.
    before: f64,
}

impl Progress {
    fn new(trainer: &Trainer) -> Result<Self> {
        let o = &trainer.options;
        let lora = o.lora()?;
        let mut summary = Summary {
            times: "measured".into(),
            run_folder: trainer.out.folder().map(|f| f.path().to_owned()),
            adapter: trainer.out.folder().map(RunFolder::adapter),
            model: trainer.model.name().to_owned(),
            data: trainer.train.name.clone(),
            estimator: if o.freeze_head { "none (head frozen)".into() } else { o.estimator.name().into() },
            schedule: trainer.plan.name.name().into(),
            targets: lora.targets.to_string(),
            rank: lora.rank,
            seed: o.seed,
            eval_examples: trainer.eval.as_ref().map_or(0, |e| e.examples.len()),
            versions: vec![("zofo".into(), env!("CARGO_PKG_VERSION").into())],
            ..Summary::default()
        };
        for stage in &trainer.devices {
            for version in &stage.device.info().versions {
                if !summary.versions.contains(version) {
                    summary.versions.push(version.clone());
                }
            }
        }
        Ok(Self { summary, logs: None, losses: Vec::new(), samples: 0, utilisation: 0.0, last: None, before: 0.0 })
    }

    /// Takes what cannot be found out again from the summary of the interrupted part.
    fn take_up(&mut self, folder: &RunFolder) -> Result<()> {
        let earlier = folder.read_summary()?;
        let s = &mut self.summary;
        (s.f1_before, s.accuracy_before, s.eval_loss_before) = (earlier.f1_before, earlier.accuracy_before, earlier.eval_loss_before);
        self.before = earlier.seconds;
        Ok(())
    }

    /// Counts the steps that are in the logs.
    fn earlier(&mut self) {
        let earlier = self.logs.as_mut().map(|l| std::mem::take(&mut l.earlier)).unwrap_or_default();
        earlier.iter().for_each(|m| self.step(m));
    }

    fn step(&mut self, m: &Metrics) {
        self.losses.push(m.loss);
        self.samples += m.samples;
        self.summary.train_seconds += m.seconds;
        self.utilisation += m.utilisation;
    }

    fn before(&mut self, e: &Evaluation) {
        let s = &mut self.summary;
        (s.f1_before, s.accuracy_before, s.eval_loss_before) = (e.f1, e.accuracy, Some(e.loss));
    }

    fn after(&mut self, e: &Evaluation) {
        let s = &mut self.summary;
        (s.f1_after, s.accuracy_after, s.eval_loss_after) = (e.f1, e.accuracy, Some(e.loss));
        s.f1_by_class = e.classes.iter().cloned().collect();
    }

    fn finish(&mut self, finished: bool, began: Instant) {
        let steps = self.losses.len();
        let s = &mut self.summary;
        (s.loss_first, s.loss_last) = ends(&self.losses);
        s.finished = finished;
        s.steps = steps as u32;
        s.samples_per_second = if s.train_seconds > 0.0 { self.samples as f64 / s.train_seconds } else { 0.0 };
        s.compute_utilisation = if steps > 0 { self.utilisation / steps as f64 } else { 0.0 };
        s.seconds = self.before + began.elapsed().as_secs_f64();
        s.peak_rss_bytes = peak_rss_bytes();
    }
}
