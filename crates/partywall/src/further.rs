//! Further regions of a channel: memory that one side writes and the other reads where it is (protocol F).
//!
//! ```text
//!   owner: Regions::add ----> broker ----> reader: Regions::next
//!          ChannelRegion                          PeerChannelRegion
//! ```
//! The broker passes on only regions of a kind that the reader takes, and counts them for both sides.

use crate::arrivals::{Allowance, ArrivedRegion, FurtherMail, HeldKey, take_message};
use crate::desk::Ticket;
use crate::domain::{ChannelRegistration, lock};
use crate::endpoint::{Carrier, Endpoint};
use crate::memory::Place;
use crate::{Error, Result};
use partywall_protocol::wire::{Located, Message, RegionReference, Side};
use partywall_region::{OwnRegion, PeerRegion, RegionOptions};
use partywall_shm::layout::{Geometry, RegionKind};
use partywall_shm::state::TxState;
use rustix::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

/// The further regions of a channel: memory of either side, in addition to the rings, which the other side reads in place.
///
/// A region has a *kind*, a number on which the two programs agree. A region arrives only if this side accepts its kind ([`Regions::take`]).
/// The handle can be cloned, and used on another thread than the stream. It does not keep the channel open.
///
/// ```
/// use partywall::{Options, Stream};
/// use std::io::{Read, Write};
///
/// const TABLE: u32 = 1;
///
/// let (mut client, mut server) = Stream::pair(&Options::default())?;
/// // The reader takes at most two tables at a time, of 1 MiB together.
/// server.regions().take(TABLE, 2, 1 << 20)?;
///
/// let mut table = client.regions().add(TABLE, 65536)?;
/// table.bytes_mut()[100..105].copy_from_slice(b"hello");
/// client.write_all(b"!")?; // A reader of this byte sees what was written before it.
///
/// server.read_exact(&mut [0])?;
/// let theirs = server.regions().next()?.expect("it was added before the byte was sent");
/// let mut hello = [0; 5];
/// theirs.read_at(100, &mut hello)?;
/// assert_eq!((theirs.kind(), &hello), (TABLE, b"hello"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Regions {
    endpoint: Weak<Endpoint>,
}

