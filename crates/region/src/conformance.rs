//! The requirements on every back end, as tests.
//!
//! A [`Backend`] makes memory that one side owns and the other sees, and links between the two sides. Every later back end
//! (memory of a virtual machine, of a device) must pass [`all`], in addition to its own tests of how it keeps a peer from
//! writing. The layers above rely only on properties that are checked here.
//!
//! The functions panic where a back end falls short: they are tests, behind the feature `conformance` so that those of other
//! crates can call them.
#![expect(clippy::panic, reason = "tests, shared with the tests of other crates")]

use crate::pmem::{self, Space};
use crate::window::Window;
use crate::{Link, LinkEvent, OwnRegion, PeerRegion, RegionOptions};
use partywall_shm::layout::{Geometry, RegionKind, VERSION};
use partywall_shm::state::TxState;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// One side's memory as both sides see it.
#[derive(Debug)]
pub struct ConformanceRegion {
    /// The region as its owner has it.
    pub own: OwnRegion,
    /// The same region, as the other side has it.
    pub peer: PeerRegion,
    /// The descriptor that the owner would send for the other side to have it.
    pub memory: OwnedFd,
    /// Where in that memory the region begins.
    pub base: u64,
}

impl ConformanceRegion {
    /// A region with separate memory.
    ///
    /// # Panics
    /// If it cannot be made or attached.
    pub fn separate(options: &RegionOptions) -> Self {
        let (own, memory) = OwnRegion::create(options).unwrap_or_else(|e| panic!("make a region: {e}"));
        let peer = PeerRegion::attach(memory.as_fd(), options.kind, own.geometry());
        let peer = peer.unwrap_or_else(|e| panic!("attach a region: {e}"));
        Self { own, peer, memory, base: 0 }
    }

    /// A region in a window, of which `theirs` is the other side's view.
    ///
    /// # Panics
    /// If it cannot be made or attached.
    pub fn in_window(space: &Space, theirs: &Window, options: &RegionOptions) -> Self {
        let (own, base) = space.create(options).unwrap_or_else(|e| panic!("make a region in a window: {e}"));
        let peer = theirs.attach(base, options.kind, own.geometry());
        let peer = peer.unwrap_or_else(|e| panic!("attach a region in a window: {e}"));
        let memory = theirs.as_fd().try_clone_to_owned();
        Self { own, peer, memory: memory.unwrap_or_else(|e| panic!("keep the window: {e}")), base }
    }
}

/// A region with a link between its two sides.
#[derive(Debug)]
pub struct ConformancePair {
    /// The region as its owner has it.
    pub own: OwnRegion,
    /// The same region, as the other side has it.
    pub peer: PeerRegion,
    /// The descriptor that the owner would send for the other side to have it.
    pub memory: OwnedFd,
    /// Where in that memory the region begins.
    pub base: u64,
    /// As [`Backend::at_once`].
    pub at_once: bool,
    /// The owner's end of the link.
    pub here: Link,
    /// The other end.
    pub there: Link,
}

/// A back end: how it makes regions, and how it makes links.
#[expect(missing_debug_implementations, reason = "it is two functions")]
pub struct Backend<'a> {
    /// Makes a region.
    pub region: &'a dyn Fn(&RegionOptions) -> ConformanceRegion,
    /// Makes a link, and returns both of its ends.
    pub link: &'a dyn Fn() -> (Link, Link),
    /// A call at one end of a link takes effect at the other end at once, because no relay is between them.
    pub at_once: bool,
}

impl Backend<'_> {
    /// An endpoint region with a ring of this many bytes, and a link.
    pub fn pair(&self, ring_size: u64) -> ConformancePair {
        let ConformanceRegion { own, peer, memory, base } = (self.region)(&RegionOptions::endpoint(ring_size));
        let (here, there) = (self.link)();
        ConformancePair { own, peer, memory, base, at_once: self.at_once, here, there }
    }
}

