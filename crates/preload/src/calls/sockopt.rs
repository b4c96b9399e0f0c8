//! `setsockopt` and `getsockopt`: the kernel's socket has the options, and we follow those that matter to a ring.
#![expect(unsafe_code, reason = "C functions")]

use crate::conn::{Conn, changes_stream, needs_tcp};
use crate::{real, sys};
use libc::{c_int, c_void, socklen_t};
use partywall_shm::status::Reason;
use rustix::io::Errno;

export! {
    /// `setsockopt`
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int {
        let conn = Conn::of(fd);
        if let Some(conn) = conn
            && (level, name) == (libc::IPPROTO_TCP, libc::TCP_CORK)
            && sys::is_readable(value.cast::<c_int>(), 1)
            && len as usize == size_of::<c_int>()
            // SAFETY: the caller's number, of that size.
            && conn.options().keep_cork(fd, unsafe { value.cast::<c_int>().read_unaligned() } != 0)
        {
            return 0;
        }
        if let Some(conn) = conn
            && needs_tcp(level, name)
        {
            if changes_stream(level, name) {
                // Before: afterwards the kernel carries the stream in another form.
                conn.bring_down(Reason::Option);
            } else {
                conn.stay_on_tcp(Reason::Option);
            }
        }
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::setsockopt(fd, level, name, value, len) };
        if result == 0 {
            crate::datagram::option_was_set(fd, level, name);
        }
        if result == 0 && let Some(conn) = conn.map(Conn::now) {
            conn.options().was_set(fd, level, name);
            if (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
                crate::ready::low_water_was_set(conn);
            }
        }
        result
    }

    /// `getsockopt`
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int {
        if (level, name) == (libc::IPPROTO_TCP, libc::TCP_CORK)
            && let Some(conn) = Conn::of(fd)
        {
            conn.options().give_cork(fd);
        }
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::getsockopt(fd, level, name, value, len) };
        if result == 0
            && level == libc::SOL_SOCKET
            && name == libc::SO_ERROR
            && let Some(conn) = Conn::of(fd)
            // SAFETY: the kernel has just written there how long its answer is.
            && unsafe { *len } as usize >= size_of::<c_int>()
        {
            let answer = value.cast::<c_int>();
            // SAFETY: the kernel has just written an `int` there, aligned or not.
            match unsafe { answer.read_unaligned() } {
                error if error == 0 || conn.death().is_reset() => {
                    let error = conn.kept_error().map_or(0, Errno::raw_os_error);
                    // SAFETY: as above.
                    unsafe { answer.write_unaligned(error) };
                }
                error => conn.errors().note(Errno::from_raw_os_error(error)),
            }
        }
        result
    }
}
