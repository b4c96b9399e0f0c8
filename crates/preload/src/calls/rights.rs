//! Descriptors that messages carry from one process to another (`SCM_RIGHTS`).
#![expect(unsafe_code, reason = "walks the control data of messages")]

use super::close::forget;
use crate::conn::{self, Conn};
use crate::table::{self, DescriptorKind, Entry};
use crate::{broker, carrier, datagram, process, ready, sys};
use libc::{c_int, msghdr};
use partywall_protocol::passed::PassedSocket;
use rustix::net::sockopt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};

/// The most connections of one message that may have rings in the receiver.
const MOST: usize = 8;

/// This process has passed a connection, so it may get back what it still has.
static HAS_PASSED: AtomicU32 = AtomicU32::new(0);
/// A program here has looked at a message with a connection without taking it. So this process has descriptors of sockets that come again with
/// the message (protocol T13.22).
static HAS_PEEKED: AtomicU32 = AtomicU32::new(0);

/// The connections that a message carries, and that may have rings in the receiver.
#[derive(Debug)]
#[must_use = "the message may not have been sent"]
pub(super) struct PassedConns {
    conns: [Option<&'static Conn>; MOST],
}

impl PassedConns {
    /// The message was not sent.
    pub(super) fn take_back(&self) {
        for conn in self.conns.iter().flatten() {
            conn.was_not_passed();
        }
    }
}

/// Calls `each` for each descriptor in a message's control data.
///
/// # Safety
/// The control data can be read, and are a program's own or the kernel's.
unsafe fn each_right(message: &msghdr, mut each: impl FnMut(c_int)) {
    // SAFETY: walks the control buffer as the macros of the C library do, within the length that the message gives.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(one) = header.as_ref() {
            if one.cmsg_level == libc::SOL_SOCKET && one.cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(header).cast::<c_int>();
                let count = one.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize) / size_of::<c_int>();
                for i in 0..count {
                    each(data.add(i).read_unaligned());
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// Descriptors that a message is about to carry away by `fd`: the receiver may have no library, so the connections among them go back to TCP
/// first. `is_certain`: the caller reports whether the message was sent.
pub(super) fn see_off(fd: c_int, message: &msghdr, is_certain: bool) -> PassedConns {
    let mut passed = PassedConns { conns: [None; MOST] };
    if message.msg_control.is_null()
        || message.msg_controllen == 0
        || !sys::is_readable(message.msg_control.cast::<u8>(), message.msg_controllen)
    {
        return passed;
    }
    let mut places = passed.conns.iter_mut();
    let pass = |right: c_int| {
        if let Some(conn) = Conn::of(right) {
            HAS_PASSED.store(1, Ordering::Relaxed);
            let place = places.next();
            // A message with an address may go elsewhere.
            let may_be_known = is_certain && message.msg_name.is_null() && place.is_some();
            let carrier = if may_be_known { carrier::other_end(fd) } else { None };
            if conn.pass(right, carrier)
                && let Some(place) = place
            {
                *place = Some(conn);
            }
        }
        datagram::give_up(right);
        ready::hand_over(right);
        ready::passed_on(right);
    };
    // SAFETY: the caller's control data, which can be read.
    unsafe { each_right(message, pass) };
    passed
}

/// Descriptors that a message has brought by `fd`. Connections among them may have rings here.
///
/// # Safety
/// The kernel has just filled the message in.
#[inline]
pub(super) unsafe fn came(fd: c_int, message: &msghdr, flags: c_int) {
    // SAFETY: arithmetic.
    if message.msg_controllen > unsafe { libc::CMSG_LEN(0) } as usize {
        // SAFETY: by this function's contract.
        unsafe { adopt_all(fd, message, flags) };
    }
}

/// # Safety
/// As of [`came`].
#[cold]
unsafe fn adopt_all(fd: c_int, message: &msghdr, flags: c_int) {
    let errno = sys::errno_number();
    let is_peek = flags & libc::MSG_PEEK != 0;
    // SAFETY: control data that the kernel has written.
    unsafe { each_right(message, |right| adopt(fd, right, is_peek)) };
    sys::restore_errno(errno);
}

fn adopt(carrier: c_int, fd: c_int, is_peek: bool) {
    if !table::fits(fd) || process::is_visitor() {
        return;
    }
    // The number stands for something new.
    if table::get(fd) != Entry::NONE {
        forget(fd);
    }
    ready::renumbered(fd);
    if !super::listen::is_tcp(fd) {
        return;
    }
    let socket = sys::borrow(fd);
    let address = |name: Option<rustix::net::SocketAddrAny>| name.and_then(|name| SocketAddr::try_from(name).ok());
    let (local, peer) = (rustix::net::getsockname(socket).ok(), rustix::net::getpeername(socket).ok().flatten());
    let (Some(local), Some(peer)) = (address(local), address(peer)) else { return };
    if is_peek {
        HAS_PEEKED.store(1, Ordering::Relaxed);
    }
    let (Ok(cookie), Ok(carrier)) = (sockopt::socket_cookie(socket), sockopt::socket_cookie(sys::borrow(carrier)))
    else {
        return;
    };
    if HAS_PASSED.load(Ordering::Relaxed) != 0
        && let Some(conn) = own(cookie, local, peer)
    {
        conn.add_descriptor(fd);
        return;
    }
    let is_known = broker::directory().is_none() || broker::knows_resident(fd, peer) || broker::may_be_translated(peer);
    if is_known && HAS_PEEKED.load(Ordering::Relaxed) == 0 {
        conn::install(&ready::WAITERS);
        broker::expect();
        let _ = Conn::adopt_received(fd, PassedSocket { socket: cookie, carrier }, local, peer);
    }
}

/// The connection of this process that has the same socket.
fn own(cookie: u64, local: SocketAddr, peer: SocketAddr) -> Option<&'static Conn> {
    let conns = table::entries(0, u32::MAX).filter(|(_, entry)| entry.kind() == DescriptorKind::Connection);
    conns.filter_map(|(other, _)| Conn::of(other).map(|conn| (other, conn))).find_map(|(other, conn)| {
        let is_same = conn.is_between(local, peer) && sockopt::socket_cookie(sys::borrow(other)) == Ok(cookie);
        is_same.then_some(conn)
    })
}
