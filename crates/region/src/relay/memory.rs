//! The windows' memory that a relay was given, and the numbers by which it recognises a descriptor of one.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// A window's memory, and what it is recognised by.
#[derive(Debug)]
pub(super) struct WindowMemory {
    memory: OwnedFd,
    file: FileNumbers,
}

/// Device, inode, and device number of a device file.
pub(super) type FileNumbers = (u64, u64, u64);

impl WindowMemory {
    /// `None` if the kernel says nothing about the descriptor.
    pub(super) fn new(memory: OwnedFd) -> Option<Self> {
        let file = numbers_of(&memory)?;
        Some(Self { memory, file })
    }

    /// Whether the file has these numbers.
    pub(super) fn is(&self, file: FileNumbers) -> bool {
        self.file == file
    }
}

impl AsFd for WindowMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// The numbers that identify a file, or `None` if the kernel gives none. The call takes as long as the file's maker likes.
pub(super) fn numbers_of(memory: &OwnedFd) -> Option<FileNumbers> {
    let stat = rustix::fs::fstat(memory).ok()?;
    Some((stat.st_dev, stat.st_ino, stat.st_rdev))
}
