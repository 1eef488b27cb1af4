use crate::util::*;
use zofo_hal::op::{ArgMax, CandidateScores, Copies, CrossEntropy, NO_INDEX};
use zofo_hal::{TensorArg, Uses};

pub const T: usize = 4;
pub const D: usize = 3;
pub const V: usize = 7;
/// Rows 2 and 0 are labelled; the second entry is padding, whose target is garbage.
pub const ROWS: [u32; 3] = [2, NO_INDEX, 0];
pub const TARGETS: [u32; 3] = [6, 1000, 1];

pub fn head() -> Vec<f32> {
    random(77, V * D)
}

/// Cross entropy as its definition says.
fn naive(h: &[f32], row: usize, target: usize) -> f64 {
    let w = head();
    let logits: Vec<f64> = (0..V).map(|v| dot(&h[row * D..][..D], &w[v * D..][..D])).collect();
    logits.iter().map(|x| x.exp()).sum::<f64>().ln() - logits[target]
}

pub fn losses(rig: &Rig, h: &[f32], copies: Copies) -> (TensorArg, TensorArg) {
    let c = copies.total();
    let (losses, slope) = (rig.out(c, 3), rig.out(3, D));
    let weight = rig.weight_f32(V, D, Uses::TRAINING, &head());
    let op = CrossEntropy::new(rig.f32(c * T, D, h), rig.u32(&ROWS), rig.u32(&TARGETS), weight, losses.clone()).copies(copies);
    rig.run(op.slope((copies == Copies::BASE).then(|| slope.clone())));
    (losses, slope)
}

#[test]
fn cross_entropy_of_labelled_rows() {
    let rig = Rig::new();
    let blocks = [random(1, T * D), random(2, T * D)];
    let (out, _) = losses(&rig, &blocks.concat(), Copies::value(1, true));
    let want: Vec<f64> = blocks.iter().flat_map(|h| [naive(h, 2, 6), 0.0, naive(h, 0, 1)]).collect();
    assert_close(&rig.get(&out), &want, 2.0 * ROUNDING);
}

#[test]
fn cross_entropy_of_huge_logits() {
    let rig = Rig::new();
    let (h, head, out) = (rig.f32(1, 1, &[1000.0]), rig.f32(3, 1, &[1.0, 0.5, -1.0]), rig.out(1, 1));
    rig.run(CrossEntropy::new(h, rig.u32(&[0]), rig.u32(&[1]), head, out.clone()));
    assert_eq!(rig.get(&out), [500.0]);
}

#[test]
fn cross_entropy_tangent() {
    let rig = Rig::new();
    let (h, dh) = (random(1, T * D), random(2, T * D));
    let (both, _) = losses(&rig, &[h.clone(), dh.clone()].concat(), Copies::tangent(1));
    assert_tangent(&rig.get(&both.rows(1, 1)), |step| rig.get(&losses(&rig, &moved(&h, step, &dh), Copies::BASE).0));
}

#[test]
fn labels_out_of_range_fail() {
    let rig = Rig::new();
    let run = |rows: &[u32], targets: &[u32]| {
        let (h, head) = (rig.f32(2, 1, &[1., 2.]), rig.f32(3, 1, &[0.; 3]));
        rig.fails(CrossEntropy::new(h, rig.u32(rows), rig.u32(targets), head, rig.out(1, rows.len())))
    };
    assert!(run(&[0, 2], &[0, 0]).to_string().contains("rows[1] is 2"));
    assert!(run(&[0, 1], &[0, 3]).to_string().contains("targets[1] is 3"));
    assert!(run(&[1, 1], &[0, 0]).to_string().contains("distinct"));
}

#[test]
fn no_label_is_no_loss() {
    let rig = Rig::new();
    rig.run(CrossEntropy::new(rig.out(2, 3), rig.u32(&[]), rig.u32(&[]), rig.f32(1, 3, &[0.; 3]), rig.out(1, 0)));
    rig.queue.synchronize(None).unwrap();
}

#[test]
fn candidate_scores_are_a_few_logits() {
    let rig = Rig::new();
    let h = rig.f32(2, 2, &[1., 2., 3., 4.]);
    let head = rig.f32(3, 2, &[1., 0., 0., 1., 1., 1.]);
    let out = rig.out(2, 2);
    rig.run(CandidateScores::new(h.clone(), rig.u32(&[1, 0]), rig.u32(&[2, 0]), head.clone(), out.clone()));
    assert_eq!(rig.get(&out), [7., 3., 3., 1.]);
    rig.fails(CandidateScores::new(h.clone(), rig.u32(&[NO_INDEX, 0]), rig.u32(&[2, 0]), head.clone(), out.clone()));
    rig.fails(CandidateScores::new(h, rig.u32(&[1, 0]), rig.u32(&[2, 3]), head, out));
}

#[test]
fn argmax_prefers_the_first() {
    let rig = Rig::new();
    let x = rig.f32(4, 3, &[1., 3., 3., -2., -1., -5., 0., f32::NAN, 9., f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    let out = rig.words(1, 4, &[0; 4]);
    rig.run(ArgMax::new(x, out.clone()));
    assert_eq!(rig.get_words(&out), [1, 1, 1, 0]);
}
