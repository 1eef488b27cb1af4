//! `zofo train`

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use clap::ArgMatches;
use zofo::{
    CancelToken, Error, Run, TrainOptions, Trainer, TrainerBuilder, cluster::Cluster, data::Format, planning::PlanFile,
    run_folder::RunFolder,
};

use super::{
    Failure,
    args::given,
    cache, config, console,
    data_args::escaped,
    interrupt, plan,
    progress::{Progress, by_class},
    train_args::{TRAIN_EXAMPLE, TrainArgs, train_command},
    usage,
};

/// Runs of fewer steps have no beginning and end to compare.
const SHORT: u32 = 4;

/// `devices` are those of a configuration file.
pub fn run(args: TrainArgs, matches: &ArgMatches, devices: Option<Cluster>) -> Result<(), Failure> {
    let builder = match &args.resume {
        Some(folder) => resume(&args, folder, &given(matches))?,
        None => {
            let cluster = cluster(&args, devices)?;
            if args.print_config && args.plan.is_some() {
                return Err(Failure::Usage(Error::invalid(
                    "--print-config prints the settings of a run without a plan, which decides some of them; leave out one of the two",
                )));
            }
            if args.print_config {
                console::print(&config::print(matches, &train_command(), cluster.as_ref()));
                return Ok(());
            }
            start(&args, cluster, &given(matches))?
        }
    };
    let token = CancelToken::new();
    let evaluating = Arc::new(AtomicBool::new(false));
    let mut progress = Progress::new(args.json, evaluating.clone());
    let trainer = builder.cancel_token(token.clone()).on_event(move |e| progress.event(e)).build().map_err(usage)?;
    if let Some(folder) = &args.resume
        && nothing_left(&args, folder, &trainer)?
    {
        return Ok(());
    }
    interrupt::watch(token, move || {
        if evaluating.load(Ordering::Relaxed) {
            "stopping after this evaluation batch; once more to end at once"
        } else {
            "stopping after this step, with a checkpoint; once more to end at once"
        }
    });
    let again = Again::new(&args, &trainer);
    let run = trainer.run()?;
    report(&args, &run, &again)
}

/// The devices, where they are named; the command line has the last word.
fn cluster(args: &TrainArgs, devices: Option<Cluster>) -> Result<Option<Cluster>, Failure> {
    let Some(path) = &args.cluster else { return Ok(devices) };
    let text = config::read(path, "cluster").map_err(usage)?;
    Ok(Some(Cluster::parse(&text).map_err(|e| Failure::Usage(config::malformed(path, &e)))?))
}

fn start(args: &TrainArgs, cluster: Option<Cluster>, given: &[String]) -> Result<TrainerBuilder, Failure> {
    let missing = |what: &str| {
        let neither = if cfg!(feature = "embedded") { "\nwith neither, the embedded model is trained on the embedded data" } else { "" };
        Failure::Usage(Error::invalid(format!("{what}; give both a model and data, for example\n  {TRAIN_EXAMPLE}{neither}")))
    };
    let model = args.model.as_ref().ok_or_else(|| missing("--model is missing"))?;
    let (data, belonging) = args.data.spec(args.seed).map_err(usage)?.ok_or_else(|| missing("--data is missing"))?;
    let mut options = args.options();
    let mut builder = Trainer::builder().model(cache::model(model)?);
    if let Some(path) = &args.plan {
        let wrong = |e: Error| Failure::Usage(e.context(path.display()));
        let plan = PlanFile::parse(&plan::text(path)?).map_err(wrong)?;
        plan.simulate().map_err(wrong)?;
        settle(&plan, &mut options, given);
        builder = builder.plan(plan);
    }
    builder = builder.options(options);
    if let Some(eval) = args.eval_data.spec(&data, belonging).map_err(usage)? {
        builder = builder.eval_data(eval);
    }
    builder = builder.data(data);
    if let Some(cluster) = cluster {
        builder = builder.cluster(cluster);
    }
    Ok(match &args.out {
        Some(path) => builder.out(path),
        None => builder.out_numbered("runs"),
    })
}

/// Takes from a plan what the user has not said; what contradicts it is refused where the run is built.
fn settle(plan: &PlanFile, options: &mut TrainOptions, given: &[String]) {
    let asked = options.clone();
    plan.settle(options);
    let said = |name: &str| given.iter().any(|g| g == name);
    if said("micro_batches") {
        options.micro_batches = asked.micro_batches;
    }
    if said("estimator") {
        options.estimator = asked.estimator;
    }
    if said("exit_directions") {
        options.exit_directions = asked.exit_directions;
    }
    if said("directions") {
        (options.directions, options.freeze_head) = (asked.directions, asked.freeze_head);
    }
}

