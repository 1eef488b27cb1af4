//! Relative rms error of the slope g against the f64 directional derivative, per estimator, compute type and eps: the table of
//! `docs/estimators.md`.
//!
//! `cargo run --release -p zofo-pipeline --example estimator_error -- MODEL_FOLDER`

#[path = "../tests/common/exact.rs"]
mod exact;

use exact::Exact;
use std::{path::Path, sync::Arc};
use zofo_hal::{DType, DeviceRef, perturb::Projection, reference::Reference};
use zofo_ops::{
    batch::Sequence,
    files::ModelFiles,
    llama::{MemoryModel, ParamName, WeightSource},
    lora::{HostAdapter, LoraSpec, Targets},
    optim::Rule,
};
use zofo_pipeline::{
    cluster::Cluster,
    estimator::{EstimatorName, EstimatorSpec, Factors, Scope},
    executor::StageDevice,
    plan::PlanRequest,
    train::{OptimiserSpec, Session, TrainSpec},
};

const DIRECTIONS: u32 = 16;
const SEED: u64 = 7;

/// The golden's token recipe: 4 sequences of 32 tokens, every next token a label.
fn batch(vocab: u64) -> Vec<Sequence> {
    let mut state = 42u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % vocab) as u32
    };
    (0..4).map(|_| Sequence::predicting((0..32).map(|_| next()).collect(), 0)).collect()
}

fn adapter(model: &MemoryModel, lora: &LoraSpec) -> HostAdapter {
    let mut adapter = HostAdapter::init(model.config(), 0..model.config().layers, lora, SEED).expect("the model has these layers");
    for module in adapter.modules.values_mut() {
        module.a.iter_mut().enumerate().for_each(|(k, v)| *v = 0.02 * (0.37 * k as f32 + 1.0).sin());
        module.b.iter_mut().enumerate().for_each(|(k, v)| *v = 0.02 * (0.37 * k as f32 + 2.0).sin());
    }
    adapter
}

fn slopes(model: &MemoryModel, compute: DType, spec: &EstimatorSpec, lora: LoraSpec, batch: &[Sequence]) -> Vec<f64> {
    let layers = model.config().layers;
    let mut cluster = Cluster::virtual_cpus(1, 1);
    cluster.devices[0].layers = Some(layers.div_ceil(2));
    cluster.devices[1].layers = Some(layers / 2);
    let plan = PlanRequest::new(&cluster, layers, 1, spec).plan().expect("two stages fit");
    let device: DeviceRef = Reference::new();
    let mut train = TrainSpec::new(lora, spec.clone(), 0.0, 0.0);
    train.first_order = OptimiserSpec::new(Rule::SGD, 0.0);
    train.zeroth_order = OptimiserSpec::new(Rule::SGD, 0.0);
    train.seed = SEED;
    let devices = vec![StageDevice::new(device, compute); 2];
    let start = adapter(model, &train.lora);
    let mut session = Session::start_unchecked(plan, devices, Arc::new(model.clone()), train, start).expect("the pipeline starts");
    session.step(batch).expect("a step");
    let entry = session.take_journal().remove(0);
    entry.coefficients.iter().map(|c| f64::from(*c) * f64::from(DIRECTIONS)).collect()
}

fn relative_rms(a: &[f64], b: &[f64]) -> f64 {
    let square = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>();
    (square(&mut a.iter().zip(b).map(|(a, b)| a - b)) / square(&mut b.iter().copied())).sqrt()
}

fn main() {
    let folder = std::env::args().nth(1).expect("usage: estimator_error MODEL_FOLDER");
    let files = ModelFiles::open(Path::new(&folder)).expect("a Hugging Face model folder");
    let mut base = MemoryModel::new(files.config().clone());
    for name in ParamName::all(files.config()) {
        base.set_f32(name, &files.require(name).and_then(|t| t.to_f32()).expect("a parameter"));
    }
    let batch = batch(base.config().vocab as u64);
    let cut = base.config().layers.div_ceil(2);
    let lora = LoraSpec::new(8, 16.0, [Projection::Q, Projection::V].into_iter().collect::<Targets>());
    println!("| estimator | eps | f32 | bf16 | f16 |");
    println!("|---|---|---|---|---|");
    let computes = [DType::F32, DType::Bf16, DType::F16];
    let models = computes.map(|c| if c == DType::F32 { base.clone() } else { base.rounded(c).expect("f32 parameters") });
    let exact: Vec<Vec<f64>> = models
        .iter()
        .map(|m| {
            let (e, a) = (Exact::new(m), adapter(m, &lora));
            (0..DIRECTIONS).map(|q| e.slope(&a, 0..cut, true, SEED, q, &batch)).collect()
        })
        .collect();
    let rows: &[(EstimatorName, bool, &[f32])] = &[
        (EstimatorName::Oracle, false, &[0.0]),
        (EstimatorName::CutTangent, false, &[0.0]),
        (EstimatorName::CutDifference, false, &[1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4]),
        (EstimatorName::CutDifference, true, &[1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4]),
        (EstimatorName::LossDifference, false, &[1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4]),
        (EstimatorName::LossDifference, true, &[1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4]),
    ];
    for (name, two_sided, steps) in rows {
        for eps in *steps {
            let mut spec = EstimatorSpec::new(*name, DIRECTIONS);
            (spec.eps, spec.two_sided, spec.factors, spec.scope) = (*eps, *two_sided, Factors::Ab, Scope::MiniBatch);
            let label = match name {
                EstimatorName::Oracle => "backpropagation, projected",
                _ => name.name(),
            };
            let sides = if *two_sided { ", two-sided" } else { "" };
            let step = if name.is_difference() { format!("{eps:.0e}") } else { "-".into() };
            print!("| {label}{sides} | {step} |");
            for ((compute, model), exact) in computes.iter().zip(&models).zip(&exact) {
                print!(" {:.2e} |", relative_rms(&slopes(model, *compute, &spec, lora, &batch), exact));
            }
            println!();
        }
    }
}