/// This side's end of a channel, held by a region in a window. The broker gives the region's place to another channel when both ends are gone.
#[derive(Debug)]
pub(crate) struct PlaceHold(#[expect(dead_code, reason = "it is held")] Arc<Endpoint>);

/// Why nothing can be done with the regions of a channel any more.
const ENDED: Error = Error::Closed("this side of the channel has ended");

impl Regions {
    pub(crate) fn of(endpoint: Option<&Arc<Endpoint>>) -> Self {
        Self { endpoint: endpoint.map(Arc::downgrade).unwrap_or_default() }
    }

    /// What a region at this byte of a window holds, for as long as its memory is used: this side's end of the channel (protocol F5.5). `None`
    /// for separate memory, which needs no hold.
    pub(crate) fn hold_place(&self, base: u64) -> Result<Option<PlaceHold>> {
        let in_window = (base != 0).then(|| self.endpoint());
        in_window.transpose().map(|endpoint| endpoint.map(PlaceHold))
    }

    fn endpoint(&self) -> Result<Arc<Endpoint>> {
        self.endpoint.upgrade().ok_or(ENDED)
    }

    /// Accepts regions of this kind from the peer from now on: at most `count` regions at the same time, and at most `bytes` bytes in all of them.
    /// With a `count` of 0, this side accepts no more regions of the kind; the regions that it has stay. A side accepts at most 8 kinds. Blocks until
    /// the broker has answered, at most ten seconds.
    ///
    /// # Errors
    /// [`Error::Refused`] if this side accepts 8 kinds already, or if the channel is a broadcast, which cannot have further regions.
    /// [`Error::System`] if the broker is gone. [`Error::Closed`] if this side of the channel has ended.
    pub fn take(&self, kind: u32, count: u8, bytes: u64) -> Result<()> {
        let endpoint = self.endpoint()?;
        let allowance = Allowance { count, bytes };
        match endpoint.carrier() {
            Carrier::Broker(registration) => {
                // Before the request: a region may come before its answer.
                let before = registration.further(|further| further.take(kind, allowance)).flatten();
                let message = take_message(registration.end(), kind, allowance);
                registration.request(&message, &[]).map(drop).inspect_err(|_| {
                    registration.further(|further| further.take(kind, before.unwrap_or(Allowance::NOTHING)));
                })
            }
            Carrier::Pair(boxes, mine) => {
                lock(&boxes[*mine]).further.take(kind, allowance);
                Ok(())
            }
            Carrier::None => Err(Error::Invalid("this channel has no further regions".into())),
        }
    }

    /// Makes a region of `size` bytes, all zeros, which the broker passes on to the peer. When this returns, the peer's [`Regions::next`] finds the
    /// region. A byte that this side then writes to the stream can therefore announce the region. Blocks until the broker has answered, at most ten
    /// seconds.
    ///
    /// # Errors
    /// [`Error::Refused`] with one of these codes:
    /// - [`Refusal::KindMismatch`](crate::Refusal::KindMismatch): the peer does not accept this kind.
    /// - [`Refusal::Quota`](crate::Refusal::Quota): the peer accepts no more regions of this kind, this side owns 8 regions of the channel, or the
    ///   quota of one of the two domains is used up.
    /// - [`Refusal::OutOfResources`](crate::Refusal::OutOfResources): the peer is on another machine, and `size` is more than a quarter of the free
    ///   memory in the window.
    ///
    /// [`Error::Invalid`] if `size` is not a power of two from 4096 to 2^30. [`Error::Memory`], [`Error::System`], [`Error::Closed`].
    pub fn add(&self, kind: u32, size: u64) -> Result<ChannelRegion> {
        let endpoint = self.endpoint()?;
        if !size.is_power_of_two() || Geometry::new(partywall_shm::layout::PAGE, size).is_err() {
            return Err(Error::Invalid(format!(
                "a region of {size} bytes: its size is a power of two from 4096 to 2^30"
            )));
        }
        let options = RegionOptions { kind: RegionKind::Further, ..RegionOptions::endpoint(size) };
        let (region, base, memory) = endpoint.make_further(&options)?;
        let number = endpoint.next_region_number();
        pass_on(&endpoint, number, kind, base, region.geometry(), memory).inspect_err(|_| {
            // A broker that ended before its answer may have passed the region on.
            TxState::Finished.store(&region.page().tx.control.state);
        })?;
        let place = self.hold_place(base)?;
        Ok(ChannelRegion { region, kind, number, endpoint: self.endpoint.clone(), _place: place })
    }

    /// The next region that the peer has added, in the order in which it added them; `None` if there is none now. If none has arrived in a virtual machine, this
    /// asks the broker whether one is in transit, and blocks until the broker has answered, at most ten seconds.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it differs from the broker's description; [`Error::Memory`] or [`Error::System`] if this process could not receive or map
    /// it. Only that region is lost. In a virtual machine, [`Error::System`] also if the broker is gone. [`Error::Closed`] if this side of the channel has ended.
    pub fn next(&self) -> Result<Option<PeerChannelRegion>> {
        let Some(arrived) = self.next_arrived()? else { return Ok(None) };
        let ArrivedRegion { number, kind, .. } = arrived;
        let place = self.hold_place(arrived.base)?;
        match self.endpoint()?.attach_further(&arrived) {
            Ok(region) => {
                Ok(Some(PeerChannelRegion { region, kind, number, endpoint: self.endpoint.clone(), _place: place }))
            }
            Err(e) => {
                self.give_up(false, number);
                Err(e)
            }
        }
    }

    /// The next region that the peer has added, not mapped yet. Its errors are those of [`Regions::next`].
    pub(crate) fn next_arrived(&self) -> Result<Option<ArrivedRegion>> {
        let endpoint = self.endpoint()?;
        let mut arrived = arrived(&endpoint)?;
        if arrived.is_none()
            && let Carrier::Broker(registration) = endpoint.carrier()
        {
            registration.catch_up()?;
            arrived = self::arrived(&endpoint)?;
        }
        Ok(arrived)
    }

    /// A place for a region with this many bytes of content in the window to the peer; `None` if the peer is on this machine, which takes
    /// separate memory. Blocks until the broker has answered, at most ten seconds.
    pub(crate) fn place_for(&self, size: u64) -> Result<Option<Place>> {
        self.endpoint()?.place_for(size)
    }

    /// Has memory that the caller has made passed on to the peer as a further region, and returns its number. `base` is where it lies in the
    /// window `memory`, and 0 for separate memory.
    pub(crate) fn add_memory(&self, kind: u32, geometry: Geometry, base: u64, memory: OwnedFd) -> Result<u32> {
        let endpoint = self.endpoint()?;
        let number = endpoint.next_region_number();
        pass_on(&endpoint, number, kind, base, geometry, memory)?;
        Ok(number)
    }

    /// Whether the peer is on another machine.
    pub(crate) fn is_between_machines(&self) -> Result<bool> {
        self.endpoint().map(|endpoint| endpoint.is_windowed())
    }

    /// A region stops counting for this side (protocol F5).
    pub(crate) fn give_up(&self, own: bool, number: u32) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            give_up(&endpoint, own, number);
        }
    }

    /// The channel, and which of its two sides this is, counted from 0.
    pub(crate) fn end(&self) -> Result<(u64, u8)> {
        let endpoint = self.endpoint()?;
        Ok(match endpoint.carrier() {
            Carrier::Broker(registration) => match registration.end() {
                (channel, Side::Connecting) => (channel, 0),
                (channel, Side::Accepting) => (channel, 1),
            },
            Carrier::Pair(_, mine) => (0, *mine as u8),
            Carrier::None => return Err(Error::Invalid("this channel has no further regions".into())),
        })
    }
}

