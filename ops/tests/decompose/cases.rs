//! One test per composite op.
//!
//! Inputs lie in -1 .. 1. A tolerance counts the f32 roundings on the way to an element, each of an intermediate of at most the stated size.

use crate::harness::{Case, Draw, Rows, case, compare, tolerance};
use bytemuck::bytes_of;
use zofo_hal::{
    DType, TensorArg, Uses,
    op::{self, AttentionShape, Copies, Form, HyperParams, NO_INDEX, Optimiser, Pairing},
    perturb::{Direction, Distribution, Domain, Factor, NoiseParams, Projection, Site, TensorId},
};

const F32: DType = DType::F32;
const DRAWS: u64 = 120;

/// Largest |z| that f32 normals reach (sqrt(-2 ln 2^-33)).
const Z: f64 = 6.8;

/// The base alone, with or without a live count.
fn one(d: &mut Draw) -> Rows {
    d.blocks(Copies::BASE)
}

fn optional(d: &mut Draw, f: impl FnOnce(&mut Draw) -> TensorArg) -> Option<TensorArg> {
    if d.rng.coin() { Some(f(d)) } else { None }
}

fn float(d: &mut Draw) -> DType {
    d.rng.float()
}

#[test]
fn embedding() {
    compare("embedding", DRAWS, |d| {
        let (rows, v, w, dtype) = (one(d), d.rng.range(1, 40), d.rng.range(1, 7), float(d));
        let ids = d.indices(&rows, v);
        let table = d.matrix(v, w, Uses { nt: false, nn: true, gather: true });
        let out = d.out(dtype, rows.t, w);
        // A product with a one-hot row is exact.
        case(op::Embedding::new(ids, table, out).live(rows.tensor), 0.0)
    });
}

#[test]
fn embedding_of_a_weight_imported_for_x_wt_alone() {
    compare("embedding", DRAWS / 4, |d| {
        let (rows, v, w) = (one(d), d.rng.range(1, 40), d.rng.range(1, 300));
        let ids = d.indices(&rows, v);
        let table = d.matrix(v, w, Uses { nt: true, nn: false, gather: true });
        let out = d.out(F32, rows.t, w);
        case(op::Embedding::new(ids, table, out).live(rows.tensor), 0.0)
    });
}

#[test]
fn rms_norm() {
    compare("rms_norm", DRAWS, |d| {
        let copies = d.copies();
        let (rows, w) = (d.blocks(copies), d.rng.range(1, 20));
        let dtypes = [float(d), float(d), float(d), float(d), float(d)];
        let x = d.rows(dtypes[0], &rows, w);
        let gamma = d.dense(dtypes[1], 1, w);
        let residual = optional(d, |d| d.rows(dtypes[2], &rows, w));
        let out = d.out(dtypes[3], rows.total(), w);
        let sum = match (d.rng.below(4), &residual) {
            (0, _) => None,
            (1, _) => Some(x.clone()),
            (2, Some(r)) => Some(r.clone()),
            _ => Some(d.out(dtypes[4], rows.total(), w)),
        };
        // eps 0.1 keeps 1 / rms below 3.2; |h| is at most 2, so h / rms is at most sqrt(d). Where h is rounded to 16 bits, a tie that f32
        // resolves otherwise moves it by a unit.
        let size = 4.0 * 3.2 * 2.0 * (w as f64).sqrt();
        let unit = sum.as_ref().map_or(0.0, |s| if s.spec.dtype == F32 { 0.0 } else { 2f64.powi(-7) });
        case(
            op::RmsNorm::new(x, gamma, out, 0.1).residual(residual).sum(sum).live(rows.tensor).copies(copies),
            tolerance(12, size) + unit * size,
        )
    });
}

