//! System calls on memory that a peer may be changing.
#![expect(unsafe_code, reason = "passes a pointer that no slice may be made of to the kernel")]

use partywall_shm::bytes::PeerBytes;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;

/// Writes bytes of a peer's region to a descriptor. The kernel copies them as they are at that moment.
pub fn write_racing(fd: BorrowedFd<'_>, bytes: PeerBytes<'_>) -> io::Result<usize> {
    // rustix and std take slices only, and a slice over memory that changes is what must not exist.
    // SAFETY: the range is mapped readable for as long as `bytes` borrows its region; the kernel reads it as untrusted
    // user memory and never writes it.
    let n = unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Writes bytes of a peer's region to a file, from `offset` on. As [`write_racing`] otherwise.
pub fn write_racing_at(file: BorrowedFd<'_>, bytes: PeerBytes<'_>, offset: u64) -> io::Result<usize> {
    let offset = libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: the range is mapped readable for as long as `bytes` borrows its region; the kernel reads it as untrusted
    // user memory and never writes it.
    let n = unsafe { libc::pwrite(file.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), offset) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}
