//! The end of one connection and bytes of another, which come to a set by different ways.

use super::*;

/// Connections that have carried a byte by the ring, in a set that was asked for them and found nothing more.
fn set_with(pairs: &[Pair]) -> Set {
    let set = Set::new();
    for (pair, n) in pairs.iter().zip(0..) {
        set.add(pair.b, IN | RDHUP, n);
        send(pair.a, b"x").unwrap();
        assert_eq!(set.wait(), [(IN, n)]);
        receive(pair.b, 1).unwrap();
    }
    set
}

#[test]
fn end_is_told_before_bytes_of_another_connection_that_were_sent_later() {
    for most in [16, 1] {
        for by_shutdown in [false, true] {
            let mut pairs = [up(), up(), up()];
            let set = set_with(&pairs);
            // The first is at rest for so long that it is looked at no more.
            for _ in 0..1000 {
                send(pairs[1].a, b"y").unwrap();
                assert_eq!(set.wait(), [(IN, 1)]);
                receive(pairs[1].b, 1).unwrap();
            }
            // The kernel has just been asked.
            set.now();
            if by_shutdown {
                shutdown(pairs[0].a, libc::SHUT_WR);
            } else {
                close(std::mem::replace(&mut pairs[0].a, -1));
            }
            send(pairs[1].a, b"later").unwrap();
            let told = set.wait_for(most, LONG).unwrap();
            assert_eq!(told.first().map(|event| event.1), Some(0), "{told:?}, by shutdown: {by_shutdown}");
            assert!(told[0].0 & RDHUP != 0, "{told:?}");
        }
    }
}

#[test]
fn bytes_are_told_though_their_sender_ends_connections_all_the_time() {
    let pairs = [up(), up()];
    let set = set_with(&pairs);
    for _ in 0..200 {
        drop(up());
        send(pairs[1].a, b"y").unwrap();
        assert_eq!(set.wait(), [(IN, 1)]);
        receive(pairs[1].b, 1).unwrap();
        assert_eq!(set.now(), []);
    }
}
