//! The state of one process's sockets for other tools: which are on a ring, which are on TCP, and why.
//!
//! There is one memfd for each process that `partywall run` has started, and for each of their forks. Only that process writes it. The
//! process keeps it open, under the name [`MEMFD`], so that a process with access to its `/proc` entry finds it there. It is for people;
//! no decision depends on it.
//!
//! ```text
//!      0       320                    640
//!      +--------+----------+----------+----------+--------+-- ...
//!      | header | identity | tx       | rx       | ident. |
//!      +--------+----------+----------+----------+--------+-- ...
//!               \__________ line 0 _____________/
//! ```
//!
//! A writer changes the identity of a line between two steps of its `sequence`, odd while it writes; counters are plain
//! stores by the thread that holds that direction. A reader copies the whole memory twice ([`read`]) and accepts an identity that is the
//! same in both copies. It maps nothing, so a writer cannot make it fault.

mod snapshot;
mod states;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;

use alloc::vec::Vec;
use core::net::SocketAddr;

pub use snapshot::{DirectionSeen, LineSnapshot, NotStatus, PathMove, is_of_other_version, read, read_all, used_bytes};
pub use states::{LineState, Reason, Role};

use crate::address::wide;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// The name of the memfd, by which it is found among the descriptors of a process.
pub const MEMFD: &str = "partywall-status";
/// The first eight bytes: `PWSTATUS`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PWSTATUS");
/// The only version there is.
pub const VERSION: u32 = 2;
/// Lines that a process has: memory that is not used costs none.
pub const LINES: u32 = 1 << 16;
/// More lines than this no reader looks at.
pub const MAX_LINES: u32 = 1 << 16;
/// Bytes of the header, and of a line.
pub const LINE: usize = 320;
/// The moves of a direction between TCP and its ring that are kept.
pub const MOVES: usize = 8;

/// Bytes of a memory with this many lines, in whole pages.
pub const fn size(lines: u32) -> u64 {
    ((1 + lines as u64) * LINE as u64).next_multiple_of(4096)
}

/// The first bytes of the table.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct StatusHeader {
    /// [`MAGIC`], stored last.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// How many lines there are.
    pub lines: AtomicU32,
    /// Lines ever used: those from here on have never been.
    pub used: AtomicU32,
    /// Connections that found no line free.
    pub unseen: AtomicU32,
    _reserved: [u64; 37],
}

impl StatusHeader {
    /// Begins a memory of zeros.
    pub fn init(&self, lines: u32) {
        self.version.store(VERSION, Ordering::Relaxed);
        self.lines.store(lines, Ordering::Relaxed);
        // EDGE status-header (with a reader that copies the memory by system calls): releases the fields of the header.
        self.magic.store(MAGIC, Ordering::Release);
    }

    /// Notes that line `index` is used.
    pub fn use_line(&self, index: u32) {
        self.used.fetch_max(index.saturating_add(1), Ordering::Relaxed);
    }
}

/// One connection.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct StatusLine {
    /// Odd while the words are being written.
    sequence: AtomicU32,
    /// `state | reason << 8 | role << 16 | family << 24`.
    kind: AtomicU32,
    pid: AtomicU32,
    fd: AtomicU32,
    /// `local | remote << 16`.
    ports: AtomicU32,
    _reserved: AtomicU32,
    /// Number of the channel while there is one; 0 otherwise.
    channel: AtomicU64,
    local: [AtomicU64; 2],
    remote: [AtomicU64; 2],
    /// The counts of the sending direction, written by the thread that holds it.
    pub tx: DirectionStatus,
    /// The counts of the receiving direction, written by the thread that holds it.
    pub rx: DirectionStatus,
}

/// One direction of a connection.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct DirectionStatus {
    /// Bytes that went by TCP.
    pub tcp: AtomicU64,
    /// Bytes that passed through rings that are given up. (A ring that is up counts in its own page.)
    pub ring_before: AtomicU64,
    /// Doorbells that those rings rang.
    pub rung_before: AtomicU64,
    /// Doorbells that those rings saved.
    pub saved_before: AtomicU64,
    /// Times that the path changed, on rings that are given up.
    pub switches_before: AtomicU64,
    /// Moves so far.
    moved: AtomicU64,
    /// The last of them: move `n` in word `n % MOVES`, as milliseconds since 1970 `<< 16 | reason << 8 | way` (1 for the ring).
    moves: [AtomicU64; MOVES],
    _reserved: [AtomicU64; 2],
}

