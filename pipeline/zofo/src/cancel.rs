//! Asking a run to stop.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// A request to stop, shared by whoever asks and whoever works. Clones are the same token.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A token that nobody has asked of yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks: a training run finishes the step it is in, saves a checkpoint and returns.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