/// Within this time everything happens that happens at all; longer is a hang.
pub const HANG: Duration = Duration::from_secs(120);
/// A wait that is meant to end without an event.
const SHORT: Duration = Duration::from_millis(20);
/// The smallest ring.
const RING: u64 = 4096;

/// Everything. Pairs must be independent of each other, and leave nothing behind when they are dropped.
pub fn all(backend: &Backend<'_>) {
    peer_reads_bytes_that_owner_wrote(backend);
    span_is_contiguous_from_every_offset(backend);
    region_without_ring_has_control_page(backend);
    each_side_sees_the_words_of_the_control_page(backend);
    memory_outlives_its_owner(backend);
    further_regions_lie_beside_the_ring_and_each_other(backend);
    region_of_another_kind_or_size_is_not_attached(backend);
    a_ring_before_the_wait_is_not_lost(backend);
    a_ring_ends_a_wait_that_has_begun(backend);
    rings_go_both_ways(backend);
    wait_without_event_ends_at_its_deadline(backend);
    pending_event_is_returned_before_passed_deadline(backend);
    ringing_does_not_block(backend);
    if backend.pair(RING).here.carries_memory() {
        memory_arrives_by_the_link(backend);
        memory_gets_through_once_a_full_link_is_emptied(backend);
    }
    a_hang_up_comes_last_and_stays(backend);
    hang_up_comes_last_after_unread_events(backend);
    a_hang_up_ends_a_wait_that_has_begun(backend);
    hanging_up_is_as_good_as_dropping(backend);
    descriptor_is_readable_while_event_is_pending(backend);
}

/// Bytes of the stream go where both sides look for them, on every revolution.
pub fn peer_reads_bytes_that_owner_wrote(backend: &Backend<'_>) {
    let mut pair = backend.pair(RING);
    // Steps that do not divide the ring: the pieces wrap at ever different places.
    let (mut at, mut len) = (u64::MAX - 3 * RING, 1);
    for round in 0..200u64 {
        let written: Vec<u8> = (0..len).map(|i| (i * 7 + round) as u8).collect();
        assert_eq!(pair.own.span(at, len).copy_from(0, &written), written.len());
        let mut read = vec![0; written.len()];
        assert_eq!(pair.peer.span(at, len).copy_to(&mut read), read.len());
        assert!(read == written, "{len} bytes at {at}");
        at = at.wrapping_add(len);
        len = (len * 3 + 1) % (RING + 1);
    }
}

/// A whole ring's length can be reached from every offset, and no more.
pub fn span_is_contiguous_from_every_offset(backend: &Backend<'_>) {
    let mut pair = backend.pair(RING);
    let first: Vec<u8> = (0..RING).map(|i| (i % 251) as u8).collect();
    pair.own.span(0, RING).copy_from(0, &first);
    let mut read = vec![0; RING as usize];
    for offset in 0..RING {
        assert_eq!(pair.peer.span(offset, RING).copy_to(&mut read), read.len());
        let (end, beginning) = first.split_at(offset as usize);
        assert!(read[..beginning.len()] == *beginning && read[beginning.len()..] == *end, "from {offset}");
    }
    assert_eq!(pair.own.span(5, RING + 1).len(), RING as usize, "no span is longer than the ring");
    assert_eq!(pair.peer.span(5, u64::MAX).len(), RING as usize, "no span is longer than the ring");
}

/// A side that never writes reserves no ring.
pub fn region_without_ring_has_control_page(backend: &Backend<'_>) {
    let mut pair = backend.pair(0);
    assert!(pair.own.span(77, 10).is_empty() && pair.peer.span(77, 10).is_empty());
    pair.own.page().rx.cursor.head.store(5, Ordering::Release);
    assert_eq!(pair.peer.page().rx.cursor.head.load(Ordering::Relaxed), 5);
}

