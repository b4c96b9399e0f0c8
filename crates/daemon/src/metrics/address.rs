//! The socket that scrapers connect to.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::net::SocketType;

use crate::policy::MetricsAddress;
use crate::unix_socket;

/// Connections that wait in the kernel's queue.
const BACKLOG: i32 = 128;

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
                let socket = unix_socket::listen(path, SocketType::STREAM, 0o660, BACKLOG)?;
                Ok(Self { socket, port: None, file: Some(path.clone()) })
            }
        }
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
            // A file that was removed already needs no action.
            let _ = fs::remove_file(file);
        }
    }
}
