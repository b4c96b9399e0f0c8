//! The socket that scrapers connect to.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::policy::MetricsAddress;

/// It listens, and its file is removed with it.
#[derive(Debug)]
pub(super) struct MetricsSocket {
    socket: OwnedFd,
    /// The port that it got, which the address may have left to the kernel.
    pub(super) port: Option<SocketAddr>,
    file: Option<PathBuf>,
}

impl MetricsSocket {
    pub(super) fn listen(address: &MetricsAddress) -> io::Result<Self> {
        match address {
            MetricsAddress::Loopback(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Self { port: Some(listener.local_addr()?), socket: listener.into(), file: None })
            }
            MetricsAddress::Unix(path) => {
                remove_stale(path);
                let listener = UnixListener::bind(path)?;
                let this = Self { socket: listener.into(), port: None, file: Some(path.clone()) };
                fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
                rustix::io::ioctl_fionbio(&this.socket, true)?;
                Ok(this)
            }
        }
    }
}

/// Removes a socket that an earlier broker left, at which nobody listens.
fn remove_stale(path: &Path) {
    let is_socket = path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    if is_socket && UnixStream::connect(path).is_err_and(refused) {
        // If it stays, `bind` says so.
        let _ = fs::remove_file(path);
    }
}

impl AsFd for MetricsSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for MetricsSocket {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // A file that somebody has removed already is gone as wished.
            let _ = fs::remove_file(file);
        }
    }
}
