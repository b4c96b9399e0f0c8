//! Processes that close descriptors for the event loop. Closing one can take as long as its peer likes.
//!
//! A **disposer** gets strangers' descriptors. It never receives them from its socket. It is killed from time to time, and the kernel then closes them:
//! it lets no socket of a killed process linger.
//!
//! A **closer** gets the broker's copies of ends of links and bells. The other end hangs up only when the last copy is closed, so the closer closes each
//! at once, and answers. It is killed if it makes no progress. A thread would not do in its place: it could keep the broker from ending.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use partywall_region::packet;
use rustix::event::{PollFd, PollFlags, poll};

/// The most descriptors that such a process has unanswered. Its socket has room for more.
pub(super) const FULL: usize = 64;
/// How long a closer may take for one descriptor before it is replaced.
pub(in crate::server) const LATE: Duration = Duration::from_millis(20);
/// How long a process stays when the broker has gone. The spawner kills it before, unless it has gone too.
const ENDING: Duration = Duration::from_secs(1);
/// The order that brings a descriptor.
const HOLD: &[u8; 1] = b"h";
/// The order to close the descriptor that came last. The closer answers with the same byte.
const CLOSE: &[u8; 1] = b"c";

/// The broker's side of a disposer or a closer.
#[derive(Debug)]
pub(super) struct Disposer {
    number: u32,
    socket: OwnedFd,
    /// Descriptors that were sent to it, and that it has not said to have closed.
    holds: usize,
    /// Whether it is a closer.
    closes: bool,
    /// When it got the first of these, or gave the last answer.
    since: Instant,
}

impl Disposer {
    pub(super) fn new(number: u32, socket: OwnedFd) -> Self {
        Self { number, socket, holds: 0, closes: false, since: Instant::now() }
    }

    pub(super) fn closer(number: u32, socket: OwnedFd) -> Self {
        Self { closes: true, ..Self::new(number, socket) }
    }

    /// The spawner's number for it.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// The broker's end of its socket.
    pub(super) fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Sends it a descriptor, or gives that back: it has too many, or has ended.
    pub(super) fn give(&mut self, fd: OwnedFd) -> Result<(), OwnedFd> {
        self.take_answers();
        if self.holds == FULL || packet::try_send(self.socket.as_fd(), HOLD, &[fd.as_fd()]).is_err() {
            return Err(fd);
        }
        if self.holds == 0 {
            self.since = Instant::now();
        }
        self.holds += 1;
        // Before the order to close: this copy must not be the last.
        drop(fd);
        if self.closes {
            // Without this order no answer comes, and the closer is replaced.
            let _ = packet::try_send(self.socket.as_fd(), CLOSE, &[]);
        }
        Ok(())
    }

    /// Takes the answers that have come. A disposer sends none.
    fn take_answers(&mut self) {
        while self.holds > 0 && packet::try_recv(self.socket.as_fd(), &mut [0]).is_ok_and(|packet| packet.len == 1) {
            self.holds -= 1;
            self.since = Instant::now();
        }
    }

    /// Whether it has descriptors that may be open.
    pub(super) fn holds_any(&mut self) -> bool {
        self.take_answers();
        self.holds > 0
    }

    /// Whether it has had a descriptor for too long.
    pub(super) fn is_late(&mut self) -> bool {
        self.holds_any() && self.since.elapsed() >= LATE
    }
}

/// The process of a disposer. The kernel closes the descriptors sent to it when it ends.
pub(super) fn dispose(kept: Vec<OwnedFd>) {
    if let [broker] = &kept[..] {
        // Never taken out; only the broker's end is waited for.
        let mut fds = [PollFd::new(broker, PollFlags::RDHUP)];
        while matches!(poll(&mut fds, None), Ok(0) | Err(rustix::io::Errno::INTR)) {}
    }
    end_with(kept);
}

/// The process of a closer.
pub(super) fn close_at_once(kept: Vec<OwnedFd>) {
    let mut held = None;
    let mut order = [0];
    while let [broker] = &kept[..]
        && let Ok(packet) = packet::recv(broker.as_fd(), &mut order)
        && packet.len == 1
    {
        if &order == HOLD {
            held = Some(packet);
            continue;
        }
        drop(held.take());
        if packet::send(broker.as_fd(), CLOSE, &[]).is_err() {
            break;
        }
    }
    end_with((kept, held));
}

/// Leaves what the process has to the kernel, which closes it at the end of the process without waiting for a peer.
fn end_with<T>(all: T) {
    // Not before the spawner has closed its copy of the socket, which would be the last: the spawner must not wait for a peer either.
    std::thread::sleep(ENDING);
    std::mem::forget(all);
}
