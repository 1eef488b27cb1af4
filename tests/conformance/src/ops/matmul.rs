use super::primitive::{noise_at, noise_tensor, z};
use crate::{
    case::Case,
    estimate::Est,
    host::HostTensor,
    model::{Blocks, Mat, TYPES, Types, WEIGHTS, dot, forms},
    rng::Rng,
    suite::Tests,
};
use zofo_hal::{
    DType, Uses,
    op::{Copies, Form, LoraMatMul, MatMul, Orientation, PerturbLoraMatMul},
};

/// `[m, k, n]`: empty, single, ragged, and one large enough for every level of a blocked kernel.
const SHAPES: [[usize; 3]; 9] =
    [[0, 3, 4], [3, 0, 4], [3, 4, 0], [1, 1, 1], [1, 40, 9], [2, 5, 3], [7, 33, 17], [16, 64, 48], [67, 131, 70]];

pub(super) fn tests(t: &mut Tests) {
    for types in TYPES {
        let name = types.name;
        for (o, label) in [(Orientation::Nt, "nt"), (Orientation::Nn, "nn"), (Orientation::Tn, "tn")] {
            t.cases(format!("matmul/{name}/{label}"), move |rng| {
                SHAPES.iter().map(|&s| matmul(rng, Product::plain(types, None, o, Blocks::one(s[0])), s)).collect()
            });
            t.cases(format!("matmul/{name}/{label}_options"), move |rng| options(rng, types, o));
        }
        t.cases(format!("lora_matmul/{name}/forms"), move |rng| lora_forms(rng, types));
        t.cases(format!("perturb_lora_matmul/{name}/forms"), move |rng| perturb_forms(rng, types, false));
        t.cases(format!("perturb_lora_matmul/{name}/shared_input"), move |rng| perturb_forms(rng, types, true));
    }
    for types in &TYPES[..3] {
        for w in WEIGHTS {
            let name = format!("{}x{w}", types.name);
            for (o, label) in [(Orientation::Nt, "nt"), (Orientation::Nn, "nn")] {
                t.cases(format!("matmul/{name}/{label}"), move |rng| {
                    let shapes = weight_shapes(types.x, w, o);
                    shapes.into_iter().map(|s| matmul(rng, Product::plain(*types, Some(w), o, Blocks::one(s[0])), s)).collect()
                });
            }
            t.cases(format!("lora_matmul/{name}/weight"), move |rng| {
                [[1, 3], [5, 37]].map(|[rows, n]| lora(rng, *types, w, Blocks::one(rows), [2 * wide(w), 4, n])).into()
            });
            t.cases(format!("perturb_lora_matmul/{name}/weight"), move |rng| {
                let k = wide(w);
                let sizes = [k, 4, 21];
                let blocks = |copies| Blocks { copies, rows: 3, live: None };
                vec![
                    perturb(rng, *types, w, blocks(Copies::value(2, true)), sizes, false, [true; 2]),
                    perturb(rng, *types, w, blocks(Copies::tangent(2)), sizes, false, [true; 2]),
                ]
            });
        }
    }
}

/// A few vectors of columns in whole blocks.
fn wide(w: DType) -> usize {
    40usize.next_multiple_of(w.block().0)
}

/// Shapes whose weight rows are whole blocks. The large one is for f32 alone: other activations are converted on the way to the same kernels.
fn weight_shapes(x: DType, w: DType, o: Orientation) -> Vec<[usize; 3]> {
    let block = w.block().0;
    let whole = |n: usize| n.next_multiple_of(block);
    let small = SHAPES.iter().filter(|[m, ..]| *m < 10);
    let large = if x == DType::F32 { [35, 131, 41] } else { [9, 70, 21] };
    let shape = |[m, k, n]: [usize; 3]| match o {
        Orientation::Nt => [m, whole(k), n],
        _ => [m, k, whole(n)],
    };
    small.copied().chain([large, [5, 2 * block, 2 * block]]).map(shape).collect()
}

struct Product {
    types: Types,
    weight: Option<DType>,
    orientation: Orientation,
    blocks: Blocks,
    bias: bool,
    alpha: f32,
    beta: f32,
}

