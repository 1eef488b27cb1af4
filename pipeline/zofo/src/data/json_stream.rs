//! A JSON document of any size, read from its beginning: the outer levels are walked through, values inside are read one at a time.

use std::io::BufRead;

use serde::de::{DeserializeOwned, IgnoredAny};
use zofo_hal::{Error, ErrorKind, Result};

use super::{MAX_ROW_BYTES, jsonl::plain};

/// Lists and objects inside each other at most, in one value.
const MAX_DEPTH: u32 = u128::BITS;

pub(super) struct JsonStream<R> {
    reader: R,
    line: u64,
    column: u64,
    /// For each open list or object, whether nothing was read of it yet.
    fresh: Vec<bool>,
    buffer: Vec<u8>,
}

impl<R: BufRead> JsonStream<R> {
    pub fn new(reader: R) -> Self {
        Self { reader, line: 1, column: 1, fresh: Vec::new(), buffer: Vec::new() }
    }

    /// Goes into a list (`[`) or an object (`{`).
    pub fn open(&mut self, bracket: u8) -> Result<()> {
        self.expect(bracket)?;
        self.fresh.push(true);
        Ok(())
    }

    /// Goes to the next element of the list; `false` at its end.
    pub fn element(&mut self) -> Result<bool> {
        self.more(b']')
    }

    /// Goes to the next value of the object and gives its key; `None` at its end.
    pub fn key(&mut self) -> Result<Option<String>> {
        if !self.more(b'}')? {
            return Ok(None);
        }
        let (_, key) = self.value()?;
        self.expect(b':')?;
        Ok(Some(key))
    }

    /// Reads a value and says on which line it begins.
    pub fn value<T: DeserializeOwned>(&mut self) -> Result<(u64, T)> {
        self.blank()?;
        let (line, column) = (self.line, self.column);
        self.capture()?;
        let value = serde_json::from_slice(&self.buffer).map_err(|e| {
            let column = if e.line() == 1 { column + e.column().saturating_sub(1) as u64 } else { e.column() as u64 };
            Error::format(format!("line {}, column {column}: {}", line + e.line().saturating_sub(1) as u64, plain(&e)))
        })?;
        Ok((line, value))
    }

    /// Passes over a value.
    pub fn skip(&mut self) -> Result<()> {
        self.value::<IgnoredAny>().map(drop)
    }

    /// Makes sure that nothing follows.
    pub fn end(&mut self) -> Result<()> {
        match self.blank()? {
            None => Ok(()),
            Some(_) => Err(self.error("something follows the end of the document")),
        }
    }

    fn more(&mut self, close: u8) -> Result<bool> {
        let next = self.blank()?.ok_or_else(|| self.cut_off())?;
        if next == close {
            self.bump();
            self.fresh.pop();
            return Ok(false);
        }
        match self.fresh.last_mut() {
            Some(fresh) if *fresh => *fresh = false,
            _ => self.expect(b',')?,
        }
        Ok(true)
    }

    fn expect(&mut self, byte: u8) -> Result<()> {
        match self.blank()? {
            Some(b) if b == byte => {
                self.bump();
                Ok(())
            }
            Some(b) => Err(self.error(&format!("`{}` where `{}` is expected", b.escape_ascii(), char::from(byte)))),
            None => Err(self.cut_off()),
        }
    }

