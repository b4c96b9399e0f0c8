//! Sets with connections whose bells ring by interrupts.

use super::*;

/// Bytes that arrive while a thread sleeps in a set, each when the one before was read.
fn all_arrive(are_lost: bool, rounds: u64) {
    let (set, pairs) = (Set::new(), [(); 3].map(|()| Pair::up_with_events(64 << 10, are_lost)));
    for (n, pair) in pairs.iter().enumerate() {
        set.add(pair.a, IN, n as u64);
    }
    for round in 0..rounds {
        let pair = &pairs[round as usize % pairs.len()];
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| set.wait());
            std::thread::sleep(Duration::from_millis(5));
            send(pair.b, b"x").unwrap();
            assert_eq!(sleeper.join().unwrap(), [(IN, round % pairs.len() as u64)]);
        });
        assert_eq!(receive(pair.a, 10).unwrap(), b"x");
    }
}

#[test]
fn sleeper_in_set_is_woken_by_events() {
    all_arrive(false, 30);
}

#[test]
fn sleeper_in_set_finds_bytes_of_lost_interrupt() {
    all_arrive(true, 2);
}
