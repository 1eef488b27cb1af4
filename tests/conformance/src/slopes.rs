//! Derivatives against differences, on the device itself: independent of the reference device and of the kit's formulas.
//!
//! A central difference `D_h = (f(x + h v) - f(x - h v)) / 2h` errs by a truncation of order h^2, of which `|D_2h - D_h|` is three times
//! the leading term, and by the rounding of f over h. The room is the sum of both: `|D_2h - D_h| + n U |f| / h` with n the length of the
//! longest sum in f. Data lie on a coarse binary grid, so that `x + h v` is exact in f32.

use crate::{
    case::{Args, Case, Expect},
    check::{Bench, Layout, Outcome, ensure, execute, output},
    estimate::U,
    host::HostTensor,
    rng::Rng,
    suite::Tests,
};
use std::sync::Arc;
use zofo_hal::{
    DType, Op, TensorArg, Uses,
    op::{
        Attention, AttentionBackward, AttentionShape, Copies, CrossEntropy, CrossEntropyBackward, LoraMatMul, LoraMatMulBackward,
        PerturbLoraMatMul, RmsNorm, RmsNormBackward, SwiGlu, SwiGluBackward,
    },
    perturb::{Direction, Domain, Factor, NoiseParams, Projection, Site, TensorId},
};

/// The step: a power of two, so that its products are exact.
const H: f64 = 1.0 / 64.0;

pub(super) fn tests(t: &mut Tests) {
    t.add("slope/rms_norm/tangent", |b| tangent(b, &rms_norm()));
    t.add("slope/swiglu/tangent", |b| tangent(b, &swiglu()));
    t.add("slope/attention/tangent", |b| tangent(b, &attention()));
    t.add("slope/cross_entropy/tangent", |b| tangent(b, &cross_entropy()));
    t.add("slope/perturb_lora_matmul/tangent", perturbed);
    t.add("slope/rms_norm_backward/differences", |b| backward(b, &rms_norm()));
    t.add("slope/swiglu_backward/differences", |b| backward(b, &swiglu()));
    t.add("slope/attention_backward/differences", |b| backward(b, &attention()));
    t.add("slope/cross_entropy_backward/differences", |b| backward(b, &cross_entropy()));
    t.add("slope/lora_matmul_backward/differences", |b| backward(b, &lora()));
}

type Build = Arc<dyn Fn(&Args, Copies) -> Op<TensorArg> + Send + Sync>;
type BuildBackward = Arc<dyn Fn(&Args) -> Op<TensorArg> + Send + Sync>;