fn resume(args: &TrainArgs, folder: &Path, given: &[String]) -> Result<TrainerBuilder, Failure> {
    if args.config.is_some() {
        return Err(Failure::Usage(Error::invalid(
            "--config cannot be given with --resume: a run goes on with the settings it was started with",
        )));
    }
    const WITH_RESUME: [&str; 3] = ["resume", "steps", "json"];
    if let Some(other) = given.iter().find(|g| !WITH_RESUME.contains(&g.as_str()) && g.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
    {
        return Err(Failure::Usage(Error::invalid(format!(
            "--{} cannot be given with --resume: a run goes on with the settings it was started with; only --steps may be raised",
            other.replace('_', "-")
        ))));
    }
    let builder = Trainer::builder().resume(folder);
    Ok(if given.iter().any(|g| g == "steps") { builder.extend_to(args.steps) } else { builder })
}

/// Whether a run that is to go on is at its end, scores included; says so.
fn nothing_left(args: &TrainArgs, folder: &Path, trainer: &Trainer) -> Result<bool, Failure> {
    let summary = RunFolder::open(folder)?.read_summary()?;
    let scored = summary.eval_examples == 0 || summary.eval_loss_after.is_some();
    if !(summary.finished && scored && trainer.options().steps <= summary.steps) {
        return Ok(false);
    }
    if args.json {
        console::json(&summary);
    }
    if trainer.options().decay {
        console::note(format!(
            "this run has done all of its {}, nothing is left to do; its learning rate has fallen to 0 (--decay), so more of them are another run",
            console::count(summary.steps, "step")
        ));
        return Ok(true);
    }
    console::note(format!(
        "this run has done all of its {}, nothing is left to do; for more of them raise --steps, for example\n  zofo train --resume {} --steps {}",
        console::count(summary.steps, "step"),
        console::quoted(&folder.display().to_string()),
        u64::from(summary.steps) * 2
    ));
    Ok(true)
}

/// The commands that use what was trained; without the adapter, which is known at the end.
struct Again {
    prompt: Option<String>,
    data: Option<String>,
    /// Whether the data of the command are those that were trained on.
    seen: bool,
}

impl Again {
    /// Characters of each field of the prompt that is shown.
    const SHOWN: usize = 120;

    fn new(args: &TrainArgs, trainer: &Trainer) -> Self {
        let most = trainer.label_tokens().map(|n| format!(" --max-tokens {n}")).unwrap_or_default();
        let prompt = trainer.sample_prompt(Self::SHOWN).map(|p| format!("{}{most}", console::quoted(&escaped(&p))));
        let data = trainer.eval_spec().map(|spec| {
            if let Some(name) = spec.name() {
                return format!(" --data {name}");
            }
            // As the user wrote it rather than as the run folder has it.
            let given = args.eval_data.eval_data.as_ref().or(args.data.data.as_ref()).filter(|p| p.is_file());
            let path = given.unwrap_or(&spec.path);
            let options = trainer.options();
            let format = spec.format.and_then(|f| Format::ALL.into_iter().find(|(_, other)| *other == f)).map(|(name, _)| name.to_owned());
            [
                ("data", Some(path.display().to_string())),
                ("format", format),
                ("text-column", spec.text_column.clone()),
                ("template", spec.template.as_ref().map(|t| escaped(&t.to_string()))),
                ("label-column", spec.label_column.clone()),
                ("answer-column", spec.answer_column.clone()),
                ("classes", spec.classes.as_ref().map(ToString::to_string)),
                ("max-length", options.max_length.map(|n| n.to_string())),
                ("limit", (options.eval_samples > 0).then(|| options.eval_samples.to_string())),
            ]
            .into_iter()
            .filter_map(|(name, value)| Some(format!(" --{name} {}", console::quoted(&value?))))
            .collect()
        });
        Self { prompt, data, seen: trainer.eval_is_held_out() }
    }

    fn say(&self, model: &str, adapter: &str) {
        let with = format!("--model {} --adapter {}", console::quoted(model), console::quoted(adapter));
        if let Some(prompt) = &self.prompt {
            console::line(format!("try it: zofo generate {with} --prompt {prompt}"));
        }
        if let Some(data) = &self.data {
            let note = if self.seen { " (examples that it was trained on included)" } else { "" };
            console::line(format!("score it{note}: zofo eval {with}{data}"));
        }
    }
}

fn report(args: &TrainArgs, run: &Run, again: &Again) -> Result<(), Failure> {
    let folder = run.folder.as_ref().map(|f| f.path().display().to_string()).unwrap_or_default();
    if args.json {
        console::json(&run.summary);
    }
    if run.cancelled {
        console::note(format!(
            "stopped after {}; continue with\n  zofo train --resume {}",
            console::count(run.summary.steps, "step"),
            console::quoted(&folder)
        ));
        return Err(Failure::Interrupted);
    }
    if args.json {
        return Ok(());
    }
    let s = &run.summary;
    let number = |v: Option<f64>| v.map_or_else(|| "-".into(), |v| format!("{v:.4}"));
    let change = |name: &str, before, after| vec![name.to_owned(), format!("{} -> {}", number(before), number(after))];
    let mut rows = Vec::new();
    if s.f1_before.is_some() || s.f1_after.is_some() {
        rows.push(change("macro-F1", s.f1_before, s.f1_after));
    }
    if s.eval_examples > 0 {
        rows.push(change("evaluation loss per label token", s.eval_loss_before, s.eval_loss_after));
    }
    if s.steps >= SHORT {
        let n = s.loss_steps();
        let steps = if n == 1 { "step".into() } else { format!("{n} steps") };
        rows.push(change(&format!("training loss (first and last {steps})"), s.loss_first, s.loss_last));
    }
    rows.push(vec!["speed".into(), format!("{:.1} samples/s, devices busy {:.0} %", s.samples_per_second, 100.0 * s.compute_utilisation)]);
    let memory = s.peak_rss_bytes.map_or_else(String::new, |b| format!(", {} of memory", console::bytes(b)));
    rows.push(vec!["time".into(), format!("{}{memory}", console::seconds(s.seconds))]);
    rows.push(vec!["adapter".into(), format!("{folder}/adapter")]);
    rows.push(vec!["report".into(), format!("{folder}/report.html")]);
    console::print(&console::table(&rows));
    if let Some(scores) = &run.evaluation {
        console::print(&by_class(scores));
    }
    if !folder.is_empty() {
        again.say(&s.model, &format!("{folder}/adapter"));
    }
    if cfg!(feature = "embedded") && s.model == "embedded" {
        console::line("a real model: zofo fetch smollm2-135m; zofo fetch ag_news; zofo train --model smollm2-135m --data ag_news");
    }
    Ok(())
}