impl Product {
    fn plain(types: Types, weight: Option<DType>, orientation: Orientation, blocks: Blocks) -> Self {
        Self { types, weight, orientation, blocks, bias: false, alpha: 1.0, beta: 0.0 }
    }
}

fn options(rng: &mut Rng, types: Types, o: Orientation) -> Vec<Case> {
    let mut cases = Vec::new();
    for blocks in forms(4) {
        for (bias, alpha, beta) in [(true, 1.0, 0.0), (false, 0.5, 1.0), (true, -1.25, 0.75)] {
            let p = Product { types, weight: None, orientation: o, blocks, bias, alpha, beta };
            cases.push(matmul(rng, p, [blocks.total(), 19, 6]));
        }
    }
    cases
}

/// `out[i, j] = sum over k of a b`. For `Tn` the blocks divide k, for the others m.
fn matmul(rng: &mut Rng, p: Product, [m, k, n]: [usize; 3]) -> Case {
    let tn = p.orientation == Orientation::Tn;
    // For `Tn` the packed rows are the first dimension of both operands.
    let (m, k) = if tn { (k, m) } else { (m, k) };
    let [ar, ac] = if tn { [k, m] } else { [m, k] };
    let [br, bc] = if p.orientation == Orientation::Nt { [n, k] } else { [k, n] };
    let a = HostTensor::random(rng, p.types.x, ar, ac, 1.0);
    let b = HostTensor::random(rng, p.weight.unwrap_or(p.types.x), br, bc, 1.0);
    let bias = p.bias.then(|| HostTensor::random(rng, p.types.x, 1, n, 1.0));
    let before = (p.beta != 0.0).then(|| HostTensor::random(rng, p.types.out, m, n, 1.0));
    let (am, bm) = (Mat::of(&a), Mat::met_by(&b, p.types.x));
    let (biases, old) = (bias.as_ref().map(Mat::of), before.as_ref().map(Mat::of));
    let blocks = p.blocks;
    let rounded = if p.orientation == Orientation::Nt { am.clone().in_8_bits(b.dtype) } else { am.clone() };
    let element = |am: &Mat, r: usize, c: usize| {
        let terms = if tn { (0..k).filter(|&i| blocks.is_live(i)).collect() } else { (0..k).collect::<Vec<_>>() };
        let product = dot(
            terms.len(),
            |i| if tn { am.at(terms[i], r) } else { am.at(r, terms[i]) },
            |i| if p.orientation == Orientation::Nt { bm.part(c, terms[i]) } else { bm.part(terms[i], c) },
        );
        let mut sum = dot(0, |_| Est::ZERO, |_| (Est::ZERO, 0.0));
        sum.add_scaled(product, p.alpha.into());
        if let Some(old) = &old {
            sum.add(old.at(r, c) * Est::from(f64::from(p.beta)));
        }
        if let Some(bias) = &biases
            && (tn || !blocks.is_tangent(r))
        {
            sum.add(bias.at(0, c));
        }
        sum.done()
    };
    let expect = if tn { Blocks::one(m) } else { blocks }.expect_product(n, [&am, &rounded], element);
    let (alpha, beta, copies, o) = (p.alpha, p.beta, p.blocks.copies, p.orientation);
    let case = Case::new(format!("m {m}, k {k}, n {n}, {}, bias {}, alpha {alpha}, beta {beta}", blocks.describe(), p.bias), move |x| {
        MatMul::new(x.t("a"), x.m("b"), x.t("out"), o).bias(x.opt("bias")).live(x.opt("live")).alpha(alpha).beta(beta).copies(copies)
    })
    .read("a", blocks.poisoned(a))
    .read("bias", bias)
    .read("live", blocks.live_tensor());
    let case = match p.weight {
        Some(_) => case.weight("b", b, Uses::TRAINING),
        None if tn => case.read("b", blocks.poisoned(b)),
        None => case.read("b", b),
    };
    match before {
        Some(t) if tn => case.update("out", t, expect),
        Some(t) => case.update("out", blocks.poisoned(t), expect),
        None => case.write("out", p.types.out, m, n, expect),
    }
}

/// `[k, r, n]` for the forms: ranks 0 and 1 among them.
const LORA: [[usize; 3]; 3] = [[37, 4, 18], [20, 1, 5], [9, 0, 7]];

