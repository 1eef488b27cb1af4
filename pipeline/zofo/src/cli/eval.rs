//! `zofo eval`

use std::sync::Arc;

use zofo::{
    CancelToken, Error, ErrorKind, Inference, Model, devices,
    eval::{Evaluation, evaluate},
    tokens::{Encoder, max_length},
};
use zofo_pipeline::cluster::parse_compute;

use super::{
    Failure,
    args::EvalArgs,
    console, interrupt,
    progress::{Progress, by_class, scored},
    usage,
};

pub fn run(args: EvalArgs) -> Result<(), Failure> {
    let compute = parse_compute(&args.device.compute).map_err(usage)?;
    let spec = args.data.spec(args.seed).ok_or_else(|| Failure::Usage(Error::invalid("--data is missing; give a file in CSV or JSONL")))?;
    let model = Model::open(&args.model)?;
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

fn report(scores: &Evaluation) {
    console::line(scored(scores));
    console::print(&by_class(scores));
}
