//! A lock per direction of a connection, in memory that several processes share.
//!
//! It is held for the time of a copy, never while waiting. Its word is 0, or the number of the thread that holds it, with one
//! bit for "someone sleeps on me". A holder that died is found out by asking the kernel for its number.
//!
//! A thread that finds itself as the holder is in a signal handler that interrupted the holder: waiting would be for ever, so the call
//! fails. Or it was in such a handler and has left it by `longjmp`, and the call that held the lock will never go on. Then no frame of its
//! stack was interrupted by a signal, and it inherits the lock from itself.

use crate::sys;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const SLEEPER: u32 = 1 << 31;
/// How long one sleeps at most before one asks whether the holder lives.
const DOUBT: Duration = Duration::from_millis(20);

/// A lock in memory that several processes share. The word is the holder's thread id; 0 while nobody holds it.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Lock(AtomicU32);

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

impl Lock {
    /// A free lock.
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Takes it.
    #[inline]
    pub(crate) fn lock(&self) -> Taken {
        let me = sys::thread();
        match self.0.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Taken::Free,
            Err(_) => self.lock_slowly(me, None).unwrap_or(Taken::Recursive),
        }
    }

    /// The same, with a limit to the wait. `None`: another thread that lives has held it throughout, and may have abandoned it.
    pub(crate) fn lock_within(&self, limit: Duration) -> Option<Taken> {
        let me = sys::thread();
        match self.0.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(Taken::Free),
            Err(_) => self.lock_slowly(me, Some(sys::now() + limit)),
        }
    }

    /// Whether the calling thread has it.
    pub(crate) fn is_own(&self) -> bool {
        self.0.load(Ordering::Relaxed) & !SLEEPER == sys::thread()
    }

    /// Whether nobody has it, or a thread that is dead.
    pub(crate) fn is_free(&self) -> bool {
        let holder = self.0.load(Ordering::Acquire) & !SLEEPER;
        holder == 0 || !sys::is_alive(holder)
    }

    /// Takes it away from a holder that is dead.
    pub(crate) fn release_dead(&self) {
        let word = self.0.load(Ordering::Acquire);
        if word & !SLEEPER != 0
            && !sys::is_alive(word & !SLEEPER)
            && self.0.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            && word & SLEEPER != 0
        {
            let _ = futex::wake(&self.0, futex::Flags::empty(), 1);
        }
    }

    /// Takes it if nobody has it.
    #[inline]
    pub(crate) fn try_lock(&self) -> bool {
        self.0.compare_exchange(0, sys::thread(), Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[cold]
    fn lock_slowly(&self, me: u32, deadline: Option<Duration>) -> Option<Taken> {
        for _ in 0..200 {
            let word = self.0.load(Ordering::Relaxed);
            if word & !SLEEPER == me {
                return Some(Self::again());
            }
            if word == 0 && self.0.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Some(Taken::Free);
            }
            std::hint::spin_loop();
        }
        let mut suspect = 0;
        loop {
            let word = self.0.load(Ordering::Relaxed);
            if word == 0 {
                // Others may sleep still: the bit stays, at the price of one wake-up too many.
                if self.0.compare_exchange(0, me | SLEEPER, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return Some(Taken::Free);
                }
                continue;
            }
            if word & !SLEEPER == me {
                return Some(Self::again());
            }
            // Twice the same holder: long for a copy. It may be dead.
            if word == suspect && !sys::is_alive(word & !SLEEPER) {
                if self.0.compare_exchange(word, me | SLEEPER, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return Some(Taken::Inherited);
                }
                continue;
            }
            if deadline.is_some_and(|deadline| sys::now() >= deadline) {
                return None;
            }
            if word & SLEEPER == 0
                && self.0.compare_exchange(word, word | SLEEPER, Ordering::Relaxed, Ordering::Relaxed).is_err()
            {
                continue;
            }
            let word = word | SLEEPER;
            let doubt = futex::Timespec { tv_sec: 0, tv_nsec: i64::from(DOUBT.subsec_nanos()) };
            // Woken, timed out, interrupted or too late: look again in any case. Not private: other processes wait here too.
            let _ = futex::wait(&self.0, futex::Flags::empty(), word, Some(&doubt));
            suspect = word;
        }
    }

    /// This thread has it already.
    #[cold]
    fn again() -> Taken {
        if crate::frames::may_be_in_handler() { Taken::Recursive } else { Taken::Inherited }
    }

    /// Gives it back.
    #[inline]
    pub(crate) fn unlock(&self) {
        if self.0.swap(0, Ordering::Release) & SLEEPER != 0 {
            let _ = futex::wake(&self.0, futex::Flags::empty(), 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static HELD: Lock = Lock::new();
    static TAKEN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn handler(_: libc::c_int) {
        TAKEN.store(1 + HELD.lock() as u32, Ordering::Relaxed);
    }

    #[test]
    fn holder_below_a_handler_is_told_and_an_abandoned_lock_inherited() {
        assert_eq!(HELD.lock(), Taken::Free);
        assert!(!HELD.try_lock());
        #[expect(unsafe_code, reason = "a signal handler of this test")]
        // SAFETY: the handler takes a lock and stores a number; nothing else here uses the signal.
        unsafe {
            libc::signal(libc::SIGWINCH, handler as *const () as libc::sighandler_t);
            libc::raise(libc::SIGWINCH);
        }
        assert_eq!(TAKEN.load(Ordering::Relaxed), 1 + Taken::Recursive as u32);
        // No handler is on the stack: the frame that held it has been jumped over.
        assert_eq!(HELD.lock(), Taken::Inherited);
        HELD.unlock();
        assert!(HELD.try_lock());
        HELD.unlock();
    }

    #[test]
    fn waiters_get_it_in_turn() {
        let lock = Lock::new();
        let count = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..20_000 {
                        assert_eq!(lock.lock(), Taken::Free);
                        // Not one step, so that two holders would lose some.
                        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        lock.unlock();
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 80_000);
    }

    #[test]
    fn lock_that_a_living_thread_keeps_is_given_up_at_the_limit() {
        let lock = Lock::new();
        assert_eq!(lock.lock(), Taken::Free);
        let other = std::thread::scope(|s| s.spawn(|| lock.lock_within(Duration::from_millis(30))).join().unwrap());
        assert_eq!(other, None);
        assert!(!lock.is_free());
        lock.unlock();
        assert!(lock.is_free());
        assert_eq!(lock.lock_within(Duration::ZERO), Some(Taken::Free));
    }

    #[test]
    fn a_dead_holder_is_inherited_from() {
        let lock = Lock::new();
        // A thread that has ended is as dead as a process.
        let holder = std::thread::scope(|s| s.spawn(|| (lock.lock(), sys::thread()).1).join().unwrap());
        assert_eq!(lock.0.load(Ordering::Relaxed), holder);
        assert!(lock.is_free());
        lock.release_dead();
        assert_eq!(lock.lock(), Taken::Free);
        lock.release_dead();
        assert!(!lock.try_lock(), "its holder lives");
        lock.unlock();
        let _ = std::thread::scope(|s| s.spawn(|| lock.lock()).join().unwrap());
        assert_eq!(lock.lock(), Taken::Inherited);
        lock.unlock();
    }
}
