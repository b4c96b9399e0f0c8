//! Links over a port: the conformance suite, and what a hostile other side can do to them.
#![cfg(feature = "conformance")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_region::conformance::{self, HANG, Pair};
use partywall_region::pmem::{Space, Window, WindowFile, WindowId, WindowSpec};
use partywall_region::relay::{Heartbeat, Notice, Notices, Relay, Side, Watch};
use partywall_region::{Event, Link, PeerRegion, RegionOptions};
use partywall_shm::layout::{Geometry, PAGE, RegionKind};
use partywall_shm::port::{Decoder, Frame, Item, Place, greeting};
use rustix::fd::{AsFd, OwnedFd};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

fn file() -> WindowFile {
    WindowFile::create(&WindowSpec { room: 4 << 20, owner: "a".into(), peer: "b".into() }).unwrap()
}

fn memory(file: &WindowFile) -> OwnedFd {
    file.as_fd().try_clone_to_owned().unwrap()
}

fn up(notices: &Notices) {
    while notices.recv_timeout(HANG).unwrap() != Notice::Up {}
}

/// Both ends of a port.
fn joined() -> ((Relay, Notices), (Relay, Notices)) {
    let (a, b) = UnixStream::pair().unwrap();
    let guest = Relay::start(a.into(), Side::Guest).unwrap();
    let host = Relay::start(b.into(), Side::Host).unwrap();
    up(&guest.1);
    up(&host.1);
    (guest, host)
}

fn next(link: &Link) -> Event {
    link.wait(Some(Instant::now() + HANG)).unwrap()
}

#[test]
fn links_over_a_port_conform() {
    let file = file();
    let ((guest, _n), (host, _m)) = joined();
    guest.window(file.id(), memory(&file));
    host.window(file.id(), memory(&file));
    let (space, theirs) = (Space::new(file.window().unwrap()), file.window().unwrap());
    let ids = AtomicU32::new(1);
    conformance::all(&|ring_size| {
        let (own, base) = space.create(&RegionOptions::endpoint(ring_size)).unwrap();
        let peer = theirs.attach(base, RegionKind::Endpoint, own.geometry()).unwrap();
        let id = ids.fetch_add(1, Ordering::Relaxed);
        let ((here, near), (there, far)) = (Link::pair().unwrap(), Link::pair().unwrap());
        // The far side first: nothing may be said on a link that the other side does not know.
        host.link(id, far, None);
        guest.link(id, near, None);
        std::thread::sleep(Duration::from_millis(5));
        let (here, there) = (Link::Socket(here), Link::Socket(there));
        Pair { own, peer, memory: memory(&file), base, at_once: false, here, there }
    });
}

#[test]
fn a_ring_that_was_lost_is_late() {
    let file = file();
    let (space, window) = (Space::new(file.window().unwrap()), file.window().unwrap());
    let region = || {
        let (own, base) = space.create(&RegionOptions::endpoint(4096)).unwrap();
        let seen = || window.attach(base, RegionKind::Endpoint, own.geometry()).unwrap();
        let seen: [PeerRegion; 2] = [seen(), seen()];
        (own, seen)
    };
    for reads in [true, false] {
        let ((guest, _n), (_host, _m)) = joined();
        let ((half, [a, b]), (peer, [c, d])) = (region(), region());
        let (here, near) = Link::pair().unwrap();
        let here = Link::Socket(here);
        guest.link(1, near, Some(if reads { Watch::reader(a, c) } else { Watch::writer(b, d) }));
        let wait = || here.wait(Some(Instant::now() + Duration::from_millis(300))).unwrap();
        assert!(matches!(wait(), Event::TimedOut), "it is awake");
        let (wish, cursor) = if reads {
            (&half.page().rx.control.data_wanted, &peer.page().tx.cursor.tail)
        } else {
            (&half.page().tx.control.space_wanted, &peer.page().rx.cursor.head)
        };
        wish.store(10, Ordering::SeqCst);
        cursor.store(10, Ordering::SeqCst);
        assert!(matches!(wait(), Event::TimedOut), "it sleeps, and rightly");
        cursor.store(11, Ordering::SeqCst);
        assert!(matches!(next(&here), Event::Bell));
    }
}

