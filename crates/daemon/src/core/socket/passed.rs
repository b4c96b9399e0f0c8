//! `Passed` and `TakePassed`: the receiver of a socket learns that no other process holds it (protocol T13.15 to T13.20).
//!
//! Neither message brings the socket: the sender has closed it, and in the receiver a thread may be in the kernel with it (T3.3). The receiver
//! shows it later, in `Offer` or `Take`, and only then has a ring. A false statement harms the connections of the user that made it.

use partywall_protocol::passed::{PassedSocket, PassedState};
use partywall_protocol::wire::{Message, Origin, User};

use crate::core::{Core, Descriptor, SessionId};
use crate::credentials::{Account, Home};

impl<F: Descriptor> Core<F> {
    pub(in crate::core) fn passed(&mut self, id: SessionId, of: PassedSocket, state: PassedState) {
        if let Some(user) = self.user_at_home(id) {
            // A user that makes namespaces has more homes, but no more accounts.
            let shares =
                |one: &(User, Home), other: &(User, Home)| Account::of(one.0, one.1) == Account::of(other.0, other.1);
            self.sockets.passed.state_in(shares, user, of, state, self.now);
        }
    }

    pub(in crate::core) fn take_passed(&mut self, id: SessionId, request: u32, of: PassedSocket) {
        let user = self.user_at_home(id);
        let answer = match user.and_then(|user| self.sockets.passed.take(&user, of, self.now)) {
            Some(PassedState { side, rings }) => Message::PassedIs { side, rings },
            None => Message::Done {},
        };
        self.send(id, request, answer);
    }

    /// The user of a session, and where it runs. `None` in a machine, whose agent keeps the statements of its users apart, and where the broker
    /// cannot tell.
    fn user_at_home(&self, id: SessionId) -> Option<(User, Home)> {
        let peer = self.sessions.get(&id)?.peer;
        (peer.origin() == Origin::Host && peer.home != Home::Unknown).then_some((peer.user, peer.home))
    }
}
