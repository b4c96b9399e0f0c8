//! The peer's heap as this side sees it, and guarded views of bytes in it.
#![expect(unsafe_code, reason = "offers a reader that trusts its peer the peer's memory in place")]

use super::error::CallError;
use super::heap::{HEAP_KIND, MOST_SEGMENTS};
use super::heap_addresses::may_have;
use crate::domain::lock;
use crate::further::{PlaceHold, Regions};
use crate::{Error, Result};
use partywall_region::RegionError;
use partywall_region::segment::PeerSegment;
use partywall_shm::call::{CallBytes, INLINE, InlineBytes};
use partywall_shm::corrupt::Corrupt;
use rustix::fd::AsFd;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// One segment of the peer's heap.
#[derive(Debug)]
struct MappedSegment {
    memory: PeerSegment,
    /// Where the peer has it.
    address: u64,
    number: u32,
    regions: Regions,
    /// Dropped after `memory`.
    _place: Option<PlaceHold>,
}

impl Drop for MappedSegment {
    fn drop(&mut self) {
        self.regions.give_up(false, self.number);
    }
}

/// The peer's heap: all segments of it that the peer has announced.
#[derive(Debug, Clone)]
pub(crate) struct PeerHeap {
    regions: Regions,
    same_address: bool,
    segments: Arc<Mutex<Vec<Arc<MappedSegment>>>>,
}

impl PeerHeap {
    pub(crate) fn new(regions: Regions, same_address: bool) -> Self {
        Self { regions, same_address, segments: Arc::default() }
    }

    /// The peer has announced a segment (protocol K6.2). The broker has passed it on before.
    pub(crate) fn admit(&self, number: u32, address: u64, size: u64) -> Result<()> {
        let mut segments = lock(&self.segments);
        let end = address.checked_add(size).ok_or(Corrupt::BadRegion)?;
        let overlaps = |s: &Arc<MappedSegment>| s.address < end && address < s.address + s.memory.size();
        if segments.len() >= MOST_SEGMENTS || segments.iter().any(overlaps) {
            return Err(Corrupt::BadRegion.into());
        }
        let (channel, side) = self.regions.end()?;
        // Earlier numbers are of segments that the peer made and could not announce.
        let arrived = loop {
            let arrived = self.regions.next_arrived()?.ok_or(Corrupt::BadRegion)?;
            if arrived.number == number {
                break arrived;
            }
            self.regions.give_up(false, arrived.number);
        };
        // Between machines a segment lies in a window (protocol K6.5), and elsewhere it has separate memory.
        let is_in_window = arrived.base != 0;
        let is_expected = arrived.kind == HEAP_KIND && is_in_window == self.regions.is_between_machines()?;
        if !is_expected || arrived.geometry.ring_size() != size {
            self.regions.give_up(false, number);
            return Err(Corrupt::BadRegion.into());
        }
        let attach = |at| match arrived.base {
            0 => PeerSegment::attach(arrived.memory.as_fd(), arrived.geometry, at),
            base => PeerSegment::attach_in(arrived.memory.as_fd(), base, arrived.geometry, at),
        };
        // Elsewhere are the heaps of other channels, which a peer could keep from being mapped.
        let page = arrived.geometry.ring_offset();
        let wanted = Some(address).filter(|_| may_have(channel, 1 - side, address, end, page));
        let memory = match attach(wanted) {
            Err(RegionError::HeapAddress { .. }) if !self.same_address => attach(None),
            Ok(_) if wanted.is_none() && self.same_address => Err(RegionError::HeapAddress {
                address,
                user: "the peer, which has its heap where this channel's are not".into(),
            }),
            other => other,
        };
        let memory = memory.inspect_err(|_| self.regions.give_up(false, number)).map_err(Error::from)?;
        let place = self.regions.hold_place(arrived.base)?;
        let regions = self.regions.clone();
        segments.push(Arc::new(MappedSegment { memory, address, number, regions, _place: place }));
        Ok(())
    }

    /// `len` bytes that the peer has at `address`; `None` unless all of them are in one segment of its heap.
    pub(crate) fn view(&self, address: u64, len: u64) -> Option<PeerView> {
        let segments = lock(&self.segments);
        let segment = segments.iter().find(|s| address >= s.address && address - s.address <= s.memory.size())?;
        let at = address - segment.address;
        segment.memory.bytes(at, len)?;
        let len = usize::try_from(len).ok()?;
        Some(PeerView { bytes: ViewBytes::Mapped { segment: Arc::clone(segment), at, len } })
    }
}

