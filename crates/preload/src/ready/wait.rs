//! Waiting in an epoll set.
//!
//! ```text
//!   look at the hot ones --> something: tell (and ask the kernel every few answers)
//!        | nothing
//!   stay awake: look, and ask the kernel now and then
//!        | nothing
//!   arm, fence, look once more, sleep in the kernel --> sort its events, look
//! ```
#![expect(unsafe_code, reason = "passes the caller's array and signal mask on to the kernel")]

use super::answer::{KernelAnswer, ReadyList};
use super::budget::Awake;
use super::look::{EndsAsked, EndsNews};
use super::set::{self, Set};
use crate::local::longest_sleep;
use crate::patience::{self, TimeLimit, shorter};
use crate::signals::BlockedSignals;
use crate::{broker, real, sys};
use libc::{c_int, epoll_event, sigset_t};
use partywall_shm::half::{Fenced, Rounds, SecondLook, SleepStep};
use rustix::io::Errno;
use std::cell::RefCell;
use std::ptr;
use std::time::Duration;

/// A call that waits in a set.
#[derive(Debug)]
pub(crate) struct Call {
    fd: c_int,
    /// The caller's array, and how long it is.
    events: *mut epoll_event,
    max: c_int,
    /// The longest time that the call may take.
    patience: TimeLimit,
    /// The signals to let in while it sleeps; null for those that are.
    mask: *const sigset_t,
    /// Whether the kernel gets the time by the nanosecond.
    exact: bool,
}

impl Call {
    /// A wait of at most `patience` in the set `fd`, without another signal mask.
    ///
    /// # Safety
    /// `events` is null, or valid for writes of `max` entries until the call ends, and no other thread uses it meanwhile.
    pub(crate) unsafe fn new(fd: c_int, events: *mut epoll_event, max: c_int, patience: TimeLimit) -> Self {
        Self { fd, events, max, patience, mask: ptr::null(), exact: false }
    }

    /// Lets these signals in while it sleeps, if the mask is not null.
    ///
    /// # Safety
    /// `mask` is null, or valid for reads until the call ends.
    pub(crate) unsafe fn with_mask(self, mask: *const sigset_t) -> Self {
        Self { mask, ..self }
    }

    /// The kernel gets the time by the nanosecond, as `epoll_pwait2` has it.
    pub(crate) fn exactly(self) -> Self {
        Self { exact: true, ..self }
    }
}

/// The call has failed, and `errno` says why.
#[derive(Debug)]
struct WaitFailed;

/// `epoll_wait` and its kin. `plain` is the call as the program made it.
#[inline]
pub(crate) fn wait(call: Call, plain: impl Fn() -> c_int) -> c_int {
    match set::of(call.fd) {
        // Also if nothing of ours is in the set: another thread may put something there while this one waits.
        Some(set) if call.max > 0 && !call.events.is_null() => wait_in(set, call, plain),
        _ => plain(),
    }
}

fn wait_in(set: &'static Set, mut call: Call, plain: impl Fn() -> c_int) -> c_int {
    super::inherit::check(set);
    // SAFETY: the caller's array, valid and its own by the contract of its call.
    let mut answer = unsafe { ReadyList::new(call.events, call.max) };
    let result = call.tell(set, &mut answer, plain);
    match result {
        Ok(()) => {
            set.answered();
            answer.count()
        }
        Err(WaitFailed) => -1,
    }
}

