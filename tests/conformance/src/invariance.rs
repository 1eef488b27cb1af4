//! Row invariance: a row's bits depend on that row alone, not on how many rows there are, where it stands, or which copy it is.

use crate::{
    case::{Args, Case, Expect},
    check::{Bench, Layout, Outcome, Outputs, ensure, execute, output},
    host::HostTensor,
    model::FLOATS,
    rng::Rng,
    suite::Tests,
};
use std::sync::Arc;
use zofo_hal::{
    DType, Op, TensorArg, Uses,
    op::{
        Attention, AttentionShape, CandidateScores, Copies, CrossEntropy, LoraMatMul, LoraMatMulBackward, Map, MapFunction, MatMul,
        Orientation, Pairing, PerturbLoraMatMul, Reduction, RmsNorm, RmsNormBackward, Rope, RowReduce, SwiGlu, SwiGluBackward,
    },
    perturb::{Direction, Domain, Factor, NoiseParams, Projection, Site, TensorId},
};

/// Rows that exist in all; enough for several tiles of a kernel and a ragged end.
const POOL: usize = 41;

pub(super) fn tests(t: &mut Tests) {
    for x in FLOATS {
        for w in crate::model::WEIGHTS {
            t.add(format!("row_invariance/matmul/{x}x{w}"), move |b| {
                families(b, &[product(x, w, Orientation::Nt), product(x, w, Orientation::Nn)])
            });
        }
        t.add(format!("row_invariance/lora/{x}"), move |b| families(b, &loras(x)));
        t.add(format!("row_invariance/rows/{x}"), move |b| families(b, &row_ops(x)));
        t.add(format!("row_invariance/loss/{x}"), move |b| losses(b, x));
        t.add(format!("row_invariance/attention/{x}"), move |b| attention(b, x));
        t.add(format!("row_invariance/perturb_lora_matmul/{x}"), move |b| copies(b, x));
    }
}

type Build = Arc<dyn Fn(&Args) -> Op<TensorArg> + Send + Sync>;

