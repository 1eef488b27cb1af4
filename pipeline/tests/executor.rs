//! The executor, from outside: what a pipeline computes does not depend on how it is cut.

mod common;

use common::*;
use zofo_hal::{
    DType, DeviceRef, ErrorKind,
    reference::{Fault, Hostile, HostileConfig, Reference},
};
use zofo_ops::{
    Runner,
    batch::Capacity,
    llama::{Factors, Importer, Slice, SliceSpec},
    lora::Adapters,
    optim::{Optimiser, Rule},
};
use zofo_pipeline::{
    cluster::Cluster,
    estimator::{EstimatorName, EstimatorSpec},
    executor::StageDevice,
    order::ScheduleName,
    plan::PlanRequest,
    train::{Session, TrainSpec, capacity_of},
};

fn tangent(q: u32) -> EstimatorSpec {
    EstimatorSpec::new(EstimatorName::CutTangent, q)
}

#[test]
fn first_order_over_k_stages_is_first_order_on_one_bit_for_bit() {
    let e = tangent(1);
    let run = |stages: usize, schedule: Option<ScheduleName>| {
        let cluster = Cluster::virtual_cpus(0, stages);
        let mut request = PlanRequest::new(&cluster, 4, 3, &e);
        request.schedule = schedule;
        let spec = TrainSpec::new(lora(&ALL), e.clone(), 1e-2, 1e-2);
        let start = warm(&spec.lora);
        let mut s = Session::start_from(request.plan().unwrap(), devices(&cluster, DType::F32, false), model(), spec, start).unwrap();
        let losses: Vec<u64> = (0..3).map(|i| s.step(&batch(5, i)).unwrap().loss.to_bits()).collect();
        (losses, s.adapter().unwrap())
    };
    let one = run(1, None);
    for stages in 2..=4 {
        for name in [ScheduleName::Gpipe, ScheduleName::OneFOneB, ScheduleName::Dapple, ScheduleName::HybridopHead] {
            assert_eq!(run(stages, Some(name)), one, "{} over {stages}", name.name());
        }
    }
}

#[test]
fn recomputing_changes_no_bit() {
    for (stages, schedule) in (1..=3).flat_map(|n| [(n, ScheduleName::Gpipe), (n, ScheduleName::HybridopHead)]) {
        let [kept, recomputed] = [false, true].map(|recompute| {
            let (cluster, e) = (Cluster::virtual_cpus(0, stages), tangent(1));
            let mut request = PlanRequest::new(&cluster, 4, 3, &e);
            request.schedule = (stages > 1).then_some(schedule);
            let mut spec = TrainSpec::new(lora(&ALL), e.clone(), 1e-2, 1e-2);
            spec.recompute = recompute;
            let start = warm(&spec.lora);
            let mut s = Session::start_from(request.plan().unwrap(), devices(&cluster, DType::F32, false), model(), spec, start).unwrap();
            let losses = [0, 1].map(|i| s.step(&batch(5, i)).unwrap().loss.to_bits());
            (losses, s.adapter().unwrap())
        });
        assert_eq!(kept, recomputed, "{stages} stages, {schedule:?}");
    }
}

/// Every micro-batch's activations are held at once under gpipe; recomputed ones are those of one layer of one micro-batch.
#[test]
fn recomputing_plans_less_memory() {
    let planned = |recompute| {
        let (cluster, e) = (Cluster::virtual_cpus(0, 1), tangent(1));
        let mut spec = TrainSpec::new(lora(&QV), e.clone(), 1e-2, 1e-2);
        (spec.recompute, spec.capacity) = (recompute, Some(capacity_of(&batch(8, 0), 4).unwrap()));
        Session::start(plan(&cluster, 4, &e), devices(&cluster, DType::F32, false), model(), spec).unwrap().planned_bytes().unwrap()
    };
    let [kept, recomputed] = [planned(false), planned(true)];
    assert!(recomputed < kept, "{recomputed} with recomputation, {kept} without");
}

