//! Channels, put together from a region, links and halves.

use crate::desk::Mailbox;
use crate::endpoint::{Carrier, Endpoint};
use crate::keeper::HangUpWatch;
use crate::memory::{self, writes};
use crate::options::Options;
use crate::rx::StreamRx;
use crate::tx::StreamTx;
use crate::{Error, PeerInfo, Result};
use partywall_protocol::wire::{Directions, Side};
use partywall_region::wait::DEFAULT_SPIN;
use partywall_region::{LATE, Link, OwnRegion, PeerRegion, link};
use partywall_shm::layout::RegionKind;
use partywall_shm::sizing::Sizing;
use rustix::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The writing half and the reading half of one end.
pub(crate) type Halves = (Option<StreamTx>, Option<StreamRx>);

/// The parts of an endpoint and its halves.
#[derive(Debug)]
pub(crate) struct EndpointParts {
    pub(crate) side: Side,
    pub(crate) directions: Directions,
    pub(crate) region: OwnRegion,
    pub(crate) peer: Option<PeerRegion>,
    /// One link per direction, forward first.
    pub(crate) links: Vec<Link>,
    pub(crate) info: PeerInfo,
    pub(crate) id: u64,
    pub(crate) carrier: Carrier,
    /// Smallest and largest size of this side's ring.
    pub(crate) ring: (u64, u64),
    /// Where this side's region begins in its window; 0 if it is in a memfd, as the peer's is then too.
    pub(crate) base: u64,
}

/// The longest spin between machines unless the user says otherwise. A doorbell goes through two agents, the broker and two QEMUs, so to
/// sleep and be woken costs that much more than on one machine.
const WINDOW_SPIN: Duration = Duration::from_millis(1);

/// The longest spin of a half whose peer is on this machine, or on another.
fn spin_for(elsewhere: bool, asked: Duration) -> Duration {
    if elsewhere && asked == DEFAULT_SPIN { WINDOW_SPIN } else { asked }
}

/// The end of a link to another machine.
pub(crate) fn crossing(end: OwnedFd) -> Result<Link> {
    Link::crossing(end, LATE).map_err(|e| Error::system("prepare a link to another machine", e))
}

/// Puts an endpoint together: a writing half, a reading half, or both.
pub(crate) fn assemble(parts: EndpointParts, options: &Options) -> Result<Halves> {
    let EndpointParts { side, directions, region, peer, links, info, id, carrier, ring, base } = parts;
    let spin = spin_for(base != 0, options.spin);
    let options = &Options { spin, ..options.clone() };
    let endpoint = Arc::new(Endpoint::new(&region, base != 0, info, id, carrier, options));
    if let Some(peer) = peer {
        endpoint.adopt(peer)?;
    }
    let mut links = links.into_iter();
    let mut halves = (None, None);
    let mut region = Some(region);
    for direction in [Directions::FORWARD, Directions::REVERSE] {
        if !directions.contains(direction) {
            continue;
        }
        let link = links.next().ok_or_else(|| Error::BrokerConfused("a channel with a link missing".into()))?;
        let watch = HangUpWatch::link(link.life())?;
        if direction == writes(side) {
            if let Some(region) = region.take() {
                let sizing = if base == 0 { Sizing::new(ring.0, ring.1) } else { Sizing::rising(ring.0, ring.1) };
                halves.0 = Some(StreamTx::new(Arc::clone(&endpoint), region, link, watch, sizing, options));
            }
        } else {
            halves.1 = Some(StreamRx::new(Arc::clone(&endpoint), link, watch, options.spin));
        }
    }
    Ok(halves)
}

