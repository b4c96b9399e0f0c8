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

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::address::wide;
use crate::numbered;
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

numbered! {
    /// Where a connection is.
    #[derive(Default)]
    LineState: u8 {
        /// No connection.
        #[default]
        Free = 0 "free",
        /// On TCP, and counted until the move rules say that it is worth a ring.
        Counting = 1 "counting",
        /// On TCP, and offered to the other side.
        Offered = 2 "offered",
        /// On a ring, or able to be in either direction.
        Up = 3 "up",
        /// On TCP permanently.
        Tcp = 4 "tcp",
        /// On TCP again after a ring, and may go back.
        Down = 5 "down",
    }
}

numbered! {
    /// Why a connection is on TCP.
    #[derive(Default)]
    Reason: u8 {
        /// No obstacle.
        #[default]
        None = 0 "",
        /// The other side is not under Partywall on this host.
        NoPeer = 1 "the peer is not under Partywall on this host",
        /// The move rules say so.
        MovesNever = 2 "the move rules say never",
        /// It has not carried enough yet.
        TooShort = 3 "it has not carried enough yet",
        /// No broker.
        BrokerAbsent = 4 "no broker answers",
        /// Bytes passed that we did not see.
        RawCalls = 5 "the program also uses raw system calls or io_uring on it",
        /// Several processes hold it.
        Shared = 6 "several processes hold it",
        /// An option that a ring cannot honour.
        Option = 7 "a socket option that only TCP can honour is set",
        /// It was sent through a UNIX socket.
        Passed = 8 "it was passed to another process",
        /// The program became another.
        Exec = 9 "it was kept open across exec",
        /// The peer broke the protocol.
        Corrupt = 10 "the peer broke the protocol",
        /// The broker refused.
        Refused = 11 "the broker refused",
        /// Addresses that do not name one connection.
        Ambiguous = 12 "its addresses do not name one connection on this host",
        /// The other side stays on TCP.
        PeerOnTcp = 13 "the peer stays on TCP",
        /// Something was not to be had: memory, descriptors.
        Resources = 14 "memory or descriptors ran out",
        /// The other side has not answered the offer yet.
        NotTaken = 15 "offered, and not taken up by the peer yet",
        /// Told to go back to TCP.
        Told = 16 "it was told to go back to TCP",
        /// The bell to another machine has hung up.
        LinkLost = 17 "the way to the peer's machine was lost",
        /// A list of the policy leaves its program out.
        ProgramNotListed = 18 "the policy's list of programs leaves its program out",
    }
}

numbered! {
    /// The side of a connection that a socket is.
    #[derive(Default)]
    Role: u8 {
        /// Unknown.
        #[default]
        Unknown = 0 "?",
        /// The connecting side.
        Connecting = 1 "connecting",
        /// The accepting side.
        Accepting = 2 "accepting",
    }
}

impl Reason {
    /// A word for programs. It keeps its meaning: a reason that means something else gets another code.
    pub const fn code(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::NoPeer => "no-peer",
            Self::MovesNever => "moves-never",
            Self::TooShort => "too-short",
            Self::BrokerAbsent => "broker-absent",
            Self::RawCalls => "raw-calls",
            Self::Shared => "shared",
            Self::Option => "socket-option",
            Self::Passed => "passed",
            Self::Exec => "exec",
            Self::Corrupt => "corrupt",
            Self::Refused => "refused",
            Self::Ambiguous => "ambiguous",
            Self::PeerOnTcp => "peer-on-tcp",
            Self::Resources => "resources",
            Self::NotTaken => "not-taken",
            Self::Told => "told",
            Self::LinkLost => "link-lost",
            Self::ProgramNotListed => "program-not-listed",
        }
    }
}

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

/// A copy of one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineSnapshot {
    /// The line's place in the table.
    pub index: u32,
    /// The identity of the connection.
    pub identity: LineIdentity,
    /// The counts of the sending direction.
    pub tx: DirectionSeen,
    /// The counts of the receiving direction.
    pub rx: DirectionSeen,
}

/// A copy of one direction's counts; see [`DirectionStatus`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "as the fields of DirectionStatus")]
pub struct DirectionSeen {
    pub tcp: u64,
    pub ring_before: u64,
    pub rung_before: u64,
    pub saved_before: u64,
    pub switches_before: u64,
    pub moved: u64,
    pub move_words: [u64; MOVES],
}

/// A direction's move from TCP to its ring, or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathMove {
    /// The number of this move of the direction, from 0 on.
    pub number: u64,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// To the ring; otherwise to TCP.
    pub to_ring: bool,
    /// Why it is not on the ring from then on.
    pub reason: Reason,
}

