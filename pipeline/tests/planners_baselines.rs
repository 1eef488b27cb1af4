//! Planners that backpropagate everywhere: their formulas against worked examples, their proposals against what any plan must be.

use proptest::prelude::*;
use zofo_pipeline::{
    check::check,
    cluster::Kind,
    costs::{Costs, DeviceCosts, LayerCosts, LinkCosts, Links},
    ir::Workload,
    order::ScheduleName,
    planner::{
        Method, PlannerName, Problem, Proposal, Split,
        accpar::{self, LayerComm, Type},
        adaptis,
        asteroid::{self, Leg},
        dapple,
        xronos::{self, Worker},
    },
    sim::{StageTiming, Timing, Urgency, arrange_on, simulate, trace},
};

const BASELINES: [PlannerName; 6] =
    [PlannerName::Dapple, PlannerName::Hdp, PlannerName::Asteroid, PlannerName::Accpar, PlannerName::Xronos, PlannerName::Adaptis];

/// What the search of AdaPtis starts from.
const STARTS: [PlannerName; 7] = [
    PlannerName::Single,
    PlannerName::Gpipe,
    PlannerName::GpipeMinMax,
    PlannerName::OneFOneB,
    PlannerName::OneFOneBMinMax,
    PlannerName::ZbH1,
    PlannerName::Interleaved,
];

/// Layers of this work on devices of these speeds, links that cost nothing; a backward pass takes twice a forward pass.
fn costs(work: &[f64], speeds: &[f64], micro_batches: u32) -> Costs {
    let devices = speeds.iter().enumerate().map(|(i, s)| DeviceCosts::new(format!("d{i}"), Kind::Bp, *s));
    Costs::new(work.iter().map(|w| LayerCosts::new(*w)).collect(), devices.collect(), micro_batches)
}

fn propose(planner: PlannerName, costs: &Costs) -> zofo_hal::Result<Proposal> {
    planner.propose(&Problem::new(costs.clone()).unwrap(), &Method::FROZEN)
}

fn makespan(planner: PlannerName, costs: &Costs) -> f64 {
    propose(planner, costs).unwrap_or_else(|e| panic!("{}: {e}", planner.name())).outcome.makespan()
}

fn leg(forward: f64, backward: f64, all_reduce: f64) -> Leg {
    let mut leg = Leg::default();
    (leg.forward, leg.backward, leg.all_reduce) = (forward, backward, all_reduce);
    leg
}

#[test]
fn dapple_latency_by_hand() {
    let stage = leg(1.0, 2.0, 0.0);
    // Two equal stages: the last is the pivot; 1 + 1, then 3 * 3, then 2 + 2. That is (M + S - 1)(F + B).
    assert_eq!(dapple::pivot(&[stage, stage], 4), 1);
    assert_eq!(dapple::latency(&[stage, stage], 4), 15.0);
    // A transfer of half a second each way is on the way in and on the way out.
    assert_eq!(dapple::latency(&[stage, leg(0.5, 0.5, 0.0), stage], 4), 16.0);
    // The first stage is three times as slow: it is the pivot, and never waits.
    assert_eq!(dapple::pivot(&[leg(3.0, 6.0, 0.0), stage], 4), 0);
    assert_eq!(dapple::latency(&[leg(3.0, 6.0, 0.0), stage], 4), 36.0);
    // One micro-batch has no steady phase, so the pivot stays where it is.
    assert_eq!(dapple::latency(&[leg(3.0, 6.0, 0.0), stage], 1), 12.0);
    // An all-reduce follows the last backward pass of its stage, or hides behind those upstream.
    assert_eq!(dapple::latency(&[leg(1.0, 2.0, 5.0)], 4), 17.0);
    assert_eq!(dapple::latency(&[stage, leg(1.0, 2.0, 2.0)], 4), 15.0);
}