/// What a rehearsal counts is what the steps then take, and they take it once.
#[test]
fn memory_is_planned() {
    let all = EstimatorName::ALL.iter().map(|(_, name)| (*name, 2)).chain([(EstimatorName::CutTangent, 0)]);
    for ((name, zeroth_order), recompute) in all.flat_map(|a| [(a, false), (a, true)]) {
        let e = EstimatorSpec::new(name, 3);
        let (cluster, exact) = (Cluster::virtual_cpus(zeroth_order, 2), name == EstimatorName::Oracle);
        let mut spec = TrainSpec::new(lora(&ALL), e.clone(), 1e-2, 1e-2);
        let steps: Vec<_> = (0..3).map(|i| batch(4 + i as usize, i)).collect();
        spec.capacity = steps.iter().map(|b| capacity_of(b, 2).unwrap()).reduce(Capacity::max);
        spec.recompute = recompute;
        holds_what_it_planned(
            Session::start(plan(&cluster, 2, &e), devices(&cluster, DType::F32, exact), model(), spec).unwrap(),
            &steps,
            &format!("{name:?}, {recompute}"),
        );
    }
}

#[test]
fn same_seed_same_bits() {
    for name in [EstimatorName::CutTangent, EstimatorName::LossDifference, EstimatorName::Guided, EstimatorName::EarlyExit] {
        let run = |seed| {
            let mut spec = TrainSpec::new(lora(&ALL), EstimatorSpec::new(name, 3), 1e-2, 1e-2);
            spec.seed = seed;
            let mut s = session(&Cluster::virtual_cpus(2, 2), 2, spec);
            (0..2).for_each(|i| drop(s.step(&batch(4, i)).unwrap()));
            s.adapter().unwrap()
        };
        assert_eq!(run(1), run(1), "{name:?}");
        if name != EstimatorName::Guided {
            assert_ne!(run(1), run(2), "{name:?}");
        }
    }
}

/// A slope is a function of its direction, whatever the split of layers and the grouping of directions.
#[test]
fn zeroth_order_does_not_depend_on_split_or_grouping() {
    let run = |split: &[usize], group: u32| {
        let mut cluster = Cluster::virtual_cpus(split.len() - 1, 1);
        cluster.devices.iter_mut().zip(split).for_each(|(d, n)| d.layers = Some(*n));
        let mut e = tangent(5);
        e.group = group;
        let mut s = session(&cluster, 2, sgd(lora(&QV), &e));
        s.step(&batch(4, 0)).unwrap();
        s.adapter().unwrap()
    };
    let one = run(&[3, 1], 8);
    assert_eq!(run(&[1, 2, 1], 8), one);
    assert_eq!(run(&[1, 1, 1, 1], 8), one);
    assert_eq!(run(&[3, 1], 1), one);
    assert_eq!(run(&[2, 1, 1], 2), one);
}

#[test]
fn uneven_micro_batches_give_the_gradient_of_the_mini_batch() {
    let run = |m: u32| {
        let spec = sgd(lora(&ALL), &tangent(1));
        let before = warm(&spec.lora);
        let mut s = session(&Cluster::virtual_cpus(0, 1), m, spec);
        s.step(&batch(7, 1)).unwrap();
        change(&before, &s.adapter().unwrap(), 0..4)
    };
    let (one, three) = (run(1), run(3));
    let scale = dot(&one, &one).sqrt();
    let error = one.iter().zip(&three).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    // Both sum the same f32 products in another order, and an update p - g rounds at the size of p (below 1): a few units of 2^-24 per value.
    assert!(error < 4.0 * 2f64.powi(-24) * (one.len() as f64).sqrt() + 1e-5 * scale, "{error} of {scale}");
}

#[test]
fn a_frozen_head_stays_as_it_is() {
    let cluster = Cluster::virtual_cpus(2, 2);
    let e = tangent(4);
    let mut request = PlanRequest::new(&cluster, 4, 2, &e);
    request.freeze_head = true;
    let spec = sgd(lora(&ALL), &e);
    let before = warm(&spec.lora);
    let mut s = Session::start_from(request.plan().unwrap(), devices(&cluster, DType::F32, false), model(), spec, before.clone()).unwrap();
    let report = s.step(&batch(4, 0)).unwrap();
    assert_eq!(report.slope_rms, None);
    let after = s.adapter().unwrap();
    assert_eq!(before.layers(0..2), after.layers(0..2));
    assert_ne!(before.layers(2..4), after.layers(2..4));
}

