//! The status line of a connection in [`crate::status`], for people.

use super::{Conn, flags};
use crate::sys;
use crate::{process, status};
use partywall_shm::path::Way;
use partywall_shm::status::{LineIdentity, LineState, Reason, StatusLine};
use std::ffi::c_int;

/// Its line; `None` if it has none.
#[inline]
pub(super) fn line(conn: &Conn) -> Option<&'static StatusLine> {
    status::line(conn.index())
}

/// Begins the line of a new connection.
pub(super) fn begin(conn: &Conn, fd: c_int) {
    status::begin(conn.index(), &identity(conn, fd, LineState::Counting));
}

/// In a child: shows it among its own.
pub(super) fn begin_again(conn: &Conn) {
    begin(conn, conn.fd());
    state(conn, conn.ring_path.state_of(conn.ring_path.stage()));
}

/// Something about it has changed. Called by the thread that has changed it: one at a time.
pub(super) fn state(conn: &Conn, state: LineState) {
    // A thread may be late: the line of a connection that was replaced has ended.
    if let Some(line) = line(conn).filter(|_| conn.successor().is_none()) {
        line.set(Some(&identity(conn, conn.fd(), state)));
    }
}

/// The sent bytes go by another route from now on. The thread that holds the sending direction calls this.
pub(super) fn sending(conn: &Conn, way: Way) {
    if let Some(line) = line(conn) {
        line.tx.note_move(way == Way::Ring, reason_of_move(conn, way), sys::wall_clock_millis());
    }
}

/// The received bytes come by another route from now on. The thread that holds the receiving direction calls this.
pub(super) fn receiving(conn: &Conn, way: Way) {
    if let Some(line) = line(conn) {
        line.rx.note_move(way == Way::Ring, reason_of_move(conn, way), sys::wall_clock_millis());
    }
}

/// Why a direction has moved: this side's reason if this side wants TCP, and otherwise the peer.
fn reason_of_move(conn: &Conn, way: Way) -> Reason {
    match (way, conn.ring_path.reason()) {
        (Way::Ring, _) => Reason::None,
        (Way::Tcp, Reason::None) if conn.has(flags::WANT_TCP) => Reason::Told,
        (Way::Tcp, reason) if conn.has(flags::WANT_TCP) => reason,
        (Way::Tcp, _) => Reason::PeerOnTcp,
    }
}

/// It has ended.
pub(super) fn end(conn: &Conn) {
    if let Some(line) = line(conn) {
        line.set(None);
    }
}

fn identity(conn: &Conn, fd: c_int, state: LineState) -> LineIdentity {
    let (local, remote) = conn.identity.addresses();
    let reason = if state == LineState::Up { Reason::None } else { conn.ring_path.reason() };
    let (role, channel) = (conn.role(), conn.channel());
    LineIdentity { state, reason, role, pid: process::owner(), fd: fd.cast_unsigned(), local, remote, channel }
}
