//! Ctrl-C: once to end in order, twice to end at once.

use std::sync::atomic::{AtomicBool, Ordering};

use zofo::CancelToken;

use super::{INTERRUPTED, console};

/// From now on the first interrupt asks `token`, saying what `message` gives, and the second ends the process.
pub fn watch(token: CancelToken, message: impl Fn() -> &'static str + Send + 'static) {
    let asked = AtomicBool::new(false);
    let handler = move || {
        if asked.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED.into());
        }
        token.cancel();
        console::note(message());
    };
    // Without a handler an interrupt ends the process, which is what it does without us too.
    if let Err(e) = ctrlc::set_handler(handler) {
        console::note(format!("note: interrupts end the run without a checkpoint ({e})"));
    }
}