impl Call {
    fn tell(&mut self, set: &'static Set, answer: &mut ReadyList, plain: impl Fn() -> c_int) -> Result<(), WaitFailed> {
        let mut idle = if set.has_own_sources() { None } else { broker::longest_idle() };
        if idle.is_some() {
            // Waits that are shorter than that are never cut, so each of them looks here.
            broker::tick();
            idle = broker::longest_idle();
        }
        // While a session with the broker opens, sleeps are short, for its next step (protocol T14.6).
        if !set.has_own_sources() && broker::longest_sleep().is_none() {
            if self.patience.is_none() {
                let asked = answer.ask(set, |_, _| plain()).ok_or(WaitFailed)?;
                if asked.more {
                    // A bell that was rung before took the place of what the program is to hear.
                    self.ask(set, answer)?;
                }
                self.scan(set, answer);
                return Ok(());
            }
            // The time of the call runs from here on, also if more than one wait is made of it.
            let left = self.patience.left();
            let idle = idle.filter(|idle| left.is_none_or(|left| *idle < left));
            // To hold signals back takes two system calls, so the first sleep under a broker does not: a signal that comes just when that sleep is
            // over is like one that comes just before the call.
            let mut held = BlockedSignals::none();
            if idle.is_some() && broker::awaits_broker() {
                held.hold_if_handled();
            }
            set.fall_asleep();
            // A thread that adds a connection from here on sees that a thread sleeps, and wakes it if there is something to report.
            // Connections added before are seen here.
            let asked = if set.has_own_sources() {
                None
            } else {
                Some(answer.ask(set, |events, max| match idle {
                    None => plain(),
                    Some(_) => self.kernel(events, max, idle, held.mask(self.mask)),
                }))
            };
            set.wake_up();
            match asked {
                None => {}
                Some(None) => return Err(WaitFailed),
                Some(Some(KernelAnswer { nothing: true, .. })) if idle.is_some() => {
                    held.hold_if_handled();
                    broker::tick();
                    return self.fall_asleep(set, &held, answer);
                }
                Some(Some(KernelAnswer { nothing: true, .. })) => return Ok(()),
                Some(Some(_)) => {
                    self.scan(set, answer);
                    if !answer.is_empty() {
                        return Ok(());
                    }
                }
            }
        }
        self.look_and_sleep(set, answer)
    }

    fn look_and_sleep(&mut self, set: &'static Set, answer: &mut ReadyList) -> Result<(), WaitFailed> {
        set.heat_interrupted();
        let mut asked = false;
        if set.is_due() {
            asked = true;
            self.ask(set, answer)?;
        }
        self.scan(set, answer);
        if answer.is_empty() && !asked && self.patience.is_none() {
            self.ask(set, answer)?;
            self.scan(set, answer);
        }
        if !answer.is_empty() {
            set.look_after_datagrams();
            return Ok(());
        }
        set.settle_datagrams();
        if self.patience.is_none() {
            return Ok(());
        }
        let mut held = BlockedSignals::none();
        let mut failed = false;
        let limit = self.patience.left();
        let this = &*self;
        let shared = RefCell::new(&mut *answer);
        let awake = set.budget.stay_awake(
            &mut held,
            limit,
            || set.peers(),
            || this.scan(set, &mut shared.borrow_mut()),
            || {
                let answer = &mut *shared.borrow_mut();
                failed = this.ask(set, answer).is_err();
                this.scan(set, answer);
                failed || !answer.is_empty()
            },
        );
        match awake {
            Awake::Kernel if failed => return Err(WaitFailed),
            Awake::Ready | Awake::Kernel => return Ok(()),
            Awake::Vain => {}
        }
        held.hold_if_handled();
        self.fall_asleep(set, &held, answer)
    }

    fn fall_asleep(
        &mut self,
        set: &'static Set,
        held: &BlockedSignals,
        answer: &mut ReadyList,
    ) -> Result<(), WaitFailed> {
        set.fall_asleep();
        let result = self.sleep(set, held, answer);
        set.wake_up();
        result
    }

