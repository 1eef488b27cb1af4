//! The simulator against worked examples (the HybridOP toy, its corrections) and against properties that any exact one has.

use proptest::prelude::*;
use zofo_hal::op::Form;
use zofo_pipeline::{
    check::check,
    ir::{Readout, Role, Schedule, Workload},
    order::{ScheduleName, chimera, interleaved},
    sim::{Class, HeadOrder, InFlight, Link, StageTiming, Timing, Urgency, arrange, simulate, trace},
};

/// A stage of forward time `f` whose backward pass takes twice that, in equal parts, and a copy as long as a forward pass.
fn stage(f: f64) -> StageTiming {
    let mut t = StageTiming::default();
    (t.forward, t.backward_input, t.backward_weight, t.perturbed_beta) = (f, f, f, f);
    t
}

fn timing(forward: &[f64]) -> Timing {
    Timing::new(forward.iter().map(|f| stage(*f)).collect())
}

/// Zeroth-order stages in front, one direction per action, base passes on their own.
fn head(zo: usize, fo: usize, m: u32, q: u32, readout: Readout) -> Workload {
    Workload {
        roles: [vec![Role::ZerothOrder; zo], vec![Role::FirstOrder; fo]].concat(),
        directions: q,
        readout,
        merge_base: false,
        ..Workload::first_order(zo + fo, m)
    }
}

fn best(w: &Workload, t: &Timing) -> f64 {
    Urgency::all(w).iter().map(|u| arrange(w, t, u).unwrap().1.makespan).fold(f64::INFINITY, f64::min)
}

fn with(w: &Workload, classes: [Class; 3], in_flight: InFlight) -> Urgency {
    let mut u = Urgency::frugal(w);
    (u.classes, u.in_flight, u.credits) = (classes, in_flight, zofo_pipeline::ir::Credits::ample(w));
    u
}

const B: Class = Class::Backward;
const F: Class = Class::Forward;
const P: Class = Class::Perturbed;

/// |N| = |G| = 2, M = 4, Q = 1; a GPU stage takes 1, an NPU stage 2, or 3 where it must backpropagate.
#[test]
fn the_toy_of_the_paper() {
    let gpipe = |f: &[f64], m| {
        let s = ScheduleName::Gpipe.build(&Workload::first_order(f.len(), m)).unwrap();
        simulate(&s, &timing(f)).unwrap().makespan
    };
    assert_eq!(gpipe(&[3.0, 3.0, 1.0, 1.0], 4), 51.0);
    assert_eq!(gpipe(&[4.0, 4.0], 2), 36.0);
    // With four micro-batches, as the other placements have them, the GPUs alone would take 30: the paper's baseline costs it a fifth.
    assert_eq!(gpipe(&[2.0, 2.0], 4), 30.0);

    let mut tail = head(0, 4, 4, 1, Readout::Tail);
    tail.roles[2..].fill(Role::ZerothOrder);
    for order in [HeadOrder::BaseFirst, HeadOrder::MicroBatchFirst] {
        let mut u = with(&tail, [B, F, P], InFlight::All);
        u.head = order;
        assert_eq!(arrange(&tail, &timing(&[1.0, 1.0, 2.0, 2.0]), &u).unwrap().1.makespan, 24.0, "{order:?}");
    }

    let w = head(2, 2, 4, 1, Readout::Loss);
    let t = timing(&[2.0, 2.0, 1.0, 1.0]);
    let (schedule, timeline) = arrange(&w, &t, &with(&w, [B, F, P], InFlight::All)).unwrap();
    assert_eq!(timeline.makespan, 23.0);
    assert_eq!(simulate(&schedule, &t).unwrap().makespan, 23.0);
    // 22 is the optimum of orders that keep each class in sequence: 21 was excluded by exhaustive search.
    assert_eq!(best(&w, &t), 22.0);
}

