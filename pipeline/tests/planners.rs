//! HybridOP's planner and `auto`: closed forms, worked examples, brute force, and what bad input is told.

use proptest::prelude::*;
use zofo_pipeline::{
    cluster::Kind,
    costs::{Costs, DeviceCosts, LayerCosts, Links},
    estimator::EstimatorName,
    planner::{
        Layout, Method, PlannerName, Problem,
        auto::{self, Effort},
        hybridop::{t_gpipe, t_head, t_tail},
    },
};

fn bp(name: &str, speed: f64) -> DeviceCosts {
    DeviceCosts::new(name, Kind::Bp, speed)
}

fn free(name: &str, speed: f64) -> DeviceCosts {
    DeviceCosts::new(name, Kind::BpFree, speed)
}

fn costs(layers: usize, devices: Vec<DeviceCosts>, m: u32, estimator: EstimatorName, q: u32) -> Costs {
    let mut c = Costs::new(vec![LayerCosts::new(1.0); layers], devices, m);
    (c.estimator, c.directions) = (Some(estimator), Some(q));
    c
}

#[test]
fn closed_forms_of_the_paper() {
    assert_eq!(t_gpipe(&[3.0, 3.0, 1.0, 1.0], 4), 51.0);
    assert_eq!(t_gpipe(&[4.0, 4.0], 2), 36.0);
    assert_eq!(t_tail(&[1.0, 1.0], &[2.0, 2.0], 4, 1), 24.0);
    assert_eq!(t_head(&[2.0, 2.0], &[1.0, 1.0], 4, 1), 23.0);
    // Where the closed form and the simulation part: 67 and 108, 151 and 245, 47 and 37.
    assert_eq!(t_head(&[2.0, 2.0], &[1.0, 1.0], 4, 12), 67.0);
    assert_eq!(t_head(&[2.0, 2.0], &[1.0, 2.0], 8, 12), 151.0);
    assert_eq!(t_head(&[1.0; 4], &[1.0; 6], 4, 4), 47.0);
}

/// Twelve layers, devices of speed 0.5, 0.5, 1, 1, M = 4 (the objective gives bp-free devices all that it can; the exact plans are 66, 124, 252).
#[test]
fn the_papers_objective_is_degenerate_and_auto_is_not() {
    for (q, exact) in [(1, 66.0), (4, 124.0), (12, 252.0)] {
        let devices = vec![free("n0", 0.5), free("n1", 0.5), bp("g0", 1.0), bp("g1", 1.0)];
        let mut c = costs(12, devices, 4, EstimatorName::LossDifference, q);
        c.merge_base = Some(false);
        let p = Problem::new(c).unwrap();
        let (method, open) = auto::asked(&p);
        assert!(!open);
        let theirs = PlannerName::Hybridop.propose(&p, &method).unwrap();
        let gpus: Vec<usize> = theirs.outcome.layout.stages[2..].iter().map(|s| s.layers.len()).collect();
        assert_eq!(gpus, [1, 1], "Q = {q}: all but one layer each go to the bp-free devices");
        assert!(theirs.outcome.makespan() > 1.3 * exact);
        let ours = auto::plan(&p, Effort::default()).unwrap();
        assert!(ours.proposal.outcome.makespan() <= exact, "Q = {q}: {}", ours.proposal.outcome.makespan());
        assert!(ours.lower_bound <= ours.proposal.outcome.makespan());
    }
}

/// As printed, nothing keeps a stage to `t_max`: its own term can be had for less than the stage takes.
#[test]
fn the_bottleneck_of_the_second_programme_binds() {
    let devices = vec![free("n0", 1.0), bp("g0", 1.0), bp("g1", 2.0)];
    let mut c = costs(9, devices, 8, EstimatorName::CutTangent, 1);
    c.devices[0].memory_bytes = Some(2.0);
    c.layers.iter_mut().for_each(|l| l.weight_bytes = 1.0);
    let p = Problem::new(c).unwrap();
    let (method, _) = auto::asked(&p);
    let split = |name: PlannerName| {
        let found = name.propose(&p, &method).unwrap();
        found.outcome.layout.stages.iter().map(|s| s.layers.len()).collect::<Vec<_>>()
    };
    // Two layers in front; behind, 3 (M - 1) t_max outweighs the sum: 2 and 5 layers balance times of 2 and 2.5. Unbound, the faster gets all.
    assert_eq!(split(PlannerName::Hybridop), [2, 2, 5]);
    assert_eq!(split(PlannerName::HybridopAsPrinted), [2, 1, 6]);
}

