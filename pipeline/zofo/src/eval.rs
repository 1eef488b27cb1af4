//! Scores of a model on examples: classes by the likelihood of their words, text by its loss.

mod metrics;

use serde::{Serialize, Serializer};
use zofo_hal::{DType, Error, ErrorKind, Result, TensorArg, Usage};
use zofo_ops::batch::Sequence;

pub use metrics::Confusion;

use crate::{
    cancel::CancelToken,
    data::Dataset,
    inference::Inference,
    tokens::{Encoder, Prompt},
};

/// Tokens of a batch at most, unless one example has more.
const BATCH_TOKENS: usize = 2048;

/// Scores on a data set.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Evaluation {
    /// Examples scored.
    pub examples: usize,
    /// Mean loss per label token, in nats.
    pub loss: f64,
    /// Macro-F1, for examples with classes.
    pub f1: Option<f64>,
    /// Share of right predictions, for examples with classes.
    pub accuracy: Option<f64>,
    /// F1 of each class that is in the examples or predicted, by its word; an object `f1_by_class` in JSON.
    #[serde(rename = "f1_by_class", serialize_with = "as_map")]
    pub classes: Vec<(String, Option<f64>)>,
}

fn as_map<S: Serializer>(pairs: &[(String, Option<f64>)], s: S) -> std::result::Result<S::Ok, S::Error> {
    s.collect_map(pairs.iter().map(|(k, v)| (k, v)))
}

/// Scores every example of `data`. A class is predicted where the sum of the log-probabilities of its word's tokens behind the prompt is the
/// largest; of equal ones, the first. The same examples give the same scores, however they are batched.
///
/// `progress` hears of each batch: examples done and in all.
///
/// # Errors
/// Those of [`Encoder`] and of the device; `Cancelled`.
pub fn evaluate(
    inference: &mut Inference,
    encoder: &Encoder<'_>,
    data: &Dataset,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Evaluation> {
    let total = data.examples.len();
    let mut sums = Sums::default();
    let mut confusion = data.classes.as_ref().map(|c| Confusion::new(c.len()));
    let single: Option<Vec<u32>> = encoder.labels().iter().map(|l| if let [id] = l[..] { Some(id) } else { None }).collect();
    let candidates = match single {
        Some(ids) if !ids.is_empty() => Some(inference.runner.constant_u32(1, ids.len(), &ids)?),
        _ => None,
    };
    let mut done = 0;
    while done < total {
        if cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, format!("the evaluation was stopped after {done} of {total} examples")));
        }
        let (mut batch, mut tokens) = (Vec::new(), 0);
        while let Some(example) = data.examples.get(done + batch.len()) {
            let item = match &confusion {
                Some(_) => Item::Prompt(encoder.prompt(example)?),
                None => Item::Text(encoder.sequence(example)?),
            };
            let n = item.tokens(encoder, candidates.is_some());
            if !batch.is_empty() && tokens + n > BATCH_TOKENS {
                break;
            }
            tokens += n;
            batch.push(item);
        }
        done += batch.len();
        score(inference, encoder, batch, candidates.as_ref(), &mut sums, confusion.as_mut())?;
        progress(done, total);
    }
    let classes = match (&data.classes, &confusion) {
        (Some(classes), Some(c)) => classes.iter().enumerate().map(|(i, class)| (class.word.clone(), c.f1(i))).collect(),
        _ => Vec::new(),
    };
    Ok(Evaluation {
        examples: total,
        loss: if sums.tokens == 0 { 0.0 } else { sums.loss / sums.tokens as f64 },
        f1: confusion.as_ref().map(Confusion::macro_f1),
        accuracy: confusion.as_ref().map(Confusion::accuracy),
        classes,
    })
}

#[derive(Default)]
struct Sums {
    loss: f64,
    tokens: usize,
}

impl Sums {
    fn add(&mut self, losses: &[f32]) {
        self.loss += losses.iter().map(|l| f64::from(*l)).sum::<f64>();
        self.tokens += losses.len();
    }
}

enum Item {
    Prompt(Prompt),
    Text(Sequence),
}