#[test]
fn swiglu() {
    compare("swiglu", DRAWS, |d| {
        let copies = d.copies();
        let (rows, w, dtypes) = (d.blocks(copies), d.rng.range(1, 9), [float(d), float(d), float(d)]);
        let gate = d.rows(dtypes[0], &rows, w);
        let up = d.rows(dtypes[1], &rows, w);
        let out = match d.rng.below(3) {
            0 => gate.clone(),
            1 => up.clone(),
            _ => d.out(dtypes[2], rows.total(), w),
        };
        case(op::SwiGlu::new(gate, up, out).live(rows.tensor).copies(copies), tolerance(12, 2.0))
    });
}

#[test]
fn spread() {
    compare("spread", DRAWS, |d| {
        let copies = d.copies();
        let (rows, w, dtype) = (d.blocks(copies), d.rng.range(1, 9), float(d));
        let src = Rows { copies: Copies::BASE, ..rows.clone() };
        let src = d.rows(dtype, &src, w);
        let out = d.out(dtype, rows.total(), w);
        case(op::Spread::new(src, out, copies).live(rows.tensor), 0.0)
    });
}

#[test]
fn boundary_dot() {
    compare("boundary_dot", DRAWS, |d| {
        let n = d.rng.range(1, 4) as u32;
        let rows = d.blocks(Copies::value(n, false));
        let (w, one) = (d.rng.range(1, 9), Rows { copies: Copies::BASE, ..rows.clone() });
        let dtypes = [float(d), float(d)];
        let delta = d.rows(dtypes[0], &one, w);
        let h = d.rows(dtypes[1], &rows, w);
        let base = optional(d, |d| d.rows(F32, &one, w));
        let out = d.out(F32, 1, n as usize);
        case(op::BoundaryDot::new(delta, h, out).base(base).live(rows.tensor), tolerance(4, 2.0 * (rows.t * w) as f64))
    });
}

#[test]
fn lora_matmul() {
    compare("lora_matmul", DRAWS, |d| {
        let copies = d.copies();
        let rows = d.blocks(copies);
        let [i, o, r] = [d.rng.range(1, 20), d.rng.range(1, 20), d.rng.range(0, 4)];
        let dtypes = [float(d), float(d), float(d), float(d), float(d)];
        let (x, a, b) = (d.rows(dtypes[0], &rows, i), d.dense(dtypes[1], r, i), d.dense(dtypes[2], o, r));
        let w = d.matrix(o, i, Uses::FORWARD);
        let bias = optional(d, |d| d.dense(F32, 1, o));
        let out = d.out(dtypes[3], rows.total(), o);
        let xa = optional(d, |d| d.out(dtypes[4], rows.total(), r));
        let size = (i + 1) as f64 * (1.0 + 2.0 * r as f64);
        case(op::LoraMatMul::new(x, a, b, w, out, 2.0).bias(bias).xa(xa).live(rows.tensor).copies(copies), tolerance(4, size))
    });
}

fn noise(d: &mut Draw) -> TensorArg {
    let q = d.rng.below(100) as u32;
    let (seed, step) = (d.rng.word(), d.rng.below(1000) as u32);
    let params = NoiseParams::new(seed, step, Direction::new(Domain::Main, 3, q).unwrap(), 0.125);
    d.words(1, 8, bytemuck::cast_slice(bytes_of(&params)))
}

fn site(d: &mut Draw, factor: Factor, cols: usize) -> Site {
    let col0 = d.rng.below(3) as u32;
    let site = Site::new(TensorId::new(2, Projection::V, factor).unwrap(), cols as u32 + 4).at(d.rng.below(5) as u32, col0);
    site.with(if d.rng.coin() { Distribution::Gaussian } else { Distribution::Rademacher })
}

