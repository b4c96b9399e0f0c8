//! Whether an interrupted call is to be taken up again.
//!
//! The kernel restarts a `recv` that a signal handler interrupted if that handler was installed with `SA_RESTART`; it never restarts the
//! calls in which this library sleeps, and does not report which handler ran. If all handlers of the program are alike, that does not
//! matter. If not, signals are blocked during the sleep, and examined before they are delivered.
#![expect(unsafe_code, reason = "asks for the handlers of signals, and for the cancellation of this thread")]

mod held;

pub(crate) use held::BlockedSignals;

use libc::{c_int, sigset_t};
use std::sync::atomic::{AtomicU32, Ordering};

/// The kind of the program's handlers in the low bits, and above them the number of changes. A survey stores what it has found only if that number
/// is the one that it began with, so a result from before a change never replaces `UNKNOWN`.
static HANDLERS: AtomicU32 = AtomicU32::new(UNKNOWN);
const KINDS: u32 = 3;
const UNKNOWN: u32 = 0;
const ALIKE: u32 = 1;
const MIXED: u32 = 2;
const NONE: u32 = 3;

/// The effect of a signal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SignalHandling {
    /// No handler.
    None,
    /// One after which calls are restarted.
    Restarts,
    /// One after which they fail.
    Interrupts,
}

// SAFETY: the signature that POSIX gives it.
unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// All but the C library's own.
fn all() -> impl Iterator<Item = c_int> {
    (1..=64).filter(|n| !(32..34).contains(n))
}

fn answer(signal: c_int) -> SignalHandling {
    // SAFETY: all zeros is a valid value, and the kernel fills it in.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks only; no handler is installed.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    if asked != 0 || action.sa_sigaction == libc::SIG_DFL || action.sa_sigaction == libc::SIG_IGN {
        SignalHandling::None
    } else if action.sa_flags & libc::SA_RESTART != 0 {
        SignalHandling::Restarts
    } else {
        SignalHandling::Interrupts
    }
}

/// The program has changed a handler. To be called after the change.
pub(crate) fn changed() {
    note_change(&HANDLERS);
}

fn note_change(handlers: &AtomicU32) {
    let next = |word: u32| (word & !KINDS).wrapping_add(KINDS + 1) | UNKNOWN;
    // EDGE handlers: releases the change; acquired in `handlers`, before a survey.
    let _ = handlers.fetch_update(Ordering::Release, Ordering::Relaxed, |word| Some(next(word)));
}

/// Whether the program has handlers of both kinds.
#[inline]
pub(crate) fn are_mixed() -> bool {
    handlers() == MIXED
}

/// Whether the program has any handler.
#[inline]
pub(crate) fn are_handled() -> bool {
    handlers() != NONE
}

#[inline]
fn handlers() -> u32 {
    // EDGE handlers: acquires the changes that are counted, so that a survey sees them.
    let word = HANDLERS.load(Ordering::Acquire);
    match word & KINDS {
        UNKNOWN => survey(&HANDLERS, word),
        known => known,
    }
}

/// Asks for all handlers. `before` is the word with the number of the changes that the survey sees at least.
#[cold]
fn survey(handlers: &AtomicU32, before: u32) -> u32 {
    let (mut restarts, mut interrupts) = (false, false);
    for signal in all() {
        match answer(signal) {
            SignalHandling::None => {}
            SignalHandling::Restarts => restarts = true,
            SignalHandling::Interrupts => interrupts = true,
        }
    }
    let found = match (restarts, interrupts) {
        (true, true) => MIXED,
        (false, false) => NONE,
        _ => ALIKE,
    };
    // After a change since then the next caller asks again.
    let _ = handlers.compare_exchange(before, before | found, Ordering::Relaxed, Ordering::Relaxed);
    found
}

/// Called after a wait that a handler interrupted. A thread that is being cancelled ends here.
pub(crate) fn end_if_cancelled() {
    // SAFETY: no lock is held and nothing is half done where waits are interrupted.
    unsafe { pthread_testcancel() };
}

/// Whether no handler of the program makes an interrupted call fail.
pub(crate) fn all_restart() -> bool {
    all().all(|signal| answer(signal) != SignalHandling::Interrupts)
}

/// Among the pending signals that `mask` would not block: whether there are any, and whether one of them makes the interrupted call fail.
pub(crate) fn pending(mask: &sigset_t) -> (bool, bool) {
    // SAFETY: all zeros is a valid value.
    let mut waiting: sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: fills in the set.
    if unsafe { libc::sigpending(&raw mut waiting) } != 0 {
        return (true, true);
    }
    let (mut any, mut interrupts) = (false, false);
    for signal in all() {
        // SAFETY: numbers of signals, and sets that were filled in.
        if unsafe { libc::sigismember(&raw const waiting, signal) == 1 && libc::sigismember(mask, signal) == 0 } {
            any = true;
            interrupts |= answer(signal) == SignalHandling::Interrupts;
        }
    }
    (any, interrupts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survey_from_before_a_change_is_not_kept() {
        let handlers = AtomicU32::new(UNKNOWN);
        let before = handlers.load(Ordering::Relaxed);
        // Another thread changes a handler and surveys while this one has begun a survey.
        note_change(&handlers);
        let after = handlers.load(Ordering::Relaxed);
        assert_eq!(after & KINDS, UNKNOWN);
        survey(&handlers, before);
        assert_eq!(handlers.load(Ordering::Relaxed), after, "the older survey is not kept");
        let found = survey(&handlers, after);
        assert_eq!(handlers.load(Ordering::Relaxed), after | found);
        // A change between two surveys of the same kind is a change all the same.
        note_change(&handlers);
        survey(&handlers, after);
        assert_eq!(handlers.load(Ordering::Relaxed) & KINDS, UNKNOWN);
    }

    #[test]
    fn number_of_changes_wraps_and_leaves_kinds_alone() {
        let handlers = AtomicU32::new(!KINDS | MIXED);
        note_change(&handlers);
        assert_eq!(handlers.load(Ordering::Relaxed), UNKNOWN);
    }
}
