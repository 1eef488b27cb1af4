//! What zofo's tests share: where test material lies, and a skip that somebody counts.
//!
//! Models, data and goldens are too large for the repository. They lie in a folder named by
//! `$ZOFO_SHARED`, or else in `shared` beside the checkout, and a test that needs one of them skips
//! where it is absent:
//!
//! ```no_run
//! fn continues_as_upstream() {
//!     let golden = zofo_testkit::shared_or_skip!("goldens/stories260K_lora_golden.json");
//!     // ... compare with it
//! #   let _ = golden;
//! }
//! ```
//!
//! The test harness swallows the output of a test that passes, and a skipped test passes. So a skip is
//! also appended to the file named by `$ZOFO_SKIP_LOG`; CI names one and compares it with
//! `.ci/expected-skips`. A test that skips in any other way is not counted, and CI refuses it.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The test material at `path`, relative to the folder of test material, or `None` where there is none.
///
/// The folder is `$ZOFO_SHARED`, and a relative one is taken from the root of the workspace, because
/// every test runs in the folder of its own crate; without the variable it is `shared` beside the
/// workspace.
pub fn shared(path: impl AsRef<Path>) -> Option<PathBuf> {
    let found = shared_folder().join(path);
    found.exists().then_some(found)
}

/// The file of SmolLM2-135M-Instruct in GGUF, the real model of the tests, or `None` where it is not on this machine.
///
/// It is `$ZOFO_SMOLLM2`, or else among the [shared] models, or else where `zofo fetch smollm2-135m` puts it: in
/// `models/smollm2-135m` of the cache, `$ZOFO_CACHE`, `$XDG_CACHE_HOME/zofo` or `~/.cache/zofo`.
pub fn smollm2() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(named) = variable("ZOFO_SMOLLM2") {
        return Some(named);
    }
    if let Some(found) = shared("models/SmolLM2-135M-Instruct.Q4_1.gguf") {
        return Some(found);
    }
    let cache = variable("ZOFO_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|c| c.join("zofo")))
        .or_else(|| variable("HOME").map(|h| h.join(".cache/zofo")))?;
    let entries = std::fs::read_dir(cache.join("models/smollm2-135m")).ok()?;
    let mut found: Vec<_> = entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect();
    found.sort();
    found.into_iter().next()
}

fn shared_folder() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match std::env::var_os("ZOFO_SHARED") {
        Some(folder) if !folder.is_empty() => workspace.join(folder),
        _ => workspace.join("../shared"),
    }
}

/// Says that the test around it skips, and why; the arguments are those of [`format!`].
///
/// The caller returns after it. The line is `test: reason` with the test's path, for instance
/// `zofo_cpu::matmul::tests::agrees_with_golden: no such CPU`; it goes to standard error after
/// `SKIPPED: `, and to the file named by `$ZOFO_SKIP_LOG`. Keep the reason the same from run to run: CI
/// compares it.
///
/// # Panics
///
/// If the log is named and cannot be written: a skip that nobody counts must not pass.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)+) => {{
        fn here() {}
        $crate::record_skip(::std::any::type_name_of_val(&here), &::std::format!($($reason)+));
    }};
}

/// The test material at a path, or a skip and a return from the test (which returns nothing).
///
/// See [`shared`] for where it looks and [`skip!`] for what a skip does.
#[macro_export]
macro_rules! shared_or_skip {
    ($path:expr) => {
        match $crate::shared($path) {
            Some(found) => found,
            None => {
                $crate::skip!("no test material at {}", $path);
                return;
            }
        }
    };
}

/// The file of SmolLM2, or a skip and a return from the test (which returns nothing). See [`smollm2`].
#[macro_export]
macro_rules! smollm2_or_skip {
    () => {
        match $crate::smollm2() {
            Some(found) => found,
            None => {
                $crate::skip!("SmolLM2 is not here");
                return;
            }
        }
    };
}

/// What [`skip!`] calls; `marker` is the type name of a function declared inside the test.
#[doc(hidden)]
pub fn record_skip(marker: &str, reason: &str) {
    let line = skip_line(marker, reason);
    eprintln!("SKIPPED: {line}");
    let Some(log) = std::env::var_os("ZOFO_SKIP_LOG") else {
        return;
    };
    append(Path::new(&log), &line);
}

/// `path::of::test: reason` on one line, whatever the reason holds.
fn skip_line(marker: &str, reason: &str) -> String {
    let test = marker.trim_end_matches("::here").replace("::{{closure}}", "");
    let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    format!("{test}: {reason}")
}

/// One write in append mode per line, so that lines of tests that run at once do not mix.
fn append(log: &Path, line: &str) {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()))
        .unwrap_or_else(|error| panic!("cannot append to $ZOFO_SKIP_LOG, {}: {error}", log.display()));
}

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! here {
        () => {{
            fn here() {}
            std::any::type_name_of_val(&here)
        }};
    }

    #[test]
    fn a_skip_names_its_test() {
        let expected = "zofo_testkit::tests::a_skip_names_its_test: no chip";
        assert_eq!(skip_line(here!(), "no chip"), expected);
        let in_closure = || skip_line(here!(), "no chip");
        assert_eq!(in_closure(), expected);
    }

    #[test]
    fn a_reason_takes_one_line() {
        assert_eq!(skip_line("a::b::here", "one\n  two"), "a::b: one two");
    }

    #[test]
    fn lines_are_appended() {
        let log = std::env::temp_dir().join(format!("zofo-testkit-{}.log", std::process::id()));
        append(&log, "a: b");
        append(&log, "c: d");
        let text = std::fs::read_to_string(&log).unwrap();
        std::fs::remove_file(&log).unwrap();
        assert_eq!(text, "a: b\nc: d\n");
    }

    #[test]
    fn absent_material_is_none() {
        assert_eq!(shared("no such folder/no such file"), None);
    }
}
