//! What an adapter costs, and what perturbing it costs: against the plain product of the same rows.

use crate::{Arithmetic, Case, Id, Subject, Work, shapes};
use zofo_hal::{
    DType, Uses,
    op::{Copies, LoraMatMul, MatMul, Orientation, PerturbLoraMatMul},
    perturb::{Factor, Projection, Site, TensorId},
};

/// Rows of a block.
const BLOCK: usize = 256;
const DIRECTIONS: [u32; 3] = [1, 4, 8];
/// `[in, out]` of an attention projection and of down_proj.
const LAYERS: [[usize; 2]; 2] = [[shapes::HIDDEN, shapes::HIDDEN], [shapes::FFN, shapes::HIDDEN]];

pub fn cases(subjects: &[Subject]) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for layer in LAYERS {
            for directions in DIRECTIONS {
                for s in subjects {
                    one(s, dtype, layer, directions, &mut cases);
                }
            }
        }
    }
    cases
}

/// The plain product first: the others are shown as multiples of it.
fn one(s: &Subject, dtype: DType, [k, n]: [usize; 2], directions: u32, cases: &mut Vec<Case>) {
    let blocks = directions as usize + 1;
    let (rows, r) = (blocks * BLOCK, shapes::RANK);
    let group = Id::group("lora", &dtype.to_string(), &[blocks, BLOCK, k, n]);
    let work = |low_rank: usize| {
        let arithmetic = if dtype == DType::Bf16 { Arithmetic::Bf16 } else { Arithmetic::F32 };
        let flops = 2 * rows * k * n + low_rank * 2 * r * (k + n);
        Work::flops(flops, (rows * (k + n) + k * n) * dtype.block().1).with(arithmetic)
    };
    cases.extend(s.op(&group, "matmul", work(0), move |lab| {
        let (x, w) = (lab.normals(dtype, rows, k)?, lab.weight(dtype, n, k, Uses::FORWARD)?);
        Ok(MatMul::new(x, w, lab.output(dtype, rows, n)?, Orientation::Nt).into())
    }));
    cases.extend(s.op(&group, "lora", work(rows), move |lab| {
        let (x, w) = (lab.normals(dtype, rows, k)?, lab.weight(dtype, n, k, Uses::FORWARD)?);
        let (a, b) = (lab.normals(DType::F32, r, k)?, lab.normals(DType::F32, n, r)?);
        Ok(LoraMatMul::new(x, a, b, w, lab.output(dtype, rows, n)?, 2.0).into())
    }));
    // A tangent has two low-rank products: through the factors as they are, and through their directions.
    for (variant, copies, low_rank) in
        [("value", Copies::value(directions, true), rows), ("tangent", Copies::tangent(directions), rows + (blocks - 1) * BLOCK)]
    {
        cases.extend(s.op(&group, variant, work(low_rank), move |lab| {
            let (x, w) = (lab.normals(dtype, rows, k)?, lab.weight(dtype, n, k, Uses::FORWARD)?);
            let (a, b) = (lab.normals(DType::F32, r, k)?, lab.normals(DType::F32, n, r)?);
            let (noise, out) = (lab.noise()?, lab.output(dtype, rows, n)?);
            let site = |factor, cols: usize| Ok(Site::new(TensorId::new(0, Projection::Q, factor)?, cols as u32));
            let op = PerturbLoraMatMul::new(x, a, b, noise, w, out, 2.0, copies);
            Ok(op.site_a(Some(site(Factor::A, k)?)).site_b(Some(site(Factor::B, r)?)).into())
        }));
    }
}
