//! The listening socket in the file system, and the lock that makes one broker its only server.
//!
//! ```text
//!   broker.sock        what clients connect to; made as broker.sock.new, then renamed, so that it never is half made
//!   broker.sock.lock   locked (flock) by the broker that serves it, for as long as it lives; holds its instance number
//! ```
//!
//! The kernel drops the lock when its holder dies, however it dies. So a socket file whose lock is free is stale, and the next
//! broker replaces it. The lock file stays: removing it could pull it from under a broker that is about to lock it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::net::SocketType;

use super::StartError;
use crate::core::IDS_PER_INSTANCE;
use crate::unix_socket::{beside, listen};

/// Connections that wait in the kernel's queue, which all users share. A user who connects without pause keeps it full, so every
/// connection in it delays the next user's. The event loop has a queue for each user ([`super::turns`]).
pub(super) const BACKLOG: i32 = 1024;

/// A path that this broker and no other serves; the socket file is removed when it is dropped.
#[derive(Debug)]
pub(super) struct ServedSocket {
    path: PathBuf,
    listener: OwnedFd,
    instance: u64,
    /// Holds the lock while it is open.
    lock: File,
}

impl ServedSocket {
    /// Takes the lock of `path` and listens there, replacing the socket that a dead broker left.
    pub(super) fn serve(path: &Path, mode: u32, now: u64) -> Result<Self, StartError> {
        let failed =
            |doing: &'static str| move |source: io::Error| StartError::Socket { doing, path: path.to_owned(), source };
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(beside(path, ".lock"))
            .map_err(failed("open the lock file beside"))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(StartError::Running { path: path.to_owned() }),
            Err(e) => return Err(failed("lock")(e.into())),
        }
        match path.symlink_metadata() {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(StartError::NotASocket { path: path.to_owned() });
            }
            Ok(_) => tracing::info!(path = %path.display(), "replacing the socket that an earlier broker left"),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed("look at")(e)),
        }
        let instance = next_instance(&mut lock, now).map_err(failed("write the lock file beside"))?;
        let listener = listen(path, SocketType::SEQPACKET, mode, BACKLOG).map_err(failed("listen on"))?;
        Ok(Self { path: path.to_owned(), listener, instance, lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn instance(&self) -> u64 {
        self.instance
    }
}

impl AsFd for ServedSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for ServedSocket {
    fn drop(&mut self) {
        // Still ours, because the lock is. If it cannot be removed, the next broker replaces it.
        let _ = std::fs::remove_file(&self.path);
        // Closing would not do while a child of this process, just forked for something else, has a copy.
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
    }
}

/// A number greater than that of every broker before on this path, by at least [`IDS_PER_INSTANCE`]: the time, or, should the
/// clock have gone back or two brokers have started within a second, the number after the last one.
fn next_instance(lock: &mut File, now: u64) -> io::Result<u64> {
    let mut text = String::new();
    // Not a number, or not text: the broker has not written it, and only the time can be used.
    let last = match (&*lock).take(32).read_to_string(&mut text) {
        Ok(_) => text.trim().parse::<u64>().unwrap_or(0),
        Err(e) if e.kind() == io::ErrorKind::InvalidData => 0,
        Err(e) => return Err(e),
    };
    // In 2106 the clock has no room left, and instances count on from the last one.
    let by_clock = now.checked_mul(IDS_PER_INSTANCE).unwrap_or(0);
    let instance = match last.checked_add(IDS_PER_INSTANCE) {
        Some(after_last) if after_last < u64::MAX - (1 << 56) => by_clock.max(after_last),
        _ => by_clock,
    };
    lock.set_len(0)?;
    lock.rewind()?;
    lock.write_all(format!("{instance}\n").as_bytes())?;
    Ok(instance)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn second_broker_on_same_socket_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.sock");
        let first = ServedSocket::serve(&path, 0o600, 100).unwrap();
        let second = ServedSocket::serve(&path, 0o600, 100).unwrap_err();
        assert!(matches!(second, StartError::Running { .. }));
        assert!(second.to_string().contains("b.sock"), "{second}");
        assert_eq!(path.symlink_metadata().unwrap().permissions().mode() & 0o777, 0o600);
        drop(first);
        assert!(!path.exists());
        ServedSocket::serve(&path, 0o666, 100).unwrap();
    }

    #[test]
    fn stale_socket_is_replaced_but_other_file_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        drop(ServedSocket::serve(&path, 0o600, 100).unwrap());
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(ServedSocket::serve(&path, 0o600, 100), Err(StartError::NotASocket { .. })));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn instances_grow_whatever_the_clock_does() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.sock");
        let mut last = 0;
        for now in [100, 100, 90, 0, 100, 200] {
            let instance = ServedSocket::serve(&path, 0o600, now).unwrap().instance();
            assert!(instance >= last + IDS_PER_INSTANCE, "{instance} after {last}");
            last = instance;
        }
        // Beyond 2^31 seconds, in 2038.
        for now in [1 << 31, 1 << 31, (1 << 31) - 9, (1 << 31) + 3] {
            let instance = ServedSocket::serve(&path, 0o600, now).unwrap().instance();
            assert!(instance >= last + IDS_PER_INSTANCE, "{instance} after {last}");
            last = instance;
        }
        for nonsense in ["", "x", "-1", "18446744073709551615", "9999999999999999999999"] {
            std::fs::write(dir.path().join("b.sock.lock"), nonsense).unwrap();
            assert_eq!(ServedSocket::serve(&path, 0o600, 300).unwrap().instance(), 300 * IDS_PER_INSTANCE);
        }
    }

    #[test]
    fn too_long_socket_path_is_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x".repeat(120));
        let error = ServedSocket::serve(&path, 0o600, 1).unwrap_err();
        assert!(error.to_string().contains("listen on"), "{error}");
    }
}
