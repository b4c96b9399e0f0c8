//! `sendmsg`, `recvmsg` and their plurals.
#![expect(unsafe_code, reason = "C functions, and the caller's message headers")]

use super::{receiving, rights, sending};
use crate::buffers::CallerBuffers;
use crate::conn::Conn;
use crate::datagram::{self, SendControl, Wanted};
use crate::sockaddr::ProgramAddress;
use crate::table::{self, Entry};
use crate::{real, sys};
use libc::{c_int, c_uint, mmsghdr, msghdr, ssize_t, timespec};
use rustix::io::Errno;
use std::cell::Cell;
use std::time::Duration;

/// The buffers of a message.
///
/// # Safety
/// As of [`super::list_of`], of the list that the message names.
unsafe fn buffers<'a>(message: &msghdr) -> Option<CallerBuffers<'a>> {
    // SAFETY: by the caller's word.
    unsafe { super::list_of(message.msg_iov, c_int::try_from(message.msg_iovlen).ok()?) }
}

/// A structure of the caller's; `None` if it cannot be read, which the kernel is to say.
///
/// # Safety
/// If it can be read at all, it is the caller's for as long as the result is used.
unsafe fn readable<'a, T>(at: *const T) -> Option<&'a T> {
    // SAFETY: it can be read, and is the caller's.
    if at.is_aligned() && sys::is_readable(at, 1) { unsafe { at.as_ref() } } else { None }
}

/// What the control data of a message that is sent ask for. All but one request for segments, and nothing beside it, is for the kernel to
/// judge.
fn control_of(message: &msghdr) -> SendControl {
    if message.msg_controllen == 0 {
        return SendControl::None;
    }
    // SAFETY: arithmetic.
    let (least, most) = unsafe { (libc::CMSG_LEN(2) as usize, libc::CMSG_SPACE(2) as usize) };
    if !(least..=most).contains(&message.msg_controllen)
        || message.msg_control.is_null()
        || !sys::is_readable(message.msg_control.cast::<u8>(), message.msg_controllen)
    {
        return SendControl::Other;
    }
    // SAFETY: a header and two bytes behind it, which lie in the caller's control data and can be read.
    let (header, size) = unsafe {
        let at = message.msg_control.cast::<libc::cmsghdr>();
        (at.read_unaligned(), libc::CMSG_DATA(at).cast::<u16>().read_unaligned())
    };
    let is_segment = (header.cmsg_level, header.cmsg_type) == (libc::SOL_UDP, libc::UDP_SEGMENT);
    if is_segment && header.cmsg_len == least { SendControl::Segments(size) } else { SendControl::Other }
}

/// # Safety
/// `message` is what a program gives to `recvmsg`: null, an address that cannot be read, or its message with the list in it.
unsafe fn receive_datagram(fd: c_int, message: *mut msghdr, flags: c_int, kernel: impl Fn() -> ssize_t) -> ssize_t {
    if !datagram::is(fd) {
        return kernel();
    }
    // SAFETY: by this function's contract.
    if unsafe { readable(message) }.is_none() {
        return kernel();
    }
    // SAFETY: as above.
    let Some(header) = (unsafe { message.as_mut() }) else {
        return kernel();
    };
    // SAFETY: the caller's list, for the time of this call.
    let Some(list) = (unsafe { buffers(header) }) else { return kernel() };
    // SAFETY: the caller's header and the place for an address in it, for the time of this call.
    let wanted = unsafe { Wanted::by_header(header) };
    datagram::receiving(fd, list, flags, wanted, kernel)
}

