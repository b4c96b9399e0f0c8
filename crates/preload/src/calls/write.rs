//! `write`, `send` and their kin.
#![expect(unsafe_code, reason = "C functions")]

use super::{list_of, sending};
use crate::buffers::CallerBuffers;
use crate::conn::Conn;
use crate::datagram::{self, SendControl};
use crate::real;
use crate::sockaddr::ProgramAddress;
use libc::{c_int, c_void, iovec, off_t, size_t, sockaddr, socklen_t, ssize_t};

#[inline]
fn one(buf: *const c_void, len: size_t) -> [iovec; 1] {
    [iovec { iov_base: buf.cast_mut(), iov_len: len }]
}

export_for_descriptor! {
    /// `write`
    fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
        let list = one(buf, len);
        // SAFETY: the caller's buffer, valid for reads of `len` bytes during this call, as the C library demands.
        let buffers = unsafe { CallerBuffers::new(&list) };
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::write(fd, buf, len) };
        match Conn::of(fd) {
            None => datagram::sending(fd, buffers, 0, ProgramAddress::NONE, SendControl::None, kernel),
            Some(conn) => sending(conn, fd, buffers, 0, kernel),
        }
    }

    /// `writev`
    fn writev(fd: c_int, list: *const iovec, count: c_int) -> ssize_t {
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::writev(fd, list, count) };
        // SAFETY: the caller's list and its buffers, for the time of this call.
        match (Conn::of(fd), unsafe { list_of(list, count) }) {
            (Some(conn), Some(list)) if list.has_bytes() => sending(conn, fd, list, 0, kernel),
            (None, Some(list)) if list.has_bytes() => datagram::sending(fd, list, 0, ProgramAddress::NONE, SendControl::None, kernel),
            _ => kernel(),
        }
    }

    /// `send`
    fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t {
        let list = one(buf, len);
        // SAFETY: the caller's buffer, valid for reads of `len` bytes during this call, as the C library demands.
        let buffers = unsafe { CallerBuffers::new(&list) };
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::send(fd, buf, len, flags) };
        match Conn::of(fd) {
            None => datagram::sending(fd, buffers, flags, ProgramAddress::NONE, SendControl::None, kernel),
            Some(conn) => sending(conn, fd, buffers, flags, kernel),
        }
    }

    /// `sendto`; a stream that is connected takes no notice of the address.
    fn sendto(
        fd: c_int,
        buf: *const c_void,
        len: size_t,
        flags: c_int,
        to: *const sockaddr,
        to_len: socklen_t,
    ) -> ssize_t {
        let list = one(buf, len);
        // SAFETY: the caller's buffer, valid for reads of `len` bytes during this call, as the C library demands.
        let buffers = unsafe { CallerBuffers::new(&list) };
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::sendto(fd, buf, len, flags, to, to_len) };
        match Conn::of(fd) {
            None => {
                // SAFETY: the caller's address, of as many bytes as it says, for the time of this call.
                let to = unsafe { ProgramAddress::new(to, to_len) };
                datagram::sending(fd, buffers, flags, to, SendControl::None, kernel)
            }
            Some(conn) => sending(conn, fd, buffers, flags, kernel),
        }
    }
}

export! {
    /// `pwritev2`, which writes to a socket when its offset is -1.
    fn pwritev2(fd: c_int, list: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t {
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::pwritev2(fd, list, count, offset, flags) };
        // SAFETY: the caller's list and its buffers, for the time of this call.
        match (Conn::of(fd), unsafe { list_of(list, count) }) {
            (Some(conn), Some(list)) if offset == -1 && list.has_bytes() => {
                let wait = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
                sending(conn, fd, list, wait, kernel)
            }
            (None, Some(list)) if offset == -1 && list.has_bytes() => {
                let wait = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
                // The kernel judges other flags.
                let control = if flags & !libc::RWF_NOWAIT != 0 { SendControl::Other } else { SendControl::None };
                datagram::sending(fd, list, wait, ProgramAddress::NONE, control, kernel)
            }
            _ => kernel(),
        }
    }

    /// `pwritev2` of programs with large files.
    fn pwritev64v2(fd: c_int, list: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t {
        // SAFETY: the same function: offsets have 64 bits here.
        unsafe { pwritev2(fd, list, count, offset, flags) }
    }
}