/// Takes the peer's heap.
pub(crate) fn take_heap(regions: &Regions, bytes: u64) -> Result<()> {
    regions.take(HEAP_KIND, MOST_SEGMENTS as u8, bytes)
}

/// Bytes of a call or a reply, as this side sees them. They are read by copies, and each read is checked to lie in the peer's heap:
/// this is the *guarded* level of trust.
///
/// The peer can change bytes in its heap while they are read. So decide by one copy, and do not read twice.
///
/// A view can outlive its connection. Between machines, it then keeps the place in the window that the peer's heap has.
///
/// ```
/// # use partywall::rpc::{CallClient, CallServer};
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _server = CallServer::builder().method("echo", |call| Ok(call.args().to_vec().into())).bind(&web, "math")?;
/// # let client = CallClient::connect("web:math")?;
/// let reply = client.call("echo", b"some words")?;
/// let view = reply.view();
/// let mut word = [0; 5];
/// view.read_at(5, &mut word)?;
/// assert_eq!((view.len(), &word), (10, b"words"));
/// assert!(view.read_at(6, &mut word).is_err(), "one byte too many");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PeerView {
    bytes: ViewBytes,
}

#[derive(Clone)]
enum ViewBytes {
    Inline(InlineBytes, u64),
    Mapped { segment: Arc<MappedSegment>, at: u64, len: usize },
}

impl PeerView {
    /// The bytes of a record; `None` if they are not all in the peer's heap.
    #[inline]
    pub(crate) fn from_record(bytes: &CallBytes, heap: &PeerHeap) -> Option<Self> {
        match *bytes {
            CallBytes::Inline(bytes, len) => Some(Self { bytes: ViewBytes::Inline(bytes, len) }),
            CallBytes::Reference { address, len } => heap.view(address, len),
        }
    }

    /// The number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.bytes {
            ViewBytes::Inline(_, len) => *len as usize,
            ViewBytes::Mapped { len, .. } => *len,
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A view of `len` of the bytes, from byte `at` on; `None` unless they are all there.
    #[inline]
    pub(crate) fn part(&self, at: usize, len: usize) -> Option<Self> {
        at.checked_add(len).filter(|end| *end <= self.len())?;
        let bytes = match &self.bytes {
            ViewBytes::Inline(bytes, _) => {
                let mut part = [0; INLINE];
                part[..len].copy_from_slice(&bytes.0[at..at + len]);
                ViewBytes::Inline(InlineBytes(part), len as u64)
            }
            ViewBytes::Mapped { segment, at: from, .. } => {
                ViewBytes::Mapped { segment: Arc::clone(segment), at: from + at as u64, len }
            }
        };
        Some(Self { bytes })
    }

    /// Copies from byte `at` on, as many bytes as `to` has.
    ///
    /// # Errors
    /// [`CallError::BadPointer`] if the bytes end before that.
    #[inline]
    pub fn read_at(&self, at: usize, to: &mut [u8]) -> std::result::Result<(), CallError> {
        let end = at.checked_add(to.len()).filter(|end| *end <= self.len()).ok_or(CallError::BadPointer)?;
        match &self.bytes {
            ViewBytes::Inline(bytes, _) => to.copy_from_slice(&bytes.0[at..end]),
            ViewBytes::Mapped { segment, at: from, .. } => {
                let bytes = segment.memory.bytes(from + at as u64, to.len() as u64).ok_or(CallError::BadPointer)?;
                bytes.copy_to(to);
            }
        }
        Ok(())
    }

    /// The `N` bytes from byte `at` on.
    ///
    /// # Errors
    /// As [`PeerView::read_at`].
    #[inline]
    pub fn array<const N: usize>(&self, at: usize) -> std::result::Result<[u8; N], CallError> {
        let mut array = [0; N];
        self.read_at(at, &mut array)?;
        Ok(array)
    }