impl DirectionSeen {
    /// The last moves, the oldest first. Invalid entries are left out.
    pub fn moves(&self) -> impl Iterator<Item = PathMove> + '_ {
        let first = self.moved.saturating_sub(MOVES as u64);
        (first..self.moved).filter_map(|number| {
            let word = self.move_words[(number % MOVES as u64) as usize];
            let [way, reason, ..] = word.to_le_bytes();
            let reason = Reason::from_number(reason)?;
            (way <= 1).then_some(PathMove { number, at_ms: word >> 16, to_ring: way == 1, reason })
        })
    }
}

/// Why there is nothing to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotStatus;

impl core::fmt::Display for NotStatus {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("this is no status memory that we know")
    }
}

impl core::error::Error for NotStatus {}

/// How many bytes there are to look at, given the first [`LINE`] of them.
///
/// # Errors
/// [`NotStatus`].
pub fn used_bytes(header: &[u8]) -> Result<usize, NotStatus> {
    let words = Words(header);
    if words.u64(0) != Some(MAGIC) || words.u32(8) != Some(VERSION) {
        return Err(NotStatus);
    }
    let lines = words.u32(12).filter(|lines| *lines <= MAX_LINES).ok_or(NotStatus)?;
    let used = words.u32(16).ok_or(NotStatus)?.min(lines);
    Ok((1 + used as usize) * LINE)
}

/// Whether this is status memory of a version that this library does not read, as of a program that was started before an upgrade.
pub fn is_of_other_version(header: &[u8]) -> bool {
    let words = Words(header);
    words.u64(0) == Some(MAGIC) && words.u32(8).is_some_and(|version| version != VERSION)
}

/// The connections in two copies of a memory, `first` taken before `second`. Lines that were written between the copies are left out, and
/// so are invalid ones.
pub fn read<'a>(first: &'a [u8], second: &'a [u8]) -> impl Iterator<Item = LineSnapshot> + 'a {
    let lines = |copy: &'a [u8]| copy.get(LINE..).unwrap_or_default().chunks_exact(LINE);
    lines(first).zip(lines(second)).enumerate().filter_map(|(index, (first, second))| {
        let same = first.get(..64) == second.get(..64);
        let seen = seen(u32::try_from(index).ok()?, second)?;
        same.then_some(seen)
    })
}

/// As [`read`], collected.
pub fn read_all(first: &[u8], second: &[u8]) -> Vec<LineSnapshot> {
    read(first, second).collect()
}

fn seen(index: u32, line: &[u8]) -> Option<LineSnapshot> {
    let words = Words(line);
    if words.u32(0)? % 2 != 0 {
        return None;
    }
    let [state, reason, role, family] = words.u32(4)?.to_le_bytes();
    let state = LineState::from_number(state).filter(|state| *state != LineState::Free)?;
    let ports = words.u32(16)?;
    let address = |at: usize, port: u32| {
        let wide = u128::from(words.u64(at)?) | u128::from(words.u64(at + 8)?) << 64;
        let six = Ipv6Addr::from(wide);
        let ip = match family {
            4 => IpAddr::V4(six.to_ipv4_mapped()?),
            _ => IpAddr::V6(six),
        };
        Some(SocketAddr::new(ip, (port & 0xFFFF) as u16))
    };
    let way = |at: usize| {
        let word = |n: usize| words.u64(at + 8 * n);
        Some(DirectionSeen {
            tcp: word(0)?,
            ring_before: word(1)?,
            rung_before: word(2)?,
            saved_before: word(3)?,
            switches_before: word(4)?,
            moved: word(5)?,
            move_words: {
                let mut moves = [0; MOVES];
                for (n, place) in moves.iter_mut().enumerate() {
                    *place = word(6 + n)?;
                }
                moves
            },
        })
    };
    let identity = LineIdentity {
        state,
        reason: Reason::from_number(reason)?,
        role: Role::from_number(role)?,
        pid: words.u32(8)?,
        fd: words.u32(12)?,
        local: address(32, ports)?,
        remote: address(48, ports >> 16)?,
        channel: words.u64(24)?,
    };
    Some(LineSnapshot { index, identity, tx: way(64)?, rx: way(192)? })
}

