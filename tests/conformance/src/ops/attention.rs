use crate::{
    case::{Case, Expect},
    estimate::{Est, U},
    host::HostTensor,
    model::{Blocks, FLOATS, Mat, TYPES, Types, dot, forms},
    rng::Rng,
    suite::Tests,
};
use zofo_hal::{
    DType,
    op::{Attention, AttentionBackward, AttentionShape, Copies, KvAppend, MaskedSoftmax, NO_INDEX, Pairing, Rope},
};

pub(super) fn tests(t: &mut Tests) {
    for types in TYPES {
        let name = types.name;
        t.cases(format!("rope/{name}/forms"), move |rng| ropes(rng, types));
        t.cases(format!("masked_softmax/{name}/sequences"), move |rng| softmaxes(rng, types));
        t.cases(format!("attention/{name}/base"), move |rng| attentions(rng, types, Copies::BASE));
        t.cases(format!("attention/{name}/value"), move |rng| {
            [Copies::value(2, true), Copies::value(2, false)].into_iter().flat_map(|c| attentions(rng, types, c)).collect()
        });
        t.cases(format!("attention/{name}/tangent"), move |rng| attentions(rng, types, Copies::tangent(2)));
        t.cases(format!("attention_backward/{name}/sequences"), move |rng| {
            packings().into_iter().map(|p| attention_backward(rng, types, &p)).collect()
        });
    }
    for dtype in FLOATS {
        for cache in FLOATS {
            t.cases(format!("kv_append/{dtype}-{cache}/slots"), move |rng| appends(rng, dtype, cache));
        }
    }
}

fn ropes(rng: &mut Rng, types: Types) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, heads, head_dim) in [(0, 1, 4), (1, 1, 2), (4, 3, 10), (5, 2, 64)] {
        for (i, blocks) in forms(rows).into_iter().enumerate() {
            let (pairing, inverse) = ([Pairing::Half, Pairing::Interleaved][i % 2], i % 3 == 1);
            let (half, cols, table) = (head_dim / 2, heads * head_dim, rows + 9);
            let angle = |p: usize, j: usize| p as f64 * 10000f64.powf(-(2.0 * j as f64) / head_dim as f64);
            let cos = HostTensor::from_fn(DType::F32, table, half, |p, j| angle(p, j).cos());
            let sin = HostTensor::from_fn(DType::F32, table, half, |p, j| angle(p, j).sin());
            let positions: Vec<u32> = (0..rows).map(|r| if blocks.is_live(r) { rng.below(table) as u32 } else { NO_INDEX }).collect();
            let x = HostTensor::random(rng, types.x, blocks.total(), cols, 2.0);
            let (m, cm, sm) = (Mat::of(&x), Mat::of(&cos), Mat::of(&sin));
            let expect = blocks.expect(cols, |row, c| {
                let (head, i) = (c / head_dim * head_dim, c % head_dim);
                let (pair, first, mate) = match pairing {
                    Pairing::Half => (i % half, i < half, (i + half) % head_dim),
                    Pairing::Interleaved => (i / 2, i % 2 == 0, i ^ 1),
                };
                let p = positions[blocks.base(row)] as usize;
                let (this, other) = (m.at(row, c) * cm.at(p, pair), m.at(row, head + mate) * sm.at(p, pair));
                if first == inverse { this + other } else { this - other }
            });
            let copies = blocks.copies;
            let case = || {
                let what = format!("{heads} heads of {head_dim}, {pairing:?}, inverse {inverse}, {}", blocks.describe());
                Case::new(what, move |a| {
                    Rope::new(a.t("x"), a.t("positions"), a.t("cos"), a.t("sin"), a.t("out"), head_dim, pairing)
                        .live(a.opt("live"))
                        .inverse(inverse)
                        .copies(copies)
                })
                .read("x", blocks.poisoned(x.clone()))
                .read("positions", HostTensor::indices(&positions))
                .read("cos", cos.clone())
                .read("sin", sin.clone())
                .read("live", blocks.live_tensor())
                .write("out", types.out, blocks.total(), cols, expect.clone())
            };
            cases.extend([case(), case().alias("out", "x")]);
        }
    }
    cases
}

