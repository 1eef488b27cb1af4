//! MultiRC (Khashabi et al., NAACL 2018): a passage, questions about it, and candidate answers that are right or wrong.
//!
//! A line is a passage, as SuperGLUE has it: `{"passage": {"text", "questions": [{"question", "answers": [{"text", "label"}]}]}}`. The names of the
//! original release, `paragraph` and `isAnswer`, are read too.

use std::{fs::File, io::BufReader};

use serde::{Deserialize, Deserializer, de};
use serde_json::Value;
use zofo_hal::{Error, Result};

use super::{
    jsonl::{Lines, kind, plain},
    nested::{Group, Groups},
};

pub(super) struct MultiRc {
    lines: Lines,
}

#[derive(Deserialize)]
struct Line {
    #[serde(alias = "paragraph")]
    passage: Passage,
}

#[derive(Deserialize)]
struct Passage {
    text: String,
    questions: Vec<Question>,
}

#[derive(Deserialize)]
struct Question {
    question: String,
    answers: Vec<Answer>,
}

#[derive(Deserialize)]
struct Answer {
    text: String,
    /// Absent from test files.
    #[serde(alias = "isAnswer", default)]
    label: Option<Label>,
}

/// `0` or `1`, or what else stands there.
struct Label(String);

impl<'de> Deserialize<'de> for Label {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        match Value::deserialize(d)? {
            Value::Bool(right) => Ok(Self(u8::from(right).to_string())),
            Value::Number(n) => Ok(Self(n.to_string())),
            Value::String(text) => Ok(Self(text)),
            other => Err(de::Error::custom(format!("{} where a label is expected", kind(&other)))),
        }
    }
}

impl MultiRc {
    pub fn new(reader: BufReader<File>) -> Self {
        Self { lines: Lines::new(reader) }
    }
}

impl Groups for MultiRc {
    fn columns(&self) -> &'static [&'static str] {
        &["passage", "question", "answer", "label"]
    }

    fn next_group(&mut self) -> Result<Option<Group>> {
        let Some((line, text)) = self.lines.next()? else { return Ok(None) };
        let Line { passage } = serde_json::from_slice(text).map_err(|e| {
            Error::format(format!(
                "line {line}, column {}: it is no passage with questions and answers (MultiRC): {}",
                e.column(),
                plain(&e)
            ))
        })?;
        let rows = passage.questions.into_iter().flat_map(|Question { question, answers }| {
            let row = move |a: Answer| vec![Some(question.clone()), Some(a.text), a.label.map(|l| l.0)];
            answers.into_iter().map(row)
        });
        Ok(Some(Group { line, text: passage.text, rows: rows.collect() }))
    }
}
