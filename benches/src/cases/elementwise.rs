//! Row-wise ops of a training batch, which live on memory, the fused head, and the updates.

use crate::{Arithmetic, Case, Id, Lab, Subject, Unit, Work, random, shapes};
use zofo_hal::{
    DType, Result, TensorArg, Uses,
    op::{
        AdamW, Copies, CrossEntropy, Embedding, HyperParams, Op, Optimiser, Pairing, RmsNorm, RmsNormBackward, Rope, SwiGlu,
        SwiGluBackward, ZoUpdate,
    },
    perturb::{Factor, Projection, Site, TensorId},
};

/// Rows that carry a label.
const LABELS: usize = 128;
const DIRECTIONS: u32 = 4;
/// A parameter that no cache holds, for updates.
const PARAMETER: [usize; 2] = [8192, shapes::HIDDEN];

/// Blocks of rows that ops with copies are measured on.
const FORMS: [(&str, Copies); 3] =
    [("", Copies::BASE), ("value", Copies::value(DIRECTIONS, true)), ("tangent", Copies::tangent(DIRECTIONS))];

pub fn cases(subjects: &[Subject]) -> Vec<Case> {
    let mut list = List { subjects, cases: Vec::new() };
    for dtype in [DType::F32, DType::Bf16] {
        list.rms_norm(dtype);
        list.rope(dtype);
        list.swiglu(dtype);
        list.embedding(dtype);
        list.cross_entropy(dtype);
    }
    list.updates();
    list.cases
}

struct List<'a> {
    subjects: &'a [Subject],
    cases: Vec<Case>,
}

/// `[rows, cols]` behind the number of blocks, where there are several.
fn shape(copies: Copies, rest: &[usize]) -> Vec<usize> {
    let blocks = (copies.total() > 1).then(|| copies.total());
    blocks.into_iter().chain(rest.iter().copied()).collect()
}

