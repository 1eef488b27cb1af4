//! Planning and simulation time: HybridOP's testbeds (28 layers on 6 boards, 32 on 10), a large cluster, and the simulator's own speed.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::{hint::black_box, time::Duration};
use zofo_pipeline::{
    cluster::Kind,
    costs::{Costs, DeviceCosts, LayerCosts, Links},
    estimator::EstimatorName,
    ir::{Readout, Role, Workload},
    planner::{
        PlannerName, Problem,
        auto::{self, Effort},
    },
    sim::{Timing, Urgency, makespan},
};

/// Layers of a transformer by its sizes, for one micro-batch of `tokens`: work in FLOP, 4-bit weights, LoRA of rank 8 on q and v, kept
/// activations of some ten times the width.
fn layers(count: usize, hidden: f64, ffn: f64, tokens: f64) -> Vec<LayerCosts> {
    let parameters = 2.5 * hidden * hidden + 3.0 * hidden * ffn;
    let mut layer = LayerCosts::new(2.0 * parameters * tokens);
    layer.weight_bytes = parameters / 2.0;
    layer.trainable_bytes = 16.0 * 8.0 * 3.0 * hidden;
    layer.activation_bytes = 40.0 * hidden * tokens;
    layer.boundary_bytes = 2.0 * hidden * tokens;
    vec![layer; count]
}

fn boards(list: &[(&str, usize)]) -> Vec<DeviceCosts> {
    let mut all = Vec::new();
    for (name, count) in list {
        for i in 0..*count {
            let (kind, speed, memory) = match *name {
                "atlas" => (Kind::BpFree, 6e12, 4e9),
                "nano" => (Kind::Bp, 3e12, 8e9),
                "xavier" => (Kind::Bp, 4e12, 8e9),
                _ => (Kind::Bp, 8e12, 16e9),
            };
            let mut d = DeviceCosts::new(format!("{name}{i}"), kind, speed);
            d.memory_bytes = Some(memory);
            d.backward_ratio = 1.2;
            if kind == Kind::BpFree {
                d.fo_speed = Some(speed / 8.3);
            }
            all.push(d);
        }
    }
    all
}

fn testbed(name: &str, estimator: EstimatorName) -> Problem {
    let (layers, devices, q) = match name {
        "3b-6" => (layers(28, 3072.0, 8192.0, 384.0), boards(&[("atlas", 2), ("nano", 2), ("nx", 2)]), 12),
        "8b-10" => (layers(32, 4096.0, 14336.0, 384.0), boards(&[("atlas", 4), ("nano", 2), ("xavier", 2), ("nx", 2)]), 20),
        _ => (layers(100, 4096.0, 14336.0, 384.0), boards(&[("atlas", 16), ("nano", 16), ("xavier", 16), ("nx", 16)]), 16),
    };
    let mut costs = Costs::new(layers, devices, 8);
    (costs.estimator, costs.directions, costs.group) = (Some(estimator), Some(q), 4);
    if let Links::Uniform(link) = &mut costs.links {
        (link.latency_s, link.bytes_per_s) = (2e-4, Some(1.1e8));
    }
    Problem::new(costs).expect("costs that make sense")
}

/// Planning times, and what the plans are worth.
fn planning(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    group.sample_size(10).measurement_time(Duration::from_secs(4)).warm_up_time(Duration::from_millis(500));
    for bed in ["3b-6", "8b-10", "64"] {
        for estimator in [EstimatorName::CutTangent, EstimatorName::LossDifference] {
            let p = testbed(bed, estimator);
            let (method, _) = auto::asked(&p);
            let found = auto::plan(&p, Effort::default()).expect("a plan");
            println!(
                "{bed} {}: {:.4} s a step, bound {:.4} s, {}",
                estimator.name(),
                found.proposal.outcome.makespan(),
                found.lower_bound,
                if found.proven_optimal { "proven optimal" } else { "not proven" }
            );
            for note in &found.proposal.notes {
                println!("  {note}");
            }
            group.bench_function(format!("auto/{bed}/{}", estimator.name()), |b| b.iter(|| auto::plan(black_box(&p), Effort::default())));
            // Planners that backpropagate everywhere do not depend on the estimator.
            if bed == "64" {
                continue;
            }
            for name in
                PlannerName::all().filter(|n| *n != PlannerName::Auto && (estimator == EstimatorName::CutTangent || n.uses_method()))
            {
                match name.propose(&p, &method) {
                    Ok(found) => println!("  {}: {:.4} s a step", name.name(), found.outcome.makespan()),
                    Err(e) => println!("  {}: {e}", name.name()),
                }
                group.bench_function(format!("{}/{bed}/{}", name.name(), estimator.name()), |b| {
                    b.iter(|| name.propose(black_box(&p), &method))
                });
            }
        }
    }
    group.finish();
}

fn simulation(c: &mut Criterion) {
    let mut group = c.benchmark_group("simulate");
    group.sample_size(10).measurement_time(Duration::from_secs(10)).warm_up_time(Duration::from_millis(500));
    for (stages, m, q, g, readout) in
        [(6, 8, 12, 4, Readout::Loss), (6, 8, 12, 4, Readout::Cut), (1000, 1000, 16, 16, Readout::Cut), (1000, 1000, 16, 4, Readout::Loss)]
    {
        let w = Workload {
            roles: [vec![Role::ZerothOrder; stages / 2], vec![Role::FirstOrder; stages - stages / 2]].concat(),
            directions: q,
            group: g,
            readout,
            ..Workload::first_order(stages, m)
        };
        let timing = Timing::nominal(stages);
        let urgency = Urgency::frugal(&w);
        let actions: usize = (0..stages).map(|s| w.actions_per_micro_batch(s) * m as usize).sum();
        group.throughput(Throughput::Elements(actions as u64));
        group.bench_function(format!("{stages}-stages/{m}-micro-batches/{q}-by-{g}/{readout:?}"), |b| {
            b.iter(|| makespan(black_box(&w), &timing, &urgency))
        });
    }
    group.finish();
}

criterion_group!(benches, planning, simulation);
criterion_main!(benches);