#[test]
fn worked_examples_of_the_head_placement() {
    for (zo, fo, m, q, want) in [
        (&[2.0, 2.0][..], &[1.0, 1.0][..], 4, 12, 108.0),
        (&[2.0, 2.0], &[1.0, 2.0], 8, 12, 245.0),
        (&[1.0; 4], &[1.0; 6], 4, 4, 37.0),
        (&[1.0, 1.0], &[1.0, 1.0], 8, 4, 59.0),
        (&[0.5; 4], &[1.0, 1.0, 1.5, 1.5, 2.0, 2.0], 8, 12, 249.0),
    ] {
        let w = head(zo.len(), fo.len(), m, q, Readout::Loss);
        assert_eq!(best(&w, &timing(&[zo, fo].concat())), want, "{zo:?} {fo:?} M={m} Q={q}");
    }
}

#[test]
fn worked_examples_of_the_cut_readout() {
    for (zo, fo, m, q, want) in [
        (&[2.0, 2.0][..], &[1.0, 1.0][..], 4, 1, 19.0),
        (&[1.0, 1.0], &[1.0, 1.0], 8, 4, 41.0),
        (&[0.5, 0.5], &[1.0, 1.0], 8, 12, 52.5),
        (&[0.5; 4], &[1.0, 1.0, 1.5, 1.5, 2.0, 2.0], 8, 12, 71.0),
    ] {
        let w = head(zo.len(), fo.len(), m, q, Readout::Cut);
        assert_eq!(best(&w, &timing(&[zo, fo].concat())), want, "{zo:?} {fo:?} M={m} Q={q}");
    }
}

/// For identical micro-batches GPipe takes sum f + (M-1) max f + sum b + (M-1) max b.
#[test]
fn gpipe_has_a_closed_form() {
    let t = timing(&[1.0, 3.0, 2.0]);
    let s = ScheduleName::Gpipe.build(&Workload::first_order(3, 5)).unwrap();
    assert_eq!(simulate(&s, &t).unwrap().makespan, 6.0 + 4.0 * 3.0 + 12.0 + 4.0 * 6.0);
}

/// Equal stages: 1F1B takes (M + S - 1)(f + b), interleaving divides its bubble by the chunks, ZB-H1 takes a third of it.
#[test]
fn closed_forms_of_equal_stages() {
    let (s, m) = (4, 8);
    let one = ScheduleName::OneFOneB.build(&Workload::first_order(s, m)).unwrap();
    assert_eq!(simulate(&one, &timing(&[1.0; 4])).unwrap().makespan, 11.0 * 3.0);
    let mut even = Timing::new(vec![stage(0.5); 8]);
    even.stages.iter_mut().for_each(|t| (t.backward_input, t.backward_weight) = (0.5, 0.5));
    let two = interleaved(s, 2, m).unwrap();
    assert_eq!(simulate(&two, &even).unwrap().makespan, 24.0 + 3.0 * 3.0 / 2.0);
    let h1 = ScheduleName::ZbH1.build(&Workload::first_order(s, m)).unwrap();
    // (S - 1)(f + b_input - b_weight) of bubble.
    assert_eq!(simulate(&h1, &timing(&[1.0; 4])).unwrap().makespan, 24.0 + 3.0);
}

/// D = N = 4, f = 1, b = 2: N forward and N + D - 2 backward passes on the critical path (Chimera, section 3.2).
#[test]
fn chimera_has_a_closed_form() {
    let s = chimera(4, 4).unwrap();
    check(&s).unwrap();
    assert_eq!(simulate(&s, &timing(&[1.0; 8])).unwrap().makespan, 4.0 + 2.0 * 6.0);
    assert!(chimera(3, 4).unwrap_err().message().contains("even"));
}

#[test]
fn micro_batches_need_not_divide() {
    for (p, v, m) in [(2, 2, 3), (3, 2, 4), (3, 3, 7), (4, 2, 1), (4, 3, 6), (2, 1, 5), (5, 2, 13)] {
        let s = interleaved(p, v, m).unwrap();
        check(&s).unwrap_or_else(|e| panic!("{p} workers, {v} chunks, {m} micro-batches: {e}"));
        let busy = f64::from(m) * 3.0 * v as f64;
        assert!(simulate(&s, &timing(&vec![1.0; p * v])).unwrap().makespan >= busy);
    }
    for (p, m) in [(2, 1), (4, 3), (4, 6), (6, 7), (8, 32)] {
        check(&chimera(p, m).unwrap()).unwrap();
    }
}

