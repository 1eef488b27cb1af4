//! LoRA training of stories260K against PyTorch + PEFT in float64: loss, gradients, slopes, one-sided differences, ten steps of SGD and AdamW.

use serde_json::Value;
use zofo_hal::{
    DeviceRef,
    perturb::{Factor, TensorId},
};
use zofo_ops::{
    batch::{DeviceBatch, MicroBatch, Sequence},
    files::ModelFiles,
    llama::{ModelConfig, SliceSpec},
    lora::{HostAdapter, LoraSpec, Targets},
    optim::{Optimiser, Rule},
};

use crate::{common::*, material};

/// The golden's token recipe.
fn batch(config: &ModelConfig, golden: &Value) -> MicroBatch {
    let number = |name: &str| golden[name].as_u64().unwrap() as usize;
    let (b, t) = (number("B"), number("T"));
    let mut state = 42u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % config.vocab as u64) as u32
    };
    let tokens: Vec<u32> = (0..b * t).map(|_| next()).collect();
    let first: Vec<u32> = material::floats(&golden["first16"]).iter().map(|x| *x as u32).collect();
    assert_eq!(tokens[..16], first);
    let sequences: Vec<_> = tokens.chunks(t).map(|s| Sequence::predicting(s.to_vec(), 0)).collect();
    let batch = MicroBatch::pack(config, &sequences).unwrap();
    assert_eq!(batch.labels(), b * (t - 1));
    batch
}

pub fn each(host: &mut HostAdapter, mut f: impl FnMut(Factor, usize, &mut f32)) {
    for m in host.modules.values_mut() {
        m.a.iter_mut().enumerate().for_each(|(k, v)| f(Factor::A, k, v));
        m.b.iter_mut().enumerate().for_each(|(k, v)| f(Factor::B, k, v));
    }
}

fn start(config: &ModelConfig, golden: &Value, targets: Targets) -> HostAdapter {
    let rank = golden["rank"].as_u64().unwrap() as usize;
    let lora = LoraSpec::new(rank, golden["alpha"].as_f64().unwrap() as f32, targets);
    let mut host = HostAdapter::init(config, 0..config.layers, &lora, 0).unwrap();
    each(&mut host, sine);
    host
}

/// The values that the goldens' adapters start from.
pub fn sine(factor: Factor, k: usize, v: &mut f32) {
    let phase = if factor == Factor::A { 1.0 } else { 2.0 };
    *v = (0.02 * (0.37 * k as f64 + phase).sin()) as f32;
}

fn golden_z(factor: Factor, k: usize) -> f64 {
    (0.61 * k as f64 + if factor == Factor::A { 0.5 } else { 1.5 }).cos()
}

pub fn peft_name(id: TensorId) -> String {
    let linear = zofo_ops::llama::linear_name(id.projection());
    let factor = if id.factor() == Factor::A { "A" } else { "B" };
    format!("base_model.model.model.layers.{}.{}.lora_{factor}.default.weight", id.layer(), linear.hf_path())
}

struct Case<'a> {
    device: DeviceRef,
    source: &'a ModelFiles,
    run: &'a Value,
    host: HostAdapter,
}

impl Case<'_> {
    fn rig(&self, golden: &Value) -> (Rig, DeviceBatch) {
        let spec = SliceSpec::whole(self.source.config()).with_backward();
        let mut rig = Rig::new(self.device.clone(), self.source, &spec, &self.host);
        let batch = batch(self.source.config(), golden);
        let batch = rig.batch(&batch);
        (rig, batch)
    }

    fn number(&self, name: &str) -> f64 {
        self.run[name].as_f64().unwrap()
    }
}

