//! JSON objects of bounded size, with errors that name the file and the key.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};
use zofo_hal::{Error, ErrorKind, Result};

/// Reads a file of at most `limit` bytes.
pub(super) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let io = |e| Error::io(path, e);
    let file = File::open(path).map_err(io)?;
    let mut bytes = Vec::new();
    // One byte more than allowed tells a full file from one that is too long, also where the size is not known beforehand.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(Error::format(format!(
            "{}: larger than {limit} bytes, which is more than such a file needs; check that it is the right file",
            path.display()
        )));
    }
    Ok(bytes)
}

/// A JSON object and the file it came from.
pub(super) struct Object {
    name: PathBuf,
    map: Map<String, Value>,
}

impl Object {
    /// Reads the file.
    pub(super) fn read(path: &Path, limit: u64) -> Result<Self> {
        Self::parse(path, &read_limited(path, limit)?)
    }

    /// Parses the bytes; `name` is for errors.
    pub(super) fn parse(name: &Path, bytes: &[u8]) -> Result<Self> {
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(map)) => Ok(Self { name: name.to_owned(), map }),
            Ok(_) => Err(Error::format(format!("{}: not a JSON object", name.display()))),
            Err(e) => Err(Error::format(format!("{}: not valid JSON ({e}); it may be cut short, fetch it again", name.display()))),
        }
    }

    /// An object inside this one, or `None` where the key is absent or null.
    pub(super) fn object(&self, key: &str) -> Result<Option<Object>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Object { name: self.name.clone(), map: map.clone() })),
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    /// The value of a key; absent and null are the same.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.map.iter().map(|(k, v)| (k.as_str(), v))
    }

    pub(super) fn count(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_u64().and_then(|n| usize::try_from(n).ok()).map(Some).ok_or_else(|| self.wrong(key, "a whole number", value))
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(|n| Some(n as f32)).ok_or_else(|| self.wrong(key, "a number", value))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(key, "true or false", value))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, "a string", value))
    }

    /// `value`, or an error that the key is missing.
    pub(super) fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.error(format!("`{key}` is missing")))
    }

    /// A `Format` error about this file.
    #[cold]
    pub(super) fn error(&self, message: impl std::fmt::Display) -> Error {
        Error::format(format!("{}: {message}", self.name.display()))
    }

    /// An `Unsupported` error about this file.
    #[cold]
    pub(super) fn unsupported(&self, message: impl std::fmt::Display) -> Error {
        Error::new(ErrorKind::Unsupported, format!("{}: {message}", self.name.display()))
    }

    /// An error that `key` holds the wrong kind of value.
    #[cold]
    pub(super) fn wrong(&self, key: &str, wanted: &str, found: &Value) -> Error {
        self.error(format!("`{key}` must be {wanted}, not {}", brief(found)))
    }
}

/// A value as shown in an error: hostile ones may be long.
pub(super) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}
