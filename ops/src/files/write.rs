//! Files that are there whole or not at all.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use zofo_hal::{Error, Result};

/// Writes beside the target, syncs, then renames over it: a reader sees the old file or the new one, also after a crash.
pub(super) fn write_atomic(folder: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let unique = NEXT.fetch_add(1, Ordering::Relaxed);
    let temporary = folder.join(format!(".{name}.{}-{unique}.tmp", std::process::id()));
    let target = folder.join(name);
    let written = File::create(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    let done = written.and_then(|()| fs::rename(&temporary, &target));
    if done.is_err() {
        // What could not be written is of no use; the error that counts is the first.
        let _ = fs::remove_file(&temporary);
    }
    done.map_err(|e| Error::io(&target, e))
}
