//! The writing half of a direction.

use super::wish::Wish;
use super::{Effect, Ending, Idle};
use crate::corrupt::Corrupt;
use crate::counters::add;
use crate::layout::{RxHalf, TxHalf};
use crate::producer::Producer;
use crate::state::{RxState, TxState, writer_end};
use crate::sync::Access;
use crate::wake::Fencing;
use core::ops::Deref;

/// A writing half. Dereferences to its [`Producer`], for what only asks.
#[derive(Debug)]
pub struct WritingHalf {
    producer: Producer,
    wish: Wish,
    ended: Option<Ending>,
}

/// The condition that a writer waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// This many free bytes, at most the capacity.
    Room(u64),
    /// A peer that has attached and has come to the present ring, so that the next may be announced (protocol A4).
    Switch,
}

impl WritingHalf {
    /// A half that writes to an empty ring of `capacity` bytes, as [`Producer::new`].
    pub const fn new(capacity: u64) -> Self {
        Self { producer: Producer::new(capacity), wish: Wish::new(), ended: None }
    }

    /// A half that goes on where another left off, as [`Producer::resume`]. It has not ended, and waits for nothing.
    #[inline]
    pub const fn resume(capacity: u64, tail: u64, head: u64) -> Option<Self> {
        match Producer::resume(capacity, tail, head) {
            Some(producer) => Some(Self { producer, wish: Wish::new(), ended: None }),
            None => None,
        }
    }

    /// A half that follows one reader of a ring that many read, as [`Producer::following`].
    pub(super) const fn following(capacity: u64, tail: u64) -> Self {
        Self { producer: Producer::following(capacity, tail), wish: Wish::new(), ended: None }
    }

    /// Why this half has ended, if it has.
    #[inline]
    pub const fn ended(&self) -> Option<Ending> {
        self.ended
    }

    /// [`Producer::refresh`].
    #[inline]
    pub fn refresh<A: Access>(&mut self, peer: &RxHalf<A>) -> Result<u64, Corrupt> {
        self.producer.refresh(peer)
    }

    /// [`Producer::switch`].
    pub fn switch(&mut self, own: &TxHalf, capacity: u64) {
        self.producer.switch(own, capacity);
        add(&own.counters.switches, 1);
    }

    /// [`Producer::commit`] of bytes that are counted. Returns whether to ring the peer.
    #[inline]
    pub fn commit<A: Access>(&mut self, own: &TxHalf, peer: Option<&RxHalf<A>>, n: u64, fencing: Fencing) -> bool {
        let ring = self.producer.commit(own, peer, n, fencing);
        add(&own.counters.bytes, n);
        self.wish.withdraw(&own.control.space_wanted);
        ring
    }

    /// [`Producer::follow`]. Returns whether to ring the reader.
    #[inline]
    pub fn follow<A: Access>(&mut self, peer: &RxHalf<A>, n: u64) -> bool {
        self.producer.follow(peer, n)
    }

    /// One step of a wait. `hung_up`: the driver knows that the link to the peer has hung up.
    ///
    /// An ending is final only when the driver calls [`WritingHalf::end`]: before that, it takes what the peer may have sent it last.
    pub fn next<A: Access>(
        &mut self,
        own: &TxHalf,
        peer: Option<&RxHalf<A>>,
        hung_up: bool,
        need: Need,
        idle: Idle,
    ) -> Effect {
        if let Some(effect) = self.look(peer, hung_up, need) {
            self.awake(own);
            return effect;
        }
        match idle {
            Idle::Spin => Effect::LookAgain,
            Idle::Sleep => self.wish.arm(&own.control.space_wanted, self.until(need), peer.is_some()),
        }
    }

    /// The reason why a wait ends, if there is one.
    fn look<A: Access>(&mut self, peer: Option<&RxHalf<A>>, hung_up: bool, need: Need) -> Option<Effect> {
        if let Some(ending) = self.ended {
            return Some(Effect::Ended(ending));
        }
        if let Some(peer) = peer
            && let Err(what) = self.producer.refresh(peer)
        {
            return Some(Effect::Ended(Ending::Corrupt(what)));
        }
        let is_there = match need {
            Need::Room(want) => self.producer.wish(want).is_none(),
            Need::Switch => peer.is_some() && self.producer.may_switch(),
        };
        if is_there {
            return Some(Effect::Ready);
        }
        Self::judge(peer, hung_up).map(Effect::Ended)
    }

