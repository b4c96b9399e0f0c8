//! An honest consumer and the writer that lies to it.

use super::{Act, ExpectedWait, Findings, HostileWord, HuntedWait, capacity, expect_cursor, store, store32};
use crate::corrupt::Corrupt;
use crate::half::{Effect, Ending, ReadingHalf};
use crate::layout::{RxHalf, TxHalf};
use crate::oracle::memory::RingMemory;
use crate::record;
use crate::state::TxState;
use crate::sync::Ordering;
use crate::wake::{AWAKE, Fencing, must_ring};

/// What a consumer accepts of its peer's words.
#[derive(Debug, Clone, Copy)]
struct SeenRing {
    head: u64,
    tail: u64,
    switch: Option<(u64, u32)>,
}

/// An honest consumer; the adversary is its writer.
#[derive(Debug)]
pub(super) struct ConsumerHunt {
    own: RxHalf,
    peer: TxHalf,
    half: ReadingHalf,
    memory: RingMemory,
    /// The expectation: released, believed committed, and where the present ring is believed to end.
    head: u64,
    tail: u64,
    generation: u32,
    /// The position and the newest generation of an accepted switch.
    switch: Option<(u64, u32)>,
    is_overrun: bool,
    expected: ExpectedWait,
    pub(super) findings: Findings,
}

impl ConsumerHunt {
    pub(super) fn new(capacity: u64, start: u64, is_overrun: bool) -> Self {
        let peer = TxHalf::new();
        peer.cursor.tail.store(start, Ordering::Relaxed);
        let mut half = ReadingHalf::new(capacity, start);
        if is_overrun {
            half.let_overrun();
        }
        Self {
            own: RxHalf::new(),
            peer,
            half,
            memory: RingMemory::new(capacity),
            head: start,
            tail: start,
            generation: 0,
            switch: None,
            is_overrun,
            expected: ExpectedWait::default(),
            findings: Findings::default(),
        }
    }

    pub(super) fn perform(&mut self, act: Act) {
        match act {
            Act::Poke(word, value) => self.poke(word, |_| value),
            Act::Nudge(word, by) => self.poke(word, |old| old.wrapping_add_signed(i64::from(by))),
            Act::Wait(wait) => self.wait(wait),
            // A half whose peer broke the protocol reads nothing more.
            _ if matches!(self.expected.ended, Some(Ending::Corrupt(_))) => {}
            Act::End => self.end(),
            Act::Refresh => self.refresh(),
            Act::Move(n) => {
                let n = u64::from(n).min(self.half.available());
                // The claim is within the ring, whatever the cursors are.
                let _ = self.memory.read(self.head, n);
                self.release(n);
            }
            Act::Wish(n) => self.wish(u64::from(n)),
            Act::Switch(size) if self.half.must_switch() => {
                self.half.switch(&self.own, capacity(size));
                self.memory = RingMemory::new(capacity(size));
                self.generation = self.generation.wrapping_add(1);
                self.switch = self.switch.filter(|&(_, newest)| newest != self.generation);
                self.findings.switches += 1;
            }
            Act::Switch(_) => {}
            Act::State => {
                let state = TxState::load(&self.peer.control.state);
                let word = self.peer.control.state.load(Ordering::Relaxed);
                assert_eq!(state.is_err(), word > 2, "state {word}");
                self.note(state.err());
            }
            Act::SkipToNewest => self.skip_to_newest(),
            Act::Record => self.record(),
        }
        assert_eq!(self.half.head(), self.head, "the head at {self:?}");
        let (available, capacity) = (self.half.available(), self.half.capacity());
        assert!(available <= capacity, "{available} available in a ring of {capacity}");
        assert_eq!(available, self.tail - self.head, "available, at {self:?}");
        let due = self.switch.is_some_and(|(at, _)| at == self.head);
        assert_eq!(self.half.must_switch(), due, "whether to take the next ring, at {self:?}");
        let wish = self.own.control.data_wanted.load(Ordering::Relaxed);
        assert_eq!(wish, self.expected.wish.unwrap_or(AWAKE), "the wish that it shows, at {self:?}");
    }

