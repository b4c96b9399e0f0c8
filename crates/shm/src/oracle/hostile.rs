//! One half honest, the other an adversary that writes any value into any of its words between any two operations.
//!
//! The honest half must never panic, never claim more than its ring, never leave its ring's memory, and must call *corrupt*
//! exactly what the protocol forbids (R4, A3, S4, D2). It accepts values that the protocol allows,
//! even if they only harm the adversary. The honest half is the [`WritingHalf`] or [`ReadingHalf`] that programs run, with its
//! wait and its end. Values that change *between two loads of one operation* need threads: `tests/loom.rs` has them.

use super::memory::RingMemory;
use super::model::byte;
use super::take;
use crate::corrupt::Corrupt;
use crate::half::{Effect, Ending, Idle, Need, ReadingHalf, WritingHalf};
use crate::layout::{RxHalf, TxHalf};
use crate::record;
use crate::state::{RxState, TxState};
use crate::sync::Ordering;
use crate::wake::{AWAKE, Fencing, must_ring};

/// The half that is honest, and the situation in which it begins.
#[derive(Debug, Clone, Copy)]
pub struct Prey {
    /// The honest half.
    pub victim: Victim,
    /// Size of its ring, as an exponent (taken modulo the range in use).
    pub size: u8,
    /// Where its stream begins: a subscriber starts at the byte that it is given (protocol B1), which is the adversary's choice.
    pub start: u64,
}

/// The honest half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// The adversary owns the consuming half.
    Producer,
    /// The adversary owns the producing half and the ring's bytes.
    Consumer,
}

/// A word that the adversary writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostileWord {
    /// `tail` or `head`.
    Cursor,
    /// `space_wanted` or `data_wanted`.
    Wish,
    /// `state`.
    State,
    /// `generation`.
    Generation,
    /// `switch_at`.
    SwitchAt,
    /// `intent`.
    Intent,
    /// Eight bytes of the ring, at the victim's cursor.
    Ring,
}

/// One step: the adversary's, or the honest half's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// The adversary stores a value.
    Poke(HostileWord, u64),
    /// The adversary stores its present value plus this.
    Nudge(HostileWord, i16),
    /// The victim looks at the adversary's words.
    Refresh,
    /// The victim moves its cursor by this much, or by what it may.
    Move(u8),
    /// The victim says what it would sleep on to get this much.
    Wish(u8),
    /// The victim changes its ring (a producer), or takes the next (a consumer), if it may: of this size, as an exponent.
    Switch(u8),
    /// The victim reads the adversary's state.
    State,
    /// The victim reads a message.
    Record,
    /// The victim takes one step of a wait.
    Wait(HuntedWait),
    /// The victim ends, if its last step of a wait said so.
    End,
}

/// One step of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HuntedWait {
    /// Bytes, or room, that the victim waits for.
    pub want: u8,
    /// A producer waits for its next switch instead.
    pub is_for_switch: bool,
    /// The victim knows that the link has hung up.
    pub hung_up: bool,
    /// It would look again rather than sleep.
    pub spins: bool,
    /// If it has to fence, it takes the second look at once.
    pub looks_twice: bool,
}

impl HuntedWait {
    fn decode(byte: u8) -> Self {
        Self {
            want: byte & 15,
            is_for_switch: byte & 15 == 15,
            hung_up: byte & 16 != 0 && byte & 128 != 0,
            spins: byte & 32 != 0,
            looks_twice: byte & 64 != 0,
        }
    }

    fn idle(self) -> Idle {
        if self.spins { Idle::Spin } else { Idle::Sleep }
    }
}

/// The counts of a run, so that a test can check that it had an effect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Findings {
    /// Bytes that the victim moved.
    pub bytes: u64,
    /// Rings that it took or made.
    pub switches: u64,
    /// Times that it called its peer corrupt.
    pub corrupt: u64,
    /// Times that it would have rung.
    pub bells: u64,
    /// Steps of waits after which it would have slept.
    pub sleeps: u64,
    /// Times that it ended.
    pub ends: u64,
}

