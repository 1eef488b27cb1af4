//! Process-wide identifiers.

use core::sync::atomic::{AtomicUsize, Ordering};

/// The next identifier; never 0, which stands for the host's memory.
pub(crate) fn next() -> u64 {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed) as u64
}
