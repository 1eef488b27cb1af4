use crate::attention::{CU_KV, CU_Q, NARROW, S, SHAPE, T, WIDE, attend};
use crate::loss::{self, losses};
use crate::util::*;
use zofo_hal::op::{
    AttentionBackward, Copies, CrossEntropyBackward, LoraMatMul, LoraMatMulBackward, RmsNorm, RmsNormBackward, SwiGlu, SwiGluBackward,
};
use zofo_hal::{TensorArg, Uses};

#[test]
fn rms_norm() {
    let rig = Rig::new();
    let (t, d) = (3, 5);
    let (x, gamma, w, residual) = (random(1, t * d), random(2, d), random(3, t * d), random(4, t * d));
    let loss = |x: &[f32]| {
        let out = rig.out(t, d);
        rig.run(RmsNorm::new(rig.f32(t, d, x), rig.f32(1, d, &gamma), out.clone(), 0.1));
        // The residual path carries h on to a loss of its own.
        dot(&rig.get(&out), &w) + dot(x, &residual)
    };
    // In place of the residual's gradient.
    let dx = rig.f32(t, d, &residual);
    let op = RmsNormBackward::new(rig.f32(t, d, &x), rig.f32(1, d, &gamma), rig.f32(t, d, &w), dx.clone(), 0.1);
    rig.run(op.dresidual(dx.clone()));
    assert_gradient(&rig.get(&dx), &x, loss);
}

#[test]
fn rms_norm_leaves_dead_rows() {
    let rig = Rig::new();
    let dx = rig.f32(2, 1, &[9.; 2]);
    let nan = rig.f32(2, 1, &[1.0, f32::NAN]);
    let op = RmsNormBackward::new(nan.clone(), rig.f32(1, 1, &[1.0]), nan, dx.clone(), 0.0);
    rig.run(op.live(rig.u32(&[1])));
    assert_eq!(rig.get(&dx), [0.0, 9.0]);
}

#[test]
fn swiglu() {
    let rig = Rig::new();
    let (g, u, w) = (random(1, 8), random(2, 8), random(3, 8));
    let loss = |g: &[f32], u: &[f32]| {
        let out = rig.out(2, 4);
        rig.run(SwiGlu::new(rig.f32(2, 4, g), rig.f32(2, 4, u), out.clone()));
        dot(&rig.get(&out), &w)
    };
    let (gate, up, dout) = (rig.f32(2, 4, &g), rig.f32(2, 4, &u), rig.f32(2, 4, &w));
    // Both in place: gate and up are overwritten by their gradients.
    rig.run(SwiGluBackward::new(gate.clone(), up.clone(), dout, gate.clone(), up.clone()));
    assert_gradient(&rig.get(&gate), &g, |g| loss(g, &u));
    assert_gradient(&rig.get(&up), &u, |u| loss(&g, u));
}

#[test]
fn lora_matmul() {
    let rig = Rig::new();
    let (t, inputs, outputs, r, scale) = (4, 5, 3, 2, 1.5);
    let live = 3;
    let (x, w, a, b) = (random(1, t * inputs), random(2, outputs * inputs), random(3, r * inputs), random(4, outputs * r));
    let dout = random(5, t * outputs);
    let weight = rig.weight_f32(outputs, inputs, Uses::TRAINING, &w);
    let forward = |x: &[f32], a: &[f32], b: &[f32]| {
        let (out, xa) = (rig.out(t, outputs), rig.out(t, r));
        let op = LoraMatMul::new(rig.f32(t, inputs, x), rig.f32(r, inputs, a), rig.f32(outputs, r, b), &weight, out.clone(), scale);
        rig.run(op.xa(xa.clone()));
        (out, xa)
    };
    let loss = |x: &[f32], a: &[f32], b: &[f32]| dot(&rig.get(&forward(x, a, b).0)[..live * outputs], &dout[..live * outputs]);
    let (_, xa) = forward(&x, &a, &b);
    // Gradients accumulate on 1, dx on 0.5 times 2.
    let (da, db, dx) = (
        rig.f32(r, inputs, &vec![1.0; r * inputs]),
        rig.f32(outputs, r, &vec![1.0; outputs * r]),
        rig.f32(t, inputs, &vec![2.0; t * inputs]),
    );
    let op = LoraMatMulBackward::new(
        rig.f32(t, inputs, &x),
        xa,
        rig.f32(r, inputs, &a),
        rig.f32(outputs, r, &b),
        rig.f32(t, outputs, &dout),
        &weight,
        da.clone(),
        db.clone(),
        scale,
    );
    rig.run(op.dx(dx.clone()).beta(0.5).live(rig.u32(&[live as u32])));
    let less_one = |t: &TensorArg| -> Vec<f32> { rig.get(t).iter().map(|x| x - 1.0).collect() };
    assert_gradient(&less_one(&da), &a, |a| loss(&x, a, &b));
    assert_gradient(&less_one(&db), &b, |b| loss(&x, &a, b));
    let mut dx = rig.get(&dx);
    assert_eq!(dx[live * inputs..], vec![2.0; inputs]);
    dx[..live * inputs].iter_mut().for_each(|x| *x -= 1.0);
    dx[live * inputs..].fill(0.0);
    assert_gradient(&dx, &x, |x| loss(x, &a, &b));
}

