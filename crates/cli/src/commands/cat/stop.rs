//! A flag that a `poll` notices: ends the sending direction while it waits for input.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::exit::{CommandFailure, Context};

/// Rung at most once, never cleared.
#[derive(Debug)]
pub(super) struct StopBell(OwnedFd);

impl StopBell {
    pub(super) fn new() -> Result<Self, CommandFailure> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self).context("cannot make an eventfd")
    }

    pub(super) fn ring(&self) {
        // Fails only when the counter is at its top, and then it has been rung.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(super) fn is_rung(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.0, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).is_ok_and(|n| n > 0)
    }
}

impl AsFd for StopBell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_rung() {
        let stop = StopBell::new().unwrap();
        assert!(!stop.is_rung());
        stop.ring();
        assert!(stop.is_rung() && stop.is_rung());
    }
}
