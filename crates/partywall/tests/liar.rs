//! Liars: processes that own their side of each channel and write boundary values to every word of their memory, while honest peers
//! carry checked bytes beside them.
//!
//! The honest side may see the liar's own bytes, an end, or *corrupt*. It never crashes, never hangs, and never reads bytes that the
//! liar did not write. `make test` runs this for a moment; `make soak` for as long as `PARTYWALL_LIAR_SECONDS` says, and under
//! AddressSanitizer as well. `PARTYWALL_SOAK_SEED` repeats the dice of an earlier run.
#![expect(unsafe_code, reason = "a liar maps its memory itself, to reach every word of it")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{self, Process};
use common::*;
use partywall::{Domain, Error, Listener, MessageListener, MessageSocket, Stream};
use partywall_protocol::wire::{self, Directions, Kind, MAX_PACKET, Message, RegionReference, Side};
use partywall_region::{Link, PeerRegion, memfd, packet};
use partywall_shm::layout::{ControlPage, Geometry, PAGE, RegionKind};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::{Duration, Instant};

/// Size of a liar's rings.
const RING: u64 = 8192;
/// The number of steps of a liar on one channel before it leaves.
const STEPS: u64 = 400;
/// Values at which sums, sizes and signs change.
const EDGES: [u64; 22] = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    PAGE - 1,
    PAGE,
    PAGE + 1,
    RING - 1,
    RING,
    RING + 1,
    2 * RING,
    i32::MAX as u64,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

/// Words of the control page that a peer loads again and again: tail, the producer's control line, head, the consumer's control line.
/// The cursors are in it more often, because other lies end a channel sooner.
const JUDGED: [u64; 16] = [8, 8, 8, 8, 16, 17, 18, 19, 20, 21, 32, 32, 32, 32, 40, 41];

/// Whether a liar can have written such a byte to a ring. Other memory of this process has all sorts of bytes.
fn is_liars(byte: u8) -> bool {
    static ALL: std::sync::OnceLock<[bool; 256]> = std::sync::OnceLock::new();
    ALL.get_or_init(|| {
        let mut all = [false; 256];
        EDGES.iter().flat_map(|edge| edge.to_le_bytes()).for_each(|byte| all[usize::from(byte)] = true);
        all
    })[usize::from(byte)]
}

#[track_caller]
fn check_liars(bytes: &[u8]) {
    if let Some(at) = bytes.iter().position(|byte| !is_liars(*byte)) {
        panic!("byte {at} of {} is {:#x}, which no liar wrote", bytes.len(), bytes[at]);
    }
}

fn edge(dice: &mut Dice) -> u64 {
    EDGES[dice.below(EDGES.len() as u64) as usize]
}

/// One word, or two of half the size.
fn edges(dice: &mut Dice) -> u64 {
    if dice.one_in(2) { edge(dice) } else { edge(dice) << 32 | edge(dice) & u64::from(u32::MAX) }
}

/// The liar's region, mapped so that the liar can write every word.
struct Memory {
    base: *mut AtomicU64,
    fd: OwnedFd,
}

impl Memory {
    /// Honest until it is attached.
    fn new(kind: RegionKind) -> Self {
        let geometry = Self::geometry();
        let fd = rustix::fs::memfd_create("lies", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, geometry.region_size()).unwrap();
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, geometry.region_size()).unwrap();
        // SAFETY: a new mapping wherever the kernel likes.
        let base = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), Self::size(), prot, MapFlags::SHARED, &fd, 0).unwrap()
        };
        let memory = Self { base: base.cast(), fd };
        // Pages that were never written count as holes.
        (0..Self::size() as u64 / 8).for_each(|at| memory.word(at).store(0, Relaxed));
        memory.page().awaken(geometry);
        memory.page().header.write(kind, geometry, 0, 1, 1);
        rustix::fs::fcntl_add_seals(&memory.fd, memfd::SEALS).unwrap();
        memory
    }

    fn geometry() -> Geometry {
        Geometry::new(PAGE, RING).unwrap()
    }

    fn size() -> usize {
        Self::geometry().region_size() as usize
    }

    fn page(&self) -> &ControlPage {
        // SAFETY: the mapping begins with a page, lives as long as `self`, and the type consists of atomics alone.
        unsafe { &*self.base.cast::<ControlPage>() }
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        assert!(at < Self::size() as u64 / 8);
        // SAFETY: the word is within the mapping, which lives as long as `self`.
        unsafe { &*self.base.add(at as usize) }
    }

    /// Writes a boundary value to one word: half of the time to one that the peer judges, else to any of the control page or the ring.
    fn lie(&self, dice: &mut Dice) {
        let (page, all) = (PAGE / 8, Self::size() as u64 / 8);
        let at = match dice.below(8) {
            0..4 => JUDGED[dice.below(JUDGED.len() as u64) as usize],
            4 => dice.below(page / 8),
            5 => dice.below(page),
            _ => page + dice.below(all - page),
        };
        let word = self.word(at);
        let value = match dice.below(3) {
            // Near the present value. Not in the ring: its bytes are recognised by their values.
            0 if at < page => word.load(Relaxed).wrapping_add(edge(dice)),
            1 if at < page => word.load(Relaxed).wrapping_sub(edge(dice)),
            _ => edges(dice),
        };
        word.store(value, Release);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no reference outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), Self::size()) };
    }
}

