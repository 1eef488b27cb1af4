use crate::util::*;
use zofo_hal::op::{BoundaryDot, Copies, Embedding, NO_INDEX, RmsNorm, Spread, SwiGlu};
use zofo_hal::{DType, TensorArg, TensorSpec, Uses};

#[test]
fn embedding_looks_rows_up() {
    let rig = Rig::new();
    let table: Vec<f32> = (0..8).map(|x| x as f32).collect();
    let weight = rig.weight_f32(4, 2, Uses::ALL, &table);
    let out = rig.f32(3, 2, &[-1.; 6]);
    // The dead id is out of range.
    rig.run(Embedding::new(rig.u32(&[3, 0, 77]), &weight, out.clone()).live(rig.u32(&[2])));
    assert_eq!(rig.get(&out), [6., 7., 0., 1., -1., -1.]);
    assert!(rig.fails(Embedding::new(rig.u32(&[0, 4, 0]), &weight, out.clone())).to_string().contains("ids[1] is 4"));
    rig.fails(Embedding::new(rig.u32(&[0, NO_INDEX, 0]), &weight, out.clone()));
    rig.refused(Embedding::new(rig.u32(&[0, 1, 2]), rig.weight_f32(4, 2, Uses::TRAINING, &table), out));
}

#[test]
fn rms_norm_by_hand() {
    let rig = Rig::new();
    let (x, residual, sum, out) = (rig.f32(1, 2, &[1., 2.]), rig.f32(1, 2, &[2., 2.]), rig.out(1, 2), rig.out(1, 2));
    // h = (3, 4): mean square 12.5, and 3.5 more make 16.
    let op = RmsNorm::new(x.clone(), rig.f32(1, 2, &[2., 10.]), out.clone(), 3.5).residual(residual).sum(sum.clone());
    rig.run(op);
    assert_eq!(rig.get(&out), [1.5, 10.0]);
    assert_eq!(rig.get(&sum), [3., 4.]);
}

#[test]
fn rms_norm_uses_h_as_sum_holds_it() {
    let rig = Rig::new();
    let x = rig.f32(1, 1, &[1.0 + 1.0 / 512.0]);
    let sum = rig.alloc(TensorSpec::new(DType::Bf16, 1, 1));
    let out = rig.out(1, 1);
    // In bf16, h is 1: with eps 3 the result is exactly 1/2.
    rig.run(RmsNorm::new(x, rig.f32(1, 1, &[1.0]), out.clone(), 3.0).sum(sum));
    assert_eq!(rig.get(&out), [0.5]);
}

#[test]
fn rms_norm_tangent_and_live_rows() {
    let rig = Rig::new();
    let (t, d) = (3, 5);
    let (x, r, gamma) = (random(1, t * d), random(2, t * d), random(3, d));
    let (dx, dr) = (random(4, t * d), random(5, t * d));
    let norm = |x: &[f32], r: &[f32], copies: Copies| {
        let rows = copies.total() * t;
        let out = rig.f32(rows, d, &vec![9.0; rows * d]);
        let op = RmsNorm::new(rig.f32(rows, d, x), rig.f32(1, d, &gamma), out.clone(), 0.1).residual(rig.f32(rows, d, r));
        rig.run(op.copies(copies).live(rig.u32(&[2])));
        out
    };
    let both = norm(&[x.clone(), dx.clone()].concat(), &[r.clone(), dr.clone()].concat(), Copies::tangent(1));
    let value = |h| rig.get(&norm(&moved(&x, h, &dx), &moved(&r, h, &dr), Copies::BASE).rows(0, 2));
    assert_tangent(&rig.get(&both.rows(t, 2)), value);
    assert_eq!(rig.get(&both.rows(2, 1)), [9.0; 5]);
    assert_eq!(rig.get(&both.rows(5, 1)), [9.0; 5]);
}

#[test]
fn swiglu_in_place_and_tangent() {
    let rig = Rig::new();
    let (gate, up) = (rig.f32(1, 2, &[0.0, 1.0]), rig.f32(1, 2, &[5.0, 2.0]));
    rig.run(SwiGlu::new(gate.clone(), up, gate.clone()));
    assert_close(&rig.get(&gate), &[0.0, 2.0 / (1.0 + (-1f64).exp())], ROUNDING);

    let (g, u, dg, du) = (random(1, 8), random(2, 8), random(3, 8), random(4, 8));
    let run = |g: &[f32], u: &[f32], copies: Copies| {
        let rows = 2 * copies.total();
        let out = rig.out(rows, 4);
        rig.run(SwiGlu::new(rig.f32(rows, 4, g), rig.f32(rows, 4, u), out.clone()).copies(copies));
        out
    };
    let both = run(&[g.clone(), dg.clone()].concat(), &[u.clone(), du.clone()].concat(), Copies::tangent(1));
    assert_tangent(&rig.get(&both.rows(2, 2)), |h| rig.get(&run(&moved(&g, h, &dg), &moved(&u, h, &du), Copies::BASE)));
}

#[test]
fn spread_makes_copies_or_zero_tangents() {
    let rig = Rig::new();
    let src = rig.f32(2, 1, &[1., 2.]);
    for (copies, want) in [
        (Copies::value(2, false), [1., -1., 1., -1., -1., -1.]),
        (Copies::value(2, true), [1., -1., 1., -1., 1., -1.]),
        (Copies::tangent(2), [1., -1., 0., -1., 0., -1.]),
    ] {
        let rows = 2 * copies.total();
        let out: TensorArg = rig.f32(6, 1, &[-1.; 6]);
        rig.run(Spread::new(src.clone(), out.rows(0, rows), copies).live(rig.u32(&[1])));
        assert_eq!(rig.get(&out), want);
    }
}

#[test]
fn boundary_dot_with_and_without_base() {
    let rig = Rig::new();
    let delta = rig.f32(2, 2, &[1., 2., f32::NAN, f32::NAN]);
    let h = rig.f32(4, 2, &[10., 20., f32::NAN, 0., 30., 40., 0., f32::NAN]);
    let (out, live) = (rig.out(1, 2), rig.u32(&[1]));
    rig.run(BoundaryDot::new(delta.clone(), h.clone(), out.clone()).live(live.clone()));
    assert_eq!(rig.get(&out), [50., 110.]);
    rig.run(BoundaryDot::new(delta, h, out.clone()).base(rig.f32(2, 2, &[1., 1., 0., 0.])).live(live));
    assert_eq!(rig.get(&out), [47., 107.]);
}
