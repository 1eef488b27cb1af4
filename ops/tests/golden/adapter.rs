//! A PEFT adapter on stories260K: losses and logits of a float64 forward pass.

use zofo_hal::op::Copies;
use zofo_ops::{
    batch::{MicroBatch, Sequence},
    files::read_adapter,
    llama::{Input, SliceSpec},
    lora::HostAdapter,
};

use crate::{common::*, material};

#[test]
fn base_and_adapted_model_give_the_golden_losses_and_logits() {
    let folder = zofo_testkit::shared_or_skip!("models/stories260K");
    let source = material::model(&folder.join("hf"));
    let config = source.config().clone();
    let golden = material::json(&folder.join("peft_adapter_r4/golden.json"));
    let adapter = read_adapter(&folder.join("peft_adapter_r4"), &config).unwrap();
    let host = HostAdapter::from(&adapter);
    assert!(host.modules.values().all(|m| f64::from(m.scale) == golden["scale"].as_f64().unwrap()));
    let ids: Vec<u32> = material::floats(&golden["prompt_ids"]).iter().map(|x| *x as u32).collect();
    let batch = MicroBatch::pack(&config, &[Sequence::predicting(ids, 0)]).unwrap();
    for device in devices() {
        for (name, host) in [("base", HostAdapter::default()), ("adapter", host.clone())] {
            let mut rig = Rig::new(device.clone(), &source, &SliceSpec::whole(&config), &host);
            let batch = rig.batch(&batch);
            let h = rig.slice.forward(&mut rig.runner, &batch, &rig.adapters, Input::Tokens).unwrap();
            let loss = rig.slice.loss(&mut rig.runner, &batch, &h, Copies::BASE, false).unwrap().sums(&mut rig.runner).unwrap()[0];
            let expected = golden[format!("{name}_mean_nll")].as_f64().unwrap();
            // A logit of size up to 18 (the loss is a difference of such) after some 50 f32 roundings of relative size 2^-24: 18 * 50 * 2^-24
            // is 5e-5 if all go one way, their root 8e-6.
            let loss = loss / batch.labels() as f64;
            assert!((loss - expected).abs() < 1e-5, "{name}: {loss}, golden {expected}");
            let logits = rig.slice.logits(&mut rig.runner, &h.rows(batch.rows() - 1, 1)).unwrap();
            let logits = rig.runner.read_f32(&logits).unwrap();
            let expected = material::floats(&golden[format!("{name}_last_logits")]);
            let worst = logits.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(worst < 5e-5, "{name}: {worst}");
        }
    }
}
