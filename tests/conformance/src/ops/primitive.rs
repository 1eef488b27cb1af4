use crate::{
    case::{Case, Expect},
    estimate::Est,
    host::HostTensor,
    model::{Blocks, FLOATS, Mat, TYPES, Types},
    rng::Rng,
    suite::Tests,
};
use zofo_hal::{
    DType,
    op::{
        Cast, Copies, Copy, Fill, GatherRows, Map, MapFunction, Mul, NO_INDEX, Perturb, PhiloxWords, Reduction, RowReduce, ScaledAdd,
        ScatterRows, SumSquares,
    },
    perturb::{Direction, Distribution, Domain, NoiseParams, Site, TensorId, Tier, philox4x32_10},
};

const SHAPES: [[usize; 2]; 7] = [[0, 4], [3, 0], [1, 1], [2, 3], [5, 33], [1, 257], [37, 64]];
const ANY: [DType; 4] = [DType::F32, DType::F16, DType::Bf16, DType::U32];

pub(super) fn tests(t: &mut Tests) {
    for dtype in ANY {
        t.cases(format!("copy/{dtype}/bits"), move |rng| SHAPES.map(|s| copy(rng, dtype, s)).into());
        t.cases(format!("fill/{dtype}/value"), move |_| SHAPES.map(|s| fill(dtype, s)).into());
        t.cases(format!("gather_rows/{dtype}/index"), move |rng| gathers(rng, dtype));
        t.cases(format!("scatter_rows/{dtype}/index"), move |rng| scatters(rng, dtype, false));
    }
    for dtype in FLOATS {
        t.cases(format!("scatter_rows/{dtype}/accumulate"), move |rng| scatters(rng, dtype, true));
        t.cases(format!("sum_squares/{dtype}/shapes"), move |rng| SHAPES.map(|s| sum_squares(rng, dtype, s)).into());
        for to in FLOATS {
            t.cases(format!("cast/{dtype}-{to}/rounding"), move |rng| SHAPES.map(|s| cast(rng, dtype, to, s)).into());
        }
    }
    for types in TYPES {
        let name = types.name;
        t.cases(format!("scaled_add/{name}/broadcast"), move |rng| elementwise(rng, types, scaled_add));
        t.cases(format!("mul/{name}/broadcast"), move |rng| elementwise(rng, types, mul));
        t.cases(format!("mul/{name}/accumulate"), move |rng| elementwise(rng, types, mul_accumulate));
        t.cases(format!("map/{name}/functions"), move |rng| maps(rng, types));
        t.cases(format!("row_reduce/{name}/sum"), move |rng| reductions(rng, types, Reduction::Sum));
        t.cases(format!("row_reduce/{name}/max"), move |rng| reductions(rng, types, Reduction::Max));
        t.cases(format!("perturb/{name}/exact"), move |rng| perturbations(rng, types));
    }
    t.cases("philox_words/u32/sites", words);
    t.cases("philox_words/u32/known_answers", |_| known_answers());
}

fn exact(t: &HostTensor) -> Vec<Expect> {
    t.values().into_iter().map(|v| Expect::Near(v.into())).collect()
}

fn copy(rng: &mut Rng, dtype: DType, [rows, cols]: [usize; 2]) -> Case {
    let mut src = HostTensor::random(rng, dtype, rows, cols, 3.0);
    // Any bits, NaN payloads among them.
    src.bytes.fill_with(|| rng.bits() as u8);
    Case::new(format!("[{rows}, {cols}]"), |a| Copy::new(a.t("src"), a.t("dst"))).read("src", src).write(
        "dst",
        dtype,
        rows,
        cols,
        vec![Expect::Reference; rows * cols],
    )
}

fn fill(dtype: DType, [rows, cols]: [usize; 2]) -> Case {
    let value = if dtype == DType::U32 { 77.0 } else { 0.1 };
    let expect = Expect::Near(f64::from(value).into());
    Case::new(format!("[{rows}, {cols}]"), move |a| Fill::new(a.t("dst"), value)).write("dst", dtype, rows, cols, vec![expect; rows * cols])
}