#[test]
fn asteroid_latency_by_hand() {
    let stage = leg(1.0, 2.0, 0.0);
    // Dominant is the last: stage 0 takes 4 * 3 and the 3 in front of it, stage 1 waits 1 and takes 12.
    assert_eq!(asteroid::latency(&[stage, stage], 4), 15.0);
    assert_eq!(asteroid::latency(&[leg(3.0, 6.0, 0.0), stage], 4), 36.0);
    // Behind the dominant step: waits 3, takes 36 - 9, reduces for 10.
    assert_eq!(asteroid::latency(&[leg(3.0, 6.0, 0.0), leg(1.0, 2.0, 10.0)], 4), 40.0);
}

#[test]
fn asteroid_shares_by_hand() {
    let share = |costs: Costs, kept| asteroid::share(&Problem::new(costs).unwrap(), &[0, 1], &(0..1), kept);
    assert_eq!(share(costs(&[1.0], &[3.0, 1.0], 1), 1), Some(vec![24, 8]));
    let mut limited = costs(&[1.0], &[3.0, 1.0], 1);
    limited.layers[0].activation_bytes = 32.0;
    limited.devices[0].memory_bytes = Some(16.0);
    assert_eq!(share(limited.clone(), 1), Some(vec![16, 16]));
    assert_eq!(share(limited.clone(), 2), Some(vec![8, 24]));
    limited.devices[1].memory_bytes = Some(15.0);
    assert_eq!(share(limited, 1), None);
    // 32 parts at 0.3, 1 and 1: 16, 8, 8 is not what rounding gives, but no block moved makes the slowest faster.
    let p = Problem::new(costs(&[1.0], &[10.0, 3.0, 3.0], 1)).unwrap();
    let parts = asteroid::share(&p, &[0, 1, 2], &(0..1), 1).unwrap();
    let slowest = |parts: &[u32]| parts.iter().zip([10.0, 3.0, 3.0]).map(|(n, s)| f64::from(*n) / s).fold(0.0, f64::max);
    for (a, b) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
        let mut moved = parts.clone();
        (moved[a], moved[b]) = (moved[a] - 1, moved[b] + 1);
        assert!(slowest(&moved) >= slowest(&parts), "{parts:?} {moved:?}");
    }
}

#[test]
fn accpar_types_by_hand() {
    let layer = |batch, tensor, convert| LayerComm { batch, tensor, convert };
    let of = |convert| [layer(1.0, 3.0, convert), layer(10.0, 2.0, convert), layer(1.0, 3.0, convert)];
    // 1 + 1 + 2 + 1 + 1 against 3 + 2 + 3.
    assert_eq!(accpar::types(&of(1.0)), [Type::Batch, Type::Tensor, Type::Batch]);
    // 1 + 3 + 2 + 3 + 1 against 3 + 2 + 3.
    assert_eq!(accpar::types(&of(3.0)), [Type::Tensor; 3]);
    assert_eq!(accpar::types(&[]), []);
}

/// 2 layers of one second, 4 micro-batches: a pipeline takes (4 + 1) * 3, two whole models 2 * 6 each.
#[test]
fn hdp_by_hand() {
    let mut c = costs(&[1.0, 1.0], &[1.0, 1.0], 4);
    assert_eq!(makespan(PlannerName::Hdp, &c), 12.0);
    c.layers.iter_mut().for_each(|l| l.weight_bytes = 10.0);
    c.devices.iter_mut().for_each(|d| d.memory_bytes = Some(15.0));
    assert_eq!(makespan(PlannerName::Hdp, &c), 15.0);
    // Three times as fast, three times as many micro-batches: 3 * 3 against 1 * 9.
    let found = propose(PlannerName::Hdp, &costs(&[3.0], &[3.0, 1.0], 4)).unwrap();
    assert_eq!(found.outcome.makespan(), 9.0);
    assert_eq!(found.outcome.layout.chains.iter().map(|c| c.micro_batches.clone()).collect::<Vec<_>>(), [0..3, 3..4]);
    // So slow that it gets nothing.
    let found = propose(PlannerName::Hdp, &costs(&[3.0], &[100.0, 1.0], 4)).unwrap();
    assert!(found.outcome.layout.chains.is_empty() && found.outcome.devices.len() == 1);
}

