//! The producing side of a ring: how much may be written, where, and whether to ring afterwards.
//!
//! Index logic only: it knows cursors and capacity, not memory, so that it runs unchanged under loom and in fuzz targets.

use crate::corrupt::Corrupt;
use crate::layout::{RxHalf, TxHalf};
use crate::sync::{Access, Ordering, load_acquire};
use crate::wake::{Fencing, must_ring};

/// No stream comes this far, so that sums of a cursor and the size of a ring cannot overflow.
pub(crate) const FURTHEST: u64 = 1 << 62;

/// A producer's private state.
///
/// ```text
///        head            tail
///  --------|##############|........|----> bytes of the stream
///          |<- committed->|<-free->|
///          |<------ capacity ----->|
/// ```
#[derive(Debug)]
pub struct Producer {
    /// Bytes ever committed; what our tail cursor says.
    tail: u64,
    /// The peer's head as last loaded and validated (protocol R5).
    head: u64,
    /// Where the present ring begins: bytes before it were in an earlier ring (protocol A2).
    base: u64,
    capacity: u64,
    generation: u32,
    /// The peer has not begun to read: its head says 0, wherever it will begin.
    is_unbegun: bool,
}

impl Producer {
    /// A producer of an empty ring of `capacity` bytes (a power of two, or 0 for a half that never writes).
    pub const fn new(capacity: u64) -> Self {
        Self { tail: 0, head: 0, base: 0, capacity, generation: 0, is_unbegun: false }
    }

    /// A producer as one of many readers of a ring sees it: of that reader, which begins at byte `tail` of the stream and says 0 until then.
    pub const fn following(capacity: u64, tail: u64) -> Self {
        Self { tail, head: tail, base: tail, capacity, generation: 0, is_unbegun: tail != 0 }
    }

    /// A producer of a ring that is never replaced, as [`Producer::tail`] and [`Producer::head`] described it before. `None` if no producer of
    /// such a ring says this: the two were kept in memory that others can write.
    #[inline]
    pub const fn resume(capacity: u64, tail: u64, head: u64) -> Option<Self> {
        let is_valid = tail <= FURTHEST && head <= tail && tail - head <= capacity;
        if is_valid { Some(Self { tail, head, ..Self::new(capacity) }) } else { None }
    }

    /// The peer's head as it was loaded last.
    pub const fn head(&self) -> u64 {
        self.head
    }

    /// Bytes ever committed.
    pub const fn tail(&self) -> u64 {
        self.tail
    }

    /// Size of the present ring in bytes.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The generation of the ring in use, counting from 0.
    pub const fn generation(&self) -> u32 {
        self.generation
    }

    /// Bytes that may be written without asking the peer. A lower bound: [`Producer::refresh`] may find more.
    #[inline]
    pub fn free(&self) -> u64 {
        self.capacity - (self.tail - self.head.max(self.base))
    }

    /// Whether everything committed has been released, as far as is known.
    pub const fn is_drained(&self) -> bool {
        self.head == self.tail
    }

    /// Loads the peer's head, validates it (protocol R4), and returns how much is free now.
    #[inline]
    pub fn refresh<A: Access>(&mut self, peer: &RxHalf<A>) -> Result<u64, Corrupt> {
        // EDGE head (protocol R3): acquires the consumer's release in `Consumer::release`; its reads of the bytes are over.
        let head = load_acquire(&peer.cursor.head);
        if self.is_unbegun && head == 0 {
            return Ok(self.free());
        }
        if head < self.head {
            return Err(Corrupt::CursorWentBackwards);
        }
        if head > self.tail {
            return Err(Corrupt::CursorOutOfRange);
        }
        self.head = head;
        self.is_unbegun = false;
        Ok(self.free())
    }

    /// Commits `n` bytes that were written at the tail. Returns whether the peer must be rung (protocol W3).
    ///
    /// `peer` is `None` until it has attached; it cannot say then that it sleeps, so it is rung each time.
    ///
    /// # Panics
    /// If `n` is more than [`Producer::free`]: the caller would have overwritten unread bytes.
    #[inline]
    pub fn commit<A: Access>(&mut self, own: &TxHalf, peer: Option<&RxHalf<A>>, n: u64, fencing: Fencing) -> bool {
        let from = self.advance(n);
        // EDGE tail (protocol R2): releases the bytes written before; acquired in `Consumer::refresh`.
        own.cursor.tail.store(self.tail, Ordering::Release);
        match peer {
            Some(peer) => {
                fencing.light();
                must_ring(&peer.control.data_wanted, from, self.tail)
            }
            None => n > 0,
        }
    }

    /// `n` bytes were committed to a ring that many read, and fenced for ([`crate::half::Broadcaster::commit`]). Returns whether this reader must
    /// be rung (protocol W3).
    ///
    /// # Panics
    /// If `n` is more than [`Producer::free`]: the reader had not read what is overwritten.
    #[inline]
    pub fn follow<A: Access>(&mut self, peer: &RxHalf<A>, n: u64) -> bool {
        let from = self.advance(n);
        must_ring(&peer.control.data_wanted, from, self.tail)
    }

    /// Moves the tail by `n` bytes. Returns where it was.
    #[inline]
    fn advance(&mut self, n: u64) -> u64 {
        assert!(n <= self.free(), "committed more than was free");
        let from = self.tail;
        self.tail += n;
        from
    }

    /// The head value to see passed before `want` bytes (at most the capacity) can be free: what to sleep on (protocol W1).
    /// `None` if that many are free already.
    pub fn wish(&self, want: u64) -> Option<u64> {
        let want = want.min(self.capacity);
        if self.free() >= want { None } else { Some(self.tail + want - self.capacity - 1) }
    }

    /// Whether another switch is allowed (protocol A4): the peer has read from the present ring, by which it is known to have
    /// taken it, or nothing was written to it, so that the peer may skip it.
    ///
    /// To have released all *before* the present ring is not enough: the peer may do that before it knows of the switch, and
    /// a second one would then hide where the first was.
    pub const fn may_switch(&self) -> bool {
        let is_first = self.generation == 0 && self.base == 0;
        is_first || self.head > self.base || self.tail == self.base
    }

    /// The head value to see passed before [`Producer::may_switch`] can be true: what to sleep on (protocol W1). `None` if it is.
    pub const fn switch_wish(&self) -> Option<u64> {
        if self.may_switch() { None } else { Some(self.base) }
    }

    /// Continues in a new ring of `capacity` bytes from the present tail (protocol A2). The caller has sent the ring.
    ///
    /// # Panics
    /// If [`Producer::may_switch`] is false.
    pub fn switch(&mut self, own: &TxHalf, capacity: u64) {
        assert!(self.may_switch(), "the previous switch is still under way");
        self.base = self.tail;
        self.capacity = capacity;
        self.generation = self.generation.wrapping_add(1);
        own.control.ring_size.store(capacity, Ordering::Relaxed);
        own.control.switch_at.store(self.tail, Ordering::Relaxed);
        // EDGE switch: releases `switch_at`; acquired in `Consumer::refresh`.
        own.control.generation.store(self.generation, Ordering::Release);
    }
}
