//! One bell for one sleep on many connections, and none that is spared too often.

#![expect(unsafe_code, reason = "calls the exported functions as a program does")]

use super::*;

/// Pairs whose `b` ends write to one program, as far as they know.
fn acquainted(count: usize) -> Vec<Pair> {
    let pairs: Vec<Pair> = (0..count).map(|_| up()).collect();
    for pair in &pairs {
        pair.introduce();
    }
    pairs
}

#[test]
fn one_bell_wakes_sleeper_on_many_connections() {
    let (set, pairs) = (Set::new(), acquainted(8));
    for (n, pair) in pairs.iter().enumerate() {
        set.add(pair.a, IN, n as u64);
    }
    let bells = || pairs.iter().map(Pair::bells_of_b).sum::<u64>();
    let mut fewest = u64::MAX;
    // If the writer is delayed, the reader may sleep again in between.
    for _ in 0..200 {
        let before = bells();
        std::thread::scope(|s| {
            s.spawn(|| {
                let mut left = pairs.len();
                while left > 0 {
                    for (_, n) in set.wait() {
                        assert_eq!(receive(pairs[n as usize].a, 10).unwrap(), b"x");
                        left -= 1;
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(5));
            for pair in &pairs {
                send(pair.b, b"x").unwrap();
            }
        });
        // No bell rang if the reader had not fallen asleep yet.
        match bells() - before {
            0 => {}
            1 => return,
            more => fewest = fewest.min(more),
        }
    }
    panic!("never less than {fewest} bells");
}

/// Writers that wait until all was read, so that the readers fall asleep between any two bytes, while others change what they wait for.
fn all_is_read(readers: usize, disturb: impl Fn(&Set, &Pair, u64) + Sync) {
    let (set, pairs) = (Set::new(), acquainted(12));
    for pair in &pairs {
        set.add(pair.a, IN, number_of(pair));
    }
    let find = |n: u64| pairs.iter().find(|pair| number_of(pair) == n).unwrap();
    let read = AtomicU32::new(0);
    let over = AtomicBool::new(false);
    let (set, pairs, find, read, over, disturb) = (&set, &pairs, &find, &read, &over, &disturb);
    std::thread::scope(|s| {
        for _ in 0..readers {
            s.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    // A signal that stops this process and one that continues it interrupt the wait.
                    for (_, n) in set.wait_for(3, 20_000).unwrap_or_default() {
                        if let Ok(bytes) = receive(find(n).a, 100) {
                            read.fetch_add(bytes.len() as u32, Ordering::SeqCst);
                        }
                    }
                }
            });
        }
        s.spawn(move || {
            let mut state = 88172645463325252u64;
            while !over.load(Ordering::SeqCst) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                disturb(set, &pairs[state as usize % pairs.len()], state >> 32);
                std::thread::sleep(Duration::from_micros(state % 300));
            }
        });
        let mut state = 2463534242u64;
        let mut written = 0;
        for round in 0..1500 {
            for _ in 0..1 + round % 5 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                send(pairs[state as usize % pairs.len()].b, b"x").unwrap();
                written += 1;
            }
            let mut looks = 0;
            while read.load(Ordering::SeqCst) != written {
                looks += 1;
                match looks {
                    0..1000 => std::thread::yield_now(),
                    1000..16_000 => std::thread::sleep(Duration::from_millis(1)),
                    _ => {
                        over.store(true, Ordering::SeqCst);
                        panic!("round {round}: {} of {written} were read", read.load(Ordering::SeqCst));
                    }
                }
            }
            if state.is_multiple_of(4) {
                std::thread::sleep(Duration::from_micros(state % 500));
            }
        }
        over.store(true, Ordering::SeqCst);
        // The thread that still sleeps.
        for _ in 0..readers {
            send(pairs[0].b, b"x").unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

/// The number that the program gets with its events.
fn number_of(pair: &Pair) -> u64 {
    pair.a as u64
}

#[test]
fn sleeper_is_woken_by_bell_for_another_connection() {
    all_is_read(1, |_, _, _| {});
    all_is_read(3, |_, _, _| {});
}

#[test]
fn sleeper_is_woken_by_bell_while_set_changes() {
    let change = |set: &Set, pair: &Pair, how: u64| {
        if how.is_multiple_of(2) {
            set.take_out(pair.a).unwrap();
            std::thread::sleep(Duration::from_micros(how % 100));
            set.add(pair.a, IN, number_of(pair));
        } else {
            set.change(pair.a, IN, number_of(pair));
        }
    };
    all_is_read(1, change);
    all_is_read(2, change);
}

#[test]
fn sleeper_is_woken_by_bell_that_another_set_waits_for() {
    let other = Set::new();
    let join = |_: &Set, pair: &Pair, how: u64| {
        other.add(pair.a, IN, number_of(pair));
        let _ = other.wait_for(1, (how % 3) as c_int);
        other.take_out(pair.a).unwrap();
    };
    all_is_read(1, join);
    all_is_read(2, join);
}

#[test]
fn sleeper_is_woken_by_bell_that_others_poll_for() {
    let look = |_: &Set, pair: &Pair, how: u64| {
        let mut one = libc::pollfd { fd: pair.a, events: libc::POLLIN, revents: 0 };
        // SAFETY: memory and descriptors of this test.
        let _ = unsafe { crate::calls::poll::poll(&raw mut one, 1, (how % 3) as c_int) };
    };
    all_is_read(1, look);
    all_is_read(2, look);
}

#[test]
fn connection_with_other_waiters_rings_its_own_bell() {
    type Wait = fn(&Set, c_int) -> bool;
    let by_epoll: Wait = |other, _| !other.wait_for(1, LONG).unwrap().is_empty();
    let by_poll: Wait = |_, fd| {
        let mut one = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: memory and descriptors of this test.
        (unsafe { crate::calls::poll::poll(&raw mut one, 1, LONG) }) == 1
    };
    let by_reading: Wait = |_, fd| crate::calls::testing::recv(fd, 1, 0).is_ok();
    for (how, wait) in [by_epoll, by_poll, by_reading].into_iter().enumerate() {
        for round in 0..3 {
            let (set, other, pairs) = (Set::new(), Set::new(), acquainted(2));
            for pair in &pairs {
                set.add(pair.a, IN, 1);
            }
            if how == 0 {
                other.add(pairs[1].a, IN, 2);
            }
            std::thread::scope(|s| {
                let second = s.spawn(|| wait(&other, pairs[1].a));
                std::thread::sleep(Duration::from_millis(20));
                let first = s.spawn(|| set.wait().len());
                std::thread::sleep(Duration::from_millis(20));
                send(pairs[0].b, b"x").unwrap();
                send(pairs[1].b, b"x").unwrap();
                assert!(first.join().unwrap() > 0);
                // Less than the waits last, so that only a bell ends them before.
                let deadline = Instant::now() + Duration::from_secs(60);
                while !second.is_finished() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let is_reported = second.is_finished();
                // So that the test ends.
                send(pairs[1].b, b"y").unwrap();
                assert!(second.join().unwrap() && is_reported, "way {how}, round {round}");
            });
        }
    }
}
