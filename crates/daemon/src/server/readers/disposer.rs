//! Processes that close what the event loop must not close, because closing it may take as long as a stranger likes.
//!
//! A **disposer** holds the descriptors that it is sent, and takes none of them out of its socket. It is killed now and then: the kernel makes nobody wait
//! for the peer of a socket that a killed process had. It gets strangers' descriptors.
//!
//! A **closer** closes each descriptor when the event loop has closed its own copy, which would otherwise be the last, and answers. It is killed if an answer is late. It gets ends of links and bells that the broker
//! has made, since who has the other end sees it hang up when all copies are closed.

use std::os::fd::{AsFd as _, OwnedFd};

use partywall_region::packet;
use rustix::event::{PollFd, PollFlags, poll};

/// Descriptors that such a process is given before it is replaced: less than its socket has room for.
pub(super) const FULL: usize = 64;
/// An order with a descriptor.
const HOLD: &[u8; 1] = b"h";
/// The order to close the one that came last, and the answer.
const CLOSE: &[u8; 1] = b"c";

/// The broker's side of a disposer or a closer.
#[derive(Debug)]
pub(super) struct Disposer {
    number: u32,
    socket: OwnedFd,
    /// Descriptors that it has and has not said to have closed.
    holds: usize,
    /// It is a closer.
    closes: bool,
}

impl Disposer {
    pub(super) fn new(number: u32, socket: OwnedFd) -> Self {
        Self { number, socket, holds: 0, closes: false }
    }

    pub(super) fn closer(number: u32, socket: OwnedFd) -> Self {
        Self { closes: true, ..Self::new(number, socket) }
    }

    /// The spawner's number for it.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Gives it a descriptor, or gives that back: it has too many, or has ended.
    pub(super) fn give(&mut self, fd: OwnedFd) -> Result<(), OwnedFd> {
        self.hear();
        if self.holds < FULL && packet::try_send(self.socket.as_fd(), HOLD, &[fd.as_fd()]).is_ok() {
            self.holds += 1;
            drop(fd);
            if self.closes {
                // Without this, it does not answer in time.
                let _ = packet::try_send(self.socket.as_fd(), CLOSE, &[]);
            }
            return Ok(());
        }
        Err(fd)
    }

    /// Takes the answers that have come. A disposer sends none.
    pub(super) fn hear(&mut self) {
        while self.holds > 0 && packet::try_recv(self.socket.as_fd(), &mut [0]).is_ok_and(|packet| packet.len == 1) {
            self.holds -= 1;
        }
    }

    /// Whether it has any descriptors that may be open.
    pub(super) fn holds_any(&self) -> bool {
        self.holds > 0
    }
}

/// The process of a disposer. The kernel closes the descriptors sent to it when it is killed.
pub(super) fn dispose(kept: Vec<OwnedFd>) {
    if let [broker] = &kept[..] {
        // Never taken out; only the broker's end is waited for.
        let mut fds = [PollFd::new(broker, PollFlags::RDHUP)];
        while matches!(poll(&mut fds, None), Ok(0) | Err(rustix::io::Errno::INTR)) {}
    }
}

/// The process of a closer.
pub(super) fn close_at_once(kept: Vec<OwnedFd>) {
    let [broker] = &kept[..] else { return };
    let mut held = None;
    let mut order = [0];
    while let Ok(packet) = packet::recv(broker.as_fd(), &mut order)
        && packet.len == 1
    {
        if &order == HOLD {
            held = Some(packet);
            continue;
        }
        drop(held.take());
        if packet::send(broker.as_fd(), CLOSE, &[]).is_err() {
            return;
        }
    }
}
