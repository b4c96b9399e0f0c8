//! How far the way to a ring has come, and why it goes no further.

use partywall_shm::status::{LineState, Reason, Role};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU32, Ordering};

/// The known state of a connection's socket, shared by all processes that hold it.
pub(crate) mod flags {
    /// `O_NONBLOCK` is set.
    pub(crate) const NONBLOCK: u32 = 1;
    /// `shutdown` for reading.
    pub(crate) const READ_SHUT: u32 = 2;
    /// `shutdown` for writing.
    pub(crate) const WRITE_SHUT: u32 = 4;
    /// We want TCP: no switch up, and down where it is up.
    pub(crate) const WANT_TCP: u32 = 8;
    /// The peer broke the protocol, or its end cannot be trusted any more: nothing but errors.
    pub(crate) const BROKEN: u32 = 16;
    /// The peer's end of the link is gone: every process that held it has closed it, or has died.
    pub(crate) const PEER_GONE: u32 = 32;
    /// We have left the ring that we read, permanently: what comes, comes by the kernel.
    pub(crate) const LEFT: u32 = 64;
    /// The peer has left ours, and has all of what it left there.
    pub(crate) const SENT_AGAIN: u32 = 128;
    /// The peer has ended with bytes of ours unread, and the kernel does not know ([`super::super::death`]).
    pub(crate) const RESET: u32 = 256;
    /// The error of that has not been reported yet.
    pub(crate) const RESET_UNTOLD: u32 = 512;
    /// It is `EPIPE`, and `ECONNRESET` otherwise.
    pub(crate) const RESET_IS_PIPE: u32 = 1024;
    /// The kernel has reported an error that ends the connection.
    pub(crate) const ERROR_SEEN: u32 = 2048;
    /// An edge-triggered waiter gets edges for room. After one edge, it gets the next only after a call was refused
    /// ([`Conn::refuse`](super::super::Conn::refuse)).
    pub(crate) const HEARS_EDGES: u32 = 4096;
    /// It was made while there was no broker that could say whether the peer is one of us ([`Conn::adopt_unknown`](super::super::Conn::adopt_unknown)).
    pub(crate) const UNKNOWN_PEER: u32 = 8192;
    /// The other end is on another machine: the regions are in windows, and relays carry the bell.
    pub(crate) const FAR: u32 = 16384;
    /// The bell of such a connection has hung up though neither side has ended: a relay, an agent or the broker is gone.
    pub(crate) const LINK_LOST: u32 = 32768;
    /// After that, both sides send by TCP alone, and this one has unmapped the rings ([`super::super::parting`]).
    pub(crate) const PARTED: u32 = 65536;
    /// It was put on TCP for a reason that lasts as long as its socket. No [renewal](super::super::renewal) follows.
    pub(crate) const STAYS_ON_TCP: u32 = 1 << 17;
}

/// How far the way to a ring has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum ConnStage {
    /// Counting bytes.
    Candidate = 1,
    /// Offered to the peer, or its offer taken: the two show their sockets to the broker in turn.
    Offered = 2,
    /// A ring each way is attached, whichever way the bytes go.
    Attached = 3,
    /// TCP permanently.
    Tcp = 4,
    /// A thread takes a step towards a ring, and holds the sending direction until it has stored the stage that follows. A thread that
    /// wants to enter the kernel waits for it ([`super::Conn::settle`]).
    Attaching = 5,
}

/// The words in which all threads and processes that hold a connection agree on its transport.
#[derive(Debug)]
#[repr(C)]
pub(super) struct RingPath {
    stage: AtomicU32,
    pub(super) reason: AtomicU32,
    role: AtomicU32,
    pub(super) flags: AtomicU32,
    /// The segment of the peer's in which it was asked to go back to TCP last.
    pub(super) asked: AtomicU32,
    /// How far the two ends have come in showing their sockets ([`super::bring_up`]).
    pub(super) shown: AtomicU32,
}