fn appends(rng: &mut Rng, dtype: DType, cache: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, slots, cols) in [(0, 4, 3), (1, 1, 1), (5, 9, 37), (6, 6, 64)] {
        let [mut k, mut v] = [0, 1].map(|_| HostTensor::random(rng, dtype, rows, cols, 2.0));
        let [k_cache, v_cache] = [0, 1].map(|_| HostTensor::random(rng, cache, slots, cols, 2.0));
        let mut index = rng.distinct(rows, slots);
        for i in (1..rows).step_by(3) {
            index[i] = NO_INDEX;
        }
        let [km, vm] = [&k, &v].map(Mat::of);
        let mut expect = [vec![Expect::Untouched; slots * cols], vec![Expect::Untouched; slots * cols]];
        for (i, &to) in index.iter().enumerate() {
            if to == NO_INDEX {
                k.poison_row(i);
                v.poison_row(i);
                continue;
            }
            for c in 0..cols {
                expect[0][to as usize * cols + c] = km.at(i, c).into();
                expect[1][to as usize * cols + c] = vm.at(i, c).into();
            }
        }
        let [ek, ev] = expect;
        cases.push(
            Case::new(format!("{rows} rows of {cols} to {slots} slots"), |a| {
                KvAppend::new(a.t("k"), a.t("v"), a.t("slots"), a.t("k_cache"), a.t("v_cache"))
            })
            .read("k", k)
            .read("v", v)
            .read("slots", HostTensor::indices(&index))
            .update("k_cache", k_cache, ek)
            .update("v_cache", v_cache, ev),
        );
    }
    cases
}

/// Packed sequences: lengths of queries and keys, and rows of padding behind them.
#[derive(Clone, Debug)]
struct Packing {
    q: Vec<usize>,
    kv: Vec<usize>,
    padding: usize,
    causal: bool,
    /// `(heads, kv_heads, head_dim)`
    heads: (usize, usize, usize),
}

fn packings() -> Vec<Packing> {
    let p = |q: &[usize], kv: &[usize], padding, causal, heads| Packing { q: q.into(), kv: kv.into(), padding, causal, heads };
    vec![
        p(&[], &[], 0, true, (1, 1, 4)),
        p(&[], &[], 3, true, (2, 1, 4)),
        p(&[1], &[1], 0, true, (1, 1, 1)),
        p(&[3, 0, 5], &[3, 0, 5], 2, true, (4, 2, 8)),
        p(&[3, 1], &[3, 1], 0, false, (2, 2, 6)),
        // Decoding: one query at the end of a long cache; a query sees all keys up to its own.
        p(&[1, 2], &[37, 7], 1, true, (6, 2, 16)),
        // More queries than keys: the first ones see nothing. Keys without a query.
        p(&[5, 0], &[2, 3], 1, true, (2, 1, 4)),
        p(&[2], &[0], 0, false, (2, 1, 4)),
        p(&[70], &[70], 3, true, (2, 1, 20)),
    ]
}

impl Packing {
    fn cu(lengths: &[usize]) -> HostTensor {
        // Two sequences more than there are: unused entries repeat the last.
        let mut cu = vec![0u32];
        for n in lengths.iter().copied().chain([0, 0]) {
            cu.push(cu.last().expect("a start") + n as u32);
        }
        HostTensor::indices(&cu)
    }

    fn t(&self) -> usize {
        self.q.iter().sum::<usize>() + self.padding
    }

    fn s(&self) -> usize {
        self.kv.iter().sum::<usize>() + self.padding
    }

    fn blocks(&self, copies: Copies, queries: bool) -> Blocks {
        let rows = if queries { self.t() } else { self.s() };
        Blocks { copies, rows, live: Some(rows - self.padding) }
    }

