//! The status line of a connection in [`crate::status`], for people.

use super::{Conn, flags};
use crate::sys;
use crate::{process, status};
use partywall_shm::path::Way;
use partywall_shm::status::{LineIdentity, LineState, Reason, StatusLine};
use std::ffi::c_int;

impl Conn {
    /// Its line; `None` if it has none.
    #[inline]
    pub(super) fn line(&self) -> Option<&'static StatusLine> {
        status::line(self.index())
    }

    /// Begins the line of a new connection.
    pub(super) fn begin_line(&self, fd: c_int) {
        status::begin(self.index(), &self.identity(fd, LineState::Counting));
    }

    /// Something about it has changed. Called by the thread that has changed it: one at a time.
    pub(super) fn show(&self, state: LineState) {
        if let Some(line) = self.line() {
            line.set(Some(&self.identity(self.fd(), state)));
        }
    }

    /// The sent bytes go by another route from now on. The thread that holds the sending direction calls this.
    pub(super) fn show_sending(&self, way: Way) {
        if let Some(line) = self.line() {
            line.tx.note_move(way == Way::Ring, self.reason_of_move(way), sys::wall_clock_millis());
        }
    }

    /// The received bytes come by another route from now on. The thread that holds the receiving direction calls this.
    pub(super) fn show_receiving(&self, way: Way) {
        if let Some(line) = self.line() {
            line.rx.note_move(way == Way::Ring, self.reason_of_move(way), sys::wall_clock_millis());
        }
    }

    /// Why a direction has moved: this side's reason if this side wants TCP, and otherwise the peer.
    fn reason_of_move(&self, way: Way) -> Reason {
        match (way, self.ring_path.reason()) {
            (Way::Ring, _) => Reason::None,
            (Way::Tcp, Reason::None) if self.has(flags::WANT_TCP) => Reason::Told,
            (Way::Tcp, reason) if self.has(flags::WANT_TCP) => reason,
            (Way::Tcp, _) => Reason::PeerOnTcp,
        }
    }

    /// It has ended.
    pub(super) fn end_line(&self) {
        if let Some(line) = self.line() {
            line.set(None);
        }
    }

    fn identity(&self, fd: c_int, state: LineState) -> LineIdentity {
        let (local, remote) = self.identity.addresses();
        let reason = if state == LineState::Up { Reason::None } else { self.ring_path.reason() };
        let (role, channel) = (self.role(), self.channel());
        LineIdentity { state, reason, role, pid: process::owner(), fd: fd.cast_unsigned(), local, remote, channel }
    }
}