#[test]
fn a_checkpoint_continues_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    for name in [EstimatorName::CutTangent, EstimatorName::Guided] {
        let cluster = Cluster::virtual_cpus(2, 2);
        let spec = TrainSpec::new(lora(&ALL), EstimatorSpec::new(name, 3), 1e-2, 1e-2);
        let mut whole = session(&cluster, 2, spec.clone());
        let mut first = session(&cluster, 2, spec.clone());
        for i in 0..4 {
            whole.step(&batch(4, i)).unwrap();
            if i < 2 {
                first.step(&batch(4, i)).unwrap();
            }
        }
        first.save(&path).unwrap();
        first.finish().unwrap();
        let devices = devices(&cluster, DType::F32, false);
        let plan = plan(&cluster, 2, &spec.estimator);
        let mut second = Session::resume(plan.clone(), devices.clone(), model(), spec.clone(), &path).unwrap();
        assert_eq!(second.steps(), 2);
        for i in 2..4 {
            second.step(&batch(4, i)).unwrap();
        }
        assert_eq!(whole.adapter().unwrap(), second.adapter().unwrap(), "{name:?}");

        let mut other = spec;
        other.seed += 1;
        let e = Session::resume(plan, devices, model(), other, &path).err().unwrap();
        assert!(e.message().contains("another seed"), "{e}");
    }
}

/// A lost zeroth-order stage is rebuilt from its seeds.
#[test]
fn the_journal_replays_bit_for_bit() {
    let spec = TrainSpec::new(lora(&ALL), tangent(3), 1e-2, 1e-2);
    let (seed, start) = (spec.seed, warm(&spec.lora));
    let mut s = session(&Cluster::virtual_cpus(1, 1), 2, spec);
    (0..3).for_each(|i| drop(s.step(&batch(4, i)).unwrap()));
    let journal = s.take_journal();
    assert_eq!(journal.len(), 3);

    let mut runner = Runner::new(Reference::new() as DeviceRef).unwrap();
    let (source, mut importer) = (model(), Importer::new());
    let slice = Slice::load(&mut runner, &mut importer, &*source, &SliceSpec::new(source.config(), 0..2)).unwrap();
    let adapters = Adapters::from_host(&mut runner, &slice, &start).unwrap();
    let mut optimiser = Optimiser::zeroth_order(&mut runner, &adapters, Rule::ADAMW, Factors::B).unwrap();
    for entry in &journal {
        let entry = zofo_pipeline::journal::Entry::parse(&entry.to_line()).unwrap();
        entry.replay(&mut runner, &mut optimiser, seed).unwrap();
    }
    assert_eq!(adapters.to_host(&mut runner).unwrap(), s.adapter().unwrap().layers(0..2));
}

#[test]
fn a_wrong_step_is_refused_and_the_pipeline_lives_on() {
    let mut s = session(&Cluster::virtual_cpus(1, 1), 2, sgd(lora(&QV), &tangent(2)));
    assert!(s.step(&batch(1, 0)).unwrap_err().message().contains("cannot be split into 2"));
    let unlabelled = vec![zofo_ops::batch::Sequence::unlabelled(vec![1, 2]); 2];
    assert!(s.step(&unlabelled).unwrap_err().message().contains("no token of the mini-batch has a label"));
    s.step(&batch(4, 0)).unwrap();
    s.finish().unwrap();
}

#[test]
fn a_stage_that_cannot_load_is_named() {
    let cluster = Cluster::virtual_cpus(1, 1);
    let e = tangent(1);
    let mut devices = devices(&cluster, DType::F32, false);
    devices[1] = StageDevice::new(Reference::with_memory_limit(1000), DType::F32);
    let spec = sgd(lora(&QV), &e);
    let start = warm(&spec.lora);
    let err = Session::start_from(plan(&cluster, 1, &e), devices, model(), spec, start).err().unwrap();
    assert!(matches!(err.kind(), ErrorKind::OutOfMemory { .. }), "{err:?}");
    assert!(err.to_string().contains("stage 1 (gpu0)"), "{err}");
}