    /// The keys that query row `t` sees.
    fn keys(&self, t: usize) -> std::ops::Range<usize> {
        let (mut q0, mut k0) = (0, 0);
        for (&n, &s) in self.q.iter().zip(&self.kv) {
            if t < q0 + n {
                let seen = if self.causal { (t - q0 + s + 1).saturating_sub(n).min(s) } else { s };
                return k0..k0 + seen;
            }
            q0 += n;
            k0 += s;
        }
        0..0
    }

    fn shape(&self) -> AttentionShape {
        let (heads, kv_heads, head_dim) = self.heads;
        AttentionShape { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), causal: self.causal }
    }

    fn describe(&self) -> String {
        format!("q {:?}, kv {:?}, padding {}, causal {}, heads {:?}", self.q, self.kv, self.padding, self.causal, self.heads)
    }
}

/// Softmax of some scores, and the log of their sum of exponentials. An online softmax rescales what it has each time the maximum rises:
/// at most once per score, each time with the error of an exponential and a product.
pub(super) fn softmax(scores: &[Est]) -> (Vec<Est>, Est) {
    // Any shift gives the same result, so an error of the maximum cancels.
    let max = scores.iter().map(|s| s.v).fold(f64::NEG_INFINITY, f64::max);
    let rescaled = 10.0 * scores.len() as f64 * U;
    let e: Vec<Est> = scores.iter().map(|&s| (s - Est::from(max)).exp().loosened(rescaled)).collect();
    let sum = Est::sum(e.iter().copied());
    let lse = sum.ln() + Est::from(max);
    let scale = sum.recip();
    // The shift is added back in f32 at the magnitude of the maximum.
    (e.into_iter().map(|e| e * scale).collect(), Est { e: lse.e + U * max.abs(), ..lse })
}

fn softmaxes(rng: &mut Rng, types: Types) -> Vec<Case> {
    let mut cases = Vec::new();
    for p in packings() {
        let (t, s, scale) = (p.t(), p.s(), 0.6f32);
        let scores = HostTensor::random(rng, types.x, t, s, 6.0);
        let m = Mat::of(&scores);
        let blocks = p.blocks(Copies::BASE, true);
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for r in 0..t {
            if !blocks.is_live(r) {
                out.extend(vec![Expect::Untouched; s]);
                lse.push(Expect::Untouched);
                continue;
            }
            let keys = p.keys(r);
            let (probabilities, log) = softmax(&keys.clone().map(|c| m.at(r, c) * Est::from(f64::from(scale))).collect::<Vec<_>>());
            let at = |c: usize| if keys.contains(&c) { probabilities[c - keys.start] } else { Est::ZERO };
            out.extend((0..s).map(|c| Expect::Near(at(c))));
            lse.push(if keys.is_empty() { Expect::Any } else { log.into() });
        }
        // What a row does not see, it does not read.
        let mut unseen = scores.clone();
        let hidden = HostTensor::from_fn(types.x, t, s, |r, c| if p.keys(r).contains(&c) { 0.0 } else { f64::NAN });
        let size = types.x.block().1;
        for (to, from) in unseen.bytes.chunks_mut(size).zip(hidden.bytes.chunks(size)) {
            if crate::host::decode(types.x, from).is_nan() {
                to.fill(0xff);
            }
        }
        let causal = p.causal;
        let case = |scores: &HostTensor| {
            Case::new(p.describe(), move |a| {
                MaskedSoftmax::new(a.t("scores"), a.t("cu_q"), a.t("cu_kv"), a.t("out"), scale, causal).lse(a.opt("lse"))
            })
            .read("scores", scores.clone())
            .read("cu_q", Packing::cu(&p.q))
            .read("cu_kv", Packing::cu(&p.kv))
            .write("out", types.out, t, s, out.clone())
            .write("lse", DType::F32, t, 1, lse.clone())
        };
        cases.extend([case(&unseen), case(&scores).alias("out", "scores")]);
    }
    cases
}

