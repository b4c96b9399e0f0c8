//! The input is what strangers do to a broker in whole sessions (protocol C): they come, join, ask, answer, send what is no message,
//! show descriptors that are right, wrong or too many, read their answers or not, and leave at any moment.
//!
//! The broker is a real one, with its processes and its policy. It recomputes all of its accounts after each event, and ends by a panic if
//! one is wrong. After each input an honest client is served, which also shows that the reading process of this user has neither ended nor
//! hung. When all have left, the broker knows nobody and this process, which the broker is in, has as many descriptors as before.
//!
//! Where FUSE can be mounted, one kind of descriptor is of a file whose flush is answered late, so that a process that closes one waits.
//!
//! Descriptors that hang a process that closes them are left out: each takes the broker's deadline. `crates/daemon/tests/stoppers.rs`
//! has them.

use std::fs::File;
use std::io::{self, IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::fuse::{Flush, FuseFile};
use partywall_daemon::Broker;
use partywall_daemon::core::CoreStatus;
use partywall_protocol::wire::{self, AddressList, Directions, Kind, Message, RegionReference, Side, What};
use partywall_region::{OwnRegion, RegionOptions, packet};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, sockopt,
};

/// Operations of one input.
const MOST: usize = 64;
/// Sessions at a time.
const SESSIONS: usize = 4;
/// Far more descriptors than any message has.
const MANY: usize = 60;
/// How long anything may take that takes milliseconds on a machine that is not busy. A fuzzer gives an input ten seconds.
const LONG: Duration = Duration::from_secs(if cfg!(fuzzing) { 8 } else { 120 });
/// How late a flush of the FUSE file is answered. As many as a message can bring take far less than the broker's deadline.
const LATE: Duration = Duration::from_millis(2);
/// Bytes of the ring of a region that is as it should be.
const RING: u64 = 4096;

/// The broker, and what strangers have at hand.
pub(crate) struct World {
    broker: Broker,
    address: SocketAddrUnix,
    /// The first is a region as it should be, the next two the ends of a TCP connection.
    things: Vec<OwnedFd>,
    /// The file system of the last of them, if there is one.
    _fuse: Option<FuseFile>,
    /// Descriptors of this process while no client is connected.
    descriptors: usize,
}

/// Where [`World::things`] has them.
const REGION: usize = 0;
const CLIENT: usize = 1;
const SERVER: usize = 2;