/// Has a region passed on to the peer. Blocks until the broker has answered, at most ten seconds.
fn pass_on(endpoint: &Endpoint, number: u32, kind: u32, base: u64, geometry: Geometry, memory: OwnedFd) -> Result<()> {
    match endpoint.carrier() {
        Carrier::Broker(registration) => {
            let (channel, side) = registration.end();
            let region = RegionReference::new(Located::from_base(base), geometry);
            let message = Message::AddRegion { channel, side, number, kind, region };
            let (answered, _) = registration.request_with_ticket(&message, &[memory.as_fd()]).inspect_err(|e| {
                // Without an answer, the broker may have counted the region. If it has not, this has no effect (protocol F5).
                if !matches!(e, Error::Refused { .. }) {
                    registration.tell(Message::DropRegion { channel, side, own: true, number });
                }
            })?;
            note_own(registration, answered, number, kind, geometry.ring_size());
            Ok(())
        }
        Carrier::Pair(boxes, mine) => {
            lock(&boxes[1 - mine]).further.put(ArrivedRegion { number, kind, base, geometry, memory })
        }
        Carrier::None => Err(Error::Invalid("this channel has no further regions".into())),
    }
}

/// Notes a region that the broker has passed on. If the broker has restarted since its answer, the thread that joined again may have
/// reported this side's regions before the note, so this reports the region as well (protocol F6).
fn note_own(registration: &ChannelRegistration, answered: Ticket, number: u32, kind: u32, bytes: u64) {
    registration.further(|further| further.keep_own(number, kind, bytes));
    if registration.is_current(answered) {
        return;
    }
    let (channel, side) = registration.end();
    let message = Message::ReclaimRegion { channel, side, own: true, number, kind, bytes };
    // A broker that has not heard of the channel yet refuses this. It hears of the region after the channel then, by the note.
    if let Err(e) = registration.request(&message, &[]) {
        tracing::debug!(error = %e, "the new broker does not count a further region");
    }
}

/// A further region of this side: this process writes it, and the peer reads it in place.
///
/// Dropping it gives the region up. The peer's mapping stays valid, and the peer sees that the region was given up. Between machines, a region that
/// outlives its stream keeps this side of the channel open for the broker, and its place in the window.
///
/// ```
/// # use partywall::{Options, Stream};
/// # let (client, server) = Stream::pair(&Options::default())?;
/// # server.regions().take(7, 1, 4096)?;
/// let mut region = client.regions().add(7, 4096)?;
/// region.bytes_mut().fill(1);
/// assert_eq!((region.kind(), region.number(), region.size()), (7, 1, 4096));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ChannelRegion {
    region: OwnRegion,
    kind: u32,
    number: u32,
    endpoint: Weak<Endpoint>,
    /// Dropped after `region`.
    _place: Option<PlaceHold>,
}

impl ChannelRegion {
    /// The kind that it was added with.
    pub fn kind(&self) -> u32 {
        self.kind
    }

