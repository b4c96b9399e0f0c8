//! Peers that speak the protocol by hand, and can therefore lie: a broker that passes on whatever it is told to, and the
//! other side of a channel with its region and links bare.

use super::{Dice, HANG};
use partywall::{Domain, Listener, Options, Stream};
use partywall_region::{Event, Link, OwnRegion, PeerRegion, RegionOptions, packet};
use partywall_shm::layout::{ControlPage, Geometry, RegionKind};
use partywall_shm::sync::Peer;
use partywall_shm::wire::{self, Directions, Kind, MAX_PACKET, Message};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// A broker that says yes to everything, and hands a test what it is asked to pass on.
pub(crate) struct YesBroker {
    dir: tempfile::TempDir,
    listener: OwnedFd,
    /// Sessions that have bound a service.
    bound: Receiver<OwnedFd>,
    /// `Connect`s, with their descriptors.
    connects: Receiver<(Message, Vec<OwnedFd>)>,
}

impl YesBroker {
    pub(crate) fn start() -> Self {
        super::watch_all();
        let dir = tempfile::tempdir().unwrap();
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(dir.path().join("broker.sock")).unwrap()).unwrap();
        rustix::net::listen(&listener, 16).unwrap();
        let (to_bound, bound) = channel();
        let (to_connects, connects) = channel();
        let accepting = rustix::io::fcntl_dupfd_cloexec(&listener, 0).unwrap();
        std::thread::spawn(move || {
            while let Ok(session) = rustix::net::accept_with(&accepting, SocketFlags::CLOEXEC) {
                let (to_bound, to_connects) = (to_bound.clone(), to_connects.clone());
                std::thread::spawn(move || serve(&session, &to_bound, &to_connects));
            }
        });
        Self { dir, listener, bound, connects }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("broker.sock")
    }

    pub(crate) fn join(&self, name: &str) -> Domain {
        Domain::builder().name(name).broker(self.path()).join().unwrap()
    }

    /// A listener, and the session by which connections are given to it.
    pub(crate) fn listener(&self, options: &Options) -> (Listener, OwnedFd) {
        let listener = self.join("web").bind_with("raw", options).unwrap();
        (listener, self.next_bound())
    }

    /// The session of what has just bound a service.
    pub(crate) fn next_bound(&self) -> OwnedFd {
        self.bound.recv_timeout(HANG).unwrap()
    }

    /// A stream that has connected, and the bare other side, which has not attached its memory yet.
    pub(crate) fn connected(&self, options: &Options) -> (Stream, RawPeer) {
        let stream = self.join("shop").connect_with("web:raw", options).unwrap();
        (stream, self.next_connect())
    }

    /// The bare other side of what has just connected.
    pub(crate) fn next_connect(&self) -> RawPeer {
        let (message, fds) = self.connects.recv_timeout(HANG).unwrap();
        let Message::Connect { ring_offset, ring_size, .. } = message else { panic!("{message:?}") };
        let mut fds = fds.into_iter();
        let geometry = Geometry::new(ring_offset, ring_size).unwrap();
        let theirs = PeerRegion::attach(fds.next().unwrap().as_fd(), RegionKind::Endpoint, geometry).unwrap();
        let links: Vec<Link> = fds.map(|fd| Link::from_fd(fd).unwrap()).collect();
        let (region, memory) = OwnRegion::create(&RegionOptions::endpoint(RING)).unwrap();
        RawPeer { region, memory, links, theirs: Some(theirs), connecting: false }
    }

    /// A stream that was accepted, and the bare other side, which has the stream's memory. The listener lives on.
    pub(crate) fn accepted(&self, options: &Options) -> (Stream, RawPeer, Listener, OwnedFd) {
        let (mut listener, session) = self.listener(options);
        let mut peer = RawPeer::offer(&session);
        let (stream, info) = listener.accept().unwrap();
        assert_eq!(info.name, "liar");
        peer.take_memory();
        (stream, peer, listener, session)
    }
}

impl Drop for YesBroker {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
    }
}

fn serve(session: &OwnedFd, bound: &Sender<OwnedFd>, connects: &Sender<(Message, Vec<OwnedFd>)>) {
    let mut buf = [0; MAX_PACKET];
    while let Ok(received) = packet::recv(session.as_fd(), &mut buf) {
        let Ok((request, message)) = wire::decode(&buf[..received.len]) else { return };
        let answer = match message {
            Message::Join { name, .. } => {
                Message::Joined { domain: 1, epoch: 1, instance: 1, max_ring: 1 << 30, max_channels: 1000, name }
            }
            Message::Bind { .. } => {
                let _ = bound.send(rustix::io::fcntl_dupfd_cloexec(session, 0).unwrap());
                Message::Done {}
            }
            Message::Connect { .. } => {
                let _ = connects.send((message, received.fds));
                Message::Connected { channel: 1, domain: 1, epoch: 1 }
            }
            Message::Reclaim { .. } | Message::Ping {} => Message::Done {},
            _ => continue,
        };
        say(session.as_fd(), request, &answer, &[]);
    }
}

pub(crate) fn say(session: BorrowedFd<'_>, request: u32, message: &Message, fds: &[BorrowedFd<'_>]) {
    let mut out = Vec::new();
    wire::encode(request, message, &mut out);
    // Who has just gone needs no answer.
    let _ = packet::send(session, &out, fds);
}

/// Size of a raw peer's ring.
pub(crate) const RING: u64 = 8192;