/// The other side of a port, that says what it likes.
struct Hostile {
    port: UnixStream,
    decoder: Decoder,
}

impl Hostile {
    fn new(side: Side) -> (Self, Relay, Notices) {
        let (port, b) = UnixStream::pair().unwrap();
        let (relay, notices) = Relay::start(b.into(), side).unwrap();
        let mut this = Self { port, decoder: Decoder::default() };
        this.port.set_read_timeout(Some(HANG)).unwrap();
        match side {
            Side::Host => this.port.write_all(&greeting(1)).unwrap(),
            // It must be answered with its own number.
            Side::Guest => {
                let mut piece = [0; 40];
                this.port.read_exact(&mut piece).unwrap();
                this.decoder.push(&piece);
                this.port.write_all(&greeting(0)).unwrap();
                this.port.write_all(&piece).unwrap();
            }
        }
        up(&notices);
        (this, relay, notices)
    }

    fn say(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.port.write_all(&bytes).unwrap();
    }

    fn hear(&mut self) -> Frame {
        loop {
            match self.decoder.take().unwrap() {
                Some(Item::Frame(frame)) => return frame,
                Some(Item::Greeting(_)) => {}
                None => {
                    let mut piece = [0; 4096];
                    let n = self.port.read(&mut piece).unwrap();
                    assert!(n > 0, "the relay has gone");
                    self.decoder.push(&piece[..n]);
                }
            }
        }
    }
}

fn link(relay: &Relay, id: u32) -> Link {
    let (here, near) = Link::pair().unwrap();
    relay.link(id, near, None);
    std::thread::sleep(Duration::from_millis(5));
    Link::Socket(here)
}

fn place(window: WindowId) -> Place {
    Place { window, base: PAGE, geometry: Geometry::new(PAGE, 4096).unwrap() }
}

#[test]
fn nobody_gets_memory_that_is_not_the_other_sides_to_give() {
    let (given, secret) = (file(), file());
    let (mut hostile, relay, _notices) = Hostile::new(Side::Host);
    relay.window(given.id(), memory(&given));
    let good = link(&relay, 1);
    let bad = link(&relay, 2);
    let attach = |link, window| Frame::Attach { link, generation: 0, start: 0, place: place(window) };
    hostile.say(&attach(1, given.id()));
    hostile.say(&attach(2, secret.id()));
    let Event::Attach { base: PAGE, memory, .. } = next(&good) else { panic!("no memory came") };
    assert_eq!(Window::received(memory.as_fd()).unwrap().header().unwrap().unwrap().id, given.id());
    assert!(matches!(next(&bad), Event::HungUp));
    assert_eq!(hostile.hear(), Frame::HungUp(2));
    relay.forget(given.id());
    std::thread::sleep(Duration::from_millis(5));
    hostile.say(&attach(1, given.id()));
    assert!(matches!(next(&good), Event::HungUp));
}

#[test]
fn a_process_cannot_name_memory_that_the_other_side_has_not() {
    let (given, other) = (file(), file());
    let (mut hostile, relay, _notices) = Hostile::new(Side::Guest);
    relay.window(given.id(), memory(&given));
    let geometry = Geometry::new(PAGE, 4096).unwrap();
    let (good, bad, plain) = (link(&relay, 1), link(&relay, 2), link(&relay, 3));
    good.attach_at(PAGE, 0, 0, geometry, given.as_fd()).unwrap();
    assert_eq!(hostile.hear(), Frame::Attach { link: 1, generation: 0, start: 0, place: place(given.id()) });
    bad.attach_at(PAGE, 0, 0, geometry, other.as_fd()).unwrap();
    assert_eq!(hostile.hear(), Frame::HungUp(2));
    plain.attach(0, geometry, given.as_fd()).unwrap();
    assert_eq!(hostile.hear(), Frame::HungUp(3));
    assert!(matches!(next(&bad), Event::HungUp));
}

