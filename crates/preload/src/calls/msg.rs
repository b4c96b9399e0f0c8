//! `sendmsg`, `recvmsg` and their plurals.
#![expect(unsafe_code, reason = "C functions, and the caller's message headers")]

use super::{receiving, sending};
use crate::conn::Conn;
use crate::datagram::{self, Wanted};
use crate::{real, sys};
use libc::{c_int, c_uint, iovec, mmsghdr, msghdr, ssize_t, timespec};
use partywall_shm::status::Reason;
use std::time::Duration;

/// The buffers of a message.
fn buffers<'a>(message: &msghdr) -> Option<&'a [iovec]> {
    super::list_of(message.msg_iov, c_int::try_from(message.msg_iovlen).ok()?)
}

/// Descriptors that a message carries away: whoever receives them knows nothing of us, so the connections among them go back
/// to TCP first.
fn see_off(message: &msghdr) {
    if message.msg_control.is_null() || message.msg_controllen == 0 {
        return;
    }
    // SAFETY: walks the caller's control buffer as the macros of the C library do, within the length it gives.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(one) = header.as_ref() {
            if one.cmsg_level == libc::SOL_SOCKET && one.cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(header).cast::<c_int>();
                let count = one.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize) / size_of::<c_int>();
                for i in 0..count {
                    let passed = data.add(i).read_unaligned();
                    if let Some(conn) = Conn::of(passed) {
                        conn.bring_down(Reason::Passed);
                    }
                    datagram::give_up(passed);
                    crate::ready::hand_over(passed);
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// Where a message wants to be told where it is from.
fn wanted(message: &mut msghdr) -> Wanted {
    Wanted {
        address: message.msg_name.cast(),
        len: &raw mut message.msg_namelen,
        flags: &raw mut message.msg_flags,
        control: &raw mut message.msg_controllen,
    }
}

fn receive_datagram(fd: c_int, message: *mut msghdr, flags: c_int, kernel: impl Fn() -> ssize_t) -> ssize_t {
    if !datagram::is(fd) {
        return kernel();
    }
    // SAFETY: the caller's message, if there is one.
    let Some(header) = (unsafe { message.as_mut() }) else { return kernel() };
    let Some(list) = buffers(header) else { return kernel() };
    let wanted = wanted(header);
    datagram::receiving(fd, list, flags, wanted, kernel)
}

export_for_descriptor! {
    /// `recvmsg`
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::recvmsg(fd, message, flags) };
        let Some(conn) = Conn::of(fd) else { return receive_datagram(fd, message, flags, kernel) };
        // SAFETY: the caller's message, if there is one.
        let Some(list) = (unsafe { message.as_ref() }).and_then(buffers) else { return kernel() };
        let got = receiving(conn, fd, list, flags, kernel);
        if got >= 0 && conn.is_up() && flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) == 0 {
            // SAFETY: the caller's message, which the kernel would fill in likewise: a stream has no address and no control.
            unsafe {
                if !(*message).msg_name.is_null() {
                    (*message).msg_namelen = 0;
                }
                (*message).msg_controllen = 0;
                (*message).msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
            }
        }
        got
    }
}

export! {
    /// `sendmsg`
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::sendmsg(fd, message, flags) };
        // SAFETY: the caller's message, if there is one.
        let Some(header) = (unsafe { message.as_ref() }) else { return kernel() };
        see_off(header);
        match (Conn::of(fd), buffers(header)) {
            (Some(conn), Some(list)) => sending(conn, fd, list, flags, kernel),
            (None, Some(list)) => {
                let to = (header.msg_name.cast_const().cast(), header.msg_namelen);
                datagram::sending(fd, list, flags, to, header.msg_controllen != 0, kernel)
            }
            _ => kernel(),
        }
    }

    /// `sendmmsg`
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
        if Conn::of(fd).is_none() && !datagram::has_rings(fd) {
            for i in 0..count.min(1024) as usize {
                // SAFETY: the caller's list of so many messages.
                if let Some(one) = unsafe { messages.add(i).as_ref() } {
                    see_off(&one.msg_hdr);
                }
            }
            // SAFETY: the caller's arguments, passed on.
            let done = unsafe { real::sendmmsg(fd, messages, count, flags) };
            if done > 0 {
                // SAFETY: the kernel has read at least one.
                let first = unsafe { &(*messages).msg_hdr };
                datagram::sent_many(fd, (first.msg_name.cast_const().cast(), first.msg_namelen), done);
            }
            return done;
        }
        let mut done = 0;
        while done < count.min(1024) {
            // SAFETY: the caller's list of so many messages.
            let one = unsafe { &mut *messages.add(done as usize) };
            // SAFETY: a message of the caller's.
            let sent = unsafe { sendmsg(fd, &raw const one.msg_hdr, flags) };
            if sent < 0 {
                return if done > 0 { done.cast_signed() } else { -1 };
            }
            one.msg_len = sent.cast_unsigned() as c_uint;
            done += 1;
        }
        done.cast_signed()
    }

    /// `recvmmsg`
    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int {
        if Conn::of(fd).is_none() && !datagram::has_rings(fd) {
            // SAFETY: the caller's arguments, passed on.
            let done = unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
            if done > 0 {
                // SAFETY: the kernel has filled in at least one.
                let first = unsafe { &mut (*messages).msg_hdr };
                datagram::received_many(fd, wanted(first), done);
            }
            return done;
        }
        // SAFETY: the caller's timeout, if there is one.
        let until = unsafe { timeout.as_ref() }.map(|t| {
            let seconds = Duration::from_secs(u64::try_from(t.tv_sec).unwrap_or(0));
            sys::now() + seconds + Duration::from_nanos(u64::try_from(t.tv_nsec).unwrap_or(0))
        });
        // An error is told before anything else, here.
        if let Some(error) = Conn::of(fd).filter(|conn| conn.may_have_failed()).and_then(Conn::pending_error) {
            return sys::fail(error) as c_int;
        }
        let mut done = 0;
        let wait_for_one = flags & libc::MSG_WAITFORONE != 0;
        let mut flags = flags & !libc::MSG_WAITFORONE;
        while done < count.min(1024) {
            // SAFETY: the caller's list of so many messages.
            let one = unsafe { &mut *messages.add(done as usize) };
            // SAFETY: a message of the caller's.
            let got = unsafe { recvmsg(fd, &raw mut one.msg_hdr, flags) };
            if got < 0 {
                if done > 0 && let Some(conn) = Conn::of(fd) {
                    // Told by the next call.
                    conn.keep_error(Err(sys::errno()));
                }
                return if done > 0 { done.cast_signed() } else { -1 };
            }
            one.msg_len = got.cast_unsigned() as c_uint;
            done += 1;
            if wait_for_one {
                flags |= libc::MSG_DONTWAIT;
            }
            // Looked at after each message, as the kernel does.
            if until.is_some_and(|until| sys::now() >= until) {
                break;
            }
        }
        done.cast_signed()
    }
}