/// More devices than are enumerated: two kinds, six of each.
#[test]
fn hdp_by_type() {
    let c = costs(&[1.0; 4], &[[1.0; 6], [2.0; 6]].concat(), 24);
    let found = propose(PlannerName::Hdp, &c).unwrap();
    // Each on its own takes 12 or 6 for a micro-batch: 24 of them over a speed of 18 take 16 at least.
    assert!((16.0..=24.0).contains(&found.outcome.makespan()), "{}", found.outcome.makespan());
}

/// Even shares are as slow as the slowest: 1/2 at speed 1 against 1/4.
#[test]
fn uneven_shares_beat_even_ones() {
    let c = costs(&[1.0], &[1.0, 3.0], 2);
    assert_eq!(makespan(PlannerName::Dapple, &c), 3.0);
    assert_eq!(makespan(PlannerName::Asteroid, &c), 1.5);
}

#[test]
fn xronos_shares_by_hand() {
    let mut c = costs(&[1.0, 1.0], &[1.0, 3.0, 0.1], 2);
    c.tensor_units = 4;
    let found = propose(PlannerName::Xronos, &c).unwrap();
    let members: Vec<_> = found.outcome.layout.stages[0].members.iter().map(|m| (m.device, m.share)).collect();
    assert_eq!(members, [(0, 0.25), (1, 0.75)]);
    assert_eq!(found.outcome.makespan(), 2.0 * 2.0 * 3.0 / 4.0);
    assert!(found.notes.iter().any(|n| n.contains("without d2")), "{:?}", found.notes);
    // A memory of two units.
    c.layers.iter_mut().for_each(|l| l.weight_bytes = 20.0);
    c.devices[1].memory_bytes = Some(20.0);
    let found = propose(PlannerName::Xronos, &c).unwrap();
    assert_eq!(found.outcome.layout.stages[0].members.iter().map(|m| m.share).collect::<Vec<_>>(), [0.5, 0.5]);
}

/// Where gradients cost more than activations every layer is shared by tensor, and by no more devices than it has heads: the slowest takes none.
#[test]
fn accpar_keeps_to_the_heads() {
    let mut c = costs(&[1.0, 1.0], &[1.0, 0.5, 2.0], 2);
    c.layers.iter_mut().for_each(|l| (l.trainable_bytes, l.boundary_bytes) = (1e6, 1.0));
    if let zofo_pipeline::costs::Links::Uniform(l) = &mut c.links {
        l.bytes_per_s = Some(1e3);
    }
    let members = |c: &Costs| {
        let found = propose(PlannerName::Accpar, c).unwrap();
        let stage = &found.outcome.layout.stages[0];
        (stage.batch_layers.len(), stage.members.iter().map(|m| m.device).collect::<Vec<_>>())
    };
    assert_eq!(members(&c), (0, vec![0, 1, 2]));
    c.tensor_units = 2;
    assert_eq!(members(&c), (0, vec![0, 2]));
}

/// f = 1, b = 2, two stages, two micro-batches: F0 F1 . B0 . B1 over 9 seconds, and F0 B0 F1 B1 from 1 to 7.
#[test]
fn bubbles_by_hand() {
    let mut stage = StageTiming::default();
    (stage.forward, stage.backward_input, stage.backward_weight) = (1.0, 1.0, 1.0);
    let schedule = ScheduleName::OneFOneB.build(&Workload::first_order(2, 2)).unwrap();
    let found = adaptis::bubbles(&trace(&schedule, &Timing::new(vec![stage.clone(), stage])).unwrap());
    assert_eq!((found[0].leading, found[0].trailing, found[0].residual), (0.0, 0.0, 3.0));
    assert_eq!((found[1].leading, found[1].trailing, found[1].residual), (1.0, 2.0, 0.0));
    assert_eq!((found[0].sum(), found[1].boundary()), (3.0, 3.0));
}

/// It tunes what it starts from, and here that is not the best: the fastest device is last, and stages are of single layers.
#[test]
fn adaptis_finds_more_than_it_starts_from() {
    let c = costs(&[1.0, 4.0, 1.0, 1.0, 2.0, 1.0, 3.0, 1.0], &[1.0, 2.0, 4.0], 6);
    assert!(makespan(PlannerName::Adaptis, &c) < STARTS.map(|other| makespan(other, &c)).into_iter().fold(f64::INFINITY, f64::min));
}

