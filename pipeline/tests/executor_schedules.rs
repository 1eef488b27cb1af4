//! Every order of work that can train gives what a plain pipeline of the same layers gives.

mod common;

use common::*;
use zofo_hal::DType;
use zofo_ops::{batch::Capacity, lora::HostAdapter};
use zofo_pipeline::{
    cluster::Cluster,
    estimator::{EstimatorName, EstimatorSpec},
    order::ScheduleName,
    plan::{Plan, PlanRequest},
    train::{Session, TrainSpec, capacity_of},
};

fn estimator() -> EstimatorSpec {
    EstimatorSpec::new(EstimatorName::CutTangent, 1)
}

fn planned(devices: usize, micro_batches: u32, name: ScheduleName) -> Plan {
    let e = estimator();
    let cluster = Cluster::virtual_cpus(0, devices);
    let mut request = PlanRequest::new(&cluster, 4, micro_batches, &e);
    request.schedule = Some(name);
    request.plan().unwrap()
}

/// AdamW, and a norm that clips.
fn spec() -> TrainSpec {
    let mut spec = TrainSpec::new(lora(&ALL), estimator(), 1e-2, 1e-2);
    spec.clip = 0.05;
    spec
}

fn start(plan: Plan, spec: TrainSpec) -> Session {
    let cluster = Cluster::virtual_cpus(0, plan.workers().len());
    let adapter = warm(&spec.lora);
    Session::start_from(plan, devices(&cluster, DType::F32, false), model(), spec, adapter).unwrap()
}

/// Losses and norms of three steps, and the adapters after them.
fn three_steps(plan: Plan, spec: TrainSpec) -> (Vec<(u64, u64)>, HostAdapter) {
    let mut s = start(plan, spec);
    let step = |i| {
        let report = s.step(&batch(7, i)).unwrap();
        let norm = report.gradient_norm.unwrap();
        assert!(norm > 0.05, "{norm} is not clipped");
        (report.loss.to_bits(), norm.to_bits())
    };
    let steps = (0..3).map(step).collect();
    (steps, s.adapter().unwrap())
}

/// Stages accumulate the gradients of their micro-batches in ascending order whatever the order of work, so not a bit differs.
#[test]
fn several_stages_on_a_device_change_no_bit() {
    for micro_batches in [2, 3, 4, 5] {
        let expected = three_steps(planned(2, micro_batches, ScheduleName::Gpipe), spec());
        let plan = planned(2, micro_batches, ScheduleName::Interleaved);
        assert_eq!(plan.stages.iter().map(|s| s.layers.clone()).collect::<Vec<_>>(), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(plan.workers(), ["gpu0", "gpu1"]);
        assert_eq!(plan.schedule.placement, [0, 1, 0, 1]);
        assert_eq!(three_steps(plan, spec()), expected, "{micro_batches} micro-batches");
    }
}

/// A device with one layer has one stage.
#[test]
fn a_device_has_as_many_stages_as_layers_allow() {
    let plan = planned(4, 3, ScheduleName::Interleaved);
    assert_eq!(plan.schedule.placement, [0, 1, 2, 3]);
    assert_eq!(three_steps(plan, spec()), three_steps(planned(4, 3, ScheduleName::Gpipe), spec()));
}

/// The two parts of a backward pass add up to the whole one.
#[test]
fn backward_passes_in_two_parts_change_no_bit() {
    for (devices, micro_batches) in [(2, 3), (3, 5), (4, 4)] {
        let expected = three_steps(planned(devices, micro_batches, ScheduleName::Gpipe), spec());
        for recompute in [false, true] {
            let mut spec = spec();
            spec.recompute = recompute;
            let found = three_steps(planned(devices, micro_batches, ScheduleName::ZbH1), spec);
            assert_eq!(found, expected, "{devices} devices, {micro_batches} micro-batches, {recompute}");
        }
    }
}

/// What a rehearsal counts is what a worker with several stages, or with weight gradients that wait, then takes.
#[test]
fn memory_is_planned() {
    let all = [ScheduleName::Interleaved, ScheduleName::ZbH1];
    for (name, recompute) in all.into_iter().flat_map(|n| [(n, false), (n, true)]) {
        let mut spec = spec();
        let steps: Vec<_> = (0..3).map(|i| batch(4 + i as usize, i)).collect();
        spec.capacity = steps.iter().map(|b| capacity_of(b, 3).unwrap()).reduce(Capacity::max);
        spec.recompute = recompute;
        let mut s = start(planned(2, 3, name), spec);
        let planned = s.planned_bytes().unwrap() as f64;
        let held: Vec<u64> = steps.iter().map(|b| s.step(b).map(|_| s.device_bytes()).unwrap()).collect();
        assert!((held[0] as f64 / planned - 1.0).abs() < 0.05, "{name:?}, {recompute}: {planned} planned, {held:?} held");
        assert!(held.iter().all(|h| *h == held[0]), "{name:?}, {recompute}: {held:?}");
    }
}
