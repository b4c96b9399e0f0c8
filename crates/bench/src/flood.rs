//! Hostile sessions of a broker: everything that a program without rights may send to the broker's socket, without pause.
//!
//! The bench measures an honest client beside them. The broker's test `stoppers` includes this file to check that the client is
//! served at all, so the file uses nothing else of the bench.

use std::{
    fs::File,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
};

use partywall_protocol::wire::{
    self, AddressList, Directions, Kind, MAX_PACKET, Message, RegionReference, VERSION, What,
};
use partywall_region::{OwnRegion, RegionOptions, packet};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
        connect, sendmsg, socket_with,
    },
    process::Uid,
};

/// Threads that share the sessions out among themselves.
pub(crate) const THREADS: usize = 4;
/// The domain that the hostile sessions join.
const DOMAIN: &str = "hostile";
/// A service that they offer, and whose connections they never accept.
const SERVICE: &str = "flood";
/// Far more descriptors than any message has.
const MANY: usize = 60;
/// Bytes of the ring of a region that is as it should be.
const RING: u64 = 8192;

/// A flood, and what it has sent so far.
#[derive(Debug, Default)]
pub(crate) struct Flood {
    over: AtomicBool,
    opened: AtomicU64,
    sent: AtomicU64,
}

/// Ends a flood when it is dropped, also by a panic. Otherwise the flooding threads would never end.
#[derive(Debug)]
pub(crate) struct FloodEnd<'a>(&'a Flood);

impl Drop for FloodEnd<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Relaxed);
    }
}

impl Flood {
    /// Floods the broker at `socket` from `count` sessions until [`FloodEnd`] is dropped. With `user`, the sessions are of that user, which
    /// only root can bring about.
    pub(crate) fn run(&self, socket: &Path, count: usize, user: Option<u32>) -> io::Result<()> {
        let address = SocketAddrUnix::new(socket)?;
        let things = Things::new()?;
        let conducts = [Conduct::Asks, Conduct::NeverReads, Conduct::Garbage, Conduct::Descriptors, Conduct::Leaves];
        thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|first| {
                    let (address, things) = (&address, &things);
                    scope.spawn(move || -> io::Result<()> {
                        if let Some(user) = user {
                            let user = Uid::from_raw(user);
                            // The kernel reports the user of the thread that connects. Only this thread changes.
                            rustix::thread::set_thread_res_uid(user, user, user)?;
                        }
                        let mut sessions: Vec<FloodSession> = (first..count)
                            .step_by(THREADS)
                            .map(|at| FloodSession::new(conducts[at % conducts.len()], at))
                            .collect();
                        while !self.over.load(Relaxed) {
                            for session in &mut sessions {
                                session.turn(self, address, things)?;
                            }
                        }
                        Ok(())
                    })
                })
                .collect();
            let end = self.end();
            let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            drop(end);
            ended.into_iter().try_for_each(|end| end.unwrap_or_else(|_| Err(io::Error::other("a thread panicked"))))
        })
    }

    /// The guard that ends the flood.
    pub(crate) fn end(&self) -> FloodEnd<'_> {
        FloodEnd(self)
    }

    /// Sessions opened so far. Most are ended by the broker, and opened again.
    pub(crate) fn opened(&self) -> u64 {
        self.opened.load(Relaxed)
    }

    /// Packets sent so far.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Relaxed)
    }
}

/// The behaviour of a hostile session.
#[derive(Debug, Clone, Copy)]
enum Conduct {
    /// Sends valid requests and reads the answers.
    Asks,
    /// Sends valid requests and reads nothing.
    NeverReads,
    /// Sends packets that are no message, or half of one, or more than one.
    Garbage,
    /// Sends messages with descriptors that are wrong or too many.
    Descriptors,
    /// Leaves as soon as it has come, sometimes in the middle of joining.
    Leaves,
}

/// The objects that are sent as descriptors.
struct Things {
    nothing: File,
    socket: OwnedFd,
    region: OwnedFd,
}

impl Things {
    fn new() -> io::Result<Self> {
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let region = OwnRegion::create(&RegionOptions::endpoint(RING)).map_err(io::Error::other)?.1;
        Ok(Self { nothing: File::open("/dev/null")?, socket, region })
    }
}

struct FloodSession {
    conduct: Conduct,
    socket: Option<OwnedFd>,
    number: usize,
}