impl Act {
    /// Takes one step off the front of `input`; `None` at its end. Every input means something.
    pub fn decode(input: &mut &[u8]) -> Option<Self> {
        let tag = take(input)?;
        let word = match (tag >> 3) & 7 {
            0 | 7 => HostileWord::Cursor,
            1 => HostileWord::Wish,
            2 => HostileWord::State,
            3 => HostileWord::Generation,
            4 => HostileWord::SwitchAt,
            5 => HostileWord::Intent,
            _ => HostileWord::Ring,
        };
        Some(match tag & 7 {
            0 => Self::Poke(word, value(input)?),
            1 => Self::Nudge(word, i16::from(take(input)?.cast_signed())),
            2 => Self::Nudge(word, i16::from_le_bytes([take(input)?, take(input)?])),
            3 => Self::Refresh,
            4 => Self::Move(take(input)?),
            5 => Self::Wish(take(input)?),
            6 => Self::Switch(tag >> 3),
            _ => match tag >> 3 & 7 {
                0 | 4 => Self::State,
                1 | 5 => Self::Record,
                // Endings are rare, or little would happen before them.
                7 => Self::End,
                _ => Self::Wait(HuntedWait::decode(take(input)?)),
            },
        })
    }
}

/// A value with a meaning: small, near a power of two, near the end, or eight bytes of anything.
fn value(input: &mut &[u8]) -> Option<u64> {
    let tag = take(input)?;
    let low = u64::from(tag & 63);
    Some(match tag >> 6 {
        0 => low,
        1 => (1u64 << low).wrapping_sub(1),
        2 => u64::MAX - low,
        _ => {
            let mut bytes = [0; 8];
            for b in &mut bytes {
                *b = take(input)?;
            }
            u64::from_le_bytes(bytes)
        }
    })
}

/// Decodes a whole input, runs it and says what it did.
pub fn hunt_bytes(mut input: &[u8]) -> Findings {
    let first = take(&mut input).unwrap_or(0);
    let start = if first & 2 != 0 { value(&mut input).unwrap_or(0) } else { 0 };
    let victim = if first & 1 == 0 { Victim::Producer } else { Victim::Consumer };
    hunt(Prey { victim, size: first >> 2, start }, core::iter::from_fn(|| Act::decode(&mut input)))
}

/// Performs the steps; panics where the honest half does anything but what the protocol says.
pub fn hunt(prey: Prey, acts: impl IntoIterator<Item = Act>) -> Findings {
    match prey.victim {
        Victim::Producer => {
            let mut hunt = ProducerHunt::new(capacity(prey.size));
            acts.into_iter().for_each(|act| hunt.perform(act));
            hunt.findings
        }
        Victim::Consumer => {
            let mut hunt = ConsumerHunt::new(capacity(prey.size), prey.start);
            acts.into_iter().for_each(|act| hunt.perform(act));
            hunt.findings
        }
    }
}

fn capacity(size: u8) -> u64 {
    8 << (size % 5)
}

/// The values that a cursor may have now: it was last `seen`, and may be at most `most` (protocol R4).
fn expect_cursor(now: u64, seen: u64, most: u64) -> Result<(), Corrupt> {
    if now < seen {
        Err(Corrupt::CursorWentBackwards)
    } else if now > most {
        Err(Corrupt::CursorOutOfRange)
    } else {
        Ok(())
    }
}

/// An honest producer; the adversary is its reader.
#[derive(Debug)]
struct ProducerHunt {
    own: TxHalf,
    peer: RxHalf,
    half: WritingHalf,
    memory: RingMemory,
    /// The expectation: committed, believed released, and where the present ring begins.
    tail: u64,
    head: u64,
    base: u64,
    expected: ExpectedWait,
    findings: Findings,
}

/// What is expected of a half's wait.
#[derive(Debug, Default)]
struct ExpectedWait {
    /// The wish that it has stored; `None` while it is awake.
    wish: Option<u64>,
    /// What the last step of a wait has said, if that was an end.
    said: Option<Ending>,
    /// How it has ended.
    ended: Option<Ending>,
}

impl ExpectedWait {
    /// Protocol S4 and L4, said once more: what the peer's state and the link say. `last` is the first number that is no state.
    fn judge(state: u32, accuses: u32, last: u32, hung_up: bool) -> Option<Ending> {
        match state {
            0 => hung_up.then_some(Ending::Dead { attached: true }),
            _ if state >= last => Some(Ending::Corrupt(Corrupt::UnknownState)),
            _ if state == accuses => Some(Ending::Accused),
            _ => Some(Ending::Orderly),
        }
    }