#[test]
fn a_storm_and_a_process_that_takes_nothing_harm_only_themselves() {
    let given = file();
    let (mut hostile, relay, notices) = Hostile::new(Side::Host);
    relay.window(given.id(), memory(&given));
    let (deaf, good) = (link(&relay, 1), link(&relay, 2));
    // Rings for links that are and are not; memory without end for one who does not look.
    for id in 0..20_000u32 {
        hostile.say(&Frame::Bell(id % 4));
    }
    for generation in 0..2000 {
        hostile.say(&Frame::Attach { link: 1, generation, start: 0, place: place(given.id()) });
    }
    hostile.say(&Frame::Control(vec![7; 9]));
    // It is still at work: all this has been read, and that one link is over.
    let mut closed = false;
    loop {
        match notices.recv_timeout(HANG).unwrap() {
            Notice::Closed(id) => {
                assert_eq!(id, 1);
                closed = true;
            }
            Notice::Control(message) => break assert_eq!(message, [7; 9]),
            other => panic!("{other:?}"),
        }
    }
    assert!(closed, "thousands of undelivered regions were kept");
    assert!(matches!(next(&good), Event::Bell));
    drop(deaf);
}

#[test]
fn a_port_that_does_not_read_holds_up_its_own_processes_only() {
    let (hostile, relay, _notices) = Hostile::new(Side::Host);
    let busy = link(&relay, 1);
    for _ in 0..200_000 {
        busy.ring();
    }
    // The relay still does what it is told.
    let other = link(&relay, 2);
    relay.hang_up(2);
    assert!(matches!(next(&other), Event::HungUp));
    drop(hostile);
    assert!(matches!(next(&busy), Event::HungUp));
}

#[test]
fn a_guest_greets_a_new_broker_and_keeps_its_links() {
    let (mut hostile, relay, notices) = Hostile::new(Side::Guest);
    let link = link(&relay, 1);
    hostile.port.write_all(&greeting(0)).unwrap();
    let mut piece = [0; 40];
    hostile.port.read_exact(&mut piece).unwrap();
    assert!(notices.try_recv().is_none(), "not yet");
    hostile.port.write_all(&piece).unwrap();
    up(&notices);
    hostile.say(&Frame::Bell(1));
    assert!(matches!(next(&link), Event::Bell));
}

#[test]
fn a_hang_up_that_comes_before_the_link_is_known_is_kept() {
    let (mut hostile, relay, notices) = Hostile::new(Side::Host);
    hostile.port.write_all(&greeting(1)).unwrap();
    up(&notices);
    // More of them than are kept: the latest counts.
    for id in 0..5000 {
        hostile.say(&Frame::HungUp(id));
    }
    hostile.say(&Frame::Control(vec![1]));
    assert_eq!(notices.recv_timeout(HANG).unwrap(), Notice::Control(vec![1]));
    assert!(matches!(next(&link(&relay, 4999)), Event::HungUp));
    assert_eq!(notices.recv_timeout(HANG).unwrap(), Notice::Closed(4999));
    // Once; and a greeting begins anew.
    let again = link(&relay, 4999);
    hostile.say(&Frame::Bell(4999));
    assert!(matches!(next(&again), Event::Bell));
    hostile.say(&Frame::HungUp(7));
    hostile.port.write_all(&greeting(2)).unwrap();
    up(&notices);
    let seven = link(&relay, 7);
    hostile.say(&Frame::Bell(7));
    assert!(matches!(next(&seven), Event::Bell));
}

#[test]
fn a_guest_that_is_heard_again_after_silence_is_greeted() {
    let (port, b) = UnixStream::pair().unwrap();
    let beat = Heartbeat { every: Duration::from_millis(20), limit: Duration::from_millis(200) };
    let (_relay, notices) = Relay::start_with(b.into(), Side::Host, Some(beat)).unwrap();
    let mut hostile = Hostile { port, decoder: Decoder::default() };
    hostile.port.write_all(&greeting(1)).unwrap();
    up(&notices);
    assert_eq!(notices.recv_timeout(HANG).unwrap(), Notice::Silent);
    // What was said until then, its first greeting perhaps among it.
    hostile.port.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    while hostile.port.read(&mut [0; 256]).is_ok() {}
    // It does not know that its links are gone.
    hostile.say(&Frame::Pong);
    hostile.port.set_read_timeout(Some(HANG)).unwrap();
    let mut piece = [0; 40];
    hostile.port.read_exact(&mut piece).unwrap();
    assert_eq!(piece, greeting(0));
}