    /// The number that identifies it on both sides: greater than that of every earlier region of this side.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Bytes of its content.
    pub fn size(&self) -> u64 {
        self.region.geometry().ring_size()
    }

    /// Its content. The peer may read at any time and see half of a change: announce by the stream which bytes are complete.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let size = self.size();
        self.region.span(0, size).into_mut_slice()
    }
}

impl Drop for ChannelRegion {
    fn drop(&mut self) {
        TxState::Finished.store(&self.region.page().tx.control.state);
        if let Some(endpoint) = self.endpoint.upgrade() {
            give_up(&endpoint, true, self.number);
        }
    }
}

/// A further region of the peer, mapped read-only. Its memory stays valid until this is dropped, even if the peer ends.
///
/// The peer can change the content at any time. So it is read by copies: check the copy, and decide by the copy.
///
/// ```
/// # use partywall::{Options, Stream};
/// # let (client, server) = Stream::pair(&Options::default())?;
/// # server.regions().take(7, 1, 4096)?;
/// let region = client.regions().add(7, 4096)?;
/// let theirs = server.regions().next()?.expect("it has been added");
/// assert_eq!((theirs.kind(), theirs.number(), theirs.size()), (7, 1, 4096));
/// let mut last = [1; 2];
/// theirs.read_at(4094, &mut last)?;
/// assert_eq!(last, [0, 0]);
/// assert!(theirs.read_at(4095, &mut last).is_err(), "one byte too many");
///
/// assert!(!theirs.is_given_up()?);
/// drop(region);
/// assert!(theirs.is_given_up()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PeerChannelRegion {
    region: PeerRegion,
    kind: u32,
    number: u32,
    endpoint: Weak<Endpoint>,
    /// Dropped after `region`.
    _place: Option<PlaceHold>,
}

impl PeerChannelRegion {
    /// The kind that the peer added it with: one that this side takes.
    pub fn kind(&self) -> u32 {
        self.kind
    }

    /// The number that identifies it on both sides: greater than that of every earlier region of the peer.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Bytes of its content, as verified when it arrived.
    pub fn size(&self) -> u64 {
        self.region.geometry().ring_size()
    }

    /// Copies from byte `at` on, as many bytes as `to` has.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the region ends before that.
    pub fn read_at(&self, at: u64, to: &mut [u8]) -> Result<()> {
        let len = to.len() as u64;
        if at.checked_add(len).is_none_or(|end| end > self.size()) {
            let size = self.size();
            return Err(Error::Invalid(format!("{len} bytes from byte {at} on; the region has {size}")));
        }
        self.region.span(at, len).copy_to(to);
        Ok(())
    }

    /// Gives the region up, and waits until the broker has answered, at most ten seconds. When this returns, the peer can add another region
    /// in its place. Dropping the region also gives it up, and does not wait.
    ///
    /// ```
    /// # use partywall::{Options, Stream};
    /// # let (client, server) = Stream::pair(&Options::default())?;
    /// server.regions().take(7, 1, 4096)?;
    /// let first = client.regions().add(7, 4096)?;
    /// assert!(client.regions().add(7, 4096).is_err(), "the peer takes one at a time");
    /// server.regions().next()?.expect("it has been added").give_up()?;
    /// client.regions().add(7, 4096)?;
    /// # drop(first);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::System`] if the broker is gone. The region is given up nevertheless.
    pub fn give_up(self) -> Result<()> {
        let endpoint = self.endpoint.clone();
        drop(self);
        match endpoint.upgrade().as_deref().map(Endpoint::carrier) {
            Some(Carrier::Broker(registration)) => registration.settle(),
            _ => Ok(()),
        }
    }

    /// Whether the peer has given the region up. A peer that died has not: the stream reports its death.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the peer's state has no meaning.
    pub fn is_given_up(&self) -> Result<bool> {
        Ok(TxState::load(&self.region.page().tx.control.state)? != TxState::Open)
    }
}

impl Drop for PeerChannelRegion {
    fn drop(&mut self) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            give_up(&endpoint, false, self.number);
        }
    }
}

