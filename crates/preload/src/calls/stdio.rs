//! Streams of the C library over sockets: they read and write inside it, past us. Such a socket goes back to TCP and is
//! forgotten.
#![expect(unsafe_code, reason = "C functions")]

use crate::conn::Conn;
use crate::real;
use libc::{FILE, c_char, c_int};
use partywall_shm::status::Reason;

export! {
    /// `fdopen`
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
        if let Some(conn) = Conn::of(fd) {
            conn.bring_down(Reason::RawCalls);
            // `fclose` closes past us, too.
            crate::conn::leave::forget(fd);
        }
        // SAFETY: the caller's arguments, passed on.
        unsafe { real::fdopen(fd, mode) }
    }
}
