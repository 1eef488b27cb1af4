use super::primitive::{noise_at, noise_tensor, z};
use crate::{
    case::{Case, Expect},
    estimate::Est,
    host::HostTensor,
    rng::Rng,
    suite::Tests,
};
use zofo_hal::{
    DType,
    op::{AdamW, HyperParams, Optimiser, Sgd, ZoUpdate},
};

const SHAPES: [[usize; 2]; 5] = [[0, 4], [1, 1], [4, 33], [8, 64], [3, 129]];

pub(super) fn tests(t: &mut Tests) {
    t.cases("sgd/f32/sequence", |rng| SHAPES.map(|s| fixed(rng, s, Optimiser::Sgd)).into());
    t.cases("adamw/f32/sequence", |rng| SHAPES.map(|s| fixed(rng, s, Optimiser::AdamW)).into());
    t.cases("zo_update/f32/sgd", |rng| zo(rng, Optimiser::Sgd));
    t.cases("zo_update/f32/adamw", |rng| zo(rng, Optimiser::AdamW));
}

/// One optimiser step on one element over any arithmetic: f32 gives the bits, [`Est`] the room for devices without exact updates.
fn step<F>(rule: Optimiser, h: &HyperParams, [p, m, v]: [F; 3], g: F, sqrt: fn(F) -> F, lift: fn(f32) -> F) -> [F; 3]
where
    F: Copy + std::ops::Add<Output = F> + std::ops::Sub<Output = F> + std::ops::Mul<Output = F> + std::ops::Div<Output = F>,
{
    let g = lift(h.grad_scale) * g;
    let p = lift(h.decay) * p;
    if rule == Optimiser::Sgd {
        return [p - lift(h.step_size) * g, m, v];
    }
    let m = lift(h.beta1) * m + lift(h.one_minus_beta1) * g;
    let v = lift(h.beta2) * v + lift(h.one_minus_beta2) * g * g;
    let d = sqrt(v) / lift(h.sqrt_bias2) + lift(h.eps);
    [p - lift(h.step_size) * (m / d), m, v]
}

fn lift(x: f32) -> Est {
    f64::from(x).into()
}

/// Parameter and moments before, and what they should be after `grad`, given in both arithmetics.
fn state(rng: &mut Rng, rows: usize, cols: usize, rule: Optimiser, h: &HyperParams, grad: &[(f32, Est)]) -> [(HostTensor, Vec<Expect>); 3] {
    let param = HostTensor::random(rng, DType::F32, rows, cols, 1.0);
    let m = HostTensor::random(rng, DType::F32, rows, cols, 0.1);
    let v = HostTensor::from_fn(DType::F32, rows, cols, |_, _| rng.unit().abs() * 0.01);
    let mut expect = [Vec::new(), Vec::new(), Vec::new()];
    for (((&(g, bound), p), m), v) in grad.iter().zip(param.values()).zip(m.values()).zip(v.values()) {
        let bits = step(rule, h, [p as f32, m as f32, v as f32], g, f32::sqrt, |x| x);
        let near = step(rule, h, [p, m, v].map(Est::from), bound, Est::sqrt, lift);
        for (list, (bits, near)) in expect.iter_mut().zip(bits.into_iter().zip(near)) {
            list.push(Expect::Sequence(bits, near));
        }
    }
    let [ep, em, ev] = expect;
    [(param, ep), (m, em), (v, ev)]
}

fn hyper(rule: Optimiser) -> HyperParams {
    match rule {
        Optimiser::Sgd => HyperParams::sgd(0.05, 0.01, 0.7),
        _ => HyperParams::adamw(3e-3, (0.9, 0.999), 1e-8, 0.01, 3, 0.7),
    }
}

fn hyper_tensor(h: &HyperParams) -> HostTensor {
    HostTensor { dtype: DType::F32, rows: 1, cols: HyperParams::LEN, bytes: bytemuck::bytes_of(h).to_vec() }
}

fn fixed(rng: &mut Rng, [rows, cols]: [usize; 2], rule: Optimiser) -> Case {
    let h = hyper(rule);
    let grad = HostTensor::random(rng, DType::F32, rows, cols, 0.5);
    let both: Vec<_> = grad.values().into_iter().map(|g| (g as f32, Est::from(g))).collect();
    let [(p, ep), (m, em), (v, ev)] = state(rng, rows, cols, rule, &h, &both);
    let what = format!("[{rows}, {cols}]");
    let case = match rule {
        Optimiser::Sgd => Case::new(what, |a| Sgd::new(a.t("grad"), a.t("hyper"), a.t("param"))),
        _ => Case::new(what, |a| AdamW::new(a.t("grad"), a.t("hyper"), a.t("param"), a.t("m"), a.t("v"))),
    };
    let case = case.read("grad", grad).read("hyper", hyper_tensor(&h)).update("param", p, ep);
    if rule == Optimiser::Sgd { case } else { case.update("m", m, em).update("v", v, ev) }
}

fn zo(rng: &mut Rng, rule: Optimiser) -> Vec<Case> {
    let mut cases = Vec::new();
    for [rows, cols] in SHAPES {
        for n in [0, 1, 5] {
            let (h, (params, site)) = (hyper(rule), noise_at(rng, cols, 0x29));
            let coefficients: Vec<f32> = (0..n).map(|_| rng.unit() as f32).collect();
            let directions: Vec<u32> = (0..n).map(|_| (rng.below(1 << 14) << 16 | rng.below(1 << 16)) as u32).collect();
            let mut grad = Vec::new();
            for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
                let (mut bits, mut near) = (0.0f32, Est::ZERO);
                for (&k, &direction) in coefficients.iter().zip(&directions) {
                    let z = z(&zofo_hal::perturb::NoiseParams { direction, ..params }, 0, site, r, c);
                    bits += k * z;
                    near = near + lift(k) * lift(z);
                }
                grad.push((bits, near));
            }
            let [(p, ep), (m, em), (v, ev)] = state(rng, rows, cols, rule, &h, &grad);
            let case = Case::new(format!("[{rows}, {cols}], {n} directions, {site:?}"), move |a| {
                ZoUpdate::new(a.t("coefficients"), a.t("directions"), a.t("noise"), a.t("hyper"), a.t("param"), site, rule)
                    .m(a.opt("m"))
                    .v(a.opt("v"))
            })
            .read("coefficients", HostTensor::f32s(&coefficients))
            .read("directions", HostTensor::indices(&directions))
            .read("noise", noise_tensor(&params))
            .read("hyper", hyper_tensor(&h))
            .update("param", p, ep);
            cases.push(if rule == Optimiser::Sgd { case } else { case.update("m", m, em).update("v", v, ev) });
        }
    }
    cases
}
