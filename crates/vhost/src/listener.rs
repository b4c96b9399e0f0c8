//! The socket of a port or a disk: one front end at a time.

use crate::VhostError;
use crate::closing::Reaper;
use crate::poller::WatchSet;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The kernel keeps at most this many connections that were not taken, unless `net.core.somaxconn` is raised.
const MOST_WAITING: usize = 4096;

/// A socket on which front ends connect.
#[derive(Debug)]
pub(crate) struct FrontendListener {
    /// There until it ends.
    socket: Option<UnixListener>,
    path: PathBuf,
    poller: WatchSet,
    token: u64,
    paused: bool,
    reaper: Reaper,
}

impl FrontendListener {
    /// Listens at `path`, for `owner` if that is another user.
    pub(crate) fn new(path: &Path, owner: Option<u32>, poller: &WatchSet, token: u64) -> Result<Self, VhostError> {
        // The socket of a process that was killed.
        if std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket()) {
            let _ = std::fs::remove_file(path);
        }
        let socket = UnixListener::bind(path).map_err(VhostError::file("listen on", path))?;
        let set_up = || -> io::Result<()> {
            socket.set_nonblocking(true)?;
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o600))?;
            owner.map_or(Ok(()), |uid| std::os::unix::fs::chown(path, Some(uid), None))
        };
        set_up().map_err(VhostError::file("set the rights of", path))?;
        poller.add(&socket, token)?;
        Ok(Self {
            socket: Some(socket),
            path: path.to_owned(),
            poller: poller.clone(),
            token,
            paused: false,
            reaper: Reaper::default(),
        })
    }

    /// Gives the socket's file to another user.
    pub(crate) fn set_owner(&self, uid: u32) -> Result<(), VhostError> {
        let path = &self.path;
        std::os::unix::fs::chown(path, Some(uid), None).map_err(VhostError::file("set the owner of", path))
    }

    /// Disconnects front ends that have connected and were not taken yet.
    pub(crate) fn turn_away(&self) {
        let waiting = self.socket.iter().flat_map(UnixListener::incoming).map_while(Result::ok);
        // One that connects again and again must not keep the loop here.
        waiting.take(MOST_WAITING).for_each(|socket| self.reaper.close(socket.into()));
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn reaper(&self) -> &Reaper {
        &self.reaper
    }

    /// Takes a front end that has connected. A front end that connects while another is `busy` is disconnected.
    pub(crate) fn accept(&mut self, busy: bool) -> Option<UnixStream> {
        let listener = self.socket.as_ref()?;
        if self.reaper.is_full() {
            self.poller.remove(listener);
            self.paused = true;
            return None;
        }
        let (socket, _) = listener.accept().ok()?;
        if busy {
            self.reaper.close(socket.into());
            return None;
        }
        Some(socket)
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
        let _ = std::fs::remove_file(&self.path);
        // Connections that wait may carry descriptors that take long to close.
        if let Some(socket) = self.socket.take() {
            self.poller.remove(&socket);
            self.reaper.close(socket.into());
        }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use std::io::Read;
    use std::time::Duration;

    #[test]
    fn front_ends_that_wait_are_turned_away_and_later_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.port");
        let mut listener = FrontendListener::new(&path, None, &WatchSet::new().unwrap(), 1).unwrap();
        let waiting: Vec<UnixStream> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
        listener.turn_away();
        for mut socket in waiting {
            socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            assert_eq!(socket.read(&mut [0]).unwrap(), 0);
        }
        let _later = UnixStream::connect(&path).unwrap();
        assert!(listener.accept(false).is_some() && listener.accept(false).is_none());
    }
}
