//! What is refused, and how.

use zofo_hal::{DType, ErrorKind, op::Copies};
use zofo_ops::{
    Runner,
    batch::{Capacity, DeviceBatch},
    llama::{Importer, Input, KvCache, MemoryModel, ModelConfig, ParamName, Slice, SliceSpec, WeightSource},
    lora::{Adapters, LoraSpec, Targets},
};

use crate::common::*;

fn refused<T>(result: zofo_hal::Result<T>, kind: ErrorKind, part: &str) {
    let e = result.err().expect("this must be refused");
    assert_eq!(*e.kind(), kind, "{e}");
    assert!(e.to_string().contains(part), "{e}");
}

#[test]
fn slices_that_no_model_has() {
    let source = tiny();
    let config = source.config().clone();
    let load = |spec: SliceSpec| Slice::load(&mut Runner::new(reference()).unwrap(), &mut Importer::new(), &source, &spec);
    let whole = SliceSpec::whole(&config);
    refused(load(SliceSpec { layers: 1..5, ..whole.clone() }), ErrorKind::InvalidArgument, "layers 1..5");
    refused(load(SliceSpec { layers: 1..4, ..whole.clone() }), ErrorKind::InvalidArgument, "cannot start from tokens");
    refused(load(SliceSpec { layers: 0..3, ..whole.clone() }), ErrorKind::InvalidArgument, "end in the head");
    refused(load(SliceSpec { positions: 65, ..whole.clone() }), ErrorKind::InvalidArgument, "up to 65 tokens");
    refused(load(SliceSpec { compute: DType::U32, ..whole }), ErrorKind::InvalidArgument, "u32");
}

#[test]
fn parameters_that_are_missing_or_misshapen() {
    let mut source = tiny();
    let config = source.config().clone();
    let load = |source: &MemoryModel| {
        Slice::load(&mut Runner::new(reference()).unwrap(), &mut Importer::new(), source, &SliceSpec::whole(&config))
    };
    source.set(ParamName::FinalNorm, DType::F32, vec![0; 8]);
    refused(load(&source), ErrorKind::Format, "model.norm.weight");
    refused(load(&MemoryModel::new(config.clone())), ErrorKind::Format, "model.layers.0");
    let wrong = ModelConfig { tie_word_embeddings: false, ..config.clone() };
    let mut untied = MemoryModel::new(wrong.clone());
    for name in ParamName::all(&config) {
        untied.set_f32(name, &tiny().require(name).unwrap().to_f32().unwrap());
    }
    refused(load(&untied), ErrorKind::Format, "lm_head.weight");
}

#[test]
fn batches_that_do_not_suit() {
    let source = tiny();
    let config = source.config().clone();
    let mut rig = Rig::new(reference(), &source, &SliceSpec { positions: 8, ..SliceSpec::whole(&config) }, &Default::default());
    let batch = rig.batch(&packed(&config, &[9]));
    let run = |rig: &mut Rig, batch: &DeviceBatch, input: Input<'_>| rig.slice.forward(&mut rig.runner, batch, &rig.adapters, input);
    refused(run(&mut rig, &batch, Input::Tokens), ErrorKind::InvalidArgument, "9 tokens is longer than the 8");
    let batch = rig.batch(&packed(&config, &[8]));
    let narrow = rig.runner.temp(DType::F32, 16, 8).unwrap();
    refused(run(&mut rig, &batch, Input::Hidden(&narrow)), ErrorKind::InvalidArgument, "expected [16, 16]");
    let mut small = DeviceBatch::new(&mut rig.runner, Capacity { rows: 4, sequences: 1, labels: 4 }).unwrap();
    refused(small.upload(&mut rig.runner, &packed(&config, &[8]), 1.0), ErrorKind::InvalidArgument, "8 rows");
    refused(KvCache::new(&mut rig.runner, &rig.slice, 9), ErrorKind::InvalidArgument, "cache of 9");
}

#[test]
fn what_a_slice_was_not_loaded_for() {
    let source = tiny();
    let config = source.config().clone();
    let mut rig = Rig::new(reference(), &source, &SliceSpec::new(&config, 1..3), &Default::default());
    let batch = rig.batch(&packed(&config, &[8]));
    let h = rig.runner.constant_f32(16, 16, &[0.5; 256]).unwrap();
    let (runner, slice, none) = (&mut rig.runner, &rig.slice, Adapters::none());
    refused(slice.forward(runner, &batch, &none, Input::Tokens), ErrorKind::InvalidArgument, "no embedding");
    refused(slice.forward_saving(runner, &batch, &none, Input::Hidden(&h), true), ErrorKind::InvalidArgument, "backward");
    refused(slice.loss(runner, &batch, &h, Copies::BASE, false), ErrorKind::InvalidArgument, "without the head");
    refused(slice.exit_losses(runner, &batch, &h, Copies::BASE), ErrorKind::InvalidArgument, "exit head");
    refused(slice.logits(runner, &h), ErrorKind::InvalidArgument, "without the head");
    refused(Adapters::init(runner, slice, &LoraSpec::new(0, 1.0, Targets::ALL), 1), ErrorKind::InvalidArgument, "rank is 0");
}
