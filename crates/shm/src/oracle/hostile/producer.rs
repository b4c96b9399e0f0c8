//! An honest producer and the reader that lies to it.

use super::{Act, ExpectedWait, Findings, HostileWord, HuntedWait, capacity, expect_cursor, store, store32};
use crate::corrupt::Corrupt;
use crate::half::{Effect, Ending, Need, WritingHalf};
use crate::layout::{RxHalf, TxHalf};
use crate::oracle::memory::RingMemory;
use crate::oracle::model::byte;
use crate::state::RxState;
use crate::sync::Ordering;
use crate::wake::{AWAKE, Fencing};

/// An honest producer; the adversary is its reader.
#[derive(Debug)]
pub(super) struct ProducerHunt {
    own: TxHalf,
    peer: RxHalf,
    half: WritingHalf,
    memory: RingMemory,
    /// The expectation: committed, believed released, and where the present ring begins.
    tail: u64,
    head: u64,
    base: u64,
    expected: ExpectedWait,
    pub(super) findings: Findings,
}

impl ProducerHunt {
    pub(super) fn new(capacity: u64) -> Self {
        Self {
            own: TxHalf::new(),
            peer: RxHalf::new(),
            half: WritingHalf::new(capacity),
            memory: RingMemory::new(capacity),
            tail: 0,
            head: 0,
            base: 0,
            expected: ExpectedWait::default(),
            findings: Findings::default(),
        }
    }

    pub(super) fn perform(&mut self, act: Act) {
        match act {
            Act::Poke(word, value) => self.poke(word, |_| value),
            Act::Nudge(word, by) => self.poke(word, |old| old.wrapping_add_signed(i64::from(by))),
            Act::Wait(wait) => self.wait(wait),
            // A half that has ended does nothing more.
            _ if self.expected.ended.is_some() => {}
            Act::End => self.end(),
            Act::Refresh => self.refresh(),
            Act::Move(n) | Act::Wish(n) if self.half.free() < u64::from(n) => {
                if let Some(wish) = self.half.wish(u64::from(n)) {
                    // The wish is between the released and the committed bytes, or no cursor could ever pass it.
                    assert!(self.head.max(self.base) <= wish && wish < self.tail, "a wish for {wish} at {self:?}");
                }
                self.commit(self.half.free());
            }
            Act::Move(n) => self.commit(u64::from(n)),
            Act::Switch(size) if self.half.may_switch() => {
                self.half.switch(&self.own, capacity(size));
                self.memory = RingMemory::new(capacity(size));
                self.base = self.tail;
                self.findings.switches += 1;
            }
            Act::State => self.note(RxState::load(&self.peer.control.state).err()),
            _ => {}
        }
        let (free, capacity) = (self.half.free(), self.half.capacity());
        assert!(free <= capacity, "{free} free in a ring of {capacity}");
        assert_eq!(free, capacity - (self.tail - self.head.max(self.base)), "free, at {self:?}");
        let wish = self.own.control.space_wanted.load(Ordering::Relaxed);
        assert_eq!(wish, self.expected.wish.unwrap_or(AWAKE), "the wish that it shows, at {self:?}");
    }

    /// Protocol W1, R4, S4 and L4 for a wait, said once more.
    fn expect_wait(&mut self, wait: HuntedWait) -> Effect {
        if let Some(ending) = self.expected.ended {
            return Effect::Ended(ending);
        }
        let head = self.peer.cursor.head.load(Ordering::Relaxed);
        if let Err(what) = expect_cursor(head, self.head, self.tail) {
            return Effect::Ended(Ending::Corrupt(what));
        }
        self.head = head;
        let capacity = self.half.capacity();
        let want = u64::from(wait.want).min(capacity);
        let (is_there, until) = if wait.is_for_switch {
            let is_first = self.findings.switches == 0;
            (is_first || self.head > self.base || self.tail == self.base, self.base)
        } else {
            let unread = self.tail - self.head.max(self.base);
            (unread + want <= capacity, (self.tail + want).wrapping_sub(capacity + 1))
        };
        if is_there {
            return Effect::Ready;
        }
        match ExpectedWait::judge(self.peer.control.state.load(Ordering::Relaxed), 2, 4, wait.hung_up) {
            Some(ending) => Effect::Ended(ending),
            None => self.expected.idle(until, wait.spins),
        }
    }

    fn wait(&mut self, wait: HuntedWait) {
        let expected = self.expect_wait(wait);
        let need = if wait.is_for_switch { Need::Switch } else { Need::Room(wait.want.into()) };
        let got = self.half.next(&self.own, Some(&self.peer), wait.hung_up, need, wait.idle());
        let is_met = self.expected.is_met(got, expected, &mut self.findings);
        assert!(is_met, "{wait:?} gave {got:?}, not {expected:?}, at {self:?}");
        if got == Effect::Fence && wait.looks_twice {
            self.wait(HuntedWait { looks_twice: false, ..wait });
        }
    }

    fn end(&mut self) {
        let Some(ending) = self.expected.said else { return };
        assert_eq!(self.half.end(&self.own, ending), ending);
        let says = self.own.control.state.load(Ordering::Relaxed);
        assert_eq!(says, if matches!(ending, Ending::Corrupt(_)) { 2 } else { 0 }, "what it says of {ending:?}");
        assert_eq!(self.half.ended(), Some(ending));
        self.expected.ended = Some(ending);
        self.findings.ends += 1;
    }

    fn poke(&mut self, word: HostileWord, change: impl Fn(u64) -> u64) {
        match word {
            HostileWord::Wish => store(&self.peer.control.data_wanted, change),
            HostileWord::State => store32(&self.peer.control.state, change),
            // A reader has no other words.
            _ => store(&self.peer.cursor.head, change),
        }
    }

    fn refresh(&mut self) {
        let head = self.peer.cursor.head.load(Ordering::Relaxed);
        let expected = expect_cursor(head, self.head, self.tail);
        let got = self.half.refresh(&self.peer);
        assert_eq!(got.map(|_| ()), expected, "head {head} at {self:?}");
        if expected.is_ok() {
            self.head = head;
        }
        self.note(got.err());
    }

    fn commit(&mut self, n: u64) {
        let bytes: alloc::vec::Vec<u8> = (self.tail..self.tail + n).map(byte).collect();
        self.memory.write(self.tail, &bytes);
        let wish = self.peer.control.data_wanted.load(Ordering::Relaxed);
        let rung = self.half.commit(&self.own, Some(&self.peer), n, Fencing::Symmetric);
        assert_eq!(
            rung,
            (self.tail..=self.tail + n).contains(&wish) && wish != AWAKE,
            "bell for {n} with wish {wish} at {self:?}"
        );
        self.tail += n;
        self.expected.wish = None;
        assert_eq!(self.own.cursor.tail.load(Ordering::Relaxed), self.tail, "the tail that it shows");
        self.findings.bytes += n;
        self.findings.bells += u64::from(rung);
    }

    fn note(&mut self, corrupt: Option<Corrupt>) {
        self.findings.corrupt += u64::from(corrupt.is_some());
    }
}
