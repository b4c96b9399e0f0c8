//! A connection that one process passes to another over a UNIX socket, and that may have rings in the receiver (protocol T13.15).
//!
//! Only the sender can know that the receiver alone holds the connection: it has counted the holders. So it states to the broker that it passed
//! the connection once and holds it no more, when it closes its last descriptor. The receiver asks for that statement ([`super::received`]).
//!
//! ```text
//!   sender:    NONE --pass--> PASSED --last descriptor closed, by the kernel too--> Passed, to the broker
//!               ^  |            |
//!               |  v            | anything that may give the connection to others, or that only TCP can do
//!          the message was      v
//!            not sent: KEPT    VOID
//!
//!   receiver:  RECEIVED --the broker confirms it--> NONE
//! ```
//!
//! The statement names the connection and the socket that carries it, both by the kernel's cookie. So a process that has received a connection
//! and passes it on does not pass the statement on: the second receiver gets it by another socket.

use super::{Conn, flags, renewal};
use crate::{broker, process, sys, unseen};
use partywall_protocol::passed::{PassedSocket, PassedState};
use partywall_protocol::wire::Side;
use partywall_shm::status::{Reason, Role};
use rustix::net::sockopt;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// It was neither passed nor received.
const NONE: u32 = 0;
/// It was passed once, by this process or one that shares it by `fork`.
const PASSED: u32 = 1;
/// Other processes may have it.
const VOID: u32 = 2;
/// It came from another process, which may have it still.
const RECEIVED: u32 = 3;
/// It was to be passed, and the kernel did not take the message.
const KEPT: u32 = 4;

/// A connection with one of these is not stated, though it was passed.
const ENDING: u32 = flags::BROKEN | flags::RESET | flags::ERROR_SEEN | flags::READ_SHUT | flags::WRITE_SHUT;

/// The way of a connection to another process, or from one.
#[derive(Debug)]
#[repr(C)]
pub(super) struct PassingState {
    state: AtomicU32,
    /// How often the receiver has asked.
    pub(super) looks: AtomicU32,
    /// When it asks next, in milliseconds of [`sys::coarse_now`].
    pub(super) next_look_at: AtomicU64,
    /// The cookies of its socket, and of the UNIX socket that carries it.
    socket: AtomicU64,
    carrier: AtomicU64,
}

impl PassingState {
    /// For a new connection.
    pub(super) fn begin(&self) {
        self.state.store(NONE, Ordering::Relaxed);
        self.looks.store(0, Ordering::Relaxed);
        self.next_look_at.store(0, Ordering::Relaxed);
    }

    /// Other processes may have it from here on, or something was done with it that only TCP can do.
    pub(super) fn forbid(&self) {
        // EDGE passing: in one order with the exchange in `PassingState::pass`. Whichever is later finds the other.
        self.state.store(VOID, Ordering::SeqCst);
    }

    /// Whether it came from a process that may have it still.
    #[inline]
    pub(super) fn is_received(&self) -> bool {
        self.state.load(Ordering::Relaxed) == RECEIVED
    }

    /// Whether it was passed, and nothing has forbidden a statement since.
    #[cfg(test)]
    pub(super) fn is_passed(&self) -> bool {
        self.state.load(Ordering::Relaxed) == PASSED
    }