/// Not itself a test: the process that lies, until it is killed. Its role: whether it connects or accepts, a seed, and a file for the
/// number of its lies.
#[test]
fn child_main() {
    let Some((role, broker)) = process::role() else { return };
    let mut words = role.splitn(3, ' ');
    let (connects, seed, file) = (words.next() == Some("connects"), words.next().unwrap(), words.next().unwrap());
    let (mut dice, mut lies) = (Dice::new(seed.parse().unwrap()), 0u64);
    loop {
        let mut session = Session::join(&broker);
        // A session lasts for some channels: what the broker sends besides is not all read.
        for _ in 0..20 {
            let channel = if connects { session.connect(&mut dice) } else { session.accept() };
            let Some(channel) = channel else { break };
            lies += channel.lie(&session, &mut dice);
            std::fs::write(file, lies.to_string()).unwrap();
        }
    }
}

/// A liar's session with the broker, packet by packet.
struct Session {
    socket: OwnedFd,
    request: u32,
    /// Incoming connections, which come at any time.
    incoming: VecDeque<(Message, Vec<OwnedFd>)>,
    bound: bool,
}

impl Session {
    fn join(broker: &Path) -> Self {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(broker).unwrap()).unwrap();
        let mut session = Self { socket, request: 0, incoming: VecDeque::new(), bound: false };
        let join = Message::Join { version: wire::VERSION, name: "liar".into() };
        assert!(matches!(session.ask(&join, &[]), Some((Message::Joined { .. }, _))), "the liar cannot join");
        session
    }

    fn tell(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) {
        self.request += 1;
        let mut out = Vec::new();
        wire::encode(self.request, message, &mut out);
        packet::send(self.socket.as_fd(), &out, fds).unwrap();
    }

    /// The next packet, if one comes soon.
    fn receive(&self) -> Option<(u32, Message, Vec<OwnedFd>)> {
        if !readable(&self.socket, Duration::from_secs(1)) {
            return None;
        }
        let mut buf = [0; MAX_PACKET];
        let received = packet::recv(self.socket.as_fd(), &mut buf).ok().filter(|received| received.len > 0)?;
        let (request, message) = wire::decode(&buf[..received.len]).unwrap();
        Some((request, message, received.fds))
    }

    fn ask(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Option<(Message, Vec<OwnedFd>)> {
        self.tell(message, fds);
        let request = self.request;
        self.receive_until(|to, _| to == request)
    }

    fn receive_until(&mut self, wanted: impl Fn(u32, &Message) -> bool) -> Option<(Message, Vec<OwnedFd>)> {
        loop {
            let (request, message, fds) = self.receive()?;
            if wanted(request, &message) {
                return Some((message, fds));
            }
            if matches!(message, Message::Incoming { .. }) {
                self.incoming.push_back((message, fds));
            }
        }
    }

    fn connect(&mut self, dice: &mut Dice) -> Option<Channel> {
        let memory = Memory::new(RegionKind::Endpoint);
        let (kind, service) = if dice.one_in(2) { (Kind::Stream, "stream") } else { (Kind::Message, "message") };
        let connect = Message::Connect {
            target: "web".into(),
            service: service.into(),
            kind,
            directions: Directions::BOTH,
            region: RegionReference::with_ring(RING),
        };
        let (answer, links) = self.ask(&connect, &[memory.fd.as_fd()])?;
        // Refused while the backlog is full, and at the end of the test.
        let Message::Connected { channel: number, .. } = answer else {
            thread::sleep(Duration::from_millis(1));
            return None;
        };
        let (attached, fds) =
            self.receive_until(|_, m| matches!(m, Message::Attached { channel, .. } if *channel == number))?;
        let Message::Attached { region, .. } = attached else { return None };
        let theirs = attach(&fds[0], region);
        Some(Channel::new(number, Side::Connecting, memory, theirs, links))
    }

    fn accept(&mut self) -> Option<Channel> {
        if !self.bound {
            for (kind, service) in [(Kind::Stream, "stream"), (Kind::Message, "message")] {
                let bind = Message::Bind { service: service.into(), kind, backlog: 16 };
                // It may still be the session before that has the service.
                if !matches!(self.ask(&bind, &[])?, (Message::Done {}, _)) {
                    thread::sleep(Duration::from_millis(5));
                    return None;
                }
            }
            self.bound = true;
        }
        let (message, mut links) = match self.incoming.pop_front() {
            Some(waiting) => waiting,
            None => self.receive_until(|_, message| matches!(message, Message::Incoming { .. }))?,
        };
        let Message::Incoming { channel, region, .. } = message else { return None };
        let theirs = attach(&links.remove(0), region);
        let memory = Memory::new(RegionKind::Endpoint);
        let accepted = Message::Accepted { channel, start: 0, region: RegionReference::with_ring(RING) };
        self.ask(&accepted, &[memory.fd.as_fd()])?;
        Some(Channel::new(channel, Side::Accepting, memory, theirs, links))
    }
}

