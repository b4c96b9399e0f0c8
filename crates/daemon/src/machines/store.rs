//! Files of windows in the keeping of the service manager (`FDSTORE`, sd_notify(3)), which passes them to the next broker.
//!
//! A broker without capabilities, as the unit has it, may not look into QEMU's processes. So it hands each file to systemd as well.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};

use partywall_protocol::window::WindowId;
use partywall_region::packet;

/// The prefix of the files' names.
const PREFIX: &str = "window-";

/// Hands a file to the service manager.
pub(super) fn keep(id: WindowId, file: BorrowedFd<'_>) {
    report(send(&format!("FDSTORE=1\nFDNAME={PREFIX}{id}\n"), &[file]));
}

/// Has it close the file.
pub(super) fn give_up(id: WindowId) {
    report(send(&format!("FDSTOREREMOVE=1\nFDNAME={PREFIX}{id}\n"), &[]));
}

/// The descriptors that systemd has passed to this process; no other code uses them.
#[derive(Debug, Default)]
pub(super) struct PassedFiles {
    descriptors: Vec<(i32, WindowId)>,
    /// Windows among them that were not used again yet.
    unused: Vec<WindowId>,
}

/// Whether a broker of this process has taken the passed descriptors. The environment goes on naming them, and after they are closed their
/// numbers are those of other descriptors.
static TAKEN: AtomicBool = AtomicBool::new(false);

impl PassedFiles {
    pub(super) fn are_there() -> bool {
        !TAKEN.load(Ordering::Relaxed) && passed().next().is_some()
    }

    /// Takes them, once in a process.
    pub(super) fn inherited() -> Self {
        if TAKEN.swap(true, Ordering::Relaxed) {
            return Self::default();
        }
        let descriptors: Vec<_> = passed().collect();
        let unused = descriptors.iter().map(|(_, id)| *id).collect();
        Self { descriptors, unused }
    }

    /// This window is used again.
    pub(super) fn use_again(&mut self, id: WindowId) {
        self.unused.retain(|unused| *unused != id);
    }

    /// Closes them, except for windows that are looked for later. The windows that are used again have separate descriptors. The service
    /// manager closes all others as well: it would keep their memory for as long as it runs the broker, and pass it to each broker.
    pub(super) fn close(&mut self, is_kept: impl Fn(WindowId) -> bool) {
        for id in self.unused.extract_if(.., |id| !is_kept(*id)) {
            give_up(id);
        }
        for (passed, _) in self.descriptors.extract_if(.., |(_, id)| !is_kept(*id)) {
            let _ = nix::unistd::close(passed);
        }
    }
}

/// The files of windows among the passed descriptors. A program that embeds a broker may have been passed others, which are not ours to
/// close.
fn passed() -> impl Iterator<Item = (i32, WindowId)> {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names: Vec<String> = names.split(':').map(str::to_owned).collect();
    let window = |(fd, name): (i32, String)| Some((fd, name.strip_prefix(PREFIX)?.parse().ok()?));
    sd_notify::listen_fds().into_iter().flatten().zip(names).filter_map(window)
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
