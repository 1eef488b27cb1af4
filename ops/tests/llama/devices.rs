//! The same model on devices that lack, delay or obstruct.

use zofo_hal::{
    Allow, DeviceRef, Restricted,
    op::Copies,
    perturb::Distribution,
    reference::{Hostile, HostileConfig},
};
use zofo_ops::{
    llama::{Factors, Input, WeightSource},
    lora::{HostAdapter, Targets},
    optim::{Optimiser, Rule, ZoStep},
};

use crate::common::*;

struct Outcome {
    decomposed: u64,
    loss: f64,
    grads: Vec<f32>,
    tangents: Vec<f64>,
    adapter: HostAdapter,
}

/// A first-order step, tangents of a perturbed pass, a zeroth-order step.
fn everything(device: DeviceRef) -> Outcome {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, Targets::ALL));
    let mut rig = Rig::whole(device, &source, &host);
    let batch = rig.batch(&packed(&config, &[7, 5]));
    let loss = rig.forward_backward(&batch);
    let grads = rig.grads().into_iter().flat_map(|g| g.1).collect();
    let params = directions(0.0);
    let noise = perturbation(&mut rig, &params, Factors::Ab);
    let copies = Copies::tangent(2);
    let h = rig.slice.forward_copies(&mut rig.runner, &batch, &rig.adapters, Input::Tokens, copies, Some(&noise), None).unwrap();
    let tangents = rig.slice.loss(&mut rig.runner, &batch, &h, copies, false).unwrap().sums(&mut rig.runner).unwrap();
    let mut zo = Optimiser::zeroth_order(&mut rig.runner, &rig.adapters, Rule::ADAMW, Factors::Ab).unwrap();
    let step = ZoStep {
        coefficients: &[0.25, -0.5],
        directions: &[params.direction, params.direction + 1],
        noise: params,
        distribution: Distribution::Gaussian,
    };
    zo.step_zo(&mut rig.runner, 1e-2, &step).unwrap();
    let adapter = rig.adapters.to_host(&mut rig.runner).unwrap();
    rig.runner.synchronize().unwrap();
    Outcome { decomposed: rig.runner.stats().decomposed, loss, grads, tangents, adapter }
}

/// Primitives round every intermediate to f32, the reference device rounds once per op: some 100 roundings apart, 100 * 2^-24 = 6e-6.
fn close(found: &Outcome, expected: &Outcome) {
    assert!((found.loss - expected.loss).abs() < 6e-6 * expected.loss);
    assert!(relative(&found.grads, &expected.grads) < 6e-6, "{}", relative(&found.grads, &expected.grads));
    let scale = expected.tangents.iter().fold(0.0f64, |m, t| m.max(t.abs()));
    for (a, b) in found.tangents.iter().zip(&expected.tangents) {
        assert!((a - b).abs() < 6e-5 * scale, "{:?}, {:?}", found.tangents, expected.tangents);
    }
    // Updates are the same bits everywhere.
    assert_eq!(found.adapter, expected.adapter);
}

#[test]
fn primitives_are_enough() {
    let found = everything(Restricted::new(reference(), Allow::Primitives, "primitives alone"));
    assert!(found.decomposed > 200, "{}", found.decomposed);
    close(&found, &everything(reference()));
}

#[test]
fn a_forward_only_device_trains_through_decompositions() {
    let found = everything(Restricted::new(reference(), Allow::Forward, "forward alone"));
    assert!((20..100).contains(&found.decomposed), "{}", found.decomposed);
    close(&found, &everything(reference()));
}

/// The SIMD backend sums in f32, in another order.
#[test]
fn a_cpu_agrees_with_the_reference() {
    let found = everything(cpu());
    assert_eq!(found.decomposed, 0);
    close(&found, &everything(reference()));
}

#[test]
fn a_cpu_without_backward_ops_agrees_too() {
    close(&everything(Restricted::new(cpu(), Allow::Forward, "npu0")), &everything(reference()));
    close(&everything(Restricted::new(cpu(), Allow::Primitives, "npu1")), &everything(reference()));
}

/// The same kernels, late, in another thread, in buffers nobody else can see.
#[test]
fn a_hostile_device_gives_the_same_bits() {
    let (found, expected) = (everything(Hostile::new(HostileConfig::seeded(5))), everything(reference()));
    assert_eq!(found.loss.to_bits(), expected.loss.to_bits());
    assert_eq!(bits(&found.grads), bits(&expected.grads));
    assert_eq!(found.tangents, expected.tangents);
    assert_eq!(found.adapter, expected.adapter);
}

/// An embedding that is no head as well is looked up by a product where the device has no look-up.
#[test]
fn untied_embeddings_run_on_primitives() {
    let config = zofo_ops::config::ModelConfig { tie_word_embeddings: false, ..zofo_ops::llama::MemoryModel::tiny_config() };
    let source = zofo_ops::llama::MemoryModel::random(config, 4).unwrap();
    let config = source.config().clone();
    let loss = |device: DeviceRef| {
        let mut rig = Rig::whole(device, &source, &adapter(&config, &spec(2, Targets::ALL)));
        let batch = rig.batch(&packed(&config, &[7, 5]));
        rig.forward_backward(&batch)
    };
    let (found, expected) = (loss(Restricted::new(reference(), Allow::Primitives, "primitives alone")), loss(reference()));
    assert!((found - expected).abs() < 6e-6 * expected, "{found}, {expected}");
}
