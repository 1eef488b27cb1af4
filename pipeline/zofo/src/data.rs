//! Training and test data: CSV, JSONL, SQuAD or MultiRC files, a prompt template over their columns, and labels that are words or answers that
//! are text.
//!
//! A file is read row by row; what is kept is the text that the template asks for. An error names the file and the line.
//!
//! ```no_run
//! use zofo::data::{Classes, DataSpec};
//! let classes: Classes = "World,Sports,Business,Sci/Tech".parse()?;
//! let data = DataSpec::new("train.csv").template("{content}\nTopic:")?.labels("label", classes).load()?;
//! # Ok::<(), zofo::Error>(())
//! ```

mod classes;
mod csv;
#[cfg(feature = "embedded")]
mod embedded;
mod json_stream;
mod jsonl;
mod multirc;
mod nested;
mod rows;
mod squad;
mod template;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use zofo_hal::{Error, Result};

pub use classes::{Class, Classes};
pub use template::Template;

use crate::shuffle::{Purpose, Reservoir, Stream, permutation};
use classes::Resolver;
use rows::Rows;

/// Longest field read, in bytes: a longer one is a missing quote or no text.
pub const MAX_FIELD_BYTES: usize = 1 << 20;
/// Longest row read, in bytes.
pub const MAX_ROW_BYTES: usize = 8 << 20;
/// Most examples kept of one file.
pub const MAX_EXAMPLES: usize = 1 << 24;

/// A file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Format {
    /// Comma-separated values with a header line (RFC 4180).
    Csv,
    /// Tab-separated values with a header line.
    Tsv,
    /// One JSON object per line.
    Jsonl,
    /// SQuAD's JSON: a row for each question, with the columns `context`, `question`, `answer` (the first of several, empty where the question has
    /// none) and `id`.
    Squad,
    /// MultiRC's JSON lines, a passage each: a row for each candidate answer, with the columns `passage`, `question`, `answer` and `label`.
    MultiRc,
    /// The data of `embedded`, which are in no file.
    #[cfg(feature = "embedded")]
    Embedded,
}

impl Format {
    /// All names, as on the command line.
    pub const ALL: [(&'static str, Self); 5] =
        [("csv", Self::Csv), ("tsv", Self::Tsv), ("jsonl", Self::Jsonl), ("squad", Self::Squad), ("multirc", Self::MultiRc)];

    /// The format that a file's name says it has.
    ///
    /// # Errors
    /// `InvalidArgument` that lists the formats.
    pub fn of(path: &Path) -> Result<Self> {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
        match extension.as_str() {
            "csv" => Ok(Self::Csv),
            "tsv" => Ok(Self::Tsv),
            "jsonl" | "ndjson" => Ok(Self::Jsonl),
            "json" => Ok(Self::Squad),
            _ => Err(Error::invalid(format!(
                "{}: its name does not end in .csv, .tsv, .jsonl or .json (SQuAD); say which of csv, tsv, jsonl, squad and multirc it is",
                path.display()
            ))),
        }
    }
}

/// Where data are and what they mean.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DataSpec {
    /// The file.
    pub path: PathBuf,
    /// Its format; `None` goes by the name's extension.
    pub format: Option<Format>,
    /// The column that `{text}` stands for in the template.
    pub text_column: Option<String>,
    /// What the model reads; `None` is the text column alone, or followed by a line `Label:` or `Answer:` where there are such.
    pub template: Option<Template>,
    /// The column with the label; `None` trains on answers, or on the text itself.
    pub label_column: Option<String>,
    /// The column with the text that should follow the prompt, for answers that are no classes.
    #[serde(default)]
    pub answer_column: Option<String>,
    /// The words that are scored as classes; `None` takes the words that are in the label column.
    pub classes: Option<Classes>,
    /// At most so many rows: a random sample, because many files are sorted by label.
    pub limit: Option<usize>,
    /// Decides the sample.
    pub seed: u64,
}

impl DataSpec {
    /// The data in `path`: its column `text`, no labels, all rows.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            format: None,
            text_column: None,
            template: None,
            label_column: None,
            answer_column: None,
            classes: None,
            limit: None,
            seed: 0,
        }
    }

    /// Sets the template.
    ///
    /// # Errors
    /// Those of [`Template::parse`].
    pub fn template(mut self, template: &str) -> Result<Self> {
        self.template = Some(Template::parse(template)?);
        Ok(self)
    }

    /// Sets the column that `{text}` stands for.
    pub fn text(mut self, column: impl Into<String>) -> Self {
        self.text_column = Some(column.into());
        self
    }

    /// Sets the label column and the classes.
    pub fn labels(mut self, column: impl Into<String>, classes: Classes) -> Self {
        self.label_column = Some(column.into());
        self.classes = Some(classes);
        self
    }

    /// Sets the column with the text that should follow the prompt.
    pub fn answer(mut self, column: impl Into<String>) -> Self {
        self.answer_column = Some(column.into());
        self
    }

    /// Sets the format, where the file's name does not say it.
    pub fn format(mut self, format: Format) -> Self {
        self.format = Some(format);
        self
    }

    /// Takes a random sample of at most `rows` rows.
    pub fn limit(mut self, rows: usize) -> Self {
        self.limit = Some(rows);
        self
    }

    /// What the data are called, where they are in no file.
    pub fn name(&self) -> Option<&'static str> {
        match self.format {
            #[cfg(feature = "embedded")]
            Some(Format::Embedded) => Some(crate::embedded::NAME),
            _ => None,
        }
    }

    /// Reads the file.
    ///
    /// # Errors
    /// `Io` where it cannot be read; `InvalidArgument` for a column that it does not have, with those it has, and for classes without a label
    /// column or beside an answer column; `Format` for a malformed row or a label that is no class, with file and line, and for a file without rows.
    pub fn load(&self) -> Result<Dataset> {
        self.read().map_err(|e| e.context(self.path.display()))
    }

    fn read(&self) -> Result<Dataset> {
        if self.limit == Some(0) {
            return Err(Error::invalid("a limit of 0 rows leaves nothing to read; give at least 1"));
        }
        let format = match self.format {
            Some(format) => format,
            None => Format::of(&self.path)?,
        };
        let mut rows = Rows::open(&self.path, format)?;
        let template = self.resolved_template(&rows)?;
        let text_column = self.text_column.as_deref();
        let columns = template.columns().map(|c| rows.column(template.resolve(c, text_column))).collect::<Result<Vec<_>>>()?;
        let label = self.label_column.as_deref().map(|c| rows.column(c)).transpose()?;
        let answer = self.answer_column.as_deref().map(|c| rows.column(c)).transpose()?;
        if label.is_some() && answer.is_some() {
            return Err(Error::invalid(
                "a label column and an answer column are given; a label is one of a few classes, an answer is any text",
            ));
        }
        if label.is_none() && self.classes.is_some() {
            return Err(Error::invalid(format!("classes are given but no label column; name it, the columns are: {}", rows.columns())));
        }
        let mut resolver = label.is_some().then(|| Resolver::new(self.classes.clone()));
        let mut kept = Reservoir::new(self.limit.unwrap_or(MAX_EXAMPLES + 1), Stream::new(self.seed, Purpose::Sample, 0));
        let mut count = 0usize;
        while let Some(line) = rows.next_row()? {
            let fields = columns.iter().map(|c| rows.field(c, line)).collect::<Result<Vec<_>>>()?;
            let label = match (&label, &mut resolver) {
                (Some(column), Some(resolver)) => {
                    let value = rows.field(column, line)?;
                    Some(resolver.note(value, line).map_err(|e| e.context(format_args!("line {line}")))?)
                }
                _ => None,
            };
            let answer = answer.as_ref().map(|column| rows.field(column, line)).transpose()?;
            count += 1;
            if self.limit.is_none() && count > MAX_EXAMPLES {
                return Err(Error::invalid(format!("it has more than {MAX_EXAMPLES} rows; give a limit, which takes a random sample")));
            }
            kept.push((fields.into_iter().map(str::to_owned).collect::<Vec<_>>(), label, answer.map(str::to_owned), line));
        }
        if count == 0 {
            return Err(Error::format("it has no rows; it needs at least one example (behind the header line, in CSV)"));
        }
        let (classes, meaning) = resolver.map(Resolver::finish).transpose()?.unzip();
        let examples = kept.finish().into_iter().map(|(fields, noted, answer, line)| {
            let label = noted.map(|n| meaning.as_ref().map_or(0, |m: &Vec<usize>| m[n]));
            Example { fields, label, answer, line }
        });
        Ok(Dataset { name: self.path.display().to_string(), template, classes, examples: examples.collect() })
    }

    fn resolved_template(&self, rows: &Rows) -> Result<Template> {
        if let Some(t) = &self.template {
            return Ok(t.clone());
        }
        if self.text_column.is_none() && !rows.has_column(Template::TEXT) {
            return Err(Error::invalid(format!(
                "say which column holds the text, or give a template such as \"{{title}}\\nTopic:\"; the columns are: {}",
                rows.columns()
            )));
        }
        Template::parse(match (&self.label_column, &self.answer_column) {
            (Some(_), _) => "{text}\nLabel:",
            (None, Some(_)) => "{text}\nAnswer:",
            (None, None) => "{text}",
        })
    }
}

