use super::*;
use crate::eval::{Confusion, Prediction};

/// Predictions for `n` examples of three classes, of which about `right` in a hundred are right; the same seed has the same truths.
fn predictions(n: usize, right: u64, salt: u64) -> Predictions {
    let mut out = Predictions { classes: ["a", "b", "c"].map(str::to_owned).to_vec(), ..Predictions::default() };
    let mix = |i: u64| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33;
    out.examples = (0..n as u64)
        .map(|i| {
            let truth = (mix(i) % 3) as u16;
            let hit = mix(i ^ (salt << 32)) % 100 < right;
            let predicted = if hit { truth } else { (truth + 1) % 3 };
            Prediction { line: i + 2, truth: Some(truth), predicted: Some(predicted), tokens: 1, loss: if hit { 0.25 } else { 2.0 } }
        })
        .collect();
    out
}

fn named(runs: &[(&str, &Predictions)]) -> Vec<(String, Predictions)> {
    runs.iter().map(|(n, p)| ((*n).to_owned(), (*p).clone())).collect()
}

#[test]
fn values_are_those_of_the_metrics_and_intervals_of_the_binomial() {
    let p = predictions(900, 80, 1);
    let c = compare(&named(&[("one", &p)]), &CompareSpec::default()).unwrap();
    let scores = &c.runs[0].scores;
    let confusion = Confusion::of(3, &p.examples);
    let (f1, accuracy) = (scores.f1.unwrap(), scores.accuracy.unwrap());
    assert!((f1.value - confusion.macro_f1()).abs() < 1e-12);
    assert_eq!(accuracy.value, confusion.accuracy());
    // The bootstrap of a mean of n yes-or-no values is binomial: 1.96 standard deviations of sqrt(p (1 - p) / n) to each side. Ends are
    // quantiles of 10,000 draws, good to about 3 % of that width.
    let width = 1.96 * (accuracy.value * (1.0 - accuracy.value) / 900.0).sqrt();
    for end in [accuracy.value - accuracy.low, accuracy.high - accuracy.value] {
        assert!((end / width - 1.0).abs() < 0.1, "{end} {width}");
    }
    // The loss is a linear function of accuracy here, so its interval is too.
    assert!((scores.loss.low - (2.0 - 1.75 * accuracy.high)).abs() < 1e-9);
    assert!((c.baseline, c.gap, c.runs[0].difference) == (None, None, None));
}

#[test]
fn differences_are_paired() {
    let (a, b) = (predictions(900, 80, 1), predictions(900, 83, 1));
    let c = compare(&named(&[("a", &a), ("same", &a), ("b", &b)]), &CompareSpec::default()).unwrap();
    let zero = c.runs[1].difference.unwrap();
    assert_eq!((zero.f1.unwrap(), zero.loss), (Interval { value: 0.0, low: 0.0, high: 0.0 }, Interval { value: 0.0, low: 0.0, high: 0.0 }));
    // b is right wherever a is and on some more: in every draw it is at least as good, though the intervals of the two overlap.
    let better = c.runs[2].difference.unwrap().accuracy.unwrap();
    assert!(better.low > 0.0 && !better.contains_zero(), "{better:?}");
    assert!(c.runs[0].scores.accuracy.unwrap().high > c.runs[2].scores.accuracy.unwrap().low);
    let again = compare(&named(&[("a", &a), ("same", &a), ("b", &b)]), &CompareSpec::default()).unwrap();
    assert_eq!(c, again, "draws are a function of nothing else");
}

#[test]
fn shares_of_a_gap() {
    let (frozen, half, full) = (predictions(900, 60, 1), predictions(900, 75, 1), predictions(900, 90, 1));
    let runs = named(&[("frozen", &frozen), ("same as frozen", &frozen), ("half", &half), ("same as full", &full), ("full", &full)]);
    let c = compare(&runs, &CompareSpec::default().gap(0, 4)).unwrap();
    let share = |i: usize| c.runs[i].gap_share.unwrap().f1.unwrap();
    assert_eq!((share(1).low, share(1).high), (0.0, 0.0));
    assert_eq!((share(3).low, share(3).high), (1.0, 1.0));
    assert!(share(2).low < 0.5 && share(2).high > 0.5 && share(2).high - share(2).low < 0.3, "{:?}", share(2));
    assert!((c.runs[2].gap_share.unwrap().loss.unwrap().value - share(2).value).abs() < 0.05);
    assert!(c.runs[0].gap_share.is_none() && c.gap.unwrap().difference.f1.unwrap().low > 0.2);

    let other = predictions(900, 60, 2);
    let c = compare(&named(&[("frozen", &frozen), ("x", &half), ("full", &other)]), &CompareSpec::default().gap(0, 2)).unwrap();
    assert_eq!(c.runs[1].gap_share.unwrap(), Share { f1: None, loss: None }, "there is no gap to have a share of");
}

#[test]
fn other_examples_are_refused() {
    let a = predictions(20, 50, 1);
    let shorter = predictions(19, 50, 1);
    let (mut line, mut truth) = (a.clone(), a.clone());
    line.examples[3].line = 99;
    truth.examples[4].truth = a.examples[4].truth.map(|t| (t + 1) % 3);
    for (b, part) in [(shorter, "20 and 19"), (line, "example 4 is of line 5 here and of line 99"), (truth, "the class of line 6 is `")] {
        let e = compare(&named(&[("a", &a), ("b", &b)]), &CompareSpec::default()).unwrap_err();
        assert!(e.message().contains(part) && e.message().contains("a and b"), "{e}");
    }
    // The order of classes in a file means nothing.
    let mut other = a.clone();
    other.classes.swap(0, 2);
    other.examples.iter_mut().for_each(|e| (e.truth, e.predicted) = (e.truth.map(|t| 2 - t), e.predicted.map(|t| 2 - t)));
    let c = compare(&named(&[("a", &a), ("b", &other)]), &CompareSpec::default()).unwrap();
    assert!(c.runs[1].difference.unwrap().f1.unwrap().value.abs() < 1e-12);
    assert!(compare(&[], &CompareSpec::default()).is_err());
    assert!(compare(&named(&[("a", &a)]), &CompareSpec::default().baseline(1)).is_err());
}

#[test]
fn text_has_losses_only() {
    let mut p = predictions(50, 80, 1);
    p.examples.iter_mut().for_each(|e| (e.truth, e.predicted, e.tokens) = (None, None, 3));
    let c = compare(&named(&[("text", &p)]), &CompareSpec::default()).unwrap();
    assert!(c.runs[0].scores.f1.is_none() && c.runs[0].scores.loss.low < c.runs[0].scores.loss.high);
}
