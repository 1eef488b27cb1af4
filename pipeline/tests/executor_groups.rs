//! Stages that several devices share give what the same stages on one device each give.

mod common;

use common::*;
use proptest::prelude::*;
use zofo_hal::{
    Allow, DType, DeviceRef, Restricted,
    perturb::Projection,
    reference::{Fault, Hostile, HostileConfig, Reference},
};
use zofo_ops::batch::{Capacity, Sequence};
use zofo_pipeline::{
    cluster::{Cluster, DeviceEntry, Kind},
    estimator::{EstimatorName, EstimatorSpec, Scope},
    executor::StageDevice,
    ir::{Action, Role, Step},
    order::ScheduleName,
    plan::{Plan, PlanRequest, StageMember},
    planner::Split,
    train::{Checkpoint, Session, TrainSpec, capacity_of},
};

/// A pipeline of devices with those kinds, a layer or two each.
fn line(kinds: &[Kind], micro_batches: u32, e: &EstimatorSpec, name: Option<ScheduleName>) -> Plan {
    let device = |(i, kind): (usize, &Kind)| DeviceEntry::virtual_cpu(format!("d{i}"), *kind);
    let cluster = Cluster::new(kinds.iter().enumerate().map(device).collect());
    let mut request = PlanRequest::new(&cluster, 4, micro_batches, e);
    request.schedule = name;
    request.plan().unwrap()
}

/// The same with a stage shared by several.
fn shared(mut plan: Plan, stage: usize, split: Split, shares: &[f64]) -> Plan {
    let members = shares.iter().enumerate().map(|(i, share)| StageMember::new(format!("d{stage}-{i}"), *share));
    (plan.stages[stage].members, plan.stages[stage].split) = (members.collect(), split);
    plan
}

/// Devices for a plan: those of zeroth-order stages offer forward ops alone.
fn devices_of(plan: &Plan, exact: bool) -> Vec<StageDevice> {
    let host: DeviceRef = Reference::new();
    let device = |name: &&str| -> StageDevice {
        let stage = plan.stages.iter().find(|s| s.members.iter().any(|m| m.device == **name)).unwrap();
        let device: DeviceRef = match stage.role {
            Role::FirstOrder => host.clone(),
            _ if exact => host.clone(),
            _ => Restricted::new(host.clone(), Allow::Forward, name.to_string()),
        };
        StageDevice::new(device, DType::F32)
    };
    plan.devices().iter().map(device).collect()
}

fn start(plan: Plan, spec: TrainSpec) -> Session {
    let exact = spec.estimator.name == EstimatorName::Oracle;
    let (devices, adapter) = (devices_of(&plan, exact), warm(&spec.lora));
    Session::start_from(plan, devices, model(), spec, adapter).unwrap()
}

/// Loss of one step, and the change that plain gradient descent makes of it.
fn one_step(plan: Plan, e: &EstimatorSpec, batch: &[Sequence]) -> (f64, Option<f64>, Vec<f64>) {
    let targets = if e.name == EstimatorName::Guided { vec![Projection::O, Projection::Down] } else { ALL.to_vec() };
    let spec = sgd(lora(&targets), e);
    let before = warm(&spec.lora);
    let mut s = start(plan, spec);
    let report = s.step(batch).unwrap();
    (report.loss, report.slope_rms, change(&before, &s.adapter().unwrap(), 0..4))
}

fn estimator(name: EstimatorName) -> EstimatorSpec {
    let mut e = EstimatorSpec::new(name, 4);
    e.exit_directions = if name == EstimatorName::EarlyExit { 3 } else { 0 };
    e
}

const BP: Kind = Kind::Bp;
const FREE: Kind = Kind::BpFree;

/// Magnitudes of what the gradients of single sequences add up to.
fn magnitudes(e: &EstimatorSpec, batch: &[Sequence]) -> Vec<f64> {
    let labels = |b: &[Sequence]| b.iter().map(|s| s.labels.iter().flatten().count()).sum::<usize>() as f64;
    let mut sums = Vec::new();
    for part in batch.chunks(1) {
        let own = one_step(line(&[BP], 1, e, None), e, part).2;
        sums.resize(own.len(), 0.0);
        sums.iter_mut().zip(own).for_each(|(sum, g)| *sum += labels(part) / labels(batch) * g.abs());
    }
    sums
}

