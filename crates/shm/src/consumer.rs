//! The consuming side of a ring: how much may be read, where, and whether to ring afterwards.
//!
//! Index logic only, as in [`crate::producer`].

use crate::corrupt::Corrupt;
use crate::layout::{RxHalf, TxHalf};
use crate::producer::FURTHEST;
use crate::sync::{Access, Load, Ordering, fence, load_acquire, load_acquire_u32};
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
    /// The producer does not wait for this consumer, and may overwrite what it has not read (protocol B4).
    may_be_overrun: bool,
}

impl Consumer {
    /// A consumer of a ring of `capacity` bytes that starts at byte `head` of the stream (0, except for broadcast).
    pub const fn new(capacity: u64, head: u64) -> Self {
        Self { head, tail: head, capacity, generation: 0, switch: None, may_be_overrun: false }
    }

    /// The same consumer, of a producer that overruns it (protocol B4).
    pub const fn overrun(mut self) -> Self {
        self.may_be_overrun = true;
        self
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

    /// The generation of the ring in use, counting from 0.
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
            // No more bytes come into this ring. A look at the tail would accept bytes of rings that are not known yet.
            return Ok(self.available());
        }
        // EDGE tail (protocol R2): acquires the producer's release in `Producer::commit`; the bytes before it are there.
        let tail = load_acquire(&peer.cursor.tail);
        // EDGE switch: acquires `switch_at` from `Producer::switch`. A tail from after the switch was loaded with acquire, so
        // this cannot be older than the switch: bytes of the next ring are never looked for in the present one.
        let generation = load_acquire_u32(&peer.control.generation);
        if generation != self.generation {
            if self.may_be_overrun {
                // The positions of a switch would be overrun too: such a ring never switches (protocol B1).
                return Err(Corrupt::BadSwitch);
            }
            return self.notice_switch(peer, generation);
        }
        if tail < self.tail {
            return Err(Corrupt::CursorWentBackwards);
        }
        if tail - self.head > self.capacity {
            return if self.may_be_overrun { self.recover(peer) } else { Err(Corrupt::CursorOutOfRange) };
        }
        self.tail = tail;
        Ok(self.available())
    }

    /// Whether the producer may have overwritten bytes from the head on, up to this moment (protocol B3.1). To be called after they were copied.
    pub fn is_overwritten<A: Access>(&self, peer: &TxHalf<A>) -> bool {
        // What was copied was copied before the load below.
        fence(Ordering::SeqCst);
        // EDGE intent (protocol B4.2): acquires the producer's release in `Broadcaster::announce`; the position of a newer record is there.
        load_acquire(&peer.control.intent).saturating_sub(self.head) > self.capacity
    }

    /// The producer has overwritten the record at the head: continues at the newest record, and returns how much may be read from there on
    /// (protocol B4.3). What is there may be overwritten in turn while it is copied.
    ///
    /// An honest producer has committed another record since, so the head always moves on.
    #[cold]
    pub fn recover<A: Access>(&mut self, peer: &TxHalf<A>) -> Result<u64, Corrupt> {
        let (newest, tail) = self.load_newest(peer)?;
        if newest <= self.head {
            return Err(Corrupt::CursorWentBackwards);
        }
        self.continue_at(newest, tail)
    }

    /// Passes over all records before the newest one. Returns how much may be read, and from where is [`Consumer::head`].
    pub fn skip_to_newest<A: Access>(&mut self, peer: &TxHalf<A>) -> Result<u64, Corrupt> {
        let (newest, tail) = self.load_newest(peer)?;
        // The producer stores the tail first, so this consumer may have passed the position that it sees here.
        if newest <= self.head { Ok(self.available()) } else { self.continue_at(newest, tail) }
    }

    /// Loads the position of the newest record once, and then the tail, which an honest producer has stored before.
    fn load_newest<A: Access>(&self, peer: &TxHalf<A>) -> Result<(u64, u64), Corrupt> {
        if !self.may_be_overrun {
            return Err(Corrupt::CursorOutOfRange);
        }
        // EDGE newest (protocol B4.2): acquires the producer's release in `Broadcaster::commit`; the tail behind that record is there.
        let newest = load_acquire(&peer.control.newest);
        let tail = load_acquire(&peer.cursor.tail);
        if tail < self.tail {
            return Err(Corrupt::CursorWentBackwards);
        }
        Ok((newest, tail))
    }

    fn continue_at(&mut self, newest: u64, tail: u64) -> Result<u64, Corrupt> {
        if newest >= tail {
            return Err(Corrupt::CursorOutOfRange);
        }
        self.head = newest;
        // The producer may have gone on by more than a ring between the two loads. Then this record is overwritten again.
        self.tail = newest + (tail - newest).min(self.capacity);
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::half::Broadcaster;

    /// A consumer that has read the first of these records of a ring of 16 bytes, and the page of its producer.
    fn overrun_after(records: &[u64]) -> (Consumer, TxHalf, Broadcaster) {
        let (own, peer, mut producer) = (RxHalf::new(), TxHalf::new(), Broadcaster::new(16));
        let mut consumer = Consumer::new(16, 0).overrun();
        for (at, n) in records.iter().enumerate() {
            producer.announce(&peer, *n);
            producer.commit(&peer, *n, Fencing::Symmetric);
            if at == 0 {
                assert_eq!(consumer.refresh(&peer), Ok(*n));
                consumer.release(&own, &peer, *n, Fencing::Symmetric);
            }
        }
        (consumer, peer, producer)
    }

    #[test]
    fn overrun_consumer_continues_at_the_newest_record() {
        let (mut consumer, peer, _) = overrun_after(&[4, 8, 8, 4]);
        assert_eq!(consumer.refresh(&peer), Ok(4));
        assert_eq!(consumer.head(), 20);
        assert!(!consumer.is_overwritten(&peer));
    }

    #[test]
    fn consumer_that_keeps_up_passes_over_nothing() {
        let (mut consumer, peer, _) = overrun_after(&[4, 8, 8]);
        assert_eq!(consumer.refresh(&peer), Ok(16));
        assert_eq!(consumer.head(), 4);
        assert!(!consumer.is_overwritten(&peer));
        assert_eq!(consumer.skip_to_newest(&peer), Ok(8));
        assert_eq!(consumer.skip_to_newest(&peer), Ok(8), "the head is there already");
        assert_eq!(consumer.head(), 12);
    }

    #[test]
    fn record_that_is_overwritten_is_left_for_a_newer_one() {
        let (mut consumer, peer, producer) = overrun_after(&[4, 8, 8]);
        assert_eq!(consumer.refresh(&peer), Ok(16));
        producer.announce(&peer, 4);
        assert!(consumer.is_overwritten(&peer), "4 to 20 are in the ring, and its first four are being written");
        assert_eq!(consumer.recover(&peer), Ok(8));
        assert_eq!(consumer.head(), 12);
        assert!(!consumer.is_overwritten(&peer));
    }

    #[test]
    fn producer_that_overruns_and_lies_is_corrupt() {
        let lies = [
            (24, 4, Corrupt::CursorWentBackwards, "a newest record that was read"),
            (24, 0, Corrupt::CursorWentBackwards, "a newest record before that"),
            (24, 24, Corrupt::CursorOutOfRange, "a newest record that is not committed"),
            (24, u64::MAX, Corrupt::CursorOutOfRange, "a newest record beyond all bytes"),
            (3, 20, Corrupt::CursorWentBackwards, "a tail that went back"),
        ];
        for (tail, newest, what, why) in lies {
            let (mut consumer, peer, _) = overrun_after(&[4, 8, 8, 4]);
            peer.control.newest.store(newest, Ordering::Relaxed);
            peer.cursor.tail.store(tail, Ordering::Relaxed);
            if tail > 4 && newest <= 4 {
                assert_eq!(consumer.skip_to_newest(&peer), Ok(0), "{why}: may be seen late");
            }
            assert_eq!(consumer.refresh(&peer), Err(what), "{why}");
            assert_eq!((consumer.head(), consumer.available()), (4, 0), "{why}: nothing is believed");
        }
        let (mut consumer, peer, _) = overrun_after(&[4, 8, 8, 4]);
        peer.control.generation.store(1, Ordering::Relaxed);
        assert_eq!(consumer.refresh(&peer), Err(Corrupt::BadSwitch));
    }

    #[test]
    fn lying_producer_gets_no_more_than_a_ring_and_no_standstill() {
        const VALUES: [u64; 9] = [0, 3, 15, 16, 17, 1 << 40, u64::MAX - 17, u64::MAX - 1, u64::MAX];
        let (mut state, mut outcomes) = (7u64, [0; 3]);
        let mut dice = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..if cfg!(miri) { 100 } else { 20_000 } {
            let start = VALUES[dice(9) as usize];
            let (own, peer, mut consumer) = (RxHalf::new(), TxHalf::new(), Consumer::new(16, start).overrun());
            peer.cursor.tail.store(start, Ordering::Relaxed);
            for _ in 0..8 {
                for word in [&peer.cursor.tail, &peer.control.newest, &peer.control.intent] {
                    let near = consumer.head().wrapping_add(VALUES[dice(9) as usize]).wrapping_add(dice(24));
                    word.store(if dice(3) == 0 { VALUES[dice(9) as usize] } else { near }, Ordering::Relaxed);
                }
                let (head, overwritten) = (consumer.head(), consumer.is_overwritten(&peer));
                let step = match dice(3) {
                    0 => consumer.refresh(&peer),
                    1 => consumer.skip_to_newest(&peer),
                    _ if overwritten => consumer.recover(&peer).inspect(|_| assert!(consumer.head() > head)),
                    _ => Ok(consumer.available()),
                };
                outcomes[usize::from(step.is_err())] += 1;
                outcomes[2] += usize::from(consumer.head() > head);
                assert!(consumer.head() >= head && consumer.available() <= 16, "{consumer:?}");
                let n = consumer.available().min(dice(17));
                consumer.release(&own, &peer, n, Fencing::Symmetric);
            }
        }
        assert!(outcomes.iter().all(|count| *count > if cfg!(miri) { 0 } else { 1000 }), "{outcomes:?}");
    }
}
