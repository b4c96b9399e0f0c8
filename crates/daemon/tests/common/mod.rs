//! A client that speaks the protocol packet by packet, and can therefore speak it wrongly.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod fuse;
pub(crate) mod monitor;
pub(crate) mod netns;
#[path = "../../../shm/tests/program_time/mod.rs"]
mod program_time;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use partywall_protocol::wire::{self, Directions, Kind, MAX_PACKET, Message, Refusal, RegionReference};
use partywall_region::{OwnRegion, RegionOptions, packet};
use program_time::ProgramTime;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// A hang is a failure after so long; nothing is measured by it.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// Tests that count this process's descriptors take turns.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn open_descriptors() -> usize {
    // The directory itself is open while it is read.
    std::fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Waits until this process has no more descriptors open than before. The thread of a broker in this process closes descriptors some time
/// after the request: those that it should close, and those of a message that it refuses.
pub(crate) fn await_descriptors(before: usize) {
    eventually(&format!("{before} descriptors are open, as before, or fewer"), || open_descriptors() <= before);
}

/// Waits until `condition` holds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < HANG, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) struct Client {
    pub(crate) socket: OwnedFd,
    request: u32,
}

pub(crate) struct Answer {
    pub(crate) request: u32,
    pub(crate) message: Message,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Client {
    pub(crate) fn connect(path: &Path) -> Self {
        Self::try_connect(path).expect("a broker serves there")
    }

    /// `None` if no broker serves there.
    pub(crate) fn try_connect(path: &Path) -> Option<Self> {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).ok()?;
        Some(Self { socket, request: 0 })
    }

    pub(crate) fn join(path: &Path, name: &str) -> Self {
        let mut client = Self::connect(path);
        let answer = client.ask(&Message::Join { version: wire::VERSION, name: name.to_owned() });
        assert!(matches!(answer, Message::Joined { .. }), "{answer:?}");
        client
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
        packet::send(self.socket.as_fd(), bytes, fds)
    }

    pub(crate) fn tell(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> u32 {
        self.request += 1;
        let mut bytes = Vec::new();
        wire::encode(self.request, message, &mut bytes);
        self.send_bytes(&bytes, fds).unwrap();
        self.request
    }

    /// The next packet, or `None` when the broker has hung up.
    pub(crate) fn receive(&self) -> Option<Answer> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let timeout: Timespec = HANG.try_into().unwrap();
        let ready = loop {
            match poll(&mut fds, Some(&timeout)) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other.unwrap(),
            }
        };
        assert!(ready > 0, "the broker does not answer");
        let mut buf = [0; MAX_PACKET];
        let received = match packet::recv(self.socket.as_fd(), &mut buf) {
            Ok(received) => received,
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return None,
            Err(e) => panic!("{e}"),
        };
        if received.len == 0 {
            return None;
        }
        assert!(!received.truncated);
        let (request, message) = wire::decode(&buf[..received.len]).unwrap();
        assert_eq!(message.fd_count(), received.fds.len());
        Some(Answer { request, message, fds: received.fds })
    }

    pub(crate) fn ask(&mut self, message: &Message) -> Message {
        self.ask_with(message, &[]).message
    }

    pub(crate) fn ask_with(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Answer {
        let request = self.tell(message, fds);
        let answer = self.receive().expect("an answer, not a hang-up");
        assert_eq!(answer.request, request);
        answer
    }

    pub(crate) fn bind(&mut self, service: &str, backlog: u16) {
        assert_eq!(self.ask(&bind(service, backlog)), Message::Done {});
    }

    pub(crate) fn is_served(&mut self) -> bool {
        self.ask(&Message::Ping {}) == Message::Done {}
    }

    /// Expects a refusal next, and returns its code.
    pub(crate) fn refused(&self) -> Refusal {
        match self.receive().map(|a| a.message) {
            Some(Message::Refused { code, reason }) => {
                assert!(!reason.is_empty());
                code
            }
            other => panic!("not refused: {other:?}"),
        }
    }

    /// Expects the broker to hang up, whatever it says before.
    pub(crate) fn is_hung_up_on(&self) {
        while self.receive().is_some() {}
    }

    /// Connects, and returns the channel and this side's link ends.
    pub(crate) fn open(&mut self, target: &str, service: &str) -> (u64, Vec<OwnedFd>) {
        let region = region(8192);
        let answer = self.ask_with(&connect(target, service, 8192), &[region.as_fd()]);
        match answer.message {
            Message::Connected { channel, .. } => (channel, answer.fds),
            other => panic!("not connected: {other:?}"),
        }
    }
}

pub(crate) fn region(ring: u64) -> OwnedFd {
    OwnRegion::create(&RegionOptions::endpoint(ring)).unwrap().1
}

pub(crate) fn bind(service: &str, backlog: u16) -> Message {
    Message::Bind { service: service.to_owned(), kind: Kind::Stream, backlog }
}

pub(crate) fn connect(target: &str, service: &str, ring_size: u64) -> Message {
    Message::Connect {
        target: target.to_owned(),
        service: service.to_owned(),
        kind: Kind::Stream,
        directions: Directions::BOTH,
        region: RegionReference::with_ring(ring_size),
    }
}

/// The longest time that an honest client has waited for an answer while hostile clients ran, without the time for which it and the broker
/// waited for a processor. The broker kills a hanging reader after three seconds (protocol C14), and an honest client of another user must not
/// notice that.
#[derive(Default)]
pub(crate) struct LongestAnswer(Duration);

impl LongestAnswer {
    const MOST: Duration = Duration::from_secs(2);

    pub(crate) fn of<T>(&mut self, ask: impl FnOnce() -> T) -> T {
        let time = ProgramTime::start(threads_of_answers);
        let answer = ask();
        self.0 = self.0.max(time.elapsed());
        answer
    }

    /// Prints the longest wait, and fails if it is too long.
    pub(crate) fn judge(self) {
        use std::io::Write as _;
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        // Written directly, because the test harness captures what `eprintln` prints.
        let _ = writeln!(std::io::stderr(), "{test}: longest honest answer {:.1} ms", self.0.as_secs_f64() * 1e3);
        assert!(self.0 < Self::MOST, "an honest client waited {:?}", self.0);
    }
}

/// The thread of a broker that a test starts in its own process.
pub(crate) const BROKER_THREAD: &str = "partywall-broker";

/// The threads that an answer of the broker of this process may wait for: the one that asks, the broker's, and its readers, which are
/// processes that its first process has forked.
fn threads_of_answers() -> Vec<PathBuf> {
    let mut threads = program_time::threads_named(BROKER_THREAD);
    let mut parents: Vec<PathBuf> =
        std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|thread| thread.path()).collect();
    while let Some(parent) = parents.pop() {
        let children = std::fs::read_to_string(parent.join("children")).unwrap_or_default();
        for child in children.split_whitespace().map(|child| PathBuf::from(format!("/proc/{child}/task/{child}"))) {
            parents.push(child.clone());
            threads.push(child);
        }
    }
    threads.push(program_time::this_thread());
    threads
}
