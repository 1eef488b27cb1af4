//! The support matrix: what each device answers about each op.

use std::fmt::Write as _;
use zofo_hal::{
    DType, DeviceRef, Op, Support, TensorSpec, Uses, WeightSpec,
    op::{
        AdamW, ArgMax, Attention, AttentionBackward, AttentionShape, BoundaryDot, CandidateScores, Cast, Copies, Copy, CrossEntropy,
        CrossEntropyBackward, Embedding, Fill, GatherRows, HyperParams, KvAppend, LoraMatMul, LoraMatMulBackward, Map, MapFunction,
        MaskedSoftmax, MatMul, Mul, Optimiser, Orientation, Pairing, Perturb, PerturbLoraMatMul, PhiloxWords, Reduction, RmsNorm,
        RmsNormBackward, Rope, RowReduce, ScaledAdd, ScatterRows, Sgd, Spread, SumSquares, SwiGlu, SwiGluBackward, ZoUpdate,
    },
    perturb::{Factor, NoiseParams, Projection, Site, TensorId},
};

use crate::model::FLOATS;

/// A markdown page with a table of ops by devices and one of weight types by devices, from what the devices answer.
///
/// The columns are named by the strings. A cell is the answer for activations in f32, f16 and bf16, or one answer where all agree.
pub fn support_matrix(devices: &[(&str, DeviceRef)]) -> String {
    let mut page = String::new();
    let mut notes = Vec::new();
    heading(&mut page, &["op", "class"], devices);
    let samples: Vec<Vec<Op<TensorSpec>>> = FLOATS.iter().map(|&x| samples(x)).collect();
    for (i, name) in Op::<TensorSpec>::NAMES.iter().enumerate() {
        let _ = write!(page, "| {name} | {} |", format!("{:?}", samples[0][i].class()).to_lowercase());
        for (_, device) in devices {
            let answers: Vec<String> = samples.iter().map(|s| answer(&device.supports(&s[i]), &mut notes)).collect();
            let cell = match answers.iter().all(|a| *a == answers[0]) {
                true => answers[0].clone(),
                false => FLOATS.iter().zip(&answers).map(|(x, a)| format!("{a} {x}")).collect::<Vec<_>>().join(", "),
            };
            let _ = write!(page, " {cell} |");
        }
        page.push('\n');
    }
    page.push_str("\n● native, ○ emulated, – not supported\n");
    for (i, note) in notes.iter().enumerate() {
        let _ = writeln!(page, "\n[{}] {note}", i + 1);
    }
    page.push_str("\nWeights that each device imports:\n\n");
    heading(&mut page, &["weight"], devices);
    for dtype in DType::ALL.into_iter().filter(|&d| d != DType::U32) {
        let _ = write!(page, "| {dtype} |");
        for (_, device) in devices {
            page.push_str(if device.dtype_usage(dtype).weight { " ● |" } else { " – |" });
        }
        page.push('\n');
    }
    page
}

fn heading(page: &mut String, columns: &[&str], devices: &[(&str, DeviceRef)]) {
    let names: Vec<&str> = columns.iter().copied().chain(devices.iter().map(|(name, _)| *name)).collect();
    let _ = writeln!(page, "| {} |", names.join(" | "));
    let _ = writeln!(page, "|{}", "---|".repeat(names.len()));
}

fn answer(support: &Support, notes: &mut Vec<String>) -> String {
    match support {
        Support::Native => "●".into(),
        Support::Unsupported { .. } => "–".into(),
        Support::Emulated { note } => {
            let at = notes.iter().position(|n| n == note).unwrap_or_else(|| {
                notes.push(note.to_string());
                notes.len() - 1
            });
            format!("○ [{}]", at + 1)
        }
    }
}

