//! The broker's socket once more, in a folder that has nothing else: for containers.
//!
//! Beside the socket itself are sockets of other programs, such as monitors of virtual machines, which no container may reach. A container gets
//! the folder and not the socket, so that it finds the socket of the next broker too.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// The folder beside the socket. Who wants containers to reach the broker makes it (the unit, and the packages).
const FOLDER: &str = "containers";

/// Links the socket into the folder, if that is there.
pub(crate) fn offer(socket: &Path) {
    match link(socket) {
        Ok(true) => tracing::debug!("containers reach the broker by the folder {FOLDER} beside its socket"),
        Ok(false) => {}
        Err(error) => {
            tracing::warn!(%error, "containers cannot reach the broker: the socket cannot be linked into the folder {FOLDER} beside it")
        }
    }
}

fn link(socket: &Path) -> io::Result<bool> {
    let (Some(beside), Some(name)) = (socket.parent(), socket.file_name()) else { return Ok(false) };
    let folder = beside.join(FOLDER);
    match folder.symlink_metadata() {
        // One that another user has made would give that user's containers a socket that they might not reach otherwise.
        Ok(found) if found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() => {}
        Ok(_) => return Err(io::Error::other("it is no folder of this user")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    }
    // The link to the last broker's socket goes at the moment at which this one is there.
    let fresh = folder.join(".new");
    match std::fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::hard_link(socket, &fresh)?;
    std::fs::rename(&fresh, folder.join(name))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn next_brokers_socket_replaces_the_link() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("broker.sock");
        let first = UnixListener::bind(&socket).unwrap();
        assert!(!link(&socket).unwrap(), "nobody has made the folder");
        std::fs::create_dir(dir.path().join(FOLDER)).unwrap();
        assert!(link(&socket).unwrap());
        drop(first);
        std::fs::remove_file(&socket).unwrap();
        let _second = UnixListener::bind(&socket).unwrap();
        let linked = dir.path().join(FOLDER).join("broker.sock");
        assert!(UnixStream::connect(&linked).is_err(), "nobody serves the first one any more");
        assert!(link(&socket).unwrap());
        UnixStream::connect(&linked).unwrap();
        assert_eq!(std::fs::read_dir(dir.path().join(FOLDER)).unwrap().count(), 1);
    }

    #[test]
    fn folder_that_is_a_symbolic_link_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("broker.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        std::fs::create_dir(dir.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", dir.path().join(FOLDER)).unwrap();
        link(&socket).unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path().join("elsewhere")).unwrap().count(), 0);
    }
}
