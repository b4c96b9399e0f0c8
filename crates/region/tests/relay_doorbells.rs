//! Links over a port whose rings pass it by, through the doorbells of a device: the conformance suite, and hostile sides.
#![cfg(feature = "conformance")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall_protocol::port::Frame;
use partywall_region::conformance::{self, Backend, ConformanceRegion, HANG};
use partywall_region::pmem::Space;
use partywall_region::relay::{
    BellEvents, Doorbells, GuestDoorbells, HostDoorbells, LinkUse, Notice, Notices, PortSide, Relay, VectorEvent,
};
use partywall_region::{Link, LinkEvent, RegionOptions, packet};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The state of a simulated guest device, which the test changes by writing.
#[derive(Debug, Default)]
struct Board {
    /// The guest's vectors, on the host's side; what each signals is what its process listens to.
    vectors: Vec<VectorEvent>,
    taken: Vec<bool>,
    peers: BTreeMap<u32, OwnedFd>,
    next: u32,
    rings: u32,
    /// Processes get events to ring by.
    direct: bool,
    ringers: BTreeSet<u32>,
}

#[derive(Debug, Clone, Default)]
struct Fake(Arc<Mutex<Board>>);

impl Fake {
    fn new(vectors: usize) -> Self {
        let this = Self::default();
        let mut board = this.0.lock().unwrap();
        board.vectors = (0..vectors).map(|_| VectorEvent::new().unwrap()).collect();
        board.taken = vec![false; vectors];
        drop(board);
        this
    }

    fn rings(&self) -> u32 {
        self.0.lock().unwrap().rings
    }

    fn peers(&self) -> usize {
        self.0.lock().unwrap().peers.len()
    }

    fn taken(&self) -> usize {
        self.0.lock().unwrap().taken.iter().filter(|taken| **taken).count()
    }
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

impl GuestDoorbells for Fake {
    fn take(&mut self) -> Option<(u32, OwnedFd)> {
        let mut board = self.0.lock().unwrap();
        let vector = board.taken.iter().position(|taken| !taken)?;
        board.taken[vector] = true;
        Some((vector as u32, board.vectors[vector].as_fd().try_clone_to_owned().unwrap()))
    }

    fn give_back(&mut self, vector: u32) {
        self.0.lock().unwrap().taken[vector as usize] = false;
    }

