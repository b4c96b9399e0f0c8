//! The word of a lock: how it is taken, inherited, released and kept over a fork.
//!
//! The word is 0, or the number of the thread that holds the lock, with one bit for "a thread sleeps until it is released" and one for
//! "held over a fork". The kernel's part, which is to sleep, to wake and to know which thread lives, is a [`LockHost`], so that loom runs
//! this code with a model of the kernel (`crates/shm/tests/loom_preload.rs`).

use partywall_shm::sync::{AtomicU32, Ordering};
use std::time::Duration;

/// A thread sleeps until the lock is released.
const SLEEPER: u32 = 1 << 31;
/// The holder keeps the lock over a fork.
const FROZEN: u32 = 1 << 30;
/// The bits of the holder's number. Numbers of threads are below 2^22 (the kernel's PID_MAX_LIMIT).
const HOLDER: u32 = FROZEN - 1;

/// The operations that a lock needs from the calling thread and from the kernel.
pub(crate) trait LockHost {
    /// How often a thread looks again before it sleeps.
    const SPINS: u32;

    /// The number of the calling thread.
    fn thread(&self) -> u32;

    /// Whether the calling thread had this number before it found out that it is in a child. A child that a bare system call has made finds
    /// that out late, perhaps while it holds a lock.
    fn was_thread(&self, number: u32) -> bool;

    /// Whether a thread of this number exists.
    fn is_alive(&self, number: u32) -> bool;

    /// Whether the calling thread may be inside a signal handler.
    fn may_be_in_handler(&self) -> bool;

    /// The time, to be compared with the limit of [`LockWord::lock_until`].
    fn now(&self) -> Duration;

    /// Waits a moment without the kernel.
    fn pause(&self);

    /// Sleeps while the word is `expected`, until it is woken or has slept long enough to doubt that the holder lives. May return early.
    fn sleep(&self, word: &AtomicU32, expected: u32);

    /// Wakes one thread that sleeps on the word.
    fn wake(&self, word: &AtomicU32);
}

/// How a lock was got, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// As it should be.
    Free,
    /// From a holder that died with it, or was abandoned by its thread: what it guards may be half done.
    Inherited,
    /// This thread holds it already, further down its stack.
    Recursive,
}

/// The word itself.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct LockWord(AtomicU32);

impl LockWord {
    /// A free lock.
    #[cfg(not(loom))]
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// A free lock. Loom's atomics cannot be made at compile time.
    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Takes the lock if no thread holds it.
    #[inline]
    pub(crate) fn try_lock(&self, host: &impl LockHost) -> bool {
        self.replace(0, host.thread())
    }

    /// Takes the lock.
    #[inline]
    pub(crate) fn lock(&self, host: &impl LockHost) -> Taken {
        let me = host.thread();
        if self.replace(0, me) {
            return Taken::Free;
        }
        self.lock_slowly(host, me, None).unwrap_or(Taken::Recursive)
    }

    /// Takes the lock, but waits until `deadline` at most. `None`: another thread that lives has held it throughout, and may have abandoned it.
    pub(crate) fn lock_until(&self, host: &impl LockHost, deadline: Duration) -> Option<Taken> {
        let me = host.thread();
        if self.replace(0, me) {
            return Some(Taken::Free);
        }
        self.lock_slowly(host, me, Some(deadline))
    }

    /// Whether the calling thread holds the lock.
    pub(crate) fn is_own(&self, host: &impl LockHost) -> bool {
        self.0.load(Ordering::Relaxed) & HOLDER == host.thread()
    }

    /// Whether no thread holds the lock, or only a dead one.
    pub(crate) fn is_free(&self, host: &impl LockHost) -> bool {
        // EDGE lock: acquires from `LockWord::unlock`, since the caller reuses what the lock guards.
        let holder = self.0.load(Ordering::Acquire) & HOLDER;
        holder == 0 || !host.is_alive(holder)
    }

    /// Releases the lock for a holder that is dead.
    pub(crate) fn release_dead(&self, host: &impl LockHost) {
        let word = self.0.load(Ordering::Relaxed);
        let holder = word & HOLDER;
        // EDGE lock: acquires what an earlier holder left, and releases it to the next.
        if holder != 0
            && !host.is_alive(holder)
            && self.0.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            && word & SLEEPER != 0
        {
            host.wake(&self.0);
        }
    }