impl RingPath {
    /// For a new connection, which is a candidate once [`RingPath::set_stage`] says so.
    pub(super) fn begin(&self, role: Role, reason: Reason) {
        self.because(reason);
        self.role.store(role as u32, Ordering::Relaxed);
        for word in [&self.flags, &self.asked, &self.shown] {
            word.store(0, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn stage(&self) -> ConnStage {
        // EDGE stage: acquires from `RingPath::set_stage`. In one order with `in_kernel`, as in `KernelFacts::enter`.
        match self.stage.load(Ordering::SeqCst) {
            1 => ConnStage::Candidate,
            2 => ConnStage::Offered,
            3 => ConnStage::Attached,
            5 => ConnStage::Attaching,
            _ => ConnStage::Tcp,
        }
    }

    /// Sets the stage, and shows it to nobody.
    pub(super) fn set_stage(&self, stage: ConnStage) {
        // EDGE stage: releases what was set up for the stage; acquired in `RingPath::is_up` and `RingPath::stage`. The order of all
        // stores and loads of stage and `in_kernel` decides between a step and a thread that enters the kernel (`KernelFacts::enter`).
        self.stage.store(stage as u32, Ordering::SeqCst);
    }

    /// A stage as people see it.
    pub(super) fn state_of(&self, stage: ConnStage) -> LineState {
        match stage {
            // Not shown: what it is next is known in a moment.
            ConnStage::Candidate | ConnStage::Attaching => LineState::Counting,
            ConnStage::Offered => LineState::Offered,
            ConnStage::Attached if self.has(flags::WANT_TCP) => LineState::Down,
            ConnStage::Attached => LineState::Up,
            ConnStage::Tcp => LineState::Tcp,
        }
    }

    /// Whether a ring is attached each way.
    #[inline]
    pub(super) fn is_up(&self) -> bool {
        // EDGE stage: acquires from `RingPath::set_stage`; what was set up for the rings can be seen.
        self.stage.load(Ordering::Acquire) == ConnStage::Attached as u32
    }

    /// Whether the connection may come to a ring yet.
    #[inline]
    pub(super) fn is_candidate(&self) -> bool {
        matches!(self.stage(), ConnStage::Candidate | ConnStage::Offered | ConnStage::Attaching)
    }

    /// Why the connection is not on a ring.
    pub(super) fn reason(&self) -> Reason {
        u8::try_from(self.reason.load(Ordering::Relaxed)).ok().and_then(Reason::from_number).unwrap_or_default()
    }

    pub(super) fn because(&self, reason: Reason) {
        self.reason.store(reason as u32, Ordering::Relaxed);
    }

    /// Which side connected.
    pub(super) fn role(&self) -> Role {
        u8::try_from(self.role.load(Ordering::Relaxed)).ok().and_then(Role::from_number).unwrap_or_default()
    }

    /// A side that was not known at the beginning.
    pub(super) fn set_role(&self, role: Role) {
        self.role.store(role as u32, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn has(&self, flag: u32) -> bool {
        self.flags.load(Ordering::Relaxed) & flag != 0
    }

    pub(super) fn set_flag(&self, flag: u32, on: bool) {
        // EDGE flags: releases what was done before, and acquires what other threads did before they set theirs. A thread that
        // only asks, by [`RingPath::has`], needs neither: a flag says all that there is to know.
        if on {
            self.flags.fetch_or(flag, Ordering::AcqRel);
        } else {
            self.flags.fetch_and(!flag, Ordering::AcqRel);
        }
    }

    /// Takes the error of a reset that the kernel does not know of ([`super::death`]). It is reported once.
    #[cold]
    pub(super) fn take_reset_error(&self) -> Option<Errno> {
        // EDGE reset: acquires from `PeerDeath::look_for_reset`. One thread alone takes the error.
        let before = self.flags.fetch_and(!flags::RESET_UNTOLD, Ordering::AcqRel);
        if before & flags::RESET_UNTOLD == 0 {
            return None;
        }
        Some(self.reset_error())
    }

    /// The error of such a reset.
    pub(super) fn reset_error(&self) -> Errno {
        if self.has(flags::RESET_IS_PIPE) { Errno::PIPE } else { Errno::CONNRESET }
    }
}