#[test]
fn a_schedule_uses_every_stage_and_reports_when() {
    let mut s = session(&Cluster::virtual_cpus(2, 2), 4, sgd(lora(&QV), &tangent(2)));
    let report = s.step(&batch(8, 0)).unwrap();
    let w = s.plan().schedule.workload.clone();
    for (worker, spans) in report.timeline.iter().enumerate() {
        assert_eq!(spans.len(), w.expected(worker).len(), "worker {worker}");
        assert!(spans.windows(2).all(|p| p[0].end <= p[1].start), "worker {worker} does one thing at a time");
    }
    assert!(report.utilisation() > 0.0 && report.utilisation() <= 1.0);
}

/// Stages on asynchronous devices with memories of their own compute the same bits as stages that share one host.
#[test]
fn asynchronous_devices_change_nothing() {
    let cluster = Cluster::virtual_cpus(1, 1);
    let spec = TrainSpec::new(lora(&ALL), tangent(2), 1e-2, 1e-2);
    let run = |devices: Vec<StageDevice>| {
        let plan = plan(&cluster, 2, &spec.estimator);
        let mut s = Session::start_from(plan, devices, model(), spec.clone(), warm(&spec.lora)).unwrap();
        (0..2).for_each(|i| drop(s.step(&batch(4, i)).unwrap()));
        s.adapter().unwrap()
    };
    let hostile = |seed| StageDevice::new(Hostile::new(HostileConfig::seeded(seed)), DType::F32);
    assert_eq!(run(vec![hostile(1), hostile(2)]), run(devices(&cluster, DType::F32, true)));
}

/// Whatever breaks on a device in the middle of a step ends the step with the stage's name; nothing hangs.
#[test]
fn a_fault_ends_the_step_and_names_the_stage() {
    let cluster = Cluster::virtual_cpus(1, 1);
    let spec = sgd(lora(&QV), &tangent(2));
    for stage in 0..2 {
        for fault in [Fault::DeviceLost { after: 90 }, Fault::Execution { nth: 70 }] {
            let mut devices = devices(&cluster, DType::F32, true);
            devices[stage] = StageDevice::new(Hostile::new(HostileConfig::seeded(3).fault(fault)), DType::F32);
            let plan = plan(&cluster, 2, &spec.estimator);
            let mut s = Session::start_from(plan, devices, model(), spec.clone(), warm(&spec.lora)).unwrap();
            let failure = (0..20).find_map(|i| s.step(&batch(4, i)).err()).expect("the fault shows within 20 steps");
            assert!(failure.to_string().contains(&format!("stage {stage} (")), "{failure}");
            let again = s.step(&batch(4, 0)).unwrap_err();
            assert!(again.message().contains("stopped earlier"), "{again}");
        }
    }
}

/// Once shapes have been seen, a step takes no new memory from a device.
#[test]
fn a_steady_step_allocates_nothing() {
    for name in [EstimatorName::CutTangent, EstimatorName::CutDifference, EstimatorName::LossDifference, EstimatorName::Guided] {
        let cluster = Cluster::virtual_cpus(1, 1);
        let e = EstimatorSpec::new(name, 2);
        let devices = devices(&cluster, DType::F32, true);
        let host = devices[0].device.clone();
        let spec = TrainSpec::new(lora(&ALL), e.clone(), 1e-2, 1e-2);
        let start = warm(&spec.lora);
        let mut s = Session::start_from(plan(&cluster, 2, &e), devices, model(), spec, start).unwrap();
        (0..3).for_each(|_| drop(s.step(&batch(4, 0)).unwrap()));
        let before = host.memory();
        (0..3).for_each(|_| drop(s.step(&batch(4, 0)).unwrap()));
        assert_eq!(host.memory().allocations, before.allocations, "{name:?}");
        assert_eq!(host.memory().in_use, before.in_use, "{name:?}");
    }
}
