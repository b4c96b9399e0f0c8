//! The consuming side of a ring: how much may be read, where, and whether to ring afterwards.
//!
//! Index logic only, as in [`crate::producer`].

use crate::corrupt::Corrupt;
use crate::layout::{RxHalf, TxHalf};
use crate::producer::FURTHEST;
use crate::sync::{Access, Load, Ordering, load_acquire, load_acquire_u32};
use crate::wake::{Fencing, must_ring};

/// A consumer's private state.
#[derive(Debug)]
pub struct Consumer {
    /// Bytes ever released; what our head cursor says.
    head: u64,
    /// Up to where the present ring may be read: the peer's tail as last loaded and validated (protocol R5), or where the
    /// next ring begins.
    tail: u64,
    capacity: u64,
    generation: u32,
    /// Where the next ring begins and what the newest is called, once the producer has said so (protocol A3).
    switch: Option<(u64, u32)>,
}

impl Consumer {
    /// A consumer of a ring of `capacity` bytes that starts at byte `head` of the stream (0, except for broadcast).
    pub const fn new(capacity: u64, head: u64) -> Self {
        Self { head, tail: head, capacity, generation: 0, switch: None }
    }

    /// A consumer of a ring that is never replaced, as [`Consumer::head`] and [`Consumer::tail`] described it before. `None` if no consumer of
    /// such a ring says this: the two were kept in memory that others can write.
    #[inline]
    pub const fn resume(capacity: u64, head: u64, tail: u64) -> Option<Self> {
        let is_valid = tail <= FURTHEST && head <= tail && tail - head <= capacity;
        if is_valid { Some(Self { tail, ..Self::new(capacity, head) }) } else { None }
    }

    /// Up to where the present ring may be read, as far as is known.
    pub const fn tail(&self) -> u64 {
        self.tail
    }

    /// Bytes ever released.
    pub const fn head(&self) -> u64 {
        self.head
    }

    /// Size of the present ring in bytes.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Which ring is the present one, counting from 0.
    pub const fn generation(&self) -> u32 {
        self.generation
    }

    /// Bytes that may be read without asking the peer. A lower bound: [`Consumer::refresh`] may find more.
    #[inline]
    pub const fn available(&self) -> u64 {
        self.tail - self.head
    }

    /// Loads the peer's tail, validates it (protocol R4, A3), and returns how much may be read from the present ring.
    ///
    /// 0 with [`Consumer::must_switch`] means that the present ring is used up and the next one has to be taken first.
    #[inline]
    pub fn refresh<A: Access>(&mut self, peer: &TxHalf<A>) -> Result<u64, Corrupt> {
        if self.switch.is_some() {
            // No more comes into this ring. To look at the tail would be to believe bytes of rings not yet known.
            return Ok(self.available());
        }
        // EDGE tail (protocol R2): acquires the producer's release in `Producer::commit`; the bytes before it are there.
        let tail = load_acquire(&peer.cursor.tail);
        // EDGE switch: acquires `switch_at` from `Producer::switch`. A tail from after the switch was loaded with acquire, so
        // this cannot be older than the switch: bytes of the next ring are never looked for in the present one.
        let generation = load_acquire_u32(&peer.control.generation);
        if generation != self.generation {
            return self.notice_switch(peer, generation);
        }
        if tail < self.tail {
            return Err(Corrupt::CursorWentBackwards);
        }
        if tail - self.head > self.capacity {
            return Err(Corrupt::CursorOutOfRange);
        }
        self.tail = tail;
        Ok(self.available())
    }

    /// Counts `n` bytes as committed that have been seen to be so by something else than the tail: the stamp of a record (protocol K2). `false` if
    /// the present ring cannot hold them, or ends before.
    #[inline]
    pub fn admit(&mut self, n: u64) -> bool {
        if self.available() >= n {
            return true;
        }
        let fits = self.switch.is_none() && n <= self.capacity;
        if fits {
            self.tail = self.head + n;
        }
        fits
    }

    /// The producer is in another ring: finds out where that begins, once (protocol A3).
    #[cold]
    fn notice_switch<A: Access>(&mut self, peer: &TxHalf<A>, generation: u32) -> Result<u64, Corrupt> {
        let at = peer.control.switch_at.load(Ordering::Relaxed);
        // A tail loaded before the generation may be older than the switch; this one cannot be.
        // EDGE tail (protocol R2): as in `Consumer::refresh`.
        let tail = load_acquire(&peer.cursor.tail);
        // Further by more than one if rings were replaced before anything was in them (protocol A4).
        let is_later = generation.wrapping_sub(self.generation) <= u32::MAX / 2;
        if !is_later || at < self.tail || at > tail || at - self.head > self.capacity {
            return Err(Corrupt::BadSwitch);
        }
        self.switch = Some((at, generation));
        self.tail = at;
        Ok(self.available())
    }

    /// Releases `n` bytes that have been read. Returns whether the peer must be rung (protocol W3).
    ///
    /// # Panics
    /// If `n` is more than [`Consumer::available`].
    #[inline]
    pub fn release<A: Access>(&mut self, own: &RxHalf, peer: &TxHalf<A>, n: u64, fencing: Fencing) -> bool {
        assert!(n <= self.available(), "released more than was available");
        let from = self.head;
        self.head += n;
        // EDGE head (protocol R3): releases our reads of the bytes; acquired in `Producer::refresh`.
        own.cursor.head.store(self.head, Ordering::Release);
        fencing.light();
        must_ring(&peer.control.space_wanted, from, self.head)
    }

    /// The tail value to see passed before `want` bytes (at most the capacity) can be there: what to sleep on (protocol W1).
    ///
    /// `None` if there are that many already, or if no more will come into the present ring: what there is has to be
    /// read, and the next ring taken.
    pub fn wish(&self, want: u64) -> Option<u64> {
        let want = want.clamp(1, self.capacity.max(1));
        if self.switch.is_some() || self.available() >= want {
            return None;
        }
        // Saturating: where a broadcast begins is the publisher's choice, and may be next to the last number of all.
        Some(self.head.saturating_add(want - 1))
    }

    /// Whether the present ring is used up and the next has to be taken, by [`Consumer::switch`].
    #[inline]
    pub fn must_switch(&self) -> bool {
        self.switch.is_some_and(|(at, _)| at == self.head)
    }

    /// Continues in the next ring, of `capacity` bytes. [`Consumer::must_switch`] may say that there is yet another.
    ///
    /// # Panics
    /// If [`Consumer::must_switch`] is false.
    pub fn switch(&mut self, capacity: u64) {
        assert!(self.must_switch(), "no switch is due");
        self.capacity = capacity;
        self.generation = self.generation.wrapping_add(1);
        self.switch = self.switch.filter(|&(_, newest)| newest != self.generation);
    }
}
