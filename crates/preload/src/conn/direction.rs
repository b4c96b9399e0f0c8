//! One direction of a connection: its lock, and what it guards.
//!
//! Both lie in a block of the arena, where a child that was forked while the connection lived can store anything at any moment, also after it
//! has given up rights that its parent keeps. So what the lock guards lies there as plain words. A thread that takes the lock checks the
//! words once and works with a private copy. When it gives the lock back, it stores what has changed. Words that no direction can have mark it
//! as broken: the connection is reset.
//!
//! Such a child can also give away the lock. So in a process that has forked, the threads exclude each other from the mappings by a second
//! lock, which is in private memory ([`LocalState`]).

use crate::arena;
use crate::local::{self, LocalState};
use crate::lock::{Lock, Taken};
use rustix::io::Errno;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Words that a direction has for what it guards.
pub(crate) const WORDS: usize = 6;
/// How long a thread waits for a lock that another process may keep.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the lock of a direction guards.
pub(crate) trait DirectionState: Sized {
    /// Bytes of the ring that the direction has here now; 0 if there is none.
    fn capacity(local: &LocalState) -> u64;

    /// The lock that this process has for the direction.
    fn private(local: &LocalState) -> &Lock;

    /// The words to keep. All zeros are valid whatever the capacity.
    fn words(&self) -> [u64; WORDS];

    /// The state that has these words; `None` if there is none.
    fn resume(capacity: u64, words: [u64; WORDS]) -> Option<Self>;

    /// The state of a direction that has carried nothing.
    fn empty(capacity: u64) -> Self;
}

/// A lock, a count that is read without it, and what it guards.
#[repr(C, align(64))]
pub(crate) struct DirectionLock<T> {
    lock: Lock,
    /// A holder died while it held the lock, or the words that the lock guards are invalid.
    broken: AtomicU32,
    /// Bytes that have gone this way, while no ring is attached.
    pub(crate) counted: AtomicU64,
    words: [AtomicU64; WORDS],
    state: PhantomData<fn() -> T>,
}

