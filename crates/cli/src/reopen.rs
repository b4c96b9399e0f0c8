//! Opens files that another user named. A FIFO, a device or a file of that user's file system could otherwise block this process.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxFlags};

/// Opens a regular file for reading that so far is only named (`O_PATH`).
pub(crate) fn regular(named: BorrowedFd<'_>) -> io::Result<File> {
    facts(named).and_then(|_| open(named))
}

/// Opens a regular file, if it is on the device with this number, as [`device`] returns it. Also returns its number there.
pub(crate) fn regular_on(named: BorrowedFd<'_>, device: (u32, u32)) -> io::Result<(File, u64)> {
    let facts = facts(named)?;
    if (facts.stx_dev_major, facts.stx_dev_minor) != device {
        return Err(io::Error::other("it is on another device"));
    }
    Ok((open(named)?, facts.stx_ino))
}

/// The device of a file that is ours.
pub(crate) fn device(file: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    facts(file).map(|facts| (facts.stx_dev_major, facts.stx_dev_minor))
}

/// The kernel's facts about a regular file. The file system is not asked.
fn facts(named: BorrowedFd<'_>) -> io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let facts = rustix::fs::statx(named, "", flags, StatxFlags::TYPE | StatxFlags::INO)?;
    match FileType::from_raw_mode(facts.stx_mode.into()) {
        FileType::RegularFile => Ok(facts),
        _ => Err(io::Error::other("it is no regular file")),
    }
}

fn open(named: BorrowedFd<'_>) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let path = format!("/proc/self/fd/{}", named.as_raw_fd());
    Ok(File::from(rustix::fs::openat(CWD, path, flags, Mode::empty())?))
}
