//! The socket that programs connect to. It is there exactly while there is a broker to pass them on to.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The socket, or where it will be.
#[derive(Debug)]
pub(crate) struct Listening {
    path: PathBuf,
    mode: u32,
    socket: Option<OwnedFd>,
}

impl Listening {
    pub(crate) fn new(path: &Path, mode: u32) -> Self {
        Self { path: path.to_owned(), mode, socket: None }
    }

    pub(crate) fn socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref()
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
            if rustix::net::connect(&socket()?, &address).is_ok() {
                let why = "another broker or agent serves it; stop that first, or name another --socket";
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
