//! stories260K in every type that its GGUF files come in: mean loss on the prompt of the adapter's golden file.

use zofo_hal::{op::Copies, perturb::Projection};
use zofo_ops::{
    batch::{MicroBatch, Sequence},
    files::GgufModel,
    llama::{Input, ParamName, SliceSpec, WeightSource},
    lora::HostAdapter,
};

use crate::{common::*, material};

#[test]
fn every_type_gives_its_golden_loss() {
    let folder = zofo_testkit::shared_or_skip!("models/stories260K");
    let golden = material::json(&folder.join("peft_adapter_r4/golden.json"));
    let ids: Vec<u32> = material::floats(&golden["prompt_ids"]).iter().map(|x| *x as u32).collect();
    for (name, expected) in
        [("F32", 0.1001), ("F16", 0.1001), ("Q8_0", 0.0978), ("Q5_1", 0.1104), ("Q5_0", 0.0984), ("Q4_1", 0.1404), ("Q4_0", 0.1376)]
    {
        let source = GgufModel::open(&folder.join(format!("gguf/stories260K-{name}.gguf"))).unwrap();
        let config = source.config().clone();
        let stored = source.require(ParamName::Weight(0, Projection::V)).unwrap().dtype;
        assert_eq!(stored.to_string(), name.to_lowercase());
        let batch = MicroBatch::pack(&config, &[Sequence::predicting(ids.clone(), 0)]).unwrap();
        for device in devices() {
            let mut rig = Rig::new(device.clone(), &source, &SliceSpec::whole(&config), &HostAdapter::default());
            let batch = rig.batch(&batch);
            let h = rig.slice.forward(&mut rig.runner, &batch, &rig.adapters, Input::Tokens).unwrap();
            let loss = rig.slice.loss(&mut rig.runner, &batch, &h, Copies::BASE, false).unwrap().sums(&mut rig.runner).unwrap()[0];
            let loss = loss / batch.labels() as f64;
            // The golden values have four digits, so half of the last one is theirs; the forward pass adds 1e-5 as in the adapter's test.
            assert!((loss - expected).abs() < 6e-5, "{name}: {loss}, golden {expected}");
        }
    }
}
