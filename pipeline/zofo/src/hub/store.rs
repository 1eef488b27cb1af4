//! Files of one name in the cache: they grow under another name, are checked, and then renamed.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Component, Path, PathBuf},
};

use sha1::Sha1;
use sha2::{Digest, Sha256};
use zofo_hal::{Error, ErrorKind, Result};

use super::{Context, FetchEvent};
use crate::catalogue::ReceiptFile;

/// What is known of a file's contents, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// SHA-256 of the contents.
    Sha256(String),
    /// SHA-1 of git's blob header and the contents, by which the hub names small files.
    GitBlob(String),
}

impl Check {
    /// What an entity tag of the hub says: 64 digits for a large file, 40 for a small one.
    pub fn of_etag(etag: &str) -> Option<Self> {
        let tag = etag.trim().trim_start_matches("W/").trim_matches('"');
        let hexadecimal = tag.bytes().all(|b| b.is_ascii_hexdigit());
        match tag.len() {
            64 if hexadecimal => Some(Self::Sha256(tag.to_ascii_lowercase())),
            40 if hexadecimal => Some(Self::GitBlob(tag.to_ascii_lowercase())),
            _ => None,
        }
    }
}

/// Whether an error is of this machine's disk, so that another source cannot help: it has the system's number, which those of servers lack.
pub(super) fn is_local(e: &Error) -> bool {
    *e.kind() == ErrorKind::Io && e.native().is_some()
}

/// What went wrong with a file of the cache.
fn local(path: &Path, e: &io::Error) -> Error {
    let what = match e.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "there is no room left for it; make room, then give the same command again".to_owned()
        }
        _ => e.to_string(),
    };
    Error::new(ErrorKind::Io, format!("{}: {what}", path.display())).with_native(e.raw_os_error().unwrap_or(0).into(), "")
}

/// The folder of one name.
pub(super) struct Store {
    folder: PathBuf,
}

impl Store {
    pub fn open(folder: PathBuf) -> Result<Self> {
        fs::create_dir_all(&folder).map_err(|e| local(&folder, &e))?;
        Ok(Self { folder })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn part_path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.part"))
    }

    /// Refuses names that would leave the folder, or be something else elsewhere.
    pub fn check_name(name: &str) -> Result<()> {
        let plain = !name.is_empty()
            && name.len() <= 1024
            && !name.contains(['\\', ':'])
            && !name.contains(char::is_control)
            && Path::new(name).components().all(|c| matches!(c, Component::Normal(_)))
            && !name.split('/').any(|part| part.is_empty() || part.starts_with('.'));
        if plain { Ok(()) } else { Err(Error::invalid(format!("`{}` is no name of a file in a repository", name.escape_debug()))) }
    }

    /// The file that grows, at its end.
    pub fn part(&self, name: &str) -> Result<Part> {
        let path = self.part_path(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|e| local(parent, &e))?;
        }
        let file = OpenOptions::new().create(true).append(true).read(true).open(&path).map_err(|e| local(&path, &e))?;
        let length = file.metadata().map_err(|e| local(&path, &e))?.len();
        Ok(Part { file: Box::new(file), path, length })
    }

    /// Removes a file that was needed for a while.
    pub fn remove(&self, name: &str) {
        let _ = fs::remove_file(self.path(name));
        self.remove_part(name);
    }

    /// Forgets what has come of a file.
    pub fn remove_part(&self, name: &str) {
        let _ = fs::remove_file(self.part_path(name));
    }

    /// The file under its name, where it is there and is what `checks` say.
    pub fn finished(&self, name: &str, checks: &[Check], context: &Context<'_>) -> Result<Option<ReceiptFile>> {
        if checks.is_empty() || !self.path(name).is_file() {
            return Ok(None);
        }
        let sums = Sums::of(&self.path(name), context)?;
        Ok(sums.differs(checks).is_none().then(|| sums.receipt(name)))
    }

    /// Compares what has come with what is known of it and gives it its name.
    ///
    /// # Errors
    /// `Format` where it is something else; it is removed then.
    pub fn finish(&self, name: &str, part: Part, checks: &[Check], context: &Context<'_>) -> Result<ReceiptFile> {
        let path = part.close()?;
        let sums = Sums::of(&path, context)?;
        if let Some((is, should)) = sums.differs(checks) {
            let _ = fs::remove_file(&path);
            return Err(Error::format(format!("{name}: what came has the checksum {is}, not {should}; it was thrown away")));
        }
        let target = self.path(name);
        fs::rename(&path, &target).map_err(|e| local(&target, &e))?;
        Ok(sums.receipt(name))
    }
}