/// The control page is one page of memory, not two.
pub fn each_side_sees_the_words_of_the_control_page(backend: &Backend<'_>) {
    let pair = backend.pair(RING);
    assert_eq!(pair.own.geometry(), pair.peer.geometry());
    assert_eq!(pair.own.flags(), pair.peer.flags());
    let handle = pair.own.handle();
    handle.page().tx.cursor.tail.store(1 << 40, Ordering::Release);
    handle.page().rx.control.state.store(1, Ordering::Release);
    let page = pair.peer.page();
    assert_eq!(page.tx.cursor.tail.load(Ordering::Relaxed), 1 << 40);
    assert_eq!(page.rx.control.state.load(Ordering::Relaxed), 1);
    assert_eq!(page.tx.control.space_wanted.load(Ordering::Relaxed), u64::MAX, "a new half is awake");
    assert_eq!(page.rx.control.data_wanted.load(Ordering::Relaxed), u64::MAX, "a new half is awake");
    assert!(page.header.check(RegionKind::Endpoint, pair.peer.geometry()).is_ok());
}

/// Written bytes can be read when the writer is gone.
pub fn memory_outlives_its_owner(backend: &Backend<'_>) {
    let ConformancePair { mut own, peer, memory, .. } = backend.pair(RING);
    own.span(10, 5).copy_from(0, b"hello");
    drop((own, memory));
    let mut read = [0; 5];
    peer.clone().span(10, 5).copy_to(&mut read);
    assert_eq!(&read, b"hello");
    assert_eq!(peer.page().header.version.load(Ordering::Relaxed), VERSION);
}

/// A channel may own further regions (protocol F1): each has its content to itself, and its end is seen (F5).
pub fn further_regions_lie_beside_the_ring_and_each_other(backend: &Backend<'_>) {
    let mut ring = (backend.region)(&RegionOptions::endpoint(RING));
    ring.own.span(0, RING).copy_from(0, &[1; RING as usize]);
    let mut regions: Vec<ConformanceRegion> = Vec::new();
    // As many as a side may own of a channel (F1.2), of more than one size.
    for number in 0..8 {
        let further = RegionOptions { kind: RegionKind::Further, ..RegionOptions::endpoint(RING << (number % 3)) };
        let mut region = (backend.region)(&further);
        let size = region.own.geometry().ring_size();
        region.own.span(0, size).copy_from(0, &vec![10 + number as u8; size as usize]);
        regions.push(region);
    }
    for (region, byte) in std::iter::once(&ring).chain(&regions).zip([1].into_iter().chain(10u8..)) {
        let mut content = vec![0; region.peer.geometry().ring_size() as usize];
        assert_eq!(region.peer.span(0, content.len() as u64).copy_to(&mut content), content.len());
        assert!(content.iter().all(|at| *at == byte), "another region wrote into region {byte}");
    }
    // A region that its owner gives up ends, and no other region does. The other side's mapping of it stays valid.
    let ConformanceRegion { own, peer, .. } = regions.swap_remove(3);
    TxState::Finished.store(&own.page().tx.control.state);
    drop(own);
    let mut last = [0];
    peer.span(RING - 1, 1).copy_to(&mut last);
    assert_eq!((TxState::load(&peer.page().tx.control.state), last), (Ok(TxState::Finished), [13]));
    for region in regions.iter().chain([&ring]) {
        assert_eq!(TxState::load(&region.peer.page().tx.control.state), Ok(TxState::Open));
    }
}