    fn ring_upon(&mut self, peer: u32, event: BorrowedFd<'_>) -> bool {
        let mut board = self.0.lock().unwrap();
        let Some(target) = board.peers.get(&peer).filter(|_| board.direct) else { return false };
        let (event, target) = (event.try_clone_to_owned().unwrap(), target.try_clone().unwrap());
        board.ringers.insert(peer);
        let all = Arc::downgrade(&self.0);
        // As a kernel passes it on.
        std::thread::spawn(move || {
            while all.upgrade().is_some_and(|board| board.lock().unwrap().ringers.contains(&peer)) {
                let mut fds = [PollFd::new(&event, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
                if rustix::io::read(&event, &mut [0; 8]).is_ok() {
                    rustix::io::write(&target, &1u64.to_ne_bytes()).unwrap();
                }
            }
        });
        true
    }

    fn forget(&mut self, peer: u32) {
        self.0.lock().unwrap().ringers.remove(&peer);
    }

    fn ring(&self, peer: u32) {
        let mut board = self.0.lock().unwrap();
        board.rings += 1;
        if let Some(event) = board.peers.get(&peer) {
            rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
        }
    }
}

impl HostDoorbells for Fake {
    fn event(&self, vector: u32) -> Option<OwnedFd> {
        self.0.lock().unwrap().vectors.get(vector as usize).map(|event| event.as_fd().try_clone_to_owned().unwrap())
    }

    fn introduce(&mut self, event: OwnedFd) -> Option<u32> {
        let mut board = self.0.lock().unwrap();
        board.next += 1;
        let number = board.next;
        board.peers.insert(number, event);
        Some(number)
    }
}

/// A guest's relay and its host's, both with the same device.
struct Machine {
    guest: (Relay, Notices),
    host: (Relay, Notices),
    device: Fake,
}

impl Machine {
    fn new(vectors: usize) -> Self {
        let (guest, host) = joined();
        let device = Fake::new(vectors);
        guest.0.doorbells(Doorbells::Guest(Box::new(device.clone())));
        host.0.doorbells(Doorbells::Host(Box::new(device.clone())));
        Self { guest, host, device }
    }

    /// A process's end of a link whose other end is `far`.
    fn link(&self, id: u32, far: OwnedFd) -> Link {
        let (process, near) = Link::pair().unwrap();
        self.host.0.link(id, far, None);
        // The other side knows it before anything is said on it.
        self.host.0.control(b"known").unwrap();
        while self.guest.1.recv_timeout(HANG).unwrap() != Notice::Control(b"known".to_vec()) {}
        self.guest.0.link(id, near, None);
        // In a test, every ring must come from the test.
        Link::crossing(process, HANG).unwrap()
    }
}

/// The end of a bell of an unmodified program in a guest.
struct GuestBell {
    socket: OwnedFd,
    events: BellEvents,
}

impl GuestBell {
    /// Signals the event that rings the other side.
    fn ring(&self) {
        rustix::io::write(&self.events.ringing, &1u64.to_ne_bytes()).unwrap();
    }

    /// Waits until an interrupt rings.
    fn hear(&self) {
        let long = Timespec::try_from(HANG).unwrap();
        assert_eq!(poll(&mut [PollFd::new(&self.events.heard, PollFlags::IN)], Some(&long)).unwrap(), 1, "not heard");
        rustix::io::read(&self.events.heard, &mut [0; 8]).unwrap();
    }

    /// Takes what has come by the socket. Returns how many bells that were, and nothing else was there.
    fn bells(&self) -> usize {
        let mut bells = 0;
        while let Ok(received) = packet::try_recv(self.socket.as_fd(), &mut [0; 64]) {
            assert_eq!((received.len, received.fds.len()), (1, 0), "a bell, and no descriptor");
            bells += 1;
        }
        bells
    }
}

impl Machine {
    /// A bell of this machine whose other end is `far`, as `carries` has it on the host.
    fn bell(&self, id: u32, far: OwnedFd, carries: LinkUse) -> GuestBell {
        let (socket, near) = Link::pair().unwrap();
        self.guest.0.control_with(b"shown", vec![(id, near)], LinkUse::Bell).unwrap();
        while self.host.1.recv_timeout(HANG).unwrap() != Notice::Control(b"shown".to_vec()) {}
        self.host.0.control_with(b"bell", vec![(id, far)], carries).unwrap();
        while self.guest.1.recv_timeout(HANG).unwrap() != Notice::Control(b"bell".to_vec()) {}
        let events = self.guest.0.take_bell_events(id).expect("the machine has a device");
        assert!(self.guest.0.take_bell_events(id).is_none(), "given once");
        GuestBell { socket, events }
    }
}

#[test]
fn bells_of_two_machines_ring_by_events_without_relays() {
    let (a, b) = (Machine::new(4), Machine::new(4));
    for machine in [&a, &b] {
        machine.device.0.lock().unwrap().direct = true;
    }
    let (to_b, to_a) = Link::pair().unwrap();
    let here = a.bell(2, to_b, LinkUse::BellBetweenMachines);
    let there = b.bell(2, to_a, LinkUse::BellBetweenMachines);
    // By the relays at first, and by the port as well.
    let deadline = Instant::now() + HANG;
    while a.device.0.lock().unwrap().ringers.is_empty() {
        assert!(Instant::now() < deadline, "the event does not ring by the device");
        here.ring();
        std::thread::sleep(Duration::from_millis(1));
    }
    here.ring();
    there.hear();
    std::thread::sleep(Duration::from_millis(30));
    assert!(there.bells() >= 2, "the first bells come by the port, too");
    let before = a.device.rings();
    for _ in 0..10 {
        here.ring();
        there.hear();
    }
    assert_eq!((a.device.rings(), there.bells()), (before, 0), "no relay has rung, and nothing came by the port");
    there.ring();
    here.hear();
    drop(there);
    let mut fds = [PollFd::new(&here.socket, PollFlags::empty())];
    assert_eq!(poll(&mut fds, Some(&Timespec::try_from(HANG).unwrap())).unwrap(), 1, "the other side hangs up");
}

#[test]
fn host_program_rings_by_interrupt_and_gets_no_event() {
    let b = Machine::new(4);
    let (process, far) = Link::pair().unwrap();
    let there = b.bell(2, far, LinkUse::Bell);
    let host = Link::Socket(process.try_clone().unwrap());
    let deadline = Instant::now() + HANG;
    // The first go by the port as well, and so do those before the host knows the vector.
    let mut rung = 0;
    loop {
        host.ring();
        rung += 1;
        std::thread::sleep(Duration::from_millis(20));
        if there.bells() == 0 {
            break;
        }
        assert!(Instant::now() < deadline && rung < 100, "all rings go by the port");
    }
    there.hear();
    assert!(rung > 2);
    there.ring();
    let mut bytes = [0; 8];
    let received = packet::recv(process.as_fd(), &mut bytes).unwrap();
    assert_eq!((&bytes[..received.len], received.fds.len()), (&b"B"[..], 0));
    // An event that the program names is not rung by the machine.
    packet::send(process.as_fd(), b"R", &[b.device.event(1).unwrap().as_fd()]).unwrap();
    host.ring();
    there.hear();
    assert_eq!(b.device.peers(), 0);
}

/// Rings until `done`, for shortcuts take a moment, and takes all that comes of it.
fn ring_until(from: &Link, to: &Link, done: impl Fn() -> bool) {
    let deadline = Instant::now() + HANG;
    while !done() {
        assert!(Instant::now() < deadline, "no shortcut");
        from.ring();
        assert!(matches!(next(to), LinkEvent::Bell));
    }
    while let Some(event) = to.try_next().unwrap() {
        assert!(matches!(event, LinkEvent::Bell), "{event:?}");
    }
}

#[test]
fn machines_with_doorbells_ring_past_their_ports() {
    let (a, b) = (Machine::new(4), Machine::new(4));
    let (to_b, to_a) = Link::pair().unwrap();
    let (here, there) = (a.link(1, to_b), b.link(1, to_a));
    ring_until(&here, &there, || a.device.rings() > 5);
    ring_until(&there, &here, || b.device.rings() > 5);
    // Not by the ports: there, nothing is heard any more.
    let before = (a.device.rings(), b.device.rings());
    for _ in 0..10 {
        here.ring();
        assert!(matches!(next(&there), LinkEvent::Bell));
        there.ring();
        assert!(matches!(next(&here), LinkEvent::Bell));
    }
    assert!(a.device.rings() > before.0 && b.device.rings() > before.1);
    assert_eq!((a.device.peers(), a.device.taken()), (1, 1));
    // Not even by the relays, where there are events for processes.
    for machine in [&a, &b] {
        machine.device.0.lock().unwrap().direct = true;
    }
    let (to_b, to_a) = Link::pair().unwrap();
    let (from, to) = (a.link(3, to_b), b.link(3, to_a));
    ring_until(&from, &to, || a.device.0.lock().unwrap().ringers.len() == 1);
    from.ring();
    while !matches!(next(&to), LinkEvent::Bell) {}
    // The process has been sent the event to ring at, and uses it from its next look on. Rings by the ports, and by the relay for earlier
    // rings, may still be in transit.
    for link in [&from, &to] {
        while !matches!(link.wait(Some(Instant::now() + Duration::from_millis(30))).unwrap(), LinkEvent::TimedOut) {}
    }
    let before = a.device.rings();
    for _ in 0..10 {
        from.ring();
        assert!(matches!(next(&to), LinkEvent::Bell));
    }
    assert_eq!(a.device.rings(), before);
    drop(to);
    assert!(matches!(last(&from), LinkEvent::HungUp));
    drop(from);
    // The doorbells of a link are given back with it.
    drop(here);
    assert!(matches!(last(&there), LinkEvent::HungUp));
    let deadline = Instant::now() + HANG;
    let ringers = |machine: &Machine| machine.device.0.lock().unwrap().ringers.len();
    while (a.device.taken(), b.device.taken(), ringers(&a)) != (0, 0, 0) {
        assert!(Instant::now() < deadline, "{:?} {:?}", a.device, b.device);
        std::thread::yield_now();
    }
}

#[test]
fn links_past_ports_conform() {
    let file = file();
    let (space, theirs) = (Space::new(file.window().unwrap()), file.window().unwrap());
    let (a, b) = (Machine::new(4), Machine::new(4));
    for machine in [&a, &b] {
        machine.guest.0.window(file.id(), memory(&file));
        machine.host.0.window(file.id(), memory(&file));
    }
    let ids = AtomicU32::new(1);
    let region = |options: &RegionOptions| ConformanceRegion::in_window(&space, &theirs, options);
    let link = || {
        let id = ids.fetch_add(2, Ordering::Relaxed);
        let (to_b, to_a) = Link::pair().unwrap();
        let (here, there) = (a.link(id, to_b), b.link(id, to_a));
        let rings = |device: &Fake| device.rings();
        let before = (rings(&a.device), rings(&b.device));
        ring_until(&here, &there, || rings(&a.device) > before.0 + 2);
        ring_until(&there, &here, || rings(&b.device) > before.1 + 2);
        // Some of these may still be in transit.
        for link in [&here, &there] {
            while !matches!(link.wait(Some(Instant::now() + Duration::from_millis(30))).unwrap(), LinkEvent::TimedOut) {
            }
        }
        (here, there)
    };
    conformance::all(&Backend { region: &region, link: &link, at_once: false });
}

/// The first event after all rings.
fn last(link: &Link) -> LinkEvent {
    loop {
        match next(link) {
            LinkEvent::Bell => {}
            other => return other,
        }
    }
}

#[test]
fn host_process_and_machine_without_device_ring_vectors() {
    let b = Machine::new(4);
    let (process, to_b) = Link::pair().unwrap();
    let (process, there) = (Link::crossing(process, HANG).unwrap(), b.link(1, to_b));
    ring_until(&process, &there, || b.device.taken() == 1);
    there.ring();
    assert!(matches!(next(&process), LinkEvent::Bell));

    let (guest, host) = joined();
    let a = Machine { guest, host, device: Fake::default() };
    let (to_b, to_a) = Link::pair().unwrap();
    let (here, there) = (a.link(1, to_b), b.link(3, to_a));
    for _ in 0..20 {
        here.ring();
        assert!(matches!(next(&there), LinkEvent::Bell));
        there.ring();
        assert!(matches!(next(&here), LinkEvent::Bell));
    }
    assert_eq!((a.device.rings(), b.device.peers()), (0, 0));
}

#[test]
fn links_beyond_the_vectors_are_rung_by_the_port() {
    let (a, b) = (Machine::new(1), Machine::new(0));
    let links: Vec<(Link, Link)> = (0..3)
        .map(|n| {
            let (to_b, to_a) = Link::pair().unwrap();
            (a.link(1 + 2 * n, to_b), b.link(1 + 2 * n, to_a))
        })
        .collect();
    for (here, there) in &links {
        for _ in 0..5 {
            here.ring();
            assert!(matches!(next(there), LinkEvent::Bell));
            there.ring();
            assert!(matches!(next(here), LinkEvent::Bell));
        }
    }
    assert_eq!((a.device.taken(), a.device.rings()), (1, 0), "nobody in b can be rung");
}

/// A hostile guest, whose host has a device of two vectors for it; and a process's end of its link 1.
fn rung() -> (Hostile, (Relay, Notices), Fake, OwnedFd) {
    let (hostile, relay, notices) = Hostile::new(PortSide::Host);
    let device = Fake::new(2);
    relay.doorbells(Doorbells::Host(Box::new(device.clone())));
    let (process, far) = Link::pair().unwrap();
    relay.link(1, far, None);
    (hostile, (relay, notices), device, process)
}

#[test]
fn invalid_vectors_from_guest_affect_only_its_links() {
    let (mut hostile, (_relay, _notices), device, process) = rung();
    std::thread::sleep(Duration::from_millis(5));
    // Vectors that are not, links that are not, what is not for a guest to say; then one that is, again and again.
    for frame in [
        Frame::RungBy { link: 1, vector: 2 },
        Frame::RungBy { link: 1, vector: u32::MAX },
        Frame::RungBy { link: 9, vector: 0 },
        Frame::RingAs { link: 1, peer: 0 },
    ] {
        hostile.say(&frame);
    }
    for _ in 0..100 {
        hostile.say(&Frame::RungBy { link: 1, vector: 1 });
    }
    hostile.say(&Frame::Bell { link: 1 });
    let next = || {
        let mut bytes = [0; 2];
        let mut received = packet::recv(process.as_fd(), &mut bytes).unwrap();
        (bytes[..received.len].to_vec(), received.fds.pop())
    };
    let (said, Some(event)) = next() else { panic!("nothing to ring") };
    assert_eq!(said, b"R");
    assert_eq!(VectorEvent::number(&event), VectorEvent::number(&device.event(1).unwrap()));
    assert_eq!(next().0, b"B", "told once, and at work");
}

#[test]
fn process_may_set_its_vector_event_once() {
    let (mut hostile, (_relay, _notices), device, process) = rung();
    let say = |bytes: &[u8], fd: &OwnedFd| packet::send(process.as_fd(), bytes, &[fd.as_fd()]).unwrap();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    // A hypervisor that is given anything else to signal may hang: an event of the process's own, too, which it can have block.
    say(b"R", &pipe);
    say(b"R", &event());
    for vector in [0, 1].repeat(50) {
        say(b"R", &device.event(vector).unwrap());
    }
    assert_eq!(hostile.hear(), Frame::RingAs { link: 1, peer: 1 });
    Link::Socket(process.try_clone().unwrap()).ring();
    assert_eq!(hostile.hear(), Frame::Bell { link: 1 }, "and nothing in between");
    assert_eq!(device.peers(), 1);
    let introduced = VectorEvent::number(&device.0.lock().unwrap().peers[&1]);
    assert_eq!(introduced, VectorEvent::number(&device.event(0).unwrap()));
    // No process tells a relay what to listen to.
    say(b"L", &event());
    assert_eq!(hostile.hear(), Frame::HungUp { link: 1 });
}
