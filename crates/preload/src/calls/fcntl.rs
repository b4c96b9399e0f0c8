//! `fcntl`: copies of descriptors, and `O_NONBLOCK`.
#![expect(unsafe_code, reason = "C functions")]

use super::dup::copied;
use crate::conn::Conn;
use crate::real;
use crate::table::{self, Entry};
use libc::{c_int, c_ulong};
use partywall_shm::status::Reason;

/// Follows a change that the program has made to a descriptor of ours.
fn follow(fd: c_int, command: c_int, argument: c_ulong, result: c_int) {
    if result < 0 {
        return;
    }
    match command {
        // As by `dup`: a socket that is not connected yet is not in the table.
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => copied(fd, result),
        _ if table::get(fd) == Entry::NONE => {}
        libc::F_SETFL => {
            crate::datagram::blocking_was_set(fd, argument & libc::O_NONBLOCK as c_ulong != 0);
            if argument & libc::O_ASYNC as c_ulong != 0 {
                crate::datagram::give_up(fd);
            }
            if let Some(conn) = Conn::of(fd) {
                conn.options().blocking_was_set(argument & libc::O_NONBLOCK as c_ulong != 0);
                if argument & libc::O_ASYNC as c_ulong != 0 {
                    // Signals tell of the kernel's socket only.
                    conn.stay_on_tcp(Reason::Option);
                }
            }
        }
        _ => {}
    }
}

// Both are variadic in C: the third argument comes in the same register as a named one, and is passed on whatever it is.
export! {
    /// `fcntl`
    fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::fcntl(fd, command, argument) };
        follow(fd, command, argument, result);
        result
    }

    /// `fcntl` of programs with large files.
    fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::fcntl64(fd, command, argument) };
        follow(fd, command, argument, result);
        result
    }
}