#[test]
fn perturb_lora_matmul() {
    compare("perturb_lora_matmul", 3 * DRAWS, |d| {
        let n = d.rng.range(1, 3) as u32;
        let copies = [Copies::value(n, true), Copies::value(n, false), Copies::tangent(n)][d.rng.below(3)];
        let (rows, shared) = (d.blocks(copies), d.rng.coin());
        let [i, o, r] = [d.rng.range(1, 12), d.rng.range(1, 12), d.rng.range(1, 4)];
        let dtypes = [float(d), float(d), float(d), float(d), float(d)];
        let x_rows = if shared { Rows { copies: Copies::BASE, ..rows.clone() } } else { rows.clone() };
        let (x, a, b) = (d.rows(dtypes[0], &x_rows, i), d.dense(dtypes[1], r, i), d.dense(dtypes[2], o, r));
        let noise = noise(d);
        let w = d.matrix(o, i, Uses::FORWARD);
        let bias = optional(d, |d| d.dense(F32, 1, o));
        let out = d.out(dtypes[3], rows.total(), o);
        let xa = if copies.has_base { optional(d, |d| d.out(dtypes[4], rows.t, r)) } else { None };
        let (site_a, site_b) = (site(d, Factor::A, i), site(d, Factor::B, r));
        let (site_a, site_b) = (d.rng.coin().then_some(site_a), d.rng.coin().then_some(site_b));
        let size = (i + 1) as f64 * (1.0 + 2.0 * r as f64 * 2.0 * Z);
        let op = op::PerturbLoraMatMul::new(x, a, b, noise, w, out, 2.0, copies).bias(bias).xa(xa).live(rows.tensor);
        case(op.site_a(site_a).site_b(site_b).shared_input(shared), tolerance(8, size))
    });
}

#[test]
fn rope() {
    compare("rope", DRAWS, |d| {
        let copies = d.copies();
        let rows = d.blocks(copies);
        let (heads, half, p) = (d.rng.range(1, 4), d.rng.range(1, 4), d.rng.range(1, 12));
        let (cols, dtypes) = (heads * half * 2, [float(d), float(d)]);
        let x = d.rows(dtypes[0], &rows, cols);
        let positions = d.indices(&rows, p);
        let (cos, sin) = (d.dense(F32, p, half), d.dense(F32, p, half));
        let out = if d.rng.coin() { x.clone() } else { d.out(dtypes[1], rows.total(), cols) };
        let pairing = if d.rng.coin() { Pairing::Half } else { Pairing::Interleaved };
        let op = op::Rope::new(x, positions, cos, sin, out, 2 * half, pairing).inverse(d.rng.coin());
        case(op.live(rows.tensor).copies(copies), tolerance(3, 2.0))
    });
}

#[test]
fn kv_append() {
    compare("kv_append", DRAWS, |d| {
        let (t, s, w) = (d.rng.range(0, 6), d.rng.range(6, 12), d.rng.range(1, 6));
        let mut slots = d.rng.shuffled(s);
        slots.truncate(t);
        for slot in &mut slots {
            if d.rng.below(4) == 0 {
                *slot = NO_INDEX;
            }
        }
        let (dtypes, slots) = ([float(d), float(d), float(d), float(d)], d.words(1, t, &slots));
        let (k, v) = (d.dense(dtypes[0], t, w), d.dense(dtypes[1], t, w));
        let (k_cache, v_cache) = (d.out(dtypes[2], s, w), d.out(dtypes[3], s, w));
        case(op::KvAppend::new(k, v, slots, k_cache, v_cache), 0.0)
    });
}

/// Heads, and packed sequences of queries and of keys with rows past the last.
struct Packed {
    shape: AttentionShape,
    q: Rows,
    kv: Rows,
    cu_q: TensorArg,
    cu_kv: TensorArg,
}

fn packed(d: &mut Draw, copies: Copies) -> Packed {
    let (group, kv_heads, head_dim) = (d.rng.range(1, 3), d.rng.range(1, 2), d.rng.range(1, 6));
    let shape = AttentionShape { heads: group * kv_heads, kv_heads, head_dim, scale: 0.7, causal: d.rng.coin() };
    let [t, s, n] = [d.rng.range(0, 9), d.rng.range(0, 11), d.rng.range(0, 3)];
    let (cu_q, cu_kv) = (d.cumulative(n, t), d.cumulative(n, s));
    let rows = |t, cu: &[u32]| Rows { copies, t, live: cu[n] as usize, tensor: None };
    let (q, kv) = (rows(t, &cu_q), rows(s, &cu_kv));
    Packed { shape, q, kv, cu_q: d.words(1, n + 1, &cu_q), cu_kv: d.words(1, n + 1, &cu_kv) }
}

