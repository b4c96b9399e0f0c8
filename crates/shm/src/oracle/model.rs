//! The expectation: a queue of bytes, the rings they lie in, and the event that each half sleeps for.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// The byte that tests write at position `n` of a stream, so that a reader can tell which byte it got.
///
/// Neighbours differ, and so do the bytes that share a slot of the ring in consecutive revolutions.
pub const fn byte(n: u64) -> u8 {
    (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Requires `got` to be the stream from position `from` on.
pub fn expect_bytes(from: u64, got: &[u8]) {
    for (position, &b) in (from..).zip(got) {
        assert!(b == byte(position), "byte {position} of the stream is {b:#04x}, not {:#04x}", byte(position));
    }
}

/// A direction of a channel, without caches, cursors in shared memory, or any doubt.
#[derive(Debug)]
pub struct Model {
    /// Committed and not yet released.
    unread: VecDeque<u8>,
    committed: u64,
    released: u64,
    /// Where in the stream each ring begins and its size; the reader is in the first, the writer in the last. Any between
    /// were replaced before anything was in them.
    rings: VecDeque<(u64, u64)>,
    /// Rings that the reader took after the first.
    taken: u64,
}

impl Model {
    /// An empty ring of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self { unread: VecDeque::new(), committed: 0, released: 0, rings: [(0, capacity)].into(), taken: 0 }
    }

    /// Bytes ever committed.
    pub const fn committed(&self) -> u64 {
        self.committed
    }

    /// Bytes ever released.
    pub const fn released(&self) -> u64 {
        self.released
    }

    /// Bytes that may be written now, exactly: the newest ring less what is unread in it (protocol R1, A2).
    pub fn free(&self) -> u64 {
        let (from, capacity) = self.rings[self.rings.len() - 1];
        capacity - (self.committed - self.released.max(from))
    }

    /// Bytes that may be read now from the ring that the reader is in, exactly (protocol R1, A3).
    pub fn readable(&self) -> u64 {
        let end = self.rings.get(1).map_or(self.committed, |&(from, _)| from);
        end - self.released
    }

    /// Whether the reader has used up its ring and has to take the next.
    pub fn must_take(&self) -> bool {
        self.rings.get(1).is_some_and(|&(from, _)| from == self.released)
    }

    /// Whether the writer may go on in yet another ring (protocol A4): it was the only one so far, the reader has read from
    /// it, or it is unused. Else a ring with bytes in it could go unnoticed.
    pub fn may_switch(&self) -> bool {
        let (from, _) = self.rings[self.rings.len() - 1];
        let is_first = self.rings.len() == 1 && self.taken == 0;
        is_first || self.released > from || self.committed == from
    }

    /// The writer committed these.
    pub fn commit(&mut self, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= self.free(), "{} bytes committed with room for {}", bytes.len(), self.free());
        self.committed += bytes.len() as u64;
        self.unread.extend(bytes);
    }

    /// The reader released `n` bytes; these they were.
    pub fn release(&mut self, n: u64) -> Vec<u8> {
        assert!(n <= self.readable(), "{n} bytes released of {}", self.readable());
        self.released += n;
        (0..n).filter_map(|_| self.unread.pop_front()).collect()
    }

    /// The writer goes on in a ring of `capacity` bytes.
    pub fn switch(&mut self, capacity: u64) {
        assert!(self.may_switch(), "a switch that may hide the one before from the reader");
        self.rings.push_back((self.committed, capacity));
    }

    /// The reader took the next ring.
    pub fn took(&mut self) {
        assert!(self.must_take(), "a ring taken before the one before it was used up");
        self.rings.pop_front();
        self.taken += 1;
    }
}

/// A half that may sleep until the other's cursor passes its wish (protocol W).
#[derive(Debug, Default)]
pub struct Sleeper {
    /// The value of its wish word; `None` means awake.
    wish: Option<u64>,
    asleep: bool,
    /// Rung, and not yet noticed.
    bell: bool,
}

impl Sleeper {
    /// Whether it has said that it wants to sleep.
    pub const fn is_armed(&self) -> bool {
        self.wish.is_some()
    }

    /// Whether it sleeps and was not rung.
    pub const fn sleeps_on(&self) -> bool {
        self.asleep && !self.bell
    }

    /// It stored its wish.
    pub fn arm(&mut self, wish: u64) {
        self.wish = Some(wish);
    }

    /// It looked again and went to sleep.
    pub fn sleep(&mut self) {
        assert!(self.is_armed(), "it sleeps on nothing");
        self.asleep = true;
    }

    /// It woke, for whatever reason, and stored that it is awake.
    pub fn wake(&mut self) {
        *self = Self::default();
    }

    /// Its doorbell was rung.
    pub fn ring(&mut self) {
        self.bell = true;
    }

    /// Whether a move of the cursor from `from` to `to` has to ring it, exactly (protocol W3).
    pub fn must_be_rung(&self, from: u64, to: u64) -> bool {
        self.wish.is_some_and(|wish| from <= wish && wish <= to)
    }

    /// Fails if a wake-up was lost: the half is asleep, its event has happened, and no bell is in transit.
    pub fn expect_no_lost_wakeup(&self, who: &str, cursor: u64, ended: bool) {
        if let Some(wish) = self.wish {
            let due = cursor > wish || ended;
            assert!(!(self.sleeps_on() && due), "lost wake-up: {who} sleeps until {wish} is passed, at {cursor}");
        }
    }
}
