//! Packets from sessions: what arrived, and what is wrong with it (protocol C4).

use std::io;
use std::os::fd::AsFd;

use partywall_region::packet;
use partywall_shm::wire::{self, Refusal};
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::descriptor::Unhurried;
use super::{BURST, Event, Received, Server, SessionId};

impl Server {
    /// Something happened on the socket of a session.
    pub(super) fn attend(&mut self, session: SessionId, flags: EventFlags) {
        if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            // Its process is gone or has closed it; what it may have left unread has nobody to be answered to.
            self.lose(session);
            return;
        }
        for _ in 0..BURST {
            // An earlier packet may have ended it.
            let Some(socket) = self.sessions.get(&session) else { return };
            let received = match packet::try_recv(socket.as_fd(), &mut self.incoming[..]) {
                Ok(received) => received,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => return self.lose(session),
            };
            if received.len == 0 && received.fds.is_empty() && has_ended(socket) {
                return self.lose(session);
            }
            let event = self.understand(session, received);
            self.feed(event);
        }
    }

    /// Takes what a session has left unread out of its socket: the kernel would close descriptors in it as it finds them.
    fn drain(&mut self, session: SessionId) {
        let Some(socket) = self.sessions.get(&session) else { return };
        let mut nothing = 0;
        while let Ok(received) = packet::try_recv(socket.as_fd(), &mut self.incoming[..]) {
            // The end, or a packet of no bytes, of which so many do not find room in a socket.
            nothing += u32::from(received.len == 0 && received.fds.is_empty());
            if nothing > 300 {
                return;
            }
            drop(received.fds.into_iter().map(Unhurried).collect::<Vec<_>>());
        }
    }

    fn lose(&mut self, session: SessionId) {
        self.drain(session);
        self.hang_up(session);
        self.feed(Event::Closed { session });
    }

    fn understand(&mut self, session: SessionId, received: packet::Received) -> Event<Received> {
        let bytes = &self.incoming[..received.len.min(wire::MAX_PACKET)];
        let request = wire::request_of(bytes).unwrap_or(0);
        // Whatever becomes of them, closing them must not take long.
        let fds: Vec<Unhurried> = received.fds.into_iter().map(Unhurried).collect();
        let malformed = |code, reason, fatal| Event::Malformed { session, request, code, reason, fatal };
        match wire::decode(bytes) {
            // The kernel drops descriptors that do not find a place in this process: no fault of the sender.
            Ok((_, message)) if received.truncated && fds.len() < message.fd_count() => {
                let reason =
                    "the broker is out of descriptors and could not take those of the message; try again later";
                malformed(Refusal::OutOfResources, reason.to_owned(), false)
            }
            _ if received.truncated => {
                let (bytes, fds) = (wire::MAX_PACKET, packet::MAX_FDS);
                let reason = format!("a packet has at most {bytes} bytes and {fds} descriptors; this one had more");
                malformed(Refusal::Protocol, reason, true)
            }
            Ok((request, message)) => {
                let mut fds = fds.into_iter();
                // Looked at and closed here and now, before anybody is answered.
                let mut socket = None;
                if message.brings_socket() {
                    socket = fds.next().map(|socket| self.inspector.inspect(socket));
                }
                let descriptors = fds.map(Received::from).collect();
                Event::Message { session, request, message, descriptors, socket }
            }
            Err(e) => malformed(Refusal::Protocol, e.to_string(), e.breaks_framing()),
        }
    }
}

/// Whether reading nothing meant the end, or was a packet of no bytes.
fn has_ended(socket: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    loop {
        match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Err(Errno::INTR) => {}
            // If it cannot be asked, it cannot be served.
            Err(_) => return true,
            Ok(_) => return !fds[0].revents().is_empty(),
        }
    }
}