#[test]
fn a_guest_that_falls_silent_loses_its_links_and_can_come_again() {
    let (port, b) = UnixStream::pair().unwrap();
    let beat = Heartbeat { every: Duration::from_millis(20), limit: Duration::from_secs(2) };
    let (relay, notices) = Relay::start_with(b.into(), Side::Host, Some(beat)).unwrap();
    let mut hostile = Hostile { port, decoder: Decoder::default() };
    hostile.port.write_all(&greeting(1)).unwrap();
    up(&notices);
    let one = link(&relay, 1);
    // It answers for longer than the limit.
    let until = Instant::now() + beat.limit + Duration::from_millis(500);
    while Instant::now() < until {
        while hostile.hear() != Frame::Ping {}
        hostile.say(&Frame::Pong);
    }
    assert!(!one.is_hung_up());
    assert!(matches!(next(&one), Event::HungUp), "now it does not");
    while hostile.hear() != Frame::HungUp(1) {}
    assert_eq!(notices.recv_timeout(HANG).unwrap(), Notice::Silent);
    hostile.port.write_all(&greeting(2)).unwrap();
    up(&notices);
    let two = link(&relay, 1);
    hostile.say(&Frame::Bell(1));
    assert!(matches!(next(&two), Event::Bell));
}

#[test]
fn a_relay_that_ends_hangs_up_its_links_on_both_sides() {
    // A guest's port does not close when its relay ends.
    let (a, b) = UnixStream::pair().unwrap();
    let _open = a.try_clone().unwrap();
    let (guest, n) = Relay::start(a.into(), Side::Guest).unwrap();
    let (host, m) = Relay::start(b.into(), Side::Host).unwrap();
    up(&n);
    up(&m);
    let (here, there) = (link(&guest, 1), link(&host, 1));
    drop((guest, n));
    assert!(matches!(next(&here), Event::HungUp));
    assert!(matches!(next(&there), Event::HungUp));
}

#[test]
fn memory_that_has_to_wait_comes_before_the_hang_up() {
    let given = file();
    let (mut hostile, relay, notices) = Hostile::new(Side::Host);
    relay.window(given.id(), memory(&given));
    let slow = link(&relay, 1);
    for _ in 0..5000 {
        hostile.say(&Frame::Bell(1));
    }
    hostile.say(&Frame::Attach { link: 1, generation: 0, start: 0, place: place(given.id()) });
    hostile.say(&Frame::HungUp(1));
    hostile.say(&Frame::Control(vec![1]));
    // The relay has heard all of it before anything is taken.
    while !matches!(notices.recv_timeout(HANG).unwrap(), Notice::Control(_)) {}
    let last = loop {
        match next(&slow) {
            Event::Bell => {}
            other => break other,
        }
    };
    assert!(matches!(last, Event::Attach { .. }), "{last:?}");
    assert!(matches!(next(&slow), Event::HungUp));
}

#[test]
fn nonsense_ends_the_relay_and_a_greeting_begins_anew() {
    let (mut hostile, relay, notices) = Hostile::new(Side::Host);
    let old = link(&relay, 1);
    hostile.port.write_all(&[5, 0, 1]).unwrap();
    hostile.port.write_all(&greeting(2)).unwrap();
    up(&notices);
    assert!(matches!(next(&old), Event::HungUp), "a guest that begins anew has none of its old links");
    let new = link(&relay, 1);
    hostile.say(&Frame::Bell(1));
    assert!(matches!(next(&new), Event::Bell));
    hostile.port.write_all(&[9; 100]).unwrap();
    assert!(matches!(notices.recv_timeout(HANG).unwrap(), Notice::Down { .. }));
    assert!(matches!(next(&new), Event::HungUp));
}
