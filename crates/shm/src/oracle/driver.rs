//! Both halves honest: any order of their operations gives what the model says.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::memory::RingMemory;
use super::model::{Model, Sleeper, byte};
use super::op::Op;
use super::take;
use crate::half::{Effect, Idle, Need, ReaderView, ReadingHalf, WritingHalf};
use crate::layout::{RxHalf, TxHalf};
use crate::record;
use crate::state::{End, RxState};
use crate::sync::Ordering;
use crate::wake::{AWAKE, Fencing, must_ring};

/// The smallest ring, as an exponent: eight bytes hold an empty message, and wrap with every other operation.
const SMALLEST: u8 = 3;
/// How many sizes there are from the smallest up. Interpreters and models get fewer.
const SIZES: u8 = if cfg!(any(miri, loom)) { 2 } else { 6 };

/// How a run begins.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Size of the first ring, as an exponent (taken modulo the range in use).
    pub size: u8,
    /// Whether what is written are messages (protocol D) or bare bytes.
    pub messages: bool,
    /// Whether the writer sees its peer from the start (the accepting side), or only once it attaches.
    pub attached: bool,
    /// The kind of fences that the halves use.
    pub fencing: Fencing,
}

/// The counts of a run, so that a test can check that its operations had an effect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Bytes that arrived.
    pub bytes: u64,
    /// Rings that the reader took.
    pub switches: u64,
    /// Times that a half went to sleep.
    pub sleeps: u64,
    /// Bells rung.
    pub bells: u64,
    /// Readers that closed with bytes unread, and said so.
    pub resets: u64,
    /// How the reader saw the end.
    pub end: Option<End>,
}

/// Decodes a whole input, runs it and says what it did. The first byte is the setup.
pub fn run_bytes(mut input: &[u8]) -> Tally {
    let first = take(&mut input).unwrap_or(0);
    let setup = Setup {
        size: first & 7,
        messages: first & 8 != 0,
        attached: first & 16 != 0,
        fencing: if first & 32 != 0 { Fencing::Asymmetric } else { Fencing::Symmetric },
    };
    run(setup, core::iter::from_fn(|| Op::decode(&mut input)))
}

/// Performs the operations, then lets both halves come to their end; panics where the ring differs from the model.
pub fn run(setup: Setup, ops: impl IntoIterator<Item = Op>) -> Tally {
    let mut driver = Driver::new(setup);
    for op in ops {
        driver.perform(op);
        driver.expect_invariants();
    }
    driver.settle();
    driver.tally
}

fn capacity(size: u8) -> u64 {
    1 << (SMALLEST + size % SIZES)
}

/// Does what an effect says; whether that was to sleep. The fence is left out: a run has one thread.
fn follow(sleeper: &mut Sleeper, effect: Effect, wish: u64) -> bool {
    assert_ne!(effect, Effect::LookAgain, "a half that does not spin is to look again");
    match effect {
        Effect::Fence => sleeper.arm(wish),
        Effect::Sleep { until } => {
            assert_eq!(until, wish, "it sleeps on what its word says");
            sleeper.sleep();
        }
        Effect::Ready | Effect::Ended(_) => {
            assert_eq!(wish, AWAKE, "a half that is awake asks to be rung");
            sleeper.wake();
        }
        Effect::LookAgain => {}
    }
    matches!(effect, Effect::Sleep { .. })
}

#[derive(Debug)]
struct Driver {
    setup: Setup,
    tx: TxHalf,
    rx: RxHalf,
    producer: WritingHalf,
    consumer: ReadingHalf,
    /// The reader's ring first, then those that it has not taken yet; the writer's last.
    rings: VecDeque<RingMemory>,
    model: Model,
    writer: Sleeper,
    reader: Sleeper,
    /// The wish that each half has last waited with.
    writer_wants: u64,
    reader_wants: u64,
    attached: bool,
    /// Its process exists; its end of the link is open.
    writer_lives: bool,
    reader_lives: bool,
    finished: bool,
    closed: bool,
    /// The expected value of the reader's state word.
    reader_says: RxState,
    tally: Tally,
}

