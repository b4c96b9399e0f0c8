//! One end of a channel, as its writing and its reading half share it: this side's region, the peer's, and the way by which each side sends
//! the other memory.

use crate::arrivals::ArrivedRegion;
use crate::desk::{Mail, Mailbox, Parcel, Ticket};
use crate::domain::{self, ChannelRegistration, lock};
use crate::memory::{self, Place};
use crate::options::Options;
use crate::{Error, PeerInfo, Result};
use partywall_region::{OwnRegion, PeerRegion, RegionHandle, RegionOptions, pmem};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::{Geometry, PAGE, RegionKind};
use partywall_shm::wake::Fencing;
use rustix::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// A peer's endpoint region, once it has attached.
#[derive(Debug)]
pub(crate) struct PeerEndpoint {
    pub(crate) region: PeerRegion,
    pub(crate) fencing: Fencing,
    /// The byte of the stream that this side begins to read at (protocol B1).
    pub(crate) start: u64,
}

/// How the sides of a channel send each other memory.
#[derive(Debug)]
pub(crate) enum Carrier {
    /// The broker passes it on. When the last half is dropped, the broker receives `Closed`.
    Broker(ChannelRegistration),
    /// Both sides are in this process: the mailboxes of both, and the index of this side's.
    Pair(Arc<[Mutex<Mailbox>; 2]>, usize),
    /// No memory is sent.
    None,
}

/// A request of a writing half whose answer is asked for later.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PendingRequest {
    Broker(Ticket),
    /// It was granted at once.
    Granted,
}

/// One end of a channel.
#[derive(Debug)]
pub(crate) struct Endpoint {
    own: RegionHandle,
    own_flags: u32,
    peer: OnceLock<PeerEndpoint>,
    max_peer_ring: u64,
    /// The peer is on another machine: its region is in a window, and nowhere else.
    is_windowed: bool,
    info: PeerInfo,
    id: u64,
    carrier: Carrier,
    /// A half holds the lock while it takes the region out of the mailbox and attaches it. The other half's link may hang up
    /// meanwhile. Without the lock that half would find neither mail nor region, and take the peer for dead.
    arrival: Mutex<RegionArrival>,
    /// Further regions that this side has made.
    regions_made: AtomicU32,
}

/// What has become of the peer's region before it is attached.
#[derive(Debug, Default)]
struct RegionArrival {
    /// Why it cannot be used, if so: both halves end with this error, whichever found it out.
    wrong: Option<Corrupt>,
    /// It has come, and this process had no memory to map it.
    unmapped: Option<Parcel>,
}

impl Endpoint {
    /// An end whose peer has not attached. `is_windowed` says that the peer is on another machine.
    pub(crate) fn new(
        own: &OwnRegion,
        is_windowed: bool,
        info: PeerInfo,
        id: u64,
        carrier: Carrier,
        options: &Options,
    ) -> Self {
        Self {
            own: own.handle(),
            own_flags: own.flags(),
            peer: OnceLock::new(),
            max_peer_ring: options.max_peer_ring,
            is_windowed,
            info,
            id,
            carrier,
            arrival: Mutex::default(),
            regions_made: AtomicU32::new(0),
        }
    }

    /// How memory gets to the other side.
    pub(crate) fn carrier(&self) -> &Carrier {
        &self.carrier
    }