#[test]
fn a_slow_board_may_be_left_out() {
    let devices = vec![free("slow", 0.01), bp("g0", 1.0), bp("g1", 1.0)];
    let p = Problem::new(costs(4, devices, 4, EstimatorName::CutTangent, 4)).unwrap();
    let found = auto::plan(&p, Effort::default()).unwrap();
    assert!(found.proposal.outcome.devices.iter().all(|d| d.device != 0));
    assert!(found.lower_bound <= found.proposal.outcome.makespan());
}

#[test]
fn emulated_backpropagation_is_used_where_it_is_worth_it() {
    let plan = |fo_speed: f64| {
        let mut devices = vec![free("n0", 1.0), bp("g0", 1.0)];
        devices[0].fo_speed = Some(fo_speed);
        let p = Problem::new(costs(4, devices, 4, EstimatorName::CutTangent, 16)).unwrap();
        let found = auto::plan(&p, Effort::default()).unwrap();
        found.proposal.outcome.layout.stages[0].role
    };
    use zofo_pipeline::ir::Role;
    assert_eq!(plan(0.9), Role::FirstOrder);
    assert_ne!(plan(0.01), Role::ZerothOrder, "sixteen directions cost more than leaving the board out");
}

#[test]
fn directions_are_chosen_by_what_they_cost() {
    // A fast bp-free board is idle most of the time: many directions are free. A slow one has no time for any.
    let chosen = |speed: f64, asked: Option<EstimatorName>| {
        let mut c = costs(8, vec![free("n0", speed), bp("g0", 1.0)], 8, EstimatorName::CutTangent, 0);
        (c.directions, c.estimator) = (None, asked);
        c.devices[1].memory_bytes = Some(4.0);
        c.layers.iter_mut().for_each(|l| l.weight_bytes = 1.0);
        let found = auto::plan(&Problem::new(c).unwrap(), Effort::default()).unwrap();
        (found.proposal.method.estimator, found.proposal.method.directions)
    };
    let (estimator, directions) = chosen(100.0, None);
    assert!(estimator == EstimatorName::CutTangent && directions >= 8, "{estimator:?}, {directions}");
    // Guided estimates need the base pass alone.
    assert_eq!(chosen(0.3, None), (EstimatorName::Guided, 1));
    assert_eq!(chosen(0.3, Some(EstimatorName::CutTangent)).1, 0);
}

#[test]
fn what_does_not_fit_is_said() {
    let message = |c: Costs| auto::plan(&Problem::new(c).unwrap(), Effort::default()).unwrap_err().to_string();
    let mut c = costs(4, vec![free("n0", 1.0), bp("g0", 1.0)], 2, EstimatorName::CutTangent, 1);
    c.layers.iter_mut().for_each(|l| l.weight_bytes = 10.0);
    c.devices.iter_mut().for_each(|d| d.memory_bytes = Some(15.0));
    let m = message(c.clone());
    assert!(m.contains("40 bytes") && m.contains("30") && m.contains("10 too few"), "{m}");
    c.devices.iter_mut().for_each(|d| d.memory_bytes = Some(9.0));
    c.devices[1].memory_bytes = Some(90.0);
    c.layers.iter_mut().for_each(|l| l.activation_bytes = 30.0);
    let m = message(c.clone());
    assert!(m.contains("`n0` 0 (1 bytes too few for 1)") && m.contains("`g0` 2 (30 bytes too few for 3)"), "{m}");
    let m = message(costs(4, vec![free("n0", 1.0)], 2, EstimatorName::CutTangent, 1));
    assert!(m.contains("no order of the devices leaves one that backpropagates"), "{m}");
    for name in PlannerName::all() {
        let p = Problem::new(c.clone()).unwrap();
        let (method, _) = auto::asked(&p);
        if let Err(e) = name.propose(&p, &method) {
            assert!(!e.to_string().is_empty());
        }
    }
}

