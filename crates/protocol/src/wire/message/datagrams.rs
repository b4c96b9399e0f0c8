//! Flows of datagrams (protocol U).

/// Passes these rows of the table, behind those that it was given, to the first macro of the list.
macro_rules! datagrams {
    ($next:ident $(, $later:ident)*; $($rows:tt)*) => { $next! { $($later),*; $($rows)*
    /// Client: what this socket sends to an address may reach its receiver by a ring (protocol U3). Brings the socket and its
    /// region. Answered by `Offered`, or by `RoomIs` (protocol U14.4).
    38 OfferDatagrams {
        /// Upper half of the address, in 128 bits as IPv6 sees it.
        to_high: u64,
        /// Lower half.
        to_low: u64,
        /// The port of the receiver.
        to_port: u16,
        /// Where the sender's region is.
        region: RegionReference,
    }
    /// Broker: the answer to `OfferDatagrams`.
    25 Offered {
        /// The number that identifies it in `Cancel`. It becomes the number of the channel once the offer is taken.
        offer: u64,
    }
    /// Client: this socket has received a datagram from that address, whose sender offers a ring (protocol U4). Brings the
    /// socket, and its region, which has no ring. Answered by `DatagramsTaken`, or by `RoomIs` (protocol U14.4).
    39 TakeDatagrams {
        /// Upper half of the address that the kernel has said it is from.
        from_high: u64,
        /// Lower half.
        from_low: u64,
        /// The port of the sender.
        from_port: u16,
        /// Where the receiver's region is.
        region: RegionReference,
    }
    /// Broker: the answer to `TakeDatagrams`. Brings the sender's region.
    48 DatagramsTaken {
        /// Number of the flow.
        flow: u64,
        /// The sender's region.
        region: RegionReference,
    }
    /// Client: the directory says that my offer of a flow was taken; asks for the receiver's region (protocol U4). Once for each flow.
    49 FetchReceiver {
        /// Number of the flow, as in `Offered`.
        flow: u64,
    }
    /// Broker: the answer to `FetchReceiver`. Brings the receiver's region, which has no ring.
    50 Receiver {
        /// Where the receiver's region is.
        region: RegionReference,
    }
    } };
}
pub(super) use datagrams;