/// The names of a file's columns, in order.
///
/// # Errors
/// `Io` where it cannot be read, `Format` where its first row is malformed.
pub fn columns(path: &Path, format: Format) -> Result<Vec<String>> {
    let rows = Rows::open(path, format).map_err(|e| e.context(path.display()))?;
    Ok(rows.names().to_vec())
}

/// One example: what the template asks for of a row, and its label.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Example {
    /// Text for each column of the template, in its order.
    pub fields: Vec<String>,
    /// Index of its class.
    pub label: Option<usize>,
    /// The text that should follow the prompt; `None` for classes, and for text that is learnt itself.
    pub answer: Option<String>,
    /// Line of the file it begins on, from 1.
    pub line: u64,
}

/// Examples in memory.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Dataset {
    /// What errors call it.
    pub name: String,
    /// How fields become a prompt.
    pub template: Template,
    /// The classes, for labelled data.
    pub classes: Option<Classes>,
    /// The examples, in the order of the file.
    pub examples: Vec<Example>,
}

impl Dataset {
    /// Splits off `held_out` random examples; both parts keep the order of the file. At least one example stays on each side.
    ///
    /// # Errors
    /// `InvalidArgument` where there are too few examples.
    pub fn split(self, held_out: usize, seed: u64) -> Result<(Self, Self)> {
        let n = self.examples.len();
        if n < 2 {
            return Err(Error::invalid(format!(
                "{}: {n} example cannot be divided into training and held-out data; give more rows, or evaluation data of their own",
                self.name
            )));
        }
        let held_out = held_out.clamp(1, n - 1);
        let mut out = vec![false; n];
        for i in permutation(n, Stream::new(seed, Purpose::HeldOut, 0)).into_iter().take(held_out) {
            out[i] = true;
        }
        let part = |wanted: bool| {
            let examples = self.examples.iter().zip(&out).filter(|(_, o)| **o == wanted).map(|(e, _)| e.clone()).collect();
            Self { name: self.name.clone(), template: self.template.clone(), classes: self.classes.clone(), examples }
        };
        Ok((part(false), part(true)))
    }
}
