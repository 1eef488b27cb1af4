//! Runs a suite under criterion.

use criterion::{BenchmarkGroup, Criterion, Throughput, measurement::WallTime};
use zofo_benches::{Case, Run, Unit, cases, selected};

/// From so many operations on, about a second, the fewest samples that criterion takes are enough.
const LONG: u64 = 100_000_000_000;

/// The `main` of every bench.
pub fn main(suite: &str) {
    let suite = cases::suite(suite).expect("a suite of this name");
    let subjects = selected().unwrap_or_else(|e| panic!("{e}"));
    let mut criterion = Criterion::default().configure_from_args();
    for group in (suite.cases)(&subjects).chunk_by(|a, b| a.id.group == b.id.group) {
        let mut bench = criterion.benchmark_group(&group[0].id.group);
        for case in group {
            add(&mut bench, case);
        }
        bench.finish();
    }
    criterion.final_summary();
}

fn add(bench: &mut BenchmarkGroup<'_, WallTime>, case: &Case) {
    bench.throughput(match case.work.unit {
        Unit::Bytes => Throughput::Bytes(case.work.amount()),
        _ => Throughput::Elements(case.work.amount()),
    });
    if case.work.flops >= LONG {
        bench.sample_size(10);
    }
    // Operands are made when the filter lets the case through, and once.
    let mut run: Option<Run> = None;
    bench.bench_function(&case.id.who, |b| {
        let run = run.get_or_insert_with(|| case.prepare().unwrap_or_else(|e| panic!("{}: {e}", case.id)));
        b.iter(|| run().unwrap_or_else(|e| panic!("{}: {e}", case.id)));
    });
}