#[test]
fn list_scheduling_takes_a_placement() {
    let w = Workload { split_backward: true, ..Workload::first_order(4, 5) };
    let t = Timing::nominal(4);
    let (schedule, made) = arrange_on(&w, &[0, 1, 1, 0], 2, &t, &Urgency::frugal(&w)).unwrap();
    check(&schedule).unwrap();
    let replayed = simulate(&schedule, &t).unwrap();
    assert!(replayed.makespan <= made.makespan && replayed.makespan >= 2.0 * 5.0 * 3.0);
    assert!(arrange_on(&w, &[0, 1], 2, &t, &Urgency::frugal(&w)).unwrap_err().message().contains("2 stages are placed"));
    assert!(arrange_on(&w, &[0, 1, 2, 0], 2, &t, &Urgency::frugal(&w)).unwrap_err().message().contains("worker 2"));
}

#[test]
fn nothing_fits_nowhere() {
    let mut c = costs(&[1.0, 1.0], &[1.0, 1.0], 2);
    c.layers.iter_mut().for_each(|l| l.weight_bytes = 100.0);
    c.devices.iter_mut().for_each(|d| d.memory_bytes = Some(30.0));
    for planner in BASELINES {
        let e = propose(planner, &c).unwrap_err();
        assert!(e.message().contains("device `d") && e.message().contains("too few"), "{}: {e}", planner.name());
    }
}

#[test]
fn edges() {
    for planner in BASELINES {
        // One device, one micro-batch; more devices than layers; layers without work.
        assert_eq!(makespan(planner, &costs(&[1.0, 2.0], &[1.0], 1)), 9.0, "{}", planner.name());
        assert!(makespan(planner, &costs(&[1.0], &[1.0, 1.0, 2.0], 3)) <= 9.0, "{}", planner.name());
        assert_eq!(makespan(planner, &costs(&[0.0, 0.0, 0.0], &[1.0, 2.0], 2)), 0.0, "{}", planner.name());
        assert!(makespan(planner, &costs(&[0.0, 1.0, 0.0, 0.0], &[1.0, 2.0], 2)) <= 6.0, "{}", planner.name());
        let mut none = costs(&[1.0], &[1.0], 1);
        none.devices[0].kind = Kind::BpFree;
        assert!(propose(planner, &none).unwrap_err().message().contains("no device can backpropagate"));
        // At the price of emulation, and without those for which no price is known.
        let mut some = costs(&[1.0, 1.0], &[1.0, 1.0, 1.0], 2);
        some.devices[0].kind = Kind::BpFree;
        (some.devices[1].kind, some.devices[1].fo_speed) = (Kind::BpFree, Some(0.5));
        let found = propose(planner, &some).unwrap();
        assert!(found.outcome.devices.iter().all(|d| d.device != 0));
        assert!(found.notes.iter().any(|n| n.contains("without d0")) && found.notes.iter().any(|n| n.starts_with("after ")));
        assert_eq!(PlannerName::parse(planner.name()).unwrap(), planner);
    }
}

/// Least slowest worker over all ways to hand out units.
fn brute_force(workers: &[Worker], units: u32) -> Option<f64> {
    let Some((first, rest)) = workers.split_first() else { return (units == 0).then_some(0.0) };
    let with = |n: u32| brute_force(rest, units - n).map(|t| t.max(first.seconds(n)));
    (0..=units.min(first.most)).filter_map(with).min_by(f64::total_cmp)
}