/// An op over any choice of rows of a pool.
struct Family {
    name: &'static str,
    /// Operands with a row per row.
    rows: Vec<(&'static str, HostTensor)>,
    /// An operand with an index per row.
    indices: Option<(&'static str, Vec<u32>)>,
    /// Operands that all rows share; weights with their uses.
    shared: Vec<(&'static str, HostTensor, Option<Uses>)>,
    /// Outputs with a row per row: name, type, columns.
    outputs: Vec<(&'static str, DType, usize)>,
    /// Outputs that rows add up to, which are not compared.
    sums: Vec<(&'static str, HostTensor)>,
    build: Build,
}

impl Family {
    fn new<O: Into<Op<TensorArg>>>(name: &'static str, build: impl Fn(&Args) -> O + Send + Sync + 'static) -> Self {
        let build: Build = Arc::new(move |a| build(a).into());
        Self { name, rows: Vec::new(), indices: None, shared: Vec::new(), outputs: Vec::new(), sums: Vec::new(), build }
    }

    fn case(&self, rows: &[usize]) -> Case {
        let build = Arc::clone(&self.build);
        let mut case = Case::new(format!("{} on rows {rows:?}", self.name), move |a| build(a));
        for (name, t) in &self.rows {
            case = case.read(name, t.take_rows(rows));
        }
        if let Some((name, index)) = &self.indices {
            case = case.read(name, HostTensor::indices(&rows.iter().map(|&r| index[r]).collect::<Vec<_>>()));
        }
        for (name, t, uses) in &self.shared {
            case = match uses {
                Some(uses) => case.weight(name, t.clone(), *uses),
                None => case.read(name, t.clone()),
            };
        }
        for (name, dtype, cols) in &self.outputs {
            case = case.write(name, *dtype, rows.len(), *cols, vec![Expect::Any; rows.len() * cols]);
        }
        for (name, t) in &self.sums {
            case = case.update(name, t.clone(), vec![Expect::Any; t.rows * t.cols]);
        }
        case
    }
}

/// Choices of rows: alone, few, a tile and a bit, in another order, the end.
fn choices() -> Vec<Vec<usize>> {
    vec![vec![0], vec![17], vec![40], vec![3, 4], vec![40, 1, 17, 9, 30], (5..22).collect(), (0..POOL).rev().collect(), (8..41).collect()]
}

fn families(b: &Bench, families: &[Family]) -> Outcome {
    if !b.device.features().row_invariant {
        return Ok(());
    }
    for family in families {
        let all: Vec<usize> = (0..POOL).collect();
        let Some(whole) = execute(&*b.queue, &family.case(&all), Layout::Apart)? else { continue };
        for rows in choices() {
            for layout in [Layout::Apart, Layout::Together] {
                let Some(part) = execute(&*b.queue, &family.case(&rows), layout)? else { continue };
                for (name, ..) in &family.outputs {
                    let want = output(&whole, name).take_rows(&rows);
                    let got = output(&part, name);
                    let pitch = got.bytes.len() / got.rows;
                    let differ = (0..rows.len()).find(|r| got.bytes[r * pitch..(r + 1) * pitch] != want.bytes[r * pitch..(r + 1) * pitch]);
                    if let Some(r) = differ {
                        return Err(format!(
                            "{}: {name} of row {} has other bits as row {r} of {} ({layout:?}) than among all {POOL}",
                            family.name,
                            rows[r],
                            rows.len()
                        )
                        .into());
                    }
                }
            }
        }
    }
    Ok(())
}

fn product(x: DType, w: DType, o: Orientation) -> Family {
    let rng = &mut Rng::new(11);
    let k = 100usize.next_multiple_of(w.block().0);
    let (rows, cols, inner) = if o == Orientation::Nt { (37, k, k) } else { (70, k, 70) };
    let n = if o == Orientation::Nt { 37 } else { k };
    Family {
        rows: vec![("a", HostTensor::random(rng, x, POOL, inner, 1.0))],
        shared: vec![("b", HostTensor::random(rng, w, rows, cols, 1.0), Some(Uses::TRAINING))],
        outputs: vec![("out", x, n)],
        ..Family::new("matmul", move |a| MatMul::new(a.t("a"), a.m("b"), a.t("out"), o))
    }
}

fn loras(x: DType) -> Vec<Family> {
    let rng = &mut Rng::new(12);
    let (k, r, n) = (100, 6, 37);
    let mut t = |rows, cols| HostTensor::random(rng, x, rows, cols, 1.0);
    let shared = vec![("a", t(r, k), None), ("b", t(n, r), None), ("w", t(n, k), Some(Uses::TRAINING))];
    let forward = Family {
        rows: vec![("x", t(POOL, k))],
        shared: shared.clone(),
        outputs: vec![("out", x, n), ("xa", x, r)],
        ..Family::new("lora_matmul", |a| LoraMatMul::new(a.t("x"), a.t("a"), a.t("b"), a.m("w"), a.t("out"), 0.5).xa(a.opt("xa")))
    };
    let backward = Family {
        rows: vec![("x", t(POOL, k)), ("xa", t(POOL, r)), ("dout", t(POOL, n))],
        shared,
        outputs: vec![("dx", x, k)],
        sums: [("da", r, k), ("db", n, r)].map(|(name, rows, cols)| (name, HostTensor::from_fn(DType::F32, rows, cols, |_, _| 0.0))).into(),
        ..Family::new("lora_matmul_backward", |a| {
            LoraMatMulBackward::new(a.t("x"), a.t("xa"), a.t("a"), a.t("b"), a.t("dout"), a.m("w"), a.t("da"), a.t("db"), 0.5)
                .dx(a.opt("dx"))
        })
    };
    vec![forward, backward]
}

fn row_ops(x: DType) -> Vec<Family> {
    let rng = &mut Rng::new(13);
    let d = 101;
    let mut t = |rows, cols| HostTensor::random(rng, x, rows, cols, 1.5);
    let mut list = vec![
        Family {
            rows: vec![("x", t(POOL, d)), ("residual", t(POOL, d))],
            shared: vec![("gamma", t(1, d), None)],
            outputs: vec![("out", x, d), ("sum", x, d)],
            ..Family::new("rms_norm", |a| {
                RmsNorm::new(a.t("x"), a.t("gamma"), a.t("out"), 1e-5).residual(a.opt("residual")).sum(a.opt("sum"))
            })
        },
        Family {
            rows: vec![("x", t(POOL, d)), ("dout", t(POOL, d))],
            shared: vec![("gamma", t(1, d), None)],
            outputs: vec![("dx", x, d)],
            ..Family::new("rms_norm_backward", |a| RmsNormBackward::new(a.t("x"), a.t("gamma"), a.t("dout"), a.t("dx"), 1e-5))
        },
        Family {
            rows: vec![("gate", t(POOL, d)), ("up", t(POOL, d))],
            outputs: vec![("out", x, d)],
            ..Family::new("swiglu", |a| SwiGlu::new(a.t("gate"), a.t("up"), a.t("out")))
        },
        Family {
            rows: vec![("gate", t(POOL, d)), ("up", t(POOL, d)), ("dout", t(POOL, d))],
            outputs: vec![("dgate", x, d), ("dup", x, d)],
            ..Family::new("swiglu_backward", |a| SwiGluBackward::new(a.t("gate"), a.t("up"), a.t("dout"), a.t("dgate"), a.t("dup")))
        },
        Family {
            rows: vec![("x", t(POOL, d))],
            outputs: vec![("out", x, 1)],
            ..Family::new("row_reduce", |a| RowReduce::new(a.t("x"), a.t("out"), Reduction::Sum))
        },
        Family {
            rows: vec![("x", t(POOL, 3 * 18))],
            indices: Some(("positions", (0..POOL as u32).map(|i| i * 5 % 50).collect())),
            shared: ["cos", "sin"].map(|name| (name, HostTensor::random(&mut Rng::new(5), DType::F32, 50, 9, 1.0), None)).into(),
            outputs: vec![("out", x, 3 * 18)],
            ..Family::new("rope", |a| Rope::new(a.t("x"), a.t("positions"), a.t("cos"), a.t("sin"), a.t("out"), 18, Pairing::Half))
        },
    ];
    for function in [MapFunction::Exp, MapFunction::Sigmoid, MapFunction::Silu] {
        list.push(Family {
            rows: vec![("x", t(POOL, d))],
            outputs: vec![("out", x, d)],
            ..Family::new("map", move |a| Map::new(a.t("x"), a.t("out"), function))
        });
    }
    list
}

/// Losses and scores stand in columns, one per labelled row.
fn losses(b: &Bench, x: DType) -> Outcome {
    if !b.device.features().row_invariant {
        return Ok(());
    }
    let rng = &mut Rng::new(14);
    let (d, vocabulary) = (60, 307);
    let h = HostTensor::random(rng, x, POOL, d, 1.0);
    let head = HostTensor::random(rng, x, vocabulary, d, 1.0);
    let targets: Vec<u32> = (0..POOL).map(|_| rng.below(vocabulary) as u32).collect();
    let run = |labels: &[usize], copies: Copies| -> Outcome<Option<[HostTensor; 2]>> {
        // Each block is the same rows, so that each gives the same losses.
        let rows: Vec<usize> = (0..copies.total()).flat_map(|_| 0..POOL).collect();
        let n = labels.len();
        let picked: Vec<u32> = labels.iter().map(|&l| l as u32).collect();
        let theirs: Vec<u32> = labels.iter().map(|&l| targets[l]).collect();
        let case = Case::new("cross_entropy", move |a| {
            CrossEntropy::new(a.t("h"), a.t("rows"), a.t("targets"), a.m("head"), a.t("losses")).copies(copies)
        })
        .read("h", h.take_rows(&rows))
        .read("rows", HostTensor::indices(&picked))
        .read("targets", HostTensor::indices(&theirs))
        .weight("head", head.clone(), Uses::ALL)
        .write("losses", DType::F32, copies.total(), n, vec![Expect::Any; copies.total() * n]);
        let Some(losses) = execute(&*b.queue, &case, Layout::Apart)? else { return Ok(None) };
        let case =
            Case::new("candidate_scores", |a| CandidateScores::new(a.t("h"), a.t("rows"), a.t("candidates"), a.m("head"), a.t("out")))
                .read("h", h.clone())
                .read("rows", HostTensor::indices(&picked))
                .read("candidates", HostTensor::indices(&[3, 300, 77]))
                .weight("head", head.clone(), Uses::ALL)
                .write("out", DType::F32, n, 3, vec![Expect::Any; 3 * n]);
        let Some(scores) = execute(&*b.queue, &case, Layout::Apart)? else { return Ok(None) };
        Ok(Some([output(&losses, "losses").clone(), output(&scores, "out").clone()]))
    };
    let all: Vec<usize> = (0..POOL).collect();
    let Some([losses, scores]) = run(&all, Copies::BASE)? else { return Ok(()) };
    let loss = |t: &HostTensor, i: usize| t.bytes[4 * i..4 * i + 4].to_vec();
    for labels in choices() {
        for copies in [Copies::BASE, Copies::value(2, true)] {
            let Some([l, s]) = run(&labels, copies)? else { return Ok(()) };
            for c in 0..copies.total() {
                for (i, &label) in labels.iter().enumerate() {
                    let same = loss(&l, c * labels.len() + i) == loss(&losses, label);
                    ensure!(same, "the loss of row {label} has other bits in block {c} among {} labels", labels.len());
                }
            }
            ensure!(s.bytes == scores.take_rows(&labels).bytes, "candidate scores have other bits among {} labels", labels.len());
        }
    }
    Ok(())
}

/// A sequence alone, among others, in copies, and its last query alone against the same keys: decoding.
fn attention(b: &Bench, x: DType) -> Outcome {
    if !b.device.features().row_invariant {
        return Ok(());
    }
    let rng = &mut Rng::new(15);
    let (heads, kv_heads, d, n) = (4, 2, 18, 45);
    let shape = AttentionShape { heads, kv_heads, head_dim: d, scale: 0.3, causal: true };
    let q = HostTensor::random(rng, x, POOL + n, heads * d, 2.0);
    let [k, v] = [0, 1].map(|_| HostTensor::random(rng, x, POOL + n, kv_heads * d, 2.0));
    let run = |queries: &[usize], keys: &[usize], cu_q: &[u32], cu_kv: &[u32], copies: Copies| -> Outcome<Option<Outputs>> {
        let width = heads * d;
        let case = Case::new("attention", move |a| {
            Attention::new(a.t("q"), a.t("k"), a.t("v"), a.t("cu_q"), a.t("cu_kv"), a.t("out"), shape).copies(copies)
        })
        .read("q", q.take_rows(queries))
        .read("k", k.take_rows(keys))
        .read("v", v.take_rows(keys))
        .read("cu_q", HostTensor::indices(cu_q))
        .read("cu_kv", HostTensor::indices(cu_kv))
        .write("out", x, queries.len(), width, vec![Expect::Any; queries.len() * width]);
        execute(&*b.queue, &case, Layout::Apart)
    };
    let sequence: Vec<usize> = (0..n).collect();
    let length = n as u32;
    let Some(alone) = run(&sequence, &sequence, &[0, length], &[0, length], Copies::BASE)? else { return Ok(()) };
    let alone = output(&alone, "out");
    let compare = |what: &str, got: Option<Outputs>, rows: &[usize], of: &[usize]| -> Outcome {
        let Some(got) = got else { return Ok(()) };
        ensure!(output(&got, "out").take_rows(rows).bytes == alone.take_rows(of).bytes, "a sequence has other bits {what}");
        Ok(())
    };
    let before = 7usize;
    let among: Vec<usize> = (n..n + before).chain(0..n).chain(n + before..n + 20).collect();
    let cu = [0, 3, before as u32, before as u32 + length, among.len() as u32, among.len() as u32];
    let placed: Vec<usize> = (before..before + n).collect();
    compare("among others", run(&among, &among, &cu, &cu, Copies::BASE)?, &placed, &sequence)?;
    let twice: Vec<usize> = sequence.iter().chain(&sequence).copied().collect();
    let copied = run(&twice, &twice, &[0, length], &[0, length], Copies::value(1, true))?;
    compare("in block 1", copied, &(n..2 * n).collect::<Vec<_>>(), &sequence)?;
    for first in [n - 1, n - 3] {
        let tail: Vec<usize> = (first..n).collect();
        let decoded = run(&tail, &sequence, &[0, tail.len() as u32], &[0, length], Copies::BASE)?;
        compare("when its last queries come alone, as in decoding", decoded, &(0..tail.len()).collect::<Vec<_>>(), &tail)?;
    }
    Ok(())
}

/// Each direction's block has the bits that it has alone, and the base block those that it has without copies.
fn copies(b: &Bench, x: DType) -> Outcome {
    if !b.device.features().row_invariant {
        return Ok(());
    }
    let rng = &mut Rng::new(16);
    let (t, k, r, n) = (9, 100, 6, 37);
    let mut random = |rows, cols| HostTensor::random(rng, x, rows, cols, 1.0);
    let (input, a, bb, w) = (random(t, k), random(r, k), random(n, r), random(n, k));
    let site = |factor, ld| Site::new(TensorId::new(2, Projection::Up, factor).expect("a small layer"), ld as u32);
    let (site_a, site_b) = (site(Factor::A, k), site(Factor::B, r));
    let run = |q: u32, copies: Copies, shared: bool, rows: &[usize]| -> Outcome<Option<HostTensor>> {
        let direction = Direction::new(Domain::Main, 1, q)?;
        let noise = NoiseParams::new(99, 3, direction, 0.01);
        let total = copies.total() * rows.len();
        let taken: Vec<usize> = if shared { rows.to_vec() } else { (0..copies.total()).flat_map(|_| rows.iter().copied()).collect() };
        let case = Case::new("perturb_lora_matmul", move |v| {
            PerturbLoraMatMul::new(v.t("x"), v.t("a"), v.t("b"), v.t("noise"), v.m("w"), v.t("out"), 0.5, copies)
                .site_a(Some(site_a))
                .site_b(Some(site_b))
                .shared_input(shared)
        })
        .read("x", input.take_rows(&taken))
        .read("a", a.clone())
        .read("b", bb.clone())
        .read("noise", HostTensor::indices(bytemuck::cast_slice(bytemuck::bytes_of(&noise))))
        .weight("w", w.clone(), Uses::FORWARD)
        .write("out", x, total, n, vec![Expect::Any; total * n]);
        Ok(execute(&*b.queue, &case, Layout::Apart)?.map(|o| output(&o, "out").clone()))
    };
    let all: Vec<usize> = (0..t).collect();
    for copies in [Copies::value(4, true), Copies::tangent(4)] {
        let Some(whole) = run(10, copies, false, &all)? else { return Ok(()) };
        let block =
            |whole: &HostTensor, c: usize, rows: &[usize]| whole.take_rows(&rows.iter().map(|r| c * t + r).collect::<Vec<_>>()).bytes;
        for rows in [&all[..], &[4], &[8, 0, 3]] {
            for q in 0..4 {
                let one = Copies { count: 1, ..copies };
                let Some(got) = run(10 + q, one, false, rows)? else { return Ok(()) };
                let last: Vec<usize> = (rows.len()..2 * rows.len()).collect();
                let same = got.take_rows(&last).bytes == block(&whole, 1 + q as usize, rows);
                ensure!(same, "direction {q} of 4 has other bits alone, {} rows, {copies:?}", rows.len());
                let base: Vec<usize> = (0..rows.len()).collect();
                ensure!(got.take_rows(&base).bytes == block(&whole, 0, rows), "the base has other bits beside 1 copy than beside 4");
            }
        }
        let Some(shared) = run(10, copies, true, &all)? else { return Ok(()) };
        if copies.form == zofo_hal::op::Form::Value {
            ensure!(shared.bytes == whole.bytes, "a shared input gives other bits than the same input in every block");
        }
    }
    Ok(())
}
