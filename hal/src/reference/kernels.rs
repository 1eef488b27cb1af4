//! Every op as plain loops: operands in f64, one rounding per result. One file per file of the op vocabulary.

mod attention;
mod backward;
mod forward;
mod loss;
mod matmul;
mod primitive;
mod update;

use super::operand::Memory;
use crate::op::{Op, OperandRef, Orientation};
use crate::{Lacking, Result, Support, TensorArg, TensorSpec, Uses};
use alloc::format;

/// Runs `op`, which passed `check_submit`.
pub(super) fn run(op: &Op<TensorArg>, mem: &dyn Memory) -> Result<()> {
    match op {
        Op::Copy(op) => primitive::copy(op, mem),
        Op::Fill(op) => primitive::fill(op, mem),
        Op::Cast(op) => primitive::cast(op, mem),
        Op::ScaledAdd(op) => primitive::scaled_add(op, mem),
        Op::Mul(op) => primitive::mul(op, mem),
        Op::Map(op) => primitive::map(op, mem),
        Op::RowReduce(op) => primitive::row_reduce(op, mem),
        Op::GatherRows(op) => primitive::gather_rows(op, mem),
        Op::ScatterRows(op) => primitive::scatter_rows(op, mem),
        Op::Perturb(op) => primitive::perturb(op, mem),
        Op::PhiloxWords(op) => primitive::philox_words(op, mem),
        Op::SumSquares(op) => primitive::sum_squares(op, mem),
        Op::MatMul(op) => matmul::matmul(op, mem),
        Op::LoraMatMul(op) => matmul::lora_matmul(op, mem),
        Op::PerturbLoraMatMul(op) => matmul::perturb_lora_matmul(op, mem),
        Op::MaskedSoftmax(op) => attention::masked_softmax(op, mem),
        Op::Rope(op) => attention::rope(op, mem),
        Op::KvAppend(op) => attention::kv_append(op, mem),
        Op::Attention(op) => attention::attention(op, mem),
        Op::AttentionBackward(op) => attention::attention_backward(op, mem),
        Op::Embedding(op) => forward::embedding(op, mem),
        Op::RmsNorm(op) => forward::rms_norm(op, mem),
        Op::SwiGlu(op) => forward::swiglu(op, mem),
        Op::Spread(op) => forward::spread(op, mem),
        Op::BoundaryDot(op) => forward::boundary_dot(op, mem),
        Op::CrossEntropy(op) => loss::cross_entropy(op, mem),
        Op::CrossEntropyBackward(op) => loss::cross_entropy_backward(op, mem),
        Op::CandidateScores(op) => loss::candidate_scores(op, mem),
        Op::ArgMax(op) => loss::argmax(op, mem),
        Op::RmsNormBackward(op) => backward::rms_norm_backward(op, mem),
        Op::LoraMatMulBackward(op) => backward::lora_matmul_backward(op, mem),
        Op::SwiGluBackward(op) => backward::swiglu_backward(op, mem),
        Op::Sgd(op) => update::sgd(op, mem),
        Op::AdamW(op) => update::adamw(op, mem),
        Op::ZoUpdate(op) => update::zo_update(op, mem),
    }
}

/// All ops run natively; a weight serves only the uses it was imported for, so that nobody comes to rely on more.
pub(super) fn supports(op: &Op<TensorSpec>) -> Support {
    let needs = needs(op);
    let mut support = Support::Native;
    op.visit(&mut |name, _, operand| {
        if let OperandRef::Weight(w) = operand {
            let lacks = |need: bool, has: bool| need && !has;
            if lacks(needs.nt, w.uses.nt) || lacks(needs.nn, w.uses.nn) || lacks(needs.gather, w.uses.gather) {
                let reason = format!("{name} was imported for {:?}, {} needs {needs:?}: name the use at import", w.uses, op.name());
                support = Support::lacking(Lacking::Layout, reason);
            }
        }
    });
    support
}

/// What an op does with its weight.
fn needs(op: &Op<TensorSpec>) -> Uses {
    let none = Uses::default();
    match op {
        Op::MatMul(op) => Uses { nt: op.orientation == Orientation::Nt, nn: op.orientation == Orientation::Nn, gather: false },
        Op::LoraMatMul(_) | Op::PerturbLoraMatMul(_) => Uses::FORWARD,
        Op::CrossEntropy(op) => Uses { nn: op.slope.is_some(), ..Uses::FORWARD },
        Op::LoraMatMulBackward(op) => Uses { nn: op.dx.is_some(), ..none },
        Op::Embedding(_) | Op::CandidateScores(_) => Uses { gather: true, ..none },
        _ => none,
    }
}
