use crate::{
    case::Case,
    estimate::Est,
    host::HostTensor,
    model::{Blocks, FLOATS, Mat, TYPES, Types, WEIGHTS, forms},
    rng::Rng,
    suite::Tests,
};
use zofo_hal::{
    DType, Uses,
    op::{BoundaryDot, Copies, Embedding, NO_INDEX, RmsNorm, Spread, SwiGlu},
};

pub(super) fn tests(t: &mut Tests) {
    for types in TYPES {
        let name = types.name;
        t.cases(format!("rms_norm/{name}/forms"), move |rng| norms(rng, types));
        t.cases(format!("swiglu/{name}/forms"), move |rng| swiglus(rng, types));
        t.cases(format!("embedding/{name}/tensor"), move |rng| embeddings(rng, types.x, types.out, false));
        t.cases(format!("boundary_dot/{name}/copies"), move |rng| boundary_dots(rng, types));
    }
    for w in WEIGHTS {
        for out in FLOATS {
            t.cases(format!("embedding/{w}-{out}/weight"), move |rng| embeddings(rng, w, out, true));
        }
    }
    for dtype in FLOATS {
        t.cases(format!("spread/{dtype}/forms"), move |rng| spreads(rng, dtype));
    }
}

fn embeddings(rng: &mut Rng, table: DType, out: DType, weight: bool) -> Vec<Case> {
    let block = table.block().0;
    let mut cases = Vec::new();
    for (vocabulary, cols, rows, live) in [(5, 1, 0, None), (1, 1, 1, None), (17, 40, 6, Some(4)), (40, 66, 23, None), (3, 4, 2, Some(0))] {
        let (cols, blocks) = (cols * block, Blocks { live, ..Blocks::one(rows) });
        let t = HostTensor::random(rng, table, vocabulary, cols.min(512.max(block)), 1.0);
        let cols = t.cols;
        let ids: Vec<u32> = (0..rows).map(|r| if blocks.is_live(r) { rng.below(vocabulary) as u32 } else { NO_INDEX }).collect();
        let m = Mat::of(&t);
        let expect = blocks.expect(cols, |r, c| {
            let (v, size) = m.part(ids[r] as usize, c);
            // A block-quantised value is a scale times a number, and a minimum: two roundings at most.
            let e = if table.is_quantised() { 2.0 * crate::estimate::U * size } else { 0.0 };
            Est { v: v.v, e }
        });
        let case = Case::new(format!("table [{vocabulary}, {cols}], {}", blocks.describe()), |a| {
            Embedding::new(a.t("ids"), a.m("table"), a.t("out")).live(a.opt("live"))
        })
        .read("ids", HostTensor::indices(&ids))
        .read("live", blocks.live_tensor());
        let gather = Uses { gather: true, ..Uses::default() };
        let case = if weight { case.weight("table", t, gather) } else { case.read("table", t) };
        cases.push(case.write("out", out, rows, cols, expect));
    }
    cases
}

fn norms(rng: &mut Rng, types: Types) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, cols) in [(0, 8), (1, 1), (3, 37), (4, 160)] {
        for blocks in forms(rows) {
            for (residual, sum, alias) in
                [(false, false, None), (true, true, None), (true, true, Some("x")), (true, true, Some("residual")), (false, true, None)]
            {
                let case = rms_norm(rng, types, blocks, cols, residual, sum);
                cases.push(match alias {
                    Some(input) => case.alias("sum", input),
                    None => case,
                });
            }
        }
    }
    cases
}

const EPS: f32 = 1e-5;

fn rms_norm(rng: &mut Rng, types: Types, blocks: Blocks, cols: usize, residual: bool, sum: bool) -> Case {
    let all = blocks.total();
    let x = HostTensor::random(rng, types.x, all, cols, 2.0);
    let gamma = HostTensor::random(rng, types.x, 1, cols, 1.5);
    let added = residual.then(|| HostTensor::random(rng, types.out, all, cols, 2.0));
    let (xm, gm, rm) = (Mat::of(&x), Mat::of(&gamma), added.as_ref().map(Mat::of));
    let whole = xm.map(|r, c, v| match &rm {
        Some(rm) => v + rm.at(r, c),
        None => v,
    });
    // As the norm sees it: rounded first, where it is kept.
    let h = whole.clone().map(|_, _, v| if sum { v.rounded_to(types.out) } else { v });
    let mean = |f: &dyn Fn(usize) -> Est| Est::sum((0..cols).map(f)) / Est::from(cols as f64);
    let inverse = |row: usize| (mean(&|i| h.at(row, i) * h.at(row, i)) + Est::from(f64::from(EPS))).sqrt().recip();
    let out = per_row(&blocks, cols, |row| {
        let base = blocks.base(row);
        if !blocks.is_tangent(row) {
            let r = inverse(row);
            return (0..cols).map(|c| gm.at(0, c) * h.at(row, c) * r).collect();
        }
        let (r, along) = (inverse(base), mean(&|i| h.at(base, i) * h.at(row, i)));
        let cube = r * r * r;
        (0..cols).map(|c| gm.at(0, c) * (h.at(row, c) * r - h.at(base, c) * cube * along)).collect()
    });
    let kept = blocks.expect(cols, |r, c| whole.at(r, c));
    let copies = blocks.copies;
    let case = Case::new(format!("d {cols}, {}, residual {residual}", blocks.describe()), move |a| {
        RmsNorm::new(a.t("x"), a.t("gamma"), a.t("out"), EPS)
            .residual(a.opt("residual"))
            .live(a.opt("live"))
            .sum(a.opt("sum"))
            .copies(copies)
    })
    .read("x", blocks.poisoned(x))
    .read("gamma", gamma)
    .read("residual", added.map(|t| blocks.poisoned(t)))
    .read("live", blocks.live_tensor())
    .write("out", types.out, all, cols, out);
    if sum { case.write("sum", types.out, all, cols, kept) } else { case }
}

