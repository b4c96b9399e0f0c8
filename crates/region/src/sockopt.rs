//! UNIX sockets that refuse descriptors, and socket options that rustix has no function for.
#![expect(unsafe_code, reason = "system calls on an integer that lives through the call")]

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io;
use std::mem::MaybeUninit;

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
    set_option(socket.as_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, 0)
}

/// Whether a UNIX socket refuses descriptors.
pub(crate) fn refuses_descriptors(socket: impl AsFd) -> bool {
    option::<libc::c_int>(socket.as_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS).is_ok_and(|takes| takes == 0)
}

/// Reads a socket option that is a plain structure of integers; what an older kernel does not know stays 0.
///
/// # Errors
/// The kernel's.
pub fn option<T: Copy>(socket: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    // It is a small structure.
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, which is the size of `value`.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, value.as_mut_ptr().cast(), &raw mut len) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed and partly overwritten by the kernel; callers ask for structures of integers, for which any bytes do.
    Ok(unsafe { value.assume_init() })
}

/// Sets a socket option that is an `int`.
///
/// # Errors
/// The kernel's.
pub(crate) fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `value`, which is that long and outlives the call.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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
