//! Signals held back while a thread looks at rings before it sleeps.
#![expect(unsafe_code, reason = "changes this thread's signal mask")]

use libc::sigset_t;
use std::mem::MaybeUninit;
use std::ptr;

/// Whether signals are held back by us, and what the program's own mask is. Let in again when this is dropped.
pub(crate) struct BlockedSignals {
    mask: Option<sigset_t>,
}

impl BlockedSignals {
    /// Nothing is held back.
    pub(crate) const fn none() -> Self {
        Self { mask: None }
    }

    /// Held back during a step by which a connection gets its ring, if the program has any handler. One that jumped out would leave the connection in the
    /// middle of the step, and on TCP for ever.
    pub(crate) fn during_step() -> Self {
        let mut signals = Self::none();
        signals.hold_if_handled();
        signals
    }

    /// Holds all signals back (but those that the C library keeps for itself).
    pub(crate) fn hold(&mut self) {
        if self.mask.is_some() {
            return;
        }
        let mut all = MaybeUninit::<sigset_t>::uninit();
        let mut before = MaybeUninit::<sigset_t>::uninit();
        // SAFETY: both point to sets of the right size; `all` is filled in before it is read.
        let result = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr())
        };
        if result == 0 {
            // SAFETY: filled in by the call that succeeded.
            self.mask = Some(unsafe { before.assume_init() });
        }
    }

    /// To be called before a thread arms what it waits for. A handler that ran between the last look and the sleep could use the same connection
    /// or set, and consume the doorbell that would end the sleep. So handlers run only inside the sleep, which they interrupt.
    pub(crate) fn hold_if_handled(&mut self) {
        if super::are_handled() {
            self.hold();
        }
    }

    /// The mask to sleep with: what the call asks for, or what was before signals were held back; null for the present one.
    pub(crate) fn mask(&self, asked: *const sigset_t) -> *const sigset_t {
        if !asked.is_null() {
            return asked;
        }
        self.mask.as_ref().map_or(ptr::null(), ptr::from_ref)
    }

    /// The program's own mask, while they are held back.
    pub(crate) fn own_mask(&self) -> Option<&sigset_t> {
        self.mask.as_ref()
    }

    /// Whether any are held back.
    pub(crate) fn is_held(&self) -> bool {
        self.mask.is_some()
    }

    /// Lets them in again.
    pub(crate) fn release(&mut self) {
        if let Some(mask) = self.mask.take() {
            // SAFETY: restores this thread's own mask.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, ptr::null_mut()) };
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        self.release();
    }
}