impl Driver {
    fn new(setup: Setup) -> Self {
        let capacity = capacity(setup.size);
        Self {
            setup,
            tx: TxHalf::new(),
            rx: RxHalf::new(),
            producer: WritingHalf::new(capacity),
            consumer: ReadingHalf::new(capacity, 0),
            rings: [RingMemory::new(capacity)].into(),
            model: Model::new(capacity),
            writer: Sleeper::default(),
            reader: Sleeper::default(),
            writer_wants: 0,
            reader_wants: 0,
            attached: setup.attached,
            writer_lives: true,
            reader_lives: true,
            finished: false,
            closed: false,
            reader_says: RxState::Open,
            tally: Tally::default(),
        }
    }

    fn perform(&mut self, op: Op) {
        match op {
            Op::Attach if !self.attached => {
                self.attached = true;
                // It is a packet on the link, as a ring is.
                self.ring_writer();
            }
            Op::Attach => {}
            Op::Write(n) if self.rouse_writer() => self.write(u64::from(n)),
            Op::Read(n) if self.rouse_reader() => self.read(u64::from(n)),
            Op::RefreshWriter if self.rouse_writer() => self.refresh_writer(),
            Op::RefreshReader if self.rouse_reader() => self.refresh_reader(),
            Op::Switch(size) if self.rouse_writer() => self.switch(capacity(size)),
            Op::ArmWriter(want) if self.rouse_writer() => self.arm_writer(u64::from(want)),
            Op::ArmReader(want) if self.rouse_reader() => self.arm_reader(u64::from(want)),
            Op::SleepWriter => self.sleep_writer(),
            Op::SleepReader => self.sleep_reader(),
            Op::WakeWriter => self.wake_writer(),
            Op::WakeReader => self.wake_reader(),
            Op::Finish if self.rouse_writer() => self.finish(),
            Op::Close if self.rouse_reader() => {
                self.consumer.close(&self.rx);
                self.close(RxState::Closed);
            }
            Op::CloseSocket if self.rouse_reader() => {
                let is_cut = self.model.released() < self.model.committed();
                let expected = if is_cut { RxState::Reset } else { RxState::Closed };
                let said = ReaderView { own: &self.rx, peer: &self.tx }.close();
                assert_eq!(
                    said,
                    expected,
                    "what a reader says that closes at {} of {}",
                    self.model.released(),
                    self.model.committed()
                );
                self.tally.resets += u64::from(is_cut);
                self.close(said);
            }
            // The wish of a killed process stays in memory. Its link hangs up, which wakes the other side.
            Op::KillWriter if self.writer_lives => {
                self.writer_lives = false;
                self.ring_reader();
            }
            Op::KillReader if self.reader_lives => {
                self.reader_lives = false;
                self.ring_writer();
            }
            _ => {}
        }
    }

    /// Whether the writer can act: a sleeping half acts once it was rung. When it acts, it is awake, and stores that.
    fn rouse_writer(&mut self) -> bool {
        let acts = self.writer_lives && !self.finished && !self.writer.sleeps_on();
        if acts {
            self.wake_writer();
        }
        acts
    }

    fn rouse_reader(&mut self) -> bool {
        let acts = self.reader_lives && !self.closed && !self.reader.sleeps_on();
        if acts {
            self.wake_reader();
        }
        acts
    }

    fn wake_writer(&mut self) {
        if self.writer_lives {
            self.writer.wake();
            self.producer.awake(&self.tx);
        }
    }

    fn wake_reader(&mut self) {
        if self.reader_lives {
            self.reader.wake();
            self.consumer.awake(&self.rx);
        }
    }

    fn ring_writer(&mut self) {
        self.tally.bells += 1;
        self.writer.ring();
    }

    fn ring_reader(&mut self) {
        self.tally.bells += 1;
        self.reader.ring();
    }

    fn refresh_writer(&mut self) {
        if !self.attached {
            return;
        }
        let free = self.producer.refresh(&self.rx);
        assert_eq!(free, Ok(self.model.free()), "free after a refresh");
        assert_eq!(self.producer.may_switch(), self.model.may_switch(), "whether another switch is allowed");
    }

    fn refresh_reader(&mut self) {
        let available = self.consumer.refresh(&self.tx);
        assert_eq!(available, Ok(self.model.readable()), "available after a refresh");
        assert_eq!(self.consumer.must_switch(), self.model.must_take(), "whether to take the next ring");
    }

