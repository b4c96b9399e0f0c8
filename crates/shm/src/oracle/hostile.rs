//! One half honest, the other an adversary that writes any value into any of its words between any two operations.
//!
//! The honest half must never panic, never claim more than its ring, never leave its ring's memory, and must call *corrupt*
//! exactly what the protocol forbids (R4, A3, S4, D2). It accepts values that the protocol allows,
//! even if they only harm the adversary. The honest half is the [`WritingHalf`] or [`ReadingHalf`] that programs run, with its
//! wait and its end. Values that change *between two loads of one operation* need threads: `tests/loom.rs` has them.

mod consumer;
mod producer;

use super::take;
use crate::corrupt::Corrupt;
use crate::half::{Effect, Ending, Idle};
use crate::sync::Ordering;
use crate::wake::AWAKE;
use consumer::ConsumerHunt;
use producer::ProducerHunt;

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
    /// The same, and it may overwrite what the consumer has not read (protocol B4).
    OverrunConsumer,
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
    /// `newest`.
    Newest,
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
    /// The victim passes over all records but the newest.
    SkipToNewest,
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
    /// Times that it went on at the newest record.
    pub jumps: u64,
}

impl Act {
    /// Takes one step off the front of `input`; `None` at its end. Every input means something.
    pub fn decode(input: &mut &[u8]) -> Option<Self> {
        let tag = take(input)?;
        let word = match (tag >> 3) & 7 {
            0 => HostileWord::Cursor,
            1 => HostileWord::Wish,
            2 => HostileWord::State,
            3 => HostileWord::Generation,
            4 => HostileWord::SwitchAt,
            5 => HostileWord::Intent,
            6 => HostileWord::Ring,
            _ => HostileWord::Newest,
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
                0 => Self::State,
                4 => Self::SkipToNewest,
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
    let victim = match (first & 1, first & 4) {
        (0, _) => Victim::Producer,
        (_, 0) => Victim::Consumer,
        _ => Victim::OverrunConsumer,
    };
    hunt(Prey { victim, size: first >> 3, start }, core::iter::from_fn(|| Act::decode(&mut input)))
}

/// Performs the steps; panics where the honest half does anything but what the protocol says.
pub fn hunt(prey: Prey, acts: impl IntoIterator<Item = Act>) -> Findings {
    match prey.victim {
        Victim::Producer => {
            let mut hunt = ProducerHunt::new(capacity(prey.size));
            acts.into_iter().for_each(|act| hunt.perform(act));
            hunt.findings
        }
        Victim::Consumer | Victim::OverrunConsumer => {
            let is_overrun = prey.victim == Victim::OverrunConsumer;
            let mut hunt = ConsumerHunt::new(capacity(prey.size), prey.start, is_overrun);
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

fn store(word: &crate::sync::AtomicU64, change: impl Fn(u64) -> u64) {
    word.store(change(word.load(Ordering::Relaxed)), Ordering::Relaxed);
}

fn store32(word: &crate::sync::AtomicU32, change: impl Fn(u64) -> u64) {
    let new = change(u64::from(word.load(Ordering::Relaxed)));
    word.store((new & u64::from(u32::MAX)) as u32, Ordering::Relaxed);
}
