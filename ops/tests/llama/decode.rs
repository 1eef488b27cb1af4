//! Decoding with a cache.

use zofo_hal::op::ArgMax;
use zofo_ops::{
    Runner,
    batch::{MicroBatch, Sequence},
    llama::{CachedInput, Importer, Input, KvCache, SliceSpec, WeightSource},
    lora::Targets,
};

use crate::common::*;

#[test]
fn a_cache_gives_the_rows_of_the_whole_sequence() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    let mut rig = Rig::new(reference(), &source, &SliceSpec::whole(&config), &host);
    let ids = tokens(5, 12, config.vocab);
    let batch = rig.batch(&MicroBatch::pack(&config, &[Sequence::unlabelled(ids.clone())]).unwrap());
    let whole = rig.slice.forward(&mut rig.runner, &batch, &rig.adapters, Input::Tokens).unwrap();
    let whole = rig.rows(&whole, &batch);

    let mut cache = KvCache::new(&mut rig.runner, &rig.slice, 12).unwrap();
    assert!(cache.is_empty() && cache.capacity() == 12);
    let mut run = |cache: &mut KvCache, ids: &[u32]| {
        let h = rig.slice.forward_cached(&mut rig.runner, &rig.adapters, cache, CachedInput::Tokens(ids)).unwrap();
        rig.runner.read_f32(&h).unwrap()
    };
    let mut rows = Vec::new();
    for chunk in [0..5, 5..6, 6..7, 7..11] {
        rows.extend(run(&mut cache, &ids[chunk]));
    }
    assert_eq!(cache.len(), 11);
    // Another ending first, then the real one in its place.
    run(&mut cache, &[0]);
    cache.truncate(11);
    rows.extend(run(&mut cache, &ids[11..]));
    assert_eq!(bits(&rows), bits(&whole));
    let full = rig.slice.forward_cached(&mut rig.runner, &rig.adapters, &mut cache, CachedInput::Tokens(&[1]));
    assert!(full.unwrap_err().to_string().contains("cache of 12"));
}

#[test]
fn slices_decode_in_turn() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    let device = reference();
    let mut importer = Importer::new();
    let mut part = |spec: &SliceSpec| Rig::with(Runner::new(device.clone()).unwrap(), &mut importer, &source, spec, &host);
    let mut whole = part(&SliceSpec::whole(&config));
    let mut first = part(&SliceSpec::new(&config, 0..1));
    let mut second = part(&SliceSpec::new(&config, 1..4));
    let mut caches = [&mut whole, &mut first, &mut second].map(|r| KvCache::new(&mut r.runner, &r.slice, 10).unwrap());
    for ids in [&[3, 1, 4, 1][..], &[5], &[9]] {
        let expected = whole.slice.forward_cached(&mut whole.runner, &whole.adapters, &mut caches[0], CachedInput::Tokens(ids)).unwrap();
        let h = first.slice.forward_cached(&mut first.runner, &first.adapters, &mut caches[1], CachedInput::Tokens(ids)).unwrap();
        let h = first.runner.read_f32(&h).unwrap();
        let h = second.runner.constant_f32(ids.len(), config.hidden, &h).unwrap();
        let found = second.slice.forward_cached(&mut second.runner, &second.adapters, &mut caches[2], CachedInput::Hidden(&h)).unwrap();
        assert_eq!(bits(&second.runner.read_f32(&found).unwrap()), bits(&whole.runner.read_f32(&expected).unwrap()));
        let last = found.rows(ids.len() - 1, 1);
        let logits = second.slice.logits(&mut second.runner, &last).unwrap();
        let best = second.runner.temp(zofo_hal::DType::U32, 1, 1).unwrap();
        second.runner.run(ArgMax::new(logits, best.clone())).unwrap();
        assert!((second.runner.read_u32(&best).unwrap()[0] as usize) < config.vocab);
    }
}

#[test]
fn scores_of_candidates_are_logits() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    let mut rig = Rig::new(reference(), &source, &SliceSpec::whole(&config), &host);
    let host_batch = packed(&config, &[7, 5]);
    let batch = rig.batch(&host_batch);
    let h = rig.slice.forward(&mut rig.runner, &batch, &rig.adapters, Input::Tokens).unwrap();
    let logits = rig.slice.logits(&mut rig.runner, &h.rows(0, 12)).unwrap();
    let logits = rig.runner.read_f32(&logits).unwrap();
    let rows = rig.runner.constant_u32(1, 2, &host_batch.last_rows()).unwrap();
    let candidates = rig.runner.constant_u32(1, 3, &[4, 39, 0]).unwrap();
    let scores = rig.slice.candidate_scores(&mut rig.runner, &batch, &h, &rows, &candidates).unwrap();
    let scores = rig.runner.read_f32(&scores).unwrap();
    let expected: Vec<f32> = [6, 11].iter().flat_map(|r| [4, 39, 0].map(|c| logits[r * config.vocab + c])).collect();
    assert!(relative(&scores, &expected) < 1e-6);
}