/// Somewhere bytes go.
pub(super) trait Sink: Write {
    /// Throws everything away.
    fn restart(&mut self) -> io::Result<()>;
    /// Waits until everything is on disk.
    fn sync(&mut self) -> io::Result<()>;
}

impl Sink for File {
    fn restart(&mut self) -> io::Result<()> {
        self.set_len(0)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// A file that is not whole yet.
pub(super) struct Part {
    file: Box<dyn Sink>,
    path: PathBuf,
    length: u64,
}

impl Part {
    /// Bytes that are here.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Begins anew.
    pub fn restart(&mut self) -> Result<()> {
        self.file.restart().map_err(|e| local(&self.path, &e))?;
        self.length = 0;
        Ok(())
    }

    fn push(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        // Not `write_all`: after an error one must know how much is there.
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(local(&self.path, &io::ErrorKind::StorageFull.into())),
                Ok(n) => {
                    self.length += n as u64;
                    rest = &rest[n..];
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(local(&self.path, &e)),
            }
        }
        Ok(())
    }

    /// Appends what `from` gives, `total` bytes in all with what is here already.
    ///
    /// # Errors
    /// Those of the file; the outer error is that, the inner one is that of `from`, after which more can be appended. More than `total` or `most`
    /// bytes are an error of `from`.
    pub fn append(
        &mut self,
        name: &str,
        from: &mut dyn Read,
        total: Option<u64>,
        most: u64,
        context: &mut Context<'_>,
    ) -> Result<io::Result<()>> {
        let mut buffer = vec![0; 1 << 16];
        // A report for each per mille is enough to draw.
        let every = total.map_or(1 << 20, |t| (t / 1000).max(1 << 16));
        let mut reported = None;
        loop {
            context.check_cancel()?;
            let n = match from.read(&mut buffer) {
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Ok(Err(e)),
            };
            self.push(&buffer[..n])?;
            let (done, whole) = (self.length, total.is_none_or(|t| self.length == t));
            if total.unwrap_or(most) < done || most < done {
                return Ok(Err(io::Error::other(format!("more bytes came than the {} that were announced", total.unwrap_or(most)))));
            }
            if n == 0 || whole && total.is_some() || reported.is_none_or(|r| done >= r + every) {
                (context.on_event)(&FetchEvent::Progress { file: name.into(), done, total });
                reported = Some(done);
            }
            if n == 0 {
                return Ok(if whole { Ok(()) } else { Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended early")) });
            }
        }
    }

    fn close(mut self) -> Result<PathBuf> {
        self.file.flush().and_then(|()| self.file.sync()).map_err(|e| local(&self.path, &e))?;
        Ok(self.path)
    }
}

/// Size and checksums of a file.
struct Sums {
    bytes: u64,
    sha256: String,
    git_blob: String,
}

impl Sums {
    fn of(path: &Path, context: &Context<'_>) -> Result<Self> {
        let mut file = File::open(path).map_err(|e| local(path, &e))?;
        let bytes = file.metadata().map_err(|e| local(path, &e))?.len();
        let mut sha256 = Sha256::new();
        // Git names large files by other means, and reading them twice as slowly for nothing is a waste.
        let mut sha1 = (bytes <= 64 << 20).then(|| Sha1::new_with_prefix(format!("blob {bytes}\0")));
        let mut buffer = vec![0; 1 << 18];
        loop {
            context.check_cancel()?;
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    sha256.update(&buffer[..n]);
                    if let Some(sha1) = &mut sha1 {
                        sha1.update(&buffer[..n]);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(local(path, &e)),
            }
        }
        Ok(Self { bytes, sha256: hexadecimal(&sha256.finalize()), git_blob: sha1.map(|s| hexadecimal(&s.finalize())).unwrap_or_default() })
    }

    /// What it has and what it should have.
    fn differs<'a>(&'a self, checks: &'a [Check]) -> Option<(&'a str, &'a str)> {
        let pair = |c: &'a Check| match c {
            Check::Sha256(should) => (self.sha256.as_str(), should.as_str()),
            Check::GitBlob(should) => (self.git_blob.as_str(), should.as_str()),
        };
        checks.iter().map(pair).find(|(is, should)| is != should)
    }

    fn receipt(self, name: &str) -> ReceiptFile {
        ReceiptFile { name: name.to_owned(), bytes: self.bytes, sha256: self.sha256 }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cancel::CancelToken, hub::Settings};

    /// A disk with room for so many bytes.
    struct Small(usize);

    impl Write for Small {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let n = bytes.len().min(self.0);
            self.0 -= n;
            if n == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(n) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Sink for Small {
        fn restart(&mut self) -> io::Result<()> {
            Ok(())
        }

        fn sync(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn with<T>(f: impl FnOnce(&mut Context<'_>) -> T) -> T {
        let (settings, cancel) = (Settings::default(), CancelToken::new());
        f(&mut Context { settings: &settings, cancel: &cancel, on_event: &mut |_| {} })
    }

    #[test]
    fn a_full_disk_is_said_and_no_other_source_is_tried() {
        let mut part = Part { file: Box::new(Small(100_000)), path: "/cache/model.gguf.part".into(), length: 0 };
        let e = with(|c| part.append("model.gguf", &mut &[7u8; 200_000][..], None, u64::MAX, c)).unwrap_err();
        assert!(is_local(&e) && e.message().contains("no room left") && e.message().contains("/cache/model.gguf.part"), "{e}");
        // What the disk took counts.
        assert_eq!(part.length(), 100_000);
    }

    #[test]
    fn what_came_is_checked_and_named_or_thrown_away() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path().join("a/b")).unwrap();
        // `printf 'hello\n' | sha256sum`, `printf 'hello\n' | git hash-object --stdin`.
        let sha256 = Check::of_etag("\"5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03\"").unwrap();
        let blob = Check::of_etag("W/\"ce013625030ba8dba906f756967f9e9ca394464a\"").unwrap();
        assert!(matches!((&sha256, &blob), (Check::Sha256(_), Check::GitBlob(_))));
        assert_eq!(Check::of_etag("\"abc\""), None);
        let fill = |text: &str| {
            let mut part = store.part("x.txt").unwrap();
            with(|c| part.append("x.txt", &mut text.as_bytes(), None, 100, c)).unwrap().unwrap();
            part
        };
        let part = fill("hello");
        let e = with(|c| store.finish("x.txt", part, std::slice::from_ref(&sha256), c)).unwrap_err();
        assert!(*e.kind() == ErrorKind::Format && e.message().contains("checksum"), "{e}");
        assert!(!store.path("x.txt").exists() && !store.part_path("x.txt").exists());
        // In two pieces.
        drop(fill("hel"));
        let part = fill("lo\n");
        assert_eq!(part.length(), 6);
        let done = with(|c| store.finish("x.txt", part, &[sha256.clone(), blob.clone()], c)).unwrap();
        assert_eq!((done.name.as_str(), done.bytes), ("x.txt", 6));
        assert_eq!(with(|c| store.finished("x.txt", &[blob], c)).unwrap(), Some(done));
        assert_eq!(with(|c| store.finished("x.txt", &[Check::GitBlob("0".repeat(40))], c)).unwrap(), None);
    }

    #[test]
    fn more_than_announced_and_less_than_announced() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path().into()).unwrap();
        let mut part = store.part("x").unwrap();
        let e = with(|c| part.append("x", &mut &b"12345"[..], Some(6), 100, c)).unwrap().unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof);
        let e = with(|c| part.append("x", &mut &b"67"[..], Some(6), 100, c)).unwrap().unwrap_err();
        assert!(e.to_string().contains("more bytes"), "{e}");
    }

    #[test]
    fn names_stay_in_the_folder() {
        for good in ["a.json", "model-00001-of-00002.safetensors", "data/train.csv"] {
            Store::check_name(good).unwrap();
        }
        for bad in ["", "/etc/passwd", "../x", "a/../b", "a//b", "a\\b", "c:x", ".git", "a/.b", "a\n"] {
            assert!(Store::check_name(bad).is_err(), "{bad:?}");
        }
    }
}