    /// A copy of all bytes. The peer chooses their number; if there is no memory for them, the process ends. [`PeerView::try_to_vec`] fails
    /// instead.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len()];
        // The view has as many bytes.
        let _ = self.read_at(0, &mut copy);
        copy
    }

    /// A copy of all bytes, for a program that continues if there is no memory for them.
    ///
    /// # Errors
    /// [`CallError::OutOfMemory`].
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("echo", |call| Ok(call.args().to_vec().into())).bind(&web, "math")?;
    /// # let client = CallClient::connect("web:math")?;
    /// assert_eq!(client.call("echo", b"some words")?.try_to_vec()?, b"some words");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_to_vec(&self) -> std::result::Result<Vec<u8>, CallError> {
        let mut copy = Vec::new();
        let no_memory = |_| CallError::OutOfMemory(format!("a copy of {} bytes of the peer's", self.len()));
        copy.try_reserve_exact(self.len()).map_err(no_memory)?;
        copy.resize(self.len(), 0);
        self.read_at(0, &mut copy)?;
        Ok(copy)
    }

    /// The difference between this process's address of the bytes and the peer's: 0 where both map the peer's heap at the same address, so
    /// that pointers in it can be followed as they are. Bytes that arrived in a record have no address: `None`.
    pub fn offset(&self) -> Option<i64> {
        match &self.bytes {
            ViewBytes::Inline(..) => None,
            ViewBytes::Mapped { segment, .. } => {
                Some(segment.memory.address().wrapping_sub(segment.address).cast_signed())
            }
        }
    }

    /// Writes some of the bytes to a file, at `offset`, by one system call that may write fewer of them. Returns how many.
    ///
    /// The kernel reads the peer's memory by its address, and this process does not. So a peer that changes the bytes meanwhile changes what
    /// the file gets, and nothing else.
    ///
    /// # Errors
    /// The error of `pwrite`; `EINVAL` for a range that the view does not have.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let file = std::sync::Arc::new(tempfile::tempfile()?);
    /// # let kept = std::sync::Arc::clone(&file);
    /// let _server = CallServer::builder().method("log", move |call| {
    ///     let written = call.args().write_to(0..100, &*file, 0).map_err(|e| partywall::rpc::CallError::application(5, &e.to_string()))?;
    ///     Ok((written as u64).to_le_bytes().into())
    /// }).bind(&web, "files")?;
    /// # let client = CallClient::connect("web:files")?;
    /// assert_eq!(u64::from_le_bytes(client.call("log", &[7; 100])?.array(0)?), 100);
    /// # assert_eq!(kept.metadata()?.len(), 100);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn write_to(&self, range: Range<usize>, file: impl AsFd, offset: u64) -> std::io::Result<usize> {
        // SAFETY: the slice is only passed to `pwrite`, which takes its address and length. The mapping lives as long as `self`, and the kernel
        // copes with bytes that change while it copies them. No reference to the bytes outlives this call.
        let bytes = unsafe { self.trusting() };
        let bytes = bytes.get(range).ok_or(rustix::io::Errno::INVAL)?;
        Ok(rustix::io::pwrite(file, bytes, offset)?)
    }

    /// The bytes in place: the *trusting* level of trust. No copy is made.
    ///
    /// # Safety
    /// The peer must not change these bytes while the slice is used. Nothing enforces this: a peer that is hostile, or has a bug, can change
    /// them at any time, and the behaviour of this process is then undefined. Use this only between programs that trust each other.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _server = CallServer::builder().method("sum", |call| {
    ///     // SAFETY: this program is its own client, and changes no arguments of a call under way.
    ///     let numbers = unsafe { call.args().trusting() };
    ///     let sum: u64 = numbers.iter().map(|byte| u64::from(*byte)).sum();
    ///     Ok(sum.to_le_bytes().into())
    /// }).bind(&web, "math")?;
    /// # let client = CallClient::connect("web:math")?;
    /// # assert_eq!(u64::from_le_bytes(client.call("sum", &[2; 100])?.array(0)?), 200);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub unsafe fn trusting(&self) -> &[u8] {
        match &self.bytes {
            ViewBytes::Inline(bytes, len) => &bytes.0[..*len as usize],
            ViewBytes::Mapped { segment, at, len } => match segment.memory.bytes(*at, *len as u64) {
                // SAFETY: the bytes are mapped as long as `self` keeps the segment, and stay as they are by the caller's promise.
                Some(bytes) => unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) },
                None => &[],
            },
        }
    }
}

impl fmt::Debug for PeerView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerView({} bytes)", self.len())
    }
}