    /// Nothing was there: what follows from a wait for `until`.
    fn idle(&mut self, until: u64, spins: bool) -> Effect {
        if spins {
            return Effect::LookAgain;
        }
        if self.wish == Some(until) {
            return Effect::Sleep { until };
        }
        self.wish = Some(until);
        Effect::Fence
    }

    /// Whether a step gave what was expected. Notes what it said.
    fn is_met(&mut self, got: Effect, expected: Effect, findings: &mut Findings) -> bool {
        // A wish for the very last number says *awake*, so that a half cannot tell whether it stands.
        let is_last = |effect| matches!(effect, Effect::Fence | Effect::Sleep { .. }) && self.wish == Some(AWAKE);
        let is_met = got == expected || is_last(got) && is_last(expected);
        match got {
            Effect::Ended(ending) => self.said = Some(ending),
            Effect::Sleep { .. } => findings.sleeps += 1,
            _ => {}
        }
        if matches!(got, Effect::Ready | Effect::Ended(_)) {
            self.wish = None;
        }
        is_met
    }
}

impl ProducerHunt {
    fn new(capacity: u64) -> Self {
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

    fn perform(&mut self, act: Act) {
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

/// An honest consumer; the adversary is its writer.
#[derive(Debug)]
struct ConsumerHunt {
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
    expected: ExpectedWait,
    findings: Findings,
}

impl ConsumerHunt {
    fn new(capacity: u64, start: u64) -> Self {
        let peer = TxHalf::new();
        peer.cursor.tail.store(start, Ordering::Relaxed);
        Self {
            own: RxHalf::new(),
            peer,
            half: ReadingHalf::new(capacity, start),
            memory: RingMemory::new(capacity),
            head: start,
            tail: start,
            generation: 0,
            switch: None,
            expected: ExpectedWait::default(),
            findings: Findings::default(),
        }
    }

    fn perform(&mut self, act: Act) {
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
            Act::Record => self.record(),
        }
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
            Ok((tail, switch)) => (self.tail, self.switch) = (tail, switch),
        }
        let want = u64::from(wait.want).clamp(1, self.half.capacity());
        let available = self.tail - self.head;
        let goes_on = self.expected.ended.is_none();
        if goes_on && (available >= want || self.switch.is_some()) {
            return Effect::Ready;
        }
        let state = self.peer.control.state.load(Ordering::Relaxed);
        match self.expected.ended.or_else(|| ExpectedWait::judge(state, 2, 3, wait.hung_up)) {
            // What is there comes before the end.
            Some(_) if available > 0 => Effect::Ready,
            Some(ending) => Effect::Ended(ending),
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

    /// Protocol R4 and A3, written independently of the code under test: the accepted tail, and the switch there.
    fn expect_refresh(&self) -> Result<(u64, Option<(u64, u32)>), Corrupt> {
        if self.switch.is_some() {
            // No value of the peer concerns this ring any more.
            return Ok((self.tail, self.switch));
        }
        let tail = self.peer.cursor.tail.load(Ordering::Relaxed);
        let generation = self.peer.control.generation.load(Ordering::Relaxed);
        let at = self.peer.control.switch_at.load(Ordering::Relaxed);
        let most = self.head.saturating_add(self.half.capacity());
        if generation == self.generation {
            return expect_cursor(tail, self.tail, most).map(|()| (tail, None));
        }
        let is_later = generation.wrapping_sub(self.generation).cast_signed() > 0;
        let is_committed = self.tail <= at && at <= tail;
        if is_later && is_committed && at <= most { Ok((at, Some((at, generation)))) } else { Err(Corrupt::BadSwitch) }
    }

    fn refresh(&mut self) {
        let expected = self.expect_refresh();
        let got = self.half.refresh(&self.peer);
        assert_eq!(got, expected.map(|(tail, _)| tail - self.head), "a refresh at {self:?}");
        if let Ok((tail, switch)) = expected {
            (self.tail, self.switch) = (tail, switch);
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

fn store(word: &crate::sync::AtomicU64, change: impl Fn(u64) -> u64) {
    word.store(change(word.load(Ordering::Relaxed)), Ordering::Relaxed);
}

fn store32(word: &crate::sync::AtomicU32, change: impl Fn(u64) -> u64) {
    let new = change(u64::from(word.load(Ordering::Relaxed)));
    word.store((new & u64::from(u32::MAX)) as u32, Ordering::Relaxed);
}
