//! Both ends of a stream against a model of two queues, with operations chosen by chance.
//!
//! Everything is non-blocking and in one thread, so that each call has one right answer. Proptest shrinks what fails.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall::{Error, Stream};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::io::{IoSlice, Read, Write};
use std::net::Shutdown;

const RING: usize = 4096;
const MAX: usize = 65536;

/// Something one end does. Sizes are in bytes.
#[derive(Debug, Clone)]
enum Op {
    Write(usize),
    WriteVectored(usize, usize),
    /// Reserves the first, commits as much of it as the second says in parts of 255.
    Commit(usize, u8),
    Abort(usize),
    Read(usize),
    ReadVectored(usize, usize),
    /// Looks at this many bytes, and releases a part of what is there: the second number, in parts of 255.
    Peek(usize, u8),
    FillBuf(u8),
    Trim,
    Finish,
    CloseRead,
}

fn sizes() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 1..20usize, 3 => 1..RING, 2 => RING - 1..=RING + 1, 1 => 1..3 * RING]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => sizes().prop_map(Op::Write),
        4 => (sizes(), sizes()).prop_map(|(a, b)| Op::WriteVectored(a, b)),
        8 => (sizes(), any::<u8>()).prop_map(|(n, k)| Op::Commit(n, k)),
        4 => sizes().prop_map(Op::Abort),
        12 => sizes().prop_map(Op::Read),
        4 => (sizes(), sizes()).prop_map(|(a, b)| Op::ReadVectored(a, b)),
        8 => (sizes(), any::<u8>()).prop_map(|(n, k)| Op::Peek(n, k)),
        6 => any::<u8>().prop_map(Op::FillBuf),
        3 => Just(Op::Trim),
        1 => Just(Op::Finish),
        1 => Just(Op::CloseRead),
    ]
}

/// One direction: what was committed and not yet released, and how it ended.
#[derive(Default)]
struct Queue {
    bytes: VecDeque<u8>,
    committed: u64,
    finished: bool,
    closed: bool,
}

impl Queue {
    fn push(&mut self, n: usize) {
        self.bytes.extend(Pattern.bytes(self.committed, n));
        self.committed += n as u64;
    }

    /// The bytes at the front are these, and are taken.
    fn take(&mut self, got: &[u8]) {
        assert!(got.len() <= self.bytes.len(), "{} bytes of {}", got.len(), self.bytes.len());
        let expected: Vec<u8> = self.bytes.drain(..got.len()).collect();
        assert!(expected == got, "other bytes than were written");
    }
}

/// The outcome of a call: the number of bytes that it moved, or the reason why it moved none.
fn done<E: Into<std::io::Error>>(result: Result<usize, E>) -> Result<usize, &'static str> {
    result.map_err(|e| match cause(&e.into()) {
        Error::WouldBlock => "would block",
        Error::Closed(_) => "closed",
        Error::TooLarge { .. } => "too large",
        other => panic!("{other:?}"),
    })
}

struct Test {
    ends: [Stream; 2],
    /// The bytes that each end has written.
    queues: [Queue; 2],
    grows: bool,
}

impl Test {
    fn new(grows: bool) -> Self {
        let options = if grows { adaptive(RING as u64, MAX as u64) } else { fixed(RING as u64) };
        let (mut a, mut b) = pair(&options);
        a.set_nonblocking(true);
        b.set_nonblocking(true);
        Self { ends: [a, b], queues: Default::default(), grows }
    }

    fn wrote(&mut self, end: usize, asked: usize, result: Result<usize, &str>) {
        let queue = &mut self.queues[end];
        let free = RING.saturating_sub(queue.bytes.len());
        match result {
            Err("closed") => assert!(queue.finished || queue.closed),
            _ if queue.finished || queue.closed => panic!("written to a direction that has ended"),
            Err(why) => {
                assert_eq!(why, "would block");
                assert!(!queue.bytes.is_empty(), "an empty ring has room");
                assert!(self.grows || free == 0, "{free} bytes free");
            }
            Ok(n) => {
                assert!(n > 0 && n <= asked, "{n} of {asked}");
                assert!(self.grows || n == asked.min(free), "{n} of {asked}, {free} free");
                queue.push(n);
            }
        }
    }

    fn reserve(&mut self, end: usize, n: usize, commit: Option<usize>) {
        let at = self.queues[end].committed;
        let result = self.ends[end].writer().unwrap().reserve(n).map(|mut span| {
            assert_eq!(span.len(), n);
            Pattern.fill(at, &mut span);
            if let Some(k) = commit {
                span.commit(k);
            }
            n
        });
        let queue = &mut self.queues[end];
        match done(result) {
            Err("closed") => assert!(queue.finished || queue.closed),
            _ if queue.finished || queue.closed => panic!("reserved in a direction that has ended"),
            Err("too large") => assert!(n > if self.grows { MAX } else { RING }, "{n}"),
            Err(_) if self.grows => assert!(!queue.bytes.is_empty(), "all is free"),
            Err(_) => assert!(n > RING - queue.bytes.len(), "{n} bytes were free"),
            Ok(_) => queue.push(commit.unwrap_or(0)),
        }
    }

