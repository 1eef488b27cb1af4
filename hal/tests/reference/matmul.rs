use crate::primitive::{noise, site};
use crate::util::*;
use zofo_hal::op::{Copies, LoraMatMul, MatMul, Orientation, Perturb, PerturbLoraMatMul};
use zofo_hal::perturb::Factor;
use zofo_hal::{DType, TensorArg, Uses};

/// `[m, k] x [k, n]` in f64.
fn product(a: &[f32], b: &[f32], m: usize, k: usize, n: usize) -> Vec<f64> {
    let at = |i: usize, j: usize| (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[l * n + j])).sum();
    (0..m * n).map(|e| at(e / n, e % n)).collect()
}

fn transposed(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|e| x[e % rows * cols + e / rows]).collect()
}

#[test]
fn orientations() {
    let rig = Rig::new();
    let (m, k, n) = (3, 5, 4);
    let (a, b) = (random(1, m * k), random(2, k * n));
    let want = product(&a, &b, m, k, n);
    let (at, bt) = (transposed(&a, m, k), transposed(&b, k, n));
    let run = |a: TensorArg, b: TensorArg, orientation| {
        let out = rig.out(m, n);
        rig.run(MatMul::new(a, b, out.clone(), orientation));
        assert_close(&rig.get(&out), &want, ROUNDING);
    };
    run(rig.f32(m, k, &a), rig.f32(n, k, &bt), Orientation::Nt);
    run(rig.f32(m, k, &a), rig.f32(k, n, &b), Orientation::Nn);
    run(rig.f32(k, m, &at), rig.f32(k, n, &b), Orientation::Tn);
}

#[test]
fn alpha_beta_bias_and_live_rows() {
    let rig = Rig::new();
    let a = rig.f32(4, 1, &[1., 2., 3., 4.]);
    let b = rig.f32(2, 1, &[1., 10.]);
    let out = rig.f32(4, 2, &[100.; 8]);
    let op = MatMul::new(a.clone(), b, out.clone(), Orientation::Nt).alpha(2.0).beta(0.5).bias(rig.f32(1, 2, &[0.25, 0.5]));
    rig.run(op.live(rig.u32(&[1])).copies(Copies::tangent(1)));
    // Row 0 is the base and has the bias, row 2 is a tangent and has none, rows 1 and 3 are dead.
    assert_eq!(rig.get(&out), [52.25, 70.5, 100., 100., 56., 110., 100., 100.]);
    // Tn: live counts the rows that are summed over.
    let out = rig.out(1, 1);
    rig.run(MatMul::new(a.clone(), a, out.clone(), Orientation::Tn).live(rig.u32(&[1])).copies(Copies::value(1, true)));
    assert_eq!(rig.get(&out), [10.0]);
}

#[test]
fn beta_zero_does_not_read_and_empty_inner_dimension_gives_the_bias() {
    let rig = Rig::new();
    let out = rig.f32(1, 2, &[f32::NAN; 2]);
    rig.run(MatMul::new(rig.out(1, 0), rig.out(2, 0), out.clone(), Orientation::Nt).bias(rig.f32(1, 2, &[3., 4.])));
    assert_eq!(rig.get(&out), [3., 4.]);
}

#[test]
fn weights_of_16_bits_and_their_uses() {
    let rig = Rig::new();
    let w = [0.5f32, 1.5, -2.0, 0.25];
    let bytes: Vec<u8> = w.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
    let weight = rig.weight(DType::Bf16, 2, 2, Uses::TRAINING, &bytes);
    let (x, out) = (rig.f32(1, 2, &[2., 4.]), rig.out(1, 2));
    rig.run(MatMul::new(x.clone(), &weight, out.clone(), Orientation::Nt));
    assert_eq!(rig.get(&out), [7., -3.]);
    rig.run(MatMul::new(x.clone(), &weight, out.clone(), Orientation::Nn));
    assert_eq!(rig.get(&out), [-7., 4.]);
    let forward = rig.weight(DType::Bf16, 2, 2, Uses::FORWARD, &bytes);
    assert_eq!(*rig.refused(MatMul::new(x, forward, out, Orientation::Nn)).kind(), zofo_hal::ErrorKind::Unsupported);
}

struct Layer {
    x: Vec<f32>,
    w: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
    bias: Vec<f32>,
}

const T: usize = 3;
const IN: usize = 6;
const OUT: usize = 5;
const R: usize = 2;
const SCALE: f32 = 1.5;

fn layer() -> Layer {
    Layer { x: random(1, T * IN), w: random(2, OUT * IN), a: random(3, R * IN), b: random(4, OUT * R), bias: random(5, OUT) }
}

/// `x W^T + bias + scale (x A^T) B^T` in f64.
fn want(l: &Layer, x: &[f32]) -> Vec<f64> {
    let base = product(x, &transposed(&l.w, OUT, IN), T, IN, OUT);
    let xa: Vec<f32> = product(x, &transposed(&l.a, R, IN), T, IN, R).iter().map(|x| *x as f32).collect();
    let low = product(&xa, &transposed(&l.b, OUT, R), T, R, OUT);
    (0..T * OUT).map(|i| base[i] + f64::from(l.bias[i % OUT]) + f64::from(SCALE) * low[i]).collect()
}