export! {
    /// `recvmsg`. For descriptors that are not ours, too, since their messages may bring connections.
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
        let is_filled_in = Cell::new(false);
        let kernel = || {
            is_filled_in.set(true);
            // SAFETY: the caller's arguments, passed on.
            let got = unsafe { real::recvmsg(fd, message, flags) };
            if got >= 0 {
                // SAFETY: the kernel has just filled this message in.
                unsafe { rights::came(fd, &*message, flags) };
            }
            got
        };
        if table::get(fd) == Entry::NONE {
            return kernel();
        }
        let Some(conn) = Conn::of(fd) else {
            // SAFETY: the caller's message.
            return unsafe { receive_datagram(fd, message, flags, kernel) };
        };
        // SAFETY: the caller's message and its list, for the time of this call.
        let Some(list) = (unsafe { readable(message) }).and_then(|header| unsafe { buffers(header) }) else {
            return kernel();
        };
        let got = receiving(conn, fd, list, flags, kernel);
        if got >= 0 && !is_filled_in.get() {
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
        let Some(header) = (unsafe { readable(message) }) else { return kernel() };
        let passed = rights::see_off(fd, header, true);
        // SAFETY: the caller's list, for the time of this call.
        let sent = match (Conn::of(fd), unsafe { buffers(header) }) {
            (Some(conn), Some(list)) => sending(conn, fd, list, flags, kernel),
            (None, Some(list)) => {
                // SAFETY: the address of the caller's message, of as many bytes as it says, for the time of this call.
                let to = unsafe { ProgramAddress::new(header.msg_name.cast_const().cast(), header.msg_namelen) };
                datagram::sending(fd, list, flags, to, control_of(header), kernel)
            }
            _ => kernel(),
        };
        if sent < 0 {
            passed.take_back();
        }
        sent
    }

    /// `sendmmsg`
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
        if Conn::of(fd).is_none() && !datagram::has_rings(fd) {
            for i in 0..count.min(1024) as usize {
                // SAFETY: the caller's list of `count` messages, as far as it can be read.
                let Some(one) = (unsafe { readable(messages.wrapping_add(i)) }) else { break };
                // The kernel may send fewer.
                let _ = rights::see_off(fd, &one.msg_hdr, false);
            }
            // SAFETY: the caller's arguments, passed on.
            let done = unsafe { real::sendmmsg(fd, messages, count, flags) };
            if done > 0 {
                // SAFETY: the kernel has read at least one.
                let first = unsafe { &(*messages).msg_hdr };
                // SAFETY: as in `sendmsg`; the kernel has read it.
                let to = unsafe { ProgramAddress::new(first.msg_name.cast_const().cast(), first.msg_namelen) };
                datagram::sent_many(fd, to, done);
            }
            return done;
        }
        let mut done = 0;
        while done < count.min(1024) {
            let one = messages.wrapping_add(done as usize);
            if !sys::is_readable(one, 1) {
                return if done > 0 { done.cast_signed() } else { sys::fail(Errno::FAULT) as c_int };
            }
            // SAFETY: an entry of the caller's list of `count` messages, which can be read here.
            let one = unsafe { &mut *one };
            // SAFETY: a message of the caller's.
            let sent = unsafe { sendmsg(fd, &raw const one.msg_hdr, flags) };
            if sent < 0 {
                return if done > 0 { done.cast_signed() } else { -1 };
            }
            one.msg_len = sent.cast_unsigned() as c_uint;
            done += 1;
            // SAFETY: the caller's list, which was sent just now.
            let list = unsafe { buffers(&one.msg_hdr) }.unwrap_or(CallerBuffers::NONE);
            // As in the kernel: the bytes of the next message must not come before the rest of this one.
            if sent.cast_unsigned() < list.len() {
                break;
            }
        }
        done.cast_signed()
    }

    /// `recvmmsg`
    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int {
        if flags & libc::MSG_ERRQUEUE == 0
            && let Some(error) = datagram::take_error(fd)
        {
            return sys::fail(error) as c_int;
        }
        if Conn::of(fd).is_none() && !datagram::has_rings(fd) {
            datagram::join_group(fd);
            // SAFETY: the caller's messages, if there are any. `mmsghdr` begins with its `msghdr`.
            let first = if count > 0 && datagram::is(fd) { unsafe { readable(messages.cast::<msghdr>()) } } else { None };
            let room = first.filter(|first| !first.msg_name.is_null()).map_or(0, |first| first.msg_namelen);
            // SAFETY: the caller's arguments, passed on.
            let kernel = || unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
            if let Some(done) = datagram::by_kernel_alone(fd, kernel) {
                for i in 0..usize::try_from(done).unwrap_or(0) {
                    // SAFETY: the kernel has just filled in as many.
                    unsafe { rights::came(fd, &(*messages.add(i)).msg_hdr, flags) };
                }
                if done > 0 {
                    // SAFETY: the caller's list, of which the kernel has filled in at least one.
                    let first = unsafe { Wanted::by_header(&raw mut (*messages).msg_hdr) };
                    datagram::received_many(fd, first, room, done);
                }
                return done;
            }
        }
        // SAFETY: the caller's timeout, if there is one that can be read.
        let until = unsafe { readable(timeout) }.map(|t| {
            let seconds = Duration::from_secs(u64::try_from(t.tv_sec).unwrap_or(0));
            sys::now() + seconds + Duration::from_nanos(u64::try_from(t.tv_nsec).unwrap_or(0))
        });
        // An error is reported before anything else, here.
        if let Some(error) = Conn::of(fd).filter(|conn| conn.look().may_have_failed()).and_then(Conn::pending_error) {
            return sys::fail(error) as c_int;
        }
        let mut done = 0;
        let wait_for_one = flags & libc::MSG_WAITFORONE != 0;
        let mut flags = flags & !libc::MSG_WAITFORONE;
        while done < count.min(1024) {
            let one = messages.wrapping_add(done as usize);
            if !sys::is_readable(one, 1) {
                return if done > 0 { done.cast_signed() } else { sys::fail(Errno::FAULT) as c_int };
            }
            // SAFETY: an entry of the caller's list of `count` messages, which can be read here.
            let one = unsafe { &mut *one };
            // SAFETY: a message of the caller's.
            let got = unsafe { recvmsg(fd, &raw mut one.msg_hdr, flags) };
            if got < 0 {
                if done > 0 {
                    // Told by the next call.
                    match Conn::of(fd) {
                        Some(conn) => conn.errors().keep(Err(sys::errno())),
                        None => datagram::keep_error(fd, sys::errno()),
                    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conn::Pair;
    use libc::iovec;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::ptr;

    /// A page without access.
    fn no_memory() -> *mut libc::c_void {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        // SAFETY: new memory at an address that the kernel chooses; it stays.
        unsafe { mmap_anonymous(ptr::null_mut(), 4096, ProtFlags::empty(), MapFlags::PRIVATE) }.unwrap()
    }

    fn is_fault(result: ssize_t) -> bool {
        result == -1 && sys::errno() == Errno::FAULT
    }

    #[test]
    fn unreadable_structures_return_efault_on_tcp_and_ring() {
        let (stranger, _other) = UnixStream::pair().unwrap();
        let (on_tcp, on_ring) = (Pair::candidates(4096), Pair::up(4096));
        let (nowhere, word) = (no_memory(), 1 as c_int);
        for fd in [on_tcp.a, on_ring.a, stranger.as_raw_fd()] {
            // SAFETY: each of them names memory that cannot be read, which is what is tried; nothing else is pointed to.
            unsafe {
                assert!(is_fault(sendmsg(fd, nowhere.cast(), 0)), "{fd}");
                assert!(is_fault(recvmsg(fd, nowhere.cast(), libc::MSG_DONTWAIT)), "{fd}");
                assert!(is_fault(sendmmsg(fd, nowhere.cast(), 1, 0) as ssize_t), "{fd}");
                assert!(
                    is_fault(recvmmsg(fd, nowhere.cast(), 1, libc::MSG_DONTWAIT, ptr::null_mut()) as ssize_t),
                    "{fd}"
                );
                assert!(is_fault(super::super::write::writev(fd, nowhere.cast(), 2)), "{fd}");
                assert!(is_fault(super::super::read::readv(fd, nowhere.cast(), 2)), "{fd}");
                let mut message: msghdr = std::mem::zeroed();
                (message.msg_iov, message.msg_iovlen) = (nowhere.cast(), 1);
                assert!(is_fault(sendmsg(fd, &raw const message, 0)), "{fd}");
                let (cork, size) = (libc::TCP_CORK, size_of_val(&word) as libc::socklen_t);
                let set = super::super::sockopt::setsockopt(fd, libc::IPPROTO_TCP, cork, nowhere, size);
                assert!(set == -1, "{fd}");
            }
        }
        // SAFETY: as above.
        unsafe {
            assert!(
                is_fault(super::super::write::sendto(on_tcp.a, nowhere, 10, 0, ptr::null(), 0)),
                "the bytes, on TCP"
            );
        }
    }

    #[test]
    fn sendmmsg_ends_at_a_message_that_is_sent_in_part() {
        let p = Pair::up(4096);
        let mut bytes = [7u8; 8192];
        let mut lists = [(); 2].map(|()| iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 0 });
        lists[0].iov_len = bytes.len();
        // SAFETY: zeros are an empty message.
        let mut messages: [mmsghdr; 2] = unsafe { std::mem::zeroed() };
        for (message, list) in messages.iter_mut().zip(&mut lists) {
            (message.msg_hdr.msg_iov, message.msg_hdr.msg_iovlen) = (list, 1);
        }
        // SAFETY: messages of this test.
        let sent = unsafe { sendmmsg(p.a, messages.as_mut_ptr(), 2, libc::MSG_DONTWAIT) };
        assert_eq!(sent, 1, "the second has no bytes, so that there is room for it");
        assert!(messages[0].msg_len > 0 && messages[0].msg_len < 8192);
    }

    #[test]
    fn control_data_that_cannot_be_read_is_a_fault() {
        let (stranger, _other) = UnixStream::pair().unwrap();
        let mut byte = 1u8;
        let mut list = [iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        // SAFETY: a message of this test, whose control data cannot be read.
        let sent = unsafe {
            let mut message: msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (list.as_mut_ptr(), 1);
            (message.msg_control, message.msg_controllen) = (no_memory(), 64);
            sendmsg(stranger.as_raw_fd(), &raw const message, 0)
        };
        assert!(is_fault(sent));
    }
}
