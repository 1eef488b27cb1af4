//! Rows of files in which a text comes with its questions: each question, or each answer to one, is a row.

use zofo_hal::{Error, Result};

/// A text and its rows.
pub(super) struct Group {
    /// Line of the file that it begins on.
    pub line: u64,
    pub text: String,
    /// The columns behind the text, for each row; `None` where the file does not say.
    pub rows: Vec<Vec<Option<String>>>,
}

/// Where groups come from.
pub(super) trait Groups {
    /// The columns: that of the text, then those of the rows.
    fn columns(&self) -> &'static [&'static str];

    /// The next group; one without rows is passed over.
    fn next_group(&mut self) -> Result<Option<Group>>;
}

pub(super) struct NestedRows {
    source: Box<dyn Groups>,
    columns: Vec<String>,
    group: Group,
    /// Rows of the group that were given.
    given: usize,
}

impl NestedRows {
    pub fn new(source: Box<dyn Groups>) -> Self {
        let columns = source.columns().iter().map(|c| (*c).to_owned()).collect();
        Self { source, columns, group: Group { line: 0, text: String::new(), rows: Vec::new() }, given: 0 }
    }

    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    pub fn next_row(&mut self) -> Result<Option<u64>> {
        while self.given == self.group.rows.len() {
            let Some(group) = self.source.next_group()? else { return Ok(None) };
            (self.group, self.given) = (group, 0);
        }
        self.given += 1;
        Ok(Some(self.group.line))
    }

    pub fn field(&self, index: usize) -> Result<&str> {
        let Some(index) = index.checked_sub(1) else { return Ok(&self.group.text) };
        let row = self.given.checked_sub(1).and_then(|row| self.group.rows.get(row));
        let field = row.and_then(|row| row.get(index)?.as_deref());
        field.ok_or_else(|| Error::format(format!("question or answer {} of this text does not have it", self.given)))
    }
}
