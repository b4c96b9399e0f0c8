//! The reading half of a direction.

use super::wish::Wish;
use super::{Effect, Ending, Idle};
use crate::consumer::Consumer;
use crate::corrupt::Corrupt;
use crate::counters::add;
use crate::layout::{RxHalf, TxHalf};
use crate::state::{RxState, TxState, reader_end};
use crate::sync::{Access, Ordering};
use crate::wake::Fencing;
use core::ops::Deref;

/// A reading half. Dereferences to its [`Consumer`], for what only asks.
#[derive(Debug)]
pub struct ReadingHalf {
    consumer: Consumer,
    wish: Wish,
    ended: Option<Ending>,
}

impl ReadingHalf {
    /// A half that reads a ring of `capacity` bytes from byte `head` of the stream on, as [`Consumer::new`].
    pub const fn new(capacity: u64, head: u64) -> Self {
        Self { consumer: Consumer::new(capacity, head), wish: Wish::new(), ended: None }
    }

    /// A half that goes on where another left off, as [`Consumer::resume`]. It has not ended, and waits for nothing.
    #[inline]
    pub const fn resume(capacity: u64, head: u64, tail: u64) -> Option<Self> {
        match Consumer::resume(capacity, head, tail) {
            Some(consumer) => Some(Self { consumer, wish: Wish::new(), ended: None }),
            None => None,
        }
    }

    /// Why this half has ended, if it has.
    #[inline]
    pub const fn ended(&self) -> Option<Ending> {
        self.ended
    }

    /// The peer has attached: begins with its ring of `capacity` bytes, at byte `head` of the stream.
    pub fn start(&mut self, own: &RxHalf, capacity: u64, head: u64) {
        self.consumer = Consumer::new(capacity, head);
        // EDGE head (protocol R3): nothing before this byte is read; acquired in `Producer::refresh`.
        own.cursor.head.store(head, Ordering::Release);
    }

    /// The peer overruns this half (protocol B4). To be called before anything is read.
    pub fn let_overrun(&mut self) {
        self.consumer = Consumer::new(self.consumer.capacity(), self.consumer.head()).overrun();
    }

    /// [`Consumer::recover`].
    pub fn recover<A: Access>(&mut self, peer: &TxHalf<A>) -> Result<u64, Corrupt> {
        self.consumer.recover(peer)
    }

    /// [`Consumer::skip_to_newest`].
    pub fn skip_to_newest<A: Access>(&mut self, peer: &TxHalf<A>) -> Result<u64, Corrupt> {
        self.consumer.skip_to_newest(peer)
    }

    /// [`Consumer::refresh`].
    #[inline]
    pub fn refresh<A: Access>(&mut self, peer: &TxHalf<A>) -> Result<u64, Corrupt> {
        self.consumer.refresh(peer)
    }

    /// [`Consumer::admit`]. `false` also if this half has ended.
    #[inline]
    pub fn admit(&mut self, n: u64) -> bool {
        !matches!(self.ended, Some(Ending::Here | Ending::Corrupt(_))) && self.consumer.admit(n)
    }

    /// [`Consumer::switch`].
    pub fn switch(&mut self, own: &RxHalf, capacity: u64) {
        self.consumer.switch(capacity);
        add(&own.counters.switches, 1);
    }

    /// [`Consumer::release`] of bytes that are counted. Returns whether to ring the peer.
    #[inline]
    pub fn release<A: Access>(&mut self, own: &RxHalf, peer: &TxHalf<A>, n: u64, fencing: Fencing) -> bool {
        let ring = self.consumer.release(own, peer, n, fencing);
        add(&own.counters.bytes, n);
        self.wish.withdraw(&own.control.data_wanted);
        ring
    }

    /// One step of a wait for `want` bytes. `hung_up`: the driver knows that the link to the peer has hung up.
    ///
    /// [`Effect::Ready`] with fewer bytes than wanted means that no more can come into this ring: the stream ends after them, or the
    /// next ring begins there. With none at all, the next ring has to be taken ([`Consumer::must_switch`]).
    pub fn next<A: Access>(
        &mut self,
        own: &RxHalf,
        peer: Option<&TxHalf<A>>,
        hung_up: bool,
        want: u64,
        idle: Idle,
    ) -> Effect {
        if let Some(effect) = self.look(peer, hung_up, want) {
            self.awake(own);
            return effect;
        }
        let until = self.consumer.wish(want).unwrap_or(self.consumer.head());
        match idle {
            Idle::Spin => Effect::LookAgain,
            Idle::Sleep => self.wish.arm(&own.control.data_wanted, until, peer.is_some()),
        }
    }

