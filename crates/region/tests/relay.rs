//! Links over a port: the conformance suite, and what a hostile other side can do to them.
#![cfg(feature = "conformance")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall_protocol::port::{Frame, greeting};
use partywall_region::conformance::{self, Backend, ConformanceRegion, HANG};
use partywall_region::pmem::{self, Space, WindowId};
use partywall_region::relay::{BellDirection, DirectionWatch, Heartbeat, Notice, PortSide, Relay, RelayLatency};
use partywall_region::{Link, LinkEvent, PeerRegion, RegionOptions};
use partywall_shm::layout::{Geometry, PAGE, RegionKind};
use rustix::fd::AsFd;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

#[test]
fn links_over_a_port_conform() {
    let file = file();
    let ((guest, _n), (host, _m)) = joined();
    guest.window(file.id(), memory(&file));
    host.window(file.id(), memory(&file));
    let (space, theirs) = (Space::new(file.window().unwrap()), file.window().unwrap());
    let ids = AtomicU32::new(1);
    let region = |options: &RegionOptions| ConformanceRegion::in_window(&space, &theirs, options);
    let link = || {
        let id = ids.fetch_add(1, Ordering::Relaxed);
        let ((here, near), (there, far)) = (Link::pair().unwrap(), Link::pair().unwrap());
        // The far side first: nothing may be said on a link that the other side does not know.
        host.link(id, far, None);
        guest.link(id, near, None);
        std::thread::sleep(Duration::from_millis(5));
        (Link::Socket(here), Link::Socket(there))
    };
    conformance::all(&Backend { region: &region, link: &link, at_once: false });
}

#[test]
fn lost_ring_is_found_late_by_direction_watch() {
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
        guest.link(1, near, Some(if reads { DirectionWatch::reader(a, c) } else { DirectionWatch::writer(b, d) }));
        let wait = || here.wait(Some(Instant::now() + Duration::from_millis(300))).unwrap();
        assert!(matches!(wait(), LinkEvent::TimedOut), "it is awake");
        let (wish, cursor) = if reads {
            (&half.page().rx.control.data_wanted, &peer.page().tx.cursor.tail)
        } else {
            (&half.page().tx.control.space_wanted, &peer.page().rx.cursor.head)
        };
        wish.store(10, Ordering::SeqCst);
        cursor.store(10, Ordering::SeqCst);
        assert!(matches!(wait(), LinkEvent::TimedOut), "it sleeps, and rightly");
        cursor.store(11, Ordering::SeqCst);
        assert!(matches!(next(&here), LinkEvent::Bell));
    }
}

fn link(relay: &Relay, id: u32) -> Link {
    let (here, near) = Link::pair().unwrap();
    relay.link(id, near, None);
    std::thread::sleep(Duration::from_millis(5));
    Link::Socket(here)
}

fn attach(link: u32, generation: u32, window: WindowId) -> Frame {
    let geometry = Geometry::new(PAGE, 4096).unwrap();
    Frame::Attach { link, generation, geometry, start: 0, base: PAGE, window }
}

#[test]
fn memory_of_unknown_window_is_not_delivered() {
    let (given, secret) = (file(), file());
    let (mut hostile, relay, _notices) = Hostile::new(PortSide::Host);
    relay.window(given.id(), memory(&given));
    let good = link(&relay, 1);
    let bad = link(&relay, 2);
    hostile.say(&attach(1, 0, given.id()));
    hostile.say(&attach(2, 0, secret.id()));
    let LinkEvent::Attach { base: PAGE, memory, .. } = next(&good) else { panic!("no memory came") };
    assert_eq!(pmem::received(memory.as_fd()).unwrap().header().unwrap().unwrap().id, given.id());
    assert!(matches!(next(&bad), LinkEvent::HungUp));
    assert_eq!(hostile.hear(), Frame::HungUp { link: 2 });
    relay.forget(given.id());
    std::thread::sleep(Duration::from_millis(5));
    hostile.say(&attach(1, 0, given.id()));
    assert!(matches!(next(&good), LinkEvent::HungUp));
}

