//! A tiny random model, data for it, and pipelines over the reference device.
#![allow(dead_code)]

use std::sync::Arc;
use zofo_hal::{Allow, DType, DeviceRef, Restricted, perturb::Projection, reference::Reference};
use zofo_ops::{
    batch::Sequence,
    llama::MemoryModel,
    lora::{HostAdapter, LoraSpec},
    optim::Rule,
};
use zofo_pipeline::{
    cluster::{Cluster, Kind},
    estimator::{EstimatorName, EstimatorSpec},
    executor::{SharedSource, StageDevice},
    plan::{Plan, PlanRequest},
    train::{OptimiserSpec, Session, TrainSpec},
};

pub fn model() -> SharedSource {
    Arc::new(MemoryModel::random(MemoryModel::tiny_config(), 11).unwrap())
}

/// Ragged sequences with every token but the first as a target.
pub fn batch(sequences: usize, salt: u32) -> Vec<Sequence> {
    (0..sequences as u32)
        .map(|s| {
            let n = 5 + (s * 3 + salt) % 7;
            Sequence::predicting((0..n).map(|i| (7 * i * i + 13 * s + 5 * salt + 3) % 40).collect(), 0)
        })
        .collect()
}

pub fn lora(targets: &[Projection]) -> LoraSpec {
    LoraSpec::new(3, 6.0, targets.iter().copied().collect::<zofo_ops::lora::Targets>())
}

pub const ALL: [Projection; 7] = Projection::ALL;
pub const QV: [Projection; 2] = [Projection::Q, Projection::V];

/// One reference device of one memory space for each entry; bp-free ones offer forward ops alone.
pub fn devices(cluster: &Cluster, compute: DType, exact: bool) -> Vec<StageDevice> {
    let host: DeviceRef = Reference::new();
    let device = |kind, name: &str| -> DeviceRef {
        match kind {
            Kind::BpFree if !exact => Restricted::new(host.clone(), Allow::Forward, name),
            _ => host.clone(),
        }
    };
    cluster.devices.iter().map(|d| StageDevice::new(device(d.kind, &d.name), compute)).collect()
}

pub fn plan(cluster: &Cluster, micro_batches: u32, e: &EstimatorSpec) -> Plan {
    PlanRequest::new(cluster, model().config().layers, micro_batches, e).plan().unwrap()
}

/// Plain gradient descent everywhere: with learning rate 1 an update is minus the gradient or its estimate.
pub fn sgd(lora: LoraSpec, e: &EstimatorSpec) -> TrainSpec {
    let mut spec = TrainSpec::new(lora, e.clone(), 1.0, 1.0);
    spec.first_order = OptimiserSpec::new(Rule::SGD, 1.0);
    spec.zeroth_order = OptimiserSpec::new(Rule::SGD, 1.0);
    spec.clip = 0.0;
    spec.seed = 5;
    spec
}

/// Adapters whose B is not 0, so that every gradient is.
pub fn warm(lora: &LoraSpec) -> HostAdapter {
    let m = model();
    let mut adapter = HostAdapter::init(m.config(), 0..m.config().layers, lora, 3).unwrap();
    for ((layer, p), module) in &mut adapter.modules {
        let phase = *layer as f32 + *p as usize as f32 * 0.3;
        module.b.iter_mut().enumerate().for_each(|(i, b)| *b = 0.1 * (0.37 * i as f32 + phase).sin());
    }
    adapter
}

pub fn session(cluster: &Cluster, micro_batches: u32, spec: TrainSpec) -> Session {
    let exact = spec.estimator.name == EstimatorName::Oracle;
    let plan = plan(cluster, micro_batches, &spec.estimator);
    let start = warm(&spec.lora);
    Session::start_from(plan, devices(cluster, DType::F32, exact), model(), spec, start).unwrap()
}

/// Minus the change of some layers' factors: the gradient or its estimate, with SGD at learning rate 1.
pub fn change(before: &HostAdapter, after: &HostAdapter, layers: std::ops::Range<usize>) -> Vec<f64> {
    let (before, after) = (before.layers(layers.clone()), after.layers(layers));
    let flat = |a: &HostAdapter| a.modules.values().flat_map(|m| m.a.iter().chain(&m.b).copied().collect::<Vec<_>>()).collect::<Vec<f32>>();
    flat(&before).iter().zip(flat(&after)).map(|(b, a)| f64::from(*b) - f64::from(a)).collect()
}

/// What a session planned is what it holds after its first step, and ever after.
pub fn holds_what_it_planned(mut s: Session, steps: &[Vec<Sequence>], what: &str) {
    let planned = s.planned_bytes().unwrap() as f64;
    let held: Vec<u64> = steps.iter().map(|b| s.step(b).map(|_| s.device_bytes()).unwrap()).collect();
    assert!((held[0] as f64 / planned - 1.0).abs() < 0.05, "{what}: {planned} planned, {held:?} held");
    assert!(held.iter().all(|h| *h == held[0]), "{what}: {held:?}");
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub fn cosine(a: &[f64], b: &[f64]) -> f64 {
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