    /// Protocol W1, R4, A3, S3, S4 and L4 for a wait, said once more.
    fn expect_wait(&mut self, wait: HuntedWait) -> Effect {
        if let Some(ending @ Ending::Corrupt(_)) = self.expected.ended {
            return Effect::Ended(ending);
        }
        match self.expect_refresh() {
            Err(what) => return Effect::Ended(Ending::Corrupt(what)),
            Ok(seen) => self.accept(seen),
        }
        let want = u64::from(wait.want).clamp(1, self.half.capacity());
        let available = self.tail - self.head;
        let goes_on = self.expected.ended.is_none();
        if goes_on && (available >= want || self.switch.is_some()) {
            return Effect::Ready;
        }
        let state = self.peer.control.state.load(Ordering::Relaxed);
        match self.expected.ended.or_else(|| ExpectedWait::judge(state, 2, 3, wait.hung_up)) {
            Some(ending) => match self.expect_refresh() {
                Err(what) => Effect::Ended(Ending::Corrupt(what)),
                Ok(seen) => {
                    self.accept(seen);
                    // What is there comes before the end.
                    if self.tail > self.head { Effect::Ready } else { Effect::Ended(ending) }
                }
            },
            None => self.expected.idle(self.head.saturating_add(want - 1), wait.spins),
        }
    }

    fn wait(&mut self, wait: HuntedWait) {
        let expected = self.expect_wait(wait);
        let got = self.half.next(&self.own, Some(&self.peer), wait.hung_up, wait.want.into(), wait.idle());
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
        let is_corrupt = matches!(ending, Ending::Corrupt(_));
        assert_eq!(says, if is_corrupt { 2 } else { 0 }, "what it says of {ending:?}");
        if is_corrupt {
            // Not even what it had seen is read.
            (self.tail, self.switch) = (self.head, None);
        }
        self.expected.ended = Some(ending);
        self.findings.ends += 1;
    }

    fn poke(&mut self, word: HostileWord, change: impl Fn(u64) -> u64) {
        let control = &self.peer.control;
        match word {
            HostileWord::Cursor => store(&self.peer.cursor.tail, change),
            HostileWord::Wish => store(&control.space_wanted, change),
            HostileWord::State => store32(&control.state, change),
            HostileWord::Generation => store32(&control.generation, change),
            HostileWord::SwitchAt => store(&control.switch_at, change),
            HostileWord::Intent => store(&control.intent, change),
            HostileWord::Newest => store(&control.newest, change),
            HostileWord::Ring => {
                let mut old = [0; 8];
                old.copy_from_slice(&self.memory.read(self.head, 8));
                let new = change(u64::from_le_bytes(old)).to_le_bytes();
                // The last positions of all cannot be counted through; before them anything goes.
                if self.head < u64::MAX - 8 {
                    self.memory.write(self.head, &new);
                }
            }
        }
    }

    /// Protocol R4, A3 and B4.3, written independently of the code under test.
    fn expect_refresh(&self) -> Result<SeenRing, Corrupt> {
        let head = self.head;
        if self.switch.is_some() {
            // No value of the peer concerns this ring any more.
            return Ok(SeenRing { head, tail: self.tail, switch: self.switch });
        }
        let tail = self.peer.cursor.tail.load(Ordering::Relaxed);
        let generation = self.peer.control.generation.load(Ordering::Relaxed);
        let at = self.peer.control.switch_at.load(Ordering::Relaxed);
        let most = head.saturating_add(self.half.capacity());
        if generation == self.generation {
            return match expect_cursor(tail, self.tail, most) {
                Err(Corrupt::CursorOutOfRange) if self.is_overrun => {
                    let newest = self.peer.control.newest.load(Ordering::Relaxed);
                    // It must be newer than what is overwritten.
                    if newest > head { self.expect_newest() } else { Err(Corrupt::CursorWentBackwards) }
                }
                expected => expected.map(|()| SeenRing { head, tail, switch: None }),
            };
        }
        let is_later = generation.wrapping_sub(self.generation).cast_signed() > 0;
        let is_committed = self.tail <= at && at <= tail;
        if is_later && is_committed && at <= most && !self.is_overrun {
            Ok(SeenRing { head, tail: at, switch: Some((at, generation)) })
        } else {
            Err(Corrupt::BadSwitch)
        }
    }