/// One op of each kind, in the order of [`Op::NAMES`], with activations and weights of type `x` and shapes of a small model.
fn samples(x: DType) -> Vec<Op<TensorSpec>> {
    let (t, d, f, r, v) = (32, 64, 128, 8, 256);
    let m = |rows, cols| TensorSpec::new(x, rows, cols);
    let f32 = |rows, cols| TensorSpec::new(DType::F32, rows, cols);
    let u32 = |n| TensorSpec::vector(DType::U32, n);
    let w = |rows, cols| WeightSpec { dtype: x, rows, cols, uses: Uses::ALL };
    let (noise, hyper) = (u32(NoiseParams::WORDS), f32(1, HyperParams::LEN));
    let site = Site::new(TensorId::new(0, Projection::Q, Factor::A).expect("layer 0"), d as u32);
    let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 16, scale: 0.25, causal: true };
    let copies = Copies::tangent(1);
    let mut all: Vec<Op<TensorSpec>> = vec![
        Copy::new(m(t, d), m(t, d)).into(),
        Fill::new(m(t, d), 0.0).into(),
        Cast::new(m(t, d), f32(t, d)).into(),
        ScaledAdd::new(m(t, d), m(t, d)).b(m(t, d)).into(),
        Mul::new(m(t, d), m(t, d), m(t, d)).into(),
        Map::new(m(t, d), m(t, d), MapFunction::Exp).into(),
        RowReduce::new(m(t, d), m(t, 1), Reduction::Sum).into(),
        GatherRows::new(m(v, d), u32(t), m(t, d)).into(),
        ScatterRows::new(m(t, d), u32(t), m(v, d)).into(),
        MaskedSoftmax::new(m(t, t), u32(3), u32(3), m(t, t), 1.0, true).into(),
        Perturb::new(noise, m(r, d), site).a(m(r, d)).into(),
        PhiloxWords::new(noise, u32(d), site).into(),
        SumSquares::new(m(t, d), f32(1, 1)).into(),
        ArgMax::new(m(t, v), u32(t)).into(),
        MatMul::new(m(t, d), w(f, d), m(t, f), Orientation::Nt).into(),
        Embedding::new(u32(t), w(v, d), m(t, d)).into(),
        RmsNorm::new(m(t, d), m(1, d), m(t, d), 1e-5).into(),
        LoraMatMul::new(m(t, d), m(r, d), m(f, r), w(f, d), m(t, f), 1.0).into(),
        PerturbLoraMatMul::new(m(2 * t, d), m(r, d), m(f, r), noise, w(f, d), m(2 * t, f), 1.0, copies).site_a(Some(site)).into(),
        Rope::new(m(t, d), u32(t), f32(t, 8), f32(t, 8), m(t, d), 16, Pairing::Half).into(),
        KvAppend::new(m(t, d / 2), m(t, d / 2), u32(t), m(v, d / 2), m(v, d / 2)).into(),
        Attention::new(m(t, d), m(t, d / 2), m(t, d / 2), u32(3), u32(3), m(t, d), shape).into(),
        SwiGlu::new(m(t, f), m(t, f), m(t, f)).into(),
        CrossEntropy::new(m(t, d), u32(8), u32(8), w(v, d), f32(1, 8)).into(),
        CandidateScores::new(m(t, d), u32(8), u32(4), w(v, d), f32(8, 4)).into(),
        BoundaryDot::new(m(t, d), m(2 * t, d), f32(1, 2)).into(),
        Spread::new(m(t, d), m(2 * t, d), copies).into(),
        RmsNormBackward::new(m(t, d), m(1, d), m(t, d), m(t, d), 1e-5).into(),
        LoraMatMulBackward::new(m(t, d), m(t, r), m(r, d), m(f, r), m(t, f), w(f, d), f32(r, d), f32(f, r), 1.0).dx(m(t, d)).into(),
        SwiGluBackward::new(m(t, f), m(t, f), m(t, f), m(t, f), m(t, f)).into(),
        CrossEntropyBackward::new(f32(8, d), u32(8), f32(1, 1), m(t, d)).into(),
        Sgd::new(f32(r, d), hyper, f32(r, d)).into(),
        AdamW::new(f32(r, d), hyper, f32(r, d), f32(r, d), f32(r, d)).into(),
        ZoUpdate::new(f32(1, 4), u32(4), noise, hyper, f32(r, d), site, Optimiser::Sgd).into(),
    ];
    let (kv, wide) = (m(t, d / 2), m(t, d));
    let lse = f32(t, 4);
    all.push(AttentionBackward::new(wide, kv, kv, wide, lse, wide, u32(3), u32(3), wide, kv, kv, shape).into());
    let place = |op: &Op<TensorSpec>| Op::<TensorSpec>::NAMES.iter().position(|n| *n == op.name());
    all.sort_by_key(place);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An op that is added to the vocabulary must be added here.
    #[test]
    fn samples_are_one_of_each_op_and_valid() {
        for x in FLOATS {
            let samples = samples(x);
            let names: Vec<_> = samples.iter().map(Op::name).collect();
            assert_eq!(names, Op::<TensorSpec>::NAMES);
            for op in samples {
                op.check().unwrap();
            }
        }
    }
}