fn attach(fd: &OwnedFd, region: RegionReference) -> PeerRegion {
    PeerRegion::attach(fd.as_fd(), RegionKind::Endpoint, region.check_own_memory().unwrap()).unwrap()
}

/// A liar's side of a channel.
struct Channel {
    number: u64,
    side: Side,
    memory: Memory,
    theirs: PeerRegion,
    /// Forward, then reverse.
    links: Vec<Link>,
}

impl Channel {
    fn new(number: u64, side: Side, memory: Memory, theirs: PeerRegion, links: Vec<OwnedFd>) -> Self {
        let links = links.into_iter().map(|link| Link::bells(link).unwrap()).collect();
        Self { number, side, memory, theirs, links }
    }

    /// Writes false values, with some honest steps between, so that the channel does not end at once. Returns the number of false values.
    fn lie(self, session: &Session, dice: &mut Dice) -> u64 {
        let (mut lies, mut rings) = (0, Vec::new());
        let (page, theirs) = (self.memory.page(), self.theirs.page());
        // One channel in eight hears nothing but lies.
        let honesty = if dice.one_in(8) { 0 } else { 1 + dice.below(31) };
        for _ in 0..STEPS {
            if dice.below(32) < honesty {
                let behind = page.tx.cursor.tail.load(Relaxed).wrapping_sub(theirs.rx.cursor.head.load(Relaxed));
                page.tx.cursor.tail.fetch_add(dice.below(RING.saturating_sub(behind).max(1)), Release);
                page.rx.cursor.head.store(theirs.tx.cursor.tail.load(Relaxed), Release);
            } else if dice.one_in(64) {
                // Another ring, told of or not.
                let ring = Memory::new(RegionKind::Extension);
                ring.lie(dice);
                let (channel, generation) = (self.number, dice.below(4) as u32);
                let grow =
                    Message::Grow { channel, side: self.side, generation, region: RegionReference::with_ring(RING) };
                let mut out = Vec::new();
                wire::encode(u32::MAX, &grow, &mut out);
                let _ = packet::try_send(session.socket.as_fd(), &out, &[ring.fd.as_fd()]);
                rings.push(ring);
            } else {
                self.memory.lie(dice);
                rings.iter().for_each(|ring: &Memory| ring.lie(dice));
                lies += 1 + rings.len() as u64;
            }
            self.links.iter().for_each(Link::ring);
            if dice.one_in(8) {
                thread::sleep(Duration::from_micros(dice.below(300)));
            }
        }
        lies
    }
}

/// The counts of what the honest side has seen.
#[derive(Default)]
struct Seen {
    channels: AtomicU64,
    corrupt: AtomicU64,
    ended: AtomicU64,
    bytes: AtomicU64,
    beside: AtomicU64,
    longest_us: AtomicU64,
}

