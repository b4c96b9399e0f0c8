//! The socket of a port or a disk: one front end at a time.

use crate::VhostError;
use crate::closing::Reaper;
use crate::poller::WatchSet;
use crate::socket_file::SocketFile;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use tracing::{error, info};

/// Connections that wait. The kernel keeps no more than `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// A socket on which front ends connect.
#[derive(Debug)]
pub(crate) struct FrontendListener {
    /// There until it ends.
    socket: Option<UnixListener>,
    path: PathBuf,
    /// What it has made at the path.
    file: Option<SocketFile>,
    /// The user that may connect. Root may too.
    owner: u32,
    poller: WatchSet,
    token: u64,
    paused: bool,
    reaper: Reaper,
}

impl FrontendListener {
    /// Listens at `path`, for `owner` if that is another user.
    pub(crate) fn new(path: &Path, owner: Option<u32>, poller: &WatchSet, token: u64) -> Result<Self, VhostError> {
        // The socket of a process that was killed.
        if is_socket(path) {
            let _ = std::fs::remove_file(path);
        } else if std::fs::symlink_metadata(path).is_ok() {
            let why = "exists and is not a socket; remove it, or choose another socket path";
            return Err(VhostError::Refused(format!("{} {why}", path.display())));
        }
        let failed = || VhostError::file("listen on", path);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket: OwnedFd = socket.map_err(|e| failed()(e.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|e| failed()(e.into()))?;
        rustix::net::bind(&socket, &address).map_err(|e| failed()(e.into()))?;
        // From here on, an error removes the file of the socket.
        let own = rustix::process::geteuid().as_raw();
        let listener = Self {
            socket: Some(socket.into()),
            path: path.to_owned(),
            file: SocketFile::at(path),
            owner: owner.unwrap_or(own),
            poller: poller.clone(),
            token,
            paused: false,
            reaper: Reaper::default(),
        };
        let set_rights = || -> io::Result<()> {
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o600))?;
            owner.map_or(Ok(()), |uid| std::os::unix::fs::lchown(path, Some(uid), None))
        };
        set_rights().map_err(VhostError::file("set the rights of", path))?;
        if let Some(socket) = &listener.socket {
            // Nobody has connected before the rights were set.
            rustix::net::listen(socket, BACKLOG).map_err(|e| failed()(e.into()))?;
            poller.add(socket, token)?;
        }
        Ok(listener)
    }

    /// A listener for another owner, under a name that no port has. It serves nobody until [`Self::replace`].
    pub(crate) fn successor(&self, owner: u32) -> Result<Self, VhostError> {
        if self.path.is_dir() {
            return Err(VhostError::file("listen on", &self.path)(io::ErrorKind::IsADirectory.into()));
        }
        let draft = self.path.with_file_name(format!(".{}.port", self.token));
        Self::new(&draft, Some(owner), &self.poller, self.token)
    }

    /// Gives its path to a successor, and ends. A front end that has connected and was not taken yet is disconnected, and so is one whose
    /// connection is being made. What the earlier owner has sent is closed apart from what the new one sends.
    pub(crate) fn replace(&mut self, successor: Self) {
        let mut old = std::mem::replace(self, successor);
        std::mem::swap(&mut self.path, &mut old.path);
        // It may stay at the path that the successor had.
        old.file = self.file;
        if let Err(e) = std::fs::rename(&old.path, &self.path) {
            // Nobody may connect then, rather than the earlier owner.
            let _ = std::fs::remove_file(&self.path);
            error!("cannot replace {}: {e}; nobody can connect to it until the next reload", self.path.display());
        }
    }

    /// Whether front ends find its socket.
    pub(crate) fn is_there(&self) -> bool {
        is_socket(&self.path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn reaper(&self) -> &Reaper {
        &self.reaper
    }

    /// Takes a front end that has connected. A front end that connects while another is `busy` is disconnected, and so is one of a user
    /// who may not connect.
    pub(crate) fn accept(&mut self, busy: bool) -> Option<UnixStream> {
        let listener = self.socket.as_ref()?;
        if self.reaper.is_full() {
            self.poller.remove(listener);
            self.paused = true;
            return None;
        }
        let (socket, _) = listener.accept().ok()?;
        if busy || !self.permits(&socket) {
            self.reaper.close(socket.into());
            return None;
        }
        Some(socket)
    }

    /// Whether the user of a front end, as it was when it connected, may connect now.
    fn permits(&self, socket: &UnixStream) -> bool {
        let Ok(peer) = rustix::net::sockopt::socket_peercred(socket) else { return false };
        let user = peer.uid.as_raw();
        // An owner or an operator may have opened the socket to a group or to others.
        let is_open = || std::fs::symlink_metadata(&self.path).is_ok_and(|file| file.mode() & 0o022 != 0);
        let permitted = user == self.owner || user == 0 || is_open();
        if !permitted {
            info!("user {user} may not connect to {}", self.path.display());
        }
        permitted
    }

    /// Whether it does not listen until descriptors have been closed.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Listens again if descriptors that took long have been closed. To be called now and then.
    pub(crate) fn resume(&mut self) {
        if self.paused
            && !self.reaper.is_full()
            && let Some(socket) = &self.socket
        {
            self.paused = self.poller.add(socket, self.token).is_err();
        }
    }
}

impl Drop for FrontendListener {
    fn drop(&mut self) {
        if let Some(file) = self.file {
            file.remove(&self.path);
        }
        // Connections that wait may carry descriptors that take long to close.
        if let Some(socket) = self.socket.take() {
            self.poller.remove(&socket);
            self.reaper.close(socket.into());
        }
    }
}

/// Whether there is a socket with this name.
fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::closing::MOST;
    use crate::closing::tests::lingering;
    use std::io::Read;
    use std::time::Duration;

    const NOBODY: u32 = 65_534;

    fn own() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn listen(path: &Path) -> FrontendListener {
        FrontendListener::new(path, None, &WatchSet::new().unwrap(), 1).unwrap()
    }

    /// In a thread of this user. Without root, in one of this process's user.
    fn as_user<T: Send + 'static>(user: u32, run: impl FnOnce() -> T + Send + 'static) -> T {
        let run = move || {
            if own() == 0 {
                let user = rustix::process::Uid::from_raw(user);
                rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            }
            run()
        };
        std::thread::spawn(run).join().unwrap()
    }

    fn is_disconnected(mut socket: UnixStream) {
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // A connection that was not taken ends with a reset.
        let end = socket.read(&mut [0]);
        assert!(matches!(&end, Ok(0)) || end.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionReset));
    }

    #[test]
    fn front_ends_that_wait_lose_a_replaced_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.port");
        let mut listener = listen(&path);
        let waiting: Vec<UnixStream> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
        let successor = listener.successor(own()).unwrap();
        listener.replace(successor);
        waiting.into_iter().for_each(is_disconnected);
        let _later = UnixStream::connect(&path).unwrap();
        assert!(listener.accept(false).is_some() && listener.accept(false).is_none());
        drop(listener);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a file stays");
    }

    #[test]
    fn ordinary_file_at_the_path_is_kept_and_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.port");
        std::fs::write(&path, "text").unwrap();
        let refused = FrontendListener::new(&path, None, &WatchSet::new().unwrap(), 1).unwrap_err().to_string();
        assert!(refused.contains("exists and is not a socket"), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "text");
    }

    #[test]
    fn listener_that_ends_leaves_the_socket_of_a_later_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let earlier = listen(&path);
        let mut later = listen(&path);
        drop(earlier);
        let _front_end = UnixStream::connect(&path).unwrap();
        assert!(later.accept(false).is_some());
        drop(later);
        assert!(!path.exists());
    }

    #[test]
    fn successor_that_cannot_take_the_path_leaves_no_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.port");
        let mut listener = listen(&path);
        let successor = listener.successor(own()).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        listener.replace(successor);
        drop(listener);
        std::fs::remove_dir(&path).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a file stays");
    }

    #[test]
    fn descriptors_of_an_earlier_owner_do_not_block_the_port() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.port");
        let mut listener = listen(&path);
        let (socket, other) = lingering();
        let earlier = listener.reaper().clone();
        earlier.close(socket.into());
        let (held, _peer) = UnixStream::pair().unwrap();
        (0..MOST).for_each(|_| earlier.close(held.try_clone().unwrap().into()));
        let _waiting = UnixStream::connect(&path).unwrap();
        assert!(listener.accept(false).is_none() && listener.is_paused());
        let successor = listener.successor(own()).unwrap();
        listener.replace(successor);
        let _later = UnixStream::connect(&path).unwrap();
        assert!(!listener.is_paused() && listener.accept(false).is_some());
        rustix::net::sockopt::set_socket_linger(&other, Some(Duration::ZERO)).unwrap();
    }

    #[test]
    fn front_end_of_an_earlier_owner_is_disconnected() {
        if own() != 0 {
            println!("skipped: only root connects as another user");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let path = folder.path().join("a.port");
        let mut listener = FrontendListener::new(&path, Some(NOBODY), &WatchSet::new().unwrap(), 1).unwrap();
        let connect = || {
            let path = path.clone();
            as_user(NOBODY, || UnixStream::connect(path).unwrap())
        };
        let _taken = connect();
        assert!(listener.accept(false).is_some());
        // It connects shortly before another user becomes the owner.
        let waiting = connect();
        listener.owner = NOBODY - 1;
        assert!(listener.accept(false).is_none());
        is_disconnected(waiting);
        let _root = UnixStream::connect(&path).unwrap();
        assert!(listener.accept(false).is_some());
    }

    #[test]
    fn listener_that_cannot_be_set_up_leaves_no_socket() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let path = folder.path().join("a.port");
        let at = path.clone();
        let refused = as_user(NOBODY, move || FrontendListener::new(&at, Some(0), &WatchSet::new().unwrap(), 1));
        assert!(refused.unwrap_err().to_string().contains("set the rights") && !path.exists());
    }
}