impl FloodSession {
    /// `number` differs between sessions, so that they do not all do the same at once.
    fn new(conduct: Conduct, number: usize) -> Self {
        Self { conduct, socket: None, number }
    }

    /// Sends one packet, or opens the session if it is not open.
    fn turn(&mut self, flood: &Flood, address: &SocketAddrUnix, things: &Things) -> io::Result<()> {
        self.number += 1;
        let Some(socket) = &self.socket else {
            self.socket = open(address)?;
            if let Some(socket) = &self.socket {
                flood.opened.fetch_add(1, Relaxed);
                // Sessions that leave at once join only every second time.
                if !matches!(self.conduct, Conduct::Leaves) || self.number.is_multiple_of(2) {
                    self.say(flood, socket, &encoded(&join()), &[]);
                }
            }
            return Ok(());
        };
        let goes_on = match self.conduct {
            Conduct::Asks => {
                let mut buffer = [0; MAX_PACKET];
                // The descriptors that come with an answer are closed with it.
                while packet::try_recv(socket.as_fd(), &mut buffer).is_ok_and(|answer| answer.len > 0) {}
                self.request(flood, socket, things)
            }
            Conduct::NeverReads => self.request(flood, socket, things),
            Conduct::Garbage => self.garbage(flood, socket),
            Conduct::Descriptors => self.descriptors(flood, socket, things),
            Conduct::Leaves => false,
        };
        if !goes_on {
            self.socket = None;
        }
        Ok(())
    }

    fn request(&self, flood: &Flood, socket: &OwnedFd, things: &Things) -> bool {
        match self.number % 5 {
            0 => self.say(flood, socket, &encoded(&Message::Ping {}), &[]),
            1 => self.say(flood, socket, &encoded(&Message::List { what: What::Domains, after: 0 }), &[]),
            2 => self.say(flood, socket, &encoded(&Message::List { what: What::Services, after: 0 }), &[]),
            3 => {
                let bind = Message::Bind { service: SERVICE.into(), kind: Kind::Stream, backlog: 64 };
                self.say(flood, socket, &encoded(&bind), &[])
            }
            _ => self.say(flood, socket, &encoded(&connecting()), &[things.region.as_fd()]),
        }
    }

    fn garbage(&self, flood: &Flood, socket: &OwnedFd) -> bool {
        let whole = encoded(&join());
        let bytes = match self.number % 6 {
            0 => b"nonsense".to_vec(),
            1 => whole[..whole.len() / 2].to_vec(),
            2 => [whole.as_slice(), whole.as_slice()].concat(),
            3 => vec![0xff; MAX_PACKET + 1],
            4 => whole[..1].to_vec(),
            _ => vec![0; wire::HEADER],
        };
        self.say(flood, socket, &bytes, &[])
    }

    fn descriptors(&self, flood: &Flood, socket: &OwnedFd, things: &Things) -> bool {
        let publish = encoded(&Message::Publish { addresses: AddressList::default() });
        let nothing = things.nothing.as_fd();
        match self.number % 5 {
            0 => self.say(flood, socket, &publish, &[nothing; MANY]),
            1 => self.say(flood, socket, &publish, &[things.socket.as_fd()]),
            2 => self.say(flood, socket, &encoded(&connecting()), &[nothing]),
            3 => self.say(flood, socket, &encoded(&Message::Ping {}), &[things.region.as_fd()]),
            _ => self.say(flood, socket, &publish, &[]),
        }
    }

    /// Sends one packet if there is room. Whether the session is still open.
    fn say(&self, flood: &Flood, socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MANY))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return false;
        }
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) => {
                flood.sent.fetch_add(1, Relaxed);
                true
            }
            // The broker has not read yet, or the kernel holds as many descriptors in transit as this user may have.
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::TOOMANYREFS) => true,
            Err(_) => false,
        }
    }
}

/// A socket to the broker; `None` while as many wait as may.
fn open(address: &SocketAddrUnix) -> io::Result<Option<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    match connect(&socket, address) {
        Ok(()) => Ok(Some(socket)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn encoded(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode(1, message, &mut bytes);
    bytes
}

fn join() -> Message {
    Message::Join { version: VERSION, name: DOMAIN.into() }
}

fn connecting() -> Message {
    Message::Connect {
        target: DOMAIN.into(),
        service: SERVICE.into(),
        kind: Kind::Stream,
        directions: Directions::BOTH,
        region: RegionReference::with_ring(RING),
    }
}
