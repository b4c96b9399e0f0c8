//! `accept`.
#![expect(unsafe_code, reason = "C functions")]

use super::connect::name_of;
use crate::conn::Conn;
use crate::conn::leave::forget;
use crate::table::{self, Entry};
use crate::{broker, real, sys};
use libc::{c_int, sockaddr, socklen_t};
use partywall_shm::status::Role;

/// A connection has come. It may be from a program of ours if its listener is known as one.
fn adopt(listener: c_int, fd: c_int) {
    if fd < 0 {
        return;
    }
    if table::get(fd) != Entry::NONE {
        forget(fd);
    }
    if !super::listen::is_published(listener) {
        return;
    }
    let errno = sys::errno_number();
    if let Some(peer) = name_of(fd, true)
        && broker::knows_resident(fd, peer)
        && let Some(local) = name_of(fd, false)
    {
        Conn::adopt(fd, Role::Accepting, local, peer);
    }
    sys::restore_errno(errno);
}

export! {
    /// `accept`
    fn accept(listener: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let fd = unsafe { real::accept(listener, address, len) };
        adopt(listener, fd);
        fd
    }

    /// `accept4`
    fn accept4(listener: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let fd = unsafe { real::accept4(listener, address, len, flags) };
        adopt(listener, fd);
        fd
    }
}