    fn write(&mut self, n: u64) {
        if self.attached {
            assert_eq!(
                RxState::load(&self.rx.control.state),
                Ok(self.reader_says),
                "what the writer learns of its peer"
            );
            if self.closed {
                return;
            }
        }
        let needed = if self.setup.messages { record::footprint(n) } else { n };
        if self.producer.free() < needed {
            self.refresh_writer();
        }
        let at = self.model.committed();
        let mut bytes: Vec<u8> = (at..at + needed.min(self.producer.free())).map(byte).collect();
        if self.setup.messages {
            if (bytes.len() as u64) < needed {
                return;
            }
            let length = u32::try_from(n).expect("operations are small");
            bytes[..8].copy_from_slice(&record::header(length));
        }
        self.commit(&bytes);
    }

    fn commit(&mut self, bytes: &[u8]) {
        let (from, n) = (self.model.committed(), bytes.len() as u64);
        assert!(self.producer.free() <= self.model.free(), "the writer believes in more room than there is");
        assert_eq!(from, self.producer.tail());
        let ring = self.rings.back_mut().expect("there is always a ring");
        assert_eq!(ring.capacity(), self.producer.capacity());
        ring.write(from, bytes);
        let peer = self.attached.then_some(&self.rx);
        let rung = self.producer.commit(&self.tx, peer, n, self.setup.fencing);
        let expected = if self.attached { self.reader.must_be_rung(from, from + n) } else { n > 0 };
        assert_eq!(rung, expected, "bell for a commit of {n} at {from}, reader {:?}", self.reader);
        self.model.commit(bytes);
        if rung {
            self.ring_reader();
        }
    }

    fn read(&mut self, n: u64) {
        while self.consumer.must_switch() {
            self.take_ring();
        }
        let needed = if self.setup.messages { record::HEADER } else { n };
        if self.consumer.available() < needed {
            self.refresh_reader();
        }
        if self.consumer.available() == 0 {
            return;
        }
        if !self.setup.messages {
            return self.release(n.min(self.consumer.available()));
        }
        let head = self.consumer.head();
        let mut header = [0; 8];
        header.copy_from_slice(&self.rings[0].read(head, 8));
        let longest = record::longest(self.consumer.capacity());
        let length = record::parse(header, self.consumer.available(), longest);
        let length = length.expect("an honest peer's records are sound");
        self.release(record::footprint(u64::from(length)));
    }

    fn release(&mut self, n: u64) {
        let from = self.consumer.head();
        assert_eq!(from, self.model.released());
        assert!(self.consumer.available() <= self.model.readable(), "the reader believes in bytes that are not there");
        assert_eq!(self.rings[0].capacity(), self.consumer.capacity());
        let got = self.rings[0].read(from, n);
        let rung = self.consumer.release(&self.rx, &self.tx, n, self.setup.fencing);
        let expected = self.writer.must_be_rung(from, from + n);
        assert_eq!(rung, expected, "bell for a release of {n} at {from}, writer {:?}", self.writer);
        assert_eq!(got, self.model.release(n), "bytes {from}..{}", from + n);
        self.tally.bytes += n;
        if rung {
            self.ring_writer();
        }
    }

    fn switch(&mut self, capacity: u64) {
        if self.producer.may_switch() {
            self.producer.switch(&self.tx, capacity);
            self.model.switch(capacity);
            self.rings.push_back(RingMemory::new(capacity));
        }
    }

    fn take_ring(&mut self) {
        self.rings.pop_front();
        let capacity = self.rings.front().expect("the writer has a ring").capacity();
        self.consumer.switch(&self.rx, capacity);
        self.model.took();
        self.tally.switches += 1;
    }

    /// One step of the writer's wait, as a program takes it.
    fn next_of_writer(&mut self, want: u64) -> Effect {
        self.writer_wants = want;
        let peer = self.attached.then_some(&self.rx);
        // A reader that closes also hangs up. Where the writer can see its word, that has to do.
        let hung_up = !self.reader_lives || self.closed && !self.attached;
        let effect = self.producer.next(&self.tx, peer, hung_up, Need::Room(want), Idle::Sleep);
        let wish = self.tx.control.space_wanted.load(Ordering::Relaxed);
        self.tally.sleeps += u64::from(follow(&mut self.writer, effect, wish));
        effect
    }

