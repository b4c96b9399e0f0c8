//! `shutdown`.
#![expect(unsafe_code, reason = "C functions")]

use crate::conn::Conn;
use crate::real;
use libc::c_int;

export! {
    /// `shutdown`
    fn shutdown(fd: c_int, how: c_int) -> c_int {
        if let Some(conn) = Conn::of(fd) {
            conn.shut(how);
        }
        crate::datagram::give_up(fd);
        // SAFETY: the caller's arguments, passed on.
        unsafe { real::shutdown(fd, how) }
    }
}
