//! A second listening socket, in a folder that has nothing else: for containers (protocol C3.5).
//!
//! Beside the broker's first socket are sockets of other programs, such as monitors of virtual machines, which no container may reach. A
//! container gets the folder and not the socket, so that it finds the socket of the next broker too.
//!
//! It is a socket and no link to the first one, so the broker knows that a client came from a container. The kernel does not show that
//! for a container that has neither a user namespace nor a pid namespace: its root looks like the root of the host.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::net::SocketType;

use crate::credentials::Home;
use crate::unix_socket::listen;

/// The folder beside the socket. An operator (or the unit, or a package) creates it to let containers reach the broker.
const FOLDER: &str = "containers";

/// The socket for containers. Its file is removed when it is dropped.
#[derive(Debug)]
pub(super) struct ContainerSocket {
    path: PathBuf,
    listener: OwnedFd,
}

impl ContainerSocket {
    /// Listens in the folder beside the broker's socket, if that is there. The caller has the lock of the broker's socket.
    pub(super) fn serve(socket: &Path, mode: u32, backlog: i32) -> Option<Self> {
        match Self::open(socket, mode, backlog) {
            Ok(served) => served,
            Err(error) => {
                tracing::warn!(%error, "containers cannot reach the broker by the folder {FOLDER} beside its socket");
                None
            }
        }
    }

    fn open(socket: &Path, mode: u32, backlog: i32) -> io::Result<Option<Self>> {
        let (Some(beside), Some(name)) = (socket.parent(), socket.file_name()) else { return Ok(None) };
        let folder = beside.join(FOLDER);
        match folder.symlink_metadata() {
            // A folder that another user has made would give that user's containers a socket that they might not reach otherwise.
            Ok(found) if found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() => {}
            Ok(_) => return Err(io::Error::other("it is no folder of this user")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        }
        let path = folder.join(name);
        let listener = listen(&path, SocketType::SEQPACKET, mode, backlog)?;
        tracing::debug!(path = %path.display(), "serving containers");
        Ok(Some(Self { path, listener }))
    }
}

impl AsFd for ContainerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for ContainerSocket {
    fn drop(&mut self) {
        // If it cannot be removed, the next broker replaces it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Where a client of this socket runs, by what its namespaces say: never where the broker does.
pub(super) fn home_of(by_namespaces: Home) -> Home {
    match by_namespaces {
        Home::Broker => Home::Unknown,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags};

    fn connects(path: &Path) -> bool {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let client = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::connect(&client, &SocketAddrUnix::new(path).unwrap()).is_ok()
    }

    #[test]
    fn next_broker_replaces_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, folder) = (dir.path().join("broker.sock"), dir.path().join(FOLDER));
        assert!(ContainerSocket::open(&socket, 0o666, 1).unwrap().is_none(), "nobody has made the folder");
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("broker.sock");
        let first = ContainerSocket::open(&socket, 0o666, 1).unwrap().unwrap();
        assert!(connects(&path));
        drop(first);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        // As a broker leaves it that was killed.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let _next = ContainerSocket::open(&socket, 0o666, 1).unwrap().unwrap();
        assert!(connects(&path));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn folder_that_is_a_symbolic_link_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", dir.path().join(FOLDER)).unwrap();
        ContainerSocket::open(&dir.path().join("broker.sock"), 0o666, 1).unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path().join("elsewhere")).unwrap().count(), 0);
    }
}