    /// The reason why a wait ends, if there is one.
    fn look<A: Access>(&mut self, peer: Option<&TxHalf<A>>, hung_up: bool, want: u64) -> Option<Effect> {
        if let Some(ending @ (Ending::Here | Ending::Corrupt(_))) = self.ended {
            return Some(Effect::Ended(ending));
        }
        let Some(page) = peer else { return self.judge(peer, hung_up).map(Effect::Ended) };
        if let Err(what) = self.consumer.refresh(page) {
            return Some(Effect::Ended(Ending::Corrupt(what)));
        }
        if self.ended.is_none() && self.consumer.wish(want).is_none() {
            return Some(Effect::Ready);
        }
        let ending = self.judge(peer, hung_up)?;
        // The end was said after the last byte: a look from before it may have missed that (protocol S3).
        if let Err(what) = self.consumer.refresh(page) {
            return Some(Effect::Ended(Ending::Corrupt(what)));
        }
        let has_more = self.consumer.available() > 0 || self.ended.is_none() && self.consumer.must_switch();
        Some(if has_more { Effect::Ready } else { Effect::Ended(ending) })
    }

    /// The reason why nothing more will be committed (protocol S3, S4, L4), or `None` while more may come. Bytes that are already
    /// committed come first.
    pub fn judge<A: Access>(&self, peer: Option<&TxHalf<A>>, hung_up: bool) -> Option<Ending> {
        if self.ended.is_some() {
            return self.ended;
        }
        match peer.map(|peer| TxState::load(&peer.control.state)) {
            None => hung_up.then_some(Ending::Dead { attached: false }),
            Some(Ok(TxState::Open)) if !hung_up => None,
            Some(Ok(state)) => Some(reader_end(state).into()),
            Some(Err(what)) => Some(Ending::Corrupt(what)),
        }
    }

    /// The driver no longer waits: the peer need not ring.
    #[inline]
    pub fn awake(&mut self, own: &RxHalf) {
        self.wish.withdraw(&own.control.data_wanted);
    }

    /// Ends this half. If the peer broke the protocol, the state word records that (protocol R4, S1), and no value of the peer is read
    /// any more.
    pub fn end(&mut self, own: &RxHalf, ending: Ending) -> Ending {
        if matches!(ending, Ending::Corrupt(_)) {
            RxState::Broken.store(&own.control.state);
            self.discard();
        }
        self.ended = Some(ending);
        ending
    }

    /// Closes this half: it reads no more (protocol S2). Returns `false` if this half had ended before.
    pub fn close(&mut self, own: &RxHalf) -> bool {
        let is_first = self.ended.is_none();
        if is_first {
            RxState::Closed.store(&own.control.state);
            self.ended = Some(Ending::Here);
            self.discard();
        }
        is_first
    }

    /// Discards bytes that were already seen.
    fn discard(&mut self) {
        self.consumer = Consumer::new(self.consumer.capacity(), self.consumer.head());
    }
}

impl Deref for ReadingHalf {
    type Target = Consumer;

