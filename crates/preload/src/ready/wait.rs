//! Waiting in an epoll set.
//!
//! ```text
//!   look at the hot ones --> something: tell (and ask the kernel every few answers)
//!        | nothing
//!   stay awake: look, and ask the kernel every 20 us
//!        | nothing
//!   arm, fence, look once more, sleep in the kernel --> sort its events, look
//! ```
#![expect(unsafe_code, reason = "fills in the caller's array of events")]

use super::budget::Awake;
use super::held::Held;
use super::patience::{self, Patience};
use super::set::{self, Set};
use super::tag::Tag;
use crate::{conn, real, sys};
use libc::{c_int, epoll_event, sigset_t};
use rustix::io::Errno;
use std::ptr;
use std::time::Duration;

/// A call that waits in a set.
#[derive(Debug)]
pub(crate) struct Call {
    /// The set.
    pub(crate) fd: c_int,
    /// The caller's array, and how long it is.
    pub(crate) events: *mut epoll_event,
    pub(crate) max: c_int,
    /// What the caller lets it take.
    pub(crate) patience: Patience,
    /// The signals to let in while it sleeps; null for those that are.
    pub(crate) mask: *const sigset_t,
    /// Whether the kernel is to be told of time by the nanosecond.
    pub(crate) exact: bool,
}

/// `epoll_wait` and its kin. `plain` is the call as the program made it.
#[inline]
pub(crate) fn wait(call: Call, plain: impl FnOnce() -> c_int) -> c_int {
    match set::of(call.fd) {
        Some(set) if set.has_candidates() && call.max > 0 && !call.events.is_null() => wait_in(set, call, plain),
        _ => plain(),
    }
}

fn wait_in(set: &'static Set, mut call: Call, plain: impl FnOnce() -> c_int) -> c_int {
    super::inherit::check(set);
    if set.rings.load(std::sync::atomic::Ordering::Acquire) == 0 && set.datagrams.is_empty() {
        if call.patience.is_none() {
            let n = plain();
            return if n > 0 { call.sort(set, n, 0) } else { n };
        }
        // Should a connection get its ring while this sleeps, its peer must ring.
        let _ = call.patience.left();
        set.fall_asleep();
        let n = plain();
        set.wake_up();
        if n <= 0 {
            return n;
        }
        let kept = call.sort(set, n, 0);
        if kept > 0 {
            return kept;
        }
    }
    call.look_and_sleep(set)
}

impl Call {
    fn look_and_sleep(&mut self, set: &'static Set) -> c_int {
        let mut told = 0;
        let mut asked = false;
        if set.is_due() {
            asked = true;
            told = match self.ask(set) {
                Ok(n) => n,
                Err(()) => return -1,
            };
        }
        told += self.scan(set, told);
        if told == 0 && !asked && self.patience.is_none() {
            told = match self.ask(set) {
                Ok(n) => n,
                Err(()) => return -1,
            };
            told += self.scan(set, told);
        }
        if told > 0 || self.patience.is_none() {
            return answer(set, told);
        }
        set.settle_datagrams();
        let mut held = Held::none();
        let mut found = 0;
        let (mut failed, mut from_kernel) = (false, 0);
        let limit = self.patience.left();
        let this = &*self;
        let awake = set.budget.stay_awake(
            &mut held,
            limit,
            || set.peers(),
            || {
                found = this.scan(set, 0);
                found > 0
            },
            || match this.ask(set) {
                Ok(n) => {
                    from_kernel = n + this.scan(set, n);
                    from_kernel > 0
                }
                Err(()) => {
                    failed = true;
                    true
                }
            },
        );
        match awake {
            Awake::Ready => return answer(set, found),
            Awake::Kernel if failed => return -1,
            Awake::Kernel => return answer(set, from_kernel),
            Awake::Vain => {}
        }
        set.fall_asleep();
        let told = self.sleep(set, &held);
        set.wake_up();
        if told < 0 { told } else { answer(set, told) }
    }

