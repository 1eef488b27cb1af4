//! Attention: a training batch forward, with copies, and backward; and one row against a cache.

use crate::{Case, Id, Lab, Subject, Work, shapes};
use zofo_hal::{
    DType, Result, TensorArg,
    op::{Attention, AttentionBackward, Copies},
};

const DIRECTIONS: u32 = 4;
/// Keys that a decoded row sees.
const CACHED: usize = 512;
/// Width of queries, and of keys and values.
const WIDE: usize = shapes::HEADS * shapes::HEAD_DIM;
const NARROW: usize = shapes::KV_HEADS * shapes::HEAD_DIM;

pub fn cases(subjects: &[Subject]) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        forward(subjects, dtype, &mut cases);
        copies(subjects, dtype, &mut cases);
        backward(subjects, dtype, &mut cases);
        decode(subjects, dtype, &mut cases);
    }
    cases
}

/// Multiply-adds of one product over the pairs that the causal mask leaves of the batch.
const PRODUCT: usize = shapes::SEQUENCES * shapes::HEADS * shapes::HEAD_DIM * (shapes::TOKENS * (shapes::TOKENS + 1) / 2);

/// Work of so many products over `blocks` blocks of rows.
fn work(products: usize, blocks: usize, dtype: DType) -> Work {
    Work::flops(2 * products * PRODUCT, blocks * shapes::ROWS * 2 * (WIDE + NARROW) * dtype.block().1)
}

fn group(op: &str, dtype: DType, blocks: usize) -> String {
    let shape = [blocks, shapes::SEQUENCES, shapes::TOKENS, shapes::HEADS, shapes::KV_HEADS, shapes::HEAD_DIM];
    Id::group(op, &dtype.to_string(), if blocks == 1 { &shape[1..] } else { &shape })
}

/// Where the batch's sequences begin and end.
fn bounds(lab: &mut Lab) -> Result<TensorArg> {
    let ends: Vec<u32> = (0..=shapes::SEQUENCES).map(|s| (s * shapes::TOKENS) as u32).collect();
    lab.u32s(&ends)
}

/// The op over `copies` blocks of the batch.
fn attention(lab: &mut Lab, dtype: DType, copies: Copies) -> Result<Attention<TensorArg>> {
    let rows = copies.total() * shapes::ROWS;
    let (q, k, v) = (lab.normals(dtype, rows, WIDE)?, lab.normals(dtype, rows, NARROW)?, lab.normals(dtype, rows, NARROW)?);
    let (cu, out) = (bounds(lab)?, lab.output(dtype, rows, WIDE)?);
    Ok(Attention::new(q, k, v, cu.clone(), cu, out, shapes::attention()).copies(copies))
}

fn forward(subjects: &[Subject], dtype: DType, cases: &mut Vec<Case>) {
    for s in subjects {
        let build = move |lab: &mut Lab| Ok(attention(lab, dtype, Copies::BASE)?.into());
        cases.extend(s.op(&group("attention", dtype, 1), "", work(2, 1, dtype), build));
    }
}

fn copies(subjects: &[Subject], dtype: DType, cases: &mut Vec<Case>) {
    let q = DIRECTIONS as usize;
    // A tangent has two products for its scores and two for its output.
    let forms = [("value", Copies::value(DIRECTIONS, true), 2 * (q + 1)), ("tangent", Copies::tangent(DIRECTIONS), 2 + 4 * q)];
    for s in subjects {
        for (variant, copies, products) in forms {
            let build = move |lab: &mut Lab| Ok(attention(lab, dtype, copies)?.into());
            cases.extend(s.op(&group("attention", dtype, q + 1), variant, work(products, q + 1, dtype), build));
        }
    }
}

fn backward(subjects: &[Subject], dtype: DType, cases: &mut Vec<Case>) {
    for s in subjects {
        cases.extend(s.op(&group("attention-backward", dtype, 1), "", work(5, 2, dtype), move |lab| {
            let lse = lab.output(DType::F32, shapes::ROWS, shapes::HEADS)?;
            let f = attention(lab, dtype, Copies::BASE)?.lse(lse.clone());
            lab.run(f.clone())?;
            let dout = lab.normals(dtype, shapes::ROWS, WIDE)?;
            let mut like = |cols| lab.output(dtype, shapes::ROWS, cols);
            let (dq, dk, dv) = (like(WIDE)?, like(NARROW)?, like(NARROW)?);
            Ok(AttentionBackward::new(f.q, f.k, f.v, f.out, lse, dout, f.cu_q, f.cu_kv, dq, dk, dv, f.shape).into())
        }));
    }
}

fn decode(subjects: &[Subject], dtype: DType, cases: &mut Vec<Case>) {
    let shape = [1, CACHED, shapes::HEADS, shapes::KV_HEADS, shapes::HEAD_DIM];
    let work = Work::flops(4 * WIDE * CACHED, 2 * (CACHED * NARROW + WIDE) * dtype.block().1);
    for s in subjects {
        cases.extend(s.op(&Id::group("attention-decode", &dtype.to_string(), &shape), "", work, move |lab| {
            let (q, k, v) = (lab.normals(dtype, 1, WIDE)?, lab.normals(dtype, CACHED, NARROW)?, lab.normals(dtype, CACHED, NARROW)?);
            let (cu_q, cu_kv) = (lab.u32s(&[0, 1])?, lab.u32s(&[0, CACHED as u32])?);
            Ok(Attention::new(q, k, v, cu_q, cu_kv, lab.output(dtype, 1, WIDE)?, shapes::attention()).into())
        }));
    }
}
