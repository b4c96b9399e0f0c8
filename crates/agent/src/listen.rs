//! The socket that programs connect to. It is there exactly while there is a broker to pass them on to.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The right to serve a path, for as long as this process lives: a lock on `SOCKET.lock`, which a broker takes too.
///
/// Without it a second agent would find the socket not yet there, and remove the first agent's when it ends.
#[derive(Debug)]
pub(crate) struct SocketLock {
    _file: File,
}

impl SocketLock {
    /// Fails with [`io::ErrorKind::AddrInUse`] if another process has it.
    pub(crate) fn take(socket: &Path) -> io::Result<Self> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let failed = |e: io::Error| io::Error::new(e.kind(), format!("cannot lock {}: {e}", path.display()));
        if let Some(folder) = socket.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(&path).map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { _file: file }),
            Err(Errno::WOULDBLOCK) => {
                let why = format!(
                    "another agent or broker serves {}; stop that one first, or name another --socket",
                    socket.display()
                );
                Err(io::Error::new(io::ErrorKind::AddrInUse, why))
            }
            Err(e) => Err(failed(e.into())),
        }
    }
}

/// How long no program is accepted after that has failed. The socket stays ready meanwhile, and would keep a processor busy.
const REST: Duration = Duration::from_millis(100);

/// The socket, or where it will be.
#[derive(Debug)]
pub(crate) struct Listening {
    path: PathBuf,
    mode: u32,
    socket: Option<OwnedFd>,
    /// Until when no program is accepted; `None` if the last one was.
    rests_until: Option<Instant>,
}

impl Listening {
    pub(crate) fn new(path: &Path, mode: u32) -> Self {
        Self { path: path.to_owned(), mode, socket: None, rests_until: None }
    }

    /// The socket, unless programs are not to be accepted now.
    pub(crate) fn ready_socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref().filter(|_| self.rest().is_none())
    }

    /// How long programs are not to be accepted from now on.
    pub(crate) fn rest(&self) -> Option<Duration> {
        let left = self.rests_until?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Accepts a program. `None` if none waits, or if the kernel refuses it for a while.
    pub(crate) fn accept(&mut self) -> Option<OwnedFd> {
        match rustix::net::accept_with(self.socket.as_ref()?, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(program) => {
                self.rests_until = None;
                Some(program)
            }
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => None,
            Err(error) => {
                if self.rests_until.is_none() {
                    tracing::warn!(%error, "a program cannot be accepted; trying again");
                }
                self.rests_until = Some(Instant::now() + REST);
                None
            }
        }
    }

    /// Opens it, if it is not open.
    pub(crate) fn open(&mut self) -> io::Result<()> {
        if self.socket.is_some() {
            return Ok(());
        }
        let said = |e: io::Error| io::Error::new(e.kind(), format!("cannot serve {}: {e}", self.path.display()));
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder).map_err(said)?;
        }
        let address = SocketAddrUnix::new(&self.path)?;
        let socket = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        };
        if std::fs::symlink_metadata(&self.path).is_ok_and(|there| there.file_type().is_socket()) {
            // A program that serves the socket without the lock.
            if rustix::net::connect(&socket()?, &address).is_ok() {
                let why = "another program serves it; stop that first, or name another --socket";
                return Err(said(io::Error::new(io::ErrorKind::AddrInUse, why)));
            }
            // Left behind by one that was killed.
            std::fs::remove_file(&self.path).map_err(said)?;
        }
        let socket = socket()?;
        rustix::net::bind(&socket, &address).map_err(|e| said(e.into()))?;
        std::fs::set_permissions(&self.path, std::fs::Permissions::from_mode(self.mode)).map_err(said)?;
        rustix::net::listen(&socket, 128)?;
        self.socket = Some(socket);
        Ok(())
    }

    /// Takes it away: who connects from now on finds no broker, and tries again later.
    pub(crate) fn close(&mut self) {
        if self.socket.take().is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_rests_after_a_program_could_not_be_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut listening = Listening::new(&path, 0o600);
        listening.open().unwrap();
        assert!(listening.accept().is_none() && listening.ready_socket().is_some(), "none waits");
        // A socket that accepts nothing, in place of one without descriptors.
        let (_other, unfit) = std::os::unix::net::UnixStream::pair().unwrap();
        let served = listening.socket.replace(unfit.into());
        assert!(listening.accept().is_none());
        assert!(listening.ready_socket().is_none() && listening.rest().is_some_and(|rest| rest <= REST));
        listening.rests_until = Some(Instant::now());
        assert!(listening.ready_socket().is_some() && listening.rest().is_none());
        listening.socket = served;
        let address = SocketAddrUnix::new(&path).unwrap();
        let program = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&program, &address).unwrap();
        assert!(listening.accept().is_some() && listening.rests_until.is_none());
    }
}
