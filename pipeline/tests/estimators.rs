//! Estimators against the oracle: wrong seeds, scales, signs and normalisation, which loss curves hide.

mod common;
#[path = "common/exact.rs"]
mod exact;

use common::*;
use zofo_hal::{DType, perturb::Projection};
use zofo_pipeline::{
    cluster::Cluster,
    estimator::{EstimatorName, EstimatorSpec, Factors, Scope},
    train::Session,
};

/// Coefficients of one step by direction, from the journal.
fn coefficients(mut s: Session, micro_batches: u32) -> Vec<f64> {
    s.step(&batch(2 * micro_batches as usize, 0)).unwrap();
    let entry = s.take_journal().remove(0);
    assert!(entry.directions.is_sorted());
    entry.coefficients.iter().map(|c| f64::from(*c)).collect()
}

fn spec(name: EstimatorName, q: u32, eps: f32) -> EstimatorSpec {
    let mut e = EstimatorSpec::new(name, q);
    (e.eps, e.scope, e.factors) = (eps, Scope::MiniBatch, Factors::Ab);
    e.exit_directions = 0;
    e
}

fn relative_rms(a: &[f64], b: &[f64]) -> f64 {
    let error: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
    (dot(&error, &error) / dot(b, b)).sqrt()
}

/// Every estimator tends to the oracle's slopes: tangents at once, differences as eps falls and rounding allows.
#[test]
fn estimators_tend_to_the_oracle() {
    for (micro_batches, cluster) in [(1, Cluster::virtual_cpus(1, 1)), (3, Cluster::virtual_cpus(2, 2))] {
        let run = |e: EstimatorSpec| coefficients(session(&cluster, micro_batches, sgd(lora(&ALL), &e)), micro_batches);
        let oracle = run(spec(EstimatorName::Oracle, 6, 0.0));
        let tangent = relative_rms(&run(spec(EstimatorName::CutTangent, 6, 0.0)), &oracle);
        // Both sides round intermediate activations to f32 a few hundred times.
        assert!(tangent < 2e-5, "cut-tangent: {tangent}");
        for name in [EstimatorName::CutDifference, EstimatorName::LossDifference] {
            let mut two = spec(name, 6, 1e-2);
            two.two_sided = true;
            let one = relative_rms(&run(spec(name, 6, 1e-2)), &oracle);
            let smaller = relative_rms(&run(spec(name, 6, 2.5e-3)), &oracle);
            let two = relative_rms(&run(two), &oracle);
            // One-sided error is first order in eps while rounding is small beside it: a quarter of eps is about a quarter of the error.
            let ratio = one / smaller;
            assert!((2.0..8.0).contains(&ratio) && smaller < 0.25, "{name:?}: {one} at 1e-2, {smaller} at 2.5e-3");
            assert!(two < 0.3 * one, "{name:?}: {two} two-sided, {one} one-sided");
        }
    }
}

/// With one z per micro-batch the estimate is a sum over more directions of the same gradient.
#[test]
fn micro_batch_scope_projects_each_micro_batch_on_its_own_directions() {
    let mut e = spec(EstimatorName::CutTangent, 3, 0.0);
    e.scope = Scope::MicroBatch;
    let cluster = Cluster::virtual_cpus(1, 1);
    let mut s = session(&cluster, 2, sgd(lora(&QV), &e));
    s.step(&batch(4, 0)).unwrap();
    let entry = s.take_journal().remove(0);
    assert_eq!(entry.directions, [0, 1, 2, 1 << 16, (1 << 16) + 1, (1 << 16) + 2]);
    assert!(entry.coefficients.iter().all(|c| *c != 0.0));
}

/// With Gaussian directions the squared cosine of the estimate with the gradient is Beta(Q/2, (d-1)/2): its mean is Q / (Q + d - 1), and the
/// mean cosine is close to sqrt(Q / d).
#[test]
fn the_cosine_with_the_true_gradient_is_sqrt_q_over_d() {
    let targets = [Projection::V];
    let before = warm(&lora(&targets));
    let cluster = Cluster::virtual_cpus(1, 1);
    let gradient = {
        let mut s = session(&Cluster::virtual_cpus(0, 1), 1, sgd(lora(&targets), &spec(EstimatorName::CutTangent, 1, 0.0)));
        s.step(&batch(2, 0)).unwrap();
        change(&before, &s.adapter().unwrap(), 0..2)
    };
    let (q, trials) = (8u32, 150u64);
    let d = gradient.len() as f64;
    let mut squares = Vec::new();
    for seed in 0..trials {
        let mut train = sgd(lora(&targets), &spec(EstimatorName::CutTangent, q, 0.0));
        train.seed = seed;
        let mut s = session(&cluster, 1, train);
        s.step(&batch(2, 0)).unwrap();
        let c = cosine(&change(&before, &s.adapter().unwrap(), 0..2), &gradient);
        assert!(c > 0.0, "seed {seed}: the estimate points uphill ({c})");
        squares.push(c * c);
    }
    let (a, b) = (f64::from(q) / 2.0, (d - 1.0) / 2.0);
    let (mean, variance) = (a / (a + b), a * b / ((a + b).powi(2) * (a + b + 1.0)));
    let seen = squares.iter().sum::<f64>() / trials as f64;
    let sigma = (variance / trials as f64).sqrt();
    assert!((seen - mean).abs() < 3.0 * sigma, "mean squared cosine {seen}, expected {mean} +- {sigma} (d = {d})");
    // And in the words of the theory, within the same margin: sqrt(Q / d).
    let rms = seen.sqrt();
    assert!((rms / (f64::from(q) / d).sqrt() - 1.0).abs() < 0.15, "{rms}");
}

