//! `zofo eval`

use std::{path::Path, sync::Arc};

use zofo::{
    CancelToken, Error, ErrorKind, Inference, Model, devices,
    eval::{Evaluation, evaluate},
    tokens::{Encoder, max_length},
};
use zofo_pipeline::cluster::parse_compute;

use super::{
    Failure,
    args::EvalArgs,
    cache, console, interrupt, output,
    progress::{Progress, by_class, scored},
    usage,
};

pub fn run(args: EvalArgs) -> Result<(), Failure> {
    let compute = parse_compute(&args.device.compute).map_err(usage)?;
    let missing = || Failure::Usage(Error::invalid("--data is missing; give a file in CSV or JSONL, or a name"));
    let (data, belonging) = args.data.spec(args.seed).map_err(usage)?.ok_or_else(missing)?;
    // Of named data, those that are not trained on.
    let spec = belonging.unwrap_or(data);
    if let Some(path) = &args.predictions {
        writable(path)?;
    }
    let model = Model::open(cache::model(&args.model)?)?;
    let length = max_length(model.config(), args.max_length).map_err(usage)?;
    let adapter = args.adapter.as_deref().map(|a| model.read_adapter(a)).transpose()?;
    let data = spec.load().map_err(usage)?;
    let encoder = Encoder::new(model.tokenizer(), &data, length, !args.no_truncate)?;
    let device = devices::open(&args.device.device, args.device.threads).map_err(usage)?;
    let mut inference = Inference::load(device, &model, adapter.as_ref(), length, compute)?;
    let token = CancelToken::new();
    interrupt::watch(token.clone(), || "stopping after this evaluation batch; once more to end at once");
    let mut progress = Progress::new(args.json, Arc::default());
    let scores = evaluate(&mut inference, &encoder, &data, &token, &mut |done, total| progress.evaluating(done, total));
    progress.finish();
    if let (Ok(scores), Some(path)) = (&scores, &args.predictions) {
        scores.write_predictions(path)?;
    }
    if scores.as_ref().is_ok_and(|s| !s.loss.is_finite()) {
        model.check_finite()?;
    }
    match scores {
        Ok(scores) if args.json => {
            console::json(&scores);
        }
        Ok(scores) => report(&scores),
        Err(e) if *e.kind() == ErrorKind::Cancelled => {
            console::note(e.message());
            return Err(Failure::Interrupted);
        }
        Err(e) => return Err(e.into()),
    }
    Ok(())
}

/// Finds out before the work whether its result can be written.
fn writable(path: &Path) -> Result<(), Failure> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let what = match () {
        () if path.is_dir() => "this is a folder; name a file for the predictions",
        () if !folder.is_dir() => "the folder of this file does not exist; make it first",
        () => return output::replaceable(path, "{\"line\":", "predictions"),
    };
    Err(Failure::Usage(Error::invalid(format!("{}: {what}", path.display()))))
}

fn report(scores: &Evaluation) {
    console::line(scored(scores));
    console::print(&by_class(scores));
}
