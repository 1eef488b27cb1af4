use crate::util::*;
use zofo_hal::op::{Attention, AttentionShape, Copies, KvAppend, MaskedSoftmax, NO_INDEX, Pairing, Rope};
use zofo_hal::{DType, TensorArg, TensorSpec};

#[test]
fn rope_turns_pairs_and_back() {
    let rig = Rig::new();
    let (cos, sin) = (rig.f32(2, 2, &[1., 1., 0., 0.6]), rig.f32(2, 2, &[0., 0., 1., 0.8]));
    let x = rig.f32(2, 4, &[1., 2., 3., 4., 1., 2., 3., 4.]);
    for (pairing, want) in
        [(Pairing::Half, [1., 2., 3., 4., -3., -2., 1., 4.]), (Pairing::Interleaved, [1., 2., 3., 4., -2., 1., -1.4, 4.8])]
    {
        let out = rig.out(2, 4);
        let op = |x: &TensorArg, out: &TensorArg| Rope::new(x.clone(), rig.u32(&[0, 1]), cos.clone(), sin.clone(), out.clone(), 4, pairing);
        rig.run(op(&x, &out));
        assert_close(&rig.get(&out), &want, ROUNDING);
        rig.run(op(&out, &out).inverse(true));
        assert_close(&rig.get(&out), &[1., 2., 3., 4., 1., 2., 3., 4.], 4.0 * ROUNDING);
    }
    let bad = Rope::new(x.clone(), rig.u32(&[0, 2]), cos.clone(), sin.clone(), rig.out(2, 4), 4, Pairing::Half);
    assert!(rig.fails(bad).to_string().contains("positions[1] is 2"));
}

#[test]
fn rope_of_two_heads_in_two_copies() {
    let rig = Rig::new();
    let (cos, sin) = (rig.f32(1, 1, &[0.0]), rig.f32(1, 1, &[1.0]));
    let x = rig.f32(4, 4, &(1..=16).map(|x| x as f32).collect::<Vec<_>>());
    let out = rig.f32(4, 4, &[0.0; 16]);
    // The position of the second row is out of range but dead.
    let op = Rope::new(x, rig.u32(&[0, 9]), cos, sin, out.clone(), 2, Pairing::Half);
    rig.run(op.copies(Copies::tangent(1)).live(rig.u32(&[1])));
    assert_eq!(rig.get(&out), [-2., 1., -4., 3., 0., 0., 0., 0., -10., 9., -12., 11., 0., 0., 0., 0.]);
}

#[test]
fn kv_append_writes_slots_in_the_type_of_the_cache() {
    let rig = Rig::new();
    let (k, v) = (rig.f32(3, 2, &[1., 2., 3., 4., 5., 6.]), rig.f32(3, 2, &[7., 8., 9., 10., 11., 12.]));
    let cache = || rig.float(DType::F16, 4, 2, &[0.0; 8]);
    let (kc, vc) = (cache(), cache());
    rig.run(KvAppend::new(k.clone(), v.clone(), rig.u32(&[3, NO_INDEX, 0]), kc.clone(), vc.clone()));
    assert_eq!(rig.get_float(&kc), [5., 6., 0., 0., 0., 0., 1., 2.]);
    assert_eq!(rig.get_float(&vc), [11., 12., 0., 0., 0., 0., 7., 8.]);
    rig.fails(KvAppend::new(k.clone(), v.clone(), rig.u32(&[0, 4, 1]), kc.clone(), vc.clone()));
    rig.fails(KvAppend::new(k, v, rig.u32(&[0, 1, 0]), kc, vc));
}

#[test]
fn masked_softmax_sees_its_sequence() {
    let rig = Rig::new();
    // Two sequences: 2 queries of 3 keys (causal: 2 then 3), then 1 query of 1 key; the last row and column belong to nobody.
    let scores = rig.f32(4, 5, &[0.; 20]);
    let (out, lse) = (rig.f32(4, 5, &[9.; 20]), rig.f32(4, 1, &[9.; 4]));
    let op = MaskedSoftmax::new(scores, rig.u32(&[0, 2, 3]), rig.u32(&[0, 3, 4]), out.clone(), 1.0, true).lse(lse.clone());
    rig.run(op);
    let third = 1.0 / 3.0;
    let want = [0.5, 0.5, 0., 0., 0., third, third, third, 0., 0., 0., 0., 0., 1., 0., 9., 9., 9., 9., 9.];
    assert_close(&rig.get(&out), &want, ROUNDING);
    assert_close(&rig.get(&lse), &[2f64.ln(), 3f64.ln(), 0., 9.], ROUNDING);
}

#[test]
fn queries_without_keys_give_zero() {
    let rig = Rig::new();
    let scores = rig.f32(3, 1, &[5.; 3]);
    let (out, lse) = (rig.out(3, 1), rig.out(3, 1));
    let op = MaskedSoftmax::new(scores, rig.u32(&[0, 3]), rig.u32(&[0, 1]), out.clone(), 1.0, true).lse(lse.clone());
    rig.run(op);
    // Bottom-right aligned: only the last of three queries sees the key.
    assert_eq!(rig.get(&out), [0., 0., 1.]);
    assert_eq!(rig.get(&lse), [f32::NEG_INFINITY, f32::NEG_INFINITY, 5.]);
}

