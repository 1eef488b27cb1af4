//! Optimisers: the rules against f64, state that continues bit for bit, zeroth-order steps against their definition.

#[path = "llama/common.rs"]
mod common;

use common::*;
use zofo_hal::{
    ErrorKind,
    perturb::{Distribution, NoiseParams, TensorId},
};
use zofo_ops::{
    llama::{Factors, WeightSource},
    lora::{HostAdapter, Targets},
    optim::{Optimiser, Rule, ZoStep, clip},
};

fn rig() -> (Rig, HostAdapter, zofo_ops::batch::DeviceBatch) {
    let source = tiny();
    let host = adapter(source.config(), &spec(2, Targets::ALL));
    let mut rig = Rig::whole(reference(), &source, &host);
    let batch = rig.batch(&packed(source.config(), &[7, 5]));
    (rig, host, batch)
}

fn flat(host: &HostAdapter) -> Vec<f32> {
    host.modules.values().flat_map(|m| m.a.iter().chain(&m.b).copied()).collect()
}

#[test]
fn adamw_follows_its_formula() {
    let (mut rig, host, batch) = rig();
    let (lr, b1, b2, eps, decay) = (0.05, 0.9, 0.99, 1e-8, 0.1);
    let rule = Rule::AdamW { betas: (b1, b2), eps, weight_decay: decay };
    let mut optimiser = Optimiser::first_order(&mut rig.runner, &rig.adapters, rule).unwrap();
    let mut p: Vec<f64> = flat(&host).iter().map(|v| f64::from(*v)).collect();
    let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
    for t in 1..=4 {
        rig.forward_backward(&batch);
        let g: Vec<f64> = rig.grads().into_iter().flat_map(|g| g.1).map(|g| 0.5 * f64::from(g)).collect();
        optimiser.step(&mut rig.runner, lr, 0.5).unwrap();
        for i in 0..p.len() {
            m[i] = b1 * m[i] + (1.0 - b1) * g[i];
            v[i] = b2 * v[i] + (1.0 - b2) * g[i] * g[i];
            let (m, v) = (m[i] / (1.0 - b1.powi(t)), v[i] / (1.0 - b2.powi(t)));
            p[i] = p[i] * (1.0 - lr * decay) - lr * m / (v.sqrt() + eps);
        }
        let found = flat(&rig.adapters.to_host(&mut rig.runner).unwrap());
        // A step has size lr = 0.05 and about ten f32 roundings of it and of a parameter of order 1.
        let worst = found.iter().zip(&p).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-6, "step {t}: {worst}");
    }
    assert_eq!(optimiser.steps(), 4);
}

#[test]
fn sgd_follows_its_sequence_to_the_bit() {
    let (mut rig, host, batch) = rig();
    let mut optimiser = Optimiser::first_order(&mut rig.runner, &rig.adapters, Rule::Sgd { weight_decay: 0.5 }).unwrap();
    rig.forward_backward(&batch);
    let grads: Vec<f32> = rig.grads().into_iter().flat_map(|g| g.1).collect();
    optimiser.step(&mut rig.runner, 0.125, 0.75).unwrap();
    let decay = (1.0 - 0.125 * 0.5) as f32;
    let expected: Vec<f32> = flat(&host).iter().zip(&grads).map(|(p, g)| decay * p - 0.125 * (0.75 * g)).collect();
    assert_eq!(bits(&flat(&rig.adapters.to_host(&mut rig.runner).unwrap())), bits(&expected));
}

#[test]
fn a_zeroth_order_step_is_the_sum_of_its_directions() {
    for (rule, factors) in [(Rule::SGD, Factors::Ab), (Rule::ADAMW, Factors::B)] {
        let (mut rig, host, _) = rig();
        let params = directions(0.0);
        let coefficients = [0.5f32, -0.25, 0.125];
        let words = [params.direction, params.direction + 1, params.direction + 7];
        let step = ZoStep { coefficients: &coefficients, directions: &words, noise: params, distribution: Distribution::Gaussian };
        let mut zo = Optimiser::zeroth_order(&mut rig.runner, &rig.adapters, rule, factors).unwrap();
        zo.step_zo(&mut rig.runner, 0.01, &step).unwrap();
        let found = rig.adapters.to_host(&mut rig.runner).unwrap();

        // The same through a first-order step from gradients that are that sum.
        let (mut other, ..) = self::rig();
        for t in other.adapters.tensors().unwrap() {
            let [rows, cols] = t.param.spec.shape();
            let mut sum = vec![0.0f32; rows * cols];
            for (c, word) in coefficients.iter().zip(words) {
                let z = z(&NoiseParams { direction: word, ..params }, 0, t.id, cols, rows * cols);
                sum.iter_mut().zip(z).for_each(|(s, z)| *s += c * z);
            }
            other.runner.upload_f32(t.grad.as_ref().unwrap(), &sum).unwrap();
        }
        let mut fo = Optimiser::first_order(&mut other.runner, &other.adapters, rule).unwrap();
        fo.step(&mut other.runner, 0.01, 1.0).unwrap();
        let expected = other.adapters.to_host(&mut other.runner).unwrap();
        for (key, m) in &found.modules {
            assert_eq!(bits(&m.b), bits(&expected.modules[key].b));
            let a = if factors == Factors::Ab { &expected } else { &host };
            assert_eq!(bits(&m.a), bits(&a.modules[key].a));
        }
    }
}