    /// The head to see passed. Where only the peer's attaching is missing, no head is: the link says when it comes.
    fn until(&self, need: Need) -> u64 {
        let until = match need {
            Need::Room(want) => self.producer.wish(want),
            Need::Switch => self.producer.switch_wish(),
        };
        until.unwrap_or(self.producer.tail())
    }

    /// Whether the peer reads, as far as its state says. The quick form of [`WritingHalf::judge`].
    #[inline]
    pub fn is_read<A: Access>(peer: Option<&RxHalf<A>>) -> bool {
        peer.is_none_or(|peer| RxState::load(&peer.control.state) == Ok(RxState::Open))
    }

    /// The end of the direction as the peer's state and the link report it (protocol S4, L4), or `None` before the end.
    pub fn judge<A: Access>(peer: Option<&RxHalf<A>>, hung_up: bool) -> Option<Ending> {
        match peer.map(|peer| RxState::load(&peer.control.state)) {
            None => hung_up.then_some(Ending::Dead { attached: false }),
            Some(Ok(RxState::Open)) if !hung_up => None,
            Some(Ok(state)) => Some(writer_end(state).into()),
            Some(Err(what)) => Some(Ending::Corrupt(what)),
        }
    }

    /// The driver no longer waits: the peer need not ring.
    #[inline]
    pub fn awake(&mut self, own: &TxHalf) {
        self.wish.withdraw(&own.control.space_wanted);
    }

    /// Ends this half. If the peer broke the protocol, the state word records that (protocol R4, S1).
    pub fn end(&mut self, own: &TxHalf, ending: Ending) -> Ending {
        if matches!(ending, Ending::Corrupt(_)) {
            TxState::Broken.store(&own.control.state);
        }
        self.ended = Some(ending);
        ending
    }

    /// Finishes this half: no bytes follow (protocol S2). Committed bytes stay readable. Returns `false` if this half had ended before.
    pub fn finish(&mut self, own: &TxHalf) -> bool {
        let is_first = self.ended.is_none();
        if is_first {
            TxState::Finished.store(&own.control.state);
            self.ended = Some(Ending::Here);
        }
        is_first
    }
}

impl Deref for WritingHalf {
    type Target = Producer;

