//! Streams between two ends in one process: bytes, sizes, halves, ends.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall::{Error, Options, Stream};
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::thread;

/// Sends and receives in two threads, in pieces as told, and compares the totals.
fn transfer(options: &Options, total: u64, write: impl FnMut() -> usize + Send, read: impl FnMut() -> usize) {
    let (mut a, mut b) = pair(options);
    thread::scope(|s| {
        s.spawn(move || {
            Pattern.send(&mut a, total, write);
            a.shutdown(Shutdown::Write).unwrap();
            // Until the other has read everything: it closes last.
            assert_eq!(a.read(&mut [0]).unwrap(), 0);
        });
        assert_eq!(Pattern.receive(&mut b, read), total);
        drop(b);
    });
}

#[test]
fn bytes_arrive_once_in_order_and_unchanged_for_all_sizes() {
    let _guard = hang_guard();
    for ring in [4096, 65536] {
        for write in [1, 7, 64, 4095, 4096, 4097, 70_000] {
            for read in [1, 13, 4096, 200_000] {
                let total = if write.min(read) < 64 { 20_000 } else { 600_000 };
                transfer(&fixed(ring), total, || write, || read);
            }
        }
    }
}

#[test]
fn random_sizes_on_both_sides_with_rings_of_all_kinds() {
    let _guard = hang_guard();
    for (seed, options) in [fixed(4096), fixed(1 << 20), adaptive(4096, 1 << 20), Options::default()].iter().enumerate()
    {
        let (mut writes, mut reads) = (Dice::new(seed as u64), Dice::new(seed as u64 + 100));
        transfer(options, 8 << 20, || writes.size(18), || reads.size(18));
    }
}

#[test]
fn blocking_at_once_works_as_spinning_does() {
    let _guard = hang_guard();
    let blocking = fixed(4096).spin(std::time::Duration::ZERO);
    transfer(&blocking, 2 << 20, || 3000, || 5000);
}

#[test]
fn written_bytes_are_readable_without_flush() {
    let (mut a, mut b) = pair(&fixed(4096));
    b.set_nonblocking(true);
    let mut buf = [0; 64];
    for at in 0..5000 {
        let byte = Pattern.bytes(at, 1);
        assert_eq!(a.write(&byte).unwrap(), 1);
        assert_eq!(b.read(&mut buf).unwrap(), 1, "not held back");
        assert_eq!(buf[0], byte[0]);
    }
    a.flush().unwrap();
}

#[test]
fn stream_carries_both_directions_at_the_same_time() {
    let _guard = hang_guard();
    let (a, b) = pair(&fixed(8192));
    let (ar, aw) = a.into_halves();
    let (br, bw) = b.into_halves();
    thread::scope(|s| {
        for (seed, (reader, writer)) in [(ar, bw), (br, aw)].into_iter().enumerate() {
            let (mut reads, mut writes) = (Dice::new(seed as u64), Dice::new(seed as u64 + 9));
            let mut writer = writer.unwrap();
            s.spawn(move || {
                Pattern.send(&mut writer, 3 << 20, || writes.size(14));
            });
            let mut reader = reader.unwrap();
            s.spawn(move || assert_eq!(Pattern.receive(&mut reader, || reads.size(14)), 3 << 20));
        }
    });
}

#[test]
fn echo_answers_each_message() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&Options::default());
    thread::scope(|s| {
        s.spawn(move || {
            let (reader, writer) = Stream::halves(&mut b).unwrap();
            std::io::copy(reader, writer).unwrap();
        });
        let mut dice = Dice::new(5);
        let mut answer = Vec::new();
        for at in 0..2000 {
            let message = Pattern.bytes(at, dice.size(9));
            a.write_all(&message).unwrap();
            answer.resize(message.len(), 0);
            a.read_exact(&mut answer).unwrap();
            assert!(answer == message);
        }
        a.shutdown(Shutdown::Write).unwrap();
        assert_eq!(a.read(&mut [0]).unwrap(), 0);
    });
}

#[test]
fn vectored_calls_take_their_buffers_in_order() {
    let (mut a, mut b) = pair(&fixed(4096));
    let slices =
        [IoSlice::new(b""), IoSlice::new(b"par"), IoSlice::new(b""), IoSlice::new(b"ty"), IoSlice::new(b"wall")];
    assert_eq!(a.write_vectored(&slices).unwrap(), 9);
    assert_eq!(a.write_vectored(&[]).unwrap(), 0);
    let (mut one, mut two, mut three) = ([0; 2], [0; 4], [0; 10]);
    let reader = b.reader().unwrap();
    let mut bufs =
        [IoSliceMut::new(&mut one), IoSliceMut::new(&mut []), IoSliceMut::new(&mut two), IoSliceMut::new(&mut three)];
    assert_eq!(reader.read_vectored(&mut bufs).unwrap(), 9);
    assert_eq!((&one, &two, &three[..3]), (b"pa", b"rtyw", &b"all"[..]));

    // A non-blocking writer reports how much of the buffers fitted.
    a.set_nonblocking(true);
    let big = vec![7; 3000];
    assert_eq!(a.write_vectored(&[IoSlice::new(&big), IoSlice::new(&big)]).unwrap(), 4096);
    assert_fails!(a.write_vectored(&[IoSlice::new(&big)]), Error::WouldBlock);
}