    fn next_of_reader(&mut self, want: u64) -> Effect {
        self.reader_wants = want;
        let effect = self.consumer.next(&self.rx, Some(&self.tx), !self.writer_lives, want, Idle::Sleep);
        let wish = self.rx.control.data_wanted.load(Ordering::Relaxed);
        self.tally.sleeps += u64::from(follow(&mut self.reader, effect, wish));
        effect
    }

    fn arm_writer(&mut self, want: u64) {
        let effect = self.next_of_writer(want);
        assert!(!matches!(effect, Effect::Sleep { .. }), "the writer would sleep without a second look");
    }

    fn arm_reader(&mut self, want: u64) {
        let effect = self.next_of_reader(want);
        assert!(!matches!(effect, Effect::Sleep { .. }), "the reader would sleep without a second look");
    }

    fn sleep_writer(&mut self) {
        if !self.writer_lives || !self.writer.is_armed() {
            return;
        }
        let wish = self.tx.control.space_wanted.load(Ordering::Relaxed);
        let must_stay = self.attached && self.model.released() > wish || self.closed || !self.reader_lives;
        let effect = self.next_of_writer(self.writer_wants);
        let would_sleep = matches!(effect, Effect::Fence | Effect::Sleep { .. });
        assert_eq!(would_sleep, !must_stay, "the writer's second look gave {effect:?}");
    }

    fn sleep_reader(&mut self) {
        if !self.reader_lives || !self.reader.is_armed() {
            return;
        }
        let wish = self.rx.control.data_wanted.load(Ordering::Relaxed);
        let must_stay = self.model.committed() > wish || self.finished || !self.writer_lives;
        let effect = self.next_of_reader(self.reader_wants);
        // It may stay awake for less: where no more comes into this ring.
        let would_sleep = matches!(effect, Effect::Fence | Effect::Sleep { .. });
        assert!(!(would_sleep && must_stay), "lost wake-up: the reader's second look gave {effect:?}");
    }

    fn finish(&mut self) {
        self.producer.finish(&self.tx);
        self.finished = true;
        self.setup.fencing.light();
        let rung = !self.attached || must_ring(&self.rx.control.data_wanted, 0, AWAKE);
        assert_eq!(rung, !self.attached || self.reader.is_armed(), "bell for the end");
        if rung {
            self.ring_reader();
        }
    }

    fn close(&mut self, says: RxState) {
        (self.closed, self.reader_says) = (true, says);
        self.setup.fencing.light();
        let rung = must_ring(&self.tx.control.space_wanted, 0, AWAKE);
        assert_eq!(rung, self.writer.is_armed(), "bell for the end");
        if rung {
            self.ring_writer();
        }
    }

    fn expect_invariants(&self) {
        if self.reader_lives {
            let ended = self.finished || !self.writer_lives;
            self.reader.expect_no_lost_wakeup("the reader", self.model.committed(), ended);
        }
        if self.writer_lives {
            let ended = self.closed || !self.reader_lives;
            let seen = if self.attached { self.model.released() } else { 0 };
            self.writer.expect_no_lost_wakeup("the writer", seen, ended);
        }
    }

    /// The writer finishes if it still can, and the reader reads to the end: all that was committed, and then why it ended.
    fn settle(&mut self) {
        self.wake_writer();
        if self.rouse_writer() {
            self.finish();
            self.expect_invariants();
        }
        if !self.reader_lives || self.closed {
            let expected = if self.closed { End::Orderly } else { End::Dead };
            return assert_eq!(
                WritingHalf::judge(Some(&self.rx), true),
                Some(expected.into()),
                "what the writer learns"
            );
        }
        self.wake_reader();
        loop {
            self.refresh_reader();
            if self.consumer.must_switch() {
                self.take_ring();
            } else if self.consumer.available() > 0 {
                self.read(self.consumer.available());
            } else {
                break;
            }
        }
        assert_eq!(self.model.released(), self.model.committed(), "everything committed is read");
        let expected = if self.finished { End::Orderly } else { End::Dead };
        let effect = self.consumer.next(&self.rx, Some(&self.tx), true, 1, Idle::Sleep);
        assert_eq!(effect, Effect::Ended(expected.into()), "what the reader learns");
        self.tally.end = Some(expected);
    }
}
