//! What the two halves of one endpoint share, and how they are put together.

use crate::desk::{Mail, Mailbox, Parcel, Ticket};
use crate::domain::{self, Registration, lock};
use crate::keeper::Watch;
use crate::options::Options;
use crate::rx::Rx;
use crate::tx::Tx;
use crate::{Error, PeerInfo, Result};
use partywall_protocol::wire::{Directions, Side};
use partywall_region::pmem;
use partywall_region::wait::DEFAULT_SPIN;
use partywall_region::{LATE, Link, OwnRegion, PeerRegion, RegionHandle, RegionOptions, link};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::{Geometry, PAGE, RegionKind};
use partywall_shm::sizing::Sizing;
use partywall_shm::wake::Fencing;
use rustix::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// A peer's endpoint region, once it has attached.
#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) region: PeerRegion,
    pub(crate) fencing: Fencing,
    /// The byte of the stream that this side begins to read at (protocol B1).
    pub(crate) start: u64,
}

/// How the sides of a channel send each other memory.
#[derive(Debug)]
pub(crate) enum Carrier {
    /// The broker passes it on. When the last half goes, it hears that the channel is closed.
    Broker(Registration),
    /// Both sides are in this process: the mailboxes of both, and which is this side's.
    Pair(Arc<[Mutex<Mailbox>; 2]>, usize),
    /// Nobody does.
    None,
}

/// A request of a writing half whose answer is asked for later.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Asked {
    Broker(Ticket),
    /// It has been granted already.
    Granted,
}

/// Shared by the halves of an endpoint.
#[derive(Debug)]
pub(crate) struct Shared {
    own: RegionHandle,
    own_flags: u32,
    peer: OnceLock<Attached>,
    max_peer_ring: u64,
    /// The peer is on another machine: its region is in a window, and nowhere else.
    is_windowed: bool,
    info: PeerInfo,
    id: u64,
    carrier: Carrier,
    /// What the peer gave as its region is none. Both halves end by it, whichever has found out.
    wrong: OnceLock<Corrupt>,
}

impl Shared {
    #[inline]
    pub(crate) fn own(&self) -> &RegionHandle {
        &self.own
    }

    #[inline]
    pub(crate) fn peer(&self) -> Option<&Attached> {
        self.peer.get()
    }

    pub(crate) fn info(&self) -> &PeerInfo {
        &self.info
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Maps a ring of the peer's, if with those that wait to be used it is not larger than this side allows.
    pub(crate) fn map(&self, memory: &OwnedFd, base: u64, geometry: Geometry, waiting: u64) -> Result<PeerRegion> {
        if self.is_windowed != (base != 0) || waiting + geometry.ring_size() > self.max_peer_ring {
            return Err(Corrupt::BadRegion.into());
        }
        Ok(pmem::attach(memory.as_fd(), base, RegionKind::Extension, geometry)?)
    }

    /// Asks for a place for a larger ring in the window to the peer. Does not wait.
    pub(crate) fn ask_room(&self, size: u64) -> Result<Asked> {
        match &self.carrier {
            Carrier::Broker(registration) => registration.ask_room(&self.info.name, size).map(Asked::Broker),
            Carrier::Pair(..) | Carrier::None => Err(Error::Invalid("a channel without a broker has no window".into())),
        }
    }

    /// Has a ring passed on to the peer. Does not wait.
    pub(crate) fn ask_grow(&self, generation: u32, geometry: Geometry, memory: OwnedFd) -> Result<Asked> {
        match &self.carrier {
            Carrier::Broker(registration) => registration.ask_grow(generation, geometry, &memory).map(Asked::Broker),
            Carrier::Pair(boxes, mine) => {
                let parcel = Parcel { generation, start: 0, geometry, memory };
                match lock(&boxes[1 - mine]).put_ring(parcel) {
                    true => Ok(Asked::Granted),
                    false => Err(Error::WouldBlock),
                }
            }
            Carrier::None => Err(Error::WouldBlock),
        }
    }

    /// Whether a ring that was passed on has been delivered; `None` if that is not known yet.
    pub(crate) fn is_delivered(&self, asked: Asked) -> Option<Result<()>> {
        match (&self.carrier, asked) {
            (Carrier::Broker(registration), Asked::Broker(ticket)) => {
                registration.answer(ticket).map(|answer| answer.map(drop))
            }
            _ => Some(Ok(())),
        }
    }

    /// The place that was asked for, once it has been given.
    pub(crate) fn place(&self, asked: Asked) -> Option<Result<Place>> {
        match (&self.carrier, asked) {
            (Carrier::Broker(registration), Asked::Broker(ticket)) => {
                registration.answer(ticket).map(|answer| answer.and_then(domain::place))
            }
            _ => Some(Err(Error::WouldBlock)),
        }
    }

    /// Takes the peer's region if the broker has passed it on.
    pub(crate) fn look_for_region(&self) -> Result<()> {
        match &self.carrier {
            Carrier::Broker(registration) if self.peer.get().is_none() && !self.is_windowed => {
                if let Some(wrong) = self.wrong.get() {
                    return Err((*wrong).into());
                }
                let taken = match parcel(registration.region()) {
                    Ok(Some(parcel)) => self.attach(&parcel.memory, 0, parcel.start, parcel.geometry),
                    other => other.map(drop),
                };
                if let Err(Error::Corrupt(what)) = &taken {
                    let _ = self.wrong.set(*what);
                }
                taken
            }
            _ => Ok(()),
        }
    }

    /// The peer's next ring, if it has been passed on.
    pub(crate) fn next_ring(&self) -> Result<Option<Parcel>> {
        parcel(match &self.carrier {
            Carrier::Broker(registration) => registration.ring(),
            Carrier::Pair(boxes, mine) => lock(&boxes[*mine]).take_ring(),
            Carrier::None => Mail::Nothing,
        })
    }

    /// Takes the peer's endpoint region (protocol A1). The first counts.
    pub(crate) fn attach(&self, memory: &OwnedFd, base: u64, start: u64, geometry: Geometry) -> Result<()> {
        if self.is_windowed != (base != 0) {
            return Err(Corrupt::BadRegion.into());
        }
        if self.peer.get().is_none() {
            if geometry.ring_size() > self.max_peer_ring {
                return Err(Corrupt::BadRegion.into());
            }
            self.set_peer(pmem::attach(memory.as_fd(), base, RegionKind::Endpoint, geometry)?, start);
        }
        Ok(())
    }

    /// Whether the rings of both sides are in windows, or each in a memfd.
    pub(crate) fn is_windowed(&self) -> bool {
        self.is_windowed
    }

    fn set_peer(&self, region: PeerRegion, start: u64) {
        let fencing = Fencing::agreed(self.own_flags, region.flags());
        // Where both halves race to attach, either result serves.
        let _ = self.peer.set(Attached { region, fencing, start });
    }
}

fn parcel(mail: Mail) -> Result<Option<Parcel>> {
    match mail {
        Mail::Nothing => Ok(None),
        Mail::Memory(parcel) => Ok(Some(parcel)),
        Mail::Corrupt => Err(Corrupt::BadPacket.into()),
        Mail::Lost => {
            let full = std::io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
            Err(Error::system("take the peer's memory", full))
        }
    }
}

/// Everything an endpoint is made of, before it is one.
#[derive(Debug)]
pub(crate) struct Parts {
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

/// A place in a window for this side's region (protocol G4).
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) memory: OwnedFd,
    pub(crate) base: u64,
}

