//! Classification metrics.

use super::Prediction;

/// How often each class was taken for which: rows are the truth, columns the prediction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confusion {
    classes: usize,
    counts: Vec<u64>,
}

impl Confusion {
    /// Nothing counted yet.
    pub fn new(classes: usize) -> Self {
        Self { classes, counts: vec![0; classes * classes] }
    }

    /// The predictions for `classes` classes; examples without a class do not count.
    pub fn of(classes: usize, predictions: &[Prediction]) -> Self {
        let mut counts = Self::new(classes);
        for (truth, predicted) in predictions.iter().filter_map(|p| p.truth.zip(p.predicted)) {
            counts.add(truth.into(), predicted.into());
        }
        counts
    }

    /// Counts one prediction.
    pub fn add(&mut self, truth: usize, prediction: usize) {
        self.counts[truth * self.classes + prediction] += 1;
    }

    /// How often `truth` was taken for `prediction`.
    pub fn count(&self, truth: usize, prediction: usize) -> u64 {
        self.counts[truth * self.classes + prediction]
    }

    /// Examples counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Share of right predictions; 0 where there is none.
    pub fn accuracy(&self) -> f64 {
        let right: u64 = (0..self.classes).map(|c| self.count(c, c)).sum();
        ratio(right, self.total())
    }

    /// F1 of one class: 2 tp / (2 tp + fp + fn), `None` where it is neither in the truth nor predicted.
    pub fn f1(&self, class: usize) -> Option<f64> {
        let hits = self.count(class, class);
        let truth: u64 = (0..self.classes).map(|c| self.count(class, c)).sum();
        let predicted: u64 = (0..self.classes).map(|c| self.count(c, class)).sum();
        (truth + predicted > 0).then(|| ratio(2 * hits, truth + predicted))
    }

    /// Mean F1 over the classes that are in the truth or predicted, as scikit-learn's `f1_score(average="macro")` takes it.
    pub fn macro_f1(&self) -> f64 {
        let scores: Vec<f64> = (0..self.classes).filter_map(|c| self.f1(c)).collect();
        if scores.is_empty() { 0.0 } else { scores.iter().sum::<f64>() / scores.len() as f64 }
    }
}

fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn confusion(classes: usize, truth: &[usize], prediction: &[usize]) -> Confusion {
        let mut c = Confusion::new(classes);
        truth.iter().zip(prediction).for_each(|(t, p)| c.add(*t, *p));
        c
    }

    #[test]
    fn by_hand() {
        // Class 0: tp 2, fp 1, fn 1: 4/6. Class 1: tp 1, fp 1, fn 1: 2/4. Class 2: tp 1, fp 1, fn 1: 2/4.
        let c = confusion(3, &[0, 0, 0, 1, 1, 2, 2], &[0, 0, 1, 1, 2, 2, 0]);
        assert_eq!([c.f1(0), c.f1(1), c.f1(2)], [Some(4.0 / 6.0), Some(0.5), Some(0.5)]);
        assert!((c.macro_f1() - (4.0 / 6.0 + 1.0) / 3.0).abs() < 1e-15);
        assert_eq!(c.accuracy(), 4.0 / 7.0);
        assert_eq!((c.count(0, 1), c.total()), (1, 7));
    }

    #[test]
    fn a_class_that_is_nowhere_does_not_count() {
        let c = confusion(4, &[0, 0, 1], &[0, 0, 0]);
        // Class 0: 4/5, class 1: 0, classes 2 and 3 nowhere.
        assert_eq!(c.f1(2), None);
        assert!((c.macro_f1() - 0.4).abs() < 1e-15);
    }

    #[test]
    fn one_class_said_always_is_a_low_score() {
        let c = confusion(4, &[0, 1, 2, 3], &[2, 2, 2, 2]);
        // 2 / (1 + 4) for class 2, 0 for the others.
        assert!((c.macro_f1() - 0.1).abs() < 1e-15);
        assert_eq!(c.accuracy(), 0.25);
    }

    #[test]
    fn nothing_is_zero() {
        let c = Confusion::new(2);
        assert_eq!((c.macro_f1(), c.accuracy()), (0.0, 0.0));
    }
}