    /// Sleeps until something is to be told, the time is over, or a signal comes.
    fn sleep(&mut self, set: &'static Set, held: &Held) -> c_int {
        loop {
            if set.arm_for_sleep() {
                conn::heavy_fence();
                let told = self.scan(set, 0);
                if told > 0 {
                    return told;
                }
            }
            let Some(asleep) = set.close_datagrams() else {
                let told = self.scan(set, 0);
                if told > 0 {
                    return told;
                }
                // Another thread has read it.
                continue;
            };
            let left = self.patience.left();
            let slice = super::inherit::slice(set);
            let time = match (left, slice) {
                (Some(left), Some(slice)) => Some(left.min(slice)),
                (one, other) => one.or(other),
            };
            let since = sys::now();
            let n = self.kernel(time, held.mask(self.mask));
            asleep.wake_up(sys::now().saturating_sub(since));
            if n < 0 {
                return n;
            }
            let mut told = 0;
            if n > 0 {
                set.budget.slept(sys::now().saturating_sub(since));
                set.asked();
                told = self.sort(set, n, 0);
            }
            super::inherit::check(set);
            told += self.scan(set, told);
            if told > 0 || self.patience.left() == Some(Duration::ZERO) {
                return told;
            }
        }
    }

    fn kernel(&self, time: Option<Duration>, mask: *const sigset_t) -> c_int {
        if self.exact {
            let time = time.map(patience::timespec);
            let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
            // SAFETY: the caller's array and mask, valid by the contract of its call.
            unsafe { real::epoll_pwait2(self.fd, self.events, self.max, time, mask) }
        } else {
            // SAFETY: as above.
            unsafe { real::epoll_pwait(self.fd, self.events, self.max, patience::millis(time), mask) }
        }
    }

    /// Asks the kernel without waiting; how many events of the program's own came.
    fn ask(&self, set: &'static Set) -> Result<c_int, ()> {
        set.asked();
        let mut kept = 0;
        // Events of ours take the place of others in the array: once noted, they make room. Not for ever, though.
        for _ in 0..64 {
            let (end, room) = (self.events.wrapping_add(kept as usize), self.max - kept);
            // SAFETY: the rest of the caller's array, valid by the contract of its call.
            let n = unsafe { real::epoll_wait(self.fd, end, room, 0) };
            if n < 0 {
                // Nothing was waited for: what interrupts is the next sleep's matter.
                return if sys::errno() == Errno::INTR || kept > 0 { Ok(kept) } else { Err(()) };
            }
            let own = self.sort(set, n, kept);
            kept += own;
            if n < room || own == n {
                break;
            }
        }
        Ok(kept)
    }

    /// Keeps the program's own events of the `n` that the kernel put behind `at`, and notes ours. Returns how many are kept.
    fn sort(&self, set: &'static Set, n: c_int, at: c_int) -> c_int {
        let mut kept = 0;
        for i in 0..n {
            // SAFETY: the kernel has filled in so many entries of the caller's array.
            let event = unsafe { *self.events.add((at + i) as usize) };
            match Tag::of(event.u64) {
                Some(tag) => set.note(tag, event.events),
                None => {
                    if kept != i {
                        // SAFETY: as above, an earlier entry.
                        unsafe { *self.events.add((at + kept) as usize) = event };
                    }
                    kept += 1;
                }
            }
        }
        kept
    }

    /// Tells what is ready of the hot ones behind the first `at` entries; returns how many.
    #[inline]
    fn scan(&self, set: &'static Set, at: c_int) -> c_int {
        let mut end = self.events.wrapping_add(at as usize);
        let mut room = (self.max - at) as usize;
        let mut tell = |events, data| {
            // SAFETY: at most `room` entries behind `at`, inside the caller's array.
            unsafe { end.write(epoll_event { events, u64: data }) };
            end = end.wrapping_add(1);
        };
        let mut told = set.scan(room, &mut tell);
        room -= told;
        // SAFETY: the caller's array, of which the kernel has filled in so many.
        let is_told = |data| (0..at).any(|i| unsafe { (*self.events.add(i as usize)).u64 } == data);
        told += set.scan_datagrams(room, is_told, tell);
        told as c_int
    }
}

#[inline]
fn answer(set: &'static Set, told: c_int) -> c_int {
    set.answered();
    told
}
