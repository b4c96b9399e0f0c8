//! The control socket of a disk, beside its own: `SOCKET.control`.

use super::{CopiesPerByte, DiskCounters};
use crate::handle::RequestHandle;
use crate::socket_file::SocketFile;
use crate::{VhostError, line};
use serde::{Deserialize, Serialize};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// A request to a disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "lowercase", deny_unknown_fields)]
pub enum DiskControl {
    /// Show the disk: [`DiskReport`].
    Show,
    /// Look at the size of the file or device again, after a file has been made this large. The answer is its size.
    Resize {
        /// Bytes that a file is to have.
        size: Option<u64>,
    },
    /// End, when all requests that were taken are complete.
    Stop,
    /// A machine is about to connect, so that [`Self::StopIfUnused`] changes nothing for a while.
    Expect,
    /// End, if no machine has used the disk for a while: [`DiskUse`].
    StopIfUnused,
}

/// The answer to [`DiskControl::StopIfUnused`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskUse {
    /// The disk ends.
    Ended,
    /// No machine uses it. One did a moment ago, or is expected.
    Recent,
    /// A machine uses it.
    Used,
}

/// The handle for requests to a running disk.
pub type DiskHandle = RequestHandle<DiskControl>;

/// A disk, as it is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DiskReport {
    /// Its file or device.
    pub path: PathBuf,
    /// Its bytes.
    pub capacity: u64,
    /// The disk cannot be written.
    pub read_only: bool,
    /// A driver uses it.
    pub connected: bool,
    /// A front end is connected, also if no driver uses it yet: a second one is sent away.
    pub occupied: bool,
    /// The front end keeps the requests in flight, so that a killed back end can be followed by another.
    pub recovers: bool,
    /// Requests that are under way.
    pub under_way: u64,
    /// The counts of its requests.
    pub counters: DiskCounters,
    /// How often each byte of them was copied.
    #[serde(default)]
    pub copies: CopiesPerByte,
}

/// The control socket of the disk at `socket`.
pub fn path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".control");
    path.into()
}

/// Asks the disk at `socket`.
pub fn ask(socket: &Path, request: &DiskControl) -> Result<serde_json::Value, VhostError> {
    line::ask(&path(socket), request, line::ANSWER).map_err(|e| {
        e.or_absent(format_args!("no disk is served at {}; start it with `partywall blk serve`", socket.display()))
    })
}

/// A control socket that listens.
#[derive(Debug)]
pub struct ControlListener {
    socket: UnixListener,
    path: PathBuf,
    file: Option<SocketFile>,
}

impl ControlListener {
    /// Removes the socket's file, unless a later process has put another there. A back end does this last.
    pub fn remove(&self) {
        if let Some(file) = self.file {
            file.remove(&self.path);
        }
    }
}

/// Listens beside the disk at `socket`, for [`serve`].
pub fn listen(socket: &Path) -> Result<ControlListener, VhostError> {
    let path = path(socket);
    let socket = line::listen(&path)?;
    Ok(ControlListener { socket, file: SocketFile::at(&path), path })
}

/// Serves clients one after the other until the disk has ended.
pub fn serve(listener: &ControlListener, disk: &DiskHandle) {
    line::serve(&listener.socket, |request| disk.ask(request));
}