impl Item {
    /// Rows that scoring it takes.
    fn tokens(&self, encoder: &Encoder<'_>, once: bool) -> usize {
        match self {
            Self::Prompt(p) if once => p.ids.len(),
            Self::Prompt(p) => (0..encoder.labels().len()).map(|l| p.ids.len() + encoder.predicted(l)).sum(),
            Self::Text(s) => s.ids.len(),
        }
    }
}

fn score(
    inference: &mut Inference,
    encoder: &Encoder<'_>,
    batch: Vec<Item>,
    candidates: Option<&TensorArg>,
    sums: &mut Sums,
    confusion: Option<&mut Confusion>,
) -> Result<()> {
    let mut prompts = Vec::new();
    let mut texts = Vec::new();
    for item in batch {
        match item {
            Item::Prompt(p) => prompts.push(p),
            Item::Text(s) => texts.push(s),
        }
    }
    if !texts.is_empty() {
        sums.add(&inference.losses(&texts)?);
    }
    let Some(confusion) = confusion.filter(|_| !prompts.is_empty()) else { return Ok(()) };
    let count = |confusion: &mut Confusion, truth: Option<usize>, scores: &[f64]| {
        if let Some(truth) = truth {
            confusion.add(truth, best(scores));
        }
    };
    match candidates {
        Some(candidates) => {
            let (losses, scores) = candidate_scores(inference, encoder, &prompts, candidates)?;
            sums.add(&losses);
            let scores: Vec<f64> = scores.iter().map(|s| f64::from(*s)).collect();
            for (prompt, scores) in prompts.iter().zip(scores.chunks(encoder.labels().len())) {
                count(confusion, prompt.label, scores);
            }
        }
        None => {
            let words = 0..encoder.labels().len();
            let sequences: Vec<_> = prompts.iter().flat_map(|p| words.clone().map(|w| encoder.with_label(p, w))).collect();
            let losses = inference.losses(&sequences)?;
            let mut rest = losses.as_slice();
            for prompt in &prompts {
                let mut scores = Vec::with_capacity(encoder.labels().len());
                for class in words.clone() {
                    let (of_word, others) = rest.split_at(encoder.predicted(class));
                    rest = others;
                    scores.push(-of_word.iter().map(|l| f64::from(*l)).sum::<f64>());
                    if prompt.label == Some(class) {
                        sums.add(of_word);
                    }
                }
                count(confusion, prompt.label, &scores);
            }
        }
    }
    Ok(())
}

/// Losses of the right classes and logits `[prompts, classes]` of all, where each class is one token: one forward pass serves all.
fn candidate_scores(
    inference: &mut Inference,
    encoder: &Encoder<'_>,
    prompts: &[Prompt],
    candidates: &TensorArg,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let sequences: Vec<Sequence> = prompts
        .iter()
        .map(|p| {
            let mut s = Sequence::unlabelled(p.ids.clone());
            if let (Some(last), Some(label)) = (s.labels.last_mut(), p.label) {
                *last = Some(encoder.labels()[label][0]);
            }
            s
        })
        .collect();
    let (batch, host) = inference.batch(&sequences)?;
    let h = inference.hidden(&batch)?;
    let losses = inference.losses_of(&batch, &h, host.labels())?;
    let last = host.last_rows();
    let rows = inference.runner.alloc(DType::U32, 1, last.len(), Usage::Parameters)?;
    inference.runner.upload_u32(&rows, &last)?;
    let scores = inference.slice.candidate_scores(&mut inference.runner, &batch, &h, &rows, candidates)?;
    Ok((losses, inference.runner.read_f32(&scores)?))
}

/// Index of the largest score, the first of equals.
fn best(scores: &[f64]) -> usize {
    let mut best = 0;
    for (i, s) in scores.iter().enumerate() {
        if *s > scores[best] || scores[best].is_nan() {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equal_scores_wins() {
        assert_eq!(best(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(best(&[f64::NAN, 1.0, 2.0]), 2);
        assert_eq!(best(&[f64::NEG_INFINITY, f64::NAN]), 0);
    }
}