/// Which direction a side writes.
pub(crate) fn writes(side: Side) -> Directions {
    match side {
        Side::Connecting => Directions::FORWARD,
        Side::Accepting => Directions::REVERSE,
    }
}

/// Makes the endpoint region of a side. One that does not write reserves no ring.
pub(crate) fn endpoint(
    side: Side,
    directions: Directions,
    options: &Options,
    ring: u64,
    epoch: u64,
) -> Result<(OwnRegion, OwnedFd)> {
    let ring_size = if directions.contains(writes(side)) { ring } else { 0 };
    let options = RegionOptions { huge_pages: options.huge_pages, epoch, ..RegionOptions::endpoint(ring_size) };
    Ok(OwnRegion::create(&options)?)
}

/// What a ring in a window begins with at the most. One that is too small to be fast while both sides wait for each other by way of
/// the host would never be found worth growing.
const WINDOW_RING: u64 = 1 << 20;

/// Smallest and largest size of a ring in a window, where those are its sizes elsewhere.
pub(crate) fn window_ring(ring: (u64, u64)) -> (u64, u64) {
    (ring.1.min(WINDOW_RING).max(ring.0), ring.1)
}

/// Bytes of the region that a side needs.
pub(crate) fn region_size(side: Side, directions: Directions, ring: u64) -> u64 {
    PAGE + if directions.contains(writes(side)) { ring } else { 0 }
}

/// Makes a ring in a window, to go on in.
pub(crate) fn extension_at(place: &Place, options: &RegionOptions) -> Result<OwnRegion> {
    Ok(pmem::received(place.memory.as_fd())?.create(place.base, options)?)
}

