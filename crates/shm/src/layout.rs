//! The layout of a region (protocol M3, M4): one page that says everything but the bytes, and then the bytes.
//!
//! ```text
//!      0 +----------------------+
//!        | header               |  written once by the owner; `version` last
//!     64 +----------------------+ \
//!        | tx cursor: tail      |  |
//!    128 +----------------------+  | written by the owner's producing half,
//!        | tx control           |  | read by the peer's consuming half
//!    192 +----------------------+  |
//!        | tx counters          |  |
//!    256 +----------------------+ <
//!        | rx cursor: head      |  |
//!    320 +----------------------+  | written by the owner's consuming half,
//!        | rx control           |  | read by the peer's producing half
//!    384 +----------------------+  |
//!        | rx counters          |  |
//!    448 +----------------------+ /
//!        | tx path              |  only in regions of socket connections: by which way the bytes of the stream go
//!    512 +----------------------+  (written by the owner's producing half, and by its consuming half)
//!        | rx path              |
//!    576 +----------------------+
//!        | unused               |
//!   4096 +----------------------+  ring_offset (2 MiB with huge pages)
//!        | ring_size bytes      |  mapped twice back to back, so that every
//!        |                      |  span of up to ring_size is contiguous
//!        +----------------------+
//! ```
//!
//! Each line of 64 bytes has one writing thread. The cursors move with every operation and stand alone; the control
//! lines change only when a half sleeps, closes or changes its ring, so that reading them costs nothing while both
//! sides are busy.
//!
//! Each structure is made of one's [`Own`] words, which is what its name alone means, or of a [`Peer`](crate::sync::Peer)'s,
//! which have no store.

use crate::counters::Counters;
use crate::sync::{Access, AtomicU32, AtomicU64, Load, Ordering, Own, load_acquire_u32};
use crate::wake::Fencing;

/// `PARTYWAL`, little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PARTYWAL");
/// The layout that this code reads and writes.
pub const VERSION: u32 = 3;
/// Bytes of the control page, and the ring's offset without huge pages.
pub const PAGE: u64 = 4096;
/// The ring's offset with huge pages.
pub const HUGE_PAGE: u64 = 2 << 20;
/// The smallest ring.
pub const MIN_RING: u64 = 4096;
/// The largest ring.
pub const MAX_RING: u64 = 1 << 30;

/// The purpose of a region (header word `kind`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum RegionKind {
    /// An endpoint of a channel: control page in use.
    Endpoint = 0,
    /// A further ring for an endpoint whose ring changed its size: only header and ring in use.
    Extension = 1,
    /// A side of a socket connection, whose bytes go by TCP or by the ring: path lines in use.
    Socket = 2,
    /// A further region of a channel (protocol F): header, tx state and ring bytes in use.
    Further = 3,
}

/// Header flags (protocol M5).
pub mod flags {
    /// The owner issues an expedited membarrier before it sleeps.
    pub const ASYMMETRIC: u32 = 1;
    /// The region is made of huge pages.
    pub const HUGE_PAGES: u32 = 2;
    /// The ring has many readers.
    pub const BROADCAST: u32 = 4;
    /// The writer of a ring with many readers overruns the slow ones (protocol B4).
    pub const OVERRUNS: u32 = 8;
}

impl Fencing {
    /// How two regions fence, given the flags of both headers: asymmetric only if both are (protocol W4).
    pub fn agreed(a: u32, b: u32) -> Self {
        if a & b & flags::ASYMMETRIC != 0 { Self::Asymmetric } else { Self::Symmetric }
    }
}

/// Where the ring is and how large: fixed at attach, kept in private memory, never re-read (protocol M6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    ring_offset: u64,
    ring_size: u64,
}

/// Why two numbers are no [`Geometry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadGeometry;

impl core::fmt::Display for BadGeometry {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("ring size must be 0 or a power of two from 4096 to 2^30, at offset 4096 or 2 MiB")
    }
}

impl core::error::Error for BadGeometry {}

