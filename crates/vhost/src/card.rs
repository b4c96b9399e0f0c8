//! A port with a virtual machine's network card behind it.

use crate::VhostError;
use crate::listener::FrontendListener;
use crate::offload::{Accepts, LONG, SHORT};
use crate::poller::WatchSet;
use crate::session::{DeviceModel, FrontendSession};
use crate::switch::{IPV4, PortNumber, TokenBucket, untagged};
use std::path::Path;
use vhost::vhost_user::message::{VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures};
use virtio_bindings::{virtio_config, virtio_net, virtio_ring};

/// Pairs of queues that a card has at most.
pub const PAIRS: usize = 4;
/// Tokens of a port are its number, shifted by this, and one of those below or a queue's number.
pub(crate) const TOKEN_BITS: u32 = 8;
pub(crate) const LISTENER: u64 = 0xff;
pub(crate) const SOCKET: u64 = 0xfe;
pub(crate) const TAP: u64 = 0xfd;

const MERGEABLE: u64 = 1 << virtio_net::VIRTIO_NET_F_MRG_RXBUF;
const VERSION_1: u64 = 1 << virtio_config::VIRTIO_F_VERSION_1;

/// The features of a card.
pub(crate) fn model() -> DeviceModel {
    let bits = [
        virtio_net::VIRTIO_NET_F_CSUM,
        virtio_net::VIRTIO_NET_F_GUEST_CSUM,
        virtio_net::VIRTIO_NET_F_MTU,
        virtio_net::VIRTIO_NET_F_GUEST_TSO4,
        virtio_net::VIRTIO_NET_F_GUEST_TSO6,
        virtio_net::VIRTIO_NET_F_HOST_TSO4,
        virtio_net::VIRTIO_NET_F_HOST_TSO6,
        virtio_net::VIRTIO_NET_F_GUEST_USO4,
        virtio_net::VIRTIO_NET_F_GUEST_USO6,
        virtio_net::VIRTIO_NET_F_HOST_USO,
        virtio_net::VIRTIO_NET_F_MRG_RXBUF,
        virtio_net::VIRTIO_NET_F_GUEST_ANNOUNCE,
        virtio_net::VIRTIO_NET_F_MQ,
        virtio_ring::VIRTIO_RING_F_INDIRECT_DESC,
        virtio_ring::VIRTIO_RING_F_EVENT_IDX,
        virtio_config::VIRTIO_F_VERSION_1,
    ];
    let features = bits.iter().fold(VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(), |all, bit| all | 1 << bit);
    let protocol = Protocol::MQ | Protocol::REPLY_ACK | Protocol::MTU | Protocol::RARP | Protocol::CONFIGURE_MEM_SLOTS;
    DeviceModel { features, accepted: features, protocol, rings: 2 * PAIRS, announced: PAIRS as u64 }
}

/// A transmit queue that waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parked {
    pub(crate) since: u64,
    pub(crate) until: u64,
    /// For buffers of a port: which, and where its driver's receive queue was.
    pub(crate) on: Option<(PortNumber, usize, u16)>,
}

/// A card.
#[derive(Debug)]
pub(crate) struct Card {
    listener: FrontendListener,
    pub(crate) session: Option<FrontendSession>,
    pub(crate) parked: [Option<Parked>; PAIRS],
    /// Its driver has not taken frames for as long as others wait for it.
    pub(crate) stalled: bool,
    /// Microseconds that others may still wait for it.
    pub(crate) patience: TokenBucket,
    /// Microseconds that its own frames may still wait for others, however many of those are slow.
    pub(crate) waits: TokenBucket,
}

impl Card {
    pub(crate) fn listen(
        path: &Path,
        owner: Option<u32>,
        poller: &WatchSet,
        number: PortNumber,
        hold: u64,
    ) -> Result<Self, VhostError> {
        let listener = FrontendListener::new(path, owner, poller, token(number, LISTENER))?;
        let (patience, waits) = (half(hold), half(hold));
        Ok(Self { listener, session: None, parked: [None; PAIRS], stalled: false, patience, waits })
    }

    /// Changes how long a frame waits for buffers, in nanoseconds.
    pub(crate) fn set_hold(&mut self, hold: u64) {
        (self.patience, self.waits) = (half(hold), half(hold));
    }

    /// A socket for another owner, for [`Self::replace`].
    pub(crate) fn successor(&self, owner: u32) -> Result<FrontendListener, VhostError> {
        self.listener.successor(owner)
    }

    /// Listens by another socket, at the same path. The front end stays connected until [`Self::disconnect`].
    pub(crate) fn replace(&mut self, successor: FrontendListener) {
        self.listener.replace(successor);
    }

    /// Whether front ends find its socket.
    pub(crate) fn is_there(&self) -> bool {
        self.listener.is_there()
    }

    /// Disconnects the front end. It may connect again.
    pub(crate) fn disconnect(&mut self) {
        self.session = None;
        (self.parked, self.stalled) = ([None; PAIRS], false);
    }