/// Makes the endpoint region of a side in a window.
pub(crate) fn endpoint_at(
    place: &Place,
    side: Side,
    directions: Directions,
    ring: u64,
    epoch: u64,
) -> Result<OwnRegion> {
    let ring_size = if directions.contains(writes(side)) { ring } else { 0 };
    let options = RegionOptions { epoch, ..RegionOptions::endpoint(ring_size) };
    Ok(pmem::received(place.memory.as_fd())?.create(place.base, &options)?)
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
pub(crate) fn assemble(parts: Parts, options: &Options) -> Result<(Option<Tx>, Option<Rx>)> {
    let Parts { side, directions, region, peer, links, info, id, carrier, ring, base } = parts;
    let spin = spin_for(base != 0, options.spin);
    let options = &Options { spin, ..options.clone() };
    let shared = Arc::new(Shared {
        own: region.handle(),
        own_flags: region.flags(),
        peer: OnceLock::new(),
        max_peer_ring: options.max_peer_ring,
        is_windowed: base != 0,
        info,
        id,
        carrier,
        wrong: OnceLock::new(),
    });
    if let Some(peer) = peer {
        if peer.geometry().ring_size() > options.max_peer_ring {
            return Err(Corrupt::BadRegion.into());
        }
        shared.set_peer(peer, 0);
    }
    let mut links = links.into_iter();
    let mut halves = (None, None);
    let mut region = Some(region);
    for direction in [Directions::FORWARD, Directions::REVERSE] {
        if !directions.contains(direction) {
            continue;
        }
        let link = links.next().ok_or_else(|| Error::BrokerConfused("a channel with a link missing".into()))?;
        let watch = Watch::link(link.life())?;
        if direction == writes(side) {
            if let Some(region) = region.take() {
                let sizing = if base == 0 { Sizing::new(ring.0, ring.1) } else { Sizing::rising(ring.0, ring.1) };
                halves.0 = Some(Tx::new(Arc::clone(&shared), region, link, watch, sizing, options));
            }
        } else {
            halves.1 = Some(Rx::new(Arc::clone(&shared), link, watch, options.spin));
        }
    }
    Ok(halves)
}

/// One end of a channel: its writing half, its reading half.
pub(crate) type Endpoint = (Option<Tx>, Option<Rx>);

/// Two ends of one channel within this process, without a broker.
pub(crate) fn pair(options: &Options) -> Result<(Endpoint, Endpoint)> {
    let directions = if options.one_way { Directions::FORWARD } else { Directions::BOTH };
    let ring = options.ring_bounds(partywall_shm::layout::MAX_RING)?;
    let mut links: (Vec<Link>, Vec<Link>) = (Vec::new(), Vec::new());
    for _ in 0..directions.count() {
        let (a, b) = link::pair().map_err(|e| Error::system("make a link", e))?;
        links.0.push(Link::bells(a)?);
        links.1.push(Link::bells(b)?);
    }
    let (region_a, memory_a) = endpoint(Side::Connecting, directions, options, ring.0, 0)?;
    let (region_b, memory_b) = endpoint(Side::Accepting, directions, options, ring.0, 0)?;
    let peer_a = PeerRegion::attach(memory_a.as_fd(), RegionKind::Endpoint, region_a.geometry())?;
    let peer_b = PeerRegion::attach(memory_b.as_fd(), RegionKind::Endpoint, region_b.geometry())?;
    let boxes: Arc<[Mutex<Mailbox>; 2]> = Arc::default();
    let parts = |side, region, peer, links, mine| {
        let carrier = Carrier::Pair(Arc::clone(&boxes), mine);
        let info = PeerInfo {
            name: String::new(),
            domain_id: 0,
            epoch: 0,
            uid: None,
            pid: Some(std::process::id()),
            service: String::new(),
        };
        Parts { side, directions, region, peer: Some(peer), links, info, id: 0, carrier, ring, base: 0 }
    };
    let a = assemble(parts(Side::Connecting, region_a, peer_b, links.0, 0), options)?;
    let b = assemble(parts(Side::Accepting, region_b, peer_a, links.1, 1), options)?;
    Ok((a, b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_region::pmem::{WindowFile, WindowSpec};
    use partywall_shm::producer::Producer;
    use partywall_shm::sync::Peer;

    /// A reader of a ring in a window whose writer has gone on to another, which is still in transit; and how it comes.
    fn ahead_of_its_ring() -> (Rx, impl FnOnce() + Send, Link) {
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
        let info = PeerInfo { name, domain_id: 0, epoch: 0, uid: None, pid: None, service };
        let (links, carrier) = (vec![Link::Socket(near)], Carrier::None);
        let (region, peer, ring_size) = (own, Some(peer), (PAGE, PAGE));
        let parts = Parts { side, directions, region, peer, links, info, id: 1, carrier, ring: ring_size, base };
        let rx = assemble(parts, &Options::default()).unwrap().1.unwrap();
        let (far, again) = (Link::Socket(far.try_clone().unwrap()), Link::Socket(far));
        let send = move || {
            again.attach_at(second, 0, 1, next.geometry(), file.as_fd()).unwrap();
            drop(ring);
        };
        (rx, send, far)
    }

    #[test]
    fn a_ring_from_another_machine_is_waited_for() {
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
    fn a_ring_that_never_comes_is_the_peers_fault() {
        let (mut rx, send, far) = ahead_of_its_ring();
        let mut bytes = [0; 10];
        assert_eq!(rx.read(&mut bytes).unwrap(), 3);
        far.hang_up();
        assert!(matches!(rx.read(&mut bytes), Err(Error::Corrupt(_))));
        drop(send);
    }
}
