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

    /// Whether an interrupt has rung since the last look.
    fn has_heard(&self) -> bool {
        rustix::io::read(&self.events.heard, &mut [0; 8]).is_ok()
    }

    /// Waits for the next bell by the socket; `false` if the other side hangs up instead.
    fn takes_bell(&self) -> bool {
        let long = Timespec::try_from(HANG).unwrap();
        let ready = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&long)).unwrap();
        assert_eq!(ready, 1, "no bell by the port, and no hang-up");
        let received = packet::try_recv(self.socket.as_fd(), &mut [0; 64]).unwrap();
        assert!(received.len <= 1 && received.fds.is_empty(), "a bell, and no descriptor");
        received.len == 1
    }

    /// Rings by `ring` until `count` of its rings have come both by interrupt and by the port. Each ring must come by the port, which delivers
    /// it after its interrupt.
    fn take_both_ways(&self, count: usize, ring: impl Fn()) {
        let deadline = Instant::now() + HANG;
        let mut both = 0;
        while both < count {
            assert!(Instant::now() < deadline, "all rings go by the port alone");
            ring();
            assert!(self.takes_bell(), "hung up");
            both += usize::from(self.has_heard());
        }
    }

    /// The number of bells by the socket until the other side hangs up. The hang-up follows all bells on the same path.
    fn bells_until_hang_up(&self) -> usize {
        std::iter::from_fn(|| self.takes_bell().then_some(())).count()
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
    // By the port alone until the relay knows the event. Then the relay rings twice by the device and by the port.
    there.take_both_ways(2, || here.ring());
    assert_eq!(
        (a.device.rings(), a.device.0.lock().unwrap().ringers.len()),
        (2, 1),
        "the event rings by the device now"
    );
    for _ in 0..10 {
        here.ring();
        there.hear();
    }
    there.ring();
    here.hear();
    drop(here);
    assert_eq!(
        (there.bells_until_hang_up(), a.device.rings()),
        (0, 2),
        "nothing came by the port, and no relay has rung"
    );
}

#[test]
fn host_program_rings_by_interrupt_and_gets_no_event() {
    let b = Machine::new(4);
    let (process, far) = Link::pair().unwrap();
    let there = b.bell(2, far, LinkUse::Bell);
    let host = Link::Socket(process.try_clone().unwrap());
    // By the port alone until the host knows the vector. Then twice both ways.
    there.take_both_ways(2, || host.ring());
    for _ in 0..10 {
        host.ring();
        there.hear();
    }
    there.ring();
    let mut bytes = [0; 8];
    let received = packet::recv(process.as_fd(), &mut bytes).unwrap();
    assert_eq!((&bytes[..received.len], received.fds.len()), (&b"B"[..], 0));
    // An event that the program names is not rung by the machine.
    packet::send(process.as_fd(), b"R", &[b.device.event(1).unwrap().as_fd()]).unwrap();
    host.ring();
    there.hear();
    assert_eq!(b.device.peers(), 0);
    drop((process, host));
    assert_eq!(there.bells_until_hang_up(), 0, "nothing came by the port as well");
}

/// Waits until `relay` has read all packets that processes had sent it, and the other side, which has these notices, has handled the frames
/// that they became.
///
/// Each message is sent after the turn of the loop that sent the one before has read its links. In a turn, messages come before packets. The
/// turn that sends the first may have looked for packets before they were there. The turn of the second reads them, and the third
/// follows them.
fn settle(relay: &Relay, notices: &Notices) {
    for message in [b"first", b"again", b"third"] {
        relay.control(message).unwrap();
        while notices.recv_timeout(HANG).unwrap() != Notice::Control(message.to_vec()) {}
    }
}

/// Waits until all earlier rings have arrived, those by the ports as well, and takes them. Returns how
/// many events they were.
fn take_rings(machines: [&Machine; 2], links: [&Link; 2]) -> usize {
    machines.iter().for_each(|machine| settle(&machine.guest.0, &machine.host.1));
    machines.iter().for_each(|machine| settle(&machine.host.0, &machine.guest.1));
    let mut events = 0;
    for link in links {
        while let Some(event) = link.try_next().unwrap() {
            assert!(matches!(event, LinkEvent::Bell), "{event:?}");
            events += 1;
        }
    }
    events
}

/// Rings until `done`, for shortcuts take a moment.
fn ring_until(from: &Link, to: &Link, done: impl Fn() -> bool) {
    let deadline = Instant::now() + HANG;
    while !done() {
        assert!(Instant::now() < deadline, "no shortcut");
        from.ring();
        assert!(matches!(next(to), LinkEvent::Bell));
    }
}

#[test]
fn machines_with_doorbells_ring_past_their_ports() {
    let (a, b) = (Machine::new(4), Machine::new(4));
    let (to_b, to_a) = Link::pair().unwrap();
    let (here, there) = (a.link(1, to_b), b.link(1, to_a));
    ring_until(&here, &there, || a.device.rings() > 5);
    ring_until(&there, &here, || b.device.rings() > 5);
    // No longer by the ports: from now on, each ring is one of the device, and one event.
    take_rings([&a, &b], [&here, &there]);
    let before = (a.device.rings(), b.device.rings());
    for _ in 0..10 {
        here.ring();
        assert!(matches!(next(&there), LinkEvent::Bell));
        there.ring();
        assert!(matches!(next(&here), LinkEvent::Bell));
    }
    assert_eq!(take_rings([&a, &b], [&here, &there]), 0, "rings came by two ways");
    assert_eq!((a.device.rings(), b.device.rings()), (before.0 + 10, before.1 + 10));
    assert_eq!((a.device.peers(), a.device.taken()), (1, 1));
    // Not even by the relays, where there are events for processes.
    for machine in [&a, &b] {
        machine.device.0.lock().unwrap().direct = true;
    }
    let (to_b, to_a) = Link::pair().unwrap();
    let (from, to) = (a.link(3, to_b), b.link(3, to_a));
    ring_until(&from, &to, || a.device.0.lock().unwrap().ringers.len() == 1);
    // The process is sent the event to ring at. From its next look at the link on, its rings pass the relay by.
    let deadline = Instant::now() + HANG;
    let before = loop {
        let before = a.device.rings();
        from.ring();
        assert!(matches!(next(&to), LinkEvent::Bell));
        take_rings([&a, &b], [&from, &to]);
        if a.device.rings() == before {
            break before;
        }
        assert!(Instant::now() < deadline, "the process does not ring by its event");
    };
    for _ in 0..10 {
        from.ring();
        assert!(matches!(next(&to), LinkEvent::Bell));
    }
    take_rings([&a, &b], [&from, &to]);
    assert_eq!(a.device.rings(), before, "the relay rings");
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
        take_rings([&a, &b], [&here, &there]);
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
