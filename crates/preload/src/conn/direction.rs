//! One direction of a connection: its lock, and what it guards.
#![expect(unsafe_code, reason = "gives access to what a lock in shared memory guards")]

use crate::lock::{Lock, Taken};
use rustix::io::Errno;
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// A lock, a count that is read without it, and what it guards.
#[repr(C, align(64))]
pub(crate) struct DirectionLock<T> {
    lock: Lock,
    /// A holder died while it held the lock.
    broken: AtomicU32,
    /// Bytes that have gone this way, while no ring is attached.
    pub(crate) counted: AtomicU64,
    state: UnsafeCell<T>,
}

// SAFETY: `state` is reached only through `hold`, by one thread at a time; the rest is atomics.
unsafe impl<T: Send> Sync for DirectionLock<T> {}

impl<T> DirectionLock<T> {
    /// Takes the lock. Fails if this very thread holds it below a signal handler: `EAGAIN` is what a handler can cope with,
    /// and cannot come from a deadlock.
    #[inline]
    pub(crate) fn hold(&self) -> Result<DirectionGuard<'_, T>, Errno> {
        match self.lock.lock() {
            Taken::Free => Ok(DirectionGuard { direction: self }),
            Taken::Recursive => Err(Errno::AGAIN),
            Taken::Inherited => {
                self.broken.store(1, Ordering::Relaxed);
                Ok(DirectionGuard { direction: self })
            }
        }
    }

    /// As [`DirectionLock::hold`], but waits for about so long at most. `EAGAIN` also if another thread that lives has held the lock
    /// throughout.
    pub(crate) fn hold_within(&self, limit: Duration) -> Result<DirectionGuard<'_, T>, Errno> {
        match self.lock.lock_within(limit) {
            Some(Taken::Free) => Ok(DirectionGuard { direction: self }),
            Some(Taken::Inherited) => {
                self.broken.store(1, Ordering::Relaxed);
                Ok(DirectionGuard { direction: self })
            }
            Some(Taken::Recursive) | None => Err(Errno::AGAIN),
        }
    }

    /// Whether this very thread holds the lock, in a call that a signal handler has interrupted. The handler cannot wait for that call, which
    /// continues when the handler has returned.
    pub(crate) fn is_held_by_this_thread(&self) -> bool {
        self.lock.is_own()
    }

    /// Whether no living thread holds the lock.
    pub(crate) fn is_free(&self) -> bool {
        self.lock.is_free()
    }

    /// Takes the lock if nobody has it.
    #[inline]
    pub(crate) fn try_hold(&self) -> Option<DirectionGuard<'_, T>> {
        // Not `then_some`: a guard that is made for nothing would release a lock that another holds.
        self.lock.try_lock().then(|| DirectionGuard { direction: self })
    }

    /// Whether a holder has died in the middle of something.
    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed) != 0
    }

    /// Begins again. Nobody else knows of the connection yet, and no living thread holds the lock.
    pub(crate) fn reset(&self) {
        self.broken.store(0, Ordering::Relaxed);
        self.counted.store(0, Ordering::Relaxed);
        self.lock.release_dead();
    }
}

impl<T> fmt::Debug for DirectionLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Direction").field("lock", &self.lock).finish_non_exhaustive()
    }
}

/// The lock is held until this is dropped.
pub(crate) struct DirectionGuard<'a, T> {
    direction: &'a DirectionLock<T>,
}

impl<T> Deref for DirectionGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock, so no other reference exists but those made through this guard.
        unsafe { &*self.direction.state.get() }
    }
}

impl<T> DerefMut for DirectionGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.direction.state.get() }
    }
}

impl<T> Drop for DirectionGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.direction.lock.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_get_it_does_not_let_it_go() {
        let direction = DirectionLock {
            lock: Lock::new(),
            broken: AtomicU32::new(0),
            counted: AtomicU64::new(0),
            state: UnsafeCell::new(0u8),
        };
        let held = direction.try_hold().unwrap();
        assert!(direction.try_hold().is_none());
        assert!(direction.try_hold().is_none(), "it is held still");
        drop(held);
        assert!(direction.try_hold().is_some());
    }
}
