//! One process at a time fetches a thing.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    path::Path,
    time::Duration,
};

use zofo_hal::{Error, Result};

use super::{Context, FetchEvent};

/// Held until dropped; the system lets go of it when the process ends, however it does.
pub(super) struct Lock {
    _file: File,
}

/// Takes the lock at `path`, waiting for who has it. The file stays: removing it would let two in.
pub(super) fn take(path: &Path, context: &mut Context<'_>) -> Result<Lock> {
    let error = |e| Error::io(path, e).context("the cache cannot be written");
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(error)?;
    }
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(error)?;
    let mut said = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Lock { _file: file }),
            Err(TryLockError::WouldBlock) => {
                if !std::mem::replace(&mut said, true) {
                    (context.on_event)(&FetchEvent::Waiting);
                }
                context.wait(Duration::from_millis(100))?;
            }
            // Some network file systems have no locks; what is renamed into place is whole all the same.
            Err(TryLockError::Error(e)) if e.kind() == std::io::ErrorKind::Unsupported => return Ok(Lock { _file: file }),
            Err(TryLockError::Error(e)) => return Err(error(e)),
        }
    }
}