/// Rows do not depend on each other, so losses are the same bits. Gradients are sums over rows in other parts: with R rows either order rounds each
/// value R times, by 2^-24 of a partial sum, which is at most the sum of magnitudes; and the updates p - g once more, at values below 2.
#[test]
fn members_divide_micro_batches_by_sequences() {
    let (e, batch, u) = (EstimatorSpec::new(EstimatorName::CutTangent, 1), batch(7, 2), 2f64.powi(-24));
    let (magnitudes, rows) = (magnitudes(&e, &batch), batch.iter().map(|s| s.ids.len()).sum::<usize>() as f64);
    for (devices, m, name) in [(1, 1, None), (2, 3, None), (2, 3, Some(ScheduleName::OneFOneB)), (3, 7, Some(ScheduleName::ZbH1))] {
        let plan = line(&vec![BP; devices], m, &e, name);
        let (loss, _, expected) = one_step(plan.clone(), &e, &batch);
        for stage in 0..devices {
            // With seven micro-batches of one sequence some members have nothing to do.
            for shares in [&[0.5, 0.5][..], &[0.7, 0.3], &[0.2, 0.5, 0.3], &[0.01, 0.99]] {
                let (found_loss, _, found) = one_step(shared(plan.clone(), stage, Split::Batch, shares), &e, &batch);
                assert_eq!(found_loss.to_bits(), loss.to_bits(), "{devices} stages, {shares:?} of stage {stage}");
                for ((a, b), m) in expected.iter().zip(&found).zip(&magnitudes) {
                    assert!((a - b).abs() <= 2.0 * rows * u * m + 4.0 * u, "{a} and {b}, magnitude {m}");
                }
            }
        }
    }
}

/// Neighbours that are shared in other ways, and stages of one group.
#[test]
fn groups_hand_over_to_groups() {
    let (e, batch) = (EstimatorSpec::new(EstimatorName::CutTangent, 1), batch(9, 1));
    let plan = line(&[BP, BP, BP], 3, &e, Some(ScheduleName::Dapple));
    let (loss, _, expected) = one_step(plan.clone(), &e, &batch);
    let near = |found: &[f64]| expected.iter().zip(found).all(|(a, b)| (a - b).abs() <= 1e-5 * a.abs().max(0.1));
    let mut both = shared(plan.clone(), 0, Split::Batch, &[0.3, 0.7]);
    both = shared(both, 1, Split::Batch, &[0.6, 0.2, 0.2]);
    let mut interleaved = line(&[BP, BP], 3, &e, Some(ScheduleName::Interleaved));
    for (stage, shares) in [(0, [0.3, 0.7]), (2, [0.5, 0.5])] {
        interleaved = shared(interleaved, stage, Split::Batch, &shares);
        interleaved.stages[stage].members = ["left", "right"].iter().zip(shares).map(|(n, s)| StageMember::new(*n, s)).collect();
    }
    for plan in [both, interleaved] {
        let (found_loss, _, found) = one_step(plan.clone(), &e, &batch);
        assert_eq!(found_loss.to_bits(), loss.to_bits(), "{:?}", plan.name);
        assert!(near(&found), "{:?}", plan.name);
    }
}

/// A member has some heads and columns of every layer, so sums inside the layers are made of parts: relative to each tensor's norm, a few times f32's
/// unit for every one of the sums of up to 24 values, through four layers there and back.
#[test]
fn members_divide_heads_and_columns() {
    let (e, batch) = (EstimatorSpec::new(EstimatorName::CutTangent, 1), batch(7, 2));
    for (devices, m, name) in [(1, 1, None), (2, 3, None), (2, 3, Some(ScheduleName::ZbH1))] {
        let plan = line(&vec![BP; devices], m, &e, name);
        let (loss, _, expected) = one_step(plan.clone(), &e, &batch);
        for stage in 0..devices {
            for shares in [&[0.5, 0.5][..], &[0.75, 0.25], &[0.2, 0.5, 0.3]] {
                let (found_loss, _, found) = one_step(shared(plan.clone(), stage, Split::Tensor, shares), &e, &batch);
                near(&expected, &found, &format!("{devices} stages, {shares:?} of stage {stage}"));
                assert!((found_loss / loss - 1.0).abs() < 1e-5, "{found_loss} and {loss}");
            }
        }
    }
}

