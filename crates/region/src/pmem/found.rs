//! Windows of an earlier broker, found again in the processes of the machines that have them (protocol V2.5).
//!
//! A window's file has no name, and a QEMU that was given it keeps it open. A broker that starts again takes the file from there, so
//! that the machine needs no second device for it.

use super::{WindowFile, WindowId};
use crate::RegionError;
use rustix::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FileType, MemfdFlags, Mode, OFlags, Statx, StatxFlags};
use std::path::Path;

/// The identification of a window's file among all others. A guest can write any id into the header of a window that it owns, and cannot
/// choose the number
/// that the kernel gives to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowTrace {
    /// The window's id.
    pub id: WindowId,
    /// The number of its file on the kernel's file system for memory.
    pub inode: u64,
    /// The file's size.
    pub size: u64,
}

impl WindowFile {
    /// The trace by which another process of this user finds the file again.
    ///
    /// # Errors
    /// The system's.
    pub fn trace(&self) -> Result<WindowTrace, RegionError> {
        let facts = facts(self.as_fd()).map_err(|e| RegionError::system("look at a window", self.size(), e))?;
        Ok(WindowTrace { id: self.id(), inode: facts.stx_ino, size: self.size() })
    }

    /// The file in a process that has it open; `None` if it has none, or it may not be looked into.
    ///
    /// The file is accepted only if this user has made it, its size is sealed, all of its memory is there, and its header has the
    /// id that is looked for.
    pub fn find_in(process: u32, trace: WindowTrace) -> Option<Self> {
        let memory = rustix::fs::memfd_create("partywall-device", MemfdFlags::CLOEXEC).ok()?;
        let device = device(&facts(memory.as_fd()).ok()?);
        let user = rustix::process::geteuid().as_raw();
        let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).ok()?;
        descriptors.flatten().find_map(|entry| {
            // Naming a file does not open it, so nothing waits for a FIFO or a file system of a stranger.
            let named = rustix::fs::openat(CWD, entry.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
            let facts = facts(named.as_fd()).ok()?;
            let is_it = FileType::from_raw_mode(facts.stx_mode.into()) == FileType::RegularFile
                && device == self::device(&facts)
                && (facts.stx_ino, facts.stx_size, facts.stx_uid) == (trace.inode, trace.size, user);
            if !is_it {
                return None;
            }
            let file = reopen(&named)?;
            Self::adopt(file).ok().filter(|window| window.id() == trace.id)
        })
    }
}

fn facts(file: BorrowedFd<'_>) -> rustix::io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, Path::new(""), flags, StatxFlags::BASIC_STATS)
}

fn device(facts: &Statx) -> (u32, u32) {
    (facts.stx_dev_major, facts.stx_dev_minor)
}

fn reopen(named: &OwnedFd) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{}", named.as_raw_fd());
    rustix::fs::openat(CWD, path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::pmem::{WindowSpec, book};
    use partywall_protocol::window::{DATA_OFFSET, WindowHeader};

    fn spec() -> WindowSpec {
        WindowSpec { room: 4 << 20, owner: "a".into(), peer: "b".into() }
    }

    #[test]
    fn window_is_found_in_process_that_holds_it() {
        let window = WindowFile::create(&spec()).unwrap();
        let trace = window.trace().unwrap();
        // As a QEMU has it, opened again.
        let _held = window.reader().unwrap();
        book::note(window.as_fd(), 8192..16384, true).unwrap();
        let id = window.id();
        drop(window);
        let found = WindowFile::find_in(std::process::id(), trace).unwrap();
        assert_eq!((found.id(), found.size(), found.allocated()), (id, trace.size, trace.size));
        let in_use = book::noted(found.as_fd()).unwrap();
        assert_eq!(in_use.iter().map(|part| (part.start, part.end)).collect::<Vec<_>>(), [(8192, 16384)]);
        let header = found.header();
        assert_eq!((header.owner.as_str(), header.peer.as_str()), ("a", "b"));
    }

    #[test]
    fn file_with_another_number_or_size_is_not_taken() {
        let (window, other) = (WindowFile::create(&spec()).unwrap(), WindowFile::create(&spec()).unwrap());
        let trace = window.trace().unwrap();
        let wrong = [
            WindowTrace { inode: other.trace().unwrap().inode, ..trace },
            WindowTrace { size: trace.size * 2, ..trace },
            WindowTrace { id: other.id(), ..trace },
        ];
        for trace in wrong {
            assert!(WindowFile::find_in(std::process::id(), trace).is_none(), "{trace:?}");
        }
        assert!(WindowFile::find_in(std::process::id(), trace).is_some());
        assert!(WindowFile::find_in(u32::MAX, trace).is_none(), "no such process");
    }

    /// The guest that owns a window can write its header.
    #[test]
    fn window_with_header_of_another_is_not_found_as_it() {
        let (window, other) = (WindowFile::create(&spec()).unwrap(), WindowFile::create(&spec()).unwrap());
        let (trace, wanted) = (window.trace().unwrap(), other.trace().unwrap());
        let lie = WindowHeader { id: other.id(), ..window.header().clone() };
        rustix::io::pwrite(&window, &lie.encode(), DATA_OFFSET).unwrap();
        drop(other);
        assert!(WindowFile::find_in(std::process::id(), wanted).is_none());
        assert!(WindowFile::find_in(std::process::id(), trace).is_none(), "a window that denies its id is lost");
    }

    #[test]
    fn window_that_lacks_memory_is_not_taken() {
        let window = WindowFile::begin(&WindowSpec { room: 40 << 20, ..spec() }).unwrap();
        assert!(WindowFile::find_in(std::process::id(), window.trace().unwrap()).is_none());
    }
}