    #[inline]
    fn deref(&self) -> &Consumer {
        &self.consumer
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::producer::Producer;
    use crate::wake::AWAKE;

    const NOBODY: Option<&TxHalf> = None;

    /// A reader of a ring of eight bytes, its page, and the producer that plays its peer.
    fn pair() -> (RxHalf, TxHalf, ReadingHalf, Producer) {
        (RxHalf::new(), TxHalf::new(), ReadingHalf::new(8, 0), Producer::new(8))
    }

    fn commit(producer: &mut Producer, peer: &TxHalf, n: u64) {
        producer.commit(peer, None::<&RxHalf>, n, Fencing::Symmetric);
    }

    fn wish(own: &RxHalf) -> u64 {
        own.control.data_wanted.load(Ordering::Relaxed)
    }

    fn next(own: &RxHalf, peer: Option<&TxHalf>, reader: &mut ReadingHalf, want: u64) -> Effect {
        reader.next(own, peer, false, want, Idle::Sleep)
    }

    #[test]
    fn empty_ring_arms_fences_looks_again_and_sleeps() {
        let (own, peer, mut reader, _) = pair();
        let spin = reader.next(&own, Some(&peer), false, 2, Idle::Spin);
        assert_eq!((spin, wish(&own)), (Effect::LookAgain, AWAKE), "a spinning half stores no wish");
        assert_eq!(next(&own, Some(&peer), &mut reader, 2), Effect::Fence);
        assert_eq!(wish(&own), 1, "two bytes are there once the tail has passed 1");
        for _ in 0..2 {
            assert_eq!(next(&own, Some(&peer), &mut reader, 2), Effect::Sleep { until: 1 });
        }
    }

    #[test]
    fn bytes_found_by_the_second_look_withdraw_the_wish() {
        let (own, peer, mut reader, mut producer) = pair();
        assert_eq!(next(&own, Some(&peer), &mut reader, 2), Effect::Fence);
        commit(&mut producer, &peer, 2);
        assert_eq!(next(&own, Some(&peer), &mut reader, 2), Effect::Ready);
        assert_eq!((wish(&own), reader.available()), (AWAKE, 2));
    }

    #[test]
    fn last_bytes_come_before_the_end() {
        let (own, peer, mut reader, mut producer) = pair();
        commit(&mut producer, &peer, 3);
        TxState::Finished.store(&peer.control.state);
        assert_eq!(next(&own, Some(&peer), &mut reader, 5), Effect::Ready, "fewer than wanted, and no more will come");
        reader.release(&own, &peer, 3, Fencing::Symmetric);
        assert_eq!(next(&own, Some(&peer), &mut reader, 1), Effect::Ended(Ending::Orderly));
    }

    #[test]
    fn switch_ends_a_wait_for_more_than_the_ring_will_hold() {
        let (own, peer, mut reader, mut producer) = pair();
        commit(&mut producer, &peer, 1);
        assert_eq!(next(&own, Some(&peer), &mut reader, 4), Effect::Fence);
        producer.switch(&peer, 16);
        commit(&mut producer, &peer, 3);
        TxState::Finished.store(&peer.control.state);
        assert_eq!(next(&own, Some(&peer), &mut reader, 4), Effect::Ready);
        reader.release(&own, &peer, 1, Fencing::Symmetric);
        assert_eq!(next(&own, Some(&peer), &mut reader, 4), Effect::Ready);
        assert!(reader.must_switch(), "the next ring comes before the end");
        reader.switch(&own, 16);
        assert_eq!(next(&own, Some(&peer), &mut reader, 4), Effect::Ready);
        assert_eq!(reader.available(), 3);
    }

    #[test]
    fn states_of_the_writer_end_a_wait_each_in_its_way() {
        let unknown = Ending::Corrupt(Corrupt::UnknownState);
        for (word, hung_up, ending) in [
            (0, true, Ending::Dead { attached: true }),
            (1, false, Ending::Orderly),
            (1, true, Ending::Orderly),
            (2, false, Ending::Accused),
            (3, false, unknown),
            (u32::MAX, true, unknown),
        ] {
            let (own, peer, mut reader, mut producer) = pair();
            peer.control.state.store(word, Ordering::Release);
            let effect = reader.next(&own, Some(&peer), hung_up, 1, Idle::Sleep);
            assert_eq!(effect, Effect::Ended(ending), "state {word}, hung up: {hung_up}");
            assert_eq!(reader.ended(), None, "the driver decides when it is final");
            reader.end(&own, ending);
            let says = own.control.state.load(Ordering::Relaxed);
            assert_eq!(says == RxState::Broken as u32, ending == unknown, "what it says of itself: {says}");
            // A peer that says that it has ended, and then commits or switches, gets no endless loop for it.
            producer.switch(&peer, 16);
            assert_eq!(next(&own, Some(&peer), &mut reader, 1), Effect::Ended(ending));
        }
        let (own, _, mut reader, _) = pair();
        assert_eq!(next(&own, NOBODY, &mut reader, 1), Effect::Fence);
        let effect = reader.next(&own, NOBODY, true, 1, Idle::Sleep);
        assert_eq!(effect, Effect::Ended(Ending::Dead { attached: false }));
    }

    #[test]
    fn lying_tail_ends_a_wait_as_corrupt_and_nothing_is_read() {
        let (own, peer, mut reader, mut producer) = pair();
        commit(&mut producer, &peer, 2);
        assert_eq!(next(&own, Some(&peer), &mut reader, 1), Effect::Ready);
        peer.cursor.tail.store(9, Ordering::Release);
        let ending = Ending::Corrupt(Corrupt::CursorOutOfRange);
        assert_eq!(next(&own, Some(&peer), &mut reader, 4), Effect::Ended(ending));
        reader.end(&own, ending);
        assert_eq!(reader.available(), 0);
        assert_eq!(next(&own, Some(&peer), &mut reader, 1), Effect::Ended(ending));
    }

    #[test]
    fn close_is_said_once_and_reads_nothing_more() {
        let (own, peer, mut reader, mut producer) = pair();
        commit(&mut producer, &peer, 2);
        assert_eq!(next(&own, Some(&peer), &mut reader, 1), Effect::Ready);
        assert!(reader.close(&own) && !reader.close(&own));
        assert_eq!(reader.available(), 0);
        assert_eq!(next(&own, Some(&peer), &mut reader, 1), Effect::Ended(Ending::Here));
        assert_eq!(own.control.state.load(Ordering::Relaxed), RxState::Closed as u32);
    }
}