fn cast(rng: &mut Rng, from: DType, to: DType, [rows, cols]: [usize; 2]) -> Case {
    // Ties, overflow to infinity in f16, values that are subnormal in f16, signed zero.
    let special = [1.0 + 2f64.powi(-11), 1.0 + 3.0 * 2f64.powi(-11), 1.0 + 2f64.powi(-8), 70000.0, -1e30, 3e-7, 0.0, -0.0];
    let src = HostTensor::from_fn(from, rows, cols, |_, _| match rng.below(3) {
        0 => special[rng.below(special.len())],
        _ => rng.unit() * 100.0,
    });
    let expect = exact(&src);
    Case::new(format!("[{rows}, {cols}]"), |a| Cast::new(a.t("src"), a.t("dst"))).read("src", src).write("dst", to, rows, cols, expect)
}

/// The right operand of an element-wise op.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Right {
    Absent,
    Full,
    Row,
    Column,
}

impl Right {
    fn shape(self, rows: usize, cols: usize) -> [usize; 2] {
        match self {
            Self::Row => [1, cols],
            Self::Column => [rows, 1],
            _ => [rows, cols],
        }
    }
}

struct Elementwise {
    what: String,
    types: Types,
    blocks: Blocks,
    cols: usize,
    right: Right,
    a: HostTensor,
    b: HostTensor,
}

impl Elementwise {
    fn pair(&self) -> impl Fn(usize, usize) -> (f64, f64) + use<> {
        let (a, b, right) = (Mat::of(&self.a), Mat::of(&self.b), self.right);
        move |r, c| {
            let b = match right {
                Right::Absent => 0.0,
                Right::Full => b.at(r, c).v,
                Right::Row => b.at(0, c).v,
                Right::Column => b.at(r, 0).v,
            };
            (a.at(r, c).v, b)
        }
    }
}

fn elementwise(rng: &mut Rng, types: Types, make: fn(&mut Rng, Elementwise) -> Vec<Case>) -> Vec<Case> {
    let mut cases = Vec::new();
    for right in [Right::Absent, Right::Full, Right::Row, Right::Column] {
        for (rows, cols, copies, live) in [(0, 5, 1, None), (1, 1, 1, None), (3, 17, 2, Some(2)), (4, 70, 3, None), (2, 33, 1, Some(0))] {
            let blocks = Blocks { copies: Copies::value(copies, false), rows, live };
            let all = blocks.total();
            let a = blocks.poisoned(HostTensor::random(rng, types.x, all, cols, 2.0));
            let [r, c] = right.shape(all, cols);
            let mut b = HostTensor::random(rng, types.x, r, c, 2.0);
            if r == all && right != Right::Row {
                b = blocks.poisoned(b);
            }
            let what = format!("[{all}, {cols}], b {right:?}, {}", blocks.describe());
            cases.extend(make(rng, Elementwise { what, types, blocks, cols, right, a, b }));
        }
    }
    cases
}

fn scaled_add(rng: &mut Rng, e: Elementwise) -> Vec<Case> {
    let (alpha, beta, gamma) = (rng.unit() as f32, rng.unit() as f32, rng.unit() as f32);
    let pair = e.pair();
    let expect = e.blocks.expect(e.cols, |r, c| {
        let (a, b) = pair(r, c);
        // Exact: each operation is rounded to f32 separately.
        let sum = alpha * a as f32 + beta * b as f32;
        f64::from(sum + gamma).into()
    });
    let blocks = e.blocks.copies.total();
    let case = || {
        Case::new(e.what.clone(), move |a| {
            ScaledAdd::new(a.t("a"), a.t("out")).b(a.opt("b")).live(a.opt("live")).alpha(alpha).beta(beta).gamma(gamma).blocks(blocks)
        })
        .read("a", e.a.clone())
        .read("b", (e.right != Right::Absent).then(|| e.b.clone()))
        .read("live", e.blocks.live_tensor())
        .write("out", e.types.out, e.blocks.total(), e.cols, expect.clone())
    };
    let mut cases = vec![case(), case().alias("out", "a")];
    if e.right == Right::Full {
        cases.push(case().alias("out", "b"));
    }
    cases
}