#[test]
fn process_cannot_attach_unknown_memory_through_relay() {
    let (given, other) = (file(), file());
    let (mut hostile, relay, _notices) = Hostile::new(PortSide::Guest);
    relay.window(given.id(), memory(&given));
    let geometry = Geometry::new(PAGE, 4096).unwrap();
    let (good, bad, plain) = (link(&relay, 1), link(&relay, 2), link(&relay, 3));
    good.attach_at(PAGE, 0, 0, geometry, given.as_fd()).unwrap();
    assert_eq!(hostile.hear(), attach(1, 0, given.id()));
    bad.attach_at(PAGE, 0, 0, geometry, other.as_fd()).unwrap();
    assert_eq!(hostile.hear(), Frame::HungUp { link: 2 });
    plain.attach(0, geometry, given.as_fd()).unwrap();
    assert_eq!(hostile.hear(), Frame::HungUp { link: 3 });
    assert!(matches!(next(&bad), LinkEvent::HungUp));
}

#[test]
fn bell_storm_and_unread_link_affect_only_themselves() {
    let given = file();
    let (mut hostile, relay, notices) = Hostile::new(PortSide::Host);
    relay.window(given.id(), memory(&given));
    let (deaf, good) = (link(&relay, 1), link(&relay, 2));
    // Rings for links that exist and links that do not, and memory without end for a process that does not look.
    for id in 0..20_000u32 {
        hostile.say(&Frame::Bell { link: id % 4 });
    }
    for generation in 0..2000 {
        hostile.say(&attach(1, generation, given.id()));
    }
    hostile.say(&Frame::Control { message: vec![7; 9] });
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
    assert!(matches!(next(&good), LinkEvent::Bell));
    drop(deaf);
}

#[test]
fn unread_port_delays_only_its_own_processes() {
    let (hostile, relay, _notices) = Hostile::new(PortSide::Host);
    let busy = link(&relay, 1);
    for _ in 0..200_000 {
        busy.ring();
    }
    // The relay still does its work.
    let other = link(&relay, 2);
    relay.hang_up(2);
    assert!(matches!(next(&other), LinkEvent::HungUp));
    drop(hostile);
    assert!(matches!(next(&busy), LinkEvent::HungUp));
}

