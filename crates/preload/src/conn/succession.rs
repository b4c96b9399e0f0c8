//! A connection that another one has replaced in the table of descriptors ([`super::renewal`]), and threads that have met it before.
//!
//! A thread takes the connection of a descriptor from the table when its call begins. Another thread may replace that connection at any moment
//! afterwards. Nothing counts the threads that are inside; each of them finds out by itself:
//!
//! ```text
//!   thread that replaces: both directions of the old one are held throughout
//!     table: old -> new | old: successor | fence | what was done to old? more descriptors? | old: stage is Tcp | wake sleepers
//!
//!   thread in a call:
//!     moves bytes         holds a direction, and then looks at the table
//!     enters the kernel   sees the stage Tcp, and then looks for a successor
//!     sleeps              is woken by the old bell, which is shut down, or finds no ring before it sleeps
//!     does something to it that lasts (a flag, a descriptor) | fence | looks for a successor, and does it to that one too
//! ```
//!
//! The new one is complete only when its stage says more than `Attaching`. Until then its sending direction is held, and threads that meet
//! it wait for that ([`Conn::settle`]).
//!
//! The block of the old one is not used again, and its bell stays open, until the last descriptor of the socket is closed. (The bell may be
//! closed earlier, with the next replacement.) So a thread that is late by any time finds the old one as it was left, and never another socket's
//! connection. A program that closes a socket while another thread uses it has no such promise from the kernel either.

use super::candidate::CandidateStep;
use super::cursor::Cursor;
use super::rx::{NO_BUFFERS, receive_message};
use super::tx::send_message;
use super::{Conn, ConnStage, REPLACED};
use crate::{arena, local, sys, table};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Conn {
    /// The connection that has taken its place.
    #[inline]
    pub(super) fn successor(&self) -> Option<&'static Self> {
        let number = self.local().successor.get();
        if number == 0 { None } else { at(number) }
    }

    /// The same, after something lasting was done to this one: if it has none, the thread that replaces it sees what was done.
    pub(super) fn successor_after_change(&self) -> Option<&'static Self> {
        at(self.local().successor.after_change())
    }

    /// The connection that its socket has by now: itself, or what has replaced it.
    pub(crate) fn now(&'static self) -> &'static Self {
        let mut conn = self;
        while let Some(next) = conn.successor() {
            conn = next;
        }
        conn
    }

    /// Does something that lasts to the connection, and to those that replace it meanwhile.
    pub(super) fn for_each_successor(&'static self, what: impl Fn(&'static Self)) {
        let mut conn = self;
        loop {
            what(conn);
            match conn.successor_after_change() {
                Some(next) => conn = next,
                None => return,
            }
        }
    }

    /// Whether another connection has replaced it at this descriptor, and may be incomplete yet.
    #[inline]
    pub(crate) fn is_replaced_at(&self, fd: c_int) -> bool {
        !self.is_of(fd) && self.replacement_at(fd).is_some()
    }

    /// What stands for the descriptor, if that has replaced this connection. It may be incomplete yet.
    #[cold]
    pub(super) fn replacement_at(&self, fd: c_int) -> Option<&'static Self> {
        Self::of(fd).filter(|now| now.ancestors().any(|old| std::ptr::eq(old, self)))
    }

    /// Waits while another thread puts this connection in the place of another one.
    #[inline]
    pub(crate) fn wait_until_complete(&self) {
        if self.ring_path.stage() == ConnStage::Attaching && self.local().predecessor.load(Ordering::Relaxed) != 0 {
            self.settle();
        }
    }

    /// This one is to replace another. To be called before the table has it.
    pub(super) fn set_predecessor(&self, old: &Self) {
        self.local().predecessor.store(u32::from(old.index()) + 1, Ordering::Relaxed);
    }

    /// This one has been replaced. What was done to it by threads that did not see that can be seen from here on.
    pub(super) fn set_successor(&self, new: &Self) {
        self.local().successor.publish(u32::from(new.index()) + 1);
    }

    /// Those that it has replaced, the last first.
    pub(super) fn ancestors(&self) -> impl Iterator<Item = &'static Self> {
        let before = |conn: &Self| at(conn.local().predecessor.load(Ordering::Relaxed));
        std::iter::successors(before(self), move |conn| before(conn))
    }

    /// Has this descriptor, which stood for `self`, stand for `new`. Several threads may do that; it is counted once.
    pub(super) fn hand_over(&self, fd: c_int, new: &Self) {
        local::hand_over(&new.local().descriptors, || table::replace(fd, self.entry(), new.entry()));
    }

    /// All sleepers of a connection that was replaced look again, and its peer finds that nobody rings here any more.
    pub(super) fn silence_bell(&self) {
        if self.bell().fd() >= 0 {
            let _ = rustix::net::shutdown(sys::borrow(self.bell().fd()), rustix::net::Shutdown::Both);
        }
    }

    /// Closes the bells of those that were replaced before this one was: that is a second ago or more.
    pub(super) fn discard_bells_of_ancestors(&self) {
        self.ancestors().for_each(|old| old.bell().discard());
    }

    /// The socket has no descriptor any more: gives up what its earlier connections have left.
    pub(super) fn free_ancestors(&self) {
        let mut next = at(self.local().predecessor.swap(0, Ordering::Relaxed));
        while let Some(old) = next {
            next = at(old.local().predecessor.swap(0, Ordering::Relaxed));
            old.bell().discard();
            arena::free(old.index());
        }
    }
}

