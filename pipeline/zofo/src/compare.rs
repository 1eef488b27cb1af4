//! Scores of several models on the same examples, with intervals.
//!
//! Intervals are percentile bootstrap: examples are drawn with replacement, as many as there are, and each draw is scored for all models. The
//! draws are shared (paired), so that what makes an example hard for all does not blur a difference (Efron and Tibshirani, "An introduction to
//! the bootstrap", chapter 13). The same input gives the same intervals: draws are a function of a fixed seed.
//!
//! ```no_run
//! use zofo::{compare::{CompareSpec, compare}, eval::Predictions};
//! let read = |path: &str| Predictions::read(path.as_ref());
//! let runs = [("frozen".to_owned(), read("runs/1/predictions.jsonl")?), ("full".to_owned(), read("runs/2/predictions.jsonl")?)];
//! let comparison = compare(&runs, &CompareSpec::default())?;
//! println!("{:?}", comparison.runs[1].difference);
//! # Ok::<(), zofo::Error>(())
//! ```

mod bootstrap;

use serde::Serialize;
use zofo_hal::{Error, Result};

use crate::eval::Predictions;
use bootstrap::{Draws, Samples, draw};

/// Draws of the bootstrap.
pub const RESAMPLES: usize = 10_000;

/// What the intervals hold of the draws.
pub const CONFIDENCE: f64 = 0.95;

/// What to compare, by index among the runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompareSpec {
    /// The run that differences are taken to; without one there are none.
    pub baseline: Option<usize>,
    /// Two runs, (frozen, full), whose difference each run's gain is a share of.
    pub gap: Option<(usize, usize)>,
    /// Draws.
    pub resamples: usize,
}

impl Default for CompareSpec {
    /// Differences to the first run.
    fn default() -> Self {
        Self { baseline: Some(0), gap: None, resamples: RESAMPLES }
    }
}

impl CompareSpec {
    /// Differences to `baseline`.
    pub fn baseline(mut self, baseline: usize) -> Self {
        self.baseline = Some(baseline);
        self
    }

    /// Shares of the gap between the runs `frozen` and `full`.
    pub fn gap(mut self, frozen: usize, full: usize) -> Self {
        self.gap = Some((frozen, full));
        self
    }
}

/// A number and its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// On the examples as they are.
    pub value: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl Interval {
    /// Whether 0 is within.
    pub fn contains_zero(&self) -> bool {
        self.low <= 0.0 && self.high >= 0.0
    }
}

/// Scores of one run, or differences of two.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Scores {
    /// Macro-F1, for examples with classes.
    pub f1: Option<Interval>,
    /// Share of right predictions, for examples with classes.
    pub accuracy: Option<Interval>,
    /// Mean loss per label token, in nats.
    pub loss: Interval,
}

/// Share of a gap that is closed: (x - frozen) / (full - frozen). `None` where the gap's own interval contains 0: a share of nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Share {
    /// In macro-F1.
    pub f1: Option<Interval>,
    /// In loss.
    pub loss: Option<Interval>,
}

/// One run among those compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Compared {
    /// What it is called.
    pub name: String,
    /// Its scores.
    #[serde(flatten)]
    pub scores: Scores,
    /// This run less the baseline; `None` for the baseline itself.
    pub difference: Option<Scores>,
    /// Share of the gap; `None` where no gap is asked for and for its two ends.
    pub gap_share: Option<Share>,
}

/// A gap between two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Gap {
    /// Its lower end.
    pub frozen: String,
    /// Its upper end.
    pub full: String,
    /// Full less frozen.
    #[serde(flatten)]
    pub difference: Scores,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Comparison {
    /// Examples.
    pub examples: usize,
    /// Draws.
    pub resamples: usize,
    /// What intervals hold of the draws.
    pub confidence: f64,
    /// The run that differences are to.
    pub baseline: Option<String>,
    /// The gap, where one is asked for.
    pub gap: Option<Gap>,
    /// The runs, in the order given.
    pub runs: Vec<Compared>,
}