fn lora_forms(rng: &mut Rng, types: Types) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for blocks in forms(3) {
        cases.extend(LORA.map(|s| lora(rng, types, types.x, blocks, s)));
    }
    cases.push(lora(rng, types, types.x, Blocks::one(0), [8, 2, 3]));
    cases.push(lora(rng, types, types.x, Blocks::one(33), [130, 8, 65]));
    cases
}

struct Layer {
    x: HostTensor,
    w: HostTensor,
    a: HostTensor,
    b: HostTensor,
    bias: HostTensor,
    scale: f32,
}

impl Layer {
    fn random(rng: &mut Rng, types: Types, weight: DType, rows: usize, [k, r, n]: [usize; 3]) -> Self {
        Self {
            x: HostTensor::random(rng, types.x, rows, k, 1.0),
            w: HostTensor::random(rng, weight, n, k, 0.5),
            a: HostTensor::random(rng, types.x, r, k, 0.5),
            b: HostTensor::random(rng, types.x, n, r, 0.5),
            bias: HostTensor::random(rng, types.x, 1, n, 1.0),
            scale: 1.75,
        }
    }
}

fn lora(rng: &mut Rng, types: Types, weight: DType, blocks: Blocks, sizes: [usize; 3]) -> Case {
    let [k, r, n] = sizes;
    let l = Layer::random(rng, types, weight, blocks.total(), sizes);
    let ([x, a, b, bias], w) = ([&l.x, &l.a, &l.b, &l.bias].map(Mat::of), Mat::met_by(&l.w, l.x.dtype));
    let xa = Mat::of(&HostTensor::random(rng, DType::F32, blocks.total(), r, 0.0))
        .map(|row, j, _| if blocks.is_live(row) { dot(k, |i| x.at(row, i), |i| a.part(j, i)).done() } else { Est::ZERO });
    let out = blocks.expect_product(n, [&x, &x.clone().in_8_bits(weight)], |met, row, c| {
        let mut sum = dot(k, |i| met.at(row, i), |i| w.part(c, i));
        sum.add_scaled(dot(r, |j| xa.at(row, j), |j| b.part(c, j)), l.scale.into());
        if !blocks.is_tangent(row) {
            sum.add(bias.at(0, c));
        }
        sum.done()
    });
    let saved = blocks.expect(r, |row, j| xa.at(row, j));
    let (scale, copies) = (l.scale, blocks.copies);
    Case::new(format!("in {k}, rank {r}, out {n}, {}", blocks.describe()), move |x| {
        LoraMatMul::new(x.t("x"), x.t("a"), x.t("b"), x.m("w"), x.t("out"), scale)
            .bias(x.opt("bias"))
            .live(x.opt("live"))
            .xa(x.opt("xa"))
            .copies(copies)
    })
    .read("x", blocks.poisoned(l.x))
    .read("a", l.a)
    .read("b", l.b)
    .read("bias", l.bias)
    .read("live", blocks.live_tensor())
    .weight("w", l.w, Uses::FORWARD)
    .write("out", types.out, blocks.total(), n, out)
    .write("xa", types.out, blocks.total(), r, saved)
}

fn perturb_forms(rng: &mut Rng, types: Types, shared: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, blocks) in forms(3).into_iter().enumerate() {
        // Copies in tangent form, or a base alone, are tried with each factor perturbed and not.
        let sites = [[true, true], [false, true], [true, false]];
        cases.push(perturb(rng, types, types.x, blocks, LORA[0], shared, [true; 2]));
        cases.push(perturb(rng, types, types.x, blocks, LORA[i % 3], shared, sites[i % 3]));
    }
    cases.push(perturb(rng, types, types.x, Blocks { copies: Copies::value(2, true), rows: 0, live: None }, [8, 2, 3], shared, [true; 2]));
    cases.push(perturb(rng, types, types.x, Blocks { copies: Copies::tangent(3), rows: 9, live: None }, [70, 8, 33], shared, [true; 2]));
    cases
}