#[test]
fn attention() {
    compare("attention", 3 * DRAWS, |d| {
        let copies = d.copies();
        let Packed { shape, q: rows, kv, cu_q, cu_kv } = packed(d, copies);
        let (wide, narrow) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let dtypes = [float(d), float(d), float(d), float(d)];
        let q = d.rows(dtypes[0], &rows, wide);
        let (k, v) = (d.rows(dtypes[1], &kv, narrow), d.rows(dtypes[2], &kv, narrow));
        let out = d.out(dtypes[3], rows.total(), wide);
        let lse = if copies.has_base { optional(d, |d| d.out(F32, rows.t, shape.heads)) } else { None };
        // Scores are at most 0.7 head_dim, slopes twice that; probabilities of a row sum to 1.
        let score = 1.0 + shape.head_dim as f64;
        let size = if copies.form == Form::Tangent { score * score } else { score };
        case(op::Attention::new(q, k, v, cu_q, cu_kv, out, shape).lse(lse).copies(copies), tolerance(24, size))
    });
}

#[test]
fn attention_backward() {
    compare("attention_backward", 2 * DRAWS, |d| {
        let Packed { shape, q: rows, kv, cu_q, cu_kv } = packed(d, Copies::BASE);
        let (wide, narrow) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let dtypes: [DType; 7] = core::array::from_fn(|_| float(d));
        let q = d.rows(F32, &rows, wide);
        let (k, v) = (d.rows(F32, &kv, narrow), d.rows(F32, &kv, narrow));
        let (out, lse) = (d.rows(F32, &rows, wide), d.rows(F32, &rows, shape.heads));
        // The forward pass of this very device family gives `out` and `lse`.
        let forward = op::Attention::new(q.clone(), k.clone(), v.clone(), cu_q.clone(), cu_kv.clone(), out.clone(), shape).lse(lse.clone());
        d.runner.run(forward).unwrap();
        let dout = d.rows(dtypes[0], &rows, wide);
        let (dq, dk, dv) = (d.out(dtypes[1], rows.t, wide), d.out(dtypes[2], kv.t, narrow), d.out(dtypes[3], kv.t, narrow));
        let score = 1.0 + shape.head_dim as f64;
        let size = score * score * (1 + rows.t * shape.heads) as f64;
        case(op::AttentionBackward::new(q, k, v, out, lse, dout, cu_q, cu_kv, dq, dk, dv, shape), tolerance(24, size))
    });
}

/// Distinct labelled rows, padding among them with a target that must not be looked at.
fn labels(d: &mut Draw, t: usize, v: usize) -> (TensorArg, TensorArg, usize) {
    let mut rows = d.rng.shuffled(t);
    rows.truncate(d.rng.below(t + 1));
    let mut targets: Vec<u32> = rows.iter().map(|_| d.rng.below(v) as u32).collect();
    for _ in 0..d.rng.below(3) {
        let at = d.rng.below(rows.len() + 1);
        rows.insert(at, NO_INDEX);
        targets.insert(at, 0xdead_beef);
    }
    let r = rows.len();
    (d.words(1, r, &rows), d.words(1, r, &targets), r)
}

#[test]
fn cross_entropy() {
    compare("cross_entropy", DRAWS, |d| {
        let copies = d.copies();
        let [t, w, v] = [d.rng.range(0, 9), d.rng.range(1, 12), d.rng.range(1, 30)];
        let rows = Rows { copies, t, live: t, tensor: None };
        let dtype = float(d);
        let (h, (label_rows, targets, r)) = (d.rows(dtype, &rows, w), labels(d, t, v));
        let head = d.matrix(v, w, Uses::TRAINING);
        let losses = d.out(F32, copies.total(), r);
        let slope = if copies == Copies::BASE { optional(d, |d| d.out(F32, r, w)) } else { None };
        // Logits are at most w; a rounding of one changes p by that much relatively.
        let size = (w + 4) as f64 * if copies.form == Form::Tangent { 2.0 * w as f64 } else { 1.0 };
        case(op::CrossEntropy::new(h, label_rows, targets, head, losses).slope(slope).copies(copies), tolerance(16, size))
    });
}