    /// It is about to be passed. `false` if it was before, or must not be stated.
    pub(super) fn pass(&self, of: PassedSocket) -> bool {
        self.socket.store(of.socket, Ordering::Relaxed);
        self.carrier.store(of.carrier, Ordering::Relaxed);
        // EDGE passing: releases the cookies; acquired by the thread that closes the last descriptor.
        let take = |from| self.state.compare_exchange(from, PASSED, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        let is_first = take(NONE) || take(KEPT);
        if !is_first {
            self.forbid();
        }
        is_first
    }

    /// It came from another process.
    pub(super) fn receive(&self, of: PassedSocket) {
        self.socket.store(of.socket, Ordering::Relaxed);
        self.carrier.store(of.carrier, Ordering::Relaxed);
        // EDGE passing: as in `PassingState::pass`. Another thread may have started a program that has it, too.
        let _ = self.state.compare_exchange(NONE, RECEIVED, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// No other process holds it. `false` if a program here has passed it on meanwhile, or done something with it that only TCP can do.
    pub(super) fn confirm(&self) -> bool {
        // EDGE passing: in one order with `PassingState::forbid`.
        self.state.compare_exchange(RECEIVED, NONE, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// The names of the socket and of its carrier.
    pub(super) fn of(&self) -> PassedSocket {
        PassedSocket { socket: self.socket.load(Ordering::Relaxed), carrier: self.carrier.load(Ordering::Relaxed) }
    }
}

/// That a connection was passed and no process but the receiver holds it: true as soon as the kernel has closed the descriptor.
#[derive(Debug)]
pub(crate) struct PassedStatement {
    of: PassedSocket,
    state: PassedState,
    births: u64,
}

impl PassedStatement {
    /// Whether no child was made between the descriptor's leaving the table and now.
    pub(super) fn holds(&self) -> bool {
        process::births() == Some(self.births) && !unseen::was_found()
    }

    /// The kernel has closed the descriptor. `errno` is left alone.
    #[cold]
    pub(crate) fn make(self) {
        if self.holds() {
            let errno = sys::errno_number();
            broker::passed(self.of, self.state);
            sys::restore_errno(errno);
        }
    }
}

impl Conn {
    /// Its descriptor is about to be passed to another process by a message: it goes back to TCP. `carrier` is the cookie of the socket that
    /// receives the message; `None` if that is not known. Returns whether the connection may have rings in the receiver.
    pub(crate) fn pass(&'static self, fd: c_int, carrier: Option<u64>) -> bool {
        let was_kept = self.passing.state.load(Ordering::Relaxed) == KEPT;
        let may_follow = (was_kept || renewal::may_be_inherited(self))
            && renewal::rings_after_exec(self).is_some()
            && !process::is_visitor()
            && !unseen::was_found();
        self.bring_down(Reason::Passed);
        let socket = sockopt::socket_cookie(sys::borrow(fd)).ok();
        match carrier.zip(socket).filter(|_| may_follow) {
            Some((carrier, socket)) => self.passing.pass(PassedSocket { socket, carrier }),
            None => {
                self.passing.forbid();
                false
            }
        }
    }

    /// The kernel has not taken the message with its descriptor.
    pub(crate) fn was_not_passed(&self) {
        // Another thread may have done something with it.
        let _ = self.passing.state.compare_exchange(PASSED, KEPT, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// This process, the last one that holds the connection, is about to close its last descriptor. If it has passed the connection, the
    /// receiver is the only holder from then on. `births`: what [`process::births`] said before the descriptor left the table.
    pub(super) fn take_statement(&self, births: Option<u64>) -> Option<PassedStatement> {
        // EDGE passing: acquires the cookies; this is stated once.
        if self.passing.state.load(Ordering::Relaxed) != PASSED
            || self.passing.state.swap(VOID, Ordering::SeqCst) != PASSED
            || self.has(ENDING)
            || !self.kernel.is_quiet()
            // Its end was not reported (protocol T13.18), because a thread has abandoned a direction.
            || self.channel() != 0
            || unseen::was_found()
        {
            return None;
        }
        let side = match self.role() {
            Role::Connecting => Side::Connecting,
            Role::Accepting => Side::Accepting,
            Role::Unknown => return None,
        };
        let rings = renewal::rings_after_exec(self)?;
        Some(PassedStatement { of: self.passing.of(), state: PassedState { side, rings }, births: births? })
    }

    /// Whether its ends may be these. Its own address may not be known yet, except the port.
    pub(crate) fn is_between(&self, local: SocketAddr, peer: SocketAddr) -> bool {
        let (known, other) = self.identity.addresses();
        other == peer && (known.port() == 0 || known.port() == local.port())
    }
}
