//! `ioctl`: how much waits to be read or acknowledged, and `FIONBIO`.
#![expect(unsafe_code, reason = "C functions")]

use crate::conn::Conn;
use crate::real;
use libc::{c_int, c_ulong};
use partywall_shm::status::Reason;

export! {
    /// `ioctl`, whose third argument is variadic in C and comes in the same register as a named one.
    fn ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::ioctl(fd, request, argument) };
        let Some(conn) = Conn::of(fd) else {
            return if result < 0 { result } else { datagrams(fd, request, argument) };
        };
        if result < 0 {
            return result;
        }
        // Requests are 32 bits, whatever the upper half says.
        let request = request & 0xffff_ffff;
        let word = argument as *mut c_int;
        match request as libc::Ioctl {
            libc::FIONBIO => {
                // SAFETY: the caller's word, which the kernel has read.
                conn.options().blocking_was_set(unsafe { word.read_unaligned() } != 0);
            }
            // SAFETY: as above.
            libc::FIOASYNC if unsafe { word.read_unaligned() } != 0 => conn.stay_on_tcp(Reason::Option),
            libc::FIONREAD => {
                let more = c_int::try_from(conn.look().unread()).unwrap_or(c_int::MAX);
                // SAFETY: the caller's word, which the kernel has written.
                unsafe { word.write_unaligned(word.read_unaligned().saturating_add(more)) };
            }
            libc::TIOCOUTQ => {
                let more = c_int::try_from(conn.look().unsent()).unwrap_or(c_int::MAX);
                // SAFETY: as above.
                unsafe { word.write_unaligned(word.read_unaligned().saturating_add(more)) };
            }
            _ => {}
        }
        result
    }
}

/// The requests on a UDP socket.
fn datagrams(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int {
    use crate::datagram;
    if !datagram::is(fd) {
        return 0;
    }
    let word = argument as *mut c_int;
    match (request & 0xffff_ffff) as libc::Ioctl {
        // SAFETY: the caller's word, which the kernel has read.
        libc::FIONBIO => datagram::blocking_was_set(fd, unsafe { word.read_unaligned() } != 0),
        libc::FIOASYNC => datagram::give_up(fd),
        libc::FIONREAD => {
            if let Some(len) = datagram::next_len(fd) {
                // SAFETY: the caller's word, which the kernel has written.
                unsafe { word.write_unaligned(len) };
            }
        }
        _ => {}
    }
    0
}
