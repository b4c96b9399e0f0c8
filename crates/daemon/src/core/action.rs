//! The events that go into the core, and the actions that come out of it.

use std::net::SocketAddr;

use partywall_protocol::directory::DirectoryChange;
use partywall_protocol::socket::{NamespaceId, ReceiverQuestion, SocketFacts};
use partywall_protocol::wire::{MachineId, Message, Name, Origin, Refusal, Side};

use super::id::SessionId;
use super::networks::Networks;
use crate::credentials::Credentials;

/// An event that the driver reports to the core.
#[derive(Debug)]
pub enum CoreEvent<F> {
    /// A client has connected to the broker's socket.
    Opened {
        /// The session from now on.
        session: SessionId,
        /// The identity of the client, from the kernel (protocol C3).
        peer: Credentials,
        /// The path of its executable, where the broker may read it.
        program: Option<String>,
    },
    /// A packet that decoded.
    Message {
        /// The session that sent it.
        session: SessionId,
        /// Its request number.
        request: u32,
        /// The message.
        message: Message,
        /// The descriptors that came with it, except a socket that it brings to be examined ([`Message::brings_socket`]).
        descriptors: Vec<F>,
        /// The facts about that socket, or the reason why it is not one. `None` if none came.
        socket: Option<Result<SocketFacts, String>>,
    },
    /// A packet that did not decode, or lost some of its descriptors.
    Malformed {
        /// The session that sent it.
        session: SessionId,
        /// Its request number, or 0.
        request: u32,
        /// The code of the refusal.
        code: Refusal,
        /// The fault of the packet.
        reason: String,
        /// Whether nothing that follows can be trusted (protocol C4).
        fatal: bool,
    },
    /// The result of an [`Action::Offer`]. It must follow the action before any other event.
    Offered {
        /// The channel offered.
        channel: u64,
        /// Whether the listener has it in its socket.
        delivery: OfferDelivery,
    },
    /// The session's socket ended, or could not be written.
    Closed {
        /// The session that ended.
        session: SessionId,
        /// No process has the other end any more. Otherwise its program may live, and use memory that it was given.
        by_program: bool,
    },
    /// The kernel has closed the UDP socket that has this number (`SO_COOKIE`).
    SocketGone {
        /// The cookie of the closed socket.
        cookie: u64,
    },
    /// The socket of one side of a flow, of which [`Action::Watch`] told, no longer receives what is sent to its address.
    FlowLost {
        /// The flow that the socket belongs to.
        flow: u64,
        /// The side whose socket it was.
        side: Side,
    },
    /// The list of network namespaces is another than before: a policy was loaded, or a namespace has come or gone.
    Networks(Networks),
    /// About 50 ms have passed. Only needed while [`Core::wants_look_at_untaken`](super::Core::wants_look_at_untaken).
    LookAtUntaken,
    /// About a second has passed. Only needed while [`Core::wants_ticks`](super::Core::wants_ticks).
    Tick,
}

/// The result of an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OfferDelivery {
    /// It lies in the listener's socket.
    Done,
    /// The listener's socket has no room.
    Full,
    /// The listener's socket has ended; that it has closed is yet to be reported.
    Gone,
    /// The kernel would not carry it.
    Failed(String),
}

/// The actions to take, in order. The event loop sends and drops the descriptors in them.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<F> {
    /// Answer a session. If that fails, the session is to be closed, and [`CoreEvent::Closed`] to be reported.
    Send {
        /// The session that receives the message.
        session: SessionId,
        /// The number of the request that it answers.
        request: u32,
        /// The message to send.
        message: Message,
        /// The descriptors that travel with the message.
        descriptors: Vec<F>,
    },
    /// Put something that a session has not asked for into its socket, and report [`CoreEvent::Offered`]. A failure is that of the session
    /// that asked for it.
    Offer {
        /// The session that receives the message.
        session: SessionId,
        /// The channel that it is about.
        channel: u64,
        /// The message to send.
        message: Message,
        /// A region, and with a connection its link ends.
        descriptors: Vec<F>,
    },
    /// Change the host's directory.
    Directory(DirectoryChange),
    /// Begin the directory of a machine, in its window from the host.
    BeginDirectory {
        /// The machine.
        machine: MachineId,
        /// The window, writable.
        window: F,
        /// Where in it the directory begins.
        base: u64,
    },
    /// Change the directory of a machine.
    MachineDirectory {
        /// The machine.
        machine: MachineId,
        /// The change of the directory.
        change: DirectoryChange,
    },
    /// The machine has gone, and its directory with it.
    EndDirectory {
        /// The machine.
        machine: MachineId,
    },
    /// Note in a window's book that a place is in use from now on, or no longer (protocol V2.4). Before what is sent about it.
    Book {
        /// The window, writable.
        window: F,
        /// Where the place begins, from the header on.
        base: u64,
        /// The place's bytes.
        size: u64,
        /// Whether the place is taken.
        in_use: bool,
    },
    /// Watch the sockets of a flow, sender's and receiver's: look at both before the next action, and report [`CoreEvent::FlowLost`] whenever
    /// one no longer receives what is sent to its address.
    Watch {
        /// The flow to watch.
        flow: u64,
        /// The sockets of sender and receiver.
        sockets: [FlowSocket; 2],
    },
    /// Watch them no longer.
    Unwatch {
        /// The flow that needs no watching any more.
        flow: u64,
    },
    /// A socket of a `SO_REUSEPORT` group was published, or is published no more. Each publication counts.
    Member {
        /// The socket's own number.
        cookie: u64,
        /// Whether it was published.
        is_published: bool,
    },
    /// Do something to a machine, and have [`Core::answer`](super::Core::answer) tell how it went.
    Order {
        /// The session that asks for it.
        session: SessionId,
        /// The number of the request.
        request: u32,
        /// The order for the machine.
        order: Order,
    },
    /// Close the socket of a session, which the core has forgotten already.
    Close {
        /// The session whose socket is to be closed.
        session: SessionId,
    },
}

/// An administrator's order, which takes more than the core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Take this machine in.
    Add {
        /// Its name.
        name: Name,
        /// Its monitor's socket.
        monitor: String,
        /// Its port's socket.
        port: String,
        /// Bytes for regions in each of its windows.
        room: u64,
        /// Only with devices that a live migration allows.
        migratable: bool,
    },
    /// Have it give up its windows, because it is to be migrated.
    Release {
        /// Its name.
        name: Name,
    },
    /// Let a released machine have its windows again.
    Resume {
        /// Its name.
        name: Name,
    },
    /// Let it go.
    Remove {
        /// Its name.
        name: Name,
    },
}

/// A socket of a flow, and a datagram that must reach it and no other for as long as the flow lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowSocket {
    /// The socket's own number (`SO_COOKIE`).
    pub cookie: u64,
    /// Its network namespace.
    pub namespace: NamespaceId,
    /// Where the datagram is from.
    pub from: SocketAddr,
    /// Where it is sent to: an address of the socket.
    pub to: SocketAddr,
    /// Other sockets may have its address too, and the kernel chooses one of them for each datagram, unless one of them is connected.
    pub is_chosen: bool,
}

impl FlowSocket {
    /// The number of its network namespace, if this host's kernel has it.
    pub fn host_netns(&self) -> Option<u64> {
        (self.namespace.origin == Origin::Host).then_some(self.namespace.cookie)
    }

    /// The question whether it is still the one that receives.
    pub fn question(&self) -> ReceiverQuestion {
        ReceiverQuestion { from: self.from, to: self.to, in_group: self.is_chosen }
    }
}
