//! Control sockets: a request is a line of JSON, and so is its answer.

use crate::VhostError;
use crate::handle::Answer;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// How long one client may keep the others waiting.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest request.
const LONGEST: u64 = 64 << 10;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ControlAnswer {
    Done(serde_json::Value),
    Error(String),
}

/// How long the answer to most requests may take.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// Asks the process that listens at `path`, and waits for the answer for at most this time.
pub(crate) fn ask<R: Serialize>(path: &Path, request: &R, limit: Duration) -> Answer {
    let stream = UnixStream::connect(path).map_err(VhostError::file("reach the process at", path))?;
    let exchange = || -> std::io::Result<ControlAnswer> {
        stream.set_read_timeout(Some(limit))?;
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        (&stream).write_all(line.as_bytes())?;
        let mut answer = String::new();
        BufReader::new(&stream).read_line(&mut answer)?;
        Ok(serde_json::from_str(&answer)?)
    };
    let answer = exchange().map_err(|e| match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => VhostError::Refused(format!(
            "the process at {} has not answered within {} s: it is not known whether it does what it was asked for",
            path.display(),
            limit.as_secs()
        )),
        _ => VhostError::file("ask the process at", path)(e),
    });
    match answer? {
        ControlAnswer::Done(value) => Ok(value),
        ControlAnswer::Error(why) => Err(VhostError::Refused(why)),
    }
}

/// Whether a process listens at `path`. A socket that this user may not use counts as served: asking it says why it cannot be used.
pub(crate) fn is_served(path: &Path) -> bool {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    // A process that takes no connections must not hold this one up.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let connect = || {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
    };
    !matches!(connect(), Err(rustix::io::Errno::CONNREFUSED | rustix::io::Errno::NOENT))
}

/// Listens at `path`, for [`serve`].
pub(crate) fn listen(path: &Path) -> Result<UnixListener, VhostError> {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).map_err(VhostError::file("listen on", path))?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600))
        .map_err(VhostError::file("set the rights of", path))?;
    Ok(listener)
}

/// Serves clients one after the other until `done` fails with [`VhostError::Closed`].
pub(crate) fn serve<R: DeserializeOwned>(listener: &UnixListener, mut done: impl FnMut(R) -> Answer) {
    for client in listener.incoming().flatten() {
        let _ = client.set_read_timeout(Some(PATIENCE));
        let _ = client.set_write_timeout(Some(PATIENCE));
        let mut line = String::new();
        if BufReader::new((&client).take(LONGEST)).read_line(&mut line).is_err() {
            continue;
        }
        let done = match serde_json::from_str::<R>(&line) {
            Ok(request) => done(request),
            Err(e) => Err(VhostError::Refused(format!("this is no request: {e}"))),
        };
        let ended = matches!(done, Err(VhostError::Closed));
        let answer = match done {
            Ok(value) => ControlAnswer::Done(value),
            Err(e) => ControlAnswer::Error(e.to_string()),
        };
        if let Ok(mut text) = serde_json::to_string(&answer) {
            text.push('\n');
            let _ = (&client).write_all(text.as_bytes());
        }
        if ended {
            return;
        }
    }
}