    /// A number for a further region of this side, greater than any before (protocol F1.1).
    pub(crate) fn next_region_number(&self) -> u32 {
        self.regions_made.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// Takes a region of the peer's that has been attached already.
    pub(crate) fn adopt(&self, region: PeerRegion) -> Result<()> {
        if region.geometry().ring_size() > self.max_peer_ring {
            return Err(Corrupt::BadRegion.into());
        }
        self.set_peer(region, 0);
        Ok(())
    }

    #[inline]
    pub(crate) fn own(&self) -> &RegionHandle {
        &self.own
    }

    #[inline]
    pub(crate) fn peer(&self) -> Option<&PeerEndpoint> {
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

    /// Makes a further region of this side: in separate memory, or in a place that the broker gives in the window to the peer. Returns
    /// where in the window that is, or 0, and the memory. Blocks until the broker has answered, at most ten seconds.
    pub(crate) fn make_further(&self, options: &RegionOptions) -> Result<(OwnRegion, u64, OwnedFd)> {
        match self.place_for(options.ring_size)? {
            Some(place) => Ok((memory::extension_at(&place, options)?, place.base, place.memory)),
            None => OwnRegion::create(options).map(|(region, memory)| (region, 0, memory)).map_err(Error::from),
        }
    }

    /// A place for a further region in the window to the peer; `None` if the peer is on this machine.
    pub(crate) fn place_for(&self, size: u64) -> Result<Option<Place>> {
        match &self.carrier {
            Carrier::Broker(registration) if self.is_windowed => {
                registration.room(&self.info.name, PAGE + size).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Verifies and maps a further region of the peer.
    pub(crate) fn attach_further(&self, arrived: &ArrivedRegion) -> Result<PeerRegion> {
        if self.is_windowed != (arrived.base != 0) {
            return Err(Corrupt::BadRegion.into());
        }
        Ok(pmem::attach(arrived.memory.as_fd(), arrived.base, RegionKind::Further, arrived.geometry)?)
    }

    /// Asks for a place for a larger ring in the window to the peer. Does not wait.
    pub(crate) fn ask_room(&self, size: u64) -> Result<PendingRequest> {
        match &self.carrier {
            Carrier::Broker(registration) => registration.ask_room(&self.info.name, size).map(PendingRequest::Broker),
            Carrier::Pair(..) | Carrier::None => Err(Error::Invalid("a channel without a broker has no window".into())),
        }
    }

    /// Has a ring passed on to the peer. Does not wait.
    pub(crate) fn ask_grow(&self, generation: u32, geometry: Geometry, memory: OwnedFd) -> Result<PendingRequest> {
        match &self.carrier {
            Carrier::Broker(registration) => {
                registration.ask_grow(generation, geometry, &memory).map(PendingRequest::Broker)
            }
            Carrier::Pair(boxes, mine) => {
                let parcel = Parcel { generation, start: 0, geometry, memory };
                match lock(&boxes[1 - mine]).put_ring(parcel) {
                    true => Ok(PendingRequest::Granted),
                    false => Err(Error::WouldBlock),
                }
            }
            Carrier::None => Err(Error::WouldBlock),
        }
    }

    /// Whether a ring that was passed on has been delivered; `None` if that is not known yet.
    pub(crate) fn is_delivered(&self, asked: PendingRequest) -> Option<Result<()>> {
        match (&self.carrier, asked) {
            (Carrier::Broker(registration), PendingRequest::Broker(ticket)) => {
                registration.answer(ticket).map(|answer| answer.map(drop))
            }
            _ => Some(Ok(())),
        }
    }

    /// The place that was asked for, once it has been given.
    pub(crate) fn place(&self, asked: PendingRequest) -> Option<Result<Place>> {
        match (&self.carrier, asked) {
            (Carrier::Broker(registration), PendingRequest::Broker(ticket)) => {
                registration.answer(ticket).map(|answer| answer.and_then(domain::place))
            }
            _ => Some(Err(Error::WouldBlock)),
        }
    }

    /// The answer to a request is not waited for any more.
    pub(crate) fn give_up(&self, asked: PendingRequest) {
        if let (Carrier::Broker(registration), PendingRequest::Broker(ticket)) = (&self.carrier, asked) {
            registration.give_up(ticket);
        }
    }

    /// Takes the peer's region if the broker has passed it on.
    pub(crate) fn look_for_region(&self) -> Result<()> {
        match &self.carrier {
            Carrier::Broker(registration) if self.peer.get().is_none() && !self.is_windowed => {
                let mut arrival = lock(&self.arrival);
                if let Some(wrong) = arrival.wrong {
                    return Err(wrong.into());
                }
                if self.peer.get().is_some() {
                    return Ok(());
                }
                let come = match arrival.unmapped.take() {
                    Some(parcel) => Ok(Some(parcel)),
                    None => parcel(registration.region()),
                };
                let (come, taken) = match come {
                    Ok(Some(parcel)) => {
                        let taken = self.attach(&parcel.memory, 0, parcel.start, parcel.geometry);
                        (Some(parcel), taken)
                    }
                    other => (None, other.map(drop)),
                };
                match &taken {
                    Ok(()) => {}
                    Err(Error::Corrupt(what)) => arrival.wrong = Some(*what),
                    Err(_) => arrival.unmapped = come,
                }
                taken
            }
            _ => Ok(()),
        }
    }

    /// Whether the peer's region has come and could not be mapped. No bell rings when it can be: the next call tries again.
    pub(crate) fn has_unmapped_region(&self) -> bool {
        self.peer.get().is_none() && lock(&self.arrival).unmapped.is_some()
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
        let _ = self.peer.set(PeerEndpoint { region, fencing, start });
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