impl List<'_> {
    /// Cases of one group; groups of the same name follow each other.
    fn add(&mut self, group: &str, variant: &str, work: Work, build: impl Fn(&mut Lab) -> Result<Op<TensorArg>> + Copy + 'static) {
        for s in self.subjects {
            self.cases.extend(s.op(group, variant, work, build));
        }
    }

    fn rms_norm(&mut self, dtype: DType) {
        let (rows, d, size) = (shapes::ROWS, shapes::HIDDEN, dtype.block().1);
        for (variant, copies) in FORMS {
            let n = copies.total() * rows;
            // The residual stream is f32: read, added to, written.
            let work = Work::bytes(n * d * (2 * size + 2 * 4));
            self.add(&Id::group("rms_norm", dtype.name(), &shape(copies, &[rows, d])), variant, work, move |lab| {
                let (x, gamma, residual) = (lab.normals(dtype, n, d)?, lab.normals(DType::F32, 1, d)?, lab.normals(DType::F32, n, d)?);
                let (out, sum) = (lab.output(dtype, n, d)?, lab.output(DType::F32, n, d)?);
                Ok(RmsNorm::new(x, gamma, out, 1e-5).residual(residual).sum(sum).copies(copies).into())
            });
        }
        let work = Work::bytes(rows * d * 4 * 4);
        self.add(&Id::group("rms_norm-backward", dtype.name(), &[rows, d]), "", work, move |lab| {
            let (x, gamma) = (lab.normals(DType::F32, rows, d)?, lab.normals(DType::F32, 1, d)?);
            let (dout, dresidual) = (lab.normals(DType::F32, rows, d)?, lab.normals(DType::F32, rows, d)?);
            Ok(RmsNormBackward::new(x, gamma, dout, lab.output(DType::F32, rows, d)?, 1e-5).dresidual(dresidual).into())
        });
    }

    fn rope(&mut self, dtype: DType) {
        let (rows, d, half) = (shapes::ROWS, shapes::HIDDEN, shapes::HEAD_DIM / 2);
        let work = Work::bytes(2 * rows * d * dtype.block().1);
        self.add(&Id::group("rope", dtype.name(), &[rows, d]), "", work, move |lab| {
            let positions: Vec<u32> = (0..rows).map(|r| (r % shapes::TOKENS) as u32).collect();
            let angles: Vec<f32> = (0..shapes::TOKENS * half).map(|i| i as f32 * 0.01).collect();
            let table =
                |lab: &mut Lab, f: fn(f32) -> f32| lab.f32s(shapes::TOKENS, half, &angles.iter().map(|a| f(*a)).collect::<Vec<_>>());
            let (x, positions) = (lab.normals(dtype, rows, d)?, lab.u32s(&positions)?);
            let (cos, sin) = (table(lab, f32::cos)?, table(lab, f32::sin)?);
            // In place, as in a pass.
            Ok(Rope::new(x.clone(), positions, cos, sin, x, shapes::HEAD_DIM, Pairing::Half).into())
        });
    }

    fn swiglu(&mut self, dtype: DType) {
        let (rows, f, size) = (shapes::ROWS, shapes::FFN, dtype.block().1);
        for (variant, copies) in FORMS {
            let n = copies.total() * rows;
            self.add(&Id::group("swiglu", dtype.name(), &shape(copies, &[rows, f])), variant, Work::bytes(3 * n * f * size), move |lab| {
                let (gate, up) = (lab.normals(dtype, n, f)?, lab.normals(dtype, n, f)?);
                Ok(SwiGlu::new(gate, up, lab.output(dtype, n, f)?).copies(copies).into())
            });
        }
        self.add(&Id::group("swiglu-backward", dtype.name(), &[rows, f]), "", Work::bytes(5 * rows * f * size), move |lab| {
            let (gate, up, dout) = (lab.normals(dtype, rows, f)?, lab.normals(dtype, rows, f)?, lab.normals(dtype, rows, f)?);
            Ok(SwiGluBackward::new(gate, up, dout, lab.output(dtype, rows, f)?, lab.output(dtype, rows, f)?).into())
        });
    }

    fn embedding(&mut self, dtype: DType) {
        let (rows, d) = (shapes::ROWS, shapes::HIDDEN);
        let work = Work::bytes(rows * d * (dtype.block().1 + 4));
        self.add(&Id::group("embedding", dtype.name(), &[rows, d]), "", work, move |lab| {
            let ids = lab.u32s(&random::tokens(7, rows, shapes::VOCAB)?)?;
            // Tied to the head, as in the model.
            let table = lab.weight(dtype, shapes::VOCAB, d, Uses::ALL)?;
            Ok(Embedding::new(ids, table, lab.output(DType::F32, rows, d)?).into())
        });
    }

    fn cross_entropy(&mut self, dtype: DType) {
        let (rows, d, v) = (shapes::ROWS, shapes::HIDDEN, shapes::VOCAB);
        let arithmetic = if dtype == DType::Bf16 { Arithmetic::Bf16 } else { Arithmetic::F32 };
        let work = |products: usize| Work::flops(2 * products * LABELS * d * v, v * d * dtype.block().1).with(arithmetic);
        let labels = move |lab: &mut Lab| -> Result<[TensorArg; 2]> {
            let every: Vec<u32> = (0..LABELS).map(|i| (i * rows / LABELS) as u32).collect();
            Ok([lab.u32s(&every)?, lab.u32s(&random::tokens(8, LABELS, shapes::VOCAB)?)?])
        };
        for (variant, copies) in FORMS {
            let c = copies.total();
            self.add(&Id::group("cross_entropy", dtype.name(), &shape(copies, &[LABELS, d, v])), variant, work(c), move |lab| {
                let (h, [label_rows, targets]) = (lab.normals(dtype, c * rows, d)?, labels(lab)?);
                let head = lab.weight(dtype, v, d, Uses::FORWARD)?;
                Ok(CrossEntropy::new(h, label_rows, targets, head, lab.output(DType::F32, c, LABELS)?).copies(copies).into())
            });
        }
        self.add(&Id::group("cross_entropy-slope", dtype.name(), &[LABELS, d, v]), "", work(2), move |lab| {
            let (h, [label_rows, targets]) = (lab.normals(dtype, rows, d)?, labels(lab)?);
            let (head, slope) = (lab.weight(dtype, v, d, Uses::TRAINING)?, lab.output(DType::F32, LABELS, d)?);
            Ok(CrossEntropy::new(h, label_rows, targets, head, lab.output(DType::F32, 1, LABELS)?).slope(slope).into())
        });
    }

    fn updates(&mut self) {
        let [rows, cols] = PARAMETER;
        let n = rows * cols;
        let hyper = |lab: &mut Lab| {
            let h = HyperParams::adamw(1e-4, (0.9, 0.999), 1e-8, 0.01, 1, 1.0);
            lab.f32s(1, HyperParams::LEN, bytemuck::cast_slice(std::slice::from_ref(&h)))
        };
        let state = move |lab: &mut Lab| -> Result<[TensorArg; 3]> {
            let zeros = vec![0.0; n];
            Ok([lab.normals(DType::F32, rows, cols)?, lab.f32s(rows, cols, &zeros)?, lab.f32s(rows, cols, &zeros)?])
        };
        // Parameter and two moments are read and written.
        self.add(&Id::group("adamw", "f32", &PARAMETER), "", Work::bytes(7 * 4 * n), move |lab| {
            let ([param, m, v], grad) = (state(lab)?, lab.normals(DType::F32, rows, cols)?);
            Ok(AdamW::new(grad, hyper(lab)?, param, m, v).into())
        });
        let zs = (n * DIRECTIONS as usize) as u64;
        let work = Work::bytes(6 * 4 * n).per(Unit::Elements(zs));
        self.add(&Id::group("zo_update", "f32", &[DIRECTIONS as usize, rows, cols]), "", work, move |lab| {
            let [param, m, v] = state(lab)?;
            let directions: Vec<u32> = (0..DIRECTIONS).collect();
            let (coefficients, directions) = (lab.normals(DType::F32, 1, DIRECTIONS as usize)?, lab.u32s(&directions)?);
            let site = Site::new(TensorId::new(0, Projection::Q, Factor::A)?, cols as u32);
            let (noise, hyper) = (lab.noise()?, hyper(lab)?);
            Ok(ZoUpdate::new(coefficients, directions, noise, hyper, param, site, Optimiser::AdamW).m(m).v(v).into())
        });
    }
}
