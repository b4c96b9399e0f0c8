//! A lock per direction of a connection, in memory that several processes share.
//!
//! It is held for the time of a copy, never while waiting. A holder that died is found out by asking the kernel for its number ([`word`] has
//! the steps, and this module the kernel).
//!
//! A thread that finds itself as the holder is in a signal handler that interrupted the holder. Waiting would never end, so the call
//! fails. Or the thread has left such a handler by `longjmp`, and the call that held the lock will never continue. Then no frame of its
//! stack was interrupted by a signal, and it inherits the lock from itself.

pub(crate) mod word;

use crate::sys;
use rustix::thread::futex;
use std::sync::atomic::AtomicU32;
use std::time::Duration;
pub(crate) use word::Taken;
use word::{LockHost, LockWord};

/// How long one sleeps at most before one asks whether the holder lives.
const DOUBT: Duration = Duration::from_millis(20);

/// This thread and this kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThisThread;

impl LockHost for ThisThread {
    const SPINS: u32 = 200;

    #[inline]
    fn thread(&self) -> u32 {
        sys::thread()
    }

    fn was_thread(&self, number: u32) -> bool {
        sys::former_thread() == number
    }

    fn is_alive(&self, number: u32) -> bool {
        sys::is_alive(number)
    }

    fn may_be_in_handler(&self) -> bool {
        crate::frames::may_be_in_handler()
    }

    fn now(&self) -> Duration {
        sys::now()
    }

    fn pause(&self) {
        std::hint::spin_loop();
    }

    fn sleep(&self, word: &AtomicU32, expected: u32) {
        let doubt = futex::Timespec { tv_sec: 0, tv_nsec: i64::from(DOUBT.subsec_nanos()) };
        // Not private: other processes wait here too.
        let _ = futex::wait(word, futex::Flags::empty(), expected, Some(&doubt));
    }

    fn wake(&self, word: &AtomicU32) {
        let _ = futex::wake(word, futex::Flags::empty(), 1);
    }
}

/// A lock in memory that several processes share. The word is the holder's thread id, or 0 while the lock is free.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Lock(LockWord);

impl Lock {
    /// A free lock.
    pub(crate) const fn new() -> Self {
        Self(LockWord::new())
    }

    /// Takes it.
    #[inline]
    pub(crate) fn lock(&self) -> Taken {
        self.0.lock(&ThisThread)
    }

    /// Takes the lock, with a limit to the wait. `None`: another living thread has held it throughout, and may have abandoned it.
    pub(crate) fn lock_within(&self, limit: Duration) -> Option<Taken> {
        if self.try_lock() { Some(Taken::Free) } else { self.0.lock_until(&ThisThread, sys::now() + limit) }
    }

    /// Whether the calling thread has it.
    pub(crate) fn is_own(&self) -> bool {
        self.0.is_own(&ThisThread)
    }

    /// Whether the lock is free, or its holder is dead.
    pub(crate) fn is_free(&self) -> bool {
        self.0.is_free(&ThisThread)
    }

    /// Takes it away from a holder that is dead.
    pub(crate) fn release_dead(&self) {
        self.0.release_dead(&ThisThread);
    }

    /// Takes the lock if it is free.
    #[inline]
    pub(crate) fn try_lock(&self) -> bool {
        self.0.try_lock(&ThisThread)
    }

    /// Gives it back, if this thread holds it.
    #[inline]
    pub(crate) fn unlock(&self) {
        self.0.unlock(&ThisThread);
    }

    /// Frees it whichever thread holds it. For a child's copy of a lock in private memory, which threads of the parent held.
    pub(crate) fn clear(&self) {
        self.0.clear();
    }

    /// [`LockWord::freeze`].
    pub(crate) fn freeze(&self) {
        self.0.freeze(&ThisThread);
    }

    /// [`LockWord::thaw`].
    pub(crate) fn thaw(&self) {
        self.0.thaw(&ThisThread);
    }

    /// [`LockWord::thaw_in_child`].
    pub(crate) fn thaw_in_child(&self) {
        self.0.thaw_in_child(&ThisThread);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    static HELD: Lock = Lock::new();
    static TAKEN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn handler(_: libc::c_int) {
        TAKEN.store(1 + HELD.lock() as u32, Ordering::Relaxed);
    }

    #[test]
    fn lock_reports_recursive_handler_and_abandoned_holder() {
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
    fn contended_lock_loses_no_update() {
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
    fn lock_of_dead_thread_is_inherited() {
        let lock = Lock::new();
        // A thread that has ended is as dead as a process.
        let holder = std::thread::scope(|s| s.spawn(|| (lock.lock(), sys::thread()).1).join().unwrap());
        assert!(!lock.is_own() && holder != sys::thread());
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

    #[test]
    fn unlock_without_the_lock_leaves_its_holder() {
        let lock = Lock::new();
        std::thread::scope(|s| {
            s.spawn(|| {
                assert_eq!(lock.lock(), Taken::Free);
                // As a frame does whose copy in another process held the lock.
                std::thread::scope(|s| s.spawn(|| lock.unlock()).join().unwrap());
                assert!(lock.is_own());
                lock.unlock();
            });
        });
        assert!(lock.try_lock());
    }

    #[test]
    fn freeze_below_a_holder_leaves_it_the_lock() {
        static BELOW: Lock = Lock::new();
        static KEPT: AtomicU32 = AtomicU32::new(0);
        extern "C" fn handler(_: libc::c_int) {
            BELOW.freeze();
            BELOW.thaw();
            KEPT.store(1 + u32::from(BELOW.is_own()), Ordering::Relaxed);
        }
        assert_eq!(BELOW.lock(), Taken::Free);
        #[expect(unsafe_code, reason = "a signal handler of this test")]
        // SAFETY: the handler uses a lock and stores a number; nothing else here uses the signal.
        unsafe {
            libc::signal(libc::SIGURG, handler as *const () as libc::sighandler_t);
            libc::raise(libc::SIGURG);
        }
        assert_eq!(KEPT.load(Ordering::Relaxed), 2);
        BELOW.thaw_in_child();
        assert!(BELOW.is_own(), "the frame below goes on in the child");
        BELOW.unlock();
        BELOW.freeze();
        BELOW.thaw_in_child();
        assert!(BELOW.try_lock(), "taken for the fork only");
    }
}