    /// Puts the bytes of a value into the buffer. Whether they are one is found out by who parses them.
    fn capture(&mut self) -> Result<()> {
        self.buffer.clear();
        // A bit for each open bracket: 1 for an object.
        let (mut open, mut depth) = (0u128, 0u32);
        let (mut text, mut escaped) = (false, false);
        loop {
            let Some(byte) = self.peek()? else {
                // A number may end with the file; anything else is cut off.
                return if depth == 0 && !text && !self.buffer.is_empty() { Ok(()) } else { Err(self.cut_off()) };
            };
            let mut last = false;
            match byte {
                _ if text => {
                    last = byte == b'"' && !escaped && depth == 0;
                    text = byte != b'"' || escaped;
                    escaped = byte == b'\\' && !escaped;
                }
                b'"' if depth == 0 && !self.buffer.is_empty() => return Ok(()),
                b'"' => text = true,
                b'{' | b'[' => {
                    if depth == MAX_DEPTH {
                        return Err(self.error(&format!("lists and objects are more than {MAX_DEPTH} deep")));
                    }
                    (open, depth) = (open << 1 | u128::from(byte == b'{'), depth + 1);
                }
                b'}' | b']' | b',' | b':' if depth == 0 => {
                    if self.buffer.is_empty() {
                        return Err(self.error(&format!("`{}` where a value is expected", char::from(byte))));
                    }
                    return Ok(());
                }
                b'}' | b']' => {
                    if (open & 1 == 1) != (byte == b'}') {
                        return Err(self.error(&format!("`{}` closes what was not opened", char::from(byte))));
                    }
                    (open, depth) = (open >> 1, depth - 1);
                    last = depth == 0;
                }
                b' ' | b'\t' | b'\r' | b'\n' if depth == 0 => return Ok(()),
                _ => {}
            }
            if self.buffer.len() == MAX_ROW_BYTES {
                return Err(self.error(&format!("a value is longer than {MAX_ROW_BYTES} bytes")));
            }
            self.buffer.push(byte);
            self.bump();
            if last {
                return Ok(());
            }
        }
    }

    /// Goes past white space; gives what follows.
    fn blank(&mut self) -> Result<Option<u8>> {
        loop {
            match self.peek()? {
                Some(b' ' | b'\t' | b'\r' | b'\n') => self.bump(),
                other => return Ok(other),
            }
        }
    }

    fn peek(&mut self) -> Result<Option<u8>> {
        loop {
            match self.reader.fill_buf() {
                Ok(bytes) => return Ok(bytes.first().copied()),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::new(ErrorKind::Io, format!("line {}: {e}", self.line))),
            }
        }
    }

    /// Goes past the byte that was peeked at.
    fn bump(&mut self) {
        if let Ok([b'\n', ..]) = self.reader.fill_buf() {
            (self.line, self.column) = (self.line + 1, 0);
        }
        self.column += 1;
        self.reader.consume(1);
    }

    fn cut_off(&self) -> Error {
        self.error("the file ends here, in the middle of the document; was it copied or downloaded to its end?")
    }

    fn error(&self, what: &str) -> Error {
        Error::format(format!("line {}, column {}: {what}", self.line, self.column))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn whole(text: &str) -> Result<Value> {
        let mut json = JsonStream::new(text.as_bytes());
        let (_, value) = json.value()?;
        json.end()?;
        Ok(value)
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a\"\\\\{}\\[\\], \né]{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-c\"]{0,3}", inner, 0..4).prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        })
    }

    #[test]
    fn places_are_those_of_an_editor() {
        for (text, part) in [
            ("", "line 1, column 1: the file ends"),
            ("[1,\n 2", "line 2, column 3: the file ends"),
            ("[1,\n }", "line 2, column 2: `}` closes"),
            ("]", "line 1, column 1: `]` where a value"),
            ("{\n\"a\": tru }", "line 2, column 9: expected ident"),
            ("1 2", "line 1, column 3: something follows"),
        ] {
            let e = whole(text).unwrap_err();
            assert!(e.message().contains(part), "{text:?}: {e}");
        }
        let e = whole(&"[".repeat(1000)).unwrap_err();
        assert!(e.message().contains("deep"), "{e}");
        let e = whole(&format!("\"{}", "x".repeat(MAX_ROW_BYTES))).unwrap_err();
        assert!(e.message().contains("longer than"), "{e}");
    }

    proptest! {
        #[test]
        fn a_value_is_what_serde_reads(value in any_json(), pretty: bool) {
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.unwrap();
            prop_assert_eq!(whole(&text).unwrap(), value);
        }

        #[test]
        fn nonsense_is_read_as_serde_reads_it(text in "[\\[\\]{}:,\"\\\\0-9a-z \n]{0,16}") {
            match (whole(&text), serde_json::from_str::<Value>(&text)) {
                (Ok(a), Ok(b)) => prop_assert_eq!(a, b),
                (Err(_), Err(_)) => {}
                (a, b) => prop_assert!(false, "{:?} {:?}", a.is_ok(), b.is_ok()),
            }
        }
    }
}
