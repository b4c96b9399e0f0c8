//! `read`, `recv` and their kin.
#![expect(unsafe_code, reason = "C functions")]

use super::{list_of, receiving};
use crate::buffers::CallerBuffers;
use crate::conn::Conn;
use crate::datagram::{self, Wanted};
use crate::real;
use libc::{c_int, c_void, iovec, off_t, size_t, sockaddr, socklen_t, ssize_t};
use std::cell::Cell;

#[inline]
fn one(buf: *mut c_void, len: size_t) -> [iovec; 1] {
    [iovec { iov_base: buf, iov_len: len }]
}

export_for_descriptor! {
    /// `read`
    fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
        let list = one(buf, len);
        // SAFETY: the caller's buffer, valid for writes of `len` bytes during this call, as the C library demands.
        let buffers = unsafe { CallerBuffers::new(&list) };
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::read(fd, buf, len) };
        match Conn::of(fd) {
            None if len > 0 => datagram::receiving(fd, buffers, 0, Wanted::NONE, kernel),
            None => kernel(),
            // To read nothing asks for nothing; to receive nothing does.
            Some(_) if len == 0 => kernel(),
            Some(conn) => receiving(conn, fd, buffers, 0, kernel),
        }
    }

    /// `readv`
    fn readv(fd: c_int, list: *const iovec, count: c_int) -> ssize_t {
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::readv(fd, list, count) };
        // SAFETY: the caller's list and its buffers, for the time of this call.
        match (Conn::of(fd), unsafe { list_of(list, count) }) {
            (Some(conn), Some(list)) if list.has_bytes() => receiving(conn, fd, list, 0, kernel),
            (None, Some(list)) if list.has_bytes() => datagram::receiving(fd, list, 0, Wanted::NONE, kernel),
            _ => kernel(),
        }
    }

    /// `recv`
    fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
        let list = one(buf, len);
        // SAFETY: the caller's buffer, valid for writes of `len` bytes during this call, as the C library demands.
        let buffers = unsafe { CallerBuffers::new(&list) };
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::recv(fd, buf, len, flags) };
        match Conn::of(fd) {
            None => datagram::receiving(fd, buffers, flags, Wanted::NONE, kernel),
            Some(conn) => receiving(conn, fd, buffers, flags, kernel),
        }
    }

    /// `recvfrom`
    fn recvfrom(
        fd: c_int,
        buf: *mut c_void,
        len: size_t,
        flags: c_int,
        from: *mut sockaddr,
        from_len: *mut socklen_t,
    ) -> ssize_t {
        let list = one(buf, len);
        // SAFETY: the caller's buffer, valid for writes of `len` bytes during this call, as the C library demands.
        let buffers = unsafe { CallerBuffers::new(&list) };
        let is_filled_in = Cell::new(false);
        let kernel = || {
            is_filled_in.set(true);
            // SAFETY: the caller's arguments, passed on.
            unsafe { real::recvfrom(fd, buf, len, flags, from, from_len) }
        };
        let Some(conn) = Conn::of(fd) else {
            // SAFETY: the caller's address and its length, valid by the contract of its call.
            let wanted = unsafe { Wanted::new(from, from_len) };
            return datagram::receiving(fd, buffers, flags, wanted, kernel);
        };
        let got = receiving(conn, fd, buffers, flags, kernel);
        if got >= 0 && !from.is_null() && !from_len.is_null() && !is_filled_in.get() {
            // A stream says nothing of where its bytes are from.
            // SAFETY: the caller's own word, of which the kernel would do the same.
            unsafe { *from_len = 0 };
        }
        got
    }
}

export! {
    /// `read`, as compiled with `_FORTIFY_SOURCE`: the buffer's size was not known to suffice.
    fn __read_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t) -> ssize_t {
        check(len, size);
        // SAFETY: the caller's arguments, passed on.
        unsafe { read(fd, buf, len) }
    }

    /// `preadv2`, which reads from a socket when its offset is -1.
    fn preadv2(fd: c_int, list: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t {
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::preadv2(fd, list, count, offset, flags) };
        // SAFETY: the caller's list and its buffers, for the time of this call.
        match (Conn::of(fd), unsafe { list_of(list, count) }) {
            (Some(conn), Some(list)) if offset == -1 && list.has_bytes() => {
                let wait = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
                receiving(conn, fd, list, wait, kernel)
            }
            (None, Some(list)) if offset == -1 && list.has_bytes() => {
                let wait = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
                datagram::receiving(fd, list, wait, Wanted::NONE, kernel)
            }
            _ => kernel(),
        }
    }

    /// `preadv2` of programs with large files.
    fn preadv64v2(fd: c_int, list: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t {
        // SAFETY: the same function: offsets have 64 bits here.
        unsafe { preadv2(fd, list, count, offset, flags) }
    }

    /// `recv`, as compiled with `_FORTIFY_SOURCE`.
    fn __recv_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int) -> ssize_t {
        check(len, size);
        // SAFETY: the caller's arguments, passed on.
        unsafe { recv(fd, buf, len, flags) }
    }

    /// `recvfrom`, as compiled with `_FORTIFY_SOURCE`.
    fn __recvfrom_chk(
        fd: c_int,
        buf: *mut c_void,
        len: size_t,
        size: size_t,
        flags: c_int,
        from: *mut sockaddr,
        from_len: *mut socklen_t,
    ) -> ssize_t {
        check(len, size);
        // SAFETY: the caller's arguments, passed on.
        unsafe { recvfrom(fd, buf, len, flags, from, from_len) }
    }
}

// SAFETY: the signature that the C library gives it.
unsafe extern "C-unwind" {
    /// Ends a program that would overrun a buffer.
    pub(super) fn __chk_fail() -> !;
}

/// The check of `_FORTIFY_SOURCE`: a program that would overrun its buffer is aborted, as by the C library.
#[inline]
fn check(len: size_t, size: size_t) {
    if len > size {
        // SAFETY: takes no argument and does not return.
        unsafe { __chk_fail() }
    }
}
