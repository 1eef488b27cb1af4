//! `zofo generate`

use std::ops::ControlFlow;

use serde_json::json;
use zofo::{
    Inference, Model,
    chat::{self, Message},
    devices,
    generate::{GenerateSpec, generate_from},
};
use zofo_pipeline::cluster::parse_compute;

use super::{Failure, args::GenerateArgs, cache, console, usage};

/// Room for prompt and text where the model's context is longer.
const LONGEST: usize = 4096;

pub fn run(args: GenerateArgs) -> Result<(), Failure> {
    let compute = parse_compute(&args.device.compute).map_err(usage)?;
    let model = Model::open(cache::model(&args.model)?)?;
    let adapter = args.adapter.as_deref().map(|a| model.read_adapter(a)).transpose()?;
    let tokenizer = model.tokenizer();
    let mut spec = GenerateSpec::default().max_tokens(args.max_tokens).temperature(args.temperature, args.seed);
    let ids = if args.chat {
        spec = spec.stops(tokenizer.turn_ends());
        let messages: Vec<_> = args.system.iter().map(Message::system).chain([Message::user(&args.prompt)]).collect();
        chat::prompt(tokenizer, &messages).map_err(usage)?
    } else {
        tokenizer.encode(&args.prompt, true)?
    };
    let device = devices::open(&args.device.device, args.device.threads).map_err(usage)?;
    let config = model.config();
    let context = config.sliding_window.map_or(config.max_positions, |w| w.min(config.max_positions)).min(LONGEST);
    let mut inference = Inference::load(device, &model, adapter.as_ref(), context, compute)?;
    let mut listener = |piece: &str| if args.json || console::print(piece) { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
    // A reply stands alone, a continuation behind what it continues.
    if !args.json && !args.chat && !console::print(&args.prompt) {
        return Ok(());
    }
    let result = generate_from(&mut inference, &model, &ids, &spec, &mut listener);
    if !args.json {
        console::line("");
    }
    let out = result.map_err(usage)?;
    if args.json {
        console::json(&json!({
            "prompt": args.prompt, "text": out.text, "ids": out.ids, "prompt_tokens": out.prompt_tokens, "tokens": out.ids.len(),
            "stop": out.stop.name(),
        }));
    }
    Ok(())
}
