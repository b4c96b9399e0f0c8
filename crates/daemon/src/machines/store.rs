//! Files of windows in the keeping of the service manager (`FDSTORE`, sd_notify(3)), which passes them to the next broker.
//!
//! A broker without capabilities, as the unit has it, may not look into QEMU's processes. So it hands each file to systemd as well.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use partywall_protocol::window::WindowId;
use partywall_region::packet;

/// Hands a file to the service manager.
pub(super) fn keep(id: WindowId, file: BorrowedFd<'_>) {
    report(send(&format!("FDSTORE=1\nFDNAME=window-{id}\n"), &[file]));
}

/// Has it close the file.
pub(super) fn give_up(id: WindowId) {
    report(send(&format!("FDSTOREREMOVE=1\nFDNAME=window-{id}\n"), &[]));
}

/// The descriptors that it has passed to this process; nobody else uses them.
#[derive(Debug, Default)]
pub(super) struct PassedFiles(Vec<i32>);

impl PassedFiles {
    pub(super) fn inherited() -> Self {
        Self(sd_notify::listen_fds().map(Iterator::collect).unwrap_or_default())
    }

    /// Closes them. The windows that are used again have separate descriptors.
    pub(super) fn close(&mut self) {
        for passed in self.0.drain(..) {
            let _ = nix::unistd::close(passed);
        }
    }
}

fn send(text: &str, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        name => SocketAddr::from_pathname(OsStr::from_bytes(name))?,
    };
    let manager = UnixDatagram::unbound()?;
    manager.connect_addr(&address)?;
    packet::send(manager.as_fd(), text.as_bytes(), files)
}

fn report(sent: io::Result<()>) {
    if let Err(error) = sent {
        tracing::debug!(%error, "the service manager does not keep the files of windows");
    }
}
