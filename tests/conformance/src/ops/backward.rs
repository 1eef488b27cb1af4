use super::forward::{per_row, silu};
use crate::{
    case::Case,
    estimate::Est,
    host::HostTensor,
    model::{Blocks, Mat, TYPES, Types, WEIGHTS, dot},
    rng::Rng,
    suite::Tests,
};
use zofo_hal::{
    DType, Uses,
    op::{LoraMatMulBackward, RmsNormBackward, SwiGluBackward},
};

pub(super) fn tests(t: &mut Tests) {
    for types in TYPES {
        let name = types.name;
        t.cases(format!("rms_norm_backward/{name}/rows"), move |rng| norms(rng, types));
        t.cases(format!("swiglu_backward/{name}/rows"), move |rng| swiglus(rng, types));
        t.cases(format!("lora_matmul_backward/{name}/rows"), move |rng| loras(rng, types));
    }
    for types in &TYPES[..3] {
        for w in WEIGHTS {
            t.cases(format!("lora_matmul_backward/{}x{w}/weight", types.name), move |rng| {
                let k = 20usize.next_multiple_of(w.block().0);
                vec![
                    lora(rng, *types, w, Blocks::one(5), [k, 4, 11], Some(0.0), true),
                    lora(rng, *types, w, Blocks::one(2), [2 * k, 3, 37], Some(1.0), true),
                ]
            });
        }
    }
}

fn blocks() -> Vec<Blocks> {
    [(0, None), (1, None), (4, Some(3)), (3, Some(0)), (9, None)].map(|(rows, live)| Blocks { live, ..Blocks::one(rows) }).into()
}

fn norms(rng: &mut Rng, types: Types) -> Vec<Case> {
    let mut cases = Vec::new();
    for blocks in blocks() {
        for (cols, residual) in [(1, true), (37, false), (256, true)] {
            let rows = blocks.rows;
            let eps = 1e-5f32;
            let [x, dout] = [0, 1].map(|_| HostTensor::random(rng, types.x, rows, cols, 2.0));
            let gamma = HostTensor::random(rng, types.x, 1, cols, 1.5);
            let along = residual.then(|| HostTensor::random(rng, types.out, rows, cols, 1.0));
            let ([h, d, g], dr) = ([&x, &dout, &gamma].map(Mat::of), along.as_ref().map(Mat::of));
            let expect = per_row(&blocks, cols, |row| {
                let mean = |f: &dyn Fn(usize) -> Est| Est::sum((0..cols).map(f)) / Est::from(cols as f64);
                let u = |c: usize| g.at(0, c) * d.at(row, c);
                let r = (mean(&|c| h.at(row, c) * h.at(row, c)) + Est::from(f64::from(eps))).sqrt().recip();
                let m = mean(&|c| h.at(row, c) * u(c));
                // r is multiplied in or out of the bracket.
                let term = |c: usize| r * u(c) - r * r * r * h.at(row, c) * m;
                (0..cols).map(|c| dr.as_ref().map_or(term(c), |dr| term(c) + dr.at(row, c))).collect()
            });
            let case = || {
                Case::new(format!("d {cols}, {}, residual {residual}", blocks.describe()), move |a| {
                    RmsNormBackward::new(a.t("x"), a.t("gamma"), a.t("dout"), a.t("dx"), eps)
                        .dresidual(a.opt("dresidual"))
                        .live(a.opt("live"))
                })
                .read("x", blocks.poisoned(x.clone()))
                .read("gamma", gamma.clone())
                .read("dout", blocks.poisoned(dout.clone()))
                .read("dresidual", along.clone().map(|t| blocks.poisoned(t)))
                .read("live", blocks.live_tensor())
                .write("dx", types.out, rows, cols, expect.clone())
            };
            cases.push(case());
            if residual {
                cases.push(case().alias("dx", "dresidual"));
            }
        }
    }
    cases
}

fn swiglus(rng: &mut Rng, types: Types) -> Vec<Case> {
    let mut cases = Vec::new();
    for blocks in blocks() {
        for cols in [1, 37, 130] {
            let rows = blocks.rows;
            let [gate, up, dout] = [0, 1, 2].map(|_| HostTensor::random(rng, types.x, rows, cols, 3.0));
            let [g, u, d] = [&gate, &up, &dout].map(Mat::of);
            let dgate = blocks.expect(cols, |r, c| d.at(r, c) * u.at(r, c) * silu(g.at(r, c))[1]);
            let dup = blocks.expect(cols, |r, c| d.at(r, c) * silu(g.at(r, c))[0]);
            for aliases in [&[][..], &[("dgate", "gate"), ("dup", "up")], &[("dgate", "dout")], &[("dup", "dout")]] {
                let case = Case::new(format!("f {cols}, {}", blocks.describe()), move |a| {
                    SwiGluBackward::new(a.t("gate"), a.t("up"), a.t("dout"), a.t("dgate"), a.t("dup")).live(a.opt("live"))
                })
                .read("gate", blocks.poisoned(gate.clone()))
                .read("up", blocks.poisoned(up.clone()))
                .read("dout", blocks.poisoned(dout.clone()))
                .read("live", blocks.live_tensor())
                .write("dgate", types.out, rows, cols, dgate.clone())
                .write("dup", types.out, rows, cols, dup.clone());
                cases.push(aliases.iter().fold(case, |case, (out, input)| case.alias(out, input)));
            }
        }
    }
    cases
}