    /// Protocol B4.3 for a consumer that goes on at the newest record, where that lies behind its head.
    fn expect_newest(&self) -> Result<SeenRing, Corrupt> {
        let newest = self.peer.control.newest.load(Ordering::Relaxed);
        let tail = self.peer.cursor.tail.load(Ordering::Relaxed);
        if !self.is_overrun {
            return Err(Corrupt::CursorOutOfRange);
        }
        if tail < self.tail {
            return Err(Corrupt::CursorWentBackwards);
        }
        match newest {
            _ if newest <= self.head => Ok(SeenRing { head: self.head, tail: self.tail, switch: self.switch }),
            _ if newest >= tail => Err(Corrupt::CursorOutOfRange),
            // No more than a ring from there on.
            _ => {
                Ok(SeenRing { head: newest, tail: tail.min(newest.saturating_add(self.half.capacity())), switch: None })
            }
        }
    }

    fn accept(&mut self, seen: SeenRing) {
        self.findings.jumps += u64::from(seen.head != self.head);
        (self.head, self.tail, self.switch) = (seen.head, seen.tail, seen.switch);
    }

    fn refresh(&mut self) {
        let expected = self.expect_refresh();
        let got = self.half.refresh(&self.peer);
        self.compare(got, expected, "a refresh");
    }

    fn skip_to_newest(&mut self) {
        let expected = self.expect_newest();
        let got = self.half.skip_to_newest(&self.peer);
        self.compare(got, expected, "a jump to the newest record");
    }

    fn compare(&mut self, got: Result<u64, Corrupt>, expected: Result<SeenRing, Corrupt>, what: &str) {
        assert_eq!(got, expected.map(|seen| seen.tail - seen.head), "{what} at {self:?}");
        if let Ok(seen) = expected {
            self.accept(seen);
        }
        self.note(got.err());
    }

    fn release(&mut self, n: u64) {
        let wish = self.peer.control.space_wanted.load(Ordering::Relaxed);
        let rung = self.half.release(&self.own, &self.peer, n, Fencing::Symmetric);
        assert_eq!(
            rung,
            (self.head..=self.head + n).contains(&wish) && wish != AWAKE,
            "bell for {n} with wish {wish} at {self:?}"
        );
        assert_eq!(must_ring(&self.peer.control.space_wanted, 0, u64::MAX), wish != u64::MAX, "bell for the end");
        self.head += n;
        self.expected.wish = None;
        assert_eq!(self.own.cursor.head.load(Ordering::Relaxed), self.head, "the head that it shows");
        self.findings.bytes += n;
        self.findings.bells += u64::from(rung);
    }

    fn wish(&mut self, want: u64) {
        if let Some(wish) = self.half.wish(want) {
            assert!(self.switch.is_none(), "a wish for more of a ring that ended, at {self:?}");
            let most = self.head.saturating_add(self.half.capacity());
            assert!(self.tail <= wish && wish <= most, "a wish for {wish} at {self:?}");
        }
    }

    fn record(&mut self) {
        if self.half.available() < record::HEADER {
            return;
        }
        let mut header = [0; 8];
        header.copy_from_slice(&self.memory.read(self.head, record::HEADER));
        // A channel may allow less than its ring could hold.
        let longest = record::longest(self.half.capacity()) / 2;
        match record::parse(header, self.half.available(), longest) {
            Ok(length) => {
                let taken = record::footprint(u64::from(length));
                let fits = u64::from(length) <= longest && taken <= self.half.available();
                assert!(fits, "a message of {length} at {self:?}");
                let _ = self.memory.read(self.head, taken);
                self.release(taken);
            }
            Err(corrupt) => self.note(Some(corrupt)),
        }
    }

    fn note(&mut self, corrupt: Option<Corrupt>) {
        self.findings.corrupt += u64::from(corrupt.is_some());
    }
}