impl<T: DirectionState> DirectionLock<T> {
    /// This process' part of the connection in whose block this lies.
    #[inline]
    fn local(&self) -> &'static LocalState {
        local::get(arena::index_of(std::ptr::from_ref(self).cast()))
    }

    /// Takes the lock. Fails if this very thread holds it below a signal handler: `EAGAIN` is what a handler can cope with,
    /// and cannot come from a deadlock. It also fails if another process has held it for long.
    #[inline]
    pub(crate) fn hold(&self) -> Result<DirectionGuard<'_, T>, Errno> {
        let local = self.local();
        if local.is_exposed() {
            return self.hold_exposed(local, PATIENCE);
        }
        match self.lock.lock() {
            Taken::Free => Ok(self.guard(local, None)),
            Taken::Recursive => Err(Errno::AGAIN),
            Taken::Inherited => {
                self.mark_broken();
                Ok(self.guard(local, None))
            }
        }
    }

    /// As [`DirectionLock::hold`], but waits for about so long at most. `EAGAIN` also if another thread that lives has held the lock
    /// throughout.
    pub(crate) fn hold_within(&self, limit: Duration) -> Result<DirectionGuard<'_, T>, Errno> {
        let local = self.local();
        if local.is_exposed() {
            return self.hold_exposed(local, limit);
        }
        match self.lock.lock_within(limit) {
            Some(Taken::Free) => Ok(self.guard(local, None)),
            Some(Taken::Inherited) => {
                self.mark_broken();
                Ok(self.guard(local, None))
            }
            Some(Taken::Recursive) | None => Err(Errno::AGAIN),
        }
    }

    /// The same where another process may have the block: takes both locks.
    #[cold]
    fn hold_exposed(&self, local: &'static LocalState, limit: Duration) -> Result<DirectionGuard<'_, T>, Errno> {
        let private = T::private(local);
        // The private one first: no other process can change its word.
        for lock in [private, &self.lock] {
            match lock.lock_within(limit) {
                Some(Taken::Free) => {}
                Some(Taken::Inherited) => self.mark_broken(),
                Some(Taken::Recursive) | None => {
                    if !std::ptr::eq(lock, private) {
                        private.unlock();
                    }
                    return Err(Errno::AGAIN);
                }
            }
        }
        Ok(self.guard(local, Some(private)))
    }

    /// Takes the lock if it is free.
    #[inline]
    pub(crate) fn try_hold(&self) -> Option<DirectionGuard<'_, T>> {
        let local = self.local();
        let private = local.is_exposed().then(|| T::private(local));
        if private.is_some_and(|private| !private.try_lock()) {
            return None;
        }
        if self.lock.try_lock() {
            return Some(self.guard(local, private));
        }
        if let Some(private) = private {
            private.unlock();
        }
        None
    }

    /// Both locks are held.
    #[inline]
    fn guard(&self, local: &'static LocalState, private: Option<&'static Lock>) -> DirectionGuard<'_, T> {
        let capacity = T::capacity(local);
        // Each is loaded once, and checked together with the others: from here on, nobody else's stores count.
        let words = std::array::from_fn(|at| self.words[at].load(Ordering::Relaxed));
        let state = T::resume(capacity, words).unwrap_or_else(|| self.refuse_words(capacity));
        DirectionGuard { direction: self, private, has_changed: false, state }
    }

    #[cold]
    fn refuse_words(&self, capacity: u64) -> T {
        // Without a ring, a closed connection has left the words there.
        if capacity != 0 {
            self.mark_broken();
        }
        T::empty(capacity)
    }

    #[cold]
    fn mark_broken(&self) {
        self.broken.store(1, Ordering::Relaxed);
    }

    /// Whether this very thread holds the lock, in a call that a signal handler has interrupted. The handler cannot wait for that call, which
    /// continues when the handler has returned.
    pub(crate) fn is_held_by_this_thread(&self) -> bool {
        // Not only the private lock of an exposed connection: this thread may hold the direction from before the fork.
        T::private(self.local()).is_own() || self.lock.is_own()
    }

    /// Whether no living thread holds the lock.
    pub(crate) fn is_free(&self) -> bool {
        self.lock.is_free() && T::private(self.local()).is_free()
    }

    /// Whether a holder has died in the middle of something, or another process has stored invalid words.
    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed) != 0
    }

    /// Resets the direction for a new connection. No other thread knows the connection yet, and no living thread holds the lock.
    pub(crate) fn reset(&self) {
        self.broken.store(0, Ordering::Relaxed);
        self.counted.store(0, Ordering::Relaxed);
        self.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.lock.release_dead();
        T::private(self.local()).release_dead();
    }
}

impl<T> fmt::Debug for DirectionLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Direction").field("lock", &self.lock).finish_non_exhaustive()
    }
}

/// What another process can do to a direction.
#[cfg(test)]
impl<T> DirectionLock<T> {
    pub(super) fn store_word(&self, at: usize, value: u64) {
        self.words[at].store(value, Ordering::Relaxed);
    }

    pub(super) fn free_lock(&self) {
        self.lock.unlock();
    }

    pub(super) fn keep_lock(&self) {
        self.lock.lock();
    }
}

/// A place in the stream, or none, as a word.
#[inline]
pub(crate) const fn optional(at: Option<u64>) -> u64 {
    match at {
        Some(at) => at.wrapping_add(1),
        None => 0,
    }
}

/// The lock is held until this is dropped.
pub(crate) struct DirectionGuard<'a, T: DirectionState> {
    direction: &'a DirectionLock<T>,
    private: Option<&'static Lock>,
    has_changed: bool,
    state: T,
}

impl<T: DirectionState> Deref for DirectionGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.state
    }
}

impl<T: DirectionState> DerefMut for DirectionGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.has_changed = true;
        &mut self.state
    }
}

impl<T: DirectionState> Drop for DirectionGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.has_changed {
            for (word, value) in self.direction.words.iter().zip(self.state.words()) {
                word.store(value, Ordering::Relaxed);
            }
        }
        // The lock releases the words to its next holder.
        self.direction.lock.unlock();
        if let Some(private) = self.private {
            private.unlock();
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::conn::Pair;

    #[test]
    fn direction_that_was_not_got_stays_held() {
        let pair = Pair::candidates(4096);
        let direction = &pair.conn_a().tx;
        let held = direction.try_hold().unwrap();
        assert!(direction.try_hold().is_none());
        assert!(direction.try_hold().is_none(), "it is held still");
        drop(held);
        assert!(direction.try_hold().is_some());
    }
}