/// A region is what its header says, and nothing else is mapped in its place (protocol M2, M3, F3.1).
pub fn region_of_another_kind_or_size_is_not_attached(backend: &Backend<'_>) {
    const KINDS: [RegionKind; 2] = [RegionKind::Endpoint, RegionKind::Further];
    for kind in KINDS {
        let region = (backend.region)(&RegionOptions { kind, ..RegionOptions::endpoint(RING) });
        let attach = |kind, size| {
            let Ok(geometry) = Geometry::new(region.own.geometry().ring_offset(), size) else { panic!("{size}") };
            pmem::attach(region.memory.as_fd(), region.base, kind, geometry)
        };
        assert!(attach(kind, RING).is_ok());
        for other in KINDS.into_iter().filter(|other| *other != kind) {
            assert!(attach(other, RING).is_err(), "{kind:?} attached as {other:?}");
        }
        assert!(attach(kind, RING * 2).is_err(), "{kind:?} attached at twice its size");
    }
}

/// A doorbell has memory: a wait that begins after the ring returns at once (protocol W2).
pub fn a_ring_before_the_wait_is_not_lost(backend: &Backend<'_>) {
    let pair = backend.pair(RING);
    for _ in 0..3 {
        pair.here.ring();
        assert!(matches!(wait(&pair.there), LinkEvent::Bell));
        while let Some(event) = next(&pair.there) {
            assert!(matches!(event, LinkEvent::Bell), "nothing but spurious rings (W5)");
        }
    }
    for _ in 0..10 {
        pair.here.ring();
    }
    assert!(is_readable(&pair.there, if pair.at_once { Duration::ZERO } else { HANG }));
    let mut rings = 0;
    while let Some(event) = next(&pair.there) {
        assert!(matches!(event, LinkEvent::Bell));
        rings += 1;
    }
    assert!(rings > 0, "merged rings are at least one");
}

/// The sleeper wakes.
pub fn a_ring_ends_a_wait_that_has_begun(backend: &Backend<'_>) {
    let ConformancePair { here, there, .. } = backend.pair(RING);
    std::thread::scope(|s| {
        let sleeper = s.spawn(|| wait(&there));
        // Long enough, most of the time, for it to fall asleep; right either way.
        std::thread::sleep(SHORT);
        here.ring();
        assert!(matches!(sleeper.join(), Ok(LinkEvent::Bell)));
    });
}

/// Both ends ring and are rung.
pub fn rings_go_both_ways(backend: &Backend<'_>) {
    let pair = backend.pair(RING);
    pair.there.ring();
    assert!(next(&pair.there).is_none(), "one's own ring is not heard");
    assert!(matches!(wait(&pair.here), LinkEvent::Bell));
}

/// Timeouts come, neither early nor never.
pub fn wait_without_event_ends_at_its_deadline(backend: &Backend<'_>) {
    let pair = backend.pair(RING);
    assert!(next(&pair.there).is_none());
    let deadline = Instant::now() + SHORT;
    assert!(matches!(wait_until(&pair.there, deadline), LinkEvent::TimedOut));
    assert!(Instant::now() >= deadline, "not early");
    assert!(matches!(wait_until(&pair.there, deadline), LinkEvent::TimedOut), "a deadline that has passed");
    assert!(!pair.there.is_hung_up());
}

/// A caller that asks late gets the event, not the end of time.
pub fn pending_event_is_returned_before_passed_deadline(backend: &Backend<'_>) {
    let pair = backend.pair(RING);
    pair.here.ring();
    assert!(is_readable(&pair.there, if pair.at_once { Duration::ZERO } else { HANG }));
    assert!(matches!(wait_until(&pair.there, Instant::now()), LinkEvent::Bell));
}

/// A peer that takes no events cannot hold up who rings (protocol L3).
pub fn ringing_does_not_block(backend: &Backend<'_>) {
    let ConformancePair { here, there, .. } = backend.pair(RING);
    std::thread::scope(|s| {
        let (done, is_done) = std::sync::mpsc::channel();
        s.spawn(move || {
            for _ in 0..5000 {
                here.ring();
            }
            let _ = done.send(here);
        });
        let here = is_done.recv_timeout(HANG);
        assert!(here.is_ok(), "5000 rings that nobody takes block the ringer");
        assert!(matches!(wait(&there), LinkEvent::Bell), "a full link has rings waiting");
    });
}

