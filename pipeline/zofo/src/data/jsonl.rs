//! Rows of JSON objects, one per line.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
};

use serde_json::{Map, Value};
use zofo_hal::{Error, Result};

use super::MAX_ROW_BYTES;

pub(super) struct JsonRows {
    lines: Lines,
    row: Map<String, Value>,
    /// Keys of the first row.
    keys: Vec<String>,
    /// Whether `row` is the first one, read for its keys and not yet given.
    ahead: bool,
}

impl JsonRows {
    pub fn new(reader: BufReader<File>) -> Result<Self> {
        let mut rows = Self { lines: Lines::new(reader), row: Map::new(), keys: Vec::new(), ahead: false };
        if !rows.advance()? {
            return Err(Error::format("it is empty; it needs one JSON object per line"));
        }
        rows.texts();
        rows.keys = rows.row.keys().cloned().collect();
        rows.ahead = true;
        Ok(rows)
    }

    pub fn keys(&self) -> &[String] {
        &self.keys
    }

    pub fn next_row(&mut self) -> Result<Option<u64>> {
        if std::mem::take(&mut self.ahead) {
            return Ok(Some(self.lines.number));
        }
        if !self.advance()? {
            return Ok(None);
        }
        self.texts();
        Ok(Some(self.lines.number))
    }

    /// Reads the next row.
    fn advance(&mut self) -> Result<bool> {
        let Some((line, text)) = self.lines.next()? else { return Ok(false) };
        match serde_json::from_slice(text) {
            Ok(Value::Object(row)) => self.row = row,
            Ok(other) => return Err(Error::format(format!("line {line}: {} where a JSON object is expected", kind(&other)))),
            Err(e) => return Err(Error::format(format!("line {line}, column {}: it is no JSON object: {}", e.column(), plain(&e)))),
        }
        Ok(true)
    }

    /// Turns numbers and truth values into text, so that every field can be borrowed.
    fn texts(&mut self) {
        for value in self.row.values_mut() {
            if let Value::Number(_) | Value::Bool(_) = value {
                *value = Value::String(value.to_string());
            }
        }
    }

    pub fn field(&self, name: &str) -> Result<&str> {
        match self.row.get(name) {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(Error::format(format!("{} where text is expected", kind(other)))),
            None => Err(Error::format("this row does not have it")),
        }
    }
}

/// The lines of a file that are not blank.
pub(super) struct Lines {
    reader: BufReader<File>,
    /// Lines read.
    number: u64,
    buffer: Vec<u8>,
}

impl Lines {
    pub fn new(reader: BufReader<File>) -> Self {
        Self { reader, number: 0, buffer: Vec::new() }
    }

    /// The next line and its number.
    pub fn next(&mut self) -> Result<Option<(u64, &[u8])>> {
        loop {
            self.buffer.clear();
            self.number += 1;
            let line = self.number;
            let limit = MAX_ROW_BYTES as u64 + 1;
            let n = (&mut self.reader).take(limit).read_until(b'\n', &mut self.buffer);
            let n = n.map_err(|e| Error::new(zofo_hal::ErrorKind::Io, format!("line {line}: {e}")))?;
            if n == 0 {
                return Ok(None);
            }
            if n as u64 == limit {
                return Err(Error::format(format!("line {line}: it is longer than {MAX_ROW_BYTES} bytes")));
            }
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(Some((line, &self.buffer)));
            }
        }
    }
}

pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The message without the place, which serde_json counts within the text it is given.
pub(super) fn plain(e: &serde_json::Error) -> String {
    let text = e.to_string();
    text.split_once(" at line").map_or(text.clone(), |(t, _)| t.to_owned())
}