impl Geometry {
    /// Checks the numbers against protocol M3.
    pub const fn new(ring_offset: u64, ring_size: u64) -> Result<Self, BadGeometry> {
        let offset_ok = ring_offset == PAGE || ring_offset == HUGE_PAGE;
        let size_ok = ring_size == 0 || (ring_size.is_power_of_two() && ring_size >= MIN_RING && ring_size <= MAX_RING);
        // A mapping in huge pages moves in steps of a huge page.
        let steps_ok = ring_offset == PAGE || ring_size.is_multiple_of(HUGE_PAGE);
        if offset_ok && size_ok && steps_ok { Ok(Self { ring_offset, ring_size }) } else { Err(BadGeometry) }
    }

    /// The shape of a region whose content is not a ring, and of any number of whole pages (protocol F1.6).
    pub const fn of_content(content_offset: u64, size: u64) -> Result<Self, BadGeometry> {
        let offset_ok = content_offset == PAGE || content_offset == HUGE_PAGE;
        let size_ok = size > 0 && size <= MAX_RING && size.is_multiple_of(content_offset);
        if offset_ok && size_ok { Ok(Self { ring_offset: content_offset, ring_size: size }) } else { Err(BadGeometry) }
    }

    /// Whether the content can be a ring: positions in it are found with a mask.
    pub const fn can_be_ring(self) -> bool {
        self.ring_size == 0 || self.ring_size.is_power_of_two()
    }

    /// Offset of the ring in the region, in bytes.
    pub const fn ring_offset(self) -> u64 {
        self.ring_offset
    }

    /// Size of the ring in bytes; 0 for an endpoint that only reads.
    pub const fn ring_size(self) -> u64 {
        self.ring_size
    }

    /// Size of the whole region in bytes.
    pub const fn region_size(self) -> u64 {
        self.ring_offset + self.ring_size
    }
}

/// The first line: the maker of the region, and its shape.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RegionHeader<A: Access = Own> {
    /// [`MAGIC`].
    pub magic: A::U64,
    /// [`VERSION`], stored last: non-zero means the region is ready.
    pub version: A::U32,
    /// A [`RegionKind`].
    pub kind: A::U32,
    /// As [`Geometry::ring_offset`].
    pub ring_offset: A::U64,
    /// As [`Geometry::ring_size`].
    pub ring_size: A::U64,
    /// A set of [`flags`].
    pub flags: A::U32,
    /// The owner's process, for people to read; nothing depends on it.
    pub pid: A::U32,
    /// The owner domain's epoch, for people to read; nothing depends on it.
    pub epoch: A::U64,
}

impl RegionHeader {
    /// Writes the header once; `version` last, with release, so that a reader that sees it sees the rest.
    pub fn write(&self, kind: RegionKind, geometry: Geometry, flags: u32, pid: u32, epoch: u64) {
        self.magic.store(MAGIC, Ordering::Relaxed);
        self.kind.store(kind as u32, Ordering::Relaxed);
        self.ring_offset.store(geometry.ring_offset(), Ordering::Relaxed);
        self.ring_size.store(geometry.ring_size(), Ordering::Relaxed);
        self.flags.store(flags, Ordering::Relaxed);
        self.pid.store(pid, Ordering::Relaxed);
        self.epoch.store(epoch, Ordering::Relaxed);
        // EDGE header: releases the fields of the header; acquired in `RegionHeader::check`.
        self.version.store(VERSION, Ordering::Release);
    }
}

impl<A: Access> RegionHeader<A> {
    /// Loads the header once and checks it against what was told over a trusted path (protocol M6); returns the flags.
    pub fn check(&self, kind: RegionKind, geometry: Geometry) -> Result<u32, crate::corrupt::Corrupt> {
        // EDGE header: acquires from the peer's `RegionHeader::write`.
        let version = load_acquire_u32(&self.version);
        let told = (
            self.magic.load(Ordering::Relaxed),
            self.kind.load(Ordering::Relaxed),
            self.ring_offset.load(Ordering::Relaxed),
            self.ring_size.load(Ordering::Relaxed),
        );
        let agreed = (MAGIC, kind as u32, geometry.ring_offset(), geometry.ring_size());
        if version == VERSION && told == agreed {
            Ok(self.flags.load(Ordering::Relaxed))
        } else {
            Err(crate::corrupt::Corrupt::BadHeader)
        }
    }
}