/// Kept activations: min(M, S - s) under 1F1B, M under GPipe, min(M, S) at most under ZB-H1.
#[test]
fn activations_in_flight() {
    for (s, m) in [(4, 8), (4, 2), (1, 3), (6, 6)] {
        let w = Workload::first_order(s, m);
        let t = timing(&vec![1.0; s]);
        let peaks = |name: ScheduleName| -> Vec<usize> {
            let schedule = name.build(&w).unwrap();
            simulate(&schedule, &t).unwrap().workers.iter().map(|r| r.peak_in_flight).collect()
        };
        let m = m as usize;
        assert_eq!(peaks(ScheduleName::OneFOneB), (0..s).map(|i| m.min(s - i)).collect::<Vec<_>>());
        assert_eq!(peaks(ScheduleName::Gpipe), vec![m; s]);
        assert!(peaks(ScheduleName::ZbH1).iter().all(|p| *p <= m.min(s)));
    }
}

/// A link's latency delays what follows from it and occupies nothing; its rate does.
#[test]
fn links_take_time() {
    let mut t = timing(&[1.0, 1.0]);
    t.stages[0].boundary_bytes = 10.0;
    let s = ScheduleName::Gpipe.build(&Workload::first_order(2, 2)).unwrap();
    let time = |latency: f64, rate: f64, overlap: f64, half: bool| {
        let mut t = t.clone();
        let mut link = Link::default();
        (link.latency_s, link.bytes_per_s, link.overlap, link.half_duplex) = (latency, rate, overlap, half);
        t.links.default = link;
        simulate(&s, &t).unwrap().makespan
    };
    assert_eq!(time(0.0, f64::INFINITY, 1.0, false), 9.0);
    assert_eq!(time(0.5, f64::INFINITY, 1.0, false), 10.0);
    // F0 0..1, sent 1..6; F1 1..2, sent 6..11, run 11..12; B0 and B1 12..16, sent 14..19 and 19..24; B1 24..26.
    assert_eq!(time(0.0, 2.0, 1.0, false), 26.0);
    assert_eq!(time(0.0, 2.0, 1.0, true), 26.0);
    // One processor does both: F0 0..1, sending 1..6; F1 6..7, sending 7..12; stage 1 receives 6..11, F0 11..12, receives 12..17, F1 17..18,
    // B0 18..20, sending 20..25, B1 25..27, sending 27..32; stage 0 receives 25..30, B0 30..32, receives 32..37, B1 37..39.
    assert_eq!(time(0.0, 2.0, 0.0, false), 39.0);
}

/// Scalars and gradients that come late: one micro-batch, fewer micro-batches than stages, slow links.
#[test]
fn delta_latency() {
    let mut t = timing(&[1.0, 1.0, 1.0]);
    t.links.default.latency_s = 10.0;
    // F at 0..1, 11..12, 22..23; backward 23..25 at the last, 35..37 at the cut; the gradient is at the head at 47.
    for m in [1, 2] {
        let w = head(1, 2, m, 1, Readout::Cut);
        let (schedule, found) = arrange(&w, &t, &Urgency::frugal(&w)).unwrap();
        let want = if m == 1 { 47.0 } else { best(&w, &t) };
        assert_eq!(found.makespan, want, "{m}");
        check(&schedule).unwrap();
    }
}

#[test]
fn what_waits_at_the_cut_is_counted() {
    let mut w = head(1, 1, 1, 3, Readout::Cut);
    let mut t = timing(&[1.0, 10.0]);
    (t.stages[0].boundary_bytes, t.stages[1].activation_bytes) = (7.0, 100.0);
    let (_, found) = arrange(&w, &t, &Urgency::frugal(&w)).unwrap();
    assert_eq!(found.workers[0].peak_awaiting, 3);
    // h_0, three h_q and the gradient.
    assert_eq!(found.workers[0].peak_dynamic_bytes, 5.0 * 7.0);
    assert_eq!(found.workers[1].peak_dynamic_bytes, 100.0);
    // Tangents need no base beside them.
    (w.form, w.merge_base, w.group) = (Form::Tangent, true, 3);
    let (_, found) = arrange(&w, &t, &Urgency::frugal(&w)).unwrap();
    assert_eq!(found.workers[0].peak_dynamic_bytes, 4.0 * 7.0);
}

