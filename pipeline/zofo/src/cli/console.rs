//! Writing to the terminal or to whoever reads; a reader that goes away is no failure.

use std::{
    io::{self, Write},
    sync::atomic::{AtomicBool, Ordering},
};

use zofo::Error;

/// Columns that text for people fits into.
pub const WIDTH: usize = 80;

/// Whether something could not be written although somebody reads: a full disk.
static LOST: AtomicBool = AtomicBool::new(false);

/// Writes to standard output; `false` once nobody reads.
pub fn print(text: &str) -> bool {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if let Err(e) = &written
        && e.kind() != io::ErrorKind::BrokenPipe
        && !LOST.swap(true, Ordering::Relaxed)
    {
        note(format!("error: standard output cannot be written: {e}"));
    }
    written.is_ok()
}

/// Whether output was lost, other than to a reader that went away.
pub fn lost() -> bool {
    LOST.load(Ordering::Relaxed)
}

/// Writes a line to standard output.
pub fn line(text: impl AsRef<str>) -> bool {
    print(&format!("{}\n", text.as_ref()))
}

/// Writes one JSON object to standard output.
pub fn json(value: &impl serde::Serialize) -> bool {
    line(serde_json::to_string(value).unwrap_or_else(|e| format!("{{\"error\":\"{e}\"}}")))
}

/// Writes a line to standard error.
pub fn note(text: impl AsRef<str>) {
    let _ = writeln!(io::stderr(), "{}", text.as_ref());
}

/// Writes an error to standard error.
pub fn error(e: &Error) {
    note(format!("error: {e}"));
}

/// A word as a shell reads it.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-=+:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// `1 step`, `2 steps`.
pub fn count(n: impl Into<u64>, what: &str) -> String {
    let n = n.into();
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

pub use zofo::timeline::bytes;

/// Seconds for people.
pub fn seconds(s: f64) -> String {
    match s {
        s if s < 60.0 => format!("{s:.1} s"),
        s => format!("{} min {:02} s", (s / 60.0) as u64, (s % 60.0) as u64),
    }
}

/// Columns of a table, as wide as their widest entry; the last is as long as it is.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|t| t.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut text = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            text.push_str(&format!("{cell:<width$}  "));
        }
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_people() {
        assert_eq!((bytes(17).as_str(), bytes(3 << 29).as_str()), ("17 B", "1.5 GiB"));
        assert_eq!((seconds(3.25).as_str(), seconds(125.0).as_str()), ("3.2 s", "2 min 05 s"));
        assert_eq!((count(1u32, "step"), count(0u32, "step")), ("1 step".into(), "0 steps".into()));
        assert_eq!((quoted("a/b-1"), quoted("it's"), quoted("")), ("a/b-1".into(), r"'it'\''s'".into(), "''".into()));
        assert_eq!(table(&[vec!["a".into(), "bb".into()], vec!["ccc".into(), "d".into()]]), "a    bb\nccc  d\n");
    }
}