fn perturb(rng: &mut Rng, types: Types, weight: DType, blocks: Blocks, sizes: [usize; 3], shared: bool, sites: [bool; 2]) -> Case {
    let [k, r, n] = sizes;
    let rows = if shared { blocks.rows } else { blocks.total() };
    let l = Layer::random(rng, types, weight, rows, sizes);
    let ((params, site_a), (_, site_b)) = (noise_at(rng, k, 0x26), noise_at(rng, r, 0x27));
    let (site_a, site_b) = (sites[0].then_some(site_a), sites[1].then_some(site_b));
    let ([x, a, b, bias], w) = ([&l.x, &l.a, &l.b, &l.bias].map(Mat::of), Mat::met_by(&l.w, l.x.dtype));
    let copies = blocks.copies;
    let tangent = copies.form == Form::Tangent;
    // The numbers of each copy: z itself in tangent form, the perturbed factor in value form; each rounded at most once to the type in
    // which the device multiplies, which is not narrower than that of x.
    let factors: Vec<[Mat; 2]> = (0..copies.count)
        .map(|c| {
            [(&a, site_a), (&b, site_b)].map(|(m, site)| {
                m.clone().map(|row, col, v| {
                    let z = site.map_or(0.0, |site| z(&params, c, site, row, col));
                    let exact = if tangent { z } else { v.v as f32 + params.epsilon * z };
                    Est::from(f64::from(exact)).in_type(types.x)
                })
            })
        })
        .collect();
    let source = |row: usize| if shared { blocks.base(row) } else { row };
    let at = |row: usize, i: usize| x.at(source(row), i);
    let out = blocks.expect_product(n, [&x, &x.clone().in_8_bits(weight)], |met, row, c| {
        let block = row / blocks.rows;
        let base = blocks.base(row);
        // (x p^T) q^T of some row of x and some factors; the inner product may be rounded to the type of x before it is multiplied again.
        let low_rank = |row: usize, p: &Mat, q: &Mat, narrow: bool| {
            let inner = |j| {
                let xa = dot(k, |i| at(row, i), |i| p.part(j, i)).done();
                if narrow { xa.in_type(types.x) } else { xa }
            };
            dot(r, inner, |j| q.part(c, j))
        };
        let mut sum = dot(if tangent && shared && block > 0 { 0 } else { k }, |i| met.at(source(row), i), |i| w.part(c, i));
        if block < copies.first_copy() {
            sum.add_scaled(low_rank(row, &a, &b, false), l.scale.into());
        } else {
            let [p, q] = &factors[block - copies.first_copy()];
            if tangent {
                if !shared {
                    sum.add_scaled(low_rank(row, &a, &b, true), l.scale.into());
                }
                sum.add_scaled(low_rank(base, p, &b, true), l.scale.into());
                sum.add_scaled(low_rank(base, &a, q, true), l.scale.into());
            } else {
                sum.add_scaled(low_rank(row, p, q, true), l.scale.into());
            }
        }
        if !blocks.is_tangent(row) {
            sum.add(bias.at(0, c));
        }
        sum.done()
    });
    let one = Blocks { copies: Copies::BASE, ..blocks };
    let saved = copies.has_base.then(|| one.expect(r, |row, j| dot(k, |i| at(row, i), |i| a.part(j, i)).done()));
    let scale = l.scale;
    let what = format!("in {k}, rank {r}, out {n}, {}, sites {sites:?}, {:?}", blocks.describe(), site_a.map(|s| s.distribution));
    let case = Case::new(what, move |x| {
        PerturbLoraMatMul::new(x.t("x"), x.t("a"), x.t("b"), x.t("noise"), x.m("w"), x.t("out"), scale, copies)
            .bias(x.opt("bias"))
            .live(x.opt("live"))
            .xa(x.opt("xa"))
            .site_a(site_a)
            .site_b(site_b)
            .shared_input(shared)
    })
    .read("x", if shared { one.poisoned(l.x) } else { blocks.poisoned(l.x) })
    .read("a", l.a)
    .read("b", l.b)
    .read("noise", noise_tensor(&params))
    .read("bias", l.bias)
    .read("live", blocks.live_tensor())
    .weight("w", l.w, Uses::FORWARD)
    .write("out", types.out, blocks.total(), n, out);
    match saved {
        Some(saved) => case.write("xa", types.out, blocks.rows, r, saved),
        None => case,
    }
}
