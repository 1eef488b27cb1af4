//! The one lock of this crate: the system's where there is one, a spin lock on bare metal.

#[cfg(feature = "std")]
use std::sync as imp;

#[cfg(feature = "std")]
pub(crate) use std::sync::MutexGuard;

#[cfg(not(feature = "std"))]
use spin as imp;

#[cfg(not(feature = "std"))]
pub(crate) use spin::MutexGuard;

/// Mutual exclusion without poisoning: every critical section of this crate leaves its data valid.
#[derive(Default)]
pub(crate) struct Mutex<T>(imp::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        #[cfg(feature = "std")]
        return self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        #[cfg(not(feature = "std"))]
        self.0.lock()
    }
}
