//! A value that one thread of this process uses at a time.
#![expect(unsafe_code, reason = "gives access to what a lock guards")]

use crate::lock::{Lock, Taken};
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// A lock and what it guards. All zeros when new, if that is.
pub(super) struct SharedMutex<T> {
    lock: Lock,
    value: UnsafeCell<T>,
}

// SAFETY: `value` is reached only through `hold`, by one thread at a time.
unsafe impl<T: Send> Sync for SharedMutex<T> {}

impl<T> SharedMutex<T> {
    pub(super) const fn new(value: T) -> Self {
        Self { lock: Lock::new(), value: UnsafeCell::new(value) }
    }

    /// `None` in a signal handler that has interrupted the holder.
    #[inline]
    pub(super) fn hold(&self) -> Option<SharedMutexGuard<'_, T>> {
        (self.lock.lock() != Taken::Recursive).then(|| SharedMutexGuard(self))
    }

    /// Takes the lock for the time of a fork. In a handler that has interrupted a holder the lock stays the holder's.
    pub(super) fn freeze(&self) {
        self.lock.freeze();
    }

    /// Unlocks it, in the parent or in the child.
    pub(super) fn thaw(&self, child: bool) {
        if child { self.lock.thaw_in_child() } else { self.lock.thaw() }
    }
}

impl<T> fmt::Debug for SharedMutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarded").field("lock", &self.lock).finish_non_exhaustive()
    }
}

/// The lock is held until this is dropped.
pub(super) struct SharedMutexGuard<'a, T>(&'a SharedMutex<T>);

impl<T> Deref for SharedMutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock, so no other reference exists but those made through this guard.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for SharedMutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for SharedMutexGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.lock.unlock();
    }
}
