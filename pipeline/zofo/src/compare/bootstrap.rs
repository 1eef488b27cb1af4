//! The draws: scores of every run on every resample.

use std::collections::HashMap;

use zofo_hal::Result;

use super::{CONFIDENCE, Interval, Scores};
use crate::{
    eval::Predictions,
    shuffle::{Purpose, Stream},
};

/// One score of all runs: on the examples as they are, and on each draw, `[draws, runs]`.
pub(super) struct Samples {
    runs: usize,
    value: Vec<f64>,
    draws: Vec<f64>,
}

impl Samples {
    fn new(value: Vec<f64>, draws: usize) -> Self {
        Self { runs: value.len(), draws: Vec::with_capacity(value.len() * draws), value }
    }

    /// The interval of a function of the runs' scores.
    pub fn interval(&self, f: impl Fn(&[f64]) -> f64) -> Interval {
        let mut values: Vec<f64> = self.draws.chunks(self.runs).map(&f).collect();
        values.sort_by(f64::total_cmp);
        let tail = (1.0 - CONFIDENCE) / 2.0;
        Interval { value: f(&self.value), low: quantile(&values, tail), high: quantile(&values, 1.0 - tail) }
    }
}

/// The three scores.
pub(super) struct Draws {
    pub f1: Option<Samples>,
    pub accuracy: Option<Samples>,
    pub loss: Samples,
}

impl Draws {
    /// Intervals of a function of the runs' scores, for each score.
    pub fn scores(&self, f: impl Fn(&[f64]) -> f64) -> Scores {
        Scores {
            f1: self.f1.as_ref().map(|s| s.interval(&f)),
            accuracy: self.accuracy.as_ref().map(|s| s.interval(&f)),
            loss: self.loss.interval(&f),
        }
    }
}

/// Linear between the two nearest of the sorted values, as NumPy has it.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (i, part) = (at.floor() as usize, at.fract());
    match sorted.get(i + 1) {
        Some(next) if part > 0.0 => sorted[i] + part * (next - sorted[i]),
        _ => sorted[i],
    }
}

/// A run's predictions with classes of all runs in common.
struct Run {
    predicted: Vec<u16>,
    losses: Vec<f64>,
    tokens: Vec<u32>,
}

/// Counts of one resample of one run: all that macro-F1 and accuracy need.
struct Counts {
    hits: Vec<u32>,
    predicted: Vec<u32>,
}

/// Scores all runs on the examples as they are and on `draws` resamples, which are the same for all runs.
pub(super) fn draw(runs: &[(String, Predictions)], draws: usize) -> Result<Draws> {
    let mut index: HashMap<&str, u16> = HashMap::new();
    for word in runs.iter().flat_map(|(_, p)| &p.classes) {
        let next = u16::try_from(index.len()).map_err(|_| zofo_hal::Error::invalid("there are too many classes to compare"))?;
        index.entry(word).or_insert(next);
    }
    let classes = index.len();
    let common = |p: &Predictions, class: Option<u16>| class.map_or(0, |c| index[p.classes[usize::from(c)].as_str()]);
    let first = &runs[0].1;
    let n = first.examples.len();
    let labelled = first.examples.iter().all(|e| e.truth.is_some());
    let truth: Vec<u16> = first.examples.iter().map(|e| common(first, e.truth)).collect();
    let of: Vec<Run> = runs
        .iter()
        .map(|(_, p)| Run {
            predicted: p.examples.iter().map(|e| common(p, e.predicted)).collect(),
            losses: p.examples.iter().map(|e| e.loss).collect(),
            tokens: p.examples.iter().map(|e| e.tokens).collect(),
        })
        .collect();

    let mut scorer = Scorer {
        truth: &truth,
        classes,
        labelled,
        support: vec![0; classes],
        counts: Counts { hits: vec![0; classes], predicted: vec![0; classes] },
    };
    let whole: Vec<u32> = (0..n as u32).collect();
    scorer.take(&whole);
    let (f1, accuracy, loss) = unzip(of.iter().map(|run| scorer.score(run, &whole)));
    let (mut f1, mut accuracy, mut loss) = (Samples::new(f1, draws), Samples::new(accuracy, draws), Samples::new(loss, draws));
    let mut stream = Stream::new(0, Purpose::Bootstrap, 0);
    let mut sample = whole;
    for _ in 0..draws {
        sample.iter_mut().for_each(|i| *i = stream.below(n) as u32);
        scorer.take(&sample);
        for run in &of {
            let (f, a, l) = scorer.score(run, &sample);
            f1.draws.push(f);
            accuracy.draws.push(a);
            loss.draws.push(l);
        }
    }
    Ok(Draws { f1: labelled.then_some(f1), accuracy: labelled.then_some(accuracy), loss })
}

fn unzip(scores: impl Iterator<Item = (f64, f64, f64)>) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let mut out = (Vec::new(), Vec::new(), Vec::new());
    for (a, b, c) in scores {
        out.0.push(a);
        out.1.push(b);
        out.2.push(c);
    }
    out
}

struct Scorer<'a> {
    truth: &'a [u16],
    classes: usize,
    labelled: bool,
    /// How often each class is right in the sample.
    support: Vec<u32>,
    counts: Counts,
}

impl Scorer<'_> {
    /// Takes up a sample; what follows scores runs on it.
    fn take(&mut self, sample: &[u32]) {
        if self.labelled {
            self.support.fill(0);
            sample.iter().for_each(|i| self.support[usize::from(self.truth[*i as usize])] += 1);
        }
    }

    /// Macro-F1, accuracy and loss per label token.
    fn score(&mut self, run: &Run, sample: &[u32]) -> (f64, f64, f64) {
        let (mut loss, mut tokens) = (0.0, 0u64);
        for i in sample {
            loss += run.losses[*i as usize];
            tokens += u64::from(run.tokens[*i as usize]);
        }
        let loss = if tokens == 0 { 0.0 } else { loss / tokens as f64 };
        if !self.labelled {
            return (0.0, 0.0, loss);
        }
        let Counts { hits, predicted } = &mut self.counts;
        hits.fill(0);
        predicted.fill(0);
        for i in sample {
            let (truth, said) = (self.truth[*i as usize], run.predicted[*i as usize]);
            predicted[usize::from(said)] += 1;
            hits[usize::from(said)] += u32::from(truth == said);
        }
        // As `Confusion` has it: classes that are neither right nor said do not count.
        let (mut sum, mut there, mut right) = (0.0, 0u32, 0u32);
        for class in 0..self.classes {
            let all = self.support[class] + predicted[class];
            right += hits[class];
            if all > 0 {
                there += 1;
                sum += f64::from(2 * hits[class]) / f64::from(all);
            }
        }
        (sum / f64::from(there.max(1)), f64::from(right) / sample.len() as f64, loss)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_numpy() {
        // numpy.quantile([1, 2, 4, 8], [0.025, 0.5, 0.975, 1])
        let sorted = [1.0, 2.0, 4.0, 8.0];
        for (q, value) in [(0.025, 1.075), (0.5, 3.0), (0.975, 7.7), (1.0, 8.0)] {
            assert!((quantile(&sorted, q) - value).abs() < 1e-12, "{q}");
        }
        assert_eq!(quantile(&[5.0], 0.975), 5.0);
    }
}