/// Compares runs by name.
///
/// # Errors
/// `InvalidArgument` where there is no run or an index is out of range, and where two runs are not of the same examples, naming them and the
/// first that differs.
pub fn compare(runs: &[(String, Predictions)], spec: &CompareSpec) -> Result<Comparison> {
    let Some(first) = runs.first() else { return Err(Error::invalid("nothing to compare; give at least one run")) };
    let known = |i: usize| if i < runs.len() { Ok(i) } else { Err(Error::invalid(format!("there is no run {i} among {}", runs.len()))) };
    let baseline = spec.baseline.map(known).transpose()?;
    let gap = spec.gap.map(|(a, b)| Ok::<_, Error>((known(a)?, known(b)?))).transpose()?;
    if gap.is_some_and(|(a, b)| a == b) {
        return Err(Error::invalid("the gap's two ends are the same run"));
    }
    if spec.resamples == 0 {
        return Err(Error::invalid("0 draws make no interval; ask for at least 1"));
    }
    runs[1..].iter().try_for_each(|run| same_examples(first, run))?;
    let draws = draw(runs, spec.resamples)?;
    let difference = |a: usize, b: usize| draws.scores(|of| of[a] - of[b]);
    let gap_scores = gap.map(|(frozen, full)| difference(full, frozen));
    let compared = runs.iter().enumerate().map(|(i, (name, _))| Compared {
        name: name.clone(),
        scores: draws.scores(|of| of[i]),
        difference: baseline.filter(|b| *b != i).map(|b| difference(i, b)),
        gap_share: gap
            .zip(gap_scores)
            .filter(|((a, b), _)| *a != i && *b != i)
            .map(|((frozen, full), gap)| share(&draws, i, frozen, full, &gap)),
    });
    Ok(Comparison {
        examples: first.1.examples.len(),
        resamples: spec.resamples,
        confidence: CONFIDENCE,
        baseline: baseline.filter(|_| runs.len() > 1).map(|b| runs[b].0.clone()),
        runs: compared.collect(),
        gap: gap.zip(gap_scores).map(|((frozen, full), difference)| Gap {
            frozen: runs[frozen].0.clone(),
            full: runs[full].0.clone(),
            difference,
        }),
    })
}

fn share(draws: &Draws, run: usize, frozen: usize, full: usize, gap: &Scores) -> Share {
    let of = |samples: &Samples, gap: &Interval| {
        let share = samples.interval(|of| (of[run] - of[frozen]) / (of[full] - of[frozen]));
        // Where draws without any gap reach into the interval it has no end.
        (!gap.contains_zero() && share.low.is_finite() && share.high.is_finite()).then_some(share)
    };
    Share { f1: draws.f1.as_ref().zip(gap.f1.as_ref()).and_then(|(s, g)| of(s, g)), loss: of(&draws.loss, &gap.loss) }
}

/// Refuses runs that were not scored on the same examples.
fn same_examples((a_name, a): &(String, Predictions), (b_name, b): &(String, Predictions)) -> Result<()> {
    let differ = |what: String| {
        Err(Error::invalid(format!("{a_name} and {b_name} are not of the same examples ({what}); score both on the same data")))
    };
    if a.examples.len() != b.examples.len() {
        return differ(format!("{} and {}", a.examples.len(), b.examples.len()));
    }
    let word = |p: &Predictions, class: Option<u16>| class.map_or("none".to_owned(), |c| format!("`{}`", p.classes[usize::from(c)]));
    for (i, (x, y)) in a.examples.iter().zip(&b.examples).enumerate() {
        if x.line != y.line {
            return differ(format!("example {} is of line {} here and of line {} there", i + 1, x.line, y.line));
        }
        let (truth_a, truth_b) = (word(a, x.truth), word(b, y.truth));
        if truth_a != truth_b {
            return differ(format!("the class of line {} is {truth_a} here and {truth_b} there", x.line));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