/// The producer's cursor, alone on its line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct TxCursor<A: Access = Own> {
    /// Bytes ever committed.
    pub tail: A::U64,
}

/// The words of a producing half besides its cursor.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct TxControl<A: Access = Own> {
    /// Ring me when `head` passes this (protocol W1).
    pub space_wanted: A::U64,
    /// A [`crate::state::TxState`].
    pub state: A::U32,
    /// The generation of the ring that holds the newest bytes (protocol A2).
    pub generation: A::U32,
    /// The byte from which `generation` is in use (protocol A2).
    pub switch_at: A::U64,
    /// The tail I am about to have, stored before bytes are overwritten (protocol B3).
    pub intent: A::U64,
    /// The core I last ran on, plus 1; 0 if unknown or not of this machine (protocol W6).
    pub cpu: A::U32,
    /// Bytes of the ring that the newest bytes are in, for people to read (protocol M7).
    pub ring_size: A::U64,
    /// Where the newest record begins, in a ring with many readers. Stored after the tail behind that record (protocol B4).
    pub newest: A::U64,
}

/// All lines of a producing half.
#[derive(Debug)]
#[repr(C)]
pub struct TxHalf<A: Access = Own> {
    /// Moves with every commit.
    pub cursor: TxCursor<A>,
    /// Changes rarely.
    pub control: TxControl<A>,
    /// For people to read.
    pub counters: Counters<A>,
}

/// The consumer's cursor, alone on its line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RxCursor<A: Access = Own> {
    /// Bytes ever released.
    pub head: A::U64,
}

/// The words of a consuming half besides its cursor.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RxControl<A: Access = Own> {
    /// Ring me when `tail` passes this (protocol W1).
    pub data_wanted: A::U64,
    /// A [`crate::state::RxState`].
    pub state: A::U32,
    /// The core I last ran on, plus 1; 0 if unknown or not of this machine (protocol W6).
    pub cpu: A::U32,
}

/// All lines of a consuming half.
#[derive(Debug)]
#[repr(C)]
pub struct RxHalf<A: Access = Own> {
    /// Moves with every release.
    pub cursor: RxCursor<A>,
    /// Changes rarely.
    pub control: RxControl<A>,
    /// For people to read.
    pub counters: Counters<A>,
}

/// The first page of a region.
#[derive(Debug)]
#[repr(C)]
pub struct ControlPage<A: Access = Own> {
    /// The maker and the shape of the region.
    pub header: RegionHeader<A>,
    /// The owner's producing half.
    pub tx: TxHalf<A>,
    /// The owner's consuming half.
    pub rx: RxHalf<A>,
}

/// The route of a socket connection's bytes (TCP or ring), as their sender publishes it (protocol T).
#[derive(Debug)]
#[repr(C, align(64))]
pub struct TxPath<A: Access = Own> {
    /// The byte of the stream, counted over both ways, from which the latest switch is in force.
    pub switched_at: A::U64,
    /// How often the way has changed; odd means that the ring is in use. Stored last.
    pub switches: A::U32,
    /// How many connections its process had ended when it last sent a byte here (protocol T17). Stored before the tail.
    pub ends: A::U32,
    /// The byte of the ring from which on bytes are held back, plus 1; 0 if there is none (protocol T16). Stored before the tail of the first such byte.
    pub held: A::U64,
}

/// How far their receiver has followed (protocol T).
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RxPath<A: Access = Own> {
    /// The peer's `switches` that this receiver has passed.
    pub seen: A::U32,
    /// A set of [`path_flags`].
    pub flags: A::U32,
    /// The number of the sleep that the wish for data belongs to, if one bell is enough for all wishes with that number; otherwise 0
    /// (protocol T11).
    pub sleep: A::U64,
}

/// The requests of a receiver to its peer (protocol T).
pub mod path_flags {
    /// I look at the ring and at my link before I sleep: you may use the ring.
    pub const WATCHING: u32 = 1;
    /// Go back to TCP when you can, and stay there while this is set.
    pub const WANT_TCP: u32 = 2;
    /// I have left the ring, permanently, at my head: what lies behind it is to be sent once more, by TCP. Only with [`WANT_TCP`].
    pub const LEFT: u32 = 4;
    /// The bell is lost, and I send by TCP alone from now on: once you have read what is in the ring, you need not look at my region any
    /// more. Only with [`WANT_TCP`].
    pub const TCP_ONLY: u32 = 8;
}