#[test]
fn lengths_that_do_not_ascend_fail() {
    let rig = Rig::new();
    for (q, kv) in [([1, 2], [0, 2]), ([0, 3], [0, 2]), ([0, 2], [0, 3]), ([0, 2], [1, 0])] {
        let op = MaskedSoftmax::new(rig.f32(2, 2, &[0.; 4]), rig.u32(&q), rig.u32(&kv), rig.out(2, 2), 1.0, false);
        assert!(rig.fails(op).to_string().contains("ascend"));
    }
}

pub const SHAPE: AttentionShape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 3, scale: 0.7, causal: true };
/// Two sequences, one of them empty between, one with more keys than queries; the last query row and key row belong to nobody.
pub const CU_Q: [u32; 4] = [0, 2, 2, 5];
pub const CU_KV: [u32; 4] = [0, 2, 2, 6];
pub const T: usize = 6;
pub const S: usize = 7;
pub const WIDE: usize = 12;
pub const NARROW: usize = 6;

/// Attention as its definition says, in f64.
fn naive(q: &[f32], k: &[f32], v: &[f32]) -> Vec<f64> {
    let mut out = vec![0.0; T * WIDE];
    for s in 0..3 {
        let (q0, q1, k0, k1) = (CU_Q[s] as usize, CU_Q[s + 1] as usize, CU_KV[s] as usize, CU_KV[s + 1] as usize);
        for i in q0..q1 {
            for h in 0..4 {
                let g = h / 2;
                let last = (i - q0) + (k1 - k0) - (q1 - q0);
                let score = |j: usize| 0.7f32 as f64 * dot(&q[i * WIDE + 3 * h..][..3], &k[(k0 + j) * NARROW + 3 * g..][..3]);
                let sum: f64 = (0..=last).map(|j| score(j).exp()).sum();
                for e in 0..3 {
                    let mean: f64 = (0..=last).map(|j| score(j).exp() * f64::from(v[(k0 + j) * NARROW + 3 * g + e])).sum();
                    out[i * WIDE + 3 * h + e] = mean / sum;
                }
            }
        }
    }
    out
}

pub fn attend(rig: &Rig, q: &[f32], k: &[f32], v: &[f32], copies: Copies) -> (TensorArg, TensorArg) {
    let c = copies.total();
    let (out, lse) = (rig.f32(c * T, WIDE, &vec![9.0; c * T * WIDE]), rig.out(T, 4));
    let (q, k, v) = (rig.f32(c * T, WIDE, q), rig.f32(c * S, NARROW, k), rig.f32(c * S, NARROW, v));
    let op = Attention::new(q, k, v, rig.u32(&CU_Q), rig.u32(&CU_KV), out.clone(), SHAPE).copies(copies);
    rig.run(op.lse(copies.has_base.then(|| lse.clone())));
    (out, lse)
}

#[test]
fn attention_of_grouped_queries() {
    let rig = Rig::new();
    let (q, k, v) = (random(1, T * WIDE), random(2, S * NARROW), random(3, S * NARROW));
    let (out, lse) = attend(&rig, &q, &k, &v, Copies::BASE);
    let got = rig.get(&out);
    assert_close(&got[..5 * WIDE], &naive(&q, &k, &v)[..5 * WIDE], 2.0 * ROUNDING);
    assert!(got[5 * WIDE..].iter().all(|x| *x == 9.0), "a row outside every sequence was written");
    // The first query of the first sequence sees one key: the log of the sum of exponentials is its score.
    let score = 0.7f32 as f64 * dot(&q[..3], &k[..3]);
    assert_close(&rig.get(&lse)[..1], &[score], ROUNDING);
}

#[test]
fn attention_copies_stay_apart() {
    let rig = Rig::new();
    let blocks = |seed, n: usize| (random(seed, n), random(seed + 1, n));
    let ((q0, q1), (k0, k1), (v0, v1)) = (blocks(1, T * WIDE), blocks(3, S * NARROW), blocks(5, S * NARROW));
    let (both, _) =
        attend(&rig, &[q0.clone(), q1.clone()].concat(), &[k0, k1.clone()].concat(), &[v0, v1.clone()].concat(), Copies::value(1, true));
    let (alone, _) = attend(&rig, &q1, &k1, &v1, Copies::value(1, false));
    assert_eq!(rig.get(&both.rows(T, T)), rig.get(&alone));
}

#[test]
fn attention_tangent() {
    let rig = Rig::new();
    let blocks = |seed, n: usize| (random(seed, n), random(seed + 1, n));
    let ((q, dq), (k, dk), (v, dv)) = (blocks(1, T * WIDE), blocks(3, S * NARROW), blocks(5, S * NARROW));
    let cat = |a: &[f32], b: &[f32]| [a, b].concat();
    let (both, _) = attend(&rig, &cat(&q, &dq), &cat(&k, &dk), &cat(&v, &dv), Copies::tangent(1));
    let value = |h| {
        let (out, _) = attend(&rig, &moved(&q, h, &dq), &moved(&k, h, &dk), &moved(&v, h, &dv), Copies::BASE);
        rig.get(&out.rows(0, 5))
    };
    assert_tangent(&rig.get(&both.rows(T, 5)), value);
    assert!(rig.get(&both.rows(T + 5, 1)).iter().all(|x| *x == 9.0));
}

#[test]
fn no_sequence_touches_nothing() {
    let rig = Rig::new();
    let out = rig.f32(2, 3, &[9.; 6]);
    let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 3, ..SHAPE };
    let kv = || rig.alloc(TensorSpec::new(DType::F32, 2, 3));
    rig.run(Attention::new(kv(), kv(), kv(), rig.u32(&[0]), rig.u32(&[0]), out.clone(), shape));
    assert_eq!(rig.get(&out), [9.; 6]);
}
