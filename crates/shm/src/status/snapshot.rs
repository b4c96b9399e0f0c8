//! The reader's side: what two copies of a status memory say.

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::states::{LineState, Reason, Role};
use super::{LINE, LineIdentity, MAGIC, MAX_LINES, MOVES, VERSION};

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

/// A copy of one direction's counts; see [`DirectionStatus`](super::DirectionStatus).
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