/// Within 1e-4 of the largest value.
fn near(expected: &[f64], found: &[f64], what: &str) {
    let scale = expected.iter().fold(0.0f64, |a, b| a.max(b.abs()));
    let worst = expected.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst <= 1e-4 * scale && scale > 0.0, "{what}: {worst} of {scale}");
}

/// Stages of one group, shared by heads and columns here and by batch there, in front of and behind devices of their own.
#[test]
fn layers_are_shared_in_turns() {
    let (e, batch) = (EstimatorSpec::new(EstimatorName::CutTangent, 1), batch(7, 2));
    let mut plan = line(&[BP; 4], 2, &e, Some(ScheduleName::Gpipe));
    let (_, _, expected) = one_step(plan.clone(), &e, &batch);
    let splits = [Split::Batch, Split::Tensor, Split::Batch, Split::Tensor];
    for first in 0..2 {
        for (stage, split) in plan.stages.iter_mut().zip(splits.iter().cycle().skip(first)) {
            stage.members = vec![StageMember::new("left", 0.3), StageMember::new("right", 0.7)];
            stage.split = *split;
        }
        // One list: every micro-batch there and back through all stages of the group.
        let w = &plan.schedule.workload;
        let steps = |m: u32| {
            let there = (0..4).map(move |s| Step::new(s, Action::Forward { m })).chain([Step::new(3, Action::Loss { m })]);
            there.chain((0..4).rev().map(move |s| Step::new(s, Action::Backward { m })))
        };
        let updates = (0..4).map(|s| Step::new(s, Action::Update));
        plan.schedule.lists = vec![(0..w.micro_batches).flat_map(steps).chain(updates).collect()];
        plan.schedule.placement = vec![0; 4];
        near(&expected, &one_step(plan.clone(), &e, &batch).2, "one group");
    }
}

/// Every direction is measured by one device from the same rows, so nothing differs in a bit, however directions are grouped in actions.
#[test]
fn members_divide_directions() {
    use EstimatorName::{CutDifference, CutTangent, EarlyExit, LossDifference};
    let batch = batch(5, 3);
    for (name, two_sided) in
        [(CutTangent, false), (CutDifference, false), (CutDifference, true), (LossDifference, true), (EarlyExit, false)]
    {
        for (scope, group) in [(Scope::MicroBatch, 8), (Scope::MiniBatch, 1), (Scope::MicroBatch, 3)] {
            let mut e = estimator(name);
            (e.two_sided, e.scope, e.group) = (two_sided, scope, group);
            let plan = line(&[FREE, FREE, BP], 2, &e, None);
            let expected = one_step(plan.clone(), &e, &batch);
            for shares in [&[0.5, 0.5][..], &[0.1, 0.6, 0.3], &[0.05, 0.95]] {
                for stage in 0..2 {
                    let found = one_step(shared(plan.clone(), stage, Split::Directions, shares), &e, &batch);
                    assert_eq!(found, expected, "{name:?} {two_sided} in groups of {group}, {shares:?} of stage {stage}");
                }
                let both = shared(shared(plan.clone(), 0, Split::Directions, shares), 1, Split::Directions, &[0.4, 0.6]);
                assert_eq!(one_step(both, &e, &batch), expected, "{name:?} {two_sided} in groups of {group}, {shares:?}");
            }
        }
    }
}