fn loras(rng: &mut Rng, types: Types) -> Vec<Case> {
    let mut cases = Vec::new();
    for blocks in blocks() {
        for (sizes, beta) in [([37, 4, 18], None), ([20, 1, 5], Some(0.0)), ([9, 3, 1], Some(-0.75))] {
            cases.push(lora(rng, types, types.x, blocks, sizes, beta, true));
        }
    }
    cases.push(lora(rng, types, types.x, Blocks::one(33), [130, 8, 65], Some(1.0), true));
    cases.push(lora(rng, types, types.x, Blocks::one(17), [20, 4, 18], Some(1.0), false));
    cases
}

/// `beta` is that of `dx`; without it there is no `dx`.
fn lora(rng: &mut Rng, types: Types, weight: DType, blocks: Blocks, [k, r, n]: [usize; 3], beta: Option<f32>, factors: bool) -> Case {
    let rows = blocks.rows;
    let x = HostTensor::random(rng, types.x, rows, k, 1.0);
    let xa = HostTensor::random(rng, types.x, rows, r, 1.0);
    let a = HostTensor::random(rng, types.x, r, k, 0.5);
    let b = HostTensor::random(rng, types.x, n, r, 0.5);
    let w = HostTensor::random(rng, weight, n, k, 0.5);
    let dout = HostTensor::random(rng, types.x, rows, n, 1.0);
    let da = HostTensor::random(rng, DType::F32, r, k, 1.0);
    let db = HostTensor::random(rng, DType::F32, n, r, 1.0);
    let dx = HostTensor::random(rng, types.out, rows, k, 1.0);
    let scale = 1.75f32;
    let [xm, xam, am, bm, dm, dam, dbm, dxm] = [&x, &xa, &a, &b, &dout, &da, &db, &dx].map(Mat::of);
    let wm = Mat::met_by(&w, dout.dtype);
    let live: Vec<usize> = (0..rows).filter(|&t| blocks.is_live(t)).collect();
    let zero = || dot(0, |_| Est::ZERO, |_| (Est::ZERO, 0.0));
    let u: Vec<Vec<Est>> = (0..rows)
        .map(|t| {
            let entry = |j| {
                let mut sum = zero();
                sum.add_scaled(dot(n, |o| dm.at(t, o), |o| bm.part(o, j)), scale.into());
                sum.done()
            };
            (0..r).map(entry).collect()
        })
        .collect();
    let edx = blocks.expect(k, |t, i| {
        let mut sum = dot(n, |o| dm.at(t, o), |o| wm.part(o, i));
        sum.add_scaled(dot(r, |j| u[t][j], |j| am.part(j, i)), 1.0);
        if let Some(beta) = beta.filter(|b| *b != 0.0) {
            sum.add(dxm.at(t, i) * Est::from(f64::from(beta)));
        }
        sum.done()
    });
    let all = |rows: usize, cols: usize, f: &dyn Fn(usize, usize) -> Est| Blocks::one(rows).expect(cols, f);
    let eda = all(r, k, &|j, i| {
        if !factors {
            return dam.at(j, i);
        }
        let mut sum = dot(live.len(), |t| u[live[t]][j], |t| xm.part(live[t], i));
        sum.add(dam.at(j, i));
        sum.done()
    });
    let edb = all(n, r, &|o, j| {
        if !factors {
            return dbm.at(o, j);
        }
        let mut sum = zero();
        sum.add_scaled(dot(live.len(), |t| dm.at(live[t], o), |t| xam.part(live[t], j)), scale.into());
        sum.add(dbm.at(o, j));
        sum.done()
    });
    let case = Case::new(format!("in {k}, rank {r}, out {n}, {}, beta {beta:?}, factors {factors}", blocks.describe()), move |v| {
        LoraMatMulBackward::new(v.t("x"), v.t("xa"), v.t("a"), v.t("b"), v.t("dout"), v.m("w"), v.t("da"), v.t("db"), scale)
            .live(v.opt("live"))
            .dx(v.opt("dx"))
            .beta(beta.unwrap_or(0.0))
            .factors(factors)
    })
    .read("x", blocks.poisoned(x))
    .read("xa", blocks.poisoned(xa))
    .read("a", a)
    .read("b", b)
    .read("dout", blocks.poisoned(dout))
    .read("live", blocks.live_tensor())
    .weight("w", w, Uses::TRAINING)
    .update("da", da, eda)
    .update("db", db, edb);
    match beta {
        None => case,
        Some(0.0) => case.write("dx", types.out, rows, k, edx),
        Some(_) => case.update("dx", blocks.poisoned(dx), edx),
    }
}