#[test]
fn lora_adds_its_product() {
    let rig = Rig::new();
    let l = layer();
    let (out, xa) = (rig.out(T, OUT), rig.out(T, R));
    let op = LoraMatMul::new(
        rig.f32(T, IN, &l.x),
        rig.f32(R, IN, &l.a),
        rig.f32(OUT, R, &l.b),
        rig.weight_f32(OUT, IN, Uses::FORWARD, &l.w),
        out.clone(),
        SCALE,
    );
    rig.run(op.bias(rig.f32(1, OUT, &l.bias)).xa(xa.clone()));
    // The expected x A^T is rounded to f32 once more than the device's.
    assert_close(&rig.get(&out), &want(&l, &l.x), 4.0 * ROUNDING);
    assert_close(&rig.get(&xa), &product(&l.x, &transposed(&l.a, R, IN), T, IN, R), ROUNDING);
}

fn perturbed(rig: &Rig, l: &Layer, x: &TensorArg, copies: Copies, epsilon: f32, shared: bool) -> (TensorArg, TensorArg) {
    let (_, noise) = noise(rig, 3, epsilon);
    let (out, xa) = (rig.out(copies.total() * T, OUT), rig.out(T, R));
    let w = rig.weight_f32(OUT, IN, Uses::FORWARD, &l.w);
    let (a, b) = (rig.f32(R, IN, &l.a), rig.f32(OUT, R, &l.b));
    let op = PerturbLoraMatMul::new(x.clone(), a, b, noise, &w, out.clone(), SCALE, copies);
    let op = op.bias(rig.f32(1, OUT, &l.bias)).shared_input(shared).site_a(Some(site(Factor::A, IN as u32)));
    let xa_wanted = copies.has_base.then(|| xa.clone());
    rig.run(op.site_b(Some(site(Factor::B, R as u32))).xa(xa_wanted));
    (out, xa)
}

#[test]
fn perturbed_copies_have_perturbed_factors() {
    let rig = Rig::new();
    let l = layer();
    let (_, noise) = noise(&rig, 3, 0.25);
    for (copies, shared) in
        [(Copies::value(2, true), true), (Copies::value(2, true), false), (Copies::value(2, false), true), (Copies::value(2, false), false)]
    {
        let blocks: Vec<Vec<f32>> = (0..copies.total()).map(|c| if shared { l.x.clone() } else { random(40 + c as u64, T * IN) }).collect();
        let x = if shared { rig.f32(T, IN, &l.x) } else { rig.f32(copies.total() * T, IN, &blocks.concat()) };
        let (out, _) = perturbed(&rig, &l, &x, copies, 0.25, shared);
        for (block, x) in blocks.iter().enumerate() {
            let mut own = layer();
            if let Some(copy) = block.checked_sub(copies.first_copy()) {
                let (a, b) = (rig.f32(R, IN, &l.a), rig.f32(OUT, R, &l.b));
                rig.run(Perturb::new(noise.clone(), a.clone(), site(Factor::A, IN as u32)).a(a.clone()).copy(copy as u32));
                rig.run(Perturb::new(noise.clone(), b.clone(), site(Factor::B, R as u32)).a(b.clone()).copy(copy as u32));
                (own.a, own.b) = (rig.get(&a), rig.get(&b));
            }
            assert_close(&rig.get(&out.rows(block * T, T)), &want(&own, x), 8.0 * ROUNDING);
        }
    }
}

#[test]
fn tangent_copies_are_slopes_of_value_copies() {
    let rig = Rig::new();
    let l = layer();
    // Shared input: only the factors move.
    let x = rig.f32(T, IN, &l.x);
    let (tangent, xa) = perturbed(&rig, &l, &x, Copies::tangent(2), f32::NAN, true);
    assert_close(&rig.get(&tangent.rows(0, T)), &want(&l, &l.x), 4.0 * ROUNDING);
    assert_close(&rig.get(&xa), &product(&l.x, &transposed(&l.a, R, IN), T, IN, R), ROUNDING);
    for q in 0..2 {
        let value = |h| {
            let (out, _) = perturbed(&rig, &l, &x, Copies::value(2, false), h, true);
            rig.get(&out.rows(q * T, T))
        };
        assert_tangent(&rig.get(&tangent.rows((1 + q) * T, T)), value);
    }
    // The input moves too.
    let dx = random(50, T * IN);
    let both = rig.f32(2 * T, IN, &[l.x.clone(), dx.clone()].concat());
    let (tangent, _) = perturbed(&rig, &l, &both, Copies::tangent(1), f32::NAN, false);
    let value = |h| {
        let x = rig.f32(T, IN, &moved(&l.x, h, &dx));
        let (out, _) = perturbed(&rig, &l, &x, Copies::value(1, false), h, false);
        rig.get(&out)
    };
    assert_tangent(&rig.get(&tangent.rows(T, T)), value);
}
