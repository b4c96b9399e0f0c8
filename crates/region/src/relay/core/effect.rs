//! The effects that a relay's state machine asks its loop to carry out.

use super::super::Notice;

/// One thing to do. Effects are carried out in their order, before the next thing is reported to the state machine.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) enum RelayEffect {
    /// Report this to the relay's owner.
    Report(Notice),
    /// Close the socket of this link.
    Close(u32),
    /// Ring the process of this link.
    Ring(u32),
    /// Tell the process of this link that its publisher drops it.
    SayDropped(u32),
    /// Tell the process of this link that the end which follows is a move.
    SayMoved(u32),
    /// Send the process of this link the memory that waits for it, as far as there is room: `RelayCore::next_delivery` has it.
    Deliver(u32),
    /// In a guest: take a vector for this link, tell its process or the relay's owner of it, and report it to `RelayCore::vector_taken`.
    TakeVector(u32),
    /// In a guest: this vector of the doorbell device is free again.
    GiveBackVector(u32),
    /// In a guest: ring this peer by the doorbell device.
    RingPeer(u32),
    /// In a guest: let the process of a link ring this peer itself, if the device can be shared with it.
    PassPeer {
        /// The link whose process may ring.
        link: u32,
        /// The peer of the doorbell device to ring.
        peer: u32,
    },
    /// In a guest: no process rings this peer any more.
    ForgetPeer(u32),
    /// On the host: let the process of a link ring this vector of the guest's. If the guest has such a vector, report it to
    /// `RelayCore::vector_passed`.
    PassVector {
        /// The link whose process may ring.
        link: u32,
        /// The vector of the guest's device to ring.
        vector: u32,
    },
    /// On the host, for a link whose process may have no event: keep what rings this vector of the guest's, for `SignalVector`. If the
    /// guest has such a vector, report it to `RelayCore::vector_passed`.
    KeepVector {
        /// The link by which the process rings.
        link: u32,
        /// The vector of the guest's device to ring.
        vector: u32,
    },
    /// On the host: ring the guest by the vector that was kept for this link.
    SignalVector(u32),
}
