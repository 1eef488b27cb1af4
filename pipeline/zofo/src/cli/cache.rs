//! Where fetched files are, by the environment; and what names mean there.

use std::{
    env,
    path::{Path, PathBuf},
};

use zofo::{
    Error, Result,
    catalogue::{self, Cache},
};

/// The cache: `given`, or `$ZOFO_CACHE`, `$XDG_CACHE_HOME/zofo` or `~/.cache/zofo`.
///
/// # Errors
/// `InvalidArgument` where none of these is set.
pub fn cache(given: Option<&Path>) -> Result<Cache> {
    if let Some(path) = given {
        return Ok(Cache::new(path));
    }
    if let Some(path) = folder("ZOFO_CACHE") {
        return Ok(Cache::new(path));
    }
    let base = user_cache().ok_or_else(|| {
        Error::invalid("there is no place for fetched files: neither ZOFO_CACHE nor HOME is set; say one with ZOFO_CACHE")
    })?;
    Ok(Cache::new(base.join("zofo")))
}

/// Where programs keep what can be had again.
pub fn user_cache() -> Option<PathBuf> {
    // A relative one is to be ignored, as the XDG base directory specification has it.
    folder("XDG_CACHE_HOME").filter(|p| p.is_absolute()).or_else(|| Some(folder("HOME")?.join(".cache")))
}

/// A folder or file that a variable names.
pub fn folder(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// Where the model `given` is: a path, or the name of one that was fetched.
///
/// # Errors
/// Those of [`catalogue::model`].
pub fn model(given: &Path) -> Result<PathBuf> {
    catalogue::model(given, cache(None).ok().as_ref())
}