/// The other side of a stream, bare.
pub(crate) struct RawPeer {
    pub(crate) region: OwnRegion,
    pub(crate) memory: OwnedFd,
    /// Forward, then reverse.
    pub(crate) links: Vec<Link>,
    /// The stream's own region.
    pub(crate) theirs: Option<PeerRegion>,
    pub(crate) connecting: bool,
}

impl RawPeer {
    /// Connects honestly, for now.
    pub(crate) fn offer(session: &OwnedFd) -> Self {
        let (region, memory) = OwnRegion::create(&RegionOptions::endpoint(RING)).unwrap();
        let (forward, a) = Link::pair().unwrap();
        let (reverse, b) = Link::pair().unwrap();
        offer(session, Kind::Stream, region.geometry(), &[memory.as_fd(), a.as_fd(), b.as_fd()]);
        let links = vec![Link::Socket(forward), Link::Socket(reverse)];
        Self { region, memory, links, theirs: None, connecting: true }
    }

    /// Takes the memory that the accepting side sends, on both links.
    pub(crate) fn take_memory(&mut self) {
        for link in &self.links {
            let Event::Attach { generation: 0, start: 0, base: 0, geometry, memory } =
                link.wait(Some(Instant::now() + HANG)).unwrap()
            else {
                panic!("no memory came")
            };
            self.theirs = Some(PeerRegion::attach(memory.as_fd(), RegionKind::Endpoint, geometry).unwrap());
        }
    }

    /// Sends its own memory, on both links, as an accepting side does.
    pub(crate) fn attach(&self) {
        for link in &self.links {
            link.attach(0, self.region.geometry(), self.memory.as_fd()).unwrap();
        }
    }

    pub(crate) fn page(&self) -> &ControlPage {
        self.region.page()
    }

    pub(crate) fn their_page(&self) -> &ControlPage<Peer> {
        self.theirs.as_ref().unwrap().page()
    }

    /// The link of the direction that this side writes: its other end reads.
    pub(crate) fn outward(&self) -> &Link {
        &self.links[usize::from(!self.connecting)]
    }

    /// The link of the direction that this side reads: its other end writes.
    pub(crate) fn inward(&self) -> &Link {
        &self.links[usize::from(self.connecting)]
    }

    /// Writes bytes at `at` and says that there are as many as that.
    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        self.region.span(at, bytes.len() as u64).copy_from(0, bytes);
        self.set_tail(at + bytes.len() as u64);
    }

    /// Does one thing that no honest peer would, or that it might.
    pub(crate) fn scramble(&mut self, dice: &mut Dice) {
        let near = [0, 1, 100, 4096, RING, 1 << 32, u64::MAX][dice.below(7) as usize];
        let tail = self.page().tx.cursor.tail.load(Relaxed);
        let head = self.page().rx.cursor.head.load(Relaxed);
        let (tx, rx) = (&self.page().tx, &self.page().rx);
        match dice.below(16) {
            // Mostly as it should be, so that it does not end at once.
            0..4 => tx.cursor.tail.store(tail.wrapping_add(dice.below(500)), Release),
            4..8 => rx.cursor.head.store(self.their_page().tx.cursor.tail.load(Relaxed), Release),
            8 => tx.cursor.tail.store(tail.wrapping_add(near), Release),
            9 => rx.cursor.head.store(head.wrapping_sub(near), Release),
            10 => tx.control.switch_at.store(tail.wrapping_sub(near), Relaxed),
            11 => tx.control.generation.store(dice.below(3) as u32, Release),
            12 => rx.control.data_wanted.store(near, Relaxed),
            13 => tx.control.space_wanted.store(near, Relaxed),
            14 if dice.one_in(8) => tx.control.state.store(dice.below(4) as u32, Release),
            14 if dice.one_in(8) => rx.control.state.store(dice.below(4) as u32, Release),
            _ => {
                let kind = if dice.one_in(4) { RegionKind::Endpoint } else { RegionKind::Extension };
                let options = RegionOptions { kind, ..RegionOptions::endpoint(4096 << dice.below(4)) };
                let (region, memory) = OwnRegion::create(&options).unwrap();
                let link = if dice.one_in(8) { self.inward() } else { self.outward() };
                let _ = link.attach(dice.below(4) as u32, region.geometry(), memory.as_fd());
            }
        }
        self.outward().ring();
        self.inward().ring();
    }

    pub(crate) fn set_tail(&self, tail: u64) {
        self.page().tx.cursor.tail.store(tail, Release);
        self.outward().ring();
    }

    pub(crate) fn set_head(&self, head: u64) {
        self.page().rx.cursor.head.store(head, Release);
        self.inward().ring();
    }
}

/// Gives a listener a connection with any descriptors, whatever they are.
pub(crate) fn offer(session: &OwnedFd, kind: Kind, geometry: Geometry, fds: &[BorrowedFd<'_>]) {
    offer_told(session, kind, (geometry.ring_offset(), geometry.ring_size()), fds);
}

/// The same, with any shape told.
pub(crate) fn offer_told(session: &OwnedFd, kind: Kind, told: (u64, u64), fds: &[BorrowedFd<'_>]) {
    let message = Message::Incoming {
        channel: 1,
        domain: 9,
        epoch: 1,
        name: "liar".into(),
        uid: 0,
        pid: 1,
        kind,
        directions: Directions::BOTH,
        ring_offset: told.0,
        ring_size: told.1,
    };
    say(session.as_fd(), 0, &message, fds);
}