/// Scores of query row `row` at head `head` of one block against keys of another.
fn scores(q: &Mat, row: usize, k: &Mat, keys: impl Iterator<Item = usize>, head: usize, shape: &AttentionShape) -> Vec<Est> {
    let (d, kv) = (shape.head_dim, head / (shape.heads / shape.kv_heads));
    let scale = Est::from(f64::from(shape.scale));
    // The scale may be applied to the query or to the product.
    keys.map(|key| dot(d, |i| q.at(row, head * d + i) * scale, |i| k.part(key, kv * d + i)).done()).collect()
}

fn attentions(rng: &mut Rng, types: Types, copies: Copies) -> Vec<Case> {
    packings().into_iter().map(|p| attention(rng, types, &p, copies)).collect()
}

fn attention(rng: &mut Rng, types: Types, p: &Packing, copies: Copies) -> Case {
    let shape = p.shape();
    let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let (t, s) = (p.t(), p.s());
    let (queries, keys) = (p.blocks(copies, true), p.blocks(copies, false));
    let q = HostTensor::random(rng, types.x, queries.total(), shape.heads * d, 2.0);
    let [k, v] = [0, 1].map(|_| HostTensor::random(rng, types.x, keys.total(), shape.kv_heads * d, 2.0));
    let [qm, km, vm] = [&q, &k, &v].map(Mat::of);
    let row = |row: usize| {
        let (block, base) = (row / t, queries.base(row));
        let seen = p.keys(base);
        let tangent = queries.is_tangent(row);
        let mut out = Vec::new();
        for head in 0..shape.heads {
            let kv = head / group;
            // Keys of a block; a tangent takes its probabilities from the base block.
            let of = |block: usize| seen.clone().map(move |key| block * s + key);
            let values = if tangent { 0 } else { block };
            let (probabilities, _) = softmax(&scores(&qm, values * t + base, &km, of(values), head, &shape));
            let derivative: Vec<Est> = if tangent {
                let a = scores(&qm, row, &km, of(0), head, &shape);
                let b = scores(&qm, base, &km, of(block), head, &shape);
                a.into_iter().zip(b).map(|(a, b)| a + b).collect()
            } else {
                Vec::new()
            };
            let mean = Est::sum(probabilities.iter().zip(&derivative).map(|(&p, &ds)| p * ds));
            for i in 0..d {
                let column = kv * d + i;
                let terms = seen.clone().enumerate().flat_map(|(n, key)| {
                    let p = probabilities[n];
                    if !tangent {
                        return vec![p * vm.at(block * s + key, column)];
                    }
                    // The mean may be subtracted before or after the sum over keys.
                    let v = vm.at(key, column);
                    vec![p * derivative[n] * v, Est::ZERO - p * mean * v, p * vm.at(block * s + key, column)]
                });
                out.push(Est::sum(terms).loosened(10.0 * seen.len() as f64 * U));
            }
        }
        out
    };
    let out = super::forward::per_row(&queries, shape.heads * d, row);
    let one = Blocks { copies: Copies::BASE, ..queries };
    let lse = copies.has_base.then(|| {
        let mut expect = Vec::new();
        for r in 0..t {
            for head in 0..shape.heads {
                let seen = p.keys(r);
                expect.push(match (one.is_live(r), seen.is_empty()) {
                    (false, _) => Expect::Untouched,
                    (true, true) => Expect::Any,
                    _ => softmax(&scores(&qm, r, &km, seen, head, &shape)).1.into(),
                });
            }
        }
        expect
    });
    let case = Case::new(format!("{}, {} {:?} copies, base {}", p.describe(), copies.count, copies.form, copies.has_base), move |a| {
        Attention::new(a.t("q"), a.t("k"), a.t("v"), a.t("cu_q"), a.t("cu_kv"), a.t("out"), shape).lse(a.opt("lse")).copies(copies)
    })
    .read("q", queries.poisoned(q))
    .read("k", keys.poisoned(k))
    .read("v", keys.poisoned(v))
    .read("cu_q", Packing::cu(&p.q))
    .read("cu_kv", Packing::cu(&p.kv))
    .write("out", types.out, queries.total(), shape.heads * d, out);
    match lse {
        Some(lse) => case.write("lse", DType::F32, t, shape.heads, lse),
        None => case,
    }
}