    #[inline]
    fn deref(&self) -> &Producer {
        &self.producer
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::Ordering;
    use crate::wake::AWAKE;

    const NOBODY: Option<&RxHalf> = None;

    /// A full ring of eight bytes.
    fn full() -> (TxHalf, RxHalf, WritingHalf) {
        let (own, peer, mut writer) = (TxHalf::new(), RxHalf::new(), WritingHalf::new(8));
        writer.commit(&own, Some(&peer), 8, Fencing::Symmetric);
        (own, peer, writer)
    }

    fn wish(own: &TxHalf) -> u64 {
        own.control.space_wanted.load(Ordering::Relaxed)
    }

    fn next(own: &TxHalf, peer: Option<&RxHalf>, writer: &mut WritingHalf, need: Need) -> Effect {
        writer.next(own, peer, false, need, Idle::Sleep)
    }

    #[test]
    fn full_ring_arms_fences_looks_again_and_sleeps() {
        let (own, peer, mut writer) = full();
        let spin = writer.next(&own, Some(&peer), false, Need::Room(2), Idle::Spin);
        assert_eq!((spin, wish(&own)), (Effect::LookAgain, AWAKE), "a spinning half stores no wish");
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Room(2)), Effect::Fence);
        assert_eq!(wish(&own), 1, "two bytes are free once the head has passed 1");
        for _ in 0..2 {
            assert_eq!(next(&own, Some(&peer), &mut writer, Need::Room(2)), Effect::Sleep { until: 1 });
        }
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Room(3)), Effect::Fence, "another wish");
    }

    #[test]
    fn room_found_by_the_second_look_withdraws_the_wish() {
        let (own, peer, mut writer) = full();
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Room(2)), Effect::Fence);
        peer.cursor.head.store(2, Ordering::Release);
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Room(2)), Effect::Ready);
        assert_eq!((wish(&own), writer.free()), (AWAKE, 2));
    }

    #[test]
    fn peer_that_attaches_is_fenced_for_again() {
        let (own, peer, mut writer) = full();
        assert_eq!(next(&own, NOBODY, &mut writer, Need::Room(1)), Effect::Fence);
        assert_eq!(next(&own, NOBODY, &mut writer, Need::Room(1)), Effect::Sleep { until: 0 });
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Room(1)), Effect::Fence);
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Room(1)), Effect::Sleep { until: 0 });
    }

    #[test]
    fn switch_waits_for_attach_and_first_byte_of_ring() {
        let (own, peer, mut writer) = (TxHalf::new(), RxHalf::new(), WritingHalf::new(8));
        assert_eq!(next(&own, NOBODY, &mut writer, Need::Switch), Effect::Fence);
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Switch), Effect::Ready);
        writer.commit(&own, Some(&peer), 4, Fencing::Symmetric);
        writer.switch(&own, 16);
        writer.commit(&own, Some(&peer), 1, Fencing::Symmetric);
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Switch), Effect::Fence);
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Switch), Effect::Sleep { until: 4 });
        peer.cursor.head.store(4, Ordering::Release);
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Switch), Effect::Sleep { until: 4 });
        peer.cursor.head.store(5, Ordering::Release);
        assert_eq!(next(&own, Some(&peer), &mut writer, Need::Switch), Effect::Ready);
    }

    #[test]
    fn states_of_the_reader_end_a_wait_each_in_its_way() {
        let unknown = Ending::Corrupt(Corrupt::UnknownState);
        for (word, hung_up, ending) in [
            (0, true, Ending::Dead { attached: true }),
            (1, false, Ending::Orderly),
            (1, true, Ending::Orderly),
            (2, false, Ending::Accused),
            (3, false, Ending::Orderly),
            (3, true, Ending::Orderly),
            (4, false, unknown),
            (u32::MAX, true, unknown),
        ] {
            let (own, peer, mut writer) = full();
            peer.control.state.store(word, Ordering::Release);
            let effect = writer.next(&own, Some(&peer), hung_up, Need::Room(1), Idle::Sleep);
            assert_eq!(effect, Effect::Ended(ending), "state {word}, hung up: {hung_up}");
            assert_eq!(writer.ended(), None, "the driver decides when it is final");
            writer.end(&own, ending);
            let says = own.control.state.load(Ordering::Relaxed);
            assert_eq!(says == TxState::Broken as u32, ending == unknown, "what it says of itself: {says}");
            assert_eq!(next(&own, Some(&peer), &mut writer, Need::Room(0)), Effect::Ended(ending));
        }
        let (own, _, mut writer) = full();
        let effect = writer.next(&own, NOBODY, true, Need::Room(1), Idle::Sleep);
        assert_eq!(effect, Effect::Ended(Ending::Dead { attached: false }));
    }

    #[test]
    fn lying_head_ends_a_wait_as_corrupt() {
        let (own, peer, mut writer) = full();
        peer.cursor.head.store(9, Ordering::Release);
        let effect = next(&own, Some(&peer), &mut writer, Need::Room(1));
        assert_eq!(effect, Effect::Ended(Ending::Corrupt(Corrupt::CursorOutOfRange)));
    }

    #[test]
    fn finish_is_said_once_and_not_over_an_accusation() {
        let (own, _, mut writer) = full();
        assert!(writer.finish(&own) && !writer.finish(&own));
        assert_eq!(own.control.state.load(Ordering::Relaxed), TxState::Finished as u32);
        let (own, _, mut writer) = full();
        writer.end(&own, Ending::Corrupt(Corrupt::BadPacket));
        assert!(!writer.finish(&own));
        assert_eq!(own.control.state.load(Ordering::Relaxed), TxState::Broken as u32);
    }
}
