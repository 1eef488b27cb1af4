//! Asking a device about the ops of a training step, in the shapes of a small model.

use serde::Serialize;
use zofo_hal::{
    DType, Device, Op, Result, Support, TensorSpec, Uses, WeightSpec,
    op::{
        AdamW, Attention, AttentionBackward, AttentionShape, BoundaryDot, CandidateScores, Copies, CrossEntropy, CrossEntropyBackward,
        Embedding, HyperParams, KvAppend, LoraMatMul, LoraMatMulBackward, Optimiser, Pairing, PerturbLoraMatMul, RmsNorm, RmsNormBackward,
        Rope, Sgd, SumSquares, SwiGlu, SwiGluBackward, ZoUpdate,
    },
    perturb::{Factor, NoiseParams, Projection, Site, TensorId},
};

/// The types that activations may have.
pub(super) const TYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// How an op runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// By the device.
    Native,
    /// By other ops, or with more memory.
    Emulated,
    /// Not at all.
    Unsupported,
}

/// A device's answer about one op.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct OpSupport {
    /// The op's name.
    pub op: &'static str,
    /// Type of the activations.
    pub compute: &'static str,
    /// The answer.
    pub answer: Answer,
    /// What more there is to say.
    pub note: Option<String>,
}

pub(super) fn survey(device: &dyn Device, compute: DType) -> Result<Vec<OpSupport>> {
    let ask = |op: Op<TensorSpec>| {
        let (answer, note) = match zofo_ops::support(device, &op) {
            Support::Native => (Answer::Native, None),
            Support::Emulated { note } => (Answer::Emulated, Some(note.into_owned())),
            Support::Unsupported { reason, .. } => (Answer::Unsupported, Some(reason.into_owned())),
        };
        OpSupport { op: op.name(), compute: compute.name(), answer, note }
    };
    Ok(step(compute)?.into_iter().map(ask).collect())
}

/// The ops of a step: T rows of d features, a vocabulary of V, rank r, R labelled rows, two directions.
fn step(compute: DType) -> Result<Vec<Op<TensorSpec>>> {
    const T: usize = 16;
    const D: usize = 64;
    const V: usize = 128;
    const RANK: usize = 8;
    const R: usize = 4;
    const Q: usize = 2;
    let t = |dtype, rows, cols| TensorSpec::new(dtype, rows, cols);
    let act = |rows, cols| t(compute, rows, cols);
    let (float, index) = (|rows, cols| t(DType::F32, rows, cols), |n| t(DType::U32, 1, n));
    let weight = |rows| WeightSpec { dtype: compute, rows, cols: D, uses: Uses { nt: true, nn: true, gather: true } };
    let noise = t(DType::U32, 1, NoiseParams::WORDS);
    let site = |factor, ld: usize| Ok(Some(Site::new(TensorId::new(0, Projection::Q, factor)?, ld as u32)));
    let shape = AttentionShape { heads: 4, kv_heads: 4, head_dim: D / 4, scale: 0.25, causal: true };
    let tangents = Copies::tangent(Q as u32);
    let (a, b) = (float(RANK, D), float(D, RANK));
    let h = act(T, D);
    let copies = act(T * (Q + 1), D);
    let hyper = t(DType::F32, 1, HyperParams::LEN);
    Ok(vec![
        Embedding::new(index(T), weight(V), float(T, D)).into(),
        RmsNorm::new(float(T, D), float(1, D), h, 1e-5).into(),
        LoraMatMul::new(h, a, b, weight(D), h, 2.0).into(),
        PerturbLoraMatMul::new(copies, a, b, noise, weight(D), copies, 2.0, tangents)
            .site_a(site(Factor::A, D)?)
            .site_b(site(Factor::B, RANK)?)
            .into(),
        Rope::new(h, index(T), float(V, D / 8), float(V, D / 8), h, D / 4, Pairing::Half).into(),
        KvAppend::new(h, h, index(T), act(V, D), act(V, D)).into(),
        Attention::new(h, h, h, index(2), index(2), h, shape).into(),
        Attention::new(copies, copies, copies, index(2), index(2), copies, shape).copies(tangents).into(),
        SwiGlu::new(h, h, h).into(),
        CrossEntropy::new(h, index(R), index(R), weight(V), float(1, R)).into(),
        CrossEntropy::new(h, index(R), index(R), weight(V), float(1, R)).slope(float(R, D)).into(),
        CandidateScores::new(h, index(R), index(R), weight(V), float(R, R)).into(),
        BoundaryDot::new(float(T, D), float(T * Q, D), float(1, Q)).into(),
        CrossEntropyBackward::new(float(R, D), index(R), float(1, 1), float(T, D)).into(),
        RmsNormBackward::new(float(T, D), float(1, D), float(T, D), float(T, D), 1e-5).into(),
        LoraMatMulBackward::new(h, act(T, RANK), a, b, h, weight(D), a, b, 2.0).dx(h).into(),
        AttentionBackward::new(h, h, h, h, float(T, 4), h, index(2), index(2), h, h, h, shape).into(),
        SwiGluBackward::new(h, h, h, h, h).into(),
        SumSquares::new(a, float(1, 1)).into(),
        Sgd::new(a, hyper, a).into(),
        AdamW::new(a, hyper, a, a, a).into(),
        ZoUpdate::new(
            float(1, Q),
            index(Q),
            noise,
            hyper,
            a,
            Site::new(TensorId::new(0, Projection::Q, Factor::A)?, D as u32),
            Optimiser::AdamW,
        )
        .m(a)
        .v(a)
        .into(),
    ])
}