fn attention_backward(rng: &mut Rng, types: Types, p: &Packing) -> Case {
    let shape = p.shape();
    let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let (queries, keys) = (p.blocks(Copies::BASE, true), p.blocks(Copies::BASE, false));
    let (t, s, wide, narrow) = (p.t(), p.s(), shape.heads * d, shape.kv_heads * d);
    let [q, dout] = [0, 1].map(|_| HostTensor::random(rng, types.x, t, wide, 2.0));
    let [k, v] = [0, 1].map(|_| HostTensor::random(rng, types.x, s, narrow, 2.0));
    let [qm, km, vm, dm] = [&q, &k, &v, &dout].map(Mat::of);
    // What the forward pass would have saved.
    let all: Vec<Vec<(Vec<Est>, Est)>> =
        (0..t).map(|r| (0..shape.heads).map(|head| softmax(&scores(&qm, r, &km, p.keys(r), head, &shape))).collect()).collect();
    let saved = HostTensor::from_fn(types.x, t, wide, |r, c| {
        let (head, column) = (c / d, c / d / group * d + c % d);
        p.keys(r).zip(&all[r][head].0).map(|(key, p)| p.v * vm.at(key, column).v).sum()
    });
    let lse = HostTensor::from_fn(DType::F32, t, shape.heads, |r, head| all[r][head].1.v.max(-1e30));
    let (om, lm) = (Mat::of(&saved), Mat::of(&lse));
    let (mut dq, mut dk, mut dv) = (vec![Vec::new(); t * wide], vec![Vec::new(); s * narrow], vec![Vec::new(); s * narrow]);
    let scale = Est::from(f64::from(shape.scale));
    for r in (0..t).filter(|&r| queries.is_live(r)) {
        for head in 0..shape.heads {
            let kv = head / group;
            let along = dot(d, |i| dm.at(r, head * d + i), |i| om.part(r, head * d + i)).done();
            let raw = scores(&qm, r, &km, p.keys(r), head, &shape);
            for (key, score) in p.keys(r).zip(raw) {
                let probability = (score - lm.at(r, head)).exp();
                let towards = dot(d, |i| dm.at(r, head * d + i), |i| vm.part(key, kv * d + i)).done();
                let ds = probability * (towards - along) * scale;
                for i in 0..d {
                    let (wide_at, narrow_at) = (r * wide + head * d + i, key * narrow + kv * d + i);
                    dq[wide_at].push(ds * km.at(key, kv * d + i));
                    dk[narrow_at].push(ds * qm.at(r, head * d + i));
                    dv[narrow_at].push(probability * dm.at(r, head * d + i));
                }
            }
        }
    }
    let sums =
        |blocks: &Blocks, cols: usize, terms: Vec<Vec<Est>>| blocks.expect(cols, |r, c| Est::sum(terms[r * cols + c].iter().copied()));
    let (dq, dk, dv) = (sums(&queries, wide, dq), sums(&keys, narrow, dk), sums(&keys, narrow, dv));
    Case::new(p.describe(), move |a| {
        AttentionBackward::new(
            a.t("q"),
            a.t("k"),
            a.t("v"),
            a.t("out"),
            a.t("lse"),
            a.t("dout"),
            a.t("cu_q"),
            a.t("cu_kv"),
            a.t("dq"),
            a.t("dk"),
            a.t("dv"),
            shape,
        )
    })
    .read("q", queries.poisoned(q))
    .read("k", keys.poisoned(k))
    .read("v", keys.poisoned(v))
    .read("out", queries.poisoned(saved))
    .read("lse", queries.poisoned(lse))
    .read("dout", queries.poisoned(dout))
    .read("cu_q", Packing::cu(&p.q))
    .read("cu_kv", Packing::cu(&p.kv))
    .write("dq", types.out, t, wide, dq)
    .write("dk", types.out, s, narrow, dk)
    .write("dv", types.out, s, narrow, dv)
}