/// What is read over rows adds up from the members' parts.
#[test]
fn zeroth_order_stages_divide_micro_batches() {
    let batch = batch(6, 3);
    for name in [
        EstimatorName::CutTangent,
        EstimatorName::CutDifference,
        EstimatorName::LossDifference,
        EstimatorName::EarlyExit,
        EstimatorName::Guided,
        EstimatorName::Oracle,
    ] {
        let e = estimator(name);
        let plan = line(&[FREE, FREE, BP], 2, &e, None);
        let (loss, slopes, expected) = one_step(plan.clone(), &e, &batch);
        let scale = expected.iter().fold(0.0f64, |a, b| a.max(b.abs()));
        for stage in 0..3 {
            let (found_loss, found_slopes, found) = one_step(shared(plan.clone(), stage, Split::Batch, &[0.3, 0.3, 0.4]), &e, &batch);
            assert_eq!(found_loss.to_bits(), loss.to_bits(), "{name:?}, stage {stage}");
            // Dots of 16 values a row in f32, over at most 40 rows: roundings of 2^-24 each. Differences of eps 1e-3 magnify them.
            let magnified = if matches!(name, EstimatorName::CutDifference) { 1e3 } else { 1.0 };
            let tolerance = magnified * 16.0 * 40.0 * 2f64.powi(-24);
            let near = |a: f64, b: f64, scale: f64| (a - b).abs() <= tolerance * scale;
            assert_eq!(slopes.is_some(), found_slopes.is_some());
            if let (Some(a), Some(b)) = (slopes, found_slopes) {
                assert!(near(a, b, a), "{name:?}, stage {stage}: {a} and {b}");
            }
            let worst = expected.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(worst <= tolerance * scale + 4.0 * 2f64.powi(-24), "{name:?}, stage {stage}: {worst} of {scale}");
        }
    }
}

/// A stage by directions between one by batch and a group that takes the copies on to the loss.
#[test]
fn all_ways_at_once() {
    let batch = batch(6, 1);
    for name in [EstimatorName::LossDifference, EstimatorName::CutTangent] {
        let e = estimator(name);
        let plan = line(&[FREE, FREE, BP, BP], 3, &e, None);
        let (loss, slopes, _) = one_step(plan.clone(), &e, &batch);
        let plan = shared(plan, 0, Split::Batch, &[0.5, 0.5]);
        let plan = shared(plan, 1, Split::Directions, &[0.3, 0.7]);
        let plan = shared(plan, 2, Split::Batch, &[0.6, 0.4]);
        let (found_loss, found_slopes, _) = one_step(plan, &e, &batch);
        assert_eq!(found_loss.to_bits(), loss.to_bits());
        let (a, b) = (slopes.unwrap(), found_slopes.unwrap());
        assert!((a / b - 1.0).abs() < 1e-5, "{name:?}: {a} and {b}");
    }
}

fn spec(e: &EstimatorSpec) -> TrainSpec {
    let mut spec = TrainSpec::new(lora(&ALL), e.clone(), 1e-2, 1e-2);
    spec.clip = 0.05;
    spec
}

/// A pipeline of three stages, each shared in another way.
fn mixed(e: &EstimatorSpec) -> Plan {
    let plan = line(&[FREE, BP, BP], 2, e, None);
    let plan = shared(shared(plan, 0, Split::Directions, &[0.5, 0.5]), 1, Split::Batch, &[0.4, 0.6]);
    shared(plan, 2, Split::Tensor, &[0.3, 0.7])
}

/// Members keep the same adapters and moments for ever: a snapshot compares the first, the second are compared here.
#[test]
fn members_stay_the_same_and_a_checkpoint_continues() {
    let e = estimator(EstimatorName::CutTangent);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let plan = mixed(&e);
    let (mut whole, mut first) = (start(plan.clone(), spec(&e)), start(plan.clone(), spec(&e)));
    (0..2).for_each(|i| drop((whole.step(&batch(7, i)).unwrap(), first.step(&batch(7, i)).unwrap())));
    first.save(&path).unwrap();
    let optimisers = Checkpoint::read(&path).unwrap().snapshot.optimisers;
    assert_eq!(optimisers.len(), 6);
    assert!(optimisers[0] == optimisers[1] && optimisers[2] == optimisers[3] && optimisers[1] != optimisers[2]);
    let mut second = Session::resume(plan.clone(), devices_of(&plan, false), model(), spec(&e), &path).unwrap();
    (2..4).for_each(|i| drop((whole.step(&batch(7, i)).unwrap(), second.step(&batch(7, i)).unwrap())));
    assert_eq!(whole.adapter().unwrap(), second.adapter().unwrap());
    let other = shared(plan, 1, Split::Batch, &[0.5, 0.5]);
    let refused = Session::resume(other.clone(), devices_of(&other, false), model(), spec(&e), &path).err().unwrap();
    assert!(refused.message().contains("shares"), "{refused}");
}

