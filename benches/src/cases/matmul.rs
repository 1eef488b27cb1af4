//! Matrix products: every type of weight on every shape of the model, and the directions of the backward pass.

use crate::{Arithmetic, Case, Id, Subject, Work, shapes};
use zofo_hal::{
    DType, Matrix, TensorArg, Uses,
    op::{MatMul, Orientation},
};

/// Types of a product.
#[derive(Clone, Copy)]
struct Types {
    /// Of activations, in and out.
    x: DType,
    w: DType,
}

impl Types {
    const fn weight(w: DType) -> Self {
        Self { x: DType::F32, w }
    }

    /// `f32`, `q8_0`, ...: the weight's type alone where activations are f32, as `bf16xbf16` else.
    fn name(self) -> String {
        if self.x == DType::F32 { self.w.to_string() } else { format!("{}x{}", self.x, self.w) }
    }

    /// Work of `[m, k] x [k, n]`, given the bytes of the right operand.
    fn work(self, [m, k, n]: [usize; 3], right: usize) -> Work {
        let arithmetic = if self.x == DType::Bf16 { Arithmetic::Bf16 } else { Arithmetic::F32 };
        Work::flops(2 * m * k * n, (m * k + m * n) * self.x.block().1 + right).with(arithmetic)
    }
}

const FORWARD: [Types; 11] = [
    Types::weight(DType::F32),
    Types::weight(DType::Bf16),
    Types { x: DType::Bf16, w: DType::Bf16 },
    Types::weight(DType::F16),
    Types::weight(DType::Q8_0),
    Types::weight(DType::Q4_0),
    Types::weight(DType::Q4_1),
    Types::weight(DType::Q5_0),
    Types::weight(DType::Q5_1),
    Types::weight(DType::Q4K),
    Types::weight(DType::Q6K),
];

/// `[m, k, n]` of `dy W`, where W is `[k, n]`: the gradients of down_proj's, up_proj's and the head's inputs.
const BACK: [[usize; 3]; 3] =
    [[512, shapes::HIDDEN, shapes::FFN], [512, shapes::FFN, shapes::HIDDEN], [128, shapes::VOCAB, shapes::HIDDEN]];

/// `[m, k, n]` of `dy^T x` over k rows: gradients of factors A and B, and one that is no factor's.
const GRADIENTS: [[usize; 3]; 3] =
    [[shapes::RANK, 1024, shapes::HIDDEN], [shapes::HIDDEN, 1024, shapes::RANK], [shapes::HIDDEN, 1024, shapes::HIDDEN]];

pub fn cases(subjects: &[Subject]) -> Vec<Case> {
    let mut cases = Vec::new();
    for types in FORWARD {
        for shape in shapes::PRODUCTS {
            forward(subjects, types, shape, &mut cases);
        }
    }
    for types in &FORWARD[..3] {
        for shape in BACK {
            back(subjects, *types, shape, &mut cases);
        }
    }
    for shape in GRADIENTS {
        gradient(subjects, shape, &mut cases);
    }
    cases
}

/// `x W^T`.
fn forward(subjects: &[Subject], types: Types, shape: [usize; 3], cases: &mut Vec<Case>) {
    let [m, k, n] = shape;
    // Block formats need whole blocks in a row.
    let Some(row) = types.w.bytes(k) else { return };
    let group = Id::group("matmul", &types.name(), &shape);
    let work = types.work(shape, n * row);
    for s in subjects {
        cases.extend(s.op(&group, "", work, move |lab| {
            let (x, w) = (lab.normals(types.x, m, k)?, lab.weight(types.w, n, k, Uses::FORWARD)?);
            Ok(MatMul::new(x, w, lab.output(types.x, m, n)?, Orientation::Nt).into())
        }));
    }
    #[cfg(feature = "peers")]
    if types.w == DType::F32 {
        cases.extend(crate::peers::matmul::cases(&group, work, shape));
    }
}

/// `dy W` through the weight of a forward pass.
fn back(subjects: &[Subject], types: Types, shape: [usize; 3], cases: &mut Vec<Case>) {
    let [m, k, n] = shape;
    let group = Id::group("matmul-nn", &types.name(), &shape);
    let work = types.work(shape, k * n * types.w.block().1);
    for s in subjects {
        cases.extend(s.op(&group, "", work, move |lab| {
            let (dy, w) = (lab.normals(types.x, m, k)?, lab.weight(types.w, k, n, Uses::TRAINING)?);
            Ok(MatMul::new(dy, w, lab.output(types.x, m, n)?, Orientation::Nn).into())
        }));
    }
}

/// `dy^T x`, both activations.
fn gradient(subjects: &[Subject], shape: [usize; 3], cases: &mut Vec<Case>) {
    let [m, k, n] = shape;
    let group = Id::group("matmul-tn", "f32", &shape);
    let work = Work::flops(2 * m * k * n, 4 * (m * k + k * n + m * n));
    for s in subjects {
        cases.extend(s.op(&group, "", work, move |lab| {
            let (dy, x) = (lab.normals(DType::F32, k, m)?, lab.normals(DType::F32, k, n)?);
            Ok(MatMul::new(dy, Matrix::<TensorArg>::Tensor(x), lab.output(DType::F32, m, n)?, Orientation::Tn).into())
        }));
    }
}
