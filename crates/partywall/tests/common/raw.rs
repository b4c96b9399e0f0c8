//! Peers that speak the protocol by hand, and can therefore lie: a broker that passes on everything that a test asks it to, and the
//! other side of a channel with its region and links bare.

use super::{Dice, HANG};
use partywall::{Domain, Listener, Options, Stream};
use partywall_protocol::wire::{self, Directions, Kind, MAX_PACKET, Message, RegionReference, Side, User};
use partywall_region::{Link, OwnRegion, PeerRegion, RegionOptions, link, packet};
use partywall_shm::layout::{ControlPage, Geometry, RegionKind};
use partywall_shm::sync::Peer;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{Receiver, Sender, channel};

/// A broker that says yes to everything, and hands a test what it is asked to pass on.
pub(crate) struct YesBroker {
    dir: tempfile::TempDir,
    listener: OwnedFd,
    /// Sessions that have bound a service.
    bound: Receiver<OwnedFd>,
    /// The messages with which a client shares its memory: `Connect`, with the link ends made for the other side, `Accepted`, `Grow`. And
    /// the session.
    connects: Receiver<Said>,
    accepted: Receiver<Said>,
    /// The numbers of these requests are reported too.
    pub(crate) grown: Receiver<(u32, Said)>,
    /// Channels that a client has closed.
    pub(crate) closed: Receiver<u64>,
    /// Whether `Grow` is left without an answer.
    pub(crate) silent: Arc<AtomicBool>,
}

/// A client's message, the descriptors with it, and the session that it came on.
pub(crate) type Said = (Message, Vec<OwnedFd>, OwnedFd);

/// Where a session's thread tells of it.
#[derive(Clone)]
struct Tell {
    bound: Sender<OwnedFd>,
    connects: Sender<Said>,
    accepted: Sender<Said>,
    grown: Sender<(u32, Said)>,
    closed: Sender<u64>,
    silent: Arc<AtomicBool>,
}

/// Numbers of channels, each used once.
fn next_channel() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed)
}

impl YesBroker {
    pub(crate) fn start() -> Self {
        super::watch_all();
        let dir = tempfile::tempdir().unwrap();
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(dir.path().join("broker.sock")).unwrap()).unwrap();
        rustix::net::listen(&listener, 16).unwrap();
        let ((to_bound, bound), (to_connects, connects)) = (channel(), channel());
        let ((to_accepted, accepted), (to_grown, grown)) = (channel(), channel());
        let ((to_closed, closed), silent) = (channel(), Arc::<AtomicBool>::default());
        let tell = Tell {
            bound: to_bound,
            connects: to_connects,
            accepted: to_accepted,
            grown: to_grown,
            closed: to_closed,
            silent: Arc::clone(&silent),
        };
        let accepting = rustix::io::fcntl_dupfd_cloexec(&listener, 0).unwrap();
        std::thread::spawn(move || {
            while let Ok(session) = rustix::net::accept_with(&accepting, SocketFlags::CLOEXEC) {
                let tell = tell.clone();
                std::thread::spawn(move || serve(&session, &tell));
            }
        });
        Self { dir, listener, bound, connects, accepted, grown, closed, silent }
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
        let (message, fds, session) = self.connects.recv_timeout(HANG).unwrap();
        let Message::Incoming { channel, region, .. } = message else { panic!("{message:?}") };
        let mut fds = fds.into_iter();
        let geometry = region.check_own_memory().unwrap();
        let theirs = PeerRegion::attach(fds.next().unwrap().as_fd(), RegionKind::Endpoint, geometry).unwrap();
        let links: Vec<Link> = fds.map(|fd| Link::bells(fd).unwrap()).collect();
        let (region, memory) = OwnRegion::create(&RegionOptions::endpoint(RING)).unwrap();
        RawPeer { region, memory, links, theirs: Some(theirs), connecting: false, channel, session: Some(session) }
    }

    /// A stream that was accepted, and the bare other side, which has the stream's memory. The listener lives on.
    pub(crate) fn accepted(&self, options: &Options) -> (Stream, RawPeer, Listener, OwnedFd) {
        let (mut listener, session) = self.listener(options);
        let mut peer = RawPeer::offer(&session);
        let (stream, info) = listener.accept().unwrap();
        assert_eq!(info.name, "liar");
        peer.take_memory(self);
        (stream, peer, listener, session)
    }
}

impl Drop for YesBroker {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
    }
}

fn serve(session: &OwnedFd, tell: &Tell) {
    let mut buf = [0; MAX_PACKET];
    let copy = || rustix::io::fcntl_dupfd_cloexec(session, 0).unwrap();
    while let Ok(received) = packet::recv(session.as_fd(), &mut buf) {
        let Ok((request, message)) = wire::decode(&buf[..received.len]) else { return };
        let answer = match message {
            Message::Join { name, .. } => Message::Joined {
                domain: 1,
                epoch: 1,
                instance: 1,
                max_ring: 1 << 30,
                max_channels: 1000,
                user: User::Host(0),
                name,
            },
            Message::Bind { .. } => {
                let _ = tell.bound.send(copy());
                Message::Done {}
            }
            Message::Connect { kind, directions, region, .. } => {
                let (channel, mut fds) = (next_channel(), received.fds);
                let mut theirs = Vec::new();
                for _ in 0..directions.count() {
                    let (near, far) = link::pair().unwrap();
                    theirs.push(near);
                    fds.push(far);
                }
                let incoming = incoming(channel, kind, region);
                let links = theirs.len() as u8;
                let with: Vec<BorrowedFd<'_>> = theirs.iter().map(AsFd::as_fd).collect();
                say(session.as_fd(), request, &Message::Connected { channel, domain: 1, epoch: 1, links }, &with);
                let _ = tell.connects.send((incoming, fds, copy()));
                continue;
            }
            Message::Accepted { .. } => {
                let _ = tell.accepted.send((message, received.fds, copy()));
                Message::Done {}
            }
            Message::Grow { .. } => {
                let _ = tell.grown.send((request, (message, received.fds, copy())));
                if tell.silent.load(Relaxed) {
                    continue;
                }
                Message::Done {}
            }
            Message::Closed { channel } => {
                let _ = tell.closed.send(channel);
                continue;
            }
            Message::Reclaim { .. }
            | Message::ReclaimRegion { .. }
            | Message::TakeRegions { .. }
            | Message::Ping {} => Message::Done {},
            _ => continue,
        };
        say(session.as_fd(), request, &answer, &[]);
    }
}

