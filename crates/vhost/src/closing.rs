//! Descriptors that a front end has sent. To close one can block: a socket that lingers, a file of a file system that another process
//! serves. So those that are not known to be harmless are closed by a helper thread, and so is the connection itself, because messages
//! that wait in it may carry more of them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

/// The most descriptors of one port that may wait to be closed. With more, the port is not served until some of them are closed.
pub(crate) const MOST: usize = 64;

/// Closes descriptors of one port in a thread, which starts with the first of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reaper(Arc<ReaperState>);

#[derive(Debug, Default)]
struct ReaperState {
    waiting: AtomicUsize,
    thread: Mutex<Option<Sender<OwnedFd>>>,
}

impl Reaper {
    /// Whether the port has to wait until some are closed.
    pub(crate) fn is_full(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed) > MOST
    }

    /// Closes it in the helper thread.
    pub(crate) fn close(&self, fd: OwnedFd) {
        self.0.waiting.fetch_add(1, Ordering::Relaxed);
        let mut thread = self.0.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let fd = match thread.as_ref() {
            Some(sender) => match sender.send(fd) {
                Ok(()) => return,
                Err(std::sync::mpsc::SendError(fd)) => fd,
            },
            None => fd,
        };
        self.start(&mut thread, fd);
    }

    fn start(&self, thread: &mut Option<Sender<OwnedFd>>, fd: OwnedFd) {
        let (sender, receiver) = channel::<OwnedFd>();
        let _ = sender.send(fd);
        // It must not keep the state alive: the sender in there is what ends the thread.
        let state = Arc::downgrade(&self.0);
        let run = move || {
            while let Ok(fd) = receiver.recv() {
                drop(fd);
                if let Some(state) = state.upgrade() {
                    state.waiting.fetch_sub(1, Ordering::Relaxed);
                }
            }
        };
        // Without a thread the failed start closes the descriptor here, and the next one tries again.
        if std::thread::Builder::new().name("closing".into()).spawn(run).is_ok() {
            *thread = Some(sender);
        } else {
            self.0.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A received descriptor of unknown kind.
#[derive(Debug)]
pub(crate) struct ReceivedFd {
    fd: Option<OwnedFd>,
    reaper: Reaper,
}

impl ReceivedFd {
    pub(crate) fn new(fd: OwnedFd, reaper: &Reaper) -> Self {
        Self { fd: Some(fd), reaper: reaper.clone() }
    }

    /// The descriptor, of which the caller has found out that to close it cannot block.
    pub(crate) fn harmless(mut self) -> Option<OwnedFd> {
        self.fd.take()
    }

    pub(crate) fn get(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for ReceivedFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.reaper.close(fd);
        }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
pub(crate) mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    /// A socket whose close lingers until its peer, the other one, is closed.
    pub(crate) fn lingering() -> (TcpStream, TcpStream) {
        // Its bytes are never read, so that a close lingers as long as it may.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        while std::io::Write::write(&mut &socket, &[0; 65_536]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(600))).unwrap();
        socket.set_nonblocking(false).unwrap();
        (socket, other)
    }

    #[test]
    fn lingering_sockets_are_closed_elsewhere_and_counted() {
        let (socket, other) = lingering();
        let reaper = Reaper::default();
        drop(ReceivedFd::new(socket.into(), &reaper));
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        for _ in 0..MOST {
            drop(ReceivedFd::new(a.try_clone().unwrap().into(), &reaper));
        }
        assert!(reaper.is_full(), "all wait behind the one that lingers");
        // The reset of its peer ends the wait, and all are closed.
        rustix::net::sockopt::set_socket_linger(&other, Some(Duration::ZERO)).unwrap();
        drop((other, a));
        b.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(std::io::Read::read(&mut &b, &mut [0]).unwrap(), 0);
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while reaper.0.waiting.load(Ordering::Relaxed) > 0 {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
    }
}