#[test]
fn memory_is_planned() {
    let e = estimator(EstimatorName::CutTangent);
    let mut spec = spec(&e);
    let steps: Vec<_> = (0..3).map(|i| batch(8 + i as usize, i)).collect();
    spec.capacity = steps.iter().map(|b| capacity_of(b, 2).unwrap()).reduce(Capacity::max);
    spec.positions = steps.iter().flatten().map(|s| s.ids.len()).max();
    holds_what_it_planned(start(mixed(&e), spec), &steps, "groups");
}

#[test]
fn a_failing_member_is_named() {
    let e = estimator(EstimatorName::CutTangent);
    for rank in 0..6 {
        let plan = mixed(&e);
        let name = plan.devices()[rank].to_owned();
        let mut devices = devices_of(&plan, false);
        devices[rank] = StageDevice::new(Hostile::new(HostileConfig::seeded(3).fault(Fault::Execution { nth: 300 })), DType::F32);
        let mut s = Session::start_from(plan, devices, model(), spec(&e), warm(&lora(&ALL))).unwrap();
        let failure = (0..20).find_map(|i| s.step(&batch(4, i)).err()).expect("the fault shows within 20 steps");
        assert!(failure.to_string().contains(&format!("({name})")), "{failure}");
    }
}

#[test]
fn what_cannot_be_shared_so_is_refused() {
    let e = estimator(EstimatorName::CutTangent);
    let refused = |plan: Plan, e: &EstimatorSpec, part: &str| {
        let error = Session::start_from(plan.clone(), devices_of(&plan, false), model(), spec(e), warm(&lora(&ALL))).err().unwrap();
        assert!(error.message().contains(part), "{error}");
    };
    let plan = line(&[FREE, BP], 2, &e, None);
    refused(shared(plan.clone(), 1, Split::Directions, &[0.5, 0.5]), &e, "by directions");
    refused(shared(plan.clone(), 0, Split::Tensor, &[0.5, 0.5]), &e, "heads and columns");
    refused(shared(plan.clone(), 1, Split::Tensor, &[0.2; 5]), &e, "query heads");
    refused(shared(plan.clone(), 0, Split::Directions, &[0.5, 0.6]), &e, "add up to 1");
    refused(shared(plan.clone(), 0, Split::Directions, &[1.5, -0.5]), &e, "above 0");
    let guided = estimator(EstimatorName::Guided);
    refused(shared(line(&[FREE, BP], 2, &guided, None), 0, Split::Directions, &[0.5, 0.5]), &guided, "by directions");
    let mut two = line(&[BP, BP], 2, &e, Some(ScheduleName::Interleaved));
    two = shared(two, 0, Split::Batch, &[0.5, 0.5]);
    refused(two, &e, "other devices");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// No choice of shares hangs or changes a loss.
    #[test]
    fn any_shares_run(
        sequences in 4usize..9,
        m in 1u32..4,
        weights in proptest::collection::vec(proptest::collection::vec(1u32..20, 1..4), 3),
        by_directions in proptest::collection::vec(any::<bool>(), 2),
        group in 1u32..6,
    ) {
        let mut e = estimator(EstimatorName::CutTangent);
        e.group = group;
        let plan = line(&[FREE, FREE, BP], m, &e, None);
        let batch = batch(sequences, m);
        let expected = one_step(plan.clone(), &e, &batch);
        let mut plan = plan;
        for (stage, weights) in weights.iter().enumerate() {
            let sum: u32 = weights.iter().sum();
            let shares: Vec<f64> = weights.iter().map(|w| f64::from(*w) / f64::from(sum)).collect();
            let split = if by_directions.get(stage) == Some(&true) { Split::Directions } else { Split::Batch };
            plan = shared(plan, stage, split, &shares);
        }
        let found = one_step(plan, &e, &batch);
        prop_assert_eq!(found.0.to_bits(), expected.0.to_bits());
        prop_assert!((found.1.unwrap() / expected.1.unwrap() - 1.0).abs() < 1e-4);
    }
}