/// Directions that end at the exit head come behind all others, so that they fill what a stage would idle and delay nobody.
#[test]
fn exit_directions_fill_idle_time() {
    let t = timing(&[1.0, 1.0, 4.0]);
    let without = head(2, 1, 4, 2, Readout::Loss);
    let with = Workload { exit_directions: 1, ..without.clone() };
    let (_, before) = arrange(&without, &t, &Urgency::frugal(&without)).unwrap();
    let (schedule, after) = arrange(&with, &t, &Urgency::frugal(&with)).unwrap();
    assert_eq!(before.makespan, after.makespan);
    assert!(after.workers[0].busy > before.workers[0].busy);
    let last_main = schedule.actions(0).position(|a| a.to_string() == "P3[1..2]").unwrap();
    assert!(schedule.actions(0).take(last_main).all(|a| !a.to_string().starts_with('X')));
}

/// 1,000 stages, 1,000 micro-batches, 16 directions: a test of size, its time is measured in `benches`.
#[test]
fn a_thousand_stages() {
    let w = Workload { group: 16, ..head(500, 500, 1000, 16, Readout::Cut) };
    let t = timing(&vec![1.0; 1000]);
    let found = zofo_pipeline::sim::makespan(&w, &t, &Urgency::frugal(&w)).unwrap();
    assert!(found.makespan >= 17.0 * 1000.0);
}

fn workloads() -> impl Strategy<Value = (Workload, Timing)> {
    let readout = prop_oneof![Just(Readout::Loss), Just(Readout::Cut), Just(Readout::Guide)];
    let stages = (0usize..4, 1usize..4);
    (stages, 1u32..6, 0u32..4, 1u32..3, readout, any::<[bool; 3]>(), 0u32..3).prop_flat_map(
        |((zo, fo), m, q, group, readout, [merge, two_sided, half], exit)| {
            let n = zo + fo;
            let w = Workload {
                group,
                two_sided,
                merge_base: merge,
                exit_directions: exit,
                roles: [vec![if q == 0 { Role::Frozen } else { Role::ZerothOrder }; zo], vec![Role::FirstOrder; fo]].concat(),
                ..head(zo, fo, m, q, readout)
            };
            let times = proptest::collection::vec(0u32..9, 6 * n);
            (Just(w), times, 0u32..4, 0u32..5, 0u32..3).prop_map(move |(w, times, latency, rate, overlap)| {
                // Whole numbers: sums are exact, so equal times are equal.
                let mut t = Timing::new(vec![StageTiming::default(); n]);
                for (s, v) in t.stages.iter_mut().zip(times.chunks(6)) {
                    let v: Vec<f64> = v.iter().map(|v| f64::from(*v)).collect();
                    (s.forward, s.backward_input, s.backward_weight, s.perturbed_beta) = (v[0], v[1], v[2], v[3]);
                    (s.boundary_bytes, s.activation_bytes, s.dot) = (v[4], v[5], v[0]);
                }
                let link = &mut t.links.default;
                link.latency_s = f64::from(latency);
                link.bytes_per_s = if rate == 0 { f64::INFINITY } else { 1.0 / f64::from(rate) };
                link.overlap = f64::from(overlap) / 2.0;
                link.half_duplex = half;
                (w, t)
            })
        },
    )
}

fn busy(t: &zofo_pipeline::sim::Timeline) -> f64 {
    t.workers.iter().map(|w| w.busy).fold(0.0, f64::max)
}

