//! Every order of work that can train gives what a plain pipeline of the same layers gives.

mod common;

use common::*;
use proptest::prelude::*;
use std::{collections::HashSet, time::Duration};
use zofo_hal::{
    DType,
    perturb::Projection,
    reference::{Fault, Hostile, HostileConfig},
};
use zofo_ops::{
    batch::{Capacity, Sequence},
    lora::HostAdapter,
};
use zofo_pipeline::{
    check::check,
    cluster::Cluster,
    estimator::{EstimatorName, EstimatorSpec},
    executor::StageDevice,
    ir::{Credits, Role, Step, Workload},
    order::ScheduleName,
    plan::{Plan, PlanRequest, StageMember},
    planner::Split,
    train::{Checkpoint, Session, TrainSpec, capacity_of},
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
    let cluster = Cluster::virtual_cpus(0, plan.devices().len());
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
        assert_eq!(plan.devices(), ["gpu0", "gpu1"]);
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
    let all = [ScheduleName::Interleaved, ScheduleName::ZbH1, ScheduleName::Chimera];
    for (name, recompute) in all.into_iter().flat_map(|n| [(n, false), (n, true)]) {
        let mut spec = spec();
        let steps: Vec<_> = (0..3).map(|i| batch(4 + i as usize, i)).collect();
        spec.capacity = steps.iter().map(|b| capacity_of(b, 3).unwrap()).reduce(Capacity::max);
        spec.recompute = recompute;
        holds_what_it_planned(start(planned(2, 3, name), spec), &steps, &format!("{name:?}, {recompute}"));
    }
}

/// A chimera plan whose stages all have a worker of their own, and whose pipelines cut the layers differently.
fn side_by_side(micro_batches: u32) -> Plan {
    let mut plan = planned(2, micro_batches, ScheduleName::Chimera);
    plan.schedule.lists = (0..4).map(|s| plan.schedule.actions(s).map(|a| Step::new(s, a)).collect()).collect();
    plan.schedule.placement = (0..4).collect();
    for (i, (stage, layers)) in plan.stages.iter_mut().zip([0..1, 1..4, 0..3, 3..4]).enumerate() {
        (stage.members, stage.layers) = (vec![StageMember::new(format!("gpu{i}"), 1.0)], layers);
    }
    plan
}

/// Gradients of one step, as plain gradient descent shows them.
fn gradient(plan: Plan, batch: &[Sequence]) -> Vec<f64> {
    let spec = sgd(lora(&ALL), &estimator());
    let before = warm(&spec.lora);
    let mut s = start(plan, spec);
    s.step(batch).unwrap();
    change(&before, &s.adapter().unwrap(), 0..4)
}

/// Several pipelines add up the same gradients of micro-batches in another order: with M of them, either order rounds each value M times, by 2^-24
/// of a partial sum, which is at most the sum of magnitudes. The updates p - g that show them round once more, at values below 2.
#[test]
fn several_pipelines_are_one_but_for_the_order_of_the_sum() {
    let all = batch(4, 1);
    let labels = |b: &[Sequence]| b.iter().map(|s| s.labels.iter().flatten().count()).sum::<usize>() as f64;
    let mut magnitudes = vec![0.0; gradient(planned(1, 1, ScheduleName::Single), &all).len()];
    for part in all.chunks(1) {
        let weight = labels(part) / labels(&all);
        let own = gradient(planned(1, 1, ScheduleName::Single), part);
        magnitudes.iter_mut().zip(own).for_each(|(sum, g)| *sum += weight * g.abs());
    }
    let expected = gradient(planned(2, 4, ScheduleName::Gpipe), &all);
    let u = 2f64.powi(-24);
    for plan in [planned(2, 4, ScheduleName::Chimera), planned(4, 4, ScheduleName::Chimera), side_by_side(4)] {
        let found = gradient(plan, &all);
        for ((a, b), m) in expected.iter().zip(&found).zip(&magnitudes) {
            assert!((a - b).abs() <= 2.0 * 4.0 * u * m + 4.0 * u, "{a} and {b}, magnitude {m}");
        }
    }
}

/// The first micro-batch alone: the other pipeline has none, and its copies learn all the same.
#[test]
fn a_pipeline_without_a_micro_batch_keeps_up() {
    assert_eq!(three_steps(planned(2, 1, ScheduleName::Chimera), spec()), three_steps(planned(2, 1, ScheduleName::Gpipe), spec()));
}