    /// Ends waits for a rate, which has changed.
    pub(crate) fn end_rate_waits(&mut self) {
        for parked in self.parked.iter_mut().filter(|parked| parked.is_some_and(|parked| parked.on.is_none())) {
            *parked = None;
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.listener.path()
    }

    /// Takes a front end that has connected. While one is there, a second is sent away.
    pub(crate) fn accept(&mut self, poller: &WatchSet, number: PortNumber) -> Result<bool, VhostError> {
        let Some(socket) = self.listener.accept(self.session.is_some()) else { return Ok(false) };
        let session = FrontendSession::new(
            model(),
            socket,
            poller,
            token(number, 0),
            token(number, SOCKET),
            self.listener.reaper(),
        )?;
        self.session = Some(session);
        (self.parked, self.stalled) = ([None; PAIRS], false);
        Ok(true)
    }

    /// Whether its driver offers frames, or a queue of it waits.
    pub(crate) fn has_offers(&self) -> bool {
        let Some(session) = &self.session else { return false };
        let memory = session.memory();
        let mut queues = session.rings().chunks_exact(2).map(|pair| &pair[1]);
        self.parked.iter().any(Option::is_some) || queues.any(|ring| ring.runs() && ring.has_work(memory))
    }

    /// Whether it has to be asked to listen again.
    pub(crate) fn is_paused(&self) -> bool {
        self.listener.is_paused()
    }

    /// Listens again if it had to wait.
    pub(crate) fn resume(&mut self) {
        self.listener.resume();
    }

    /// The receive queue for a frame: always the same for one flow.
    pub(crate) fn receive_ring(&self, head: &[u8]) -> Option<usize> {
        let session = self.session.as_ref()?;
        let count = session.rings().chunks_exact(2).take_while(|pair| pair[0].runs()).count();
        let pair = match count {
            0 => return None,
            1 => 0,
            n => flow(head) % n,
        };
        Some(2 * pair)
    }
}

/// Microseconds of waits. Others wait for a card half of the time at most, and it waits for others half of the time at most.
fn half(hold: u64) -> TokenBucket {
    TokenBucket::new(500_000, (hold / 1000).max(1), 0)
}

pub(crate) fn token(number: PortNumber, part: u64) -> u64 {
    u64::from(number.0) << TOKEN_BITS | part
}

/// The hash of a frame's flow: of the addresses of IP and of the ports, behind VLAN tags too. Fragments have no ports that could be compared.
fn flow(head: &[u8]) -> usize {
    let Some((kind, packet)) = untagged(head) else { return 0 };
    let is_fragment = kind == IPV4 && packet.get(6..8).is_some_and(|at| at[0] & 0x3f != 0 || at[1] != 0);
    packet.get(12..if is_fragment { 20 } else { 24 }).map_or(0, hash)
}

fn hash(bytes: &[u8]) -> usize {
    bytes.iter().fold(0xcbf2_9ce4, |hash: usize, byte| (hash ^ usize::from(*byte)).wrapping_mul(0x0100_01b3)) >> 8
}

/// The negotiated features, as far as frames depend on them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CardFormat {
    pub(crate) header: usize,
    pub(crate) mergeable: bool,
    pub(crate) accepts: Accepts,
}

impl CardFormat {
    pub(crate) fn of(features: u64) -> Self {
        let has = |bit: u32| features & (1 << bit) != 0;
        Self {
            header: if features & (MERGEABLE | VERSION_1) == 0 { SHORT } else { LONG },
            mergeable: features & MERGEABLE != 0,
            accepts: Accepts {
                csum: has(virtio_net::VIRTIO_NET_F_GUEST_CSUM),
                tso4: has(virtio_net::VIRTIO_NET_F_GUEST_TSO4),
                tso6: has(virtio_net::VIRTIO_NET_F_GUEST_TSO6),
                uso4: has(virtio_net::VIRTIO_NET_F_GUEST_USO4),
                uso6: has(virtio_net::VIRTIO_NET_F_GUEST_USO6),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flow_behind_tags_is_the_same_whatever_its_identification() {
        let frame = |tags: &[u8], identification: u8, fragment: [u8; 2], ports: [u8; 4]| {
            let checksum = identification.wrapping_mul(3);
            let ip = [0x45, 0, 0, 40, 9, identification, fragment[0], fragment[1], 64, 6, 7, checksum];
            [&[2; 12][..], tags, &[8, 0], &ip, &[10, 0, 0, 1, 10, 0, 0, 2], &ports].concat()
        };
        let mut flows = Vec::new();
        for tags in [&[][..], &[0x81, 0, 0, 5], &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6]] {
            let of = |identification, ports| flow(&frame(tags, identification, [0x40, 0], ports));
            assert_eq!(of(1, [1, 2, 3, 4]), of(200, [1, 2, 3, 4]), "{tags:x?}");
            assert_ne!(of(1, [1, 2, 3, 4]), of(1, [1, 2, 3, 5]), "{tags:x?}");
            // Of the fragments of a datagram only the first has the ports.
            let fragments = [[0x20, 0], [0x20, 0xb9], [0x01, 0x72]].map(|at| flow(&frame(tags, 1, at, [at[1]; 4])));
            assert!(fragments.iter().all(|one| *one == fragments[0]), "{tags:x?}");
            flows.push(of(1, [1, 2, 3, 4]));
        }
        assert!(flows.iter().all(|one| *one == flows[0]), "the tags are no part of it");
        assert_eq!(flow(&[0; 3]), 0);
    }
}