/// Attach delivers the memory itself (protocol L2).
pub fn memory_arrives_by_the_link(backend: &Backend<'_>) {
    let mut pair = backend.pair(RING);
    pair.own.span(0, 4).copy_from(0, b"ring");
    let geometry = pair.own.geometry();
    assert!(pair.here.attach_at(pair.base, 1 << 40, 7, geometry, pair.memory.as_fd()).is_ok());
    drop(pair.memory);
    match wait(&pair.there) {
        LinkEvent::Attach { generation, geometry: told, start, base, memory } => {
            assert_eq!((generation, told, start, base), (7, geometry, 1 << 40, pair.base));
            let again = pmem::attach(memory.as_fd(), base, RegionKind::Endpoint, told);
            let Ok(again) = again else { panic!("the memory that arrived cannot be attached: {again:?}") };
            drop(memory);
            let mut read = [0; 4];
            again.span(0, 4).copy_to(&mut read);
            assert_eq!(&read, b"ring");
        }
        other => panic!("{other:?}"),
    }
}

/// Memory is not dropped as a ring may be: its sender learns that the link is full, and when it no longer is.
pub fn memory_gets_through_once_a_full_link_is_emptied(backend: &Backend<'_>) {
    let ConformancePair { own, memory, base, here, there, .. } = backend.pair(RING);
    for _ in 0..5000 {
        here.ring();
    }
    std::thread::scope(|s| {
        let receiver = s.spawn(|| {
            loop {
                match wait(&there) {
                    LinkEvent::Bell => {}
                    other => break other,
                }
            }
        });
        while let Err(e) = here.attach_at(base, 0, 3, own.geometry(), memory.as_fd()) {
            assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock, "{e}");
            assert!(matches!(here.wait_to_send(Some(Instant::now() + HANG)), Ok(true)));
        }
        assert!(matches!(receiver.join(), Ok(LinkEvent::Attach { generation: 3, .. })));
    });
}

/// Packets that were sent before the end are delivered before it (protocol L4), and every later call reports the end.
pub fn a_hang_up_comes_last_and_stays(backend: &Backend<'_>) {
    let pair = backend.pair(RING);
    pair.here.ring();
    send_last(&pair);
    let ConformancePair { own, at_once, here, there, .. } = pair;
    drop(here);
    assert!(is_soon_hung_up(&there, at_once), "known at once to who looks");
    assert_last_then_hang_up(&there, own.geometry());
    assert!(there.is_hung_up());
    // The other end is gone: ringing it raises no signal and no error, and does not wait.
    there.ring();
    assert!(matches!(next(&there), Some(LinkEvent::HungUp)));
}

/// Like the test above, if the side that has gone had left packets unread.
pub fn hang_up_comes_last_after_unread_events(backend: &Backend<'_>) {
    for blocking in [true, false] {
        let pair = backend.pair(RING);
        pair.there.ring();
        send_last(&pair);
        let ConformancePair { own, at_once, here, there, .. } = pair;
        drop(here);
        if !blocking {
            assert!(is_soon_hung_up(&there, at_once));
            assert!(next(&there).is_some_and(|event| !matches!(event, LinkEvent::HungUp)), "what was sent comes first");
            while next(&there).is_some_and(|event| !matches!(event, LinkEvent::HungUp)) {}
            assert!(matches!(next(&there), Some(LinkEvent::HungUp)));
        } else {
            assert_last_then_hang_up(&there, own.geometry());
        }
    }
}

/// Sends what must not get lost though the sender goes: memory, or where the link carries none, *dropped*.
fn send_last(pair: &ConformancePair) {
    if pair.here.carries_memory() {
        assert!(pair.here.attach_at(pair.base, 0, 1, pair.own.geometry(), pair.memory.as_fd()).is_ok());
    } else {
        pair.here.say_dropped();
    }
}

