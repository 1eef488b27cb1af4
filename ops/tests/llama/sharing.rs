//! Weights are held once per memory.

use zofo_hal::{Allow, DType, DeviceRef, Restricted, Uses};
use zofo_ops::{
    Runner,
    llama::{Importer, Input, MemoryModel, ModelConfig, ParamName, Slice, SliceSpec, WeightSource},
    lora::{HostAdapter, Targets},
};

use crate::common::*;

#[test]
fn slices_of_one_memory_share_weights() {
    let source = tiny();
    let config = source.config().clone();
    let device = reference();
    let mut importer = Importer::new();
    let first = SliceSpec::new(&config, 0..4);
    let mut runner = Runner::new(device.clone()).unwrap();
    Slice::load(&mut runner, &mut importer, &source, &first).unwrap();
    let bytes = importer.bytes();
    Slice::load(&mut Runner::new(device).unwrap(), &mut importer, &source, &first).unwrap();
    assert_eq!(importer.bytes(), bytes);
    Slice::load(&mut Runner::new(reference()).unwrap(), &mut importer, &source, &first).unwrap();
    assert_eq!(importer.bytes(), 2 * bytes, "another device has a memory of its own");
}

#[test]
fn a_device_with_ops_taken_away_shares_weights_with_the_one_underneath() {
    let source = tiny();
    let spec = SliceSpec::whole(source.config());
    let device = reference();
    let mut importer = Importer::new();
    let mut load = |device: DeviceRef| {
        Slice::load(&mut Runner::new(device).unwrap(), &mut importer, &source, &spec).unwrap();
        importer.bytes()
    };
    let bytes = load(device.clone());
    assert_eq!(load(Restricted::new(device, Allow::Forward, "npu0")), bytes);
}

#[test]
fn a_tied_embedding_is_imported_once_for_all_its_uses() {
    let source = tiny();
    let config = source.config().clone();
    let device = reference();
    let parts = [SliceSpec::new(&config, 0..2), SliceSpec::new(&config, 2..4).with_backward()];
    let mut importer = Importer::new();
    parts.iter().for_each(|p| p.announce(&mut importer, &device, &config));
    for part in &parts {
        Slice::load(&mut Runner::new(device.clone()).unwrap(), &mut importer, &source, part).unwrap();
    }
    let mut get = |uses| importer.weight(&device, &source, ParamName::Embedding, uses, DType::F32).unwrap();
    let weight = get(Uses { gather: true, ..Uses::default() });
    assert_eq!(weight.spec().uses, Uses::ALL);
    assert!(std::sync::Arc::ptr_eq(&weight, &get(Uses::TRAINING)));
}

#[test]
fn weights_take_the_compute_type_where_it_is_smaller() {
    let source = tiny();
    let device = reference();
    let name = ParamName::Weight(0, zofo_hal::perturb::Projection::Q);
    let dtype = |source: &MemoryModel, compute| {
        let weight = Importer::new().weight(&device, source, name, Uses::FORWARD, compute).unwrap();
        weight.spec().dtype
    };
    assert_eq!(dtype(&source, DType::F32), DType::F32);
    assert_eq!(dtype(&source, DType::Bf16), DType::Bf16);
    let half = source.rounded(DType::Bf16).unwrap();
    assert_eq!(dtype(&half, DType::F32), DType::Bf16);
    assert_eq!(dtype(&half, DType::F16), DType::Bf16);
}

/// Activations rounded to b bits lose 2^-b each; four layers of about ten roundings along the residual stream.
#[test]
fn sixteen_bit_activations_are_close() {
    let config = ModelConfig { qkv_bias: true, ..MemoryModel::tiny_config() };
    let source = model(config.clone());
    let host = adapter(&config, &spec(2, Targets::ALL));
    let run = |compute: DType| {
        let spec = SliceSpec::whole(&config).with_backward().with_compute(compute);
        let mut rig = Rig::new(reference(), &source, &spec, &host);
        let batch = rig.batch(&packed(&config, &[7, 5]));
        let loss = rig.forward_backward(&batch);
        (loss, rig.grads().into_iter().flat_map(|g| g.1).collect::<Vec<f32>>())
    };
    let (loss, grads) = run(DType::F32);
    for (compute, tolerance) in [(DType::F16, 40.0 / 2048.0), (DType::Bf16, 40.0 / 256.0)] {
        let (found, found_grads) = run(compute);
        assert!((found - loss).abs() / loss < tolerance, "{compute}: {found}, {loss}");
        assert!(found != loss);
        assert!(relative(&found_grads, &grads) < tolerance, "{compute}: {}", relative(&found_grads, &grads));
    }
}

#[test]
fn adapters_come_back_as_they_went() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(3, "q,down".parse().unwrap()));
    let mut rig = Rig::new(reference(), &source, &SliceSpec::new(&config, 1..3), &host);
    assert_eq!(rig.adapters.to_host(&mut rig.runner).unwrap(), host.layers(1..3));
    let other = HostAdapter::init(&config, 0..4, &spec(3, "q,down".parse().unwrap()), 77).unwrap();
    rig.set(&other);
    assert_eq!(rig.adapters.to_host(&mut rig.runner).unwrap(), other.layers(1..3));
    let narrow = HostAdapter::init(&config, 0..4, &spec(2, "q,down".parse().unwrap()), 77).unwrap();
    assert!(rig.adapters.restore(&mut rig.runner, &narrow).unwrap_err().to_string().contains("layer 1, q_proj"));
}

#[test]
fn a_new_adapter_changes_nothing() {
    let source = tiny();
    let config = source.config().clone();
    let host = HostAdapter::init(&config, 0..4, &spec(3, Targets::ALL), 1).unwrap();
    let mut rig = Rig::new(reference(), &source, &SliceSpec::whole(&config), &host);
    let batch = rig.batch(&packed(&config, &[7, 5]));
    let adapted = rig.slice.forward(&mut rig.runner, &batch, &rig.adapters, Input::Tokens).unwrap();
    let base = rig.slice.forward(&mut rig.runner, &batch, &zofo_ops::lora::Adapters::none(), Input::Tokens).unwrap();
    let (adapted, base) = (rig.rows(&adapted, &batch), rig.rows(&base, &batch));
    assert_eq!(bits(&adapted), bits(&base));
}

#[test]
fn adapters_of_files_are_the_same_adapters() {
    let config = MemoryModel::tiny_config();
    let lora = spec(3, "q,o,down".parse().unwrap());
    let host = adapter(&config, &lora);
    let files = host.to_files(&config, &lora).unwrap();
    assert_eq!(HostAdapter::from(&files), host);
    let folder = tempfile::tempdir().unwrap();
    zofo_ops::files::write_adapter(folder.path(), &files, "tiny").unwrap();
    let read = zofo_ops::files::read_adapter(folder.path(), &config).unwrap();
    assert_eq!(HostAdapter::from(&read), host);
}
