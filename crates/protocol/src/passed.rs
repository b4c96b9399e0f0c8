//! What processes state of connections that they have passed to other processes and hold no more (protocol T13.15).
//!
//! The kernel tells no process who else holds a socket. So the process that passes a socket keeps count of its holders, and when it has closed
//! its last descriptor it states that the receiver is the only one left. The broker keeps the statement until the receiver asks. In a virtual
//! machine, the agent does.
//!
//! ```text
//!   sender                    broker or agent                receiver
//!      | ---- sendmsg [socket] ---- by a UNIX socket ---------->| looks after it, as held by others
//!      | closes its last descriptor                             |
//!      | -- Passed: socket, carrier -->|                        |
//!      |                               |<-- TakePassed: socket, carrier
//!      |                               |--- PassedIs: side, rings ->| may offer or take it
//! ```

use alloc::collections::VecDeque;

use crate::wire::Side;

/// The most statements at a time.
pub const MOST: usize = 1024;
/// The most of one user, or of the users that share an account.
pub const MOST_OF_USER: usize = 256;
/// How long a statement waits for the receiver, in seconds. The receiver asks for about 100.
pub const LIFETIME_S: u64 = 120;

/// A socket in transit to another process. Both numbers are the kernel's cookies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassedSocket {
    /// The cookie of the connection's socket.
    pub socket: u64,
    /// The cookie of the UNIX socket whose queue has carried it: the receiving end.
    pub carrier: u64,
}

/// What the sender knew of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassedState {
    /// The side that the connection's end is.
    pub side: Side,
    /// How often the connection has had rings.
    pub rings: u32,
}

#[derive(Debug)]
struct Statement<U> {
    user: U,
    of: PassedSocket,
    state: PassedState,
    /// When it was made, in seconds.
    at: u64,
}

/// The statements that wait for a receiver. Only processes of the user that made a statement can take it.
#[derive(Debug)]
pub struct PassedSockets<U> {
    /// The oldest first.
    statements: VecDeque<Statement<U>>,
}

impl<U> Default for PassedSockets<U> {
    fn default() -> Self {
        Self { statements: VecDeque::new() }
    }
}

impl<U: PartialEq> PassedSockets<U> {
    /// Keeps a statement. The newest of a user replaces the user's oldest if there are as many as there may be. It is dropped if the user has
    /// none that it could replace.
    pub fn state(&mut self, user: U, of: PassedSocket, state: PassedState, now: u64) {
        self.state_in(PartialEq::eq, user, of, state, now);
    }

    /// As [`state`](Self::state), where several users have one account: `shares` says of which two. They share the limit of one.
    pub fn state_in(
        &mut self,
        shares: impl Fn(&U, &U) -> bool,
        user: U,
        of: PassedSocket,
        state: PassedState,
        now: u64,
    ) {
        self.statements.retain(|kept| is_young(kept.at, now) && !(kept.user == user && kept.of == of));
        let of_account = self.statements.iter().filter(|kept| shares(&kept.user, &user)).count();
        if self.statements.len() >= MOST || of_account >= MOST_OF_USER {
            let Some(oldest) = self.statements.iter().position(|kept| shares(&kept.user, &user)) else { return };
            self.statements.remove(oldest);
        }
        self.statements.push_back(Statement { user, of, state, at: now });
    }

    /// Takes a statement out: no other process gets it.
    pub fn take(&mut self, user: &U, of: PassedSocket, now: u64) -> Option<PassedState> {
        let at = self.statements.iter().position(|kept| kept.of == of && kept.user == *user)?;
        let kept = self.statements.remove(at)?;
        is_young(kept.at, now).then_some(kept.state)
    }
}

fn is_young(at: u64, now: u64) -> bool {
    now.saturating_sub(at) < LIFETIME_S
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: PassedState = PassedState { side: Side::Accepting, rings: 3 };

    fn passed(socket: u64) -> PassedSocket {
        PassedSocket { socket, carrier: 7 }
    }

    #[test]
    fn statement_is_taken_once_by_its_user() {
        let mut sockets = PassedSockets::default();
        sockets.state(1, passed(5), STATE, 0);
        assert_eq!(sockets.take(&2, passed(5), 0), None, "another user's");
        assert_eq!(sockets.take(&1, passed(6), 0), None, "of another socket");
        let elsewhere = PassedSocket { carrier: 8, ..passed(5) };
        assert_eq!(sockets.take(&1, elsewhere, 0), None, "it came another way");
        assert_eq!(sockets.take(&1, passed(5), 0), Some(STATE));
        assert_eq!(sockets.take(&1, passed(5), 0), None);
    }

    #[test]
    fn old_statement_is_not_taken() {
        let mut sockets = PassedSockets::default();
        sockets.state(1, passed(5), STATE, 10);
        assert_eq!(sockets.take(&1, passed(5), 10 + LIFETIME_S), None);
        sockets.state(1, passed(5), STATE, 10);
        assert_eq!(sockets.take(&1, passed(5), 9 + LIFETIME_S), Some(STATE));
        sockets.state(1, passed(5), STATE, 10);
        sockets.state(2, passed(6), STATE, 10 + LIFETIME_S);
        assert_eq!(sockets.statements.len(), 1, "it is dropped with the next statement");
    }

    #[test]
    fn users_newest_statement_replaces_its_oldest() {
        let mut sockets = PassedSockets::default();
        let most = MOST_OF_USER as u64;
        sockets.state(2, passed(0), STATE, 0);
        for socket in 0..=most {
            sockets.state(1, passed(socket), STATE, 0);
        }
        assert_eq!(sockets.take(&1, passed(0), 0), None);
        assert_eq!(sockets.take(&1, passed(1), 0), Some(STATE));
        assert_eq!(sockets.take(&1, passed(most), 0), Some(STATE));
        assert_eq!(sockets.take(&2, passed(0), 0), Some(STATE), "another user's stays");
    }

    #[test]
    fn full_table_takes_no_statement_of_a_new_user() {
        let mut sockets = PassedSockets::default();
        for user in 0..(MOST / MOST_OF_USER) as u64 {
            for socket in 0..MOST_OF_USER as u64 {
                sockets.state(user, passed(socket), STATE, 0);
            }
        }
        sockets.state(99, passed(0), STATE, 0);
        assert_eq!(sockets.take(&99, passed(0), 0), None);
        sockets.state(0, passed(4000), STATE, 0);
        assert_eq!(sockets.take(&0, passed(4000), 0), Some(STATE));
        assert_eq!(sockets.statements.len(), MOST - 1);
        sockets.state(99, passed(0), STATE, 0);
        assert_eq!(sockets.take(&99, passed(0), 0), Some(STATE), "there is room again");
    }

    #[test]
    fn repeated_statement_replaces_the_earlier_one() {
        let mut sockets = PassedSockets::default();
        sockets.state(1, passed(5), STATE, 0);
        let later = PassedState { rings: 4, ..STATE };
        sockets.state(1, passed(5), later, 1);
        assert_eq!(sockets.take(&1, passed(5), 1), Some(later));
        assert_eq!(sockets.take(&1, passed(5), 1), None);
    }
}