/// Little-endian words in copied bytes.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn u32(&self, at: usize) -> Option<u32> {
        self.0.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn u64(&self, at: usize) -> Option<u64> {
        self.0.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    #![expect(unsafe_code, reason = "the bytes of a structure that the test itself owns")]

    use super::*;
    use alloc::boxed::Box;

    /// As a process has it.
    #[repr(C)]
    struct Memory {
        header: StatusHeader,
        lines: [StatusLine; 3],
    }

    impl Memory {
        fn new() -> Box<Self> {
            // SAFETY: every field is an atomic or an integer, for which zero is a value.
            let memory: Box<Self> = unsafe { Box::<Self>::new_zeroed().assume_init() };
            memory.header.init(3);
            memory
        }

        fn copy(&self) -> Vec<u8> {
            let at = core::ptr::from_ref(self).cast::<u8>();
            // SAFETY: `self` is that long, has no padding (all sizes are asserted), and no other thread writes it.
            unsafe { core::slice::from_raw_parts(at, size_of::<Self>()) }.to_vec()
        }
    }

    fn identity() -> LineIdentity {
        LineIdentity {
            state: LineState::Tcp,
            reason: Reason::Shared,
            role: Role::Accepting,
            pid: 77,
            fd: 9,
            local: "10.0.0.1:80".parse().unwrap(),
            remote: "10.0.0.2:50000".parse().unwrap(),
            channel: 5,
        }
    }

    #[test]
    fn used_line_is_read_back_and_free_line_is_not() {
        let memory = Memory::new();
        memory.header.use_line(1);
        memory.lines[1].begin(&identity());
        crate::counters::add(&memory.lines[1].tx.tcp, 100);
        crate::counters::add(&memory.lines[1].rx.ring_before, 7);
        let copy = memory.copy();
        assert_eq!(used_bytes(&copy), Ok(3 * LINE));
        let seen = read_all(&copy, &copy);
        assert_eq!(seen.len(), 1, "line 0 is free");
        assert_eq!((seen[0].index, seen[0].identity), (1, identity()));
        assert_eq!((seen[0].tx.tcp, seen[0].rx.ring_before), (100, 7));
        memory.lines[1].set(None);
        assert!(read_all(&memory.copy(), &memory.copy()).is_empty());
    }

    #[test]
    fn last_moves_are_kept_in_order_with_time_and_reason() {
        let memory = Memory::new();
        memory.lines[0].begin(&identity());
        for n in 0..MOVES as u64 + 3 {
            let reason = if n % 2 == 0 { Reason::None } else { Reason::Told };
            memory.lines[0].tx.note_move(n % 2 == 0, reason, 1_700_000_000_000 + n);
        }
        let seen = read_all(&memory.copy(), &memory.copy())[0];
        let moves: Vec<PathMove> = seen.tx.moves().collect();
        assert_eq!((moves.len(), seen.tx.moved), (MOVES, MOVES as u64 + 3));
        let first = PathMove { number: 3, at_ms: 1_700_000_000_003, to_ring: false, reason: Reason::Told };
        assert_eq!(moves[0], first, "the oldest three are gone");
        assert!(moves.is_sorted_by_key(|one| one.at_ms) && seen.rx.moves().next().is_none());
        memory.lines[0].begin(&identity());
        assert_eq!(read_all(&memory.copy(), &memory.copy())[0].tx.moves().count(), 0, "another connection");
        // A writer that lies.
        memory.lines[0].tx.moved.store(u64::MAX, Ordering::Relaxed);
        memory.lines[0].tx.moves[0].store(u64::MAX, Ordering::Relaxed);
        assert!(read_all(&memory.copy(), &memory.copy())[0].tx.moves().count() < MOVES);
    }

    #[test]
    fn ipv6_stays_ipv6() {
        let memory = Memory::new();
        let six = LineIdentity {
            local: "[::1]:1".parse().unwrap(),
            remote: "[::ffff:1.2.3.4]:65535".parse().unwrap(),
            ..identity()
        };
        memory.lines[0].begin(&six);
        assert_eq!(read_all(&memory.copy(), &memory.copy())[0].identity, six);
    }

    #[test]
    fn line_that_changes_between_reads_is_skipped() {
        let memory = Memory::new();
        memory.lines[0].begin(&identity());
        let first = memory.copy();
        memory.lines[0].set(Some(&LineIdentity { fd: 10, ..identity() }));
        assert!(read_all(&first, &memory.copy()).is_empty());
        // A writer that stopped half way.
        memory.lines[0].sequence.fetch_add(1, Ordering::Relaxed);
        assert!(read_all(&memory.copy(), &memory.copy()).is_empty());
    }

    #[test]
    fn malformed_status_is_refused() {
        assert_eq!(used_bytes(&[]), Err(NotStatus));
        assert_eq!(used_bytes(&[0; LINE]), Err(NotStatus));
        let memory = Memory::new();
        memory.header.lines.store(MAX_LINES + 1, Ordering::Relaxed);
        assert_eq!(used_bytes(&memory.copy()), Err(NotStatus));
        memory.lines[0].begin(&identity());
        memory.lines[0].kind.store(200, Ordering::Relaxed);
        assert!(read_all(&memory.copy(), &memory.copy()).is_empty());
        // Cut short.
        assert!(read_all(&[1; LINE + 5], &[1; LINE + 5]).is_empty());
    }

    #[test]
    fn status_numbers_match_their_variants() {
        for (number, state) in LineState::ALL.iter().enumerate() {
            assert_eq!(*state as usize, number);
        }
        for (number, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, number);
        }
        assert_eq!((LineState::from_number(6), Reason::from_number(19), Role::from_number(3)), (None, None, None));
    }
}
