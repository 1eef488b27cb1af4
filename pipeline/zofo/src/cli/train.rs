//! `zofo train`

use std::{fs, path::Path};

use zofo::{CancelToken, Error, Run, Trainer, TrainerBuilder, cluster::Cluster};

use super::{
    Failure,
    args::{TRAIN_EXAMPLE, TrainArgs},
    console, interrupt,
    progress::Progress,
    usage,
};

pub fn run(args: TrainArgs, given: &[String]) -> Result<(), Failure> {
    let builder = match &args.resume {
        Some(folder) => resume(&args, folder, given)?,
        None => start(&args)?,
    };
    let token = CancelToken::new();
    let mut progress = Progress::new(args.json);
    let trainer = builder.cancel_token(token.clone()).on_event(move |e| progress.event(e)).build().map_err(usage)?;
    interrupt::watch(token, "stopping after this step, with a checkpoint; once more to end at once");
    let run = trainer.run()?;
    report(&args, &run)
}

fn start(args: &TrainArgs) -> Result<TrainerBuilder, Failure> {
    let missing = |what: &str| {
        Failure::Usage(Error::invalid(format!(
            "{what}; a model and data that come with the program are still to be built in, so give both, for example\n  {TRAIN_EXAMPLE}"
        )))
    };
    let model = args.model.as_ref().ok_or_else(|| missing("--model is missing"))?;
    let data = args.data.spec(args.seed).ok_or_else(|| missing("--data is missing"))?;
    let mut builder = Trainer::builder().model(model.as_path()).options(args.options());
    if let Some(eval) = args.eval_data.spec(&data) {
        builder = builder.eval_data(eval);
    }
    builder = builder.data(data);
    if let Some(path) = &args.cluster {
        let text = fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
        builder = builder.cluster(Cluster::parse(&text).map_err(|e| usage(e.context(path.display())))?);
    }
    Ok(match &args.out {
        Some(path) => builder.out(path),
        None => builder.out_numbered("runs"),
    })
}

fn resume(args: &TrainArgs, folder: &Path, given: &[String]) -> Result<TrainerBuilder, Failure> {
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

fn report(args: &TrainArgs, run: &Run) -> Result<(), Failure> {
    let folder = run.folder.as_ref().map(|f| f.path().display().to_string()).unwrap_or_default();
    if args.json {
        console::json(&run.summary);
    }
    if run.cancelled {
        console::note(format!(
            "stopped after {} steps; continue with\n  zofo train --resume {}",
            run.summary.steps,
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
        rows.push(change("evaluation loss", s.eval_loss_before, s.eval_loss_after));
    }
    rows.push(change("training loss", s.loss_first, s.loss_last));
    rows.push(vec!["speed".into(), format!("{:.1} samples/s, devices busy {:.0} %", s.samples_per_second, 100.0 * s.compute_utilisation)]);
    let memory = s.peak_rss_bytes.map_or_else(String::new, |b| format!(", {} of memory", console::bytes(b)));
    rows.push(vec!["time".into(), format!("{}{memory}", console::seconds(s.seconds))]);
    rows.push(vec!["adapter".into(), format!("{folder}/adapter")]);
    console::print(&console::table(&rows));
    Ok(())
}
