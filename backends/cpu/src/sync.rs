//! A lock that also exists without `std`.

#[cfg(feature = "std")]
mod imp {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// A mutex; a panic of another holder does not spread.
    #[derive(Debug)]
    pub(crate) struct Lock<T>(Mutex<T>);

    impl<T> Lock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }
}

#[cfg(not(feature = "std"))]
mod imp {
    use core::{
        cell::UnsafeCell,
        ops::{Deref, DerefMut},
        sync::atomic::{AtomicBool, Ordering},
    };

    /// A spin lock: without an operating system there is nothing to park on.
    #[derive(Debug)]
    pub(crate) struct Lock<T> {
        held: AtomicBool,
        value: UnsafeCell<T>,
    }

    // Safety: the value is reached only through `lock`, one holder at a time.
    unsafe impl<T: Send> Sync for Lock<T> {}

    impl<T> Lock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
        }

        pub(crate) fn lock(&self) -> Guard<'_, T> {
            while self.held.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
                core::hint::spin_loop();
            }
            Guard(self)
        }
    }

    pub(crate) struct Guard<'a, T>(&'a Lock<T>);

    impl<T> Deref for Guard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            // Safety: this guard holds the lock.
            unsafe { &*self.0.value.get() }
        }
    }

    impl<T> DerefMut for Guard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            // Safety: this guard holds the lock.
            unsafe { &mut *self.0.value.get() }
        }
    }

    impl<T> Drop for Guard<'_, T> {
        fn drop(&mut self) {
            self.0.held.store(false, Ordering::Release);
        }
    }
}

pub(crate) use imp::Lock;
