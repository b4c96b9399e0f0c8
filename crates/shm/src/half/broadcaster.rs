//! The writing half of a ring that many read (protocol B).

use super::WritingHalf;
use crate::counters::add;
use crate::layout::{RxHalf, TxHalf};
use crate::sync::{Access, Ordering, fence};
use crate::wake::{Fencing, must_ring};

/// The writing half of a ring with many readers: its one tail. Each reader is followed by a separate [`WritingHalf`], which knows how far that
/// reader has come, waits for it and judges it.
///
/// A half that overruns its readers (protocol B4) follows none of them: it asks [`Broadcaster::must_ring`] for each.
#[derive(Debug)]
pub struct Broadcaster {
    tail: u64,
    capacity: u64,
}

impl Broadcaster {
    /// A half that writes to an empty ring of `capacity` bytes.
    pub const fn new(capacity: u64) -> Self {
        Self { tail: 0, capacity }
    }

    /// Bytes ever committed.
    pub const fn tail(&self) -> u64 {
        self.tail
    }

    /// Size of the ring in bytes.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// A half that follows a reader that begins at the present tail.
    pub const fn follower(&self) -> WritingHalf {
        WritingHalf::following(self.capacity, self.tail)
    }

    /// Announces that the next `n` bytes are about to be overwritten (protocol B3): a reader that was dropped may still be copying them.
    /// The caller announces before it writes the first of them.
    pub fn announce(&self, own: &TxHalf, n: u64) {
        // EDGE intent (protocol B4.2): releases the position of the newest record, so that a reader that is overwritten finds a newer one; acquired
        // in `Consumer::is_overwritten`.
        own.control.intent.store(self.tail + n, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// The largest record that a half with a ring of `capacity` bytes may commit if it overruns its readers. The newest record then stays whole
    /// while the next one is written, so a reader always finds a whole one (protocol B4.1).
    pub const fn largest_of_two(capacity: u64) -> u64 {
        capacity / 2
    }

    /// Commits the record of `n` bytes that was written at the tail, for all readers: [`WritingHalf::follow`] then says of each whether to ring it.
    /// `fencing` is the stronger of what was agreed on with them.
    pub fn commit(&mut self, own: &TxHalf, n: u64, fencing: Fencing) {
        let from = self.tail;
        self.tail += n;
        // EDGE tail (protocol R2): releases the bytes written before; acquired in `Consumer::refresh`.
        own.cursor.tail.store(self.tail, Ordering::Release);
        // EDGE newest (protocol B4.2): releases the tail; acquired in `Consumer::resume`.
        own.control.newest.store(from, Ordering::Release);
        fencing.light();
        add(&own.counters.bytes, n);
    }

    /// `n` bytes were committed last. Returns whether this reader, which may be overrun, must be rung (protocol W3).
    pub fn must_ring<A: Access>(&self, peer: &RxHalf<A>, n: u64) -> bool {
        must_ring(&peer.control.data_wanted, self.tail - n, self.tail)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::{Effect, Ending, Idle, Need, ReadingHalf};
    use super::*;
    use crate::corrupt::Corrupt;

    /// A ring of eight bytes in which five are committed, and a follower of a reader that begins after them.
    fn joined() -> (TxHalf, RxHalf, Broadcaster, WritingHalf) {
        let (own, peer, mut broadcaster) = (TxHalf::new(), RxHalf::new(), Broadcaster::new(8));
        broadcaster.commit(&own, 5, Fencing::Symmetric);
        let follower = broadcaster.follower();
        (own, peer, broadcaster, follower)
    }

    fn next(own: &TxHalf, peer: &RxHalf, follower: &mut WritingHalf, n: u64) -> Effect {
        follower.next(own, Some(peer), false, Need::Room(n), Idle::Sleep)
    }

    #[test]
    fn joined_reader_holds_bytes_sent_before_it_starts() {
        let (own, peer, mut broadcaster, mut follower) = joined();
        assert_eq!(next(&own, &peer, &mut follower, 8), Effect::Ready, "what was sent before is not for it");
        broadcaster.commit(&own, 2, Fencing::Symmetric);
        follower.follow(&peer, 2);
        assert_eq!(next(&own, &peer, &mut follower, 6), Effect::Ready);
        assert_eq!(next(&own, &peer, &mut follower, 7), Effect::Fence);
        assert_eq!(
            next(&own, &peer, &mut follower, 7),
            Effect::Sleep { until: 5 },
            "its head says 0, which is no step back"
        );
        let mut reader = ReadingHalf::new(8, 0);
        reader.start(&peer, 8, 5);
        assert_eq!(reader.refresh(&own), Ok(2));
        reader.release(&peer, &own, 1, Fencing::Symmetric);
        assert_eq!(next(&own, &peer, &mut follower, 7), Effect::Ready);
    }

    #[test]
    fn reader_that_begins_before_it_joined_is_corrupt() {
        for (head, what) in [(4, Corrupt::CursorWentBackwards), (6, Corrupt::CursorOutOfRange)] {
            let (own, peer, _, mut follower) = joined();
            peer.cursor.head.store(head, Ordering::Release);
            assert_eq!(next(&own, &peer, &mut follower, 8), Effect::Ended(Ending::Corrupt(what)), "head {head}");
        }
    }

    #[test]
    fn reader_that_has_begun_may_not_go_back_to_zero() {
        let (own, peer, _, mut follower) = joined();
        peer.cursor.head.store(5, Ordering::Release);
        assert_eq!(next(&own, &peer, &mut follower, 8), Effect::Ready);
        peer.cursor.head.store(0, Ordering::Release);
        let effect = next(&own, &peer, &mut follower, 8);
        assert_eq!(effect, Effect::Ended(Ending::Corrupt(Corrupt::CursorWentBackwards)));
    }

    #[test]
    fn commit_rings_only_sleeping_readers() {
        let (own, sleeper, mut broadcaster, mut follower) = joined();
        let (awake, mut other) = (RxHalf::new(), broadcaster.follower());
        sleeper.control.data_wanted.store(5, Ordering::Relaxed);
        broadcaster.commit(&own, 1, Fencing::Symmetric);
        assert!(follower.follow(&sleeper, 1));
        assert!(!other.follow(&awake, 1));
    }
}
