//! Requests about the data of open files.

use super::actor::act_as;
use super::lock;
use super::session::ExportSession;
use super::tables::OpenHandle;
use crate::wire::{LARGEST_DATA, write_flags};
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, FallocateFlags, SeekFrom, StatxFlags, statx};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::io::IoSliceMut;
use std::sync::Arc;

/// `SEEK_DATA`.
const SEEK_DATA: u32 = 3;
/// `SEEK_HOLE`.
const SEEK_HOLE: u32 = 4;

/// Reads from `offset` on until `to` is full or the file ends. The last argument of `read` states whether it may wait. It may after `waits` was called.
/// Returns how many bytes were read.
fn fill(
    to: &mut [u8],
    offset: u64,
    waits: impl FnOnce(),
    mut read: impl FnMut(&mut [u8], u64, bool) -> Result<usize, Errno>,
    is_at_end: impl Fn(u64) -> bool,
) -> Result<usize, Errno> {
    let (mut filled, mut waits) = (0, Some(waits));
    while filled < to.len() {
        let at = offset.checked_add(filled as u64).ok_or(Errno::INVAL)?;
        match (read(&mut to[filled..], at, waits.is_none()), waits.take()) {
            (Ok(0), None) => break,
            // Linux 5.9 and 5.10 can return 0 instead of EAGAIN.
            (Ok(0), Some(_)) if is_at_end(at) => break,
            (Ok(0), Some(waits)) => waits(),
            (Ok(n), still) => {
                filled += n;
                waits = still;
            }
            (Err(Errno::INTR), still) => waits = still,
            // EAGAIN, or a file system without such reads. Errors of the file come again without the flag.
            (Err(_), Some(waits)) => waits(),
            (Err(_), None) if filled > 0 => break,
            (Err(e), None) => return Err(e),
        }
    }
    Ok(filled)
}

/// Whether a file ends here as far as the kernel knows without asking a server. File systems of servers have no reads that do not wait.
fn is_at_end(file: impl AsFd, at: u64) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(file, c"", flags, StatxFlags::SIZE).is_ok_and(|found| at >= found.stx_size)
}

impl ExportSession {
    fn file(&self, number: u64) -> Result<Arc<OpenHandle>, Errno> {
        let open = self.handle(number)?;
        if open.is_directory { Err(Errno::ISDIR) } else { Ok(open) }
    }

    /// Reads from an open file into `to`, as the user that opened it and as much as there is. Returns how many bytes were read.
    ///
    /// # Errors
    /// The system's; `EBADF` if there is no such open file.
    pub fn read(&self, handle: u64, offset: u64, to: &mut [u8]) -> Result<usize, Errno> {
        self.read_unless_waiting(handle, offset, to, || ())
    }

    /// As [`ExportSession::read`], and calls `waits` before the read waits for a disk, or where the file system cannot tell whether it will.
    pub(crate) fn read_unless_waiting(
        &self,
        handle: u64,
        offset: u64,
        to: &mut [u8],
        waits: impl FnOnce(),
    ) -> Result<usize, Errno> {
        let open = self.file(handle)?;
        act_as(&open.actor)?;
        let most = to.len().min(LARGEST_DATA as usize);
        let read = |rest: &mut [u8], at, may_wait| match may_wait {
            false => preadv2(&open.file, &mut [IoSliceMut::new(rest)], at, ReadWriteFlags::NOWAIT),
            true => rustix::io::pread(&open.file, rest, at),
        };
        fill(&mut to[..most], offset, waits, read, |at| is_at_end(&open.file, at))
    }

