//! Composite ops as primitives, for devices that lack them.
//!
//! Each decomposition is written once, over [`Emit`], and used twice: [`crate::Runner`] runs it on tensors, and [`plan`] walks it on shapes
//! alone to ask the device about every primitive, so that asking and running cannot drift.
//!
//! All of it stays on the device and can be recorded, but for the updates, which run on the host to keep their bits. Intermediates are f32
//! and rounded once to an output's type, so a result differs from a native one by the f32 rounding of intermediates alone.
//!
//! What a recorded or asynchronous device must not look at, such as a row past the live ones or the index of a padded label, is replaced
//! before it can reach a product: 0 times NaN is NaN. A non-finite *live* value may reach other live rows of its packed batch.

mod attention;
mod backward;
mod emit;
mod forward;
mod loss;
mod matmul;
mod update;

pub(crate) use emit::{Constant, Emit};
pub(crate) use update::update;

use alloc::{format, string::ToString};
use zofo_hal::{Device, ErrorKind, Lacking, Op, Result, Support, TensorSpec, op::OpClass};

/// Runs `op` as other ops on `e`; `None` where there is no way.
pub(crate) fn run<E: Emit>(e: &mut E, op: &Op<E::T>) -> Option<Result<()>> {
    Some(match op {
        Op::MatMul(op) => return matmul::matmul(e, op),
        Op::LoraMatMul(op) => matmul::lora_matmul(e, op),
        Op::PerturbLoraMatMul(op) => matmul::perturb_lora_matmul(e, op),
        Op::Rope(op) => attention::rope(e, op),
        Op::KvAppend(op) => attention::kv_append(e, op),
        Op::Attention(op) => attention::attention(e, op),
        Op::AttentionBackward(op) => attention::attention_backward(e, op),
        Op::Embedding(op) => forward::embedding(e, op),
        Op::RmsNorm(op) => forward::rms_norm(e, op),
        Op::SwiGlu(op) => forward::swiglu(e, op),
        Op::Spread(op) => forward::spread(e, op),
        Op::BoundaryDot(op) => forward::boundary_dot(e, op),
        Op::CrossEntropy(op) => loss::cross_entropy(e, op),
        Op::CrossEntropyBackward(op) => loss::cross_entropy_backward(e, op),
        Op::CandidateScores(op) => loss::candidate_scores(e, op),
        Op::RmsNormBackward(op) => backward::rms_norm_backward(e, op),
        Op::LoraMatMulBackward(op) => backward::lora_matmul_backward(e, op),
        Op::SwiGluBackward(op) => backward::swiglu_backward(e, op),
        _ => return None,
    })
}

/// How the device runs `op`, which it lacks; `None` where there is no decomposition.
pub(crate) fn plan(device: &dyn Device, op: &Op<TensorSpec>) -> Option<Support> {
    if op.class() == OpClass::Update {
        return update::knows(op).then(|| Support::Emulated { note: "runs on the host".into() });
    }
    let mut plan = emit::Plan::new(device);
    Some(match run(&mut plan, op)? {
        Ok(()) => Support::Emulated { note: format!("runs as {}", plan.ops().join(", ")).into() },
        Err(e) => {
            debug_assert_eq!(*e.kind(), ErrorKind::Unsupported, "{e}");
            Support::lacking(Lacking::Op, e.message().to_string())
        }
    })
}