/// Two ends of one channel within this process, without a broker.
pub(crate) fn pair(options: &Options) -> Result<(Halves, Halves)> {
    let directions = if options.one_way { Directions::FORWARD } else { Directions::BOTH };
    let ring = options.ring_bounds(partywall_shm::layout::MAX_RING)?;
    let mut links: (Vec<Link>, Vec<Link>) = (Vec::new(), Vec::new());
    for _ in 0..directions.count() {
        let (a, b) = link::pair().map_err(|e| Error::system("make a link", e))?;
        links.0.push(Link::bells(a)?);
        links.1.push(Link::bells(b)?);
    }
    let (region_a, memory_a) = memory::endpoint(Side::Connecting, directions, options, ring.0, 0)?;
    let (region_b, memory_b) = memory::endpoint(Side::Accepting, directions, options, ring.0, 0)?;
    let peer_a = PeerRegion::attach(memory_a.as_fd(), RegionKind::Endpoint, region_a.geometry())?;
    let peer_b = PeerRegion::attach(memory_b.as_fd(), RegionKind::Endpoint, region_b.geometry())?;
    let boxes: Arc<[Mutex<Mailbox>; 2]> = Arc::default();
    let parts = |side, region, peer, links, mine| {
        let carrier = Carrier::Pair(Arc::clone(&boxes), mine);
        let info = PeerInfo {
            name: String::new(),
            domain_id: 0,
            epoch: 0,
            user: None,
            pid: Some(std::process::id()),
            at_home: false,
            service: String::new(),
        };
        EndpointParts { side, directions, region, peer: Some(peer), links, info, id: 0, carrier, ring, base: 0 }
    };
    let a = assemble(parts(Side::Connecting, region_a, peer_b, links.0, 0), options)?;
    let b = assemble(parts(Side::Accepting, region_b, peer_a, links.1, 1), options)?;
    Ok((a, b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_region::RegionOptions;
    use partywall_region::pmem::{WindowFile, WindowSpec};
    use partywall_shm::corrupt::Corrupt;
    use partywall_shm::layout::PAGE;
    use partywall_shm::producer::Producer;
    use partywall_shm::sync::Peer;
    use partywall_shm::wake::Fencing;

    /// A reader of a ring in a window whose writer has gone on to another, which is still in transit; and how it comes.
    fn ahead_of_its_ring() -> (StreamRx, impl FnOnce() + Send, Link) {
        let spec = WindowSpec { room: 1 << 20, owner: "a".into(), peer: "b".into() };
        let file = WindowFile::create(&spec).unwrap();
        let window = file.window().unwrap();
        let (base, second, back) = (PAGE, PAGE * 8, PAGE * 32);
        let mut ring = window.create(base, &RegionOptions::endpoint(PAGE)).unwrap();
        let next = RegionOptions { kind: RegionKind::Extension, ..RegionOptions::endpoint(PAGE * 2) };
        let mut next = window.create(second, &next).unwrap();
        let own = window.create(back, &RegionOptions::endpoint(0)).unwrap();
        let mut producer = Producer::new(PAGE);
        ring.span(0, 3).copy_from(0, b"old");
        producer.commit::<Peer>(&ring.page().tx, None, 3, Fencing::Symmetric);
        producer.switch(&ring.page().tx, PAGE * 2);
        next.span(3, 3).copy_from(0, b"new");
        producer.commit::<Peer>(&ring.page().tx, None, 3, Fencing::Symmetric);
        // It has finished, too.
        partywall_shm::state::TxState::Finished.store(&ring.page().tx.control.state);

        let peer = window.attach(base, RegionKind::Endpoint, ring.geometry()).unwrap();
        let (near, far) = Link::pair().unwrap();
        let (side, directions, base) = (Side::Accepting, Directions::FORWARD, back);
        let (name, service) = (String::new(), String::new());
        let info = PeerInfo { name, domain_id: 0, epoch: 0, user: None, pid: None, at_home: false, service };
        let (links, carrier) = (vec![crossing(near).unwrap()], Carrier::None);
        let (region, peer, ring_size) = (own, Some(peer), (PAGE, PAGE));
        let parts =
            EndpointParts { side, directions, region, peer, links, info, id: 1, carrier, ring: ring_size, base };
        let rx = assemble(parts, &Options::default()).unwrap().1.unwrap();
        let (far, again) = (Link::Socket(far.try_clone().unwrap()), Link::Socket(far));
        let send = move || {
            again.attach_at(second, 0, 1, next.geometry(), file.as_fd()).unwrap();
            drop(ring);
        };
        (rx, send, far)
    }

    #[test]
    fn reader_waits_for_announced_ring_of_another_machine() {
        let (mut rx, send, far) = ahead_of_its_ring();
        let mut bytes = [0; 10];
        assert_eq!(rx.read(&mut bytes).unwrap(), 3);
        assert_eq!(&bytes[..3], b"old");
        rx.waiter.nonblocking = true;
        assert!(matches!(rx.read(&mut bytes), Err(Error::WouldBlock)), "neither the end nor an error");
        rx.waiter.nonblocking = false;
        let sender = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            send();
        });
        assert_eq!(rx.read(&mut bytes).unwrap(), 3);
        assert_eq!(&bytes[..3], b"new");
        assert_eq!(rx.read(&mut bytes).unwrap(), 0, "finished");
        sender.join().unwrap();
        drop(far);
    }

    #[test]
    fn hang_up_before_announced_ring_is_corrupt() {
        let (mut rx, send, far) = ahead_of_its_ring();
        let mut bytes = [0; 10];
        assert_eq!(rx.read(&mut bytes).unwrap(), 3);
        far.hang_up();
        assert!(matches!(rx.read(&mut bytes), Err(Error::Corrupt(_))));
        drop(send);
    }

    #[test]
    fn stopper_ends_sleep_of_reader_of_another_machine() {
        let (mut rx, send, far) = ahead_of_its_ring();
        assert_eq!(rx.read(&mut [0; 10]).unwrap(), 3);
        let stopper = rx.stopper().unwrap();
        let reader = std::thread::spawn(move || rx.read(&mut [0; 10]).is_err());
        rustix::net::shutdown(&stopper, rustix::net::Shutdown::Read).unwrap();
        assert!(reader.join().unwrap());
        drop((send, far));
    }

    #[test]
    fn first_byte_named_to_a_stream_is_corrupt_by_either_half() {
        let (own, _memory) = OwnRegion::create(&RegionOptions::endpoint(PAGE)).unwrap();
        let (peer, memory) = OwnRegion::create(&RegionOptions::endpoint(PAGE)).unwrap();
        let (a, b) = (link::pair().unwrap(), link::pair().unwrap());
        let links = vec![Link::bells(a.0).unwrap(), Link::bells(b.0).unwrap()];
        let (name, service) = (String::new(), String::new());
        let info = PeerInfo { name, domain_id: 0, epoch: 0, user: None, pid: None, at_home: false, service };
        let (side, directions, carrier, ring) = (Side::Connecting, Directions::BOTH, Carrier::None, (PAGE, PAGE));
        let parts =
            EndpointParts { side, directions, region: own, peer: None, links, info, id: 1, carrier, ring, base: 0 };
        let (tx, rx) = assemble(parts, &Options::default()).unwrap();
        // As the writing half does it, which does not read.
        tx.unwrap().core.endpoint().attach(&memory, 0, 5, peer.geometry()).unwrap();
        assert!(matches!(rx.unwrap().wait(1), Err(Error::Corrupt(Corrupt::BadPacket))));
    }
}
