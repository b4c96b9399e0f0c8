//! The connected clients, and the introduction of each to the others.

use super::{IvshmemOptions, MEMORY, VERSION};
use partywall_region::packet;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io;

/// A device's id is a number of 16 bits.
const MAX_ID: i64 = 0xffff;

#[derive(Debug)]
struct Client {
    id: i64,
    socket: OwnedFd,
    /// An event per vector; who rings it writes to it.
    events: Vec<OwnedFd>,
    /// It could not be told something, and will be removed.
    lost: bool,
}

impl Client {
    fn tell(&mut self, number: i64, fd: Option<BorrowedFd<'_>>) {
        if !self.lost {
            // A client that does not read is not waited for.
            let sent = packet::try_send(self.socket.as_fd(), &number.to_le_bytes(), fd.as_slice());
            self.lost = sent.is_err();
        }
    }
}

/// All of them.
#[derive(Debug)]
pub(super) struct Clients {
    memory: OwnedFd,
    options: IvshmemOptions,
    clients: Vec<Client>,
    next: i64,
}

impl Clients {
    pub(super) fn new(memory: OwnedFd, options: IvshmemOptions) -> Self {
        Self { memory, options, clients: Vec::new(), next: 0 }
    }

    pub(super) fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.clients.iter().map(|client| client.socket.as_fd())
    }

    /// Introduces a client to the others, and the others to it. One too many is hung up on.
    pub(super) fn add(&mut self, socket: OwnedFd) {
        if self.clients.len() >= self.options.max_clients || self.next > MAX_ID {
            return;
        }
        let Ok(events) = self.events() else { return };
        let id = self.next;
        self.next += 1;
        let mut new = Client { id, socket, events, lost: false };
        new.tell(VERSION, None);
        new.tell(id, None);
        new.tell(MEMORY, Some(self.memory.as_fd()));
        for peer in &mut self.clients {
            for event in &peer.events {
                new.tell(peer.id, Some(event.as_fd()));
            }
            for event in &new.events {
                peer.tell(id, Some(event.as_fd()));
            }
        }
        let own: Vec<io::Result<OwnedFd>> = new.events.iter().map(OwnedFd::try_clone).collect();
        for event in own {
            match event {
                Ok(event) => new.tell(id, Some(event.as_fd())),
                Err(_) => new.lost = true,
            }
        }
        self.clients.push(new);
        self.remove_lost();
    }

    /// Removes those that are marked, in the order of [`Clients::sockets`].
    pub(super) fn remove(&mut self, ended: &[bool]) {
        for (client, ended) in self.clients.iter_mut().zip(ended) {
            client.lost |= ended;
        }
        self.remove_lost();
    }

    fn remove_lost(&mut self) {
        // A client that cannot be sent a notice of a loss counts as lost too.
        while let Some(at) = self.clients.iter().position(|client| client.lost) {
            let gone = self.clients.remove(at);
            for peer in &mut self.clients {
                peer.tell(gone.id, None);
            }
        }
    }

    fn events(&self) -> io::Result<Vec<OwnedFd>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        (0..self.options.vectors).map(|_| Ok(eventfd(0, flags)?)).collect()
    }
}
