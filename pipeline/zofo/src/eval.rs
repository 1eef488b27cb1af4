//! Scores of a model on examples: classes by the likelihood of their words, text by its loss.

mod metrics;
mod predictions;

use std::{path::Path, sync::Arc};

use serde::{Serialize, Serializer};
use zofo_hal::{DType, Error, ErrorKind, Result, TensorArg, Usage};
use zofo_ops::batch::{MicroBatch, Sequence};

pub use metrics::Confusion;
pub use predictions::{Prediction, Predictions};

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
    /// What was said to each example, in order; not in JSON.
    #[serde(skip)]
    pub predictions: Arc<[Prediction]>,
}

impl Evaluation {
    /// Writes the predictions, one JSON object per line ([`Predictions::read`] reads them).
    ///
    /// # Errors
    /// `Io`.
    pub fn write_predictions(&self, path: &Path) -> Result<()> {
        let words: Vec<&str> = self.classes.iter().map(|(word, _)| word.as_str()).collect();
        predictions::write(path, &self.predictions, &words)
    }
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
    let mut said: Vec<Prediction> = Vec::with_capacity(total);
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
            let item = match &data.classes {
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
        let lines = data.examples[done..done + batch.len()].iter().map(|e| e.line);
        done += batch.len();
        let scored = score(inference, encoder, batch, candidates.as_ref())?;
        said.extend(lines.zip(scored).map(|(line, s)| s.at(line)));
        progress(done, total);
    }
    let confusion = data.classes.as_ref().map(|c| Confusion::of(c.len(), &said));
    let (loss, tokens) = said.iter().fold((0.0, 0u64), |(loss, tokens), p| (loss + p.loss, tokens + u64::from(p.tokens)));
    let classes = match (&data.classes, &confusion) {
        (Some(classes), Some(c)) => classes.iter().enumerate().map(|(i, class)| (class.word.clone(), c.f1(i))).collect(),
        _ => Vec::new(),
    };
    Ok(Evaluation {
        examples: total,
        loss: if tokens == 0 { 0.0 } else { loss / tokens as f64 },
        f1: confusion.as_ref().map(Confusion::macro_f1),
        accuracy: confusion.as_ref().map(Confusion::accuracy),
        classes,
        predictions: said.into(),
    })
}

/// What was said to an example.
struct Scored {
    truth: Option<usize>,
    predicted: Option<usize>,
    tokens: usize,
    loss: f64,
}

impl Scored {
    fn new(losses: &[f32], truth: Option<usize>, predicted: Option<usize>) -> Self {
        Self { truth, predicted, tokens: losses.len(), loss: losses.iter().map(|l| f64::from(*l)).sum() }
    }

    fn at(self, line: u64) -> Prediction {
        // There are at most `Classes::MAX` classes and a context of labels.
        let class = |c: Option<usize>| c.map(|c| c as u16);
        Prediction { line, truth: class(self.truth), predicted: class(self.predicted), tokens: self.tokens as u32, loss: self.loss }
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
            Self::Prompt(p) => carriers(encoder).into_iter().map(|class| p.ids.len() + encoder.predicted(class)).sum(),
            Self::Text(s) => s.ids.len(),
        }
    }
}

/// Scores a batch, whose items are all prompts or all texts.
fn score(inference: &mut Inference, encoder: &Encoder<'_>, batch: Vec<Item>, candidates: Option<&TensorArg>) -> Result<Vec<Scored>> {
    let mut prompts = Vec::new();
    let mut texts = Vec::new();
    for item in batch {
        match item {
            Item::Prompt(p) => prompts.push(p),
            Item::Text(s) => texts.push(s),
        }
    }
    if !texts.is_empty() {
        let losses = inference.losses(&texts)?;
        let mut rest = losses.as_slice();
        let of = |s: &Sequence| Scored::new(split_off(&mut rest, s.labels.iter().flatten().count()), None, None);
        return Ok(texts.iter().map(of).collect());
    }
    if prompts.is_empty() {
        return Ok(Vec::new());
    }
    let classes = encoder.labels().len();
    if let Some(candidates) = candidates {
        let (losses, scores) = candidate_scores(inference, encoder, &prompts, candidates)?;
        let mut rest = losses.as_slice();
        let scored = prompts.iter().zip(scores.chunks(classes)).map(|(prompt, scores)| {
            let scores: Vec<f64> = scores.iter().map(|s| f64::from(*s)).collect();
            Scored::new(split_off(&mut rest, prompt.label.iter().count()), prompt.label, Some(best(&scores)))
        });
        return Ok(scored.collect());
    }
    let losses = word_losses(inference, encoder, &prompts)?;
    let scored = prompts.iter().zip(losses).map(|(prompt, words)| {
        let scores: Vec<f64> = words.iter().map(|of_word| -of_word.iter().map(|l| f64::from(*l)).sum::<f64>()).collect();
        Scored::new(prompt.label.map_or(&[], |label| &words[label]), prompt.label, Some(best(&scores)))
    });
    Ok(scored.collect())
}

/// Classes whose words are run through the model behind each prompt: those of several tokens. A word of one token is read off the last row of the
/// prompt, which any of them has.
fn carriers(encoder: &Encoder<'_>) -> Vec<usize> {
    (0..encoder.labels().len()).filter(|class| encoder.predicted(*class) > 1).collect()
}

/// Losses of the tokens of every class's word, by prompt and class. Some word has several tokens.
fn word_losses(inference: &mut Inference, encoder: &Encoder<'_>, prompts: &[Prompt]) -> Result<Vec<Vec<Vec<f32>>>> {
    let carriers = carriers(encoder);
    let sequences: Vec<_> = prompts.iter().flat_map(|p| carriers.iter().map(|c| encoder.with_label(p, *c))).collect();
    let (batch, host) = inference.batch(&sequences)?;
    let h = inference.hidden(&batch)?;
    let losses = inference.losses_of(&batch, &h, host.labels())?;
    let mut rest = losses.as_slice();
    let mut by_prompt = vec![vec![Vec::new(); encoder.labels().len()]; prompts.len()];
    for words in &mut by_prompt {
        for class in &carriers {
            words[*class] = split_off(&mut rest, encoder.predicted(*class)).to_vec();
        }
    }
    // A row has one target at a time, so each of the other words is looked up on its own: one row of the head per prompt.
    let last = |(i, prompt): (usize, &Prompt)| host.cu_seqlens[i * carriers.len()] + prompt.ids.len() as u32 - 1;
    let rows: Vec<u32> = prompts.iter().enumerate().map(last).collect();
    for (class, ids) in encoder.labels().iter().enumerate() {
        let [id] = ids[..] else { continue };
        let relabelled = MicroBatch { label_rows: rows.clone(), targets: vec![id; rows.len()], ..host.clone() };
        let batch = inference.upload(&relabelled)?;
        let losses = inference.losses_of(&batch, &h, rows.len())?;
        for (words, loss) in by_prompt.iter_mut().zip(losses) {
            words[class] = vec![loss];
        }
    }
    Ok(by_prompt)
}

/// Takes the first `n` of what is left.
fn split_off<'a>(rest: &mut &'a [f32], n: usize) -> &'a [f32] {
    let (first, others) = rest.split_at(n);
    *rest = others;
    first
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