/// Random costs: to 12 layers, 6 devices, some of which cannot backpropagate or have little memory, links from free to slow.
fn problems() -> impl Strategy<Value = Costs> {
    let layer = (0u32..5, 0u32..20, 0u32..8, 0u32..10, 0u32..6);
    let device = (0u32..6, 1u32..8, prop_oneof![Just(None), (60u32..400).prop_map(Some)], 0u32..4);
    let link = (0u32..3, 0u32..4, 0u32..3, any::<bool>());
    let lists = (proptest::collection::vec(layer, 1..=12), proptest::collection::vec(device, 1..=6));
    (lists, 1u32..7, 1u32..9, link).prop_map(|((layers, devices), m, units, (latency, rate, overlap, half_duplex))| {
        let layers = layers.into_iter().map(|(work, weight, trained, activation, boundary)| {
            let mut l = LayerCosts::new(f64::from(work));
            (l.weight_bytes, l.trainable_bytes) = (f64::from(weight), f64::from(trained));
            (l.activation_bytes, l.boundary_bytes) = (f64::from(activation), f64::from(boundary));
            l
        });
        let devices = devices.into_iter().enumerate().map(|(i, (kind, speed, memory, backward))| {
            let mut d = DeviceCosts::new(format!("d{i}"), if kind < 2 { Kind::BpFree } else { Kind::Bp }, f64::from(speed));
            d.fo_speed = (kind == 1).then_some(f64::from(speed) / 3.0);
            d.memory_bytes = memory.map(f64::from);
            d.backward_ratio = 1.0 + f64::from(backward) / 3.0;
            d
        });
        let mut c = Costs::new(layers.collect(), devices.collect(), m);
        c.tensor_units = units;
        let mut link = LinkCosts::default();
        link.latency_s = f64::from(latency) / 8.0;
        link.bytes_per_s = (rate > 0).then(|| f64::from(rate) * 4.0);
        (link.overlap, link.half_duplex) = (f64::from(overlap) / 2.0, half_duplex);
        c.links = Links::Uniform(link);
        c
    })
}