fn assert_last_then_hang_up(link: &Link, geometry: Geometry) {
    let mut came = false;
    loop {
        match wait(link) {
            LinkEvent::Bell => {}
            LinkEvent::Attach { generation: 1, geometry: told, start: 0, .. } if told == geometry && !came => {
                came = true
            }
            LinkEvent::Dropped if !link.carries_memory() && !came => came = true,
            LinkEvent::HungUp => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(came, "the hang-up came before what was sent, which is lost");
    assert!(matches!(wait(link), LinkEvent::HungUp), "still hung up");
    assert!(matches!(next(link), Some(LinkEvent::HungUp)), "still hung up");
}

/// The sleeper hears of the death.
pub fn a_hang_up_ends_a_wait_that_has_begun(backend: &Backend<'_>) {
    for limited in [false, true] {
        let ConformancePair { here, there, .. } = backend.pair(RING);
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| if limited { wait(&there) } else { wait_for_ever(&there) });
            std::thread::sleep(SHORT);
            drop(here);
            assert!(matches!(sleeper.join(), Ok(LinkEvent::HungUp)));
        });
    }
}

/// An end that hangs up and stays open is gone for the other.
pub fn hanging_up_is_as_good_as_dropping(backend: &Backend<'_>) {
    let ConformancePair { here, there, at_once, .. } = backend.pair(RING);
    here.hang_up();
    assert!(is_soon_hung_up(&there, at_once));
    assert!(matches!(wait(&there), LinkEvent::HungUp));
    here.hang_up();
    drop(here);
    assert!(matches!(wait(&there), LinkEvent::HungUp));
}

/// A thread that polls the descriptor is woken by every event that a wait would return.
pub fn descriptor_is_readable_while_event_is_pending(backend: &Backend<'_>) {
    let ConformancePair { here, there, .. } = backend.pair(RING);
    assert!(!is_readable(&there, Duration::ZERO));
    here.ring();
    assert!(is_readable(&there, HANG));
    while next(&there).is_some() {}
    assert!(!is_readable(&there, Duration::ZERO), "and not when all is taken");
    drop(here);
    assert!(is_readable(&there, HANG), "a hang-up is an event");
}

/// Descriptors that this process has open, and mappings of shared memory that it has: for tests of leaks.
///
/// Only meaningful while no other test runs in the process.
pub fn footprint() -> (usize, usize) {
    // The listing's own descriptor is in every count alike.
    let descriptors = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    (descriptors, maps.lines().filter(|line| line.contains("memfd:partywall")).count())
}

fn wait(link: &Link) -> LinkEvent {
    match wait_until(link, Instant::now() + HANG) {
        LinkEvent::TimedOut => panic!("nothing came within {HANG:?}"),
        event => event,
    }
}

fn wait_for_ever(link: &Link) -> LinkEvent {
    link.wait(None).unwrap_or_else(|e| panic!("wait: {e}"))
}

fn wait_until(link: &Link, deadline: Instant) -> LinkEvent {
    link.wait(Some(deadline)).unwrap_or_else(|e| panic!("wait: {e}"))
}

fn next(link: &Link) -> Option<LinkEvent> {
    link.try_next().unwrap_or_else(|e| panic!("look: {e}"))
}

/// If no relay is between the ends, the other end sees the hang-up at once.
fn is_soon_hung_up(link: &Link, at_once: bool) -> bool {
    let deadline = Instant::now() + HANG;
    while !at_once && !link.is_hung_up() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    link.is_hung_up()
}

fn is_readable(link: &Link, within: Duration) -> bool {
    let limit = Timespec { tv_sec: within.as_secs().cast_signed(), tv_nsec: 0 };
    let mut fds = [PollFd::new(link, PollFlags::IN)];
    matches!(rustix::event::poll(&mut fds, Some(&limit)), Ok(n) if n > 0)
}
