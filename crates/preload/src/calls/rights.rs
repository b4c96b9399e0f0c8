//! Descriptors that messages carry from one process to another (`SCM_RIGHTS`).
#![expect(unsafe_code, reason = "walks the control data of messages")]

use super::close::forget;
use crate::conn::{self, Conn};
use crate::table::{self, DescriptorKind, Entry};
use crate::{broker, carrier, datagram, process, ready, sys};
use libc::{c_int, cmsghdr, msghdr};
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

/// Calls `each` for each descriptor in a message's control data, of `len` bytes. It ends at a header whose length the control data do not
/// have room for: the kernel refuses such a message.
///
/// # Safety
/// The control data can be read. Other threads of the program may write there.
unsafe fn each_right(control: *const u8, len: usize, mut each: impl FnMut(c_int)) {
    // SAFETY: arithmetic.
    let (least, align) =
        unsafe { (libc::CMSG_LEN(0) as usize, libc::CMSG_SPACE(1) as usize - libc::CMSG_LEN(0) as usize) };
    let mut at = 0;
    while len - at >= least {
        // SAFETY: a header that lies in the control data whole. It is read once, and what is checked is this copy.
        let one = unsafe { control.add(at).cast::<cmsghdr>().read_unaligned() };
        if one.cmsg_len < least || one.cmsg_len > len - at {
            return;
        }
        if one.cmsg_level == libc::SOL_SOCKET && one.cmsg_type == libc::SCM_RIGHTS {
            for i in 0..(one.cmsg_len - least) / size_of::<c_int>() {
                // SAFETY: it lies before the end of this part, which the control data have.
                each(unsafe { control.add(at + least).cast::<c_int>().add(i).read_unaligned() });
            }
        }
        at += one.cmsg_len.next_multiple_of(align).min(len - at);
    }
}

/// Descriptors that a message is about to carry away by `fd`: the receiver may have no library, so the connections among them go back to TCP
/// first. `is_certain`: the caller reports whether the message was sent.
pub(super) fn see_off(fd: c_int, message: &msghdr, is_certain: bool) -> PassedConns {
    let mut passed = PassedConns { conns: [None; MOST] };
    let (control, len) = (message.msg_control.cast::<u8>(), message.msg_controllen);
    if control.is_null() || len == 0 || !sys::is_readable(control, len) {
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
    unsafe { each_right(control, len, pass) };
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
    unsafe { each_right(message.msg_control.cast(), message.msg_controllen, |right| adopt(fd, right, is_peek)) };
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Control data of two parts with two descriptors each, the second of which says that it is so long.
    fn control(second: usize) -> [u64; 6] {
        // SAFETY: arithmetic.
        let len = unsafe { libc::CMSG_LEN(8) } as usize;
        let kind = u64::from(libc::SOL_SOCKET.cast_unsigned()) | u64::from(libc::SCM_RIGHTS.cast_unsigned()) << 32;
        [len as u64, kind, 3 | 4 << 32, second as u64, kind, 5 | 6 << 32]
    }

    fn rights(control: &[u64; 6], len: usize) -> Vec<c_int> {
        assert!(len <= size_of_val(control));
        let mut found = Vec::new();
        // SAFETY: memory of this test.
        unsafe { each_right(control.as_ptr().cast(), len, |right| found.push(right)) };
        found
    }

    #[test]
    fn rights_beyond_the_control_data_are_not_read() {
        assert_eq!(rights(&control(24), 48), [3, 4, 5, 6]);
        assert_eq!(rights(&control(20), 48), [3, 4, 5]);
        assert_eq!(rights(&control(20), 44), [3, 4, 5], "without what aligns the end");
        for len in [0, 15, 23] {
            assert!(rights(&control(24), len).is_empty(), "{len}");
        }
        for len in [24, 39, 40, 47] {
            assert_eq!(rights(&control(24), len), [3, 4], "{len}");
        }
        for wrong in [0, 15, 25, 48, 1 << 20, usize::MAX] {
            assert_eq!(rights(&control(wrong), 48), [3, 4], "{wrong}");
        }
    }
}