/// A differentiable op: which operands vary, which do not, and the backward op that belongs to it.
struct Function {
    varying: Vec<(&'static str, HostTensor)>,
    fixed: Vec<(&'static str, HostTensor)>,
    weight: Option<(&'static str, HostTensor)>,
    /// Rows and columns of the base block.
    out: (&'static str, [usize; 2]),
    /// What the forward op saves for the backward op, besides its output: name and shape.
    saved: Option<(&'static str, [usize; 2])>,
    /// Length of the longest sum.
    terms: usize,
    forward: Build,
    /// The gradients, in the order of `varying`, and the op; its output gradient is called `dout`, the saved output `out`.
    gradients: Vec<&'static str>,
    backward: BuildBackward,
}

/// Values on a grid of 1/256 in [-scale, scale].
fn grid(rng: &mut Rng, rows: usize, cols: usize, scale: f64) -> HostTensor {
    HostTensor::from_fn(DType::F32, rows, cols, |_, _| (rng.unit() * scale * 256.0).round() / 256.0)
}

fn moved(x: &HostTensor, v: &HostTensor, h: f64) -> HostTensor {
    let sums: Vec<f64> = x.values().iter().zip(v.values()).map(|(x, v)| x + h * v).collect();
    HostTensor::from_fn(DType::F32, x.rows, x.cols, |r, c| sums[r * x.cols + c])
}

fn stacked(a: &HostTensor, b: &HostTensor) -> HostTensor {
    HostTensor { rows: a.rows + b.rows, bytes: [&a.bytes[..], &b.bytes].concat(), ..a.clone() }
}

impl Function {
    fn case(&self, varying: Vec<HostTensor>, copies: Copies) -> Case {
        let build = Arc::clone(&self.forward);
        let mut case = Case::new("forward", move |a| build(a, copies));
        for ((name, _), t) in self.varying.iter().zip(varying) {
            case = case.read(name, t);
        }
        for (name, t) in &self.fixed {
            case = case.read(name, t.clone());
        }
        if let Some((name, w)) = &self.weight {
            case = case.weight(name, w.clone(), Uses::TRAINING);
        }
        let (name, [rows, cols]) = self.out;
        let rows = rows * copies.total();
        case.write(name, DType::F32, rows, cols, vec![Expect::Any; rows * cols])
    }

    fn value(&self, b: &Bench, directions: &[HostTensor], h: f64) -> Outcome<Option<Vec<f64>>> {
        let at = self.varying.iter().zip(directions).map(|((_, x), v)| moved(x, v, h)).collect();
        let outputs = execute(&*b.queue, &self.case(at, Copies::BASE), Layout::Apart)?;
        Ok(outputs.map(|o| output(&o, self.out.0).values()))
    }

    fn differences(&self, b: &Bench, directions: &[HostTensor], h: f64) -> Outcome<Option<(Vec<f64>, Vec<f64>)>> {
        let (Some(up), Some(down)) = (self.value(b, directions, h)?, self.value(b, directions, -h)?) else { return Ok(None) };
        let size = up.iter().zip(&down).map(|(u, d)| u.abs().max(d.abs())).collect();
        Ok(Some((up.iter().zip(&down).map(|(u, d)| (u - d) / (2.0 * h)).collect(), size)))
    }

    fn directions(&self) -> Vec<HostTensor> {
        let rng = &mut Rng::new(3);
        self.varying.iter().map(|(_, x)| grid(rng, x.rows, x.cols, 1.0)).collect()
    }

    /// Relative rounding of a value of f.
    fn rounding(&self) -> f64 {
        (self.terms + 16) as f64 * U
    }
}

fn tangent(b: &Bench, f: &Function) -> Outcome {
    let v = f.directions();
    let both = f.varying.iter().zip(&v).map(|((_, x), v)| stacked(x, v)).collect();
    let Some(got) = execute(&*b.queue, &f.case(both, Copies::tangent(1)), Layout::Apart)? else { return Ok(()) };
    let got = output(&got, f.out.0).values();
    let (Some((d, size)), Some((coarse, _))) = (f.differences(b, &v, H)?, f.differences(b, &v, 2.0 * H)?) else { return Ok(()) };
    let n = d.len();
    let largest = size.iter().fold(1.0, |a: f64, &s| a.max(s));
    for i in 0..n {
        let room = (coarse[i] - d[i]).abs() + f.rounding() * largest / H;
        let (tangent, slope) = (got[n + i], d[i]);
        ensure!((tangent - slope).abs() <= room, "element {i} of the tangent is {tangent}, differences give {slope} within {room:e}");
    }
    Ok(())
}

fn backward(b: &Bench, f: &Function) -> Outcome {
    let v = f.directions();
    let at: Vec<HostTensor> = f.varying.iter().map(|(_, x)| x.clone()).collect();
    let mut forward = f.case(at, Copies::BASE);
    if let Some((name, [rows, cols])) = f.saved {
        forward = forward.write(name, DType::F32, rows, cols, vec![Expect::Any; rows * cols]);
    }
    let Some(kept) = execute(&*b.queue, &forward, Layout::Apart)? else { return Ok(()) };
    let (name, [rows, cols]) = f.out;
    let dout = match name {
        // The backward op of a sum of losses has no gradient of its own to start from.
        "losses" => HostTensor::from_fn(DType::F32, rows, cols, |_, _| 1.0),
        _ => grid(&mut Rng::new(4), rows, cols, 1.0),
    };
    let build = Arc::clone(&f.backward);
    let mut case = Case::new("backward", move |a| build(a));
    for (name, x) in f.varying.iter().chain(&f.fixed) {
        case = case.read(name, x.clone());
    }
    if let Some((name, w)) = &f.weight {
        case = case.weight(name, w.clone(), Uses::TRAINING);
    }
    case = case.read("dout", dout.clone());
    for (name, t) in &kept {
        case = case.read(name, t.clone());
    }
    for (name, (_, x)) in f.gradients.iter().zip(&f.varying) {
        let zero = HostTensor::from_fn(DType::F32, x.rows, x.cols, |_, _| 0.0);
        case = case.update(name, zero, vec![Expect::Any; x.rows * x.cols]);
    }
    let Some(gradients) = execute(&*b.queue, &case, Layout::Apart)? else { return Ok(()) };
    let (Some((d, size)), Some((coarse, _))) = (f.differences(b, &v, H)?, f.differences(b, &v, 2.0 * H)?) else { return Ok(()) };
    let dout = dout.values();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let sizes = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum::<f64>();
    let (slope, rough) = (dot(&dout, &d), dot(&dout, &coarse));
    let (mut got, mut of_gradient) = (0.0, 0.0);
    for (name, v) in f.gradients.iter().zip(&v) {
        let g = output(&gradients, name).values();
        got += dot(&g, &v.values());
        of_gradient += sizes(&g, &v.values());
    }
    let room = (rough - slope).abs() + f.rounding() * (sizes(&dout, &size) / H + of_gradient);
    ensure!((got - slope).abs() <= room, "the gradient along a direction is {got}, differences give {slope} within {room:e}");
    ensure!(slope.abs() > room, "a slope of {slope} tells nothing within {room:e}: choose other data");
    Ok(())
}

fn rms_norm() -> Function {
    let rng = &mut Rng::new(21);
    let (t, d) = (5, 24);
    Function {
        varying: vec![("x", grid(rng, t, d, 2.0))],
        fixed: vec![("gamma", grid(rng, 1, d, 1.5))],
        weight: None,
        out: ("y", [t, d]),
        saved: None,
        terms: d,
        forward: Arc::new(|a, copies| RmsNorm::new(a.t("x"), a.t("gamma"), a.t("y"), 1e-5).copies(copies).into()),
        gradients: vec!["dx"],
        backward: Arc::new(|a| RmsNormBackward::new(a.t("x"), a.t("gamma"), a.t("dout"), a.t("dx"), 1e-5).into()),
    }
}

fn swiglu() -> Function {
    let rng = &mut Rng::new(22);
    let (t, f) = (5, 24);
    Function {
        varying: vec![("gate", grid(rng, t, f, 3.0)), ("up", grid(rng, t, f, 3.0))],
        fixed: vec![],
        weight: None,
        out: ("y", [t, f]),
        saved: None,
        terms: 1,
        forward: Arc::new(|a, copies| SwiGlu::new(a.t("gate"), a.t("up"), a.t("y")).copies(copies).into()),
        gradients: vec!["dgate", "dup"],
        backward: Arc::new(|a| SwiGluBackward::new(a.t("gate"), a.t("up"), a.t("dout"), a.t("dgate"), a.t("dup")).into()),
    }
}

fn attention() -> Function {
    let rng = &mut Rng::new(23);
    let (t, d) = (7, 6);
    let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim: d, scale: 0.4, causal: true };
    Function {
        varying: vec![("q", grid(rng, t, 4 * d, 1.0)), ("k", grid(rng, t, 2 * d, 1.0)), ("v", grid(rng, t, 2 * d, 1.0))],
        fixed: vec![("cu_q", HostTensor::indices(&[0, 3, 7])), ("cu_kv", HostTensor::indices(&[0, 3, 7]))],
        weight: None,
        out: ("out", [t, 4 * d]),
        saved: Some(("lse", [t, 4])),
        terms: d + t,
        forward: Arc::new(move |a, copies| {
            Attention::new(a.t("q"), a.t("k"), a.t("v"), a.t("cu_q"), a.t("cu_kv"), a.t("out"), shape)
                .lse(a.opt("lse"))
                .copies(copies)
                .into()
        }),
        gradients: vec!["dq", "dk", "dv"],
        backward: Arc::new(move |a| {
            let [q, k, v, out, lse, dout] = ["q", "k", "v", "out", "lse", "dout"].map(|n| a.t(n));
            AttentionBackward::new(q, k, v, out, lse, dout, a.t("cu_q"), a.t("cu_kv"), a.t("dq"), a.t("dk"), a.t("dv"), shape).into()
        }),
    }
}

fn cross_entropy() -> Function {
    let rng = &mut Rng::new(24);
    let (t, d, vocabulary) = (6, 16, 40);
    Function {
        varying: vec![("h", grid(rng, t, d, 1.0))],
        fixed: vec![
            ("rows", HostTensor::indices(&[4, 0, 3])),
            ("targets", HostTensor::indices(&[11, 39, 0])),
            ("scale", HostTensor::f32s(&[1.0])),
        ],
        weight: Some(("head", grid(rng, vocabulary, d, 1.0))),
        out: ("losses", [1, 3]),
        saved: Some(("slope", [3, d])),
        terms: d + vocabulary,
        forward: Arc::new(|a, copies| {
            CrossEntropy::new(a.t("h"), a.t("rows"), a.t("targets"), a.m("head"), a.t("losses")).slope(a.opt("slope")).copies(copies).into()
        }),
        gradients: vec!["dh"],
        backward: Arc::new(|a| CrossEntropyBackward::new(a.t("slope"), a.t("rows"), a.t("scale"), a.t("dh")).into()),
    }
}

fn lora() -> Function {
    let rng = &mut Rng::new(25);
    let (t, k, r, n) = (6, 20, 3, 9);
    Function {
        varying: vec![("x", grid(rng, t, k, 1.0)), ("a", grid(rng, r, k, 1.0)), ("b", grid(rng, n, r, 1.0))],
        fixed: vec![],
        weight: Some(("w", grid(rng, n, k, 1.0))),
        out: ("y", [t, n]),
        saved: Some(("xa", [t, r])),
        terms: k + r,
        forward: Arc::new(|a, copies| {
            LoraMatMul::new(a.t("x"), a.t("a"), a.t("b"), a.m("w"), a.t("y"), 0.5).xa(a.opt("xa")).copies(copies).into()
        }),
        gradients: vec!["dx", "da", "db"],
        backward: Arc::new(|a| {
            let [x, xa, aa, b, dout] = ["x", "xa", "a", "b", "dout"].map(|n| a.t(n));
            LoraMatMulBackward::new(x, xa, aa, b, dout, a.m("w"), a.t("da"), a.t("db"), 0.5).dx(a.opt("dx")).into()
        }),
    }
}

/// The tangent of a perturbed linear layer is the slope of its own value form in eps, from which the input moves along as well.
fn perturbed(b: &Bench) -> Outcome {
    let rng = &mut Rng::new(26);
    let (t, k, r, n) = (4, 20, 3, 9);
    let (x, v) = (grid(rng, t, k, 1.0), grid(rng, t, k, 1.0));
    let (a, bb, w) = (grid(rng, r, k, 1.0), grid(rng, n, r, 1.0), grid(rng, n, k, 1.0));
    let site = |factor, ld| Site::new(TensorId::new(2, Projection::Up, factor).expect("a small layer"), ld as u32);
    let (site_a, site_b) = (site(Factor::A, k), site(Factor::B, r));
    let run = |input: HostTensor, copies: Copies, eps: f64| -> Outcome<Option<Vec<f64>>> {
        let noise = NoiseParams::new(5, 6, Direction::new(Domain::Main, 0, 4)?, eps as f32);
        let rows = copies.total() * t;
        let case = Case::new("perturb_lora_matmul", move |v| {
            PerturbLoraMatMul::new(v.t("x"), v.t("a"), v.t("b"), v.t("noise"), v.m("w"), v.t("out"), 0.5, copies)
                .site_a(Some(site_a))
                .site_b(Some(site_b))
        })
        .read("x", input)
        .read("a", a.clone())
        .read("b", bb.clone())
        .read("noise", HostTensor::indices(bytemuck::cast_slice(bytemuck::bytes_of(&noise))))
        .weight("w", w.clone(), Uses::FORWARD)
        .write("out", DType::F32, rows, n, vec![Expect::Any; rows * n]);
        Ok(execute(&*b.queue, &case, Layout::Apart)?.map(|o| output(&o, "out").values()))
    };
    let Some(got) = run(stacked(&x, &v), Copies::tangent(1), 0.0)? else { return Ok(()) };
    let mut slopes = Vec::new();
    let mut largest = 1.0f64;
    for h in [H, 2.0 * H] {
        let one = Copies::value(1, false);
        let (Some(up), Some(down)) = (run(moved(&x, &v, h), one, h)?, run(moved(&x, &v, -h), one, -h)?) else { return Ok(()) };
        largest = up.iter().chain(&down).fold(largest, |l, y| l.max(y.abs()));
        slopes.push(up.iter().zip(&down).map(|(u, d)| (u - d) / (2.0 * h)).collect::<Vec<_>>());
    }
    for i in 0..t * n {
        let room = (slopes[1][i] - slopes[0][i]).abs() + (k + r + 16) as f64 * U * largest / H;
        let (tangent, slope) = (got[t * n + i], slopes[0][i]);
        ensure!((tangent - slope).abs() <= room, "element {i} of the tangent is {tangent}, differences give {slope} within {room:e}");
    }
    Ok(())
}