pub(crate) fn say(session: BorrowedFd<'_>, request: u32, message: &Message, fds: &[BorrowedFd<'_>]) {
    let mut out = Vec::new();
    wire::encode(request, message, &mut out);
    // A client that has just gone needs no answer.
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
    pub(crate) channel: u64,
    /// The session by which the broker passes memory on to the stream, once known.
    pub(crate) session: Option<OwnedFd>,
}

impl RawPeer {
    /// Connects honestly, for now.
    pub(crate) fn offer(session: &OwnedFd) -> Self {
        let (region, memory) = OwnRegion::create(&RegionOptions::endpoint(RING)).unwrap();
        Self::offer_with(session, Kind::Stream, region, memory)
    }

    /// Offers a connection with this memory.
    pub(crate) fn offer_with(session: &OwnedFd, kind: Kind, region: OwnRegion, memory: OwnedFd) -> Self {
        Self::offer_by(session, kind, region, memory, [link::pair().unwrap(), link::pair().unwrap()])
    }

    /// Offers a connection with these links: for each direction this side's end, and the other's.
    pub(crate) fn offer_by(
        session: &OwnedFd,
        kind: Kind,
        region: OwnRegion,
        memory: OwnedFd,
        [(forward, a), (reverse, b)]: [(OwnedFd, OwnedFd); 2],
    ) -> Self {
        let channel = offer(session, kind, region.geometry(), &[memory.as_fd(), a.as_fd(), b.as_fd()]);
        let links = vec![Link::bells(forward).unwrap(), Link::bells(reverse).unwrap()];
        Self { region, memory, links, theirs: None, connecting: true, channel, session: None }
    }

    /// Takes the memory that the accepting side has given to the broker.
    pub(crate) fn take_memory(&mut self, broker: &YesBroker) {
        loop {
            let (message, fds, session) = broker.accepted.recv_timeout(HANG).unwrap();
            let Message::Accepted { channel, start: 0, region } = message else { panic!("{message:?}") };
            if channel == self.channel {
                let geometry = region.check_own_memory().unwrap();
                self.theirs = Some(PeerRegion::attach(fds[0].as_fd(), RegionKind::Endpoint, geometry).unwrap());
                self.session = Some(session);
                return;
            }
        }
    }

    /// Sends its own memory by the broker, as an accepting side does.
    pub(crate) fn attach(&self) {
        self.attach_memory(self.region.geometry(), &self.memory);
    }

    /// Attaches with any memory.
    pub(crate) fn attach_memory(&self, geometry: Geometry, memory: &OwnedFd) {
        let region = RegionReference::own_memory(geometry);
        let attached = Message::Attached { channel: self.channel, start: 0, region };
        say(self.session.as_ref().unwrap().as_fd(), 0, &attached, &[memory.as_fd()]);
        self.links.iter().for_each(Link::ring);
    }

    /// Sends a ring by the broker. Whether there was room for it.
    pub(crate) fn send_ring(&self, generation: u32, geometry: Geometry, memory: &OwnedFd) -> bool {
        let side = if self.connecting { Side::Connecting } else { Side::Accepting };
        let (channel, region) = (self.channel, RegionReference::own_memory(geometry));
        let mut out = Vec::new();
        wire::encode(0, &Message::Ring { channel, side, generation, region }, &mut out);
        packet::try_send(self.session.as_ref().unwrap().as_fd(), &out, &[memory.as_fd()]).is_ok()
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
                self.send_ring(dice.below(4) as u32, region.geometry(), &memory);
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

/// Gives a listener a connection with any descriptors, whatever they are. Returns its number.
pub(crate) fn offer(session: &OwnedFd, kind: Kind, geometry: Geometry, fds: &[BorrowedFd<'_>]) -> u64 {
    offer_told(session, kind, RegionReference::own_memory(geometry), fds)
}

/// Offers a connection with any shape.
pub(crate) fn offer_told(session: &OwnedFd, kind: Kind, region: RegionReference, fds: &[BorrowedFd<'_>]) -> u64 {
    let channel = next_channel();
    say(session.as_fd(), 0, &incoming(channel, kind, region), fds);
    channel
}

fn incoming(channel: u64, kind: Kind, region: RegionReference) -> Message {
    Message::Incoming {
        channel,
        domain: 9,
        epoch: 1,
        name: "liar".into(),
        user: User::Host(0),
        pid: 1,
        at_home: true,
        kind,
        directions: if kind == Kind::Broadcast { Directions::REVERSE } else { Directions::BOTH },
        region,
    }
}
