//! Files that a command writes where it is told to.

use std::{fs::File, io::Read, path::Path};

use zofo::Error;

use super::Failure;

/// Refuses to replace a file that is something else than what this program writes there, known by how it begins: a slip of the hand would
/// otherwise cost a model or its data.
pub fn replaceable(path: &Path, begins: &str, what: &str) -> Result<(), Failure> {
    if !path.is_file() {
        return Ok(());
    }
    let mut start = vec![0; begins.len()];
    let same = File::open(path).and_then(|mut f| f.read_exact(&mut start)).is_ok() && start == begins.as_bytes();
    let empty = path.metadata().is_ok_and(|m| m.len() == 0);
    if same || empty {
        return Ok(());
    }
    Err(Failure::Usage(Error::invalid(format!("{}: this file is there and is not {what} of this program; name another", path.display()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_written_here_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        assert!(replaceable(&path, "<svg", "a drawing").is_ok());
        for (contents, good) in [("", true), ("<svg>", true), ("<sv", false), ("label,text", false)] {
            std::fs::write(&path, contents).unwrap();
            assert_eq!(replaceable(&path, "<svg", "a drawing").is_ok(), good, "{contents}");
        }
    }
}
