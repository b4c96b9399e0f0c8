//! Message sockets: whole, in order, once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall::{Error, MessageListener, MessageSocket, Options};
use std::thread;
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(30);

fn sockets(world: &World, options: &Options) -> (MessageSocket, MessageSocket) {
    let mut listener = MessageListener::bind(&world.web, "post", options).unwrap();
    let there = MessageSocket::connect_with(&world.shop, "web:post", options).unwrap();
    let (here, peer) = listener.accept().unwrap();
    assert_eq!((peer.name.as_str(), peer.service.as_str()), ("shop", "post"));
    (there, here)
}

#[test]
fn boundaries_are_kept_for_all_lengths() {
    let _guard = hang_guard();
    let world = World::new();
    for options in [fixed(4096), adaptive(4096, 1 << 20)] {
        let (mut a, mut b) = sockets(&world, &options);
        let longest = a.max_message();
        let lengths: Vec<usize> = (0..40).chain([longest - 1, longest, 0, 1, longest / 2]).collect();
        thread::scope(|s| {
            s.spawn(|| {
                for (i, &len) in lengths.iter().enumerate() {
                    a.send(&Pattern.bytes(i as u64, len)).unwrap();
                }
            });
            let mut message = b"rubbish".to_vec();
            for (i, &len) in lengths.iter().enumerate() {
                b.recv(&mut message).unwrap();
                assert_eq!(message.len(), len);
                Pattern.check(i as u64, &message);
            }
        });
        drop((a, b));
    }
}

#[test]
fn messages_of_random_lengths_arrive_in_both_directions() {
    let _guard = hang_guard();
    let world = World::new();
    let (mut a, mut b) = sockets(&world, &adaptive(4096, 256 << 10));
    thread::scope(|s| {
        s.spawn(move || {
            let (mut dice, mut message) = (Dice::new(1), Vec::new());
            for i in 0..3000 {
                a.send(&Pattern.bytes(i, dice.size(14))).unwrap();
                if dice.one_in(3) {
                    a.recv(&mut message).unwrap();
                    Pattern.check(i, &message);
                }
            }
        });
        let (mut dice, mut message) = (Dice::new(1), Vec::new());
        for i in 0..3000 {
            b.recv(&mut message).unwrap();
            assert_eq!(message.len(), dice.size(14));
            Pattern.check(i, &message);
            if dice.one_in(3) {
                b.send(&message).unwrap();
            }
        }
        assert_fails!(b.recv(&mut message), Error::Closed(_));
        assert_fails!(b.recv(&mut message), Error::Closed(_));
    });
}

#[test]
fn too_large_message_is_refused_and_not_sent_in_part() {
    let world = World::new();
    let (mut a, mut b) = sockets(&world, &adaptive(4096, 16384));
    let longest = a.max_message();
    assert_eq!(longest, 16384 - 8);
    assert_fails!(a.send(&vec![0; longest + 1]), Error::TooLarge { max: 16376, .. });
    assert_fails!(a.send(&vec![0; 1 << 24]), Error::TooLarge { .. });
    a.send(b"next").unwrap();
    let mut message = Vec::new();
    b.recv(&mut message).unwrap();
    assert_eq!(message, b"next");
}

#[test]
fn too_small_buffer_loses_no_message() {
    let world = World::new();
    let (mut a, mut b) = sockets(&world, &fixed(4096));
    a.send(b"twelve bytes").unwrap();
    a.send(b"").unwrap();
    let mut buf = [9; 16];
    assert_fails!(b.recv_into(&mut buf[..11]), Error::TooLarge { asked: 12, max: 11, .. });
    assert_eq!(b.recv_into(&mut buf).unwrap(), 12);
    assert_eq!(&buf, b"twelve bytes\x09\x09\x09\x09");
    assert_eq!(b.recv_into(&mut []).unwrap(), 0);
}

#[test]
fn waiting_and_not_waiting() {
    let _guard = hang_guard();
    let world = World::new();
    let (mut a, mut b) = sockets(&world, &fixed(4096));
    let mut message = Vec::new();
    b.set_timeout(Some(SHORT));
    assert_fails!(b.recv(&mut message), Error::TimedOut);
    b.set_nonblocking(true);
    assert_fails!(b.recv(&mut message), Error::WouldBlock);
    assert!(!readable(b.receive_fd().unwrap(), Duration::ZERO));
    a.send(b"x").unwrap();
    assert!(readable(b.receive_fd().unwrap(), HANG));
    b.recv(&mut message).unwrap();

    a.set_timeout(Some(SHORT));
    let mut sent = 0;
    let refused = loop {
        match a.send(&[0; 1000]) {
            Ok(()) => sent += 1,
            Err(e) => break e,
        }
    };
    assert!(matches!(refused, Error::TimedOut), "{refused:?}");
    assert_eq!(sent, 4, "four records of 1008 bytes fit");
    for _ in 0..sent {
        b.recv(&mut message).unwrap();
        assert_eq!(message.len(), 1000);
    }
    assert_fails!(b.recv(&mut message), Error::WouldBlock);
}

#[test]
fn ends_are_as_for_streams() {
    let _guard = hang_guard();
    let world = World::new();
    let (mut a, mut b) = sockets(&world, &fixed(4096));
    a.send(b"last").unwrap();
    a.finish();
    assert_fails!(a.send(b"more"), Error::Closed(_));
    let mut message = Vec::new();
    b.recv(&mut message).unwrap();
    assert_fails!(b.recv(&mut message), Error::Closed(_));
    b.send(b"answer").unwrap();
    drop(b);
    a.recv(&mut message).unwrap();
    assert_eq!(message, b"answer");
    assert_fails!(a.recv(&mut message), Error::Closed(_));
}

#[test]
fn one_way_sockets_send_or_receive() {
    let world = World::new();
    let (mut a, mut b) = sockets(&world, &fixed(4096).one_way(true));
    a.send(b"there").unwrap();
    let mut message = Vec::new();
    b.recv(&mut message).unwrap();
    assert_fails!(a.recv(&mut message), Error::Closed(_));
    assert_fails!(b.send(b"back"), Error::Closed(_));
    assert!(a.receive_fd().is_err());
    assert_eq!(b.max_message(), 0);
}

#[test]
fn streams_and_messages_do_not_mix() {
    let world = World::new();
    let _listener = MessageListener::bind(&world.web, "post", &Options::default()).unwrap();
    assert_fails!(world.shop.connect("web:post"), Error::Refused { code: partywall::Refusal::KindMismatch, .. });
}
