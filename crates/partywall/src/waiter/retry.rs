//! Descriptors for retries: readable when a pause is over, for events that no link reports.

use crate::{Error, Result};
use partywall_region::Link;
use rustix::event::epoll;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A timer whose pauses double, each readable at its end.
#[derive(Debug)]
pub(crate) struct RetryTimer {
    timer: OwnedFd,
    first: Duration,
    longest: Duration,
    /// The next pause.
    pause: Duration,
}

impl RetryTimer {
    pub(crate) fn new(first: Duration, longest: Duration) -> Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .map_err(|e| Error::system("make a timer", e))?;
        Ok(Self { timer, first, longest, pause: first })
    }

    /// Begins the next pause. The descriptor is not readable before its end.
    pub(crate) fn begin_pause(&mut self) {
        self.set(self.pause);
        self.pause = (self.pause * 2).min(self.longest);
    }

    /// Ends the pauses. The descriptor is not readable, and the next pause is the first again.
    fn stop(&mut self) {
        if self.pause != self.first {
            self.set(Duration::ZERO);
            self.pause = self.first;
        }
    }

    fn set(&self, pause: Duration) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Timespec { tv_sec: pause.as_secs().cast_signed(), tv_nsec: pause.subsec_nanos().into() };
        // It fails only for an invalid time, and this one is valid.
        let _ = timerfd_settime(
            &self.timer,
            TimerfdTimerFlags::empty(),
            &Itimerspec { it_interval: zero, it_value: value },
        );
    }
}

impl AsFd for RetryTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

/// The descriptor of a half that may have to wait for the broker, whose answer does not come by the half's link. It is readable when the link is,
/// and at the end of each pause.
#[derive(Debug, Default)]
pub(crate) struct RetrySet {
    /// Made when the descriptor is asked for first. `None` if the process had no descriptors for it: then the link's serves.
    made: OnceLock<Option<(OwnedFd, RetryTimer)>>,
    /// A pause was to begin before that.
    is_due: AtomicBool,
}

/// The pauses between two looks for the broker's answer.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

impl RetrySet {
    /// The descriptor. It is always the same.
    pub(crate) fn descriptor<'a>(&'a self, link: &'a Link) -> BorrowedFd<'a> {
        let made = self.made.get_or_init(|| make(link, self.is_due.load(Ordering::Relaxed)).ok());
        made.as_ref().map_or_else(|| link.as_fd(), |(set, _)| set.as_fd())
    }

    /// Begins the next pause. If the descriptor is not in use, the first begins when it is asked for: programs call first, and wait then.
    #[cold]
    pub(crate) fn begin_pause(&mut self) {
        match self.made.get_mut() {
            Some(Some((_, timer))) => timer.begin_pause(),
            Some(None) => {}
            None => *self.is_due.get_mut() = true,
        }
    }

    /// Ends the pauses.
    #[inline]
    pub(crate) fn stop(&mut self) {
        match self.made.get_mut() {
            Some(Some((_, timer))) => timer.stop(),
            Some(None) => {}
            None => *self.is_due.get_mut() = false,
        }
    }
}

fn make(link: &Link, is_due: bool) -> Result<(OwnedFd, RetryTimer)> {
    let mut timer = RetryTimer::new(PAUSES.0, PAUSES.1)?;
    if is_due {
        timer.begin_pause();
    }
    let failed = |e| Error::system("make a set of descriptors", e);
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
    for fd in [link.as_fd(), timer.as_fd()] {
        epoll::add(&set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN).map_err(failed)?;
    }
    Ok((set, timer))
}