impl Seen {
    /// Counts a call, and says whether that direction goes on.
    #[track_caller]
    fn judge(&self, begin: Instant, result: Result<(), &Error>) -> bool {
        self.longest_us.fetch_max(begin.elapsed().as_micros() as u64, Relaxed);
        let ends = match result {
            Ok(()) | Err(Error::WouldBlock | Error::TimedOut) => return true,
            Err(Error::Corrupt(_)) => &self.corrupt,
            Err(Error::Closed(_) | Error::Dead { .. } | Error::Accused) => &self.ended,
            Err(other) => panic!("a lie has this effect: {other:?}"),
        };
        ends.fetch_add(1, Relaxed);
        false
    }

    /// Uses a stream to a liar in every way, until both its directions have ended.
    fn use_stream(&self, mut stream: Stream, dice: &mut Dice, over: &AtomicBool) {
        let wait = Some(Duration::from_millis(1 + dice.below(4)));
        stream.set_read_timeout(wait);
        stream.set_write_timeout(wait);
        let (mut reads, mut writes) = (true, true);
        while (reads || writes) && !over.load(Relaxed) {
            let (begin, size) = (Instant::now(), dice.size(16));
            match dice.below(6) {
                0 | 1 if reads => {
                    let mut buf = vec![0x55; size];
                    let read = stream.read(&mut buf);
                    if let Ok(n) = read {
                        check_liars(&buf[..n]);
                        self.bytes.fetch_add(n as u64, Relaxed);
                    }
                    reads = !matches!(read, Ok(0)) && self.judge(begin, read.as_ref().map(drop).map_err(cause));
                }
                2 if reads => {
                    let peeked = stream.reader().unwrap().peek_at_least(size);
                    reads = self.judge(begin, peeked.as_ref().map(drop));
                    if let Ok(peeked) = peeked {
                        let mut bytes = vec![0; peeked.len()];
                        let n = peeked.copy_to(0, &mut bytes);
                        check_liars(&bytes[..n]);
                        let half = peeked.len() / 2;
                        peeked.release(half);
                    }
                }
                3 | 4 if writes => {
                    writes = self.judge(begin, stream.write(&Pattern.bytes(0, size)).as_ref().map(drop).map_err(cause));
                }
                5 if writes => {
                    let writer = stream.writer().unwrap();
                    let reserved = writer.reserve(size).map(|span| span.commit(size / 2));
                    writes = self.judge(begin, reserved.as_ref().map(drop));
                    let _ = writer.trim();
                }
                _ => {}
            }
        }
        self.channels.fetch_add(1, Relaxed);
    }

    /// The same exchange with messages.
    fn use_messages(&self, mut socket: MessageSocket, dice: &mut Dice, over: &AtomicBool) {
        socket.set_timeout(Some(Duration::from_millis(1 + dice.below(4))));
        let (mut reads, mut writes, mut message) = (true, true, Vec::new());
        let longest = socket.max_message();
        while (reads || writes) && !over.load(Relaxed) {
            let begin = Instant::now();
            if reads && dice.one_in(2) {
                let received = socket.recv(&mut message);
                if received.is_ok() {
                    check_liars(&message);
                    self.bytes.fetch_add(message.len() as u64, Relaxed);
                }
                reads = self.judge(begin, received.as_ref().map(drop));
            } else if writes {
                let sent = socket.send(&Pattern.bytes(0, dice.size(14).min(longest)));
                writes = self.judge(begin, sent.as_ref().map(drop));
            }
        }
        self.channels.fetch_add(1, Relaxed);
    }
}

/// Transfers between honest peers of the same process, every byte checked.
fn transfers(world: &World, mut dice: Dice, seen: &Seen, over: &AtomicBool) {
    while !over.load(Relaxed) {
        let (mut there, mut here) = world.connection(&adaptive(4096, 1 << 20));
        let total = dice.size(20) as u64;
        let mut writes = dice.clone();
        thread::scope(|s| {
            s.spawn(move || {
                Pattern.send(&mut there, total, || writes.size(14));
                there.shutdown(std::net::Shutdown::Write).unwrap();
            });
            assert_eq!(Pattern.receive(&mut here, || dice.size(14)), total);
        });
        seen.beside.fetch_add(total, Relaxed);
    }
}

fn accept_streams(mut listener: Listener, mut dice: Dice, seen: &Seen, over: &AtomicBool) {
    listener.set_nonblocking(true);
    while !over.load(Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => seen.use_stream(stream, &mut dice, over),
            Err(Error::WouldBlock) => thread::sleep(Duration::from_millis(1)),
            Err(e) => panic!("{e:?}"),
        }
    }
}

