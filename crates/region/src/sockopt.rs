//! UNIX sockets that refuse descriptors, and socket options that rustix has no function for.
#![expect(unsafe_code, reason = "system calls on an integer that lives through the call")]

use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io;

/// Whether a UNIX socket takes descriptors from its peer (Linux 6.16). With 0, a peer that sends one gets `EPERM`.
const SO_PASSRIGHTS: libc::c_int = 83;

/// A connected pair of sockets, close-on-exec, of which each end refuses descriptors.
///
/// A kernel before Linux 6.16 cannot make an end refuse them. The receiver has to look at a message before taking it
/// ([`refuses_descriptors`]).
///
/// # Errors
/// Out of descriptors.
pub(crate) fn guarded_pair(kind: SocketType, flags: SocketFlags) -> io::Result<(OwnedFd, OwnedFd)> {
    let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags | SocketFlags::CLOEXEC, None)?;
    for end in [&a, &b] {
        match refuse_descriptors(end) {
            Err(e) if e.raw_os_error() != Some(Errno::NOPROTOOPT.raw_os_error()) => return Err(e),
            _ => {}
        }
    }
    Ok((a, b))
}

/// Makes a UNIX socket refuse descriptors: its peer's `sendmsg` fails.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 6.16.
fn refuse_descriptors(socket: impl AsFd) -> io::Result<()> {
    let no: libc::c_int = 0;
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `no`, which is that long and outlives the call.
    let done = unsafe {
        libc::setsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const no).cast(), len)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether a UNIX socket refuses descriptors.
pub(crate) fn refuses_descriptors(socket: impl AsFd) -> bool {
    let mut takes: libc::c_int = 1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `takes`, which is that long, and both outlive the call.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw mut takes).cast(),
            &raw mut len,
        )
    };
    done == 0 && takes == 0
}

/// Bytes, with the kernel's bookkeeping, that have been sent on a UNIX socket and that its peer has not read.
pub(crate) fn unread(socket: impl AsFd) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one integer to `bytes`, which outlives the call.
    let done = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if done == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet;

    #[test]
    fn unread_counts_bytes_not_received_by_peer() {
        let (a, b) = packet::pair().unwrap();
        assert_eq!(unread(&a), 0);
        packet::send(a.as_fd(), &[0; 1000], &[]).unwrap();
        assert!(unread(&a) >= 1000);
        packet::recv(b.as_fd(), &mut [0; 1000]).unwrap();
        assert_eq!(unread(&a), 0);
    }
}