#[test]
fn cross_entropy_backward() {
    compare("cross_entropy_backward", DRAWS, |d| {
        let [t, w] = [d.rng.range(0, 9), d.rng.range(1, 12)];
        let (label_rows, _, r) = labels(d, t, 2);
        let (dtype, slope) = (float(d), d.dense(F32, r, w));
        let (scale, dh) = (d.dense(F32, 1, 1), d.out(dtype, t, w));
        case(op::CrossEntropyBackward::new(slope, label_rows, scale, dh), tolerance(1, 1.0))
    });
}

#[test]
fn candidate_scores() {
    compare("candidate_scores", DRAWS, |d| {
        let [t, w, v, r, k] = [d.rng.range(1, 9), d.rng.range(1, 12), d.rng.range(1, 30), d.rng.below(6), d.rng.below(5)];
        let rows = Rows { copies: Copies::BASE, t, live: t, tensor: None };
        let dtype = float(d);
        let h = d.rows(dtype, &rows, w);
        let pick = |d: &mut Draw, n: usize, below: usize| {
            let values: Vec<u32> = (0..n).map(|_| d.rng.below(below) as u32).collect();
            d.words(1, n, &values)
        };
        let (label_rows, candidates) = (pick(d, r, t), pick(d, k, v));
        let head = d.matrix(v, w, Uses { gather: true, ..Uses::FORWARD });
        let out = d.out(F32, r, k);
        case(op::CandidateScores::new(h, label_rows, candidates, head, out), tolerance(3, w as f64))
    });
}

#[test]
fn rms_norm_backward() {
    compare("rms_norm_backward", DRAWS, |d| {
        let (rows, w) = (one(d), d.rng.range(1, 20));
        let dtypes: [DType; 5] = core::array::from_fn(|_| float(d));
        let (x, gamma, dout) = (d.rows(dtypes[0], &rows, w), d.dense(dtypes[1], 1, w), d.rows(dtypes[2], &rows, w));
        let residual = optional(d, |d| d.rows(dtypes[3], &rows, w));
        let dx = match &residual {
            Some(r) if d.rng.coin() => r.clone(),
            _ => d.out(dtypes[4], rows.t, w),
        };
        let op = op::RmsNormBackward::new(x, gamma, dout, dx, 0.1).dresidual(residual).live(rows.tensor);
        case(op, tolerance(16, 3.2 * 2.0 * (w as f64).sqrt()))
    });
}

#[test]
fn lora_matmul_backward() {
    compare("lora_matmul_backward", DRAWS, |d| {
        let rows = one(d);
        let [i, o, r] = [d.rng.range(1, 20), d.rng.range(1, 20), d.rng.range(0, 4)];
        let dtypes: [DType; 6] = core::array::from_fn(|_| float(d));
        let (x, xa) = (d.rows(dtypes[0], &rows, i), d.rows(dtypes[1], &rows, r));
        let (a, b) = (d.dense(dtypes[2], r, i), d.dense(dtypes[3], o, r));
        let dout = d.rows(dtypes[4], &rows, o);
        let w = d.matrix(o, i, Uses::TRAINING);
        let (da, db) = (d.dense(F32, r, i), d.dense(F32, o, r));
        let beta = [0.0, 1.0, 0.5][d.rng.below(3)];
        let dx = optional(d, |d| d.rows(dtypes[5], &rows, i));
        let size = (o + 1) as f64 * (1.0 + 2.0 * r as f64) * (1 + rows.t) as f64;
        case(op::LoraMatMulBackward::new(x, xa, a, b, dout, w, da, db, 2.0).dx(dx).beta(beta).live(rows.tensor), tolerance(4, size))
    });
}

