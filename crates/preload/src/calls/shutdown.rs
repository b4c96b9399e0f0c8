//! `shutdown`.
#![expect(unsafe_code, reason = "C functions")]

use crate::conn::Conn;
use crate::{real, sys};
use libc::c_int;
use rustix::io::Errno;

export! {
    /// `shutdown`
    fn shutdown(fd: c_int, how: c_int) -> c_int {
        let conn = Conn::of(fd);
        if let Some(conn) = conn {
            conn.shut(how);
        }
        crate::datagram::give_up(fd);
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::shutdown(fd, how) };
        if conn.is_some() && how != libc::SHUT_RD {
            crate::conn::ends::note();
        }
        if result == 0 && conn.is_some_and(|conn| conn.death().is_reset()) {
            // As after a reset that the kernel knows of.
            return sys::fail(Errno::NOTCONN) as c_int;
        }
        result
    }
}