/// The first page of a region of a socket connection (protocol T7).
#[derive(Debug)]
#[repr(C)]
pub struct SocketPage<A: Access = Own> {
    /// As of every endpoint.
    pub control: ControlPage<A>,
    /// The way of what the owner sends.
    pub tx_path: TxPath<A>,
    /// The way of what the owner receives.
    pub rx_path: RxPath<A>,
}

impl TxPath {
    /// On TCP from the first byte.
    pub fn new() -> Self {
        Self {
            switched_at: AtomicU64::new(0),
            switches: AtomicU32::new(0),
            ends: AtomicU32::new(0),
            held: AtomicU64::new(0),
        }
    }
}

impl Default for TxPath {
    fn default() -> Self {
        Self::new()
    }
}

impl RxPath {
    /// Has followed nowhere and asks for nothing.
    pub fn new() -> Self {
        Self { seen: AtomicU32::new(0), flags: AtomicU32::new(0), sleep: AtomicU64::new(0) }
    }
}

impl Default for RxPath {
    fn default() -> Self {
        Self::new()
    }
}

impl TxHalf {
    /// A half that has written nothing and sleeps on nothing.
    pub fn new() -> Self {
        Self {
            cursor: TxCursor { tail: AtomicU64::new(0) },
            control: TxControl {
                space_wanted: AtomicU64::new(crate::wake::AWAKE),
                state: AtomicU32::new(0),
                generation: AtomicU32::new(0),
                switch_at: AtomicU64::new(0),
                intent: AtomicU64::new(0),
                cpu: AtomicU32::new(0),
                ring_size: AtomicU64::new(0),
                newest: AtomicU64::new(0),
            },
            counters: Counters::new(),
        }
    }
}

impl Default for TxHalf {
    fn default() -> Self {
        Self::new()
    }
}

impl RxHalf {
    /// A half that has read nothing and sleeps on nothing.
    pub fn new() -> Self {
        Self {
            cursor: RxCursor { head: AtomicU64::new(0) },
            control: RxControl {
                data_wanted: AtomicU64::new(crate::wake::AWAKE),
                state: AtomicU32::new(0),
                cpu: AtomicU32::new(0),
            },
            counters: Counters::new(),
        }
    }
}

impl Default for RxHalf {
    fn default() -> Self {
        Self::new()
    }
}

impl ControlPage {
    /// Turns a zeroed page (as a fresh region has) into one that states the ring's size and that no half sleeps.
    pub fn awaken(&self, geometry: Geometry) {
        self.tx.control.ring_size.store(geometry.ring_size(), Ordering::Relaxed);
        self.tx.control.space_wanted.store(crate::wake::AWAKE, Ordering::Relaxed);
        self.rx.control.data_wanted.store(crate::wake::AWAKE, Ordering::Relaxed);
    }
}

#[cfg(not(loom))]
mod asserts {
    use super::*;
    use core::mem::{align_of, offset_of, size_of};