/// Right below the cut the residual stream hands the gradient on unchanged, so the guided estimate of the last zeroth-order down_proj is exact.
#[test]
fn guided_is_exact_at_the_cut_and_points_downhill_below() {
    let targets = [Projection::O, Projection::Down];
    let before = warm(&lora(&targets));
    let step = |cluster: &Cluster, name| {
        let mut s = session(cluster, 2, sgd(lora(&targets), &spec(name, 1, 0.0)));
        s.step(&batch(4, 0)).unwrap();
        s.adapter().unwrap()
    };
    let exact = step(&Cluster::virtual_cpus(0, 1), EstimatorName::CutTangent);
    let guided = step(&Cluster::virtual_cpus(2, 2), EstimatorName::Guided);
    let part = |after: &zofo_ops::lora::HostAdapter, layer: usize, p: Projection| -> Vec<f64> {
        let (b, a) = (&before.modules[&(layer, p)], &after.modules[&(layer, p)]);
        b.b.iter().zip(&a.b).map(|(b, a)| f64::from(*b) - f64::from(*a)).collect()
    };
    let (g, e) = (part(&guided, 1, Projection::Down), part(&exact, 1, Projection::Down));
    assert!(relative_rms(&g, &e) < 1e-4, "{}", relative_rms(&g, &e));
    let c = cosine(&part(&guided, 1, Projection::O), &part(&exact, 1, Projection::O));
    assert!(c > 0.3, "o_proj of the layer below the cut: {c}");
    // Only B learns, and only of the adapters that write to the residual stream.
    assert_eq!(before.modules[&(0, Projection::O)].a, guided.modules[&(0, Projection::O)].a);
}

/// The exit head's directions estimate the exit loss's gradient, with a base of their own: at eps to 0 their slopes are finite, not c / eps.
#[test]
fn early_exit_measures_against_its_own_base() {
    let run = |eps: f32| {
        let mut e = spec(EstimatorName::EarlyExit, 2, eps);
        e.exit_directions = 2;
        coefficients(session(&Cluster::virtual_cpus(1, 1), 1, sgd(lora(&QV), &e)), 1)
    };
    let (a, b) = (run(1e-2), run(1e-3));
    assert_eq!(a.len(), 4);
    // Against another head's loss the slope would grow tenfold as eps falls tenfold.
    assert!(relative_rms(&b[2..], &a[2..]) < 0.5, "{a:?} {b:?}");
    assert!(a[2..].iter().all(|c| *c != 0.0));
}

/// In 16-bit compute tangents are as good as backpropagation in the same type, and in f32 both are exact: measured against f64.
#[test]
fn tangents_are_as_good_as_backpropagation() {
    use std::sync::Arc;
    use zofo_ops::llama::MemoryModel;
    let q = 32u32;
    for compute in [DType::F32, DType::Bf16, DType::F16] {
        let base = MemoryModel::random(MemoryModel::tiny_config(), 11).unwrap();
        let source = if compute == DType::F32 { base } else { base.rounded(compute).unwrap() };
        let (lora, batch) = (lora(&QV), batch(3, 0));
        let start = warm(&lora);
        let exact = exact::Exact::new(&source);
        let truth: Vec<f64> = (0..q).map(|i| exact.slope(&start, 0..2, true, 5, i, &batch)).collect();
        let error = |name: EstimatorName| {
            let e = spec(name, q, 0.0);
            let cluster = Cluster::virtual_cpus(1, 1);
            let devices = devices(&cluster, compute, true);
            let train = sgd(lora, &e);
            let mut s = Session::start_from(plan(&cluster, 1, &e), devices, Arc::new(source.clone()), train, start.clone()).unwrap();
            s.step(&batch).unwrap();
            let g: Vec<f64> = s.take_journal()[0].coefficients.iter().map(|c| f64::from(*c) * f64::from(q)).collect();
            relative_rms(&g, &truth)
        };
        let (tangent, exact) = (error(EstimatorName::CutTangent), error(EstimatorName::Oracle));
        if compute == DType::F32 {
            assert!(tangent < 1e-5 && exact < 1e-5, "f32: {tangent}, {exact}");
        }
        // Both are rms of 32 independent errors of the same size, each known to 1 / sqrt(64): three sigma of their ratio is a factor 1.7.
        assert!(tangent < 1.7 * exact + 1e-6, "{compute}: tangent {tangent}, backpropagation {exact}");
    }
}
