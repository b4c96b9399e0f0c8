//! Threads that wait already when others change what is in the set.

use super::*;
use std::sync::Mutex;

/// Lets threads that were started just now fall asleep. Where it is too short a test proves less, but does not fail.
fn while_they_fall_asleep() {
    std::thread::sleep(Duration::from_millis(20));
}

#[test]
fn sleeper_in_empty_set_hears_of_oneshot_under_programs_number() {
    for pair in [candidates(), up()] {
        for rounds in 0..20 {
            let set = Set::new();
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| set.wait());
                if rounds % 2 == 0 {
                    while_they_fall_asleep();
                }
                set.add(pair.b, IN | ONESHOT, 4711);
                if rounds % 4 < 2 {
                    while_they_fall_asleep();
                }
                send(pair.a, b"x").unwrap();
                assert_eq!(waiter.join().unwrap(), [(IN, 4711)]);
            });
            assert_eq!(receive(pair.b, 10).unwrap(), b"x");
            assert_eq!(set.wait_for(16, SOON).unwrap(), [], "it was one shot");
        }
    }
}

#[test]
fn sleeper_in_empty_set_wakes_for_bytes_already_in_ring() {
    for flags in [0, ET, ONESHOT, EXCLUSIVE] {
        let (set, pair) = (Set::new(), up());
        send(pair.a, b"x").unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| set.wait());
            while_they_fall_asleep();
            set.add(pair.b, IN | flags, 5);
            assert_eq!(waiter.join().unwrap(), [(IN, 5)]);
        });
    }
}

#[test]
fn wait_without_patience_in_empty_set_returns_no_tag() {
    let (set, pair) = (Set::new(), candidates());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                assert!(set.now().iter().all(|event| event.1 == 7));
            }
        });
        for _ in 0..2000 {
            set.add(pair.b, OUT | ONESHOT, 7);
            set.take_out(pair.b).unwrap();
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn sleeper_is_woken_by_oneshot_that_is_armed_again() {
    for pair in [candidates(), up()] {
        let set = Set::new();
        set.add(pair.b, IN | ONESHOT, 1);
        send(pair.a, b"x").unwrap();
        assert_eq!(set.wait(), [(IN, 1)]);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| set.wait());
            while_they_fall_asleep();
            set.change(pair.b, IN | ONESHOT, 2);
            assert_eq!(waiter.join().unwrap(), [(IN, 2)]);
        });
    }
}

#[test]
fn registration_changed_to_oneshot_is_reported_once() {
    for rounds in 0..200 {
        let (set, pair) = (Set::new(), candidates());
        set.add(pair.b, IN, 1);
        send(pair.a, b"x").unwrap();
        let told = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let ones = set.wait_for(4, rounds % 2).unwrap().iter().filter(|event| event.1 == 2).count();
                        told.fetch_add(ones as u32, Ordering::Relaxed);
                    }
                });
            }
            set.change(pair.b, IN | ONESHOT, 2);
        });
        told.fetch_add(set.now().len() as u32, Ordering::Relaxed);
        assert_eq!(told.into_inner(), 1);
    }
}

/// A connection that comes to the place of one that had a ring must not be taken for it: looking at it wrote to a page that was not
/// writable any more.
#[test]
fn oneshot_without_ring_at_place_of_earlier_ring_is_harmless() {
    for _ in 0..80 {
        drop(up());
    }
    for _ in 0..80 {
        let (set, pair) = (Set::new(), candidates());
        set.add(pair.a, IN | ONESHOT, 1);
        set.add(pair.b, IN | ONESHOT, 2);
        assert_eq!(set.wait_for(4, 1).unwrap(), []);
    }
}

/// A registration as the tests below change it.
#[derive(Debug, Clone, Copy)]
struct Mode {
    flags: u32,
    data: u64,
}

