//! SQuAD (Rajpurkar et al., EMNLP 2016), versions 1.1 and 2.0: `{"data": [{"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}]}]}]}]}`.
//!
//! A paragraph at a time is in memory.

use std::{fs::File, io::BufReader};

use serde::Deserialize;
use serde_json::Value;
use zofo_hal::{Error, Result};

use super::{
    json_stream::JsonStream,
    nested::{Group, Groups},
};

pub(super) struct Squad {
    json: JsonStream<BufReader<File>>,
    place: Place,
    /// Whether `data` was there.
    found: bool,
}

/// Where reading is.
enum Place {
    Start,
    Document,
    Articles,
    Article,
    Paragraphs,
    End,
}

#[derive(Deserialize)]
struct Paragraph {
    context: String,
    qas: Vec<Question>,
}

#[derive(Deserialize)]
struct Question {
    question: String,
    #[serde(default)]
    id: Option<Value>,
    answers: Vec<Answer>,
}

#[derive(Deserialize)]
struct Answer {
    text: String,
}

impl Squad {
    pub fn new(reader: BufReader<File>) -> Self {
        Self { json: JsonStream::new(reader), place: Place::Start, found: false }
    }

    fn paragraph(&mut self) -> Result<Option<(u64, Paragraph)>> {
        loop {
            match self.place {
                Place::Start => {
                    self.json.open(b'{')?;
                    self.place = Place::Document;
                }
                Place::Document => match self.json.key()?.as_deref() {
                    Some("data") => {
                        self.json.open(b'[')?;
                        (self.place, self.found) = (Place::Articles, true);
                    }
                    Some(_) => self.json.skip()?,
                    None => {
                        self.json.end()?;
                        self.place = Place::End;
                    }
                },
                Place::Articles if self.json.element()? => {
                    self.json.open(b'{')?;
                    self.place = Place::Article;
                }
                Place::Articles => self.place = Place::Document,
                Place::Article => match self.json.key()?.as_deref() {
                    Some("paragraphs") => {
                        self.json.open(b'[')?;
                        self.place = Place::Paragraphs;
                    }
                    Some(_) => self.json.skip()?,
                    None => self.place = Place::Articles,
                },
                Place::Paragraphs if self.json.element()? => {
                    return self.json.value().map(Some);
                }
                Place::Paragraphs => self.place = Place::Article,
                Place::End if self.found => return Ok(None),
                Place::End => return Err(Error::format("it has no `data`, the list of articles that a SQuAD file has")),
            }
        }
    }
}

impl Groups for Squad {
    fn columns(&self) -> &'static [&'static str] {
        &["context", "question", "answer", "id"]
    }

    fn next_group(&mut self) -> Result<Option<Group>> {
        let Some((line, paragraph)) = self.paragraph()? else { return Ok(None) };
        let row = |q: Question| {
            // Version 2.0 has questions without an answer.
            let answer = q.answers.into_iter().next().map_or_else(String::new, |a| a.text);
            let id = q.id.map(|id| id.as_str().map_or_else(|| id.to_string(), str::to_owned));
            vec![Some(q.question), Some(answer), id]
        };
        Ok(Some(Group { line, text: paragraph.context, rows: paragraph.qas.into_iter().map(row).collect() }))
    }
}