/// The next region that has arrived for this side. Unusable regions are given up.
fn arrived(endpoint: &Endpoint) -> Result<Option<ArrivedRegion>> {
    let look = |further: &mut FurtherMail| (further.take_unusable(), further.arrived());
    let (unusable, arrived) = match endpoint.carrier() {
        Carrier::Broker(registration) => registration.further(look).unwrap_or((Vec::new(), Ok(None))),
        Carrier::Pair(boxes, mine) => look(&mut lock(&boxes[*mine]).further),
        Carrier::None => (Vec::new(), Ok(None)),
    };
    for number in unusable {
        give_up(endpoint, false, number);
    }
    arrived
}

/// A region stops counting for this side (protocol F5).
fn give_up(endpoint: &Endpoint, own: bool, number: u32) {
    match endpoint.carrier() {
        Carrier::Broker(registration) => {
            let (channel, side) = registration.end();
            // Before the message: a session that joins again must not report a region to a broker that has had this message.
            registration.further(|further| further.forget(HeldKey { own, number }));
            registration.tell(Message::DropRegion { channel, side, own, number });
        }
        Carrier::Pair(boxes, mine) if !own => lock(&boxes[*mine]).further.forget(HeldKey { own, number }),
        Carrier::Pair(..) | Carrier::None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Domain, Refusal, Stream};
    use partywall_daemon::{Broker, Config};
    use std::path::Path;
    use std::time::{Duration, Instant};

    /// The kind that the reader takes of the owner, and the kind that the owner takes of the reader.
    const KIND: u32 = 1;
    const OF_READER: u32 = 2;
    const SIZE: u64 = 4096;

    fn joined(broker: &Path, name: &str) -> Domain {
        Domain::builder().name(name).broker(broker).join().unwrap()
    }

    /// Waits until a new broker has heard of the channel from both sides, and of all regions of the owner: the owner reports what it takes
    /// after them.
    fn await_reports(owner: &Stream, reader: &Stream) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while reader.regions().take(KIND, 100, 1 << 20).is_err() || reader.regions().add(OF_READER, SIZE).is_err() {
            assert!(Instant::now() < deadline, "the sides do not join again");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(owner.regions().next());
    }

    #[test]
    fn region_counts_if_broker_restarts_before_its_answer_is_noted() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config::new(folder.path().join("broker.sock"));
        let broker = Broker::start(&config).unwrap();
        let (web, db) = (joined(&config.socket, "web"), joined(&config.socket, "db"));
        let mut listener = db.bind("sql").unwrap();
        let owner = web.connect("db:sql").unwrap();
        let (reader, _) = listener.accept().unwrap();
        reader.regions().take(KIND, 100, 1 << 20).unwrap();
        owner.regions().take(OF_READER, 1, SIZE).unwrap();
        let mut regions: Vec<_> = (0..7).map(|_| owner.regions().add(KIND, SIZE).unwrap()).collect();

        // The steps of `add`, with a restart after the answer.
        let endpoint = owner.regions().endpoint().unwrap();
        let Carrier::Broker(registration) = endpoint.carrier() else { panic!("a channel of a broker") };
        let options = RegionOptions { kind: RegionKind::Further, ..RegionOptions::endpoint(SIZE) };
        let (region, base, memory) = endpoint.make_further(&options).unwrap();
        let number = endpoint.next_region_number();
        let ((channel, side), geometry) = (registration.end(), region.geometry());
        let reference = RegionReference::new(Located::from_base(base), geometry);
        let message = Message::AddRegion { channel, side, number, kind: KIND, region: reference };
        let (answered, _) = registration.request_with_ticket(&message, &[memory.as_fd()]).unwrap();
        drop(broker);
        let _broker = Broker::start(&config).unwrap();
        await_reports(&owner, &reader);
        note_own(registration, answered, number, KIND, SIZE);
        regions.push(ChannelRegion { region, kind: KIND, number, endpoint: Arc::downgrade(&endpoint), _place: None });

        let ninth = owner.regions().add(KIND, SIZE);
        assert!(matches!(ninth, Err(Error::Refused { code: Refusal::Quota, .. })), "{ninth:?}");
        // It counts once: when it is given up there is room for one.
        drop(regions.pop());
        regions.push(owner.regions().add(KIND, SIZE).unwrap());
        let tenth = owner.regions().add(KIND, SIZE);
        assert!(matches!(tenth, Err(Error::Refused { code: Refusal::Quota, .. })), "{tenth:?}");
    }
}
