//! Rows of a file, one at a time, whatever its format.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};

use zofo_hal::{Error, Result};

use super::{
    Format, MAX_FIELD_BYTES,
    csv::CsvRows,
    jsonl::JsonRows,
    multirc::MultiRc,
    nested::{Groups, NestedRows},
    squad::Squad,
};

/// A column: where it is in a CSV row, what it is called in JSON.
pub(super) struct Column {
    pub name: String,
    pub index: usize,
}

pub(super) enum Rows {
    Csv(Box<CsvRows>),
    Jsonl(Box<JsonRows>),
    Nested(Box<NestedRows>),
}

impl Rows {
    /// Opens a file and reads what says which columns it has.
    pub fn open(path: &Path, format: Format) -> Result<Self> {
        let nested = |source: Box<dyn Groups>| Self::Nested(Box::new(NestedRows::new(source)));
        Ok(match format {
            Format::Csv => Self::Csv(Box::new(CsvRows::new(open(path)?, b',')?)),
            Format::Tsv => Self::Csv(Box::new(CsvRows::new(open(path)?, b'\t')?)),
            Format::Jsonl => Self::Jsonl(Box::new(JsonRows::new(open(path)?)?)),
            Format::Squad => nested(Box::new(Squad::new(open(path)?))),
            Format::MultiRc => nested(Box::new(MultiRc::new(open(path)?))),
            #[cfg(feature = "embedded")]
            Format::Embedded => nested(Box::new(super::embedded::EmbeddedLines::open(path)?)),
        })
    }

    /// Names of the columns.
    pub fn names(&self) -> &[String] {
        match self {
            Self::Csv(rows) => rows.header(),
            Self::Jsonl(rows) => rows.keys(),
            Self::Nested(rows) => rows.columns(),
        }
    }

    /// The columns, for messages.
    pub fn columns(&self) -> String {
        let mut shown: Vec<String> = self.names().iter().take(40).map(|n| n.chars().take(60).collect()).collect();
        if self.names().len() > shown.len() {
            shown.push("...".into());
        }
        shown.join(", ")
    }

    pub fn has_column(&self, name: &str) -> bool {
        self.names().iter().any(|n| n == name)
    }

    /// The column called `name`.
    pub fn column(&self, name: &str) -> Result<Column> {
        let found = self.names().iter().position(|n| n == name);
        let index = found.ok_or_else(|| Error::invalid(format!("it has no column `{name}`; the columns are: {}", self.columns())))?;
        Ok(Column { name: name.to_owned(), index })
    }

    /// Goes to the next row and gives the line it begins on.
    pub fn next_row(&mut self) -> Result<Option<u64>> {
        match self {
            Self::Csv(rows) => rows.next_row(),
            Self::Jsonl(rows) => rows.next_row(),
            Self::Nested(rows) => rows.next_row(),
        }
    }

    /// The text of a column in this row, which begins on `line`.
    pub fn field(&self, column: &Column, line: u64) -> Result<&str> {
        let text = match self {
            Self::Csv(rows) => rows.field(column.index),
            Self::Jsonl(rows) => rows.field(&column.name),
            Self::Nested(rows) => rows.field(column.index),
        };
        let text = text.map_err(|e| e.context(format_args!("line {line}, column `{}`", column.name)))?;
        if text.len() > MAX_FIELD_BYTES {
            return Err(Error::format(format!(
                "line {line}, column `{}`: {} bytes of text, more than {MAX_FIELD_BYTES}; is a quote missing before it?",
                column.name,
                text.len()
            )));
        }
        Ok(text)
    }
}

fn open(path: &Path) -> Result<BufReader<File>> {
    let error = |e| Error::new(zofo_hal::ErrorKind::Io, format!("it cannot be read: {e}"));
    // Asked first: opening a pipe waits for who writes to it.
    let kind = std::fs::metadata(path).map_err(error)?.file_type();
    if !kind.is_file() {
        let what = if kind.is_dir() { "a folder" } else { "no plain file, and data are read more than once" };
        return Err(Error::new(
            zofo_hal::ErrorKind::Io,
            format!("it is {what}; give a file in CSV, TSV, JSONL, SQuAD's or MultiRC's JSON"),
        ));
    }
    let file = File::open(path).map_err(error)?;
    skip_bom(BufReader::with_capacity(1 << 16, file))
}

/// Leaves a UTF-8 byte order mark out and refuses others.
fn skip_bom<R: Read>(mut reader: BufReader<R>) -> Result<BufReader<R>> {
    let start = reader.fill_buf().map_err(|e| Error::new(zofo_hal::ErrorKind::Io, format!("it cannot be read: {e}")))?;
    match start {
        [0xef, 0xbb, 0xbf, ..] => reader.consume(3),
        [0xfe, 0xff, ..] | [0xff, 0xfe, ..] => return Err(Error::format("it is in UTF-16; save it as UTF-8")),
        _ => {}
    }
    Ok(reader)
}