    /// Takes the lock by a change of its word.
    #[inline]
    fn replace(&self, from: u32, to: u32) -> bool {
        // EDGE lock: acquires from `LockWord::unlock`; the last holder's writes are over and seen.
        self.0.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[cold]
    fn lock_slowly<H: LockHost>(&self, host: &H, me: u32, deadline: Option<Duration>) -> Option<Taken> {
        for _ in 0..H::SPINS {
            let word = self.0.load(Ordering::Relaxed);
            if word & HOLDER == me {
                return Some(Self::again(host));
            }
            if word == 0 && self.replace(0, me) {
                return Some(Taken::Free);
            }
            host.pause();
        }
        let mut suspect = 0;
        loop {
            let word = self.0.load(Ordering::Relaxed);
            if word == 0 {
                // Others may sleep still: the bit stays, at the price of one wake-up too many.
                if self.replace(0, me | SLEEPER) {
                    return Some(Taken::Free);
                }
                continue;
            }
            if word & HOLDER == me {
                return Some(Self::again(host));
            }
            // Twice the same holder: long for a copy. It may be dead.
            if word == suspect && !host.is_alive(word & HOLDER) {
                if self.replace(word, me | SLEEPER) {
                    return Some(Taken::Inherited);
                }
                continue;
            }
            if deadline.is_some_and(|deadline| host.now() >= deadline) {
                return None;
            }
            if word & SLEEPER == 0
                && self.0.compare_exchange(word, word | SLEEPER, Ordering::Relaxed, Ordering::Relaxed).is_err()
            {
                continue;
            }
            // Woken, timed out, interrupted or too late: look again in any case.
            host.sleep(&self.0, word | SLEEPER);
            suspect = word | SLEEPER;
        }
    }

    /// This thread has it already.
    #[cold]
    fn again(host: &impl LockHost) -> Taken {
        if host.may_be_in_handler() { Taken::Recursive } else { Taken::Inherited }
    }

    /// Gives the lock back. If this thread does not hold it, it stays as it is: a frame whose copy in another process, or whose lock a later
    /// frame has inherited, must not release the lock of the thread that holds it by now.
    #[inline]
    pub(crate) fn unlock(&self, host: &impl LockHost) {
        let me = host.thread();
        // EDGE lock: releases the holder's writes; acquired in `LockWord::replace`.
        if let Err(word) = self.0.compare_exchange(me, 0, Ordering::Release, Ordering::Relaxed) {
            self.unlock_slowly(host, me, word);
        }
    }

    fn unlock_slowly(&self, host: &impl LockHost, me: u32, mut word: u32) {
        loop {
            let holder = word & HOLDER;
            if holder == 0 || holder != me && !host.was_thread(holder) {
                return;
            }
            // EDGE lock: as in `LockWord::unlock`. A thread may set its bit meanwhile.
            match self.0.compare_exchange(word, 0, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        if word & SLEEPER != 0 {
            host.wake(&self.0);
        }
    }

    /// Frees it whichever thread holds it. For a lock that no other thread can reach.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Takes the lock and keeps it over a fork, until [`LockWord::thaw`] in the parent and [`LockWord::thaw_in_child`] in the child. In a
    /// handler that has interrupted the holder it stays the interrupted frame's, in both.
    pub(crate) fn freeze(&self, host: &impl LockHost) {
        if self.lock(host) != Taken::Recursive {
            self.0.fetch_or(FROZEN, Ordering::Relaxed);
        }
    }

    /// After a fork, in the parent.
    pub(crate) fn thaw(&self, host: &impl LockHost) {
        let word = self.0.load(Ordering::Relaxed);
        if word & FROZEN != 0 && word & HOLDER == host.thread() {
            self.unlock(host);
        }
    }

    /// After a fork, in the child, if the lock lies in memory of this process alone. The child has one thread: either that thread took the
    /// lock for the fork, or it holds the lock further down its stack, under the number that it had in the parent.
    pub(crate) fn thaw_in_child(&self, host: &impl LockHost) {
        let word = self.0.load(Ordering::Relaxed);
        if word & HOLDER != 0 {
            let holder = if word & FROZEN != 0 { 0 } else { host.thread() };
            self.0.store(holder, Ordering::Relaxed);
        }
    }
}
