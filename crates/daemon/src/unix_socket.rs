//! Listening UNIX sockets with a file of the right mode from its first moment on, and sockets that no process serves any more.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, RenameFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Listens at `path`, without blocking. The file is made under another name beside it and renamed once clients may connect, so no client
/// ever finds it half made or with another mode.
///
/// A socket without a listening process is replaced. Anything else stays, and this fails with [`io::ErrorKind::AddrInUse`].
pub(crate) fn listen(path: &Path, kind: SocketType, mode: u32, backlog: i32) -> io::Result<OwnedFd> {
    // A rename does not care how long the final name is, but a client's connect does.
    SocketAddrUnix::new(path)?;
    let fresh = beside(path, ".new");
    remove_stale(&fresh, kind)?;
    remove_stale(path, kind)?;
    let listener = new_socket(kind)?;
    // The kernel makes the file with the mode that the socket has at `bind`, less the umask.
    rustix::fs::fchmod(&listener, Mode::from_raw_mode(mode))?;
    rustix::net::bind(&listener, &SocketAddrUnix::new(&fresh)?)?;
    let served = || {
        // Restores the permissions that the umask has removed.
        fs::set_permissions(&fresh, fs::Permissions::from_mode(mode))?;
        rustix::net::listen(&listener, backlog)?;
        Ok(rustix::fs::renameat_with(CWD, &fresh, CWD, path, RenameFlags::NOREPLACE)?)
    };
    if let Err(error) = served() {
        let _ = fs::remove_file(&fresh);
        return Err(error);
    }
    Ok(listener)
}

/// The path of a file beside another, whose name ends with `suffix`.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn new_socket(kind: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?)
}

/// Removes a socket that an earlier program left, if no process listens at it. Fails if there is anything else.
fn remove_stale(path: &Path, kind: SocketType) -> io::Result<()> {
    let in_use = |why| Err(io::Error::new(io::ErrorKind::AddrInUse, why));
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(found) if !found.file_type().is_socket() => return in_use("there is a file that is no socket"),
        Ok(_) => {}
    }
    // Without blocking: the queue of a listener that has been stopped may be full.
    match rustix::net::connect(new_socket(kind)?, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path),
        Err(Errno::NOENT) => Ok(()),
        _ => in_use("another program listens there"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: SocketType = SocketType::STREAM;

    fn mode_of(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn socket_has_its_mode_whatever_the_umask() {
        let dir = tempfile::tempdir().unwrap();
        for mode in [0o600, 0o660, 0o666] {
            let path = dir.path().join(format!("{mode:o}"));
            let _listener = listen(&path, KIND, mode, 1).unwrap();
            assert_eq!(mode_of(&path), mode);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "nothing is left beside them");
    }

    #[test]
    fn file_of_a_bound_socket_never_has_more_rights_than_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let socket = new_socket(KIND).unwrap();
        rustix::fs::fchmod(&socket, Mode::from_raw_mode(0o600)).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert_eq!(mode_of(&path), 0o600, "before anybody has set the mode of the file");
    }

    #[test]
    fn stale_socket_is_replaced_and_all_else_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(listen(&path, KIND, 0o600, 1).unwrap());
        assert!(path.exists(), "nobody listens there any more");
        // A listener whose queue is full, as of a stopped process.
        let _served = listen(&path, KIND, 0o600, 0).unwrap();
        let _queued = std::os::unix::net::UnixStream::connect(&path).unwrap();
        for kind in [KIND, SocketType::SEQPACKET] {
            assert_eq!(listen(&path, kind, 0o666, 1).unwrap_err().kind(), io::ErrorKind::AddrInUse, "{kind:?}");
        }
        assert_eq!(mode_of(&path), 0o600);
        for name in ["s", "s.new"] {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(name), "precious").unwrap();
            let error = listen(&dir.path().join("s"), KIND, 0o600, 1).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{name}");
            assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), "precious");
        }
    }
}