fn mul(_: &mut Rng, e: Elementwise) -> Vec<Case> {
    if e.right == Right::Absent {
        return Vec::new();
    }
    let pair = e.pair();
    let expect = e.blocks.expect(e.cols, |r, c| {
        let (a, b) = pair(r, c);
        Est::from(a) * Est::from(b)
    });
    let blocks = e.blocks.copies.total();
    let case = || {
        Case::new(e.what.clone(), move |a| Mul::new(a.t("a"), a.t("b"), a.t("out")).live(a.opt("live")).blocks(blocks))
            .read("a", e.a.clone())
            .read("b", e.b.clone())
            .read("live", e.blocks.live_tensor())
            .write("out", e.types.out, e.blocks.total(), e.cols, expect.clone())
    };
    let mut cases = vec![case(), case().alias("out", "a")];
    if e.right == Right::Full {
        cases.push(case().alias("out", "b"));
    }
    cases
}

fn mul_accumulate(rng: &mut Rng, e: Elementwise) -> Vec<Case> {
    if e.right == Right::Absent {
        return Vec::new();
    }
    let out = HostTensor::random(rng, e.types.out, e.blocks.total(), e.cols, 2.0);
    let (pair, before) = (e.pair(), Mat::of(&out));
    let expect = e.blocks.expect(e.cols, |r, c| {
        let (a, b) = pair(r, c);
        before.at(r, c) + Est::from(a) * Est::from(b)
    });
    let blocks = e.blocks.copies.total();
    vec![
        Case::new(e.what, move |a| Mul::new(a.t("a"), a.t("b"), a.t("out")).live(a.opt("live")).blocks(blocks).accumulate(true))
            .read("a", e.a)
            .read("b", e.b)
            .read("live", e.blocks.live_tensor())
            .update("out", e.blocks.poisoned(out), expect),
    ]
}

fn maps(rng: &mut Rng, types: Types) -> Vec<Case> {
    use MapFunction::{Exp, Ln, Recip, Rsqrt, Sigmoid, Silu, Sqrt};
    let mut cases = Vec::new();
    for function in [Exp, Ln, Sigmoid, Silu, Rsqrt, Recip, Sqrt] {
        let signed = matches!(function, Exp | Sigmoid | Silu);
        let apply = move |y: Est| match function {
            Exp => y.exp(),
            Ln => y.ln(),
            Sigmoid => y.sigmoid(),
            Silu => y * y.sigmoid(),
            Rsqrt => y.sqrt().recip(),
            Recip => y.recip(),
            _ => y.sqrt(),
        };
        for (rows, cols, live) in [(0, 4, None), (1, 1, None), (3, 37, Some(2)), (5, 64, None)] {
            let blocks = Blocks { copies: Copies::value(2, false), rows, live };
            let (scale, shift) = (0.75f32, 0.125f32);
            let x = HostTensor::from_fn(types.x, blocks.total(), cols, |_, _| match signed {
                true => rng.unit() * 9.0,
                false => rng.unit().abs() * 9.0 + 0.01,
            });
            let m = Mat::of(&x);
            let expect = blocks.expect(cols, |r, c| apply(m.at(r, c) * Est::from(f64::from(scale)) + Est::from(f64::from(shift))));
            let case = || {
                Case::new(format!("{function:?}, [{}, {cols}], {}", blocks.total(), blocks.describe()), move |a| {
                    Map::new(a.t("x"), a.t("out"), function).live(a.opt("live")).scale(scale).shift(shift).blocks(2)
                })
                .read("x", blocks.poisoned(x.clone()))
                .read("live", blocks.live_tensor())
                .write("out", types.out, blocks.total(), cols, expect.clone())
            };
            cases.extend([case(), case().alias("out", "x")]);
        }
    }
    cases
}