/// A snapshot compares the adapters of all copies; moments are compared here. Clipping counts each tensor once, or norms would be larger.
#[test]
fn copies_stay_the_same_for_ever() {
    let expected = three_steps(planned(2, 4, ScheduleName::Gpipe), spec()).0;
    for name in [2, 4] {
        let mut s = start(planned(name, 4, ScheduleName::Chimera), spec());
        for (i, (loss, norm)) in (0u32..).zip(&expected) {
            let report = s.step(&batch(7, i)).unwrap();
            // Adapters that differ in their last bits by now.
            let near = |found: f64, expected: u64| (found / f64::from_bits(expected) - 1.0).abs() < 1e-4;
            assert!(near(report.loss, *loss) && near(report.gradient_norm.unwrap(), *norm));
            s.adapter().unwrap();
        }
        let path = tempfile::tempdir().unwrap();
        s.save(&path.path().join("state")).unwrap();
        let optimisers = Checkpoint::read(&path.path().join("state")).unwrap().snapshot.optimisers;
        let (down, up) = optimisers.split_at(optimisers.len() / 2);
        assert!(down == up && !down[0].is_empty());
    }
}

#[test]
fn a_checkpoint_continues_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    for plan in [planned(2, 3, ScheduleName::Interleaved), planned(2, 4, ScheduleName::Chimera), side_by_side(4)] {
        let (mut whole, mut first) = (start(plan.clone(), spec()), start(plan.clone(), spec()));
        (0..2).for_each(|i| drop((whole.step(&batch(7, i)).unwrap(), first.step(&batch(7, i)).unwrap())));
        first.save(&path).unwrap();
        first.finish().unwrap();
        let cluster = Cluster::virtual_cpus(0, plan.devices().len());
        let devices = devices(&cluster, DType::F32, false);
        let mut second = Session::resume(plan.clone(), devices.clone(), model(), spec(), &path).unwrap();
        (2..4).for_each(|i| drop((whole.step(&batch(7, i)).unwrap(), second.step(&batch(7, i)).unwrap())));
        assert_eq!(whole.adapter().unwrap(), second.adapter().unwrap(), "{:?}", plan.name);
        let other = planned(2, plan.schedule.workload.micro_batches, ScheduleName::Gpipe);
        let e = Session::resume(other, devices[..2].to_vec(), model(), spec(), &path).err().unwrap();
        assert!(e.message().contains("another"), "{e}");
    }
}

#[test]
fn a_failing_stage_of_several_is_named() {
    for name in [ScheduleName::Interleaved, ScheduleName::Chimera, ScheduleName::ZbH1] {
        for worker in 0..2 {
            let plan = planned(2, 4, name);
            let mut devices = devices(&Cluster::virtual_cpus(0, 2), DType::F32, false);
            let fault = Fault::Execution { nth: 300 };
            devices[worker] = StageDevice::new(Hostile::new(HostileConfig::seeded(3).fault(fault)), DType::F32);
            let mut s = Session::start_from(plan, devices, model(), spec(), warm(&lora(&ALL))).unwrap();
            let failure = (0..20).find_map(|i| s.step(&batch(4, i)).err()).expect("the fault shows within 20 steps");
            let text = failure.to_string();
            assert!(text.contains("stage") && text.contains(&format!("(gpu{worker})")), "{failure}");
        }
    }
}

/// Nothing is started that would wait for ever.
#[test]
fn what_is_not_proven_is_refused() {
    let mut plan = planned(2, 3, ScheduleName::Gpipe);
    plan.schedule.credits.delta = 0;
    let cluster = Cluster::virtual_cpus(0, 2);
    let e = Session::start(plan, devices(&cluster, DType::F32, false), model(), spec()).err().unwrap();
    assert!(e.message().contains("deadlock"), "{e}");
}

/// An order of `workload` on `placement`, made of whatever is ready, by the numbers that `next` gives.
fn any_order(w: &Workload, placement: &[usize], mut next: impl FnMut() -> usize) -> Vec<Vec<Step>> {
    let mut lists = vec![Vec::new(); placement.iter().max().unwrap() + 1];
    let mut left: Vec<Step> = (0..w.stages()).flat_map(|s| w.expected(s).into_iter().map(move |a| Step::new(s, a))).collect();
    let (mut done, mut sent) = (HashSet::new(), HashSet::new());
    while !left.is_empty() {
        let is_ready = |step: &Step| {
            let required = w.requires(step.stage(), &step.action).into_iter().all(|a| done.contains(&Step::new(step.stage(), a)));
            required && w.consumes(step.stage(), &step.action).is_none_or(|(from, p)| sent.contains(&(from, step.stage(), p)))
        };
        let ready: Vec<usize> = (0..left.len()).filter(|i| is_ready(&left[*i])).collect();
        let step = left.swap_remove(ready[next() % ready.len()]);
        done.insert(step);
        sent.extend(w.produces(step.stage(), &step.action).map(|(to, p)| (step.stage(), to, p)));
        lists[placement[step.stage()]].push(step);
    }
    lists
}