fn cases(test: impl Fn(&Case<'_>, &Value)) {
    let Some(path) = zofo_testkit::shared("goldens/stories260K_lora_golden.json") else { return };
    let Some(folder) = zofo_testkit::shared("models/stories260K/hf") else { return };
    let golden = material::json(&path);
    let source = material::model(&folder);
    for device in devices() {
        for (name, targets) in [("qv", "q,v"), ("all", "all")] {
            let host = start(source.config(), &golden, targets.parse().unwrap());
            let run = &golden["runs"][name];
            assert_eq!(host.parameters() as f64, run["n_trainable"].as_f64().unwrap());
            test(&Case { device: device.clone(), source: &source, run, host }, &golden);
        }
    }
}

/// The golden's own RMSNorm, softmax and RoPE are f32: good to 1e-6 relative. Ours adds some 50 f32 roundings, 2^-24 each, partly cancelling.
const RELATIVE: f64 = 3e-6;

#[test]
fn loss_gradients_and_slope() {
    zofo_testkit::shared_or_skip!("goldens/stories260K_lora_golden.json");
    cases(|case, golden| {
        let (mut rig, batch) = case.rig(golden);
        let loss = rig.forward_backward(&batch);
        let expected = case.number("loss0");
        assert!((loss - expected).abs() < RELATIVE * expected, "{loss}, golden {expected}");
        let grads = rig.grads();
        let mut seen = 0;
        let (mut squares, mut slope) = (0.0, 0.0);
        for (id, g) in &grads {
            squares += norm(g).powi(2);
            slope += g.iter().enumerate().map(|(k, g)| f64::from(*g) * golden_z(id.factor(), k)).sum::<f64>();
            let Some(expected) = case.run["grads"].get(peft_name(*id)) else { continue };
            seen += 1;
            let length = expected["norm"].as_f64().unwrap();
            // Backward about doubles the roundings, and a softmax differentiated at logits of size 18 magnifies errors of the logits.
            let tolerance = 1e-5 * length;
            assert!((norm(g) - length).abs() < tolerance, "{id:?}: {}, golden {length}", norm(g));
            for (a, b) in g.iter().zip(material::floats(&expected["first4"])) {
                assert!((f64::from(*a) - b).abs() < tolerance, "{id:?}: {a}, golden {b}");
            }
        }
        assert_eq!(seen, case.run["grads"].as_object().unwrap().len());
        let length = case.number("grad_norm");
        assert!((squares.sqrt() - length).abs() < 1e-5 * length, "{}, golden {length}", squares.sqrt());
        let z: f64 = grads.iter().map(|(id, g)| (0..g.len()).map(|k| golden_z(id.factor(), k).powi(2)).sum::<f64>()).sum();
        let expected = case.number("directional_derivative");
        // The error of a gradient of relative size 1e-5 in an arbitrary direction, seen along z: its length over the root of the dimension
        // times z's length, which is about the root of half the dimension. Three times that.
        let dimension = case.number("n_trainable");
        let tolerance = 3.0 * 1e-5 * length * (z / dimension).sqrt();
        assert!((slope - expected).abs() < tolerance, "{slope}, golden {expected}");
    });
}

#[test]
fn one_sided_differences() {
    zofo_testkit::shared_or_skip!("goldens/stories260K_lora_golden.json");
    cases(|case, golden| {
        let (mut rig, batch) = case.rig(golden);
        let base = rig.mean_loss(&batch);
        for (eps, expected) in case.run["one_sided_zo"].as_object().unwrap() {
            let (eps, expected) = (eps.parse::<f64>().unwrap(), expected.as_f64().unwrap());
            let mut host = case.host.clone();
            each(&mut host, |factor, k, v| *v = (f64::from(*v) + eps * golden_z(factor, k)) as f32);
            rig.set(&host);
            let found = (rig.mean_loss(&batch) - base) / eps;
            // Both losses carry independent rounding errors, and the golden's do too; over eps. Moved parameters are rounded to f32 as well,
            // which moves the loss by the gradient's length times 2^-25 of theirs: nothing beside it.
            let tolerance = RELATIVE * case.number("loss0") / eps * 0.5;
            assert!((found - expected).abs() < tolerance, "eps {eps}: {found}, golden {expected}, tolerance {tolerance}");
        }
    });
}

fn losses(case: &Case<'_>, golden: &Value, rule: Rule, lr: f64) -> Vec<f64> {
    let (mut rig, batch) = case.rig(golden);
    let mut optimiser = Optimiser::first_order(&mut rig.runner, &rig.adapters, rule).unwrap();
    (0..=10)
        .map(|_| {
            let loss = rig.forward_backward(&batch);
            optimiser.step(&mut rig.runner, lr, 1.0).unwrap();
            loss
        })
        .collect()
}

/// That losses stay within a relative deviation of the golden's, which may grow by a factor per step.
fn check(found: &[f64], expected: &Value, first: f64, growth: f64) {
    let mut tolerance = first;
    for (step, (found, expected)) in found.iter().zip(material::floats(expected)).enumerate() {
        assert!((found - expected).abs() < tolerance * expected, "step {step}: {found}, golden {expected}, tolerance {tolerance:e}");
        tolerance *= growth;
    }
}

/// At this learning rate steps overshoot (losses jump from 10 to 22 and back), and one that overshoots a curvature c multiplies deviations by
/// |1 - lr c|: twice per step is allowed.
#[test]
fn ten_steps_of_sgd() {
    zofo_testkit::shared_or_skip!("goldens/stories260K_lora_golden.json");
    cases(|case, golden| {
        let expected = &case.run["sgd"];
        let found = losses(case, golden, Rule::SGD, expected["lr"].as_f64().unwrap());
        check(&found, &expected["losses"], RELATIVE, 2.0);
    });
}

/// What AdamW's first steps make of rounding: they have the size of the learning rate whatever the gradient's, so an element whose gradient is
/// smaller than its error may step the other way. Gradients are good to 1e-5 of their tensor's norm, which leaves about 0.8e-5 sqrt(m) of a
/// tensor's m elements in doubt, some ten of the 46,240 here. All of them together move the loss by 3.7 in a step, so each of the ten by 1.6e-4
/// if it goes the wrong way, and the ten, of either sign, by 5e-4 of 14.6. It does not add up: later steps correct it.
const FLIPPED: f64 = 4e-5;

#[test]
fn ten_steps_of_adamw() {
    zofo_testkit::shared_or_skip!("goldens/stories260K_lora_golden.json");
    cases(|case, golden| {
        let expected = &case.run["adamw"];
        let number = |name: &str| expected[name].as_f64().unwrap();
        let betas = material::floats(&expected["betas"]);
        let rule = Rule::AdamW { betas: (betas[0], betas[1]), eps: number("eps"), weight_decay: number("weight_decay") };
        let found = losses(case, golden, rule, number("lr"));
        check(&found, &expected["losses"], FLIPPED, 1.0);
    });
}