    /// Sleeps until something is to be told, the time is over, or a signal comes.
    fn sleep(&mut self, set: &'static Set, held: &BlockedSignals, answer: &mut ReadyList) -> Result<(), WaitFailed> {
        let mut rounds = Rounds::new();
        loop {
            if !set::of(self.fd).is_some_and(|now| ptr::eq(now, set)) {
                // Between two sleeps another thread has closed the set, and the number may stand for another one.
                sys::set_errno(Errno::BADF);
                return Err(WaitFailed);
            }
            let mut nap = None;
            if set.arm_for_sleep() {
                let look = Fenced::after(()).look(|| self.scan(set, answer).then_some(()));
                let SecondLook::Nothing(quiet) = look else { return Ok(()) };
                let SleepStep::Sleep(limit) = rounds.next(quiet, |()| set.are_armed()) else { continue };
                nap = limit;
            }
            let Some(asleep) = set.close_datagrams() else {
                if self.scan(set, answer) {
                    return Ok(());
                }
                // Another thread has read it.
                continue;
            };
            let left = self.patience.left();
            // A set without rings is the kernel's alone, so children may use it.
            let inherited = if set.has_own_sources() { super::inherit::slice(set) } else { None };
            let time = shorter(shorter(left, nap), shorter(inherited, asleep.longest()));
            let (step, idle) = (broker::longest_sleep(), broker::longest_idle());
            let time = shorter(shorter(time, shorter(step, idle)), longest_sleep());
            let since = sys::now();
            let mut error = Errno::INTR;
            let asked = answer.ask(set, |events, max| {
                let n = self.kernel(events, max, time, held.mask(self.mask));
                if n < 0 {
                    error = sys::errno();
                }
                n
            });
            let slept = sys::now().saturating_sub(since);
            asleep.wake_up(slept);
            let Some(asked) = asked else {
                sys::set_errno(error);
                return Err(WaitFailed);
            };
            if !asked.nothing {
                set.budget.slept(slept);
                set.asked();
            }
            set.heat_interrupted();
            super::inherit::check(set);
            let is_over = self.patience.left() == Some(Duration::ZERO);
            if step.is_some() || asked.nothing && !is_over {
                // A server that only waits has its listeners published again all the same.
                broker::tick();
            }
            self.scan(set, answer);
            if !answer.is_empty() || is_over {
                return Ok(());
            }
        }
    }

    fn kernel(&self, events: *mut epoll_event, max: c_int, time: Option<Duration>, mask: *const sigset_t) -> c_int {
        if self.exact {
            let time = time.map(patience::timespec);
            let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
            // SAFETY: a part of the caller's array, and its mask, valid by the contract of its call.
            unsafe { real::epoll_pwait2(self.fd, events, max, time, mask) }
        } else if mask.is_null() {
            // SAFETY: as above. The program's own call, in case a filter of system calls allows no other one.
            unsafe { real::epoll_wait(self.fd, events, max, patience::millis(time)) }
        } else {
            // SAFETY: as above.
            unsafe { real::epoll_pwait(self.fd, events, max, patience::millis(time), mask) }
        }
    }

    /// Asks the kernel without waiting. Returns whether it has told all that it has.
    fn ask(&self, set: &'static Set, answer: &mut ReadyList) -> Result<bool, WaitFailed> {
        set.asked();
        // Our own events take the place of others in the array; once noted, they make room. The loop has a limit all the same.
        for _ in 0..64 {
            // SAFETY: a part of the caller's array, valid by the contract of its call.
            let asked = answer.ask(set, |events, room| unsafe { real::epoll_wait(self.fd, events, room, 0) });
            match asked {
                Some(KernelAnswer { more: true, .. }) => {}
                Some(asked) => return Ok(!asked.full),
                // There was no wait: a signal is left for the next sleep.
                None if sys::errno() == Errno::INTR || !answer.is_empty() => break,
                None => return Err(WaitFailed),
            }
        }
        Ok(false)
    }

    /// Asks the kernel for ends, and tells of them before anything that came later. Returns how much the answer has grown.
    #[cold]
    fn scan_after_ends(&self, set: &'static Set, answer: &mut ReadyList, news: EndsNews) -> usize {
        let before = answer.room();
        set.scan_known_ends(answer.room(), |events, data| answer.tell(events, data));
        // A failure is found again by the next call.
        let has_told_all = answer.room() != 0 && self.ask(set, answer).unwrap_or(false);
        set.note_ends(news, has_told_all);
        set.scan_after_ends(answer.room(), |events, data| answer.tell(events, data));
        before - answer.room()
    }

    /// Tells what the hot ones have ready; whether that is anything.
    #[inline]
    fn scan(&self, set: &'static Set, answer: &mut ReadyList) -> bool {
        let mut kernel = answer.so_far();
        let mut asked = EndsAsked::NotYet;
        let mut told = set.scan(answer.room(), &mut asked, |events, data| answer.tell(events, data));
        if let EndsAsked::MustAsk(news) = asked {
            told += self.scan_after_ends(set, answer, news);
            kernel = answer.so_far();
        }
        let merge = |events, data| kernel.merge(events, data);
        told += set.scan_datagrams(answer.room(), merge, |events, data| answer.tell(events, data));
        told > 0
    }
}