    /// The reader at `end` was told this; `enough` bytes would have been an answer.
    fn may_be_told(&self, end: usize, enough: usize, result: Result<usize, &str>) {
        let queue = &self.queues[1 - end];
        match result {
            Ok(0) => assert!(queue.closed || (queue.finished && queue.bytes.is_empty()), "no end yet"),
            Ok(n) => assert!(n <= queue.bytes.len() && !queue.closed),
            Err("would block") => {
                assert!(queue.bytes.len() < enough, "{} bytes there, {enough} asked", queue.bytes.len());
                assert!(!queue.finished && !queue.closed, "an end is not nothing");
            }
            Err(why) => panic!("{why}"),
        }
    }

    fn run(&mut self, end: usize, op: &Op) {
        let at = self.queues[end].committed;
        let stream = &mut self.ends[end];
        match *op {
            Op::Write(n) => {
                let result = done(stream.write(&Pattern.bytes(at, n)));
                self.wrote(end, n, result);
            }
            Op::WriteVectored(n, m) => {
                let (one, two) = (Pattern.bytes(at, n), Pattern.bytes(at + n as u64, m));
                let result = done(stream.write_vectored(&[IoSlice::new(&one), IoSlice::new(&two)]));
                self.wrote(end, n + m, result);
            }
            Op::Commit(n, part) => self.reserve(end, n, Some(n * usize::from(part) / 255)),
            Op::Abort(n) => self.reserve(end, n, None),
            Op::Trim => {
                if let Err(why) = done(stream.writer().unwrap().trim().map(|()| 0)) {
                    assert_eq!(why, "closed");
                    assert!(self.queues[end].finished || self.queues[end].closed);
                }
            }
            Op::Finish => {
                stream.shutdown(Shutdown::Write).unwrap();
                self.queues[end].finished = true;
            }
            Op::CloseRead => {
                stream.shutdown(Shutdown::Read).unwrap();
                self.queues[1 - end].closed = true;
                self.queues[1 - end].bytes.clear();
            }
            Op::Read(n) => {
                let mut buf = vec![0; n];
                let result = done(stream.read(&mut buf));
                self.may_be_told(end, 1, result);
                self.queues[1 - end].take(&buf[..result.unwrap_or(0)]);
            }
            Op::ReadVectored(n, m) => {
                let mut buf = vec![0; n + m];
                let (one, two) = buf.split_at_mut(n);
                let slices = &mut [std::io::IoSliceMut::new(one), std::io::IoSliceMut::new(two)];
                let result = done(stream.reader().unwrap().read_vectored(slices));
                self.may_be_told(end, 1, result);
                self.queues[1 - end].take(&buf[..result.unwrap_or(0)]);
            }
            Op::Peek(n, part) => {
                let mut buf = Vec::new();
                let result = done(stream.reader().unwrap().peek_at_least(n).map(|peeked| {
                    let there = peeked.len();
                    buf.resize(there * usize::from(part) / 255, 0);
                    assert_eq!(peeked.copy_to(0, &mut buf), buf.len());
                    peeked.release(buf.len());
                    there
                }));
                // No ring holds more than its size: then a full one is enough.
                self.may_be_told(end, n.min(if self.grows { MAX } else { RING }), result);
                self.queues[1 - end].take(&buf);
            }
            Op::FillBuf(part) => {
                use std::io::BufRead;
                let mut buf = Vec::new();
                let result = done(stream.fill_buf().map(|there| {
                    buf = there[..there.len() * usize::from(part) / 255].to_vec();
                    there.len()
                }));
                stream.consume(buf.len());
                self.may_be_told(end, 1, result);
                self.queues[1 - end].take(&buf);
            }
        }
    }

    /// Everything that was committed is there in the end.
    fn drain(mut self) {
        for end in [0, 1] {
            self.run(1 - end, &Op::Finish);
            while !self.queues[1 - end].bytes.is_empty() {
                let before = self.queues[1 - end].bytes.len();
                self.run(end, &Op::Read(1000));
                assert!(self.queues[1 - end].bytes.len() < before, "{before} bytes are stuck");
            }
            self.run(end, &Op::Read(1));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn streams_are_two_queues(grows: bool, ops in vec((0..2usize, op()), 1..120)) {
        let mut test = Test::new(grows);
        for (end, op) in &ops {
            test.run(*end, op);
        }
        test.drain();
    }
}
