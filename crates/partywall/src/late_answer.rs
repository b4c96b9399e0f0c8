//! An answer of the broker that comes while its publisher makes no call (protocol B1.1).
//!
//! A publisher asks the broker to pass its ring on to a subscriber, and does not wait for the answer. A subscriber without the ring sleeps until it is
//! rung: without more, until the publisher's next call. So the keeper files the answer, and the thread that files it rings the subscriber.

use crate::desk::Ticket;
use crate::domain::Domain;
use crate::keeper::HangUpWatch;
use crate::{Error, Result};
use partywall_region::Link;
use rustix::fd::{AsFd, OwnedFd};

/// Has the keeper listen to the session as long as it lives.
#[derive(Debug)]
pub(crate) struct LateAnswer {
    domain: Domain,
    ticket: Ticket,
    watch: HangUpWatch,
    /// The session's socket under another number, since the keeper's set has the session's own already.
    socket: OwnedFd,
}

impl LateAnswer {
    /// Rings `link` when the answer comes, or hangs it up after a refusal. `None` if it has come.
    pub(crate) fn watch(domain: &Domain, ticket: Ticket, link: Link) -> Result<Option<Self>> {
        let socket = domain.with_session(|socket| socket.try_clone_to_owned());
        let socket = socket.map_err(|e| Error::system("watch for the broker's answer", e))?;
        if !domain.ring_when_answered(ticket, link) {
            return Ok(None);
        }
        let files = domain.clone();
        let watch = HangUpWatch::notify(socket.as_fd(), move |_| files.file_news());
        let watch = watch.inspect_err(|_| domain.forget_bell(ticket))?;
        // The answer may have come before the watch.
        domain.file_news();
        Ok(Some(Self { domain: domain.clone(), ticket, watch, socket }))
    }
}

impl Drop for LateAnswer {
    fn drop(&mut self) {
        self.watch.leave(self.socket.as_fd());
        self.domain.forget_bell(self.ticket);
    }
}