/// Answers each ping from this time on for this long, or until the relay hangs up a link. Returns the longest pause before an answer, and the time
/// of the last.
fn answer_pings(hostile: &mut Hostile, start: Instant, time: Duration) -> (Duration, Instant) {
    let (mut last, mut longest) = (start, Duration::ZERO);
    while start.elapsed() < time {
        match hostile.hear() {
            Frame::Ping {} => hostile.say(&Frame::Pong {}),
            Frame::HungUp { .. } => break,
            _ => continue,
        }
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    (longest, last)
}

#[test]
fn silent_guest_loses_links_and_can_reconnect() {
    let beat = Heartbeat { every: Duration::from_millis(20), limit: Duration::from_secs(2) };
    // A loaded machine may keep this thread from answering for as long as the limit. The guest was silent then, and the next one is another.
    let (mut hostile, relay, notices, one, is_hung_up) = (0..5)
        .find_map(|_| {
            let (port, b) = UnixStream::pair().unwrap();
            let (relay, notices) = Relay::start_with(b.into(), PortSide::Host, Some(beat)).unwrap();
            let mut hostile = Hostile::on(port);
            hostile.port.set_read_timeout(Some(HANG)).unwrap();
            let start = Instant::now();
            hostile.port.write_all(&greeting(1)).unwrap();
            up(&notices);
            let one = link(&relay, 1);
            // It answers for longer than the limit.
            let (pause, last) = answer_pings(&mut hostile, start, beat.limit + Duration::from_millis(500));
            let is_hung_up = one.is_hung_up();
            let was_silent = pause.max(last.elapsed()) >= beat.limit;
            (!was_silent).then_some((hostile, relay, notices, one, is_hung_up))
        })
        .unwrap();
    assert!(!is_hung_up);
    assert!(matches!(next(&one), LinkEvent::HungUp), "now it does not");
    while hostile.hear() != (Frame::HungUp { link: 1 }) {}
    assert_eq!(notices.recv_timeout(HANG).unwrap(), Notice::Silent);
    hostile.port.write_all(&greeting(2)).unwrap();
    up(&notices);
    let two = link(&relay, 1);
    hostile.say(&Frame::Bell { link: 1 });
    assert!(matches!(next(&two), LinkEvent::Bell));
}

#[test]
fn commands_before_owner_hears_of_greeting_are_dropped() {
    for side in [PortSide::Host, PortSide::Guest] {
        let (mut hostile, relay, notices) = Hostile::new(side);
        let before = link(&relay, 1);
        let number = if side == PortSide::Host { 2 } else { 0 };
        hostile.port.write_all(&greeting(number)).unwrap();
        assert!(matches!(next(&before), LinkEvent::HungUp), "{side:?}");
        // The guest's greeting is not answered, and the host's owner has not taken the notice.
        relay.control(b"late").unwrap();
        let late = link(&relay, 2);
        assert!(matches!(next(&late), LinkEvent::HungUp), "{side:?}");
        if side == PortSide::Guest {
            hostile.answer_greeting();
            hostile.say(&Frame::Ping {});
            assert_eq!(hostile.hear(), Frame::Pong {});
            // It is answered now, and the owner has not taken the notice.
            assert!(matches!(next(&link(&relay, 2)), LinkEvent::HungUp));
        }
        up(&notices);
        relay.control(b"in time").unwrap();
        assert_eq!(hostile.hear(), Frame::Control { message: b"in time".to_vec() }, "{side:?}");
        // Counted down just after the port has taken it.
        let deadline = Instant::now() + HANG;
        while relay.waiting() > 0 {
            assert!(Instant::now() < deadline, "{} bytes wait for ever", relay.waiting());
            std::thread::yield_now();
        }
        let known = link(&relay, 2);
        hostile.say(&Frame::Bell { link: 2 });
        assert!(matches!(next(&known), LinkEvent::Bell), "{side:?}");
    }
}

#[test]
fn bells_are_counted_in_both_directions_once_they_are_delivered() {
    let (port, b) = UnixStream::pair().unwrap();
    let latency = std::sync::Arc::new(RelayLatency::default());
    let (relay, notices) = Relay::start_measured(b.into(), PortSide::Host, None, latency.clone()).unwrap();
    let mut hostile = Hostile::on(port);
    hostile.port.write_all(&greeting(1)).unwrap();
    up(&notices);
    let one = link(&relay, 1);
    let count = |direction| latency.buckets(direction).count();
    assert_eq!((count(BellDirection::ToPort), count(BellDirection::FromPort)), (0, 0));
    one.ring();
    while hostile.hear() != (Frame::Bell { link: 1 }) {}
    for _ in 0..3 {
        hostile.say(&Frame::Bell { link: 1 });
        assert!(matches!(next(&one), LinkEvent::Bell));
    }
    // Counted just after the delivery.
    let deadline = Instant::now() + HANG;
    while (count(BellDirection::ToPort), count(BellDirection::FromPort)) != (1, 3) {
        assert!(Instant::now() < deadline, "{latency:?}");
        std::thread::yield_now();
    }
    assert!(latency.buckets(BellDirection::FromPort).sum > 0.0);
}

#[test]
fn ending_relay_hangs_up_links_on_both_sides() {
    // A guest's port does not close when its relay ends.
    let (a, b) = UnixStream::pair().unwrap();
    let _open = a.try_clone().unwrap();
    let (guest, n) = Relay::start(a.into(), PortSide::Guest).unwrap();
    let (host, m) = Relay::start(b.into(), PortSide::Host).unwrap();
    up(&n);
    up(&m);
    let (here, there) = (link(&guest, 1), link(&host, 1));
    drop((guest, n));
    assert!(matches!(next(&here), LinkEvent::HungUp));
    assert!(matches!(next(&there), LinkEvent::HungUp));
}

#[test]
fn memory_that_has_to_wait_comes_before_the_hang_up() {
    let given = file();
    let (mut hostile, relay, notices) = Hostile::new(PortSide::Host);
    relay.window(given.id(), memory(&given));
    let slow = link(&relay, 1);
    for _ in 0..5000 {
        hostile.say(&Frame::Bell { link: 1 });
    }
    hostile.say(&attach(1, 0, given.id()));
    hostile.say(&Frame::HungUp { link: 1 });
    hostile.say(&Frame::Control { message: vec![1] });
    // The relay has heard all of it before anything is taken.
    while !matches!(notices.recv_timeout(HANG).unwrap(), Notice::Control(_)) {}
    let last = loop {
        match next(&slow) {
            LinkEvent::Bell => {}
            other => break other,
        }
    };
    assert!(matches!(last, LinkEvent::Attach { .. }), "{last:?}");
    assert!(matches!(next(&slow), LinkEvent::HungUp));
}

#[test]
fn malformed_frame_ends_relay_and_greeting_restarts_it() {
    let (mut hostile, relay, notices) = Hostile::new(PortSide::Host);
    let old = link(&relay, 1);
    hostile.port.write_all(&[5, 0, 1]).unwrap();
    hostile.port.write_all(&greeting(2)).unwrap();
    up(&notices);
    assert!(matches!(next(&old), LinkEvent::HungUp), "a guest that starts again has none of its old links");
    let new = link(&relay, 1);
    hostile.say(&Frame::Bell { link: 1 });
    assert!(matches!(next(&new), LinkEvent::Bell));
    hostile.port.write_all(&[9; 100]).unwrap();
    assert!(matches!(notices.recv_timeout(HANG).unwrap(), Notice::Down { .. }));
    assert!(matches!(next(&new), LinkEvent::HungUp));
}

#[test]
fn migrating_guest_ends_links_to_host_and_neighbour_as_moved() {
    let ((a, _n), (of_a, _m)) = joined();
    let ((b, _o), (of_b, _p)) = joined();
    let crossing = |fd| Link::crossing(fd, HANG).unwrap();
    let pair = || Link::pair().unwrap();
    // Link 2 is between a program of `a` and one of the host, link 4 between programs of `a` and `b`.
    let ((in_a, near), (on_host, far)) = (pair(), pair());
    a.link(2, near, None);
    of_a.link(2, far, None);
    let ((also_in_a, near), (in_b, far), (one, other)) = (pair(), pair(), pair());
    b.link(4, far, None);
    of_b.link(4, other, None);
    of_a.link(4, one, None);
    a.link(4, near, None);
    let ends = [in_a, on_host, also_in_a, in_b].map(crossing);
    ends[2].ring();
    assert!(matches!(next(&ends[3]), LinkEvent::Bell), "the links are carried");
    of_a.leave();
    a.leave();
    a.hang_up_all();
    for (end, link) in ends.iter().enumerate() {
        assert!(matches!(next(link), LinkEvent::HungUp), "{end}");
        assert!(link.has_moved(), "{end}");
    }
    // Others of the neighbour have not.
    let (host, far) = pair();
    let (inside, near) = pair();
    of_b.link(6, far, None);
    b.link(6, near, None);
    drop(inside);
    let host = crossing(host);
    assert!(matches!(next(&host), LinkEvent::HungUp) && !host.has_moved());
}