/// The rest of calls that have moved bytes before the connection was replaced. As in the kernel, a call that has moved bytes does not fail.
impl Conn {
    /// Receives until `enough` more bytes have come, or none can be had. Returns how many have come.
    #[cold]
    pub(super) fn receive_rest(
        &'static self,
        fd: c_int,
        cursor: &mut Cursor<'_>,
        message: c_int,
        enough: usize,
    ) -> usize {
        let mut done = 0;
        let mut conn = self;
        while done < enough {
            let got = match conn.before_call(fd) {
                CandidateStep::Kernel(call) => {
                    let mut space = NO_BUFFERS;
                    let got = wait(fd, message, PollFlags::IN, Timeout::Recv).and_then(|()| {
                        receive_message(fd, cursor.rest(&mut space, u64::MAX), message | libc::MSG_DONTWAIT)
                    });
                    call.received(signed(got), false);
                    got.inspect(|n| cursor.skip(*n))
                }
                CandidateStep::Up(up) => up.receive(fd, cursor, message).inspect_err(|error| leave_to_next(up, *error)),
            };
            match got {
                Ok(n @ 1..) => done += n,
                Err(REPLACED) => {}
                Ok(0) | Err(_) => break,
            }
            conn = conn.now();
        }
        done
    }

    /// Sends the rest of the cursor, as far as it can be sent. Returns how many bytes that was.
    #[cold]
    pub(super) fn send_rest(&'static self, fd: c_int, cursor: &mut Cursor<'_>, message: c_int) -> usize {
        let mut done = 0;
        let mut conn = self;
        while cursor.left() > 0 {
            let sent = match conn.before_call(fd) {
                CandidateStep::Kernel(call) => {
                    let mut space = NO_BUFFERS;
                    let sent = wait(fd, message, PollFlags::OUT, Timeout::Send).and_then(|()| {
                        let message = message | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                        send_message(fd, cursor.rest(&mut space, u64::MAX), message)
                    });
                    call.sent(signed(sent));
                    sent.inspect(|n| cursor.skip(*n))
                }
                CandidateStep::Up(up) => {
                    up.send(fd, cursor, message | libc::MSG_NOSIGNAL).inspect_err(|error| leave_to_next(up, *error))
                }
            };
            match sent {
                Ok(n @ 1..) => done += n,
                Err(REPLACED) => {}
                Ok(0) | Err(_) => break,
            }
            conn = conn.now();
        }
        done
    }
}

/// Waits until the kernel can move bytes, as its own call would. An error of the socket ends the wait and stays with the socket, for the next
/// call: a call of the kernel would take it away.
fn wait(fd: c_int, message: c_int, what: PollFlags, which: Timeout) -> Result<(), Errno> {
    let socket = sys::borrow(fd);
    let may_wait = message & libc::MSG_DONTWAIT == 0 && !rustix::fs::fcntl_getfl(socket)?.contains(OFlags::NONBLOCK);
    let limit = if may_wait { sockopt::socket_timeout(socket, which)? } else { Some(Duration::ZERO) };
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    let mut one = [PollFd::from_borrowed_fd(socket, what)];
    let is_ready = rustix::event::poll(&mut one, limit.as_ref())? > 0;
    if is_ready && !one[0].revents().contains(PollFlags::ERR) { Ok(()) } else { Err(Errno::AGAIN) }
}

/// An error that a call has met after it had moved bytes.
fn leave_to_next(conn: &'static Conn, error: Errno) {
    if error != REPLACED {
        conn.errors().put_back(error);
    }
}

/// The result of a call as C has it.
fn signed(result: Result<usize, Errno>) -> isize {
    result.map_or(-1, usize::cast_signed)
}

/// The connection at a place, plus 1.
fn at(number: u32) -> Option<&'static Conn> {
    Conn::at(u16::try_from(number.checked_sub(1)?).ok()?)
}
