//! What people may see of a connection: its line in [`crate::status`].

use super::Conn;
use crate::{process, status};
use partywall_shm::status::{LineIdentity, LineState, Reason, StatusLine};
use std::ffi::c_int;

impl Conn {
    /// Its line; `None` if it has none.
    #[inline]
    pub(super) fn line(&self) -> Option<&'static StatusLine> {
        status::line(self.index())
    }

    /// It begins.
    pub(super) fn begin_line(&self, fd: c_int) {
        status::begin(self.index(), &self.identity(fd, LineState::Counting));
    }

    /// Something about it has changed. Called by the thread that has changed it: one at a time.
    pub(super) fn show(&self, state: LineState) {
        if let Some(line) = self.line() {
            line.set(Some(&self.identity(self.fd(), state)));
        }
    }

    /// It has ended.
    pub(super) fn end_line(&self) {
        if let Some(line) = self.line() {
            line.set(None);
        }
    }

    fn identity(&self, fd: c_int, state: LineState) -> LineIdentity {
        let (local, remote) = self.addresses();
        let reason = if state == LineState::Up { Reason::None } else { self.reason() };
        let (role, channel) = (self.role(), self.channel());
        LineIdentity { state, reason, role, pid: process::owner(), fd: fd.cast_unsigned(), local, remote, channel }
    }
}