#[test]
fn a_restored_state_continues_bit_for_bit() {
    let (mut rig, _, batch) = rig();
    let mut first = Optimiser::first_order(&mut rig.runner, &rig.adapters, Rule::ADAMW).unwrap();
    let step = |rig: &mut Rig, o: &mut Optimiser| {
        rig.forward_backward(&batch);
        o.step(&mut rig.runner, 0.01, 1.0).unwrap();
    };
    step(&mut rig, &mut first);
    step(&mut rig, &mut first);
    let (state, adapter) = (first.export(&mut rig.runner).unwrap(), rig.adapters.to_host(&mut rig.runner).unwrap());
    step(&mut rig, &mut first);
    let expected = rig.adapters.to_host(&mut rig.runner).unwrap();

    rig.set(&adapter);
    let mut second = Optimiser::first_order(&mut rig.runner, &rig.adapters, Rule::ADAMW).unwrap();
    second.import(&mut rig.runner, &state).unwrap();
    assert_eq!(second.export(&mut rig.runner).unwrap(), state);
    step(&mut rig, &mut second);
    assert_eq!(rig.adapters.to_host(&mut rig.runner).unwrap(), expected);
}

#[test]
fn states_of_other_runs_and_spoilt_ones_are_refused() {
    let (mut rig, ..) = rig();
    let mut adamw = Optimiser::first_order(&mut rig.runner, &rig.adapters, Rule::ADAMW).unwrap();
    let mut b_alone = Optimiser::zeroth_order(&mut rig.runner, &rig.adapters, Rule::ADAMW, Factors::B).unwrap();
    let mut sgd = Optimiser::first_order(&mut rig.runner, &rig.adapters, Rule::SGD).unwrap();
    let state = adamw.export(&mut rig.runner).unwrap();
    let mut refused = |o: &mut Optimiser, bytes: &[u8], part: &str| {
        let e = o.import(&mut rig.runner, bytes).unwrap_err();
        assert_eq!(*e.kind(), ErrorKind::Format);
        assert!(e.to_string().contains(part), "{e}");
    };
    refused(&mut sgd, &state, "rule");
    refused(&mut b_alone, &state, "number of tensors");
    refused(&mut adamw, b"", "magic");
    for end in (8..state.len()).step_by(997) {
        refused(&mut adamw, &state[..end], "cut short");
    }
    let longer = [&state[..], &[0; 4]].concat();
    refused(&mut adamw, &longer, "too many");
    let mut other = state;
    other[20] ^= 2;
    refused(&mut adamw, &other, "tensor");
}

#[test]
fn sums_of_squares_come_in_canonical_order() {
    let (mut rig, _, batch) = rig();
    rig.forward_backward(&batch);
    let optimiser = Optimiser::first_order(&mut rig.runner, &rig.adapters, Rule::SGD).unwrap();
    let ids: Vec<TensorId> = optimiser.tensors().map(|t| t.id).collect();
    assert!(ids.is_sorted() && ids.len() == 56);
    let sums = optimiser.sum_squares(&mut rig.runner).unwrap();
    let mut total = 0.0;
    for (sum, (_, g)) in sums.iter().zip(rig.grads()) {
        assert!((f64::from(*sum) - norm(&g).powi(2)).abs() < 1e-5 * norm(&g).powi(2));
        total += norm(&g).powi(2);
    }
    let (length, scale) = clip(&sums, 0.5 * total.sqrt());
    assert!((length - total.sqrt()).abs() < 1e-5 && (scale - 0.5).abs() < 1e-4);
}

#[test]
fn steps_that_make_no_sense_are_refused() {
    let (mut rig, ..) = rig();
    let step = ZoStep { coefficients: &[1.0], directions: &[], noise: directions(0.0), distribution: Distribution::Gaussian };
    let mut zo = Optimiser::zeroth_order(&mut rig.runner, &rig.adapters, Rule::SGD, Factors::B).unwrap();
    assert!(zo.step_zo(&mut rig.runner, 0.1, &step).is_err());
    let source = tiny();
    let mut forward = Rig::new(reference(), &source, &zofo_ops::llama::SliceSpec::whole(source.config()), &Default::default());
    forward.set(&HostAdapter::default());
    let none = Optimiser::first_order(&mut forward.runner, &forward.adapters, Rule::SGD).unwrap();
    assert!(none.sum_squares(&mut forward.runner).unwrap().is_empty());
}