fn reductions(rng: &mut Rng, types: Types, reduction: Reduction) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, cols, live) in [(0, 4, None), (2, 0, None), (1, 1, None), (3, 37, Some(2)), (4, 300, None), (2, 9, Some(0))] {
        let blocks = Blocks { copies: Copies::value(2, false), rows, live };
        let x = HostTensor::random(rng, types.x, blocks.total(), cols, 3.0);
        let m = Mat::of(&x);
        let expect = blocks.expect(1, |r, _| match reduction {
            Reduction::Max => (0..cols).map(|c| m.at(r, c).v).fold(f64::NEG_INFINITY, f64::max).into(),
            _ => Est::sum((0..cols).map(|c| m.at(r, c))),
        });
        cases.push(
            Case::new(format!("[{}, {cols}], {}", blocks.total(), blocks.describe()), move |a| {
                RowReduce::new(a.t("x"), a.t("out"), reduction).live(a.opt("live")).blocks(2)
            })
            .read("x", blocks.poisoned(x))
            .read("live", blocks.live_tensor())
            .write("out", types.out, blocks.total(), 1, expect),
        );
    }
    cases
}

fn sum_squares(rng: &mut Rng, dtype: DType, [rows, cols]: [usize; 2]) -> Case {
    let x = HostTensor::random(rng, dtype, rows, cols, 2.0);
    let sum = Est::sum(x.values().into_iter().map(|v| Est::from(v) * Est::from(v)));
    Case::new(format!("[{rows}, {cols}]"), |a| SumSquares::new(a.t("x"), a.t("out"))).read("x", x).write(
        "out",
        DType::F32,
        1,
        1,
        vec![sum.into()],
    )
}

fn gathers(rng: &mut Rng, dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, rows, cols) in [(4, 0, 3), (1, 1, 1), (3, 7, 5), (9, 20, 66), (2, 3, 0)] {
        let src = HostTensor::random(rng, dtype, n, cols, 50.0);
        let index: Vec<u32> = (0..rows).map(|i| if i % 3 == 1 { NO_INDEX } else { rng.below(n) as u32 }).collect();
        let m = Mat::of(&src);
        let row = |i: usize| (0..cols).map(move |c| (i, c));
        let expect = (0..rows)
            .flat_map(row)
            .map(|(i, c)| Expect::Near(if index[i] == NO_INDEX { Est::ZERO } else { m.at(index[i] as usize, c) }))
            .collect();
        cases.push(
            Case::new(format!("[{n}, {cols}] to {rows} rows"), |a| GatherRows::new(a.t("src"), a.t("index"), a.t("out")))
                .read("src", src)
                .read("index", HostTensor::indices(&index))
                .write("out", dtype, rows, cols, expect),
        );
    }
    cases
}

fn scatters(rng: &mut Rng, dtype: DType, accumulate: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, rows, cols) in [(4, 0, 3), (1, 1, 1), (9, 5, 5), (30, 20, 66), (4, 3, 0)] {
        let mut src = HostTensor::random(rng, dtype, rows, cols, 50.0);
        let dst = HostTensor::random(rng, dtype, n, cols, 50.0);
        let mut index = rng.distinct(rows, n);
        for i in (1..rows).step_by(3) {
            index[i] = NO_INDEX;
        }
        let (s, d) = (Mat::of(&src), Mat::of(&dst));
        let mut expect = vec![Expect::Untouched; n * cols];
        for (i, &to) in index.iter().enumerate() {
            if to == NO_INDEX {
                src.poison_row(i);
                continue;
            }
            for c in 0..cols {
                let (new, old) = (s.at(i, c).v, d.at(to as usize, c).v);
                let v = if accumulate { f64::from(old as f32 + new as f32) } else { new };
                expect[to as usize * cols + c] = Expect::Near(v.into());
            }
        }
        cases.push(
            Case::new(format!("{rows} rows to [{n}, {cols}]"), move |a| {
                ScatterRows::new(a.t("src"), a.t("index"), a.t("dst")).accumulate(accumulate)
            })
            .read("src", src)
            .read("index", HostTensor::indices(&index))
            .update("dst", dst, expect),
        );
    }
    cases
}

/// Noise parameters and a site for a matrix, some of them shards that start inside a Philox block.
pub(super) fn noise_at(rng: &mut Rng, cols: usize, tensor: u32) -> (NoiseParams, Site) {
    let direction = Direction::new(Domain::Main, rng.below(9) as u32, rng.below(99) as u32).expect("small numbers");
    let params = NoiseParams::new(rng.bits(), rng.below(1000) as u32, direction, 0.037);
    let tensor = TensorId::from_word(tensor).expect("a projection that exists");
    let mut site = Site::new(tensor, cols as u32);
    if rng.below(2) == 0 {
        let (row0, col0) = (rng.below(7) as u32, rng.below(7) as u32);
        site.ld += col0 + rng.below(5) as u32;
        site = site.at(row0, col0);
    }
    if rng.below(3) == 0 {
        site = site.with(Distribution::Rademacher);
    }
    (params, site)
}