impl DirectionStatus {
    /// Notes that the bytes of this direction go another way from now on. One writer at a time.
    pub fn note_move(&self, to_ring: bool, reason: Reason, at_ms: u64) {
        let number = self.moved.load(Ordering::Relaxed);
        let word = at_ms << 16 | u64::from(reason as u8) << 8 | u64::from(to_ring);
        // The number modulo MOVES.
        self.moves[(number % MOVES as u64) as usize].store(word, Ordering::Relaxed);
        // EDGE moves (with a reader that copies the memory by system calls): releases the move.
        self.moved.store(number.wrapping_add(1), Ordering::Release);
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<StatusHeader>() == LINE && size_of::<StatusLine>() == LINE);

/// The identity of the connection in a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineIdentity {
    /// Where it is.
    pub state: LineState,
    /// Why it is not on a ring.
    pub reason: Reason,
    /// The side of the connection.
    pub role: Role,
    /// The process that made it.
    pub pid: u32,
    /// Its descriptor there.
    pub fd: u32,
    /// Its own address.
    pub local: SocketAddr,
    /// The address of the peer.
    pub remote: SocketAddr,
    /// Its channel, or 0.
    pub channel: u64,
}

impl StatusLine {
    /// Writes the identity of this line, or marks it free. There is one writer at a time.
    pub fn set(&self, identity: Option<&LineIdentity>) {
        let before = self.sequence.load(Ordering::Relaxed) & !1;
        self.sequence.store(before.wrapping_add(1), Ordering::Relaxed);
        // EDGE line (with the two copies that `read` compares): the odd number is seen no later than any word below.
        fence(Ordering::Release);
        match identity {
            None => self.kind.store(0, Ordering::Relaxed),
            Some(identity) => self.store(identity),
        }
        // EDGE line (with the two copies that `read` compares): releases the words.
        self.sequence.store(before.wrapping_add(2), Ordering::Release);
    }

    fn store(&self, identity: &LineIdentity) {
        let LineIdentity { state, reason, role, pid, fd, local, remote, channel } = *identity;
        let family: u32 = if local.is_ipv4() && remote.is_ipv4() { 4 } else { 6 };
        let kind = u32::from(state as u8) | u32::from(reason as u8) << 8 | u32::from(role as u8) << 16 | family << 24;
        self.kind.store(kind, Ordering::Relaxed);
        self.pid.store(pid, Ordering::Relaxed);
        self.fd.store(fd, Ordering::Relaxed);
        self.ports.store(u32::from(local.port()) | u32::from(remote.port()) << 16, Ordering::Relaxed);
        self.channel.store(channel, Ordering::Relaxed);
        for (words, address) in [(&self.local, local), (&self.remote, remote)] {
            let wide = wide(address.ip());
            words[0].store(wide as u64, Ordering::Relaxed);
            words[1].store((wide >> 64) as u64, Ordering::Relaxed);
        }
    }

    /// Its words as they lie in memory.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        let pair = |low: &AtomicU32, high: &AtomicU32| {
            u64::from(low.load(Ordering::Relaxed)) | u64::from(high.load(Ordering::Relaxed)) << 32
        };
        let identity =
            [pair(&self.sequence, &self.kind), pair(&self.pid, &self.fd), pair(&self.ports, &self._reserved)];
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let addresses = [&self.channel].into_iter().chain(&self.local).chain(&self.remote).map(load);
        let way = move |way: &'_ DirectionStatus| {
            let counters =
                [&way.tcp, &way.ring_before, &way.rung_before, &way.saved_before, &way.switches_before, &way.moved];
            let words: Vec<u64> = counters.into_iter().chain(&way.moves).chain(&way._reserved).map(load).collect();
            words
        };
        identity.into_iter().chain(addresses).chain(way(&self.tx)).chain(way(&self.rx))
    }

    /// A new connection takes this line: nothing carried yet.
    pub fn begin(&self, identity: &LineIdentity) {
        for way in [&self.tx, &self.rx] {
            let counters =
                [&way.tcp, &way.ring_before, &way.rung_before, &way.saved_before, &way.switches_before, &way.moved];
            for counter in counters.into_iter().chain(&way.moves) {
                counter.store(0, Ordering::Relaxed);
            }
        }
        self.set(Some(identity));
    }
}