#[test]
fn swiglu_backward() {
    compare("swiglu_backward", DRAWS, |d| {
        let (rows, w) = (one(d), d.rng.range(1, 9));
        let dtypes: [DType; 5] = core::array::from_fn(|_| float(d));
        let (gate, up, dout) = (d.rows(dtypes[0], &rows, w), d.rows(dtypes[1], &rows, w), d.rows(dtypes[2], &rows, w));
        let (dgate, dup) = match d.rng.below(4) {
            0 => (gate.clone(), up.clone()),
            1 => (dout.clone(), up.clone()),
            2 => (gate.clone(), dout.clone()),
            _ => (d.out(dtypes[3], rows.t, w), d.out(dtypes[4], rows.t, w)),
        };
        case(op::SwiGluBackward::new(gate, up, dout, dgate, dup).live(rows.tensor), tolerance(12, 2.0))
    });
}

fn hyper(d: &mut Draw, optimiser: Optimiser) -> TensorArg {
    let h = match optimiser {
        Optimiser::AdamW => HyperParams::adamw(0.01, (0.9, 0.999), 1e-8, 0.1, 1 + d.rng.below(9) as u32, 0.7),
        _ => HyperParams::sgd(0.01, 0.1, 0.7),
    };
    let values: Vec<f32> = bytemuck::cast_slice(bytes_of(&h)).to_vec();
    let mut values = values.into_iter();
    d.tensor(F32, 1, HyperParams::LEN, |_, _| values.next().unwrap_or_default())
}

/// A parameter or first moment, or (positive) a second moment.
fn state(d: &mut Draw, [rows, cols]: [usize; 2], positive: bool) -> TensorArg {
    d.tensor(F32, rows, cols, |rng, _| if positive { rng.unit().abs() } else { rng.unit() })
}

#[test]
fn updates_are_bit_equal() {
    compare("sgd", DRAWS / 2, |d| -> Case {
        let shape = [d.rng.range(0, 6), d.rng.range(0, 9)];
        let (grad, hyper, param) = (state(d, shape, false), hyper(d, Optimiser::Sgd), state(d, shape, false));
        case(op::Sgd::new(grad, hyper, param), 0.0)
    });
    compare("adamw", DRAWS / 2, |d| {
        let shape = [d.rng.range(0, 6), d.rng.range(0, 9)];
        let (grad, hyper, param) = (state(d, shape, false), hyper(d, Optimiser::AdamW), state(d, shape, false));
        let (m, v) = (state(d, shape, false), state(d, shape, true));
        case(op::AdamW::new(grad, hyper, param, m, v), 0.0)
    });
    compare("zo_update", DRAWS, |d| {
        let shape @ [_, cols] = [d.rng.range(0, 6), d.rng.range(0, 9)];
        let optimiser = [Optimiser::Sgd, Optimiser::AdamW][d.rng.below(2)];
        let n = d.rng.range(0, 5);
        let directions: Vec<u32> = (0..n).map(|_| d.rng.below(1 << 20) as u32).collect();
        let (coefficients, directions) = (d.dense(F32, 1, n), d.words(1, n, &directions));
        let (noise, hyper, param) = (noise(d), hyper(d, optimiser), state(d, shape, false));
        let moments = optimiser == Optimiser::AdamW;
        let (m, v) = (state(d, shape, false), state(d, shape, true));
        // Half the sites are whole tensors, which are generated in one run.
        let site = site(d, Factor::B, cols);
        let site = if d.rng.coin() { Site { col0: 0, ld: cols as u32, ..site } } else { site };
        let op = op::ZoUpdate::new(coefficients, directions, noise, hyper, param, site, optimiser);
        case(op.m(moments.then_some(m)).v(moments.then_some(v)), 0.0)
    });
}
