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
fn end_is_reported_before_bytes_sent_later_elsewhere() {
    for most in [16, 1] {
        for way in ["close", "shutdown", "dup2"] {
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
            match way {
                "shutdown" => shutdown(pairs[0].a, libc::SHUT_WR),
                "close" => close(std::mem::replace(&mut pairs[0].a, -1)),
                _ => dup2(pairs[2].a, pairs[0].a),
            }
            send(pairs[1].a, b"later").unwrap();
            let told = set.wait_for(most, LONG).unwrap();
            assert_eq!(told.first().map(|event| event.1), Some(0), "{told:?}, {way}");
            assert!(told[0].0 & RDHUP != 0, "{told:?}");
        }
    }
}

#[test]
fn bytes_are_reported_while_sender_keeps_closing_connections() {
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

/// A pipe that is readable all the time, in the set under this number.
fn readable_pipe(set: &Set, data: u64) -> (std::os::fd::OwnedFd, std::os::fd::OwnedFd) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&writer, b"x").unwrap();
    set.add(std::os::fd::AsRawFd::as_raw_fd(&reader), IN, data);
    (reader, writer)
}

#[test]
fn descriptor_is_reported_once_if_kernel_is_asked_twice() {
    for most in [16, 3] {
        let pairs = [up(), up()];
        let set = set_with(&pairs);
        let _pipe = readable_pipe(&set, 7);
        for _ in 0..40 {
            drop(up());
            send(pairs[1].a, b"later").unwrap();
            let mut told = Vec::new();
            // The pipe alone fills some answers of an array with few places.
            while !told.contains(&1) {
                told = set.wait_for(most, LONG).unwrap().into_iter().map(|event| event.1).collect();
                let mut once = told.clone();
                once.sort_unstable();
                once.dedup();
                assert_eq!(once.len(), told.len(), "{told:?}");
            }
            receive(pairs[1].b, 5).unwrap();
        }
    }
}

#[test]
fn full_event_array_hides_no_end_and_starves_no_bytes() {
    let mut pairs = [up(), up()];
    let set = set_with(&pairs);
    let _pipes = [readable_pipe(&set, 7), readable_pipe(&set, 8), readable_pipe(&set, 9)];
    for ends in [true, false] {
        if ends {
            close(std::mem::replace(&mut pairs[0].a, -1));
        } else {
            drop(up());
        }
        send(pairs[1].a, b"later").unwrap();
        let mut told = Vec::new();
        while told.last() != Some(&1) {
            told.extend(set.wait_for(1, LONG).unwrap().into_iter().map(|event| event.1));
            assert!(told.len() < 1000, "bytes are never told of: {told:?}");
        }
        assert!(!ends || told.contains(&0), "{told:?}");
        receive(pairs[1].b, 5).unwrap();
        if ends {
            set.take_out(pairs[0].b).unwrap();
        }
    }
}