#[test]
fn empty_calls_do_nothing_and_do_not_wait() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&fixed(4096));
    assert_eq!(a.write(&[]).unwrap(), 0);
    assert_eq!(b.read(&mut []).unwrap(), 0);
    a.write_all(&[0; 4096]).unwrap();
    assert_eq!(a.write(&[]).unwrap(), 0, "on a full ring, too");
    assert_eq!(a.writer().unwrap().reserve(0).unwrap().len(), 0);
}

#[test]
fn either_direction_can_end_first() {
    let _guard = hang_guard();
    for first in [Shutdown::Write, Shutdown::Read] {
        let (mut a, mut b) = pair(&fixed(4096));
        a.write_all(b"last words").unwrap();
        b.write_all(b"unread").unwrap();
        a.shutdown(first).unwrap();
        if first == Shutdown::Write {
            let mut text = String::new();
            b.read_to_string(&mut text).unwrap();
            assert_eq!(text, "last words");
            assert_fails!(a.write(b"more"), Error::Closed(_));
            // The other way is as it was.
            b.write_all(b"!").unwrap();
            b.shutdown(Shutdown::Write).unwrap();
            text.clear();
            a.read_to_string(&mut text).unwrap();
            assert_eq!(text, "unread!");
        } else {
            eventually("the writer learns it", || b.write(b"more").is_err());
            assert_fails!(b.write(b"more"), Error::Closed(_));
            a.write_all(b"!").unwrap();
            drop(a);
            let mut text = String::new();
            b.read_to_string(&mut text).unwrap();
            assert_eq!(text, "last words!");
        }
    }
}

#[test]
fn dropping_is_an_orderly_end() {
    let (mut a, mut b) = pair(&fixed(4096));
    a.write_all(b"bye").unwrap();
    drop(a);
    let mut text = String::new();
    b.read_to_string(&mut text).unwrap();
    assert_eq!(text, "bye");
    for _ in 0..3 {
        assert_eq!(b.read(&mut [0; 8]).unwrap(), 0, "the end stays the end");
        assert!(b.reader().unwrap().peek().unwrap().is_empty());
        assert_fails!(b.write(b"x"), Error::Closed(_));
    }
}

#[test]
fn half_closed_here_stays_closed() {
    let (mut a, mut b) = pair(&fixed(4096));
    a.write_all(b"some bytes").unwrap();
    assert_eq!(b.read(&mut [0; 4]).unwrap(), 4);
    b.shutdown(Shutdown::Read).unwrap();
    // As for a socket: what had arrived is gone with it.
    assert_eq!(b.read(&mut [0; 4]).unwrap(), 0);
    b.shutdown(Shutdown::Both).unwrap();
    b.shutdown(Shutdown::Both).unwrap();
    assert_fails!(b.write(b"x"), Error::Closed("this side has finished writing"));
}

#[test]
fn blocked_writer_returns_when_reader_leaves() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&fixed(4096));
    thread::scope(|s| {
        let writer = s.spawn(move || {
            let done = a.write(&[1; 10_000]).unwrap();
            (done, a.write(&[1; 10_000]).map_err(|e| matches!(cause(&e), Error::Closed(_))))
        });
        b.read_exact(&mut [0; 100]).unwrap();
        drop(b);
        let (done, then) = writer.join().unwrap();
        assert!((4096..=4196).contains(&done), "{done}: what had room");
        assert_eq!(then, Err(true));
    });
}

#[test]
fn blocked_reader_returns_when_writer_finishes() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&fixed(4096));
    thread::scope(|s| {
        let reader = s.spawn(move || {
            let short = b.reader().unwrap().peek_at_least(100).unwrap().len();
            let mut rest = Vec::new();
            b.read_to_end(&mut rest).unwrap();
            (short, rest)
        });
        a.write_all(b"few").unwrap();
        a.shutdown(Shutdown::Write).unwrap();
        let (short, rest) = reader.join().unwrap();
        assert_eq!((short, &rest[..]), (3, &b"few"[..]), "fewer than asked for, but only at the end");
    });
}

#[test]
fn one_way_streams_have_one_half_on_each_side() {
    let (mut a, mut b) = pair(&fixed(4096).one_way(true));
    a.write_all(b"there").unwrap();
    let mut buf = [0; 5];
    b.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"there");
    assert_fails!(a.read(&mut buf), Error::Closed(_));
    assert_fails!(b.write(&buf), Error::Closed(_));
    assert!(Stream::halves(&mut a).is_err() && Stream::halves(&mut b).is_err());
    assert_eq!(a.writer().unwrap().ring_size(), 4096);
    let (none, some) = a.into_halves();
    assert!(none.is_none() && some.is_some());
    drop(some);
    assert_eq!(b.read(&mut buf).unwrap(), 0);
}

#[test]
fn lines_can_be_read_with_bufread() {
    let _guard = hang_guard();
    let (mut a, b) = pair(&fixed(4096));
    thread::scope(|s| {
        s.spawn(move || {
            for i in 0..3000 {
                writeln!(a, "line {i} {}", "x".repeat(i % 100)).unwrap();
            }
        });
        for (i, line) in BufReader::new(b).lines().enumerate() {
            assert_eq!(line.unwrap(), format!("line {i} {}", "x".repeat(i % 100)));
        }
    });
}

#[test]
fn halves_and_streams_move_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<Stream>();
    is_send::<partywall::ReadHalf>();
    is_send::<partywall::WriteHalf>();
    is_send::<partywall::Domain>();
    is_send::<partywall::Error>();
}