/// The operand that holds noise parameters.
pub(super) fn noise_tensor(params: &NoiseParams) -> HostTensor {
    HostTensor { dtype: DType::U32, rows: 1, cols: NoiseParams::WORDS, bytes: bytemuck::bytes_of(params).to_vec() }
}

/// z of copy `copy`, by the slow scalar path.
pub(super) fn z(params: &NoiseParams, copy: u32, site: Site, r: usize, c: usize) -> f32 {
    params.noise(copy, site, Tier::SCALAR).normal(r as u32, c as u32)
}

fn perturbations(rng: &mut Rng, types: Types) -> Vec<Case> {
    let mut cases = Vec::new();
    for [rows, cols] in SHAPES {
        let (params, site) = noise_at(rng, cols, 0x35);
        let copy = rng.below(5) as u32;
        let a = HostTensor::random(rng, types.x, rows, cols, 1.0);
        let m = Mat::of(&a);
        let expect = |with_a: bool| -> Vec<Expect> {
            let elements = (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c)));
            elements
                .map(|(r, c)| {
                    let z = z(&params, copy, site, r, c);
                    let v = if with_a { m.at(r, c).v as f32 + params.epsilon * z } else { z };
                    Expect::Near(f64::from(v).into())
                })
                .collect()
        };
        let case = |with_a: bool| {
            Case::new(format!("[{rows}, {cols}], {site:?}, a {with_a}"), move |a| {
                Perturb::new(a.t("noise"), a.t("out"), site).a(a.opt("a")).copy(copy)
            })
            .read("noise", noise_tensor(&params))
            .read("a", with_a.then(|| a.clone()))
            .write("out", types.out, rows, cols, expect(with_a))
        };
        cases.extend([case(true), case(false), case(true).alias("out", "a")]);
    }
    cases
}

fn word_case(params: NoiseParams, site: Site, copy: u32, rows: usize, cols: usize) -> Case {
    let mut expect = Vec::new();
    for r in 0..rows as u32 {
        for c in 0..cols as u32 {
            let element = site.element(r, c);
            let counter = [element / 4, site.tensor.word(), params.direction + copy, params.step];
            let word = philox4x32_10(counter, [params.seed_lo, params.seed_hi])[element as usize % 4];
            expect.push(Expect::Near(f64::from(word).into()));
        }
    }
    Case::new(format!("[{rows}, {cols}], {site:?}"), move |a| PhiloxWords::new(a.t("noise"), a.t("out"), site).copy(copy))
        .read("noise", noise_tensor(&params))
        .write("out", DType::U32, rows, cols, expect)
}

fn words(rng: &mut Rng) -> Vec<Case> {
    let mut case = |[rows, cols]: [usize; 2]| {
        let (params, site) = noise_at(rng, cols, 0x7b);
        word_case(params, site, rng.below(4) as u32, rows, cols)
    };
    SHAPES.map(&mut case).into()
}

/// The known answers of Random123 that an address of this contract can reach, run on the device.
fn known_answers() -> Vec<Case> {
    let known = [
        ([0u32; 4], [0u32; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8u32]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];
    let case = |(counter, key, words): ([u32; 4], [u32; 2], [u32; 4])| {
        let [block, tensor, direction, step] = counter;
        let params = NoiseParams { seed_lo: key[0], seed_hi: key[1], step, direction, ..NoiseParams::default() };
        let tensor = TensorId::from_word(tensor).expect("a projection that exists");
        let first = block * 4;
        let site = Site::new(tensor, first.max(4)).at(u32::from(first > 0), 0);
        let mut case = word_case(params, site, 0, 1, 4);
        let expect = words.map(|w| Expect::Near(f64::from(w).into()));
        case.operands[1].role = crate::case::Role::Output(expect.into());
        case
    };
    known.map(case).into()
}
