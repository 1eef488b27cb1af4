//! Members of a ZIP archive. Only the names that are asked for are looked up, and files get names of ours, so an archive cannot choose where it writes.

use std::{
    fs::File,
    io::{BufReader, Read},
    path::Path,
};

use zip::{ZipArchive, result::ZipError};
use zofo_hal::{Error, ErrorKind, Result};

use super::{
    Context,
    store::{Check, Store},
};
use crate::catalogue::{KnownFile, ReceiptFile};

/// Largest member, in bytes.
const MOST_BYTES: u64 = 16 << 30;

/// Takes `files` out of the archive at `path`, where their names begin with `folder`.
///
/// # Errors
/// `Format` for a broken archive, a missing member or other contents than are known; those of the store.
pub(super) fn extract(
    path: &Path,
    folder: &str,
    files: &[KnownFile],
    store: &Store,
    context: &mut Context<'_>,
) -> Result<Vec<ReceiptFile>> {
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|e| broken("the archive", &e))?;
    files.iter().map(|f| member(&mut archive, folder, f, store, context)).collect()
}

fn member(
    archive: &mut ZipArchive<BufReader<File>>,
    folder: &str,
    wanted: &KnownFile,
    store: &Store,
    context: &mut Context<'_>,
) -> Result<ReceiptFile> {
    let checks: Vec<Check> = wanted.sha256.iter().map(|s| Check::Sha256((*s).to_owned())).collect();
    if let Some(done) = store.finished(wanted.name, &checks, context)? {
        return Ok(done);
    }
    let name = format!("{folder}{}", wanted.name);
    let mut member = archive.by_name(&name).map_err(|e| broken(&name, &e))?;
    let size = member.size();
    if size > MOST_BYTES {
        return Err(Error::format(format!("{name} of the archive is said to have {size} bytes, more than {MOST_BYTES}")));
    }
    let mut part = store.part(wanted.name)?;
    part.restart()?;
    // One byte more, so that a size that is a lie shows.
    let mut limited = (&mut member).take(size + 1);
    if let Err(e) = part.append(wanted.name, &mut limited, Some(size), MOST_BYTES, context)? {
        part.restart()?;
        return Err(Error::format(format!("{name} of the archive cannot be unpacked: {e}")));
    }
    store.finish(wanted.name, part, &checks, context)
}

fn broken(name: &str, e: &ZipError) -> Error {
    match e {
        ZipError::FileNotFound => Error::format(format!("the archive has no {name}")),
        ZipError::Io(e) => Error::new(ErrorKind::Io, format!("{name} cannot be read: {e}")),
        e => Error::format(format!("{name} cannot be unpacked: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Write};

    use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

    use super::*;
    use crate::{cancel::CancelToken, hub::Settings};

    fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        for (name, contents) in members {
            zip.start_file(*name, SimpleFileOptions::default().compression_method(CompressionMethod::Stored)).unwrap();
            zip.write_all(contents).unwrap();
        }
        zip.finish().unwrap().into_inner()
    }

    fn unpack(bytes: &[u8], dir: &Path) -> Result<Vec<ReceiptFile>> {
        let path = dir.join("x.zip");
        std::fs::write(&path, bytes).unwrap();
        let store = Store::open(dir.join("out")).unwrap();
        let (settings, cancel) = (Settings::default(), CancelToken::new());
        let mut context = Context { settings: &settings, cancel: &cancel, on_event: &mut |_| {} };
        extract(&path, "in/", &[KnownFile { name: "a", sha256: None }], &store, &mut context)
    }

    #[test]
    fn only_what_is_asked_for_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = archive(&[("../evil", b"x"), ("/etc/evil", b"x"), ("in/a", b"hello"), ("in/b", b"x")]);
        let files = unpack(&bytes, dir.path()).unwrap();
        assert_eq!((files[0].name.as_str(), files[0].bytes), ("a", 5));
        let mut names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["out", "x.zip"]);
        assert_eq!(std::fs::read_dir(dir.path().join("out")).unwrap().count(), 1);
        let e = unpack(&archive(&[("a", b"x"), ("in/../in/a", b"x")]), dir.path()).unwrap_err();
        assert!(e.message().contains("has no in/a"), "{e}");
    }

    #[test]
    fn broken_archives() {
        let bytes = archive(&[("in/a", b"hello hello")]);
        for end in 0..bytes.len() {
            let dir = tempfile::tempdir().unwrap();
            assert!(unpack(&bytes[..end], dir.path()).is_err(), "{end}");
            assert!(!dir.path().join("out/a").exists());
        }
        // A byte of the contents: the archive's own checksum shows it.
        let mut changed = bytes.clone();
        let at = changed.windows(5).position(|w| w == b"hello").unwrap();
        changed[at] ^= 1;
        let dir = tempfile::tempdir().unwrap();
        let e = unpack(&changed, dir.path()).unwrap_err();
        assert!(e.message().contains("cannot be unpacked"), "{e}");
        assert!(!dir.path().join("out/a").exists());
    }
}