    /// Writes to an open file, as the user that opened it. `write` is given the file, the bytes that are written already, and where the next ones
    /// go, and writes some or all of the others; `len` is how many there are. With [`write_flags::APPEND`], the file has `O_APPEND` meanwhile.
    /// Returns how many bytes were written.
    ///
    /// # Errors
    /// The system's, if nothing was written; `EBADF` if there is no such open file; `EINVAL` for unknown flags.
    pub fn write(
        &self,
        handle: u64,
        (offset, flags): (u64, u32),
        len: usize,
        mut write: impl FnMut(rustix::fd::BorrowedFd<'_>, usize, u64) -> Result<usize, Errno>,
    ) -> Result<u32, Errno> {
        self.must_be_writable()?;
        let len = u32::try_from(len).ok().filter(|len| *len <= LARGEST_DATA).ok_or(Errno::INVAL)?;
        if flags & !write_flags::APPEND != 0 {
            return Err(Errno::INVAL);
        }
        let open = self.file(handle)?;
        act_as(&open.actor)?;
        let _writing = open.writing(flags & write_flags::APPEND != 0)?;
        let mut written = 0;
        while written < len as usize {
            let at = offset.checked_add(written as u64).filter(|at| i64::try_from(*at).is_ok()).ok_or(Errno::FBIG)?;
            match write(open.file.as_fd(), written, at) {
                Ok(0) => break,
                Ok(n) => written += n,
                Err(Errno::INTR) => {}
                Err(_) if written > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(written as u32)
    }

    pub(super) fn flush(&self, handle: u64, owner: u64) -> Result<(), Errno> {
        let file = self.handle(handle)?.node.identity;
        let locks = lock(&self.tables).unlock(file, owner);
        drop(locks);
        Ok(())
    }

    pub(super) fn sync(&self, handle: u64, data_only: bool) -> Result<(), Errno> {
        let open = self.handle(handle)?;
        if data_only { rustix::fs::fdatasync(&open.file) } else { rustix::fs::fsync(&open.file) }
    }

    pub(super) fn allocate(&self, handle: u64, mode: u32, offset: u64, len: u64) -> Result<(), Errno> {
        self.must_be_writable()?;
        let open = self.file(handle)?;
        act_as(&open.actor)?;
        rustix::fs::fallocate(&open.file, FallocateFlags::from_bits_retain(mode), offset, len)
    }

    pub(super) fn seek(&self, handle: u64, offset: u64, whence: u32) -> Result<u64, Errno> {
        let open = self.file(handle)?;
        i64::try_from(offset).map_err(|_| Errno::NXIO)?;
        match whence {
            SEEK_DATA => rustix::fs::seek(&open.file, SeekFrom::Data(offset)),
            SEEK_HOLE => rustix::fs::seek(&open.file, SeekFrom::Hole(offset)),
            _ => Err(Errno::INVAL),
        }
    }

    pub(super) fn copy_range(
        &self,
        from: u64,
        mut from_offset: u64,
        to: u64,
        mut to_offset: u64,
        len: u64,
    ) -> Result<u64, Errno> {
        self.must_be_writable()?;
        let (from, to) = (self.file(from)?, self.file(to)?);
        act_as(&to.actor)?;
        // The kernel refuses to copy to a file with O_APPEND.
        let _writing = to.writing(false)?;
        // One request must not keep the session busy for long.
        let len = len.min(u64::from(LARGEST_DATA) * 16) as usize;
        let copied =
            rustix::fs::copy_file_range(&from.file, Some(&mut from_offset), &to.file, Some(&mut to_offset), len)?;
        Ok(copied as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Reads from a file of this many bytes, whose first read returns what `first` does. Returns the outcome, and whether it has waited.
    fn fill_from(size: u64, first: Result<usize, Errno>) -> (Result<usize, Errno>, bool) {
        let has_waited = Cell::new(false);
        let read = |to: &mut [u8], at, may_wait| {
            assert_eq!(may_wait, has_waited.get());
            if may_wait { Ok(to.len().min((size - at) as usize)) } else { first }
        };
        let outcome = fill(&mut [0; 16], 0, || has_waited.set(true), read, |at| at >= size);
        (outcome, has_waited.get())
    }

    #[test]
    fn empty_read_without_wait_is_repeated_within_the_file() {
        assert_eq!(fill_from(10, Ok(0)), (Ok(10), true));
        assert_eq!(fill_from(10, Err(Errno::AGAIN)), (Ok(10), true));
    }

    #[test]
    fn read_at_the_end_of_the_file_does_not_wait() {
        assert_eq!(fill_from(0, Ok(0)), (Ok(0), false));
        let file = tempfile::tempfile().unwrap();
        file.set_len(10).unwrap();
        assert_eq!([9, 10, 11].map(|at| is_at_end(&file, at)), [false, true, true]);
    }
}
