//! Connecting to a monitor: its greeting, and the negotiation that has to come before any command.

use super::client::{PATIENCE, Qmp};
use super::error::QmpError;
use super::lines::MonitorLines;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a monitor may take to greet.
const GREETING: Duration = Duration::from_secs(5);

impl Qmp {
    /// Connects and negotiates.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, QmpError> {
        Self::connect_within(path.as_ref(), PATIENCE)
    }

    /// The same, with the longest wait for answers.
    pub(super) fn connect_within(path: &Path, patience: Duration) -> Result<Self, QmpError> {
        let path = path.to_owned();
        let unreachable = |source| QmpError::Unreachable { path: path.clone(), source };
        let stream = match connect_at_once(&path) {
            // QEMU has a client, and other programs wait already.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(QmpError::Busy { path }),
            other => other.map_err(unreachable)?,
        };
        let mut lines = MonitorLines::new(stream, patience).map_err(unreachable)?;
        let line = match lines.next(Instant::now() + GREETING) {
            Ok(line) => line,
            Err(e) if e.kind() == io::ErrorKind::TimedOut && lines.partial().is_empty() => {
                return Err(QmpError::Busy { path });
            }
            Err(_) => return Err(QmpError::NotQmp { path, said: beginning(lines.partial()) }),
        };
        if serde_json::from_slice::<Value>(&line).ok().is_none_or(|v| v.get("QMP").is_none()) {
            return Err(QmpError::NotQmp { path, said: beginning(&line) });
        }
        let mut this = Self::new(path, lines, patience);
        this.execute("qmp_capabilities", json!({}))?;
        Ok(this)
    }
}

/// Connects without waiting for room in the listener's queue. QEMU accepts no connection while it has a client, and its queue is short, so a
/// connection that waited for room would wait for as long as another program holds the monitor.
fn connect_at_once(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn beginning(line: &[u8]) -> String {
    String::from_utf8_lossy(line).trim_end().chars().take(60).collect()
}
