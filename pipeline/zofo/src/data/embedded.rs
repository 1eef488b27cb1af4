//! The embedded lines as rows.

use std::{path::Path, vec};

use zofo_hal::Result;

use super::nested::{Group, Groups};
use crate::embedded::{
    LABEL, TEXT,
    device_logs::{LogLine, words},
    lines,
};

pub(super) struct EmbeddedLines {
    lines: vec::IntoIter<LogLine>,
    words: Vec<String>,
    line: u64,
}

impl EmbeddedLines {
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { lines: lines(path)?.into_iter(), words: words(), line: 0 })
    }
}

impl Groups for EmbeddedLines {
    fn columns(&self) -> &'static [&'static str] {
        &[TEXT, LABEL]
    }

    fn next_group(&mut self) -> Result<Option<Group>> {
        let Some(LogLine { text, class }) = self.lines.next() else { return Ok(None) };
        self.line += 1;
        Ok(Some(Group { line: self.line, text, rows: vec![vec![Some(self.words[class].clone())]] }))
    }
}