    const _: () = assert!(size_of::<RegionHeader>() == 64);
    const _: () = assert!(offset_of!(RegionHeader, version) == 8 && offset_of!(RegionHeader, kind) == 12);
    const _: () = assert!(offset_of!(RegionHeader, ring_offset) == 16 && offset_of!(RegionHeader, ring_size) == 24);
    const _: () = assert!(offset_of!(RegionHeader, flags) == 32 && offset_of!(RegionHeader, epoch) == 40);
    const _: () = assert!(offset_of!(TxControl, state) == 8 && offset_of!(TxControl, generation) == 12);
    const _: () = assert!(offset_of!(TxControl, switch_at) == 16 && offset_of!(TxControl, intent) == 24);
    const _: () = assert!(offset_of!(TxControl, cpu) == 32 && offset_of!(RxControl, cpu) == 12);
    const _: () = assert!(offset_of!(TxControl, ring_size) == 40 && offset_of!(RxControl, state) == 8);
    const _: () = assert!(offset_of!(TxControl, newest) == 48);
    const _: () = assert!(size_of::<TxHalf>() == 192 && size_of::<RxHalf>() == 192);
    const _: () = assert!(offset_of!(TxHalf, control) == 64 && offset_of!(TxHalf, counters) == 128);
    const _: () = assert!(offset_of!(ControlPage, tx) == 64 && offset_of!(ControlPage, rx) == 256);
    const _: () = assert!(size_of::<ControlPage<crate::sync::Peer>>() == size_of::<ControlPage>());
    const _: () = assert!(align_of::<ControlPage<crate::sync::Peer>>() == align_of::<ControlPage>());
    const _: () = assert!(offset_of!(TxPath, switches) == 8 && offset_of!(RxPath, flags) == 4);
    const _: () = assert!(offset_of!(TxPath, ends) == 12 && offset_of!(TxPath, held) == 16);
    const _: () = assert!(offset_of!(RxPath, sleep) == 8);
    const _: () = assert!(offset_of!(SocketPage, tx_path) == 448 && offset_of!(SocketPage, rx_path) == 512);
    const _: () = assert!(size_of::<SocketPage>() == 576 && size_of::<SocketPage>() <= PAGE as usize);
    const _: () = assert!(size_of::<SocketPage<crate::sync::Peer>>() == size_of::<SocketPage>());
    const _: () = assert!(size_of::<ControlPage>() == 448 && size_of::<ControlPage>() <= PAGE as usize);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn geometry_rejects_sizes_outside_protocol() {
        for size in [0, 4096, 8192, 1 << 20, MAX_RING] {
            assert!(Geometry::new(PAGE, size).is_ok(), "{size}");
        }
        for size in [1, 2048, 4097, 12288, MAX_RING * 2, u64::MAX] {
            assert!(Geometry::new(PAGE, size).is_err(), "{size}");
        }
        assert!(Geometry::new(0, 4096).is_err() && Geometry::new(8192, 4096).is_err());
        assert!(Geometry::new(HUGE_PAGE, HUGE_PAGE).is_ok() && Geometry::new(HUGE_PAGE, 4096).is_err());
        assert!(Geometry::of_content(PAGE, 3 * PAGE).is_ok_and(|it| !it.can_be_ring()));
        assert!(Geometry::of_content(HUGE_PAGE, 3 * HUGE_PAGE).is_ok() && Geometry::new(PAGE, 3 * PAGE).is_err());
        for (offset, size) in [(PAGE, 0), (PAGE, 4097), (PAGE, MAX_RING + PAGE), (HUGE_PAGE, PAGE), (8192, 8192)] {
            assert!(Geometry::of_content(offset, size).is_err(), "{size} at {offset}");
        }
    }

    #[test]
    fn region_with_any_wrong_header_word_is_refused() {
        let page = ControlPage {
            header: RegionHeader {
                magic: AtomicU64::new(0),
                version: AtomicU32::new(0),
                kind: AtomicU32::new(0),
                ring_offset: AtomicU64::new(0),
                ring_size: AtomicU64::new(0),
                flags: AtomicU32::new(0),
                pid: AtomicU32::new(0),
                epoch: AtomicU64::new(0),
            },
            tx: TxHalf::new(),
            rx: RxHalf::new(),
        };
        let g = Geometry::new(PAGE, 8192).unwrap();
        let h = &page.header;
        assert!(h.check(RegionKind::Endpoint, g).is_err(), "not ready");
        h.write(RegionKind::Endpoint, g, flags::ASYMMETRIC, 7, 9);
        assert_eq!(h.check(RegionKind::Endpoint, g), Ok(flags::ASYMMETRIC));
        assert!(h.check(RegionKind::Extension, g).is_err());
        assert!(h.check(RegionKind::Endpoint, Geometry::new(PAGE, 4096).unwrap()).is_err());
        h.magic.store(1, Ordering::Relaxed);
        assert!(h.check(RegionKind::Endpoint, g).is_err());
        h.magic.store(MAGIC, Ordering::Relaxed);
        h.version.store(VERSION + 1, Ordering::Relaxed);
        assert!(h.check(RegionKind::Endpoint, g).is_err());
    }
}
