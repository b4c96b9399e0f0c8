//! The kernel's counts of a connection's bytes.

use super::Conn;
use crate::sys;
use partywall_shm::status::Role;
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::atomic::Ordering;

const ESTABLISHED: u8 = 1;
const FIONREAD: libc::Ioctl = libc::FIONREAD;
const SIOCOUTQ: libc::Ioctl = libc::TIOCOUTQ;

/// Whether all bytes that the kernel has carried were counted here (protocol T12). They were not if some passed by raw system calls,
/// by `io_uring` or inside the C library.
///
/// `None` while the kernel's numbers change, and while the connection ends: the kernel counts the end as a byte.
pub(super) fn is_accounted_for(conn: &Conn, fd: c_int) -> Option<bool> {
    let (sent, received) = kernel_counts(conn.role(), fd)?;
    Some(received == conn.rx.counted.load(Ordering::Relaxed) && sent == conn.tx.counted.load(Ordering::Relaxed))
}

/// The bytes that the program has sent by the kernel's socket, and those that it has read from it.
///
/// `None` as in [`is_accounted_for`].
pub(super) fn kernel_counts(role: Role, fd: c_int) -> Option<(u64, u64)> {
    let fd = sys::borrow(fd);
    for _ in 0..64 {
        let (unread, unsent) = (queued(fd, FIONREAD).ok()?, queued(fd, SIOCOUTQ).ok()?);
        let info = info(fd).ok()?;
        if queued(fd, FIONREAD) != Ok(unread) || queued(fd, SIOCOUTQ) != Ok(unsent) {
            continue;
        }
        if info.state != ESTABLISHED {
            return None;
        }
        let received = info.bytes_received.wrapping_sub(unread);
        // The SYN of a connecting side is a byte to the kernel.
        let syn = u64::from(role == Role::Connecting);
        return Some((info.bytes_acked.wrapping_add(unsent).wrapping_sub(syn), received));
    }
    None
}

/// How many bytes wait in one of the socket's queues in the kernel.
#[expect(unsafe_code, reason = "an ioctl that rustix has no name for")]
pub(crate) fn queued(fd: rustix::fd::BorrowedFd<'_>, which: libc::Ioctl) -> Result<u64, Errno> {
    use rustix::fd::AsRawFd;
    let mut n: c_int = 0;
    // SAFETY: both requests write one `int`. Not this library's own `ioctl`, nor its `syscall`, which add what is in rings.
    let result =
        unsafe { crate::real::ioctl(fd.as_raw_fd(), which, (&raw mut n).expose_provenance() as libc::c_ulong) };
    if result < 0 { Err(sys::errno()) } else { Ok(u64::try_from(n).unwrap_or(0)) }
}

struct KernelCounts {
    state: u8,
    bytes_acked: u64,
    bytes_received: u64,
}

/// The part of `TCP_INFO` that this library uses; libc's structure is older than these counts.
#[expect(unsafe_code, reason = "a socket option that rustix has no name for")]
fn info(fd: rustix::fd::BorrowedFd<'_>) -> Result<KernelCounts, Errno> {
    use rustix::fd::AsRawFd;
    let mut buffer = [0u8; 136];
    let mut len = buffer.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes.
    let result = unsafe {
        crate::real::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            buffer.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result < 0 {
        return Err(sys::errno());
    }
    let long = |at: usize| buffer.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_ne_bytes);
    match (long(120), long(128)) {
        (Some(bytes_acked), Some(bytes_received)) if len as usize >= buffer.len() => {
            Ok(KernelCounts { state: buffer[0], bytes_acked, bytes_received })
        }
        // A kernel from before 4.1.
        _ => Err(Errno::NOSYS),
    }
}