fn accept_messages(mut listener: MessageListener, mut dice: Dice, seen: &Seen, over: &AtomicBool) {
    listener.set_nonblocking(true);
    while !over.load(Relaxed) {
        match listener.accept() {
            Ok((socket, _)) => seen.use_messages(socket, &mut dice, over),
            Err(Error::WouldBlock) => thread::sleep(Duration::from_millis(1)),
            Err(e) => panic!("{e:?}"),
        }
    }
}

fn connect_to_liar(domain: &Domain, mut dice: Dice, seen: &Seen, over: &AtomicBool) {
    let options = adaptive(4096, 65536);
    while !over.load(Relaxed) {
        let refused = if dice.one_in(2) {
            let stream = domain.connect_with("liar:stream", &options);
            stream.map(|stream| seen.use_stream(stream, &mut dice, over)).err()
        } else {
            let socket = MessageSocket::connect_with(domain, "liar:message", &options);
            socket.map(|socket| seen.use_messages(socket, &mut dice, over)).err()
        };
        match refused {
            None => {}
            // It is between two sessions.
            Some(Error::Refused { .. } | Error::Dead { .. }) => thread::sleep(Duration::from_millis(1)),
            Some(e) => panic!("{e:?}"),
        }
    }
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// Ends the threads also when one of them panics.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn lies_in_every_word_affect_only_their_own_channel() {
    let seconds = variable("PARTYWALL_LIAR_SECONDS").unwrap_or(3);
    let seed = variable("PARTYWALL_SOAK_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("liar: {seconds} s, PARTYWALL_SOAK_SEED={seed}");
    let _guard = hang_guard_of(Duration::from_secs(seconds) + HANG);
    let (broker, dir) = (partywall_daemon::Broker::embedded().unwrap(), tempfile::tempdir().unwrap());
    let join = |name: &str| Domain::builder().name(name).broker(broker.path()).join().unwrap();
    let world = World { web: join("web"), shop: join("shop"), broker };
    let (seen, over) = (Seen::default(), AtomicBool::new(false));
    let streams = world.web.bind_with("stream", &adaptive(4096, 65536)).unwrap();
    let messages = MessageListener::bind(&world.web, "message", &adaptive(4096, 65536)).unwrap();
    let counts = ["connects", "accepts"].map(|role| dir.path().join(role));
    let mut liars: Vec<Process> = counts
        .iter()
        .zip(["connects", "accepts"])
        .map(|(count, role)| process::child(&format!("{role} {seed} {}", count.display()), world.broker.path()))
        .collect();
    let lies = || -> Vec<u64> {
        let count = |path| std::fs::read_to_string(path).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
        counts.iter().map(count).collect()
    };
    thread::scope(|s| {
        let (world, seen, over) = (&world, &seen, &over);
        let dice = |number: u64| Dice::new(seed.wrapping_add(number));
        // Each is over when any has ended, which none does by itself but by a panic.
        s.spawn(move || (Over(over), accept_streams(streams, dice(1), seen, over)).1);
        s.spawn(move || (Over(over), accept_messages(messages, dice(2), seen, over)).1);
        s.spawn(move || (Over(over), connect_to_liar(&world.shop, dice(3), seen, over)).1);
        s.spawn(move || (Over(over), transfers(world, dice(4), seen, over)).1);
        let _over = Over(over);
        let begin = Instant::now();
        let enough = || {
            lies().iter().all(|lies| *lies > 0)
                && [&seen.channels, &seen.corrupt, &seen.bytes, &seen.beside].iter().all(|n| n.load(Relaxed) > 0)
        };
        while !over.load(Relaxed) && (begin.elapsed() < Duration::from_secs(seconds) || !enough()) {
            for liar in &mut liars {
                assert!(liar.is_running(), "a liar has ended; what it said is above");
            }
            thread::sleep(Duration::from_millis(20));
        }
    });
    eprintln!(
        "liar: {} lies over {} channels; {} directions corrupt, {} ended otherwise; {} bytes of liars read; no call longer than {:?}; {} MiB beside",
        lies().iter().sum::<u64>(),
        seen.channels.load(Relaxed),
        seen.corrupt.load(Relaxed),
        seen.ended.load(Relaxed),
        seen.bytes.load(Relaxed),
        Duration::from_micros(seen.longest_us.load(Relaxed)),
        seen.beside.load(Relaxed) >> 20,
    );
    drop(liars);
    world.assert_no_channel_is_left();
}
