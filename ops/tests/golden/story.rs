//! "Once upon a time", continued greedily as llama2.c continues it.

use std::fs;

use zofo_hal::{DType, DeviceRef, op::ArgMax};
use zofo_ops::{
    batch::{MicroBatch, Sequence},
    files::Tokenizer,
    llama::{CachedInput, Input, KvCache, SliceSpec},
};

use crate::{common::*, material};

fn rig(device: DeviceRef, folder: &std::path::Path) -> Rig {
    let source = material::model(folder);
    Rig::new(device, &source, &SliceSpec::whole(source.config()), &Default::default())
}

fn best(rig: &mut Rig, last: &zofo_hal::TensorArg) -> u32 {
    let logits = rig.slice.logits(&mut rig.runner, last).unwrap();
    let best = rig.runner.temp(DType::U32, 1, 1).unwrap();
    rig.runner.run(ArgMax::new(logits, best.clone())).unwrap();
    rig.runner.read_u32(&best).unwrap()[0]
}

fn with_cache(rig: &mut Rig, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut cache = KvCache::new(&mut rig.runner, &rig.slice, prompt.len() + tokens).unwrap();
    let mut ids = prompt.to_vec();
    let mut new = prompt.len();
    while ids.len() < prompt.len() + tokens {
        let input = CachedInput::Tokens(&ids[ids.len() - new..]);
        let h = rig.slice.forward_cached(&mut rig.runner, &rig.adapters, &mut cache, input).unwrap();
        ids.push(best(rig, &h.rows(new - 1, 1)));
        new = 1;
    }
    ids
}

fn without_cache(rig: &mut Rig, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let config = rig.config();
    let mut ids = prompt.to_vec();
    while ids.len() < prompt.len() + tokens {
        let batch = rig.batch(&MicroBatch::pack(&config, &[Sequence::unlabelled(ids.clone())]).unwrap());
        let h = rig.slice.forward(&mut rig.runner, &batch, &rig.adapters, Input::Tokens).unwrap();
        let last = h.rows(ids.len() - 1, 1);
        ids.push(best(rig, &last));
    }
    ids
}

/// The text between the command and the end of its block in the model's description.
fn upstream(description: &str) -> String {
    let (_, rest) = description.split_once("-t 0.0\n").unwrap();
    rest.split_once("\n```").unwrap().0.to_owned()
}

#[test]
fn continues_once_upon_a_time_as_upstream_does() {
    let folder = zofo_testkit::shared_or_skip!("models/stories260K");
    let expected = upstream(&fs::read_to_string(folder.join("stories260K.md")).unwrap());
    assert!(expected.starts_with("Once upon a time, there was a little girl named Lily."));
    let folder = folder.join("hf");
    let tokenizer = Tokenizer::open(&folder).unwrap();
    // Plain loops are slow: they read the first sentences.
    for (device, tokens) in [(cpu(), 220), (reference(), 60)] {
        let mut rig = rig(device, &folder);
        // llama2.c prompts with nothing but the token that begins a text.
        let ids = with_cache(&mut rig, &tokenizer.encode("", true).unwrap(), tokens);
        let text = tokenizer.decode(&ids).unwrap();
        let text = text.trim_start();
        assert!(text.len() > 2 * tokens && expected.starts_with(text), "{text}\n\nexpected\n\n{expected}");
        // The same from the words themselves, with a cache and without.
        let prompt = tokenizer.encode("Once upon a time", true).unwrap();
        assert_eq!(prompt, ids[..prompt.len()]);
        let more = tokens - prompt.len();
        assert_eq!(with_cache(&mut rig, &prompt, more), ids[..tokens]);
        assert_eq!(without_cache(&mut rig, &prompt, more), ids[..tokens]);
    }
}
