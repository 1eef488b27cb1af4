use crate::primitive::{noise, site};
use crate::util::*;
use zofo_hal::TensorArg;
use zofo_hal::op::{AdamW, HyperParams, Optimiser, Sgd, ZoUpdate};
use zofo_hal::perturb::{Direction, Domain, Factor, Noise, Tier};

fn hyper(rig: &Rig, h: HyperParams) -> TensorArg {
    rig.f32(1, HyperParams::LEN, bytemuck::cast_slice(&[h]))
}

#[test]
fn sgd_is_its_sequence() {
    let rig = Rig::new();
    let (p, g) = (random(1, 6), random(2, 6));
    let h = HyperParams::sgd(0.1, 0.01, 0.7);
    let param = rig.f32(2, 3, &p);
    rig.run(Sgd::new(rig.f32(2, 3, &g), hyper(&rig, h), param.clone()));
    let want: Vec<f32> = p.iter().zip(&g).map(|(p, g)| (1.0f64 - 0.1 * 0.01) as f32 * p - 0.1 * (0.7 * g)).collect();
    assert_eq!(rig.get(&param), want);
}

/// AdamW in f64 from its paper, without the fused constants.
fn adamw_f64(steps: &[Vec<f32>], start: &[f32], lr: f64, wd: f64) -> Vec<f64> {
    let (b1, b2, eps) = (0.9, 0.999, 1e-8);
    let mut p = wide(start);
    let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
    for (t, g) in steps.iter().enumerate() {
        let t = t as i32 + 1;
        for i in 0..p.len() {
            let g = f64::from(g[i]);
            m[i] = b1 * m[i] + (1.0 - b1) * g;
            v[i] = b2 * v[i] + (1.0 - b2) * g * g;
            p[i] -= lr * wd * p[i];
            p[i] -= lr * (m[i] / (1.0 - b1.powi(t))) / ((v[i] / (1.0 - b2.powi(t))).sqrt() + eps);
        }
    }
    p
}

#[test]
fn adamw_follows_its_paper() {
    let rig = Rig::new();
    let start = random(1, 6);
    let steps: Vec<Vec<f32>> = (0..5).map(|t| random(10 + t, 6)).collect();
    let (param, m, v) = (rig.f32(2, 3, &start), rig.f32(2, 3, &[0.; 6]), rig.f32(2, 3, &[0.; 6]));
    for (t, g) in steps.iter().enumerate() {
        let h = hyper(&rig, HyperParams::adamw(0.01, (0.9, 0.999), 1e-8, 0.1, t as u32 + 1, 1.0));
        rig.run(AdamW::new(rig.f32(2, 3, g), h, param.clone(), m.clone(), v.clone()));
    }
    // Ten roundings a step.
    assert_close(&rig.get(&param), &adamw_f64(&steps, &start, 0.01, 0.1), 50.0 * ROUNDING);
}

#[test]
fn zo_update_is_the_rule_on_the_regenerated_gradient() {
    let rig = Rig::new();
    let (params, noise) = noise(&rig, 0, f32::NAN);
    let site = site(Factor::B, 9).at(2, 1);
    let words: Vec<u32> = [4, 0, 9].map(|q| Direction::new(Domain::Main, 1, q).unwrap().word()).into();
    let coefficients = [0.3f32, -0.7, 0.11];
    let mut grad = vec![0.0f32; 8];
    for (c, word) in coefficients.iter().zip(&words) {
        let direction = Direction::from_word(*word).unwrap();
        let z = Noise::new(0x1234_5678_9ABC_DEF0, params.step, direction, site, Tier::SCALAR);
        grad.iter_mut().enumerate().for_each(|(i, g)| *g += c * z.normal(i as u32 / 4, i as u32 % 4));
    }
    let p = random(1, 8);
    let state = || (rig.f32(2, 4, &p), rig.f32(2, 4, &[0.5; 8]), rig.f32(2, 4, &[0.25; 8]));
    let h = || hyper(&rig, HyperParams::adamw(0.01, (0.9, 0.999), 1e-8, 0.1, 3, 0.5));
    let zo = |param: &TensorArg, rule| {
        ZoUpdate::new(rig.f32(1, 3, &coefficients), rig.u32(&words), noise.clone(), h(), param.clone(), site, rule)
    };

    let ((a, ma, va), (b, mb, vb)) = (state(), state());
    rig.run(zo(&a, Optimiser::AdamW).m(ma.clone()).v(va.clone()));
    rig.run(AdamW::new(rig.f32(2, 4, &grad), h(), b.clone(), mb.clone(), vb.clone()));
    for (a, b) in [(&a, &b), (&ma, &mb), (&va, &vb)] {
        assert_eq!(rig.get(a), rig.get(b));
    }

    let ((a, ..), (b, ..)) = (state(), state());
    rig.run(zo(&a, Optimiser::Sgd));
    rig.run(Sgd::new(rig.f32(2, 4, &grad), h(), b.clone()));
    assert_eq!(rig.get(&a), rig.get(&b));
}