#[test]
fn lora_matmul_without_dx_needs_no_transposed_weight() {
    let rig = Rig::new();
    let weight = rig.weight_f32(1, 1, Uses::FORWARD, &[1.0]);
    let one = || rig.f32(1, 1, &[1.0]);
    let op = || LoraMatMulBackward::new(one(), one(), one(), one(), one(), &weight, one(), one(), 1.0);
    rig.run(op());
    rig.refused(op().dx(one()));
}

#[test]
fn attention() {
    let rig = Rig::new();
    let (q, k, v, mut w) = (random(1, T * WIDE), random(2, S * NARROW), random(3, S * NARROW), random(4, T * WIDE));
    // The last rows of each belong to no sequence.
    w[5 * WIDE..].fill(0.0);
    let loss = |q: &[f32], k: &[f32], v: &[f32]| dot(&rig.get(&attend(&rig, q, k, v, Copies::BASE).0), &w);
    let (out, lse) = attend(&rig, &q, &k, &v, Copies::BASE);
    let zeros = |rows: usize, cols: usize| rig.f32(rows, cols, &vec![0.0; rows * cols]);
    let (dq, dk, dv) = (zeros(T, WIDE), zeros(S, NARROW), zeros(S, NARROW));
    rig.run(AttentionBackward::new(
        rig.f32(T, WIDE, &q),
        rig.f32(S, NARROW, &k),
        rig.f32(S, NARROW, &v),
        out,
        lse,
        rig.f32(T, WIDE, &w),
        rig.u32(&CU_Q),
        rig.u32(&CU_KV),
        dq.clone(),
        dk.clone(),
        dv.clone(),
        SHAPE,
    ));
    assert_gradient(&rig.get(&dq), &q, |q| loss(q, &k, &v));
    assert_gradient(&rig.get(&dk), &k, |k| loss(&q, k, &v));
    assert_gradient(&rig.get(&dv), &v, |v| loss(&q, &k, v));
}

#[test]
fn cross_entropy() {
    let rig = Rig::new();
    let h = random(1, loss::T * loss::D);
    let (_, slope) = losses(&rig, &h, Copies::BASE);
    assert_eq!(rig.get(&slope)[loss::D..2 * loss::D], [0.0; loss::D], "padding has no slope");
    let dh = rig.out(loss::T, loss::D);
    let scale = 0.25;
    rig.run(CrossEntropyBackward::new(slope, rig.u32(&loss::ROWS), rig.f32(1, 1, &[scale]), dh.clone()));
    let got = rig.get(&dh);
    assert_eq!(got[loss::D..2 * loss::D], [0.0; loss::D], "rows without a label get 0");
    let loss = |h: &[f32]| f64::from(scale) * rig.get(&losses(&rig, h, Copies::BASE).0).iter().map(|x| f64::from(*x)).sum::<f64>();
    assert_gradient(&got, &h, loss);
}