/// Makes every worker a group of so many devices, which share its stages in ways that they allow.
fn share(plan: &mut Plan, groups: &[(usize, usize); 4]) {
    let w = &plan.schedule.workload;
    for (i, stage) in plan.stages.iter_mut().enumerate() {
        let worker = plan.schedule.placement[i];
        let (members, way) = groups[worker];
        let ways = match w.roles[i] {
            Role::FirstOrder => &[Split::Batch, Split::Tensor][..],
            Role::ZerothOrder if w.estimates() => &[Split::Directions, Split::Batch],
            _ => &[Split::Batch],
        };
        stage.split = ways[(way + i) % ways.len()];
        let all = (1..=members).sum::<usize>() as f64;
        stage.members = (1..=members).map(|m| StageMember::new(format!("d{worker}-{m}"), m as f64 / all)).collect();
    }
}

/// Two steps of a plan, unless it hangs.
fn runs(plan: Plan, e: EstimatorSpec) {
    let (done, wait) = std::sync::mpsc::channel();
    let text = format!("{:?}", plan.schedule);
    std::thread::spawn(move || {
        let cluster = Cluster::virtual_cpus(0, plan.devices().len());
        let spec = sgd(lora(&[Projection::O]), &e);
        let start = warm(&spec.lora);
        let mut s = Session::start_from(plan, devices(&cluster, DType::F32, false), model(), spec, start).unwrap();
        let micro_batches = s.plan().schedule.workload.micro_batches as usize;
        let losses = [0, 1].map(|i| s.step(&batch(micro_batches, i)).unwrap().loss);
        let _ = done.send(losses);
    });
    let losses = wait.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(losses.iter().all(|l| l.is_finite()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever the proof accepts runs: any placement, any order, as few credits as it can do with, workers of one device or of several.
    #[test]
    fn what_is_proven_runs(
        stages in 1usize..5, heads in 0usize..3, micro_batches in 1u32..4, which in 0usize..4, credits in prop::array::uniform3(1usize..4),
        placement in prop::array::uniform4(0usize..3), numbers in prop::collection::vec(any::<u16>(), 64), chimera: bool, split: bool,
        groups in prop::array::uniform4((1usize..4, 0usize..6)),
    ) {
        let names = [EstimatorName::CutTangent, EstimatorName::LossDifference, EstimatorName::Guided, EstimatorName::EarlyExit];
        let mut e = EstimatorSpec::new(names[which], 3);
        e.group = 2;
        let mut plan = match chimera {
            true => planned(2, micro_batches, ScheduleName::Chimera),
            false => {
                let cluster = Cluster::virtual_cpus(heads.min(stages - 1), stages - heads.min(stages - 1));
                PlanRequest::new(&cluster, 4, micro_batches, &e).plan().unwrap()
            }
        };
        // Workers are numbered in the order in which stages name them.
        let placement = &placement[..plan.stages.len()];
        let mut workers: Vec<usize> = Vec::new();
        placement.iter().for_each(|p| if !workers.contains(p) { workers.push(*p) });
        let placement: Vec<usize> = placement.iter().map(|p| workers.iter().position(|w| w == p).unwrap()).collect();
        plan.schedule.workload.split_backward = split;
        let mut numbers = numbers.into_iter().cycle();
        plan.schedule.lists = any_order(&plan.schedule.workload, &placement, || usize::from(numbers.next().unwrap()));
        plan.schedule.placement = placement;
        share(&mut plan, &groups);
        let [hidden, copies, delta] = credits;
        plan.schedule.credits = Credits { hidden, copies, delta, ..plan.schedule.credits };
        if check(&plan.schedule).is_err() {
            plan.schedule.credits = Credits::ample(&plan.schedule.workload);
            check(&plan.schedule).unwrap();
        }
        runs(plan, e);
    }
}
