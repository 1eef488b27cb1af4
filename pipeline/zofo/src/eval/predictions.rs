//! What a model said to each example, on disk: one JSON object per line, in the order of the examples.
//!
//! `{"line":2,"truth":"World","predicted":"Sports","loss":1.25,"tokens":1}`: the line of the data file, the class and the predicted class (null for
//! text without classes), the loss summed over the example's label tokens in nats, and how many those are.

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};

use serde::{Deserialize, Serialize};
use zofo_hal::{Error, Result};

use crate::run_folder::write_atomic;

/// Longest line read, in bytes: two class words and three numbers.
const LONGEST_LINE: u64 = 1 << 16;

/// One example: what is right, what the model said. Classes are indices.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Prediction {
    /// Line of the data file the example begins on, from 1.
    pub line: u64,
    /// Its class; `None` for text.
    pub truth: Option<u16>,
    /// The class predicted; `None` for text.
    pub predicted: Option<u16>,
    /// Label tokens.
    pub tokens: u32,
    /// Loss summed over them, in nats.
    pub loss: f64,
}

/// The predictions for a data set.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Predictions {
    /// Class words, to which indices refer.
    pub classes: Vec<String>,
    /// One per example, in order.
    pub examples: Vec<Prediction>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row<'a> {
    line: u64,
    #[serde(borrow)]
    truth: Option<std::borrow::Cow<'a, str>>,
    #[serde(borrow)]
    predicted: Option<std::borrow::Cow<'a, str>>,
    /// JSON has no infinity: null.
    loss: Option<f64>,
    tokens: u32,
}

/// The file's text.
fn to_text(examples: &[Prediction], words: &[&str]) -> Result<String> {
    let mut text = String::with_capacity(examples.len() * 80);
    let word = |class: Option<u16>| class.and_then(|c| words.get(usize::from(c))).map(|w| (*w).into());
    for e in examples {
        let row = Row {
            line: e.line,
            truth: word(e.truth),
            predicted: word(e.predicted),
            loss: e.loss.is_finite().then_some(e.loss),
            tokens: e.tokens,
        };
        let row = serde_json::to_string(&row).map_err(|e| Error::format(format!("predictions: {e}")))?;
        let _ = writeln!(text, "{row}");
    }
    Ok(text)
}

/// Writes predictions whose classes are `words`. A file is replaced whole; anything else, such as a pipe, is written to.
pub(super) fn write(path: &Path, examples: &[Prediction], words: &[&str]) -> Result<()> {
    let text = to_text(examples, words)?;
    if path.exists() && !path.is_file() {
        return std::fs::write(path, text).map_err(|e| Error::io(path, e));
    }
    write_atomic(path, text.as_bytes())
}

impl Predictions {
    /// Reads a file that [`Evaluation::write_predictions`](super::Evaluation::write_predictions) wrote.
    ///
    /// # Errors
    /// `Io` where it cannot be read, `Format` with the line where it is none.
    pub fn read(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        if !file.metadata().map_err(|e| Error::io(path, e))?.is_file() {
            return Err(Error::format(format!(
                "{}: this is no file; give predictions that `zofo train` or `zofo eval` wrote",
                path.display()
            )));
        }
        Self::parse(BufReader::new(file)).map_err(|e| e.context(path.display()))
    }

    fn parse(mut lines: impl BufRead) -> Result<Self> {
        let mut out = Self::default();
        let mut index = HashMap::new();
        let mut buffer = Vec::new();
        for number in 1.. {
            buffer.clear();
            let n = lines.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut buffer);
            if n.map_err(|e| Error::new(zofo_hal::ErrorKind::Io, format!("line {number}: {e}")))? == 0 {
                break;
            }
            let bad = |what: String| Error::format(format!("line {number}: {what}"));
            let row: Row<'_> = serde_json::from_slice(&buffer).map_err(|e| {
                bad(format!("this is no prediction ({e}); give a file that `zofo train` or `zofo eval --predictions` wrote"))
            })?;
            let loss = row.loss.ok_or_else(|| bad("the loss of this example is not a number, so there is nothing to compare".into()))?;
            let mut class = |word: Option<std::borrow::Cow<'_, str>>| -> Result<Option<u16>> {
                let Some(word) = word else { return Ok(None) };
                if let Some(known) = index.get(&*word) {
                    return Ok(Some(*known));
                }
                let new = u16::try_from(out.classes.len()).map_err(|_| bad("there are too many classes".into()))?;
                out.classes.push(word.clone().into_owned());
                index.insert(word.into_owned(), new);
                Ok(Some(new))
            };
            let (truth, predicted) = (class(row.truth)?, class(row.predicted)?);
            if truth.is_some() != predicted.is_some() {
                return Err(bad("one of truth and prediction is missing".into()));
            }
            out.examples.push(Prediction { line: row.line, truth, predicted, tokens: row.tokens, loss });
        }
        if out.examples.is_empty() {
            return Err(Error::format("it holds no predictions"));
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> impl Strategy<Value = Prediction> {
        (1u64.., 0u16..3, 0u16..3, 1u32..9, -1e9..1e9).prop_map(|(line, truth, predicted, tokens, loss)| Prediction {
            line,
            truth: Some(truth),
            predicted: Some(predicted),
            tokens,
            loss,
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(examples in prop::collection::vec(example(), 1..20)) {
            let words = ["a \"b\"", "ü\n", "c"];
            let read = Predictions::parse(to_text(&examples, &words).unwrap().as_bytes()).unwrap();
            let word = |list: &[&str], c: Option<u16>| list[usize::from(c.unwrap())].to_owned();
            let known: Vec<&str> = read.classes.iter().map(String::as_str).collect();
            for (a, b) in examples.iter().zip(&read.examples) {
                prop_assert_eq!((a.line, a.tokens, a.loss.to_bits()), (b.line, b.tokens, b.loss.to_bits()));
                prop_assert_eq!(word(&words, a.truth), word(&known, b.truth));
                prop_assert_eq!(word(&words, a.predicted), word(&known, b.predicted));
            }
            prop_assert_eq!(examples.len(), read.examples.len());
        }
    }

    #[test]
    fn text_has_no_classes() {
        let text = Prediction { line: 1, truth: None, predicted: None, tokens: 7, loss: 3.5 };
        let written = to_text(&[text], &[]).unwrap();
        assert_eq!(written, "{\"line\":1,\"truth\":null,\"predicted\":null,\"loss\":3.5,\"tokens\":7}\n");
        assert_eq!(Predictions::parse(written.as_bytes()).unwrap().examples, [text]);
    }

    #[test]
    fn what_is_none_is_refused_with_its_line() {
        let row = |truth: &str, loss: &str| format!("{{\"line\":1,\"truth\":{truth},\"predicted\":\"a\",\"loss\":{loss},\"tokens\":1}}\n");
        for (text, part) in [
            (String::new(), "no predictions"),
            ("label,text\n".into(), "line 1: this is no prediction"),
            (row("\"a\"", "1.0") + "{\"step\":1}\n", "line 2: this is no prediction"),
            (row("\"a\"", "null"), "line 1: the loss"),
            (row("null", "1.0"), "line 1: one of truth"),
            ("x".repeat(1 << 17), "line 1: "),
        ] {
            let e = Predictions::parse(text.as_bytes()).unwrap_err();
            assert!(e.message().contains(part), "{e}");
        }
    }
}
