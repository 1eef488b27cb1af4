//! CSV rows with a header line.

mod quotes;

use std::{
    cell::{Cell, RefCell},
    collections::HashSet,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    rc::Rc,
};

use csv::{ErrorKind, Reader, ReaderBuilder, StringRecord};
use zofo_hal::{Error, Result};

use super::MAX_ROW_BYTES;
use quotes::Quotes;

pub(super) struct CsvRows {
    reader: Reader<Bounded<BufReader<File>>>,
    allowance: Rc<Cell<usize>>,
    quotes: Rc<RefCell<Quotes>>,
    header: Vec<String>,
    row: StringRecord,
    /// Added to line numbers. The reader ends a row at a carriage return, and so begins the next one on the line before.
    offset: u64,
}

/// Ends a row that never ends: a quote that is not closed would otherwise take the rest of the file into memory.
struct Bounded<R> {
    inner: R,
    allowance: Rc<Cell<usize>>,
    quotes: Rc<RefCell<Quotes>>,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = self.allowance.get();
        if left == 0 {
            return Err(io::Error::other(format!("a row is longer than {MAX_ROW_BYTES} bytes; a quote is probably not closed")));
        }
        let some = to.len().min(left);
        let n = self.inner.read(&mut to[..some])?;
        self.allowance.set(left - n);
        self.quotes.borrow_mut().watch(&to[..n]);
        Ok(n)
    }
}

impl CsvRows {
    pub fn new(mut reader: BufReader<File>, delimiter: u8) -> Result<Self> {
        let start = reader.fill_buf().map_err(|e| Error::new(zofo_hal::ErrorKind::Io, format!("it cannot be read: {e}")))?;
        let end_of_line = start.iter().position(|b| *b == b'\n');
        let offset = end_of_line.is_some_and(|i| i > 0 && start[i - 1] == b'\r').into();
        let allowance = Rc::new(Cell::new(MAX_ROW_BYTES));
        let quotes = Rc::new(RefCell::new(Quotes::new(delimiter)));
        let bounded = Bounded { inner: reader, allowance: allowance.clone(), quotes: quotes.clone() };
        let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(bounded);
        let header: Vec<String> = reader.headers().map_err(|e| error(&e, 1, 0))?.iter().map(|h| h.trim().to_owned()).collect();
        if header.is_empty() {
            return Err(Error::format("it is empty; it needs a header line with the names of the columns, and rows"));
        }
        let mut seen = HashSet::with_capacity(header.len());
        for name in &header {
            if !seen.insert(name) {
                return Err(Error::format(format!("line 1: two columns are called `{name}`; rename one")));
            }
        }
        let rows = Self { reader, allowance, quotes, header, row: StringRecord::new(), offset };
        rows.check_quotes()?;
        Ok(rows)
    }

    pub fn header(&self) -> &[String] {
        &self.header
    }

    /// Refuses what was read so far where text follows a closing quote.
    fn check_quotes(&self) -> Result<()> {
        match self.quotes.borrow().before(self.reader.position().byte()) {
            None => Ok(()),
            Some(line) => {
                Err(Error::format(format!("line {line}: text stands behind a closing quote; double the quotes that are part of a text")))
            }
        }
    }

    pub fn next_row(&mut self) -> Result<Option<u64>> {
        self.allowance.set(MAX_ROW_BYTES);
        let before = self.reader.position().line();
        let more = self.reader.read_record(&mut self.row).map_err(|e| error(&e, before, self.offset));
        // First, because such a quote also upsets the number of fields.
        self.check_quotes()?;
        let more = more?;
        if let (false, Some(line)) = (more, self.quotes.borrow().unclosed()) {
            return Err(Error::format(format!(
                "line {line}: a quote is opened here and not closed before the end of the file; close it, or fetch the file again if it was cut short"
            )));
        }
        Ok(more.then(|| self.row.position().map_or(before, |p| p.line()) + self.offset))
    }

    pub fn field(&self, index: usize) -> Result<&str> {
        // Rows of another length than the header are refused by the reader.
        Ok(self.row.get(index).unwrap_or_default())
    }
}

/// What is wrong with a row; `before` is the line where reading began.
fn error(e: &csv::Error, before: u64, offset: u64) -> Error {
    let line = e.position().map_or(before, |p| p.line()) + offset;
    match e.kind() {
        ErrorKind::Io(e) => Error::format(format!("line {line}: {e}")),
        ErrorKind::UnequalLengths { expected_len, len, .. } => Error::format(format!(
            "line {line}: {len} fields, the header has {expected_len}; put text with commas or line breaks in double quotes, and double the quotes \
             inside"
        )),
        ErrorKind::Utf8 { err, .. } => {
            Error::format(format!("line {line}, field {}: it is not UTF-8; save the file as UTF-8", err.field() + 1))
        }
        _ => Error::format(format!("line {line}: {e}")),
    }
}