#[test]
fn nonsense_is_refused_by_name() {
    let good = costs(2, vec![bp("g0", 1.0)], 1, EstimatorName::CutTangent, 1).to_json();
    Costs::parse(&good).unwrap();
    for (from, to, part) in [
        (r#""work": 1.0"#, r#""work": -1.0"#, "work of layer 0"),
        (r#""work": 1.0"#, r#""work": 1e999"#, "costs"),
        (r#""speed": 1.0"#, r#""speed": 0.0"#, "speed of device `g0`"),
        (r#""micro_batches": 1"#, r#""micro_batches": 0"#, "micro_batches"),
        (r#""estimator": "cut-tangent""#, r#""estimator": "magic""#, "cut-tangent"),
        (r#""latency_s": 0.0"#, r#""latency_s": -1.0"#, "latency_s of the links"),
        (r#""kind": "bp""#, r#""kind": "tpu""#, "bp-free"),
        (r#""name": "g0""#, r#""nome": "g0""#, "nome"),
    ] {
        assert!(good.contains(from), "{from}");
        let e = Costs::parse(&good.replacen(from, to, 1)).unwrap_err();
        assert!(e.message().contains(part), "{to}: {e}");
    }
    let mut c = Costs::parse(&good).unwrap();
    c.layers.clear();
    assert!(c.check().unwrap_err().message().contains("no layer"));
    let mut c = Costs::parse(&good).unwrap();
    for (partition, part) in [
        (vec![("g0", 0, 1)], "ends at layer 1"),
        (vec![("g0", 1, 2)], "a gap"),
        (vec![("g0", 0, 0)], "no layer"),
        (vec![("g1", 0, 2)], "`g1`"),
        (vec![("g0", 0, 1), ("g0", 1, 2)], "twice"),
    ] {
        c.partition = Some(partition.iter().map(|(n, a, b)| (n.to_string(), *a, *b)).collect());
        assert!(c.check().unwrap_err().message().contains(part), "{partition:?}");
    }
    let links = good.replace(r#""links": {"#, r#""links": [{"from": "g0", "to": "gx", "#).replacen("},\n  \"micro", "}],\n  \"micro", 1);
    let e = Costs::parse(&links).unwrap_err();
    assert!(e.message().contains("`gx`"), "{e}\n{links}");
}

/// Replicas of a zeroth-order stage share out its directions; everybody takes the base pass, and only scalars cross.
#[test]
fn directions_are_shared_out() {
    use zofo_pipeline::{
        ir::Role,
        planner::{Member, Split, StageLayout},
    };
    let mut c = costs(2, vec![free("n0", 1.0), free("n1", 1.0), bp("g0", 4.0)], 2, EstimatorName::CutDifference, 8);
    c.group = 8;
    c.layers.iter_mut().for_each(|l| l.weight_bytes = 10.0);
    let p = Problem::new(c).unwrap();
    let (method, _) = auto::asked(&p);
    let run = |members: &[usize]| {
        let share = 1.0 / members.len() as f64;
        let members = members.iter().map(|d| Member { device: *d, share }).collect();
        let stages =
            vec![StageLayout::group(members, 0..1, Split::Directions, Role::ZerothOrder), StageLayout::single(2, 1..2, Role::FirstOrder)];
        Layout::line(stages).best(&p, &method).unwrap()
    };
    let (alone, both) = (run(&[0]), run(&[0, 1]));
    // Two micro-batches of one base pass and eight copies each, then of four.
    assert!(alone.makespan() >= 18.0 && both.makespan() >= 10.0 && both.makespan() < 12.0, "{} {}", alone.makespan(), both.makespan());
    // Both hold the layer whole.
    assert!(both.devices[..2].iter().all(|d| d.peak_bytes >= 10.0 && d.perturbing == 8.0), "{:?}", both.devices);
}

/// With one micro-batch a pipeline in front of the cut is one device at a time: sharing out the directions keeps all busy.
#[test]
fn few_micro_batches_share_directions() {
    let devices = vec![free("n0", 1.0), free("n1", 1.0), free("n2", 0.5), bp("g0", 2.0)];
    let p = Problem::new(costs(6, devices, 1, EstimatorName::CutTangent, 10)).unwrap();
    let (method, _) = auto::asked(&p);
    let shared = PlannerName::DirectionParallel.propose(&p, &method).unwrap();
    let line = PlannerName::Hybridop.propose(&p, &method).unwrap();
    assert!(shared.outcome.makespan() < line.outcome.makespan(), "{} {}", shared.outcome.makespan(), line.outcome.makespan());
    // Seconds per layer with its base: 1 + q and 2 (1 + q), so 5, 4 and 1 of ten are 6, 5 and 4, and no other way is below 6.
    assert_eq!(shared.notes, ["directions: 5 on n0, 4 on n1, 1 on n2"]);
    let refused = |method: &Method, p: &Problem| PlannerName::DirectionParallel.propose(p, method).unwrap_err().to_string();
    assert!(refused(&Method::FROZEN, &p).contains("none to share"));
    assert!(refused(&Method::new(EstimatorName::Guided, 4), &p).contains("none to share"));
    let one = Problem::new(costs(6, vec![free("n0", 1.0), bp("g0", 2.0)], 1, EstimatorName::CutTangent, 4)).unwrap();
    assert!(refused(&method, &one).contains("there is one"));
}

/// Random small instances: a few layers of unlike work, a few devices of unlike speed, memory limits, links.
fn instances(layers: usize, devices: usize) -> impl Strategy<Value = Costs> {
    let device = (1u32..5, any::<bool>(), 0u32..4, 0u32..4);
    (
        proptest::collection::vec((1u32..4, 0u32..3, 0u32..3, 0u32..3), 1..=layers),
        proptest::collection::vec(device, 1..=devices),
        1u32..4,
        0u32..3,
        0usize..5,
        (0u32..3, 0u32..3),
    )
        .prop_map(|(layers, devices, m, q, estimator, (latency, rate))| {
            let layers = layers.iter().map(|(w, weight, kept, out)| {
                let mut l = LayerCosts::new(f64::from(*w));
                (l.weight_bytes, l.activation_bytes, l.boundary_bytes) = (f64::from(*weight), f64::from(*kept), f64::from(*out));
                l
            });
            let mut names = 0;
            let devices = devices.iter().map(|(speed, exact, memory, fo)| {
                names += 1;
                let mut d = DeviceCosts::new(format!("d{names}"), if *exact { Kind::Bp } else { Kind::BpFree }, f64::from(*speed));
                d.memory_bytes = (*memory > 0).then(|| f64::from(6 * memory));
                if !exact && *fo == 1 {
                    d.fo_speed = Some(f64::from(*speed) / 2.0);
                }
                d
            });
            let estimator = EstimatorName::ALL[estimator].1;
            let mut c = Costs::new(layers.collect(), devices.collect(), m);
            (c.estimator, c.directions) = (Some(estimator), Some(q));
            if estimator == EstimatorName::EarlyExit {
                c.exit_directions = 1;
            }
            c.merge_base = Some(m % 2 == 0);
            if let Links::Uniform(l) = &mut c.links {
                (l.latency_s, l.bytes_per_s) = (f64::from(latency), (rate > 0).then(|| 1.0 / f64::from(rate)));
            }
            c
        })
}

fn compositions(layers: usize, parts: usize) -> Vec<Vec<usize>> {
    if parts == 1 {
        return vec![vec![layers]];
    }
    (1..=layers.saturating_sub(parts - 1))
        .flat_map(|first| {
            compositions(layers - first, parts - 1).into_iter().map(move |rest| {
                let mut ends = vec![first];
                ends.extend(rest.iter().map(|e| e + first));
                ends
            })
        })
        .collect()
}

/// Every order, split and urgency.
fn brute_force(p: &Problem, method: &Method) -> Option<f64> {
    let mut best: Option<f64> = None;
    for (devices, cut) in auto::device_orders(p) {
        for ends in compositions(p.layers(), devices.len()) {
            if let Ok(outcome) = Layout::pipeline(&devices, &ends, cut, method).best(p, method) {
                best = Some(best.map_or(outcome.makespan(), |b: f64| b.min(outcome.makespan())));
            }
        }
    }
    best
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, ..ProptestConfig::default() }
}

fn meets_brute_force(c: Costs) -> std::result::Result<(), TestCaseError> {
    let p = Problem::new(c).unwrap();
    let (method, _) = auto::asked(&p);
    let exact = brute_force(&p, &method);
    let found = auto::plan(&p, Effort::thorough());
    match (exact, found) {
        (Some(exact), Ok(found)) => {
            // Other planners' plans may be better: they share stages.
            prop_assert!(found.proposal.outcome.makespan() <= exact * (1.0 + 1e-9), "{} > {exact}", found.proposal.outcome.makespan());
            prop_assert!(found.lower_bound <= exact * (1.0 + 1e-9));
            if found.proven_optimal {
                prop_assert!((found.proposal.outcome.makespan() - exact).abs() <= 1e-9 * exact);
            }
        }
        (None, found) => prop_assert!(found.is_err() || !found.unwrap().proposal.notes.is_empty()),
        (Some(exact), Err(e)) => prop_assert!(false, "{exact} by brute force, but: {e}"),
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn auto_is_brute_force(c in instances(6, 3)) {
        meets_brute_force(c)?;
    }

    /// Never worse than any other planner, and never below its own bound.
    #[test]
    fn auto_is_never_worse(c in instances(24, 6)) {
        let p = Problem::new(c).unwrap();
        let (method, _) = auto::asked(&p);
        let ours = auto::plan(&p, Effort::default());
        for name in PlannerName::all().filter(|n| n.trains()) {
            if let Ok(theirs) = name.propose(&p, &method) {
                let ours = ours.as_ref().map_err(|e| TestCaseError::fail(format!("{} plans, auto does not: {e}", name.name())))?;
                prop_assert!(ours.proposal.outcome.makespan() <= theirs.outcome.makespan() * (1.0 + 1e-9), "{}", name.name());
            }
        }
        if let Ok(found) = &ours {
            prop_assert!(found.lower_bound <= found.proposal.outcome.makespan() * (1.0 + 1e-9));
            for d in &found.proposal.outcome.devices {
                prop_assert!(p.device(d.device).memory_bytes.is_none_or(|m| d.peak_bytes <= m));
            }
        }
    }
}

proptest! {
    #![proptest_config(config(20))]

    /// Larger instances, of which a brute force takes a while.
    #[test]
    fn auto_is_brute_force_on_larger_instances(c in instances(12, 5)) {
        meets_brute_force(c)?;
    }
}

/// How often the plan is proven optimal, printed; links, memory and all estimators included.
#[test]
fn most_small_plans_are_proven() {
    use proptest::{strategy::ValueTree, test_runner::TestRunner};
    let mut runner = TestRunner::deterministic();
    let (mut proven, mut all) = (0, 0);
    for _ in 0..200 {
        let c = instances(10, 4).new_tree(&mut runner).unwrap().current();
        if let Ok(found) = auto::plan(&Problem::new(c).unwrap(), Effort::default()) {
            all += 1;
            proven += usize::from(found.proven_optimal);
        }
    }
    println!("{proven} of {all} plans proven optimal");
    assert!(2 * proven > all, "{proven} of {all}");
}