proptest! {
    /// Whatever the urgency: complete, causal, free of deadlock; the order replayed takes no longer than it took while it was made, and does
    /// the same work.
    #[test]
    fn orders_by_urgency_are_sound((w, t) in workloads()) {
        for u in Urgency::all(&w) {
            let (schedule, made) = arrange(&w, &t, &u).unwrap();
            check(&schedule).unwrap();
            let replayed = simulate(&schedule, &t).unwrap();
            let monotone = !t.links.default.half_duplex;
            prop_assert!(!monotone || replayed.makespan <= made.makespan, "{u:?}: {} > {}", replayed.makespan, made.makespan);
            prop_assert!(replayed.makespan >= busy(&replayed));
            for (a, b) in replayed.workers.iter().zip(&made.workers) {
                prop_assert_eq!(a.busy, b.busy);
            }
            if u.in_flight == InFlight::Depth {
                for s in w.cut()..w.stages() {
                    prop_assert!(made.workers[s].peak_in_flight <= (w.micro_batches as usize).min(w.stages() - s));
                }
            }
        }
    }

    /// For a fixed order, faster links or stages never lengthen it.
    #[test]
    fn faster_is_never_slower((w, mut t) in workloads(), which in any::<prop::sample::Index>()) {
        t.links.default.half_duplex = false;
        let (schedule, _) = arrange(&w, &t, &Urgency::frugal(&w)).unwrap();
        let before = simulate(&schedule, &t).unwrap().makespan;
        let mut faster = t.clone();
        faster.links.default.latency_s = (t.links.default.latency_s - 1.0).max(0.0);
        faster.links.default.bytes_per_s *= 2.0;
        let s = &mut faster.stages[which.index(w.stages())];
        (s.forward, s.backward_input, s.perturbed_beta) = (s.forward / 2.0, s.backward_input / 2.0, s.perturbed_beta / 2.0);
        prop_assert!(simulate(&schedule, &faster).unwrap().makespan <= before);
    }

    /// Spans fill exactly what a worker is busy and communicating inside its actions for, one after the other, and end with the makespan.
    #[test]
    fn traces_are_consistent((w, t) in workloads()) {
        let (schedule, _) = arrange(&w, &t, &Urgency::frugal(&w)).unwrap();
        let found = trace(&schedule, &t).unwrap();
        let mut last = 0.0f64;
        for (worker, spans) in found.spans.iter().enumerate() {
            let actions: Vec<_> = spans.iter().map(|s| s.step).collect();
            prop_assert_eq!(&actions, &schedule.lists[worker]);
            prop_assert!(spans.windows(2).all(|p| p[0].end <= p[1].start));
            let sum: f64 = spans.iter().map(|s| s.end - s.start).sum();
            prop_assert!((sum - found.workers[worker].busy).abs() < 1e-9);
            last = spans.last().map_or(last, |s| last.max(s.end));
        }
        // A worker may still be sending what nobody waits for.
        prop_assert!(last <= found.makespan);
        prop_assert_eq!(simulate(&schedule, &t).unwrap().makespan, found.makespan);
    }

    /// Backward passes in two parts, one right after the other, take as long as in one.
    #[test]
    fn merged_backward_is_split_backward(stages in 1usize..6, m in 1u32..8, times in proptest::collection::vec(1u32..9, 18)) {
        let mut t = Timing::new(vec![StageTiming::default(); stages]);
        for (s, v) in t.stages.iter_mut().zip(times.chunks(3)) {
            (s.forward, s.backward_input, s.backward_weight) = (v[0].into(), v[1].into(), v[2].into());
        }
        let merged = ScheduleName::OneFOneB.build(&Workload::first_order(stages, m)).unwrap();
        let mut split: Schedule = merged.clone();
        split.workload.split_backward = true;
        for list in &mut split.lists {
            *list = list.iter().flat_map(|step| {
                use zofo_pipeline::ir::{Action, Step};
                match step.action {
                    Action::Backward { m } => vec![Step { action: Action::BackwardInput { m }, ..*step }, Step { action: Action::BackwardWeight { m }, ..*step }],
                    _ => vec![*step],
                }
            }).collect();
        }
        let (a, b) = (simulate(&merged, &t).unwrap().makespan, simulate(&split, &t).unwrap().makespan);
        // The gradient goes upstream before the weights' is done, so the split can only be faster; with one stage they are equal.
        prop_assert!(b <= a);
        prop_assert!(stages > 1 || a == b);
        let mut late = t.clone();
        late.stages.iter_mut().for_each(|s| (s.backward_input, s.backward_weight) = (s.backward_input + s.backward_weight, 0.0));
        prop_assert_eq!(simulate(&split, &late).unwrap().makespan, a);
    }
}