/// Expectations whose rows are computed as a whole.
pub(super) fn per_row(blocks: &Blocks, cols: usize, f: impl Fn(usize) -> Vec<Est>) -> Vec<crate::case::Expect> {
    let mut row = (usize::MAX, Vec::new());
    blocks.expect(cols, |r, c| {
        if row.0 != r {
            row = (r, f(r));
        }
        row.1[c]
    })
}

/// `silu` and its derivative.
pub(super) fn silu(x: Est) -> [Est; 2] {
    let s = x.sigmoid();
    let one = Est::from(1.0);
    [x * s, s * (one + x * (one - s))]
}

fn swiglus(rng: &mut Rng, types: Types) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, cols) in [(0, 8), (1, 1), (3, 37), (4, 200)] {
        for blocks in forms(rows) {
            let all = blocks.total();
            let [gate, up] = [0, 1].map(|_| HostTensor::random(rng, types.x, all, cols, 4.0));
            let (g, u) = (Mat::of(&gate), Mat::of(&up));
            let expect = blocks.expect(cols, |row, c| {
                if !blocks.is_tangent(row) {
                    return silu(g.at(row, c))[0] * u.at(row, c);
                }
                let base = blocks.base(row);
                let [value, slope] = silu(g.at(base, c));
                slope * g.at(row, c) * u.at(base, c) + value * u.at(row, c)
            });
            let copies = blocks.copies;
            let case = || {
                Case::new(format!("f {cols}, {}", blocks.describe()), move |a| {
                    SwiGlu::new(a.t("gate"), a.t("up"), a.t("out")).live(a.opt("live")).copies(copies)
                })
                .read("gate", blocks.poisoned(gate.clone()))
                .read("up", blocks.poisoned(up.clone()))
                .read("live", blocks.live_tensor())
                .write("out", types.out, all, cols, expect.clone())
            };
            cases.extend([case(), case().alias("out", "gate"), case().alias("out", "up")]);
        }
    }
    cases
}

fn spreads(rng: &mut Rng, dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, cols) in [(0, 3), (1, 1), (4, 37)] {
        for blocks in forms(rows) {
            let src = HostTensor::random(rng, dtype, rows, cols, 3.0);
            let m = Mat::of(&src);
            let expect = blocks.expect(cols, |r, c| if blocks.is_tangent(r) { Est::ZERO } else { m.at(blocks.base(r), c) });
            let copies = blocks.copies;
            let one = Blocks { copies: Copies::BASE, ..blocks };
            cases.push(
                Case::new(format!("d {cols}, {}", blocks.describe()), move |a| {
                    Spread::new(a.t("src"), a.t("out"), copies).live(a.opt("live"))
                })
                .read("src", one.poisoned(src))
                .read("live", blocks.live_tensor())
                .write("out", dtype, blocks.total(), cols, expect),
            );
        }
    }
    cases
}

fn boundary_dots(rng: &mut Rng, types: Types) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, cols, n, live) in [(0, 4, 2, None), (3, 5, 0, None), (1, 1, 1, None), (6, 37, 3, Some(4)), (17, 64, 2, None)] {
        for with_base in [false, true] {
            let one = Blocks { live, ..Blocks::one(rows) };
            let blocks = Blocks { copies: Copies::value(n, false), ..one };
            let delta = HostTensor::random(rng, types.x, rows, cols, 1.0);
            let h = HostTensor::random(rng, types.x, n as usize * rows, cols, 1.0);
            let base = with_base.then(|| HostTensor::random(rng, types.out, rows, cols, 1.0));
            let (dm, hm, bm) = (Mat::of(&delta), Mat::of(&h), base.as_ref().map(Mat::of));
            let expect = (0..n as usize)
                .map(|q| {
                    let elements = (0..rows).filter(|&r| one.is_live(r)).flat_map(|r| (0..cols).map(move |c| (r, c)));
                    let terms = elements.map(|(r, c)| {
                        let h = hm.at(q * rows + r, c);
                        dm.at(r, c) * bm.as_ref().map_or(h, |b| h - b.at(r, c))
                    });
                    Est::sum(terms).into()
                })
                .collect();
            cases.push(
                Case::new(format!("d {cols}, {n} copies of {rows} rows, live {live:?}, base {with_base}"), |a| {
                    BoundaryDot::new(a.t("delta"), a.t("h"), a.t("out")).base(a.opt("base")).live(a.opt("live"))
                })
                .read("delta", one.poisoned(delta))
                .read("h", blocks.poisoned(h))
                .read("base", base.map(|t| one.poisoned(t)))
                .read("live", one.live_tensor())
                .write("out", DType::F32, 1, n as usize, expect),
            );
        }
    }
    cases
}