impl World {
    pub(crate) fn new() -> Self {
        // Before the broker, which has threads.
        let fuse = FuseFile::mount(Flush::After(LATE));
        let broker = Broker::embedded_with_checks().expect("a broker");
        let address = SocketAddrUnix::new(broker.path()).expect("an address");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let client = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (server, _) = listener.accept().expect("a connection");
        let region = || OwnRegion::create(&RegionOptions::endpoint(RING)).expect("a region").1;
        let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("memory");
        let (link, other) = packet::pair().expect("a pair");
        let (nested, carrier) = UnixStream::pair().expect("a pair");
        // A socket in a socket, unread.
        packet::try_send(carrier.as_fd(), b"x", &[link.as_fd()]).expect("a message");
        let (pipe, _) = rustix::pipe::pipe().expect("a pipe");
        let mut things = vec![
            region(),
            client.into(),
            server.into(),
            listener.into(),
            link,
            other,
            nested.into(),
            region(),
            unsealed,
            pipe,
            UdpSocket::bind("127.0.0.1:0").expect("a socket").into(),
            File::open("/dev/null").expect("a device").into(),
            File::open("/").expect("a folder").into(),
            rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).expect("an epoll set"),
        ];
        match &fuse {
            Some(late) => things.push(late.file().try_clone().expect("a descriptor").into()),
            None => eprintln!("NOT FUZZED: descriptors of FUSE files, which need /dev/fuse and the right to mount"),
        }
        let mut this = Self { broker, address, things, _fuse: fuse, descriptors: 0 };
        this.serves_an_honest_client();
        this.eventually("the honest client has left", |this| this.broker.status() == CoreStatus::default());
        this.descriptors = descriptors().len();
        this
    }

    /// Has strangers do what an input says.
    pub(crate) fn run(&self, input: &[u8]) {
        let mut input = Input(input);
        let mut strangers = Strangers { sessions: [const { None }; SESSIONS], ids: vec![0, 1] };
        for _ in 0..MOST {
            let Some(what) = input.byte() else { break };
            strangers.act(self, what, &mut input);
        }
        drop(strangers);
        self.serves_an_honest_client();
        self.eventually("the broker has forgotten all", |this| this.broker.status() == CoreStatus::default());
        self.eventually("all descriptors are closed", |this| descriptors().len() <= this.descriptors);
    }

    fn connect(&self) -> Option<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
        rustix::net::connect(&socket, &self.address).ok()?;
        Some(socket)
    }

    fn serves_an_honest_client(&self) {
        let client = self.connect().expect("the broker takes connections");
        for message in [join("honest"), Message::Ping {}] {
            packet::try_send(client.as_fd(), &encoded(&message), &[]).expect("an honest session is open");
            assert!(hear(&client, LONG), "the broker does not answer {message:?}");
            let (_, answer) = receive(&client).expect("an honest session is open").expect("an answer");
            assert!(matches!(answer, Message::Joined { .. } | Message::Done {}), "the answer is {answer:?}");
        }
    }

    fn eventually(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !holds(self) {
            if begin.elapsed() > LONG {
                panic!(
                    "not so: {what}; {:?}; {} descriptors once, now {:?}",
                    self.broker.status(),
                    self.descriptors,
                    descriptors()
                );
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// The descriptors of this process. Pipes do not count: the sanitizer opens and closes them at any time, and the broker has none.
fn descriptors() -> Vec<String> {
    let numbers = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let what = numbers.filter_map(|number| Some(std::fs::read_link(number.path()).ok()?.display().to_string()));
    what.filter(|what| !what.starts_with("pipe:")).collect()
}

/// Whether there is anything to receive, after so long at the most.
fn hear(session: &OwnedFd, patience: Duration) -> bool {
    let begin = Instant::now();
    loop {
        let left = patience.saturating_sub(begin.elapsed()).try_into().expect("a short time");
        match poll(&mut [PollFd::new(session, PollFlags::IN)], Some(&left)) {
            // libFuzzer's own timer.
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

/// An answer, if there is one. Descriptors that come with it are closed.
fn receive(session: &OwnedFd) -> io::Result<Option<(u32, Message)>> {
    let mut buffer = [0; wire::MAX_PACKET];
    match packet::try_recv(session.as_fd(), &mut buffer) {
        Ok(received) if received.len == 0 => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(received) => {
            let (request, message) = wire::decode(&buffer[..received.len]).expect("the broker sends messages");
            assert_eq!(received.fds.len(), message.fd_count(), "what comes with {message:?}");
            Ok(Some((request, message)))
        }
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(e),
    }
}

struct Strangers {
    sessions: [Option<OwnedFd>; SESSIONS],
    /// Numbers of channels, offers and publications that the broker has named.
    ids: Vec<u64>,
}

impl Strangers {
    fn act(&mut self, world: &World, what: u8, input: &mut Input<'_>) {
        let at = usize::from(what >> 4) % SESSIONS;
        if what & 15 == 15 {
            return self.share_region(world, at, input);
        }
        let Some(session) = &self.sessions[at] else {
            // Nearly all of them join.
            return self.come(world, at, what & 15 != 0);
        };
        let open = match what & 15 {
            0 => false,
            1 => rustix::net::shutdown(session, Shutdown::Write).is_ok(),
            2 => send(session, input.bytes(), &world.choose(input)),
            3 => {
                // Any message, well-formed as far as its header goes.
                let kind = u16::from(input.byte().unwrap_or(0));
                let mut packet = wire::MAGIC.to_le_bytes().to_vec();
                packet.extend_from_slice(&kind.to_le_bytes());
                packet.extend_from_slice(&7u32.to_le_bytes());
                packet.extend_from_slice(input.bytes());
                send(session, &packet, &world.choose(input))
            }
            4 => lingering().is_some_and(|socket| {
                let message = Message::Publish { addresses: AddressList::default() };
                send(session, &encoded(&message), &[socket.as_fd()])
            }),
            5 => {
                let message = self.message(input);
                send(session, &encoded(&message), &world.choose(input))
            }
            6..=8 => {
                hear(session, Duration::from_millis(5));
                loop {
                    match receive(session) {
                        Ok(Some((_, answer))) => self.ids.extend(named_by(&answer)),
                        Ok(None) => break true,
                        Err(_) => break false,
                    }
                }
            }
            _ => {
                let message = self.message(input);
                let right: &[usize] = match &message {
                    Message::Offer { .. } => &[CLIENT, REGION],
                    Message::Take { .. } => &[SERVER, REGION],
                    Message::Publish { .. } | Message::Finish { .. } => &[SERVER],
                    Message::Confirm { .. } => &[CLIENT],
                    _ => &[REGION, REGION, REGION][..message.fd_count().min(3)],
                };
                let fds: Vec<_> = right.iter().map(|at| world.things[*at].as_fd()).collect();
                send(session, &encoded(&message), &fds)
            }
        };
        if !open {
            self.sessions[at] = None;
        }
    }

    fn come(&mut self, world: &World, at: usize, joins: bool) {
        self.sessions[at] = world.connect();
        if let (Some(session), true) = (&self.sessions[at], joins) {
            let _ = packet::try_send(session.as_fd(), &encoded(&join(name_of(at))), &[]);
        }
    }

    /// Two sessions report both sides of a channel, and one of them brings a further region that the other takes (protocol F). Some of the
    /// regions are given up. The input decides about the single messages.
    fn share_region(&mut self, world: &World, at: usize, input: &mut Input<'_>) {
        let other = at ^ 1;
        for at in [at, other] {
            if self.sessions[at].is_none() {
                self.come(world, at, true);
            }
        }
        let (Some(owner), Some(reader)) = (&self.sessions[at], &self.sessions[other]) else { return };
        let (id, number) = (*input.pick(&[0, 1]), u32::from(input.byte().unwrap_or(0)));
        let gives_up = input.byte().unwrap_or(0);
        let (kind, bytes, region) = (number % 3, RING, RegionReference::with_ring(RING));
        let reclaim = |side, at| Message::Reclaim {
            channel: id,
            side,
            peer: name_of(at).to_owned(),
            service: "s".to_owned(),
            kind: Kind::Stream,
            directions: Directions::BOTH,
            region,
        };
        let (own, side, its) = (number % 2 == 0, Side::Connecting, Side::Accepting);
        let steps = [
            (owner, reclaim(side, other)),
            (reader, reclaim(its, at)),
            (owner, Message::ReclaimRegion { channel: id, side, own, number: number / 2, kind, bytes }),
            (reader, Message::TakeRegions { channel: id, side: its, kind, count: 2, bytes: RING * 4 }),
            (owner, Message::AddRegion { channel: id, side, number, kind, region }),
        ];
        let given_up = [
            (owner, Message::DropRegion { channel: id, side, own: true, number }),
            (reader, Message::DropRegion { channel: id, side: its, own: false, number }),
            (owner, Message::DropRegion { channel: id, side, own, number: number / 2 }),
        ];
        let given_up = given_up.into_iter().enumerate().filter(|(at, _)| gives_up >> at & 1 == 1);
        for (session, message) in steps.into_iter().chain(given_up.map(|(_, step)| step)) {
            let fds = [world.things[REGION].as_fd()];
            send(session, &encoded(&message), &fds[..message.fd_count()]);
            // The next step is for after this one: the broker reads each session by itself.
            hear(session, Duration::from_millis(5));
            while let Ok(Some((_, answer))) = receive(session) {
                self.ids.extend(named_by(&answer));
            }
        }
    }

    /// A message as clients send it.
    fn message(&self, input: &mut Input<'_>) -> Message {
        let (name, service) = (input.pick(&["a", "b", "x y"]).to_string(), input.pick(&["s", "t"]).to_string());
        let kind = *input.pick(Kind::ALL);
        let directions = *input.pick(&[Directions::FORWARD, Directions::REVERSE, Directions::BOTH]);
        let region = RegionReference::with_ring(*input.pick(&[RING, RING * 2, 0, 1 << 40]));
        let side = *input.pick(Side::ALL);
        let id = *input.pick(&self.ids);
        match input.byte().unwrap_or(0) % 23 {
            0 => Message::Join { version: wire::VERSION, name },
            1 => Message::Bind { service, kind, backlog: u16::from(input.byte().unwrap_or(0)) },
            2 | 3 => Message::Connect { target: name, service, kind, directions, region },
            4 => Message::Accepted { channel: id, start: 0, region },
            5 => Message::Closed { channel: id },
            6 => Message::List { what: *input.pick(What::ALL), after: id },
            7 => Message::Inspect { channel: id },
            8 => Message::Reclaim { channel: id, side, peer: name, service, kind, directions, region },
            9 => Message::Directory {},
            10 => Message::Publish { addresses: AddressList::default() },
            11 => Message::Withdraw { key: id },
            12 => Message::Offer { region },
            13 => Message::Take { region },
            14 => Message::Cancel { offer: id },
            15 => Message::Confirm { offer: id },
            16 => Message::Finish { offer: id },
            17 => Message::Grow { channel: id, side, generation: 1, region },
            18 => {
                let count = input.byte().unwrap_or(0);
                Message::TakeRegions { channel: id, side, kind: u32::from(count % 3), count, bytes: RING * 4 }
            }
            19 => {
                let number = u32::from(input.byte().unwrap_or(0));
                Message::AddRegion { channel: id, side, number, kind: number % 3, region }
            }
            20 => {
                let number = u32::from(input.byte().unwrap_or(0));
                Message::DropRegion { channel: id, side, own: number % 2 == 0, number }
            }
            21 => {
                let number = u32::from(input.byte().unwrap_or(0));
                let (own, kind) = (number % 2 == 0, number % 3);
                Message::ReclaimRegion { channel: id, side, own, number, kind, bytes: region.ring_size }
            }
            _ => Message::Ping {},
        }
    }
}

/// The domain that a session joins.
fn name_of(at: usize) -> &'static str {
    ["a", "b"][at % 2]
}

/// The numbers that an answer tells its receiver.
fn named_by(answer: &Message) -> Option<u64> {
    match answer {
        Message::Connected { channel, .. } | Message::Incoming { channel, .. } => Some(*channel),
        Message::Published { key, .. } => Some(*key),
        Message::Offered { offer } | Message::Bell { offer, .. } => Some(*offer),
        _ => None,
    }
}

impl World {
    /// Descriptors of the input's choice, now and then far too many.
    fn choose(&self, input: &mut Input<'_>) -> Vec<BorrowedFd<'_>> {
        let count = match input.byte().unwrap_or(0) {
            255 => MANY,
            few => usize::from(few % 5),
        };
        (0..count).map(|_| input.pick(&self.things).as_fd()).collect()
    }
}

/// A connection that would take two minutes to close.
fn lingering() -> Option<TcpStream> {
    let listener = TcpListener::bind("127.0.0.1:0").ok()?;
    let client = TcpStream::connect(listener.local_addr().ok()?).ok()?;
    // It ends with the listener, a few lines below.
    sockopt::set_socket_send_buffer_size(&client, 4096).ok()?;
    client.set_nonblocking(true).ok()?;
    while (&client).write(&[0; 65536]).is_ok() {}
    sockopt::set_socket_linger(&client, Some(Duration::from_secs(120))).ok()?;
    Some(client)
}

/// Sends one packet if there is room. Whether the session is still open.
fn send(session: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MANY))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return true;
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match rustix::net::sendmsg(session, &[IoSlice::new(bytes)], &mut control, flags) {
        Err(e) => matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        Ok(_) => true,
    }
}

fn encoded(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode(1, message, &mut bytes);
    bytes
}

fn join(name: &str) -> Message {
    Message::Join { version: wire::VERSION, name: name.to_owned() }
}

/// The rest of the input.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// As many as the first of them says.
    fn bytes(&mut self) -> &'a [u8] {
        let count = self.byte().map_or(0, usize::from).min(self.0.len());
        let (these, rest) = self.0.split_at(count);
        self.0 = rest;
        these
    }

    fn pick<'t, T>(&mut self, among: &'t [T]) -> &'t T {
        &among[self.byte().map_or(0, usize::from) % among.len()]
    }
}
