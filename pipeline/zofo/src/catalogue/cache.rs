//! Where fetched files are.
//!
//! `models/NAME/` and `data/NAME/`, NAME being a known name or `owner/repo`; a receipt in the folder is written last and says that all files are
//! there.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use zofo_hal::{Error, Result};

use super::Kind;
use crate::run_folder::write_atomic;

const RECEIPT: &str = "zofo-fetched.json";
const LARGEST_RECEIPT: u64 = 1 << 20;

/// A folder of fetched models and data sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    root: PathBuf,
}

/// What was fetched under a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// The name.
    pub name: String,
    /// Where it came from.
    pub source: String,
    /// The files.
    pub files: Vec<ReceiptFile>,
}

/// A file of a receipt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiptFile {
    /// Its name, relative to the folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256 in hexadecimal.
    pub sha256: String,
}

impl Cache {
    /// The cache in `root`, which need not exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the files of `name` are, or would be.
    pub fn folder(&self, kind: Kind, name: &str) -> PathBuf {
        self.root.join(kind_folder(kind)).join(name)
    }

    /// What was fetched under `name`; `None` where that did not end, or a file is no longer as it was then.
    pub fn receipt(&self, kind: Kind, name: &str) -> Option<Receipt> {
        let folder = self.folder(kind, name);
        let path = folder.join(RECEIPT);
        if fs::metadata(&path).ok()?.len() > LARGEST_RECEIPT {
            return None;
        }
        let receipt: Receipt = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        let whole = |f: &ReceiptFile| fs::metadata(folder.join(&f.name)).is_ok_and(|m| m.is_file() && m.len() == f.bytes);
        (!receipt.files.is_empty() && receipt.files.iter().all(whole)).then_some(receipt)
    }

    /// Says that all files of `name` are there.
    ///
    /// # Errors
    /// `Io`.
    pub fn write_receipt(&self, kind: Kind, name: &str, receipt: &Receipt) -> Result<()> {
        let mut bytes = serde_json::to_vec_pretty(receipt).map_err(|e| Error::format(format!("{RECEIPT}: {e}")))?;
        bytes.push(b'\n');
        write_atomic(&self.folder(kind, name).join(RECEIPT), &bytes)
    }

    /// The file that whoever writes files of `name` locks.
    #[cfg(feature = "hub")]
    pub(crate) fn lock_path(&self, kind: Kind, name: &str) -> PathBuf {
        self.root.join("locks").join(format!("{}--{}", kind_folder(kind), name.replace('/', "--")))
    }
}

fn kind_folder(kind: Kind) -> &'static str {
    match kind {
        Kind::Model => "models",
        Kind::Dataset => "data",
    }
}