fn is_sound(planner: PlannerName, p: &Problem, found: &Proposal) -> Result<(), TestCaseError> {
    let (outcome, name) = (&found.outcome, planner.name());
    let layout = &outcome.layout;
    check(&outcome.schedule).map_err(|e| TestCaseError::fail(format!("{name}: {e}")))?;
    let mut chains: Vec<_> = layout.chains.iter().map(|c| c.stages.clone()).collect();
    if chains.is_empty() {
        chains.push(0..layout.stages.len());
    }
    for stages in chains {
        let mut next = 0;
        for stage in &layout.stages[stages] {
            prop_assert_eq!(stage.layers.start, next, "{}", name);
            prop_assert!(!stage.layers.is_empty(), "{}", name);
            next = stage.layers.end;
        }
        prop_assert_eq!(next, p.layers(), "{}", name);
    }
    let mut taken = 0;
    for chain in &layout.chains {
        prop_assert_eq!(chain.micro_batches.start, taken, "{}", name);
        prop_assert!(!chain.micro_batches.is_empty(), "{}", name);
        taken = chain.micro_batches.end;
    }
    prop_assert!(layout.chains.is_empty() || taken == p.micro_batches());
    for stage in &layout.stages {
        let sum: f64 = stage.members.iter().map(|m| m.share).sum();
        prop_assert!((sum - 1.0).abs() < 1e-9 && stage.members.iter().all(|m| m.share > 0.0), "{}: {:?}", name, stage);
        prop_assert!(stage.members.iter().all(|m| p.device(m.device).can_backpropagate()), "{}", name);
    }
    for device in &outcome.devices {
        prop_assert!(p.device(device.device).memory_bytes.is_none_or(|limit| device.peak_bytes <= limit), "{}", name);
        prop_assert!(device.busy <= outcome.makespan() * (1.0 + 1e-9), "{}", name);
    }
    // All work over all speeds: no plan is faster.
    let speed: f64 = p.capable().iter().map(|d| 1.0 / p.both(*d, &(0..p.layers()))).sum();
    prop_assert!(outcome.makespan() >= f64::from(p.micro_batches()) / speed * (1.0 - 1e-9), "{}", name);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Handing out one at a time is best for identical units and affine costs.
    #[test]
    fn greedy_is_optimal(workers in proptest::collection::vec((0u32..6, 1u32..6, 0u32..7), 1..5), units in 0u32..9) {
        let workers: Vec<Worker> =
            workers.into_iter().map(|(a, b, most)| Worker { fixed_s: a.into(), per_unit_s: b.into(), most }).collect();
        let greedy = xronos::assign(&workers, units);
        let slowest = greedy.as_ref().map(|g| g.iter().zip(&workers).map(|(n, w)| w.seconds(*n)).fold(0.0, f64::max));
        prop_assert_eq!(slowest, brute_force(&workers, units));
        if let Some(g) = greedy {
            prop_assert_eq!(g.iter().sum::<u32>(), units);
            prop_assert!(g.iter().zip(&workers).all(|(n, w)| *n <= w.most));
        }
    }

    /// The dynamic programme over types against all assignments.
    #[test]
    fn types_are_optimal(layers in proptest::collection::vec((0u32..9, 0u32..9, 0u32..5), 1..8)) {
        let layers: Vec<LayerComm> =
            layers.into_iter().map(|(b, t, c)| LayerComm { batch: b.into(), tensor: t.into(), convert: c.into() }).collect();
        let cost = |types: &[Type]| -> f64 {
            let own: f64 = layers.iter().zip(types).map(|(l, t)| if *t == Type::Batch { l.batch } else { l.tensor }).sum();
            own + types.windows(2).zip(&layers).map(|(t, l)| if t[0] == t[1] { 0.0 } else { l.convert }).sum::<f64>()
        };
        let of = |bits: u32| -> Vec<Type> { (0..layers.len()).map(|l| if bits >> l & 1 == 1 { Type::Tensor } else { Type::Batch }).collect() };
        let least = (0..1 << layers.len()).map(|bits| cost(&of(bits))).fold(f64::INFINITY, f64::min);
        prop_assert_eq!(cost(&accpar::types(&layers)), least);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the costs: a plan that is complete, fits and is reproducible, or the device that is short and by how much.
    #[test]
    fn proposals_are_sound(costs in problems()) {
        let p = Problem::new(costs).unwrap();
        for planner in BASELINES {
            match planner.propose(&p, &Method::FROZEN) {
                Ok(found) => {
                    is_sound(planner, &p, &found)?;
                    let again = planner.propose(&p, &Method::FROZEN).unwrap();
                    prop_assert_eq!(&again.outcome, &found.outcome, "{}", planner.name());
                    prop_assert_eq!(&again.notes, &found.notes, "{}", planner.name());
                }
                Err(e) => {
                    let said = e.message();
                    let names = said.contains("no device can backpropagate") || said.contains("device `d") && said.contains("too few");
                    prop_assert!(names, "{}: {}", planner.name(), said);
                }
            }
        }
    }

    #[test]
    fn adaptis_is_no_slower_than_where_it_starts(costs in problems()) {
        let p = Problem::new(costs).unwrap();
        // Devices beyond the number of layers are left out, and one of them may be the fastest.
        prop_assume!(p.capable().len() <= p.layers());
        let own = PlannerName::Adaptis.propose(&p, &Method::FROZEN);
        for start in STARTS {
            if let Ok(other) = start.propose(&p, &Method::FROZEN) {
                let own = own.as_ref().map_err(|e| TestCaseError::fail(format!("{}: {e}", start.name())))?.outcome.makespan();
                prop_assert!(own <= other.outcome.makespan() * (1.0 + 1e-9), "{}: {} > {}", start.name(), own, other.outcome.makespan());
            }
        }
    }

    /// Each planner's way of sharing is what its layout says.
    #[test]
    fn layouts_are_of_their_kind(costs in problems()) {
        let p = Problem::new(costs).unwrap();
        for (planner, split) in [(PlannerName::Dapple, Split::Batch), (PlannerName::Asteroid, Split::Batch), (PlannerName::Xronos, Split::Tensor)] {
            if let Ok(found) = planner.propose(&p, &Method::FROZEN) {
                for stage in found.outcome.layout.stages.iter().filter(|s| s.members.len() > 1) {
                    prop_assert_eq!(stage.split, split);
                    let even = stage.members.iter().all(|m| m.share == 1.0 / stage.members.len() as f64);
                    prop_assert!(planner != PlannerName::Dapple || even);
                }
            }
        }
    }
}