fn xorshift(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

const STOP: u64 = u64::MAX;

/// Several threads wait in one set while another one adds, changes and removes at random, and a third writes. All bytes are read,
/// although the threads read a connection only after an event, and every event has data of the program. The same runs with connections
/// that stay on TCP: the kernel promises as much.
fn assert_all_bytes_are_reported(seed: u64, pairs: &[Pair], bring_up: bool, rounds: u32) {
    const MODES: [u32; 6] = [0, ET, ONESHOT, ONESHOT | ET, EXCLUSIVE, EXCLUSIVE | ET];
    let set = Set::new();
    let modes: Vec<Mutex<Mode>> = (0..pairs.len())
        .map(|at| {
            let mode = Mode { flags: MODES[(seed as usize + at) % MODES.len()], data: at as u64 };
            set.add(pairs[at].b, IN | mode.flags, mode.data);
            Mutex::new(mode)
        })
        .collect();
    let stop = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    set.add(std::os::fd::AsRawFd::as_raw_fd(&stop), IN, STOP);
    let read = AtomicU32::new(0);
    let over = AtomicBool::new(false);
    let waiter = || {
        loop {
            for (events, data) in set.wait_for(2, LONG).unwrap() {
                if data == STOP {
                    return;
                }
                assert!((data as usize % 1000) < pairs.len(), "{data:#x} is no number of the program");
                assert_ne!(events & IN, 0);
                let at = data as usize % 1000;
                read.fetch_add(drain(pairs[at].b) as u32, Ordering::SeqCst);
                let mode = modes[at].lock().unwrap();
                if mode.flags & ONESHOT != 0 {
                    set.change(pairs[at].b, IN | mode.flags, mode.data);
                }
            }
        }
    };
    let changer = || {
        let mut random = seed | 1;
        while !over.load(Ordering::Relaxed) {
            let n = xorshift(&mut random);
            let at = n as usize % pairs.len();
            let mut mode = modes[at].lock().unwrap();
            let before = *mode;
            *mode = Mode { flags: MODES[(n >> 16) as usize % MODES.len()], data: at as u64 + 1000 * (n >> 32 & 0xff) };
            if (before.flags | mode.flags) & EXCLUSIVE != 0 || n >> 48 & 1 != 0 {
                set.take_out(pairs[at].b).unwrap();
                set.add(pairs[at].b, IN | mode.flags, mode.data);
            } else {
                set.change(pairs[at].b, IN | mode.flags, mode.data);
            }
            drop(mode);
            match n >> 56 {
                0..100 => {}
                100..200 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(300)),
            }
        }
    };
    let mut hung = None;
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(waiter);
        }
        scope.spawn(changer);
        let mut written = 0;
        'rounds: for round in 0..rounds {
            if bring_up && (round as usize) < pairs.len() * 4 && round % 4 == 3 {
                pairs[round as usize / 4].bring_up();
            }
            for pair in pairs {
                written += send(pair.a, b"x").unwrap() as u32;
            }
            let since = Instant::now();
            while read.load(Ordering::SeqCst) != written {
                if since.elapsed() > HUNG {
                    hung = Some((round, written - read.load(Ordering::SeqCst)));
                    break 'rounds;
                }
                std::thread::yield_now();
            }
        }
        over.store(true, Ordering::Relaxed);
        rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
    });
    assert_eq!(hung, None, "seed {seed}: in this round, this many bytes were never reported");
}

#[test]
fn random_changes_lose_no_wakeup_on_tcp() {
    assert_all_bytes_are_reported(1, &[candidates(), candidates(), candidates()], false, 300);
}

#[test]
fn random_changes_lose_no_wakeup_on_rings() {
    for seed in 1..=3 {
        assert_all_bytes_are_reported(seed, &[up(), up(), up(), up()], false, 300);
    }
}

#[test]
fn random_changes_lose_no_wakeup_while_rings_come() {
    for seed in 4..=6 {
        let pairs: Vec<Pair> = (0..6).map(|_| candidates()).collect();
        assert_all_bytes_are_reported(seed, &pairs, true, 150);
    }
}
