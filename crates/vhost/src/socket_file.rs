//! The files of listening sockets. A process removes only the files that it has made: a later one may have put others in their place.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The file of a bound socket, wherever it is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SocketFile {
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// The file at `path`.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        std::fs::symlink_metadata(path).ok().map(|file| Self { device: file.dev(), inode: file.ino() })
    }

    /// Removes the file if it is at `path`. The socket must still be open: as long as it is, no other file has this inode.
    pub(crate) fn remove(self, path: &Path) {
        if Self::at(path) == Some(self) {
            let _ = std::fs::remove_file(path);
        }
    }
}
