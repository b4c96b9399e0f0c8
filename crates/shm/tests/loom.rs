//! The ring and the wake-up protocol under every interleaving, and every value that a weak memory may show.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --profile loom -p partywall-shm --test loom`
//!
//! - The ring's bytes are loom cells: a read or write that does not *happen after* what it must is reported as a race. That
//!   is the check of the edges named `EDGE` in `producer.rs` and `consumer.rs`.
//! - A doorbell is loom's `Notify`, which keeps one ring and may wake for no reason (protocol W5). A lost wake-up is a
//!   thread that never wakes, which loom reports as a deadlock.
//! - What arrives is compared with the oracle's stream.
//!
//! Loom knows neither compilers nor `membarrier`: the asymmetric light fence is a full one here (see `wake.rs`).
//! Where a scenario bounds preemptions, a switch away from a thread that could go on happens at most that many times in one run; switches
//! where a thread waits or ends are free. Scenarios without a bound are exhaustive.
#![cfg(loom)]

mod players;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use loom::sync::Notify;
use loom::sync::atomic::AtomicU8;
use loom::thread;
use partywall_shm::consumer::Consumer;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::half::{self, Effect, Fenced, Idle, Need, Rounds, SecondLook, SleepStep};
use partywall_shm::layout::{RxHalf, TxHalf};
use partywall_shm::oracle::{byte, expect_bytes};
use partywall_shm::producer::Producer;
use partywall_shm::state::RxState;
use partywall_shm::sync::{Ordering, fence};
use partywall_shm::wake::Fencing;
use players::{Channel, Reader, Writer};

const FENCING: Fencing = Fencing::Asymmetric;

/// Runs a scenario in every interleaving with at most `preemptions`, and says how many there were.
fn check(name: &str, preemptions: Option<usize>, scenario: impl Fn() + Send + Sync + 'static) {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.max_branches = 10_000;
    let began = std::time::Instant::now();
    model.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        scenario();
    });
    eprintln!("{name}: {} interleavings in {:.1?}", runs.load(Ordering::Relaxed), began.elapsed());
}

/// R1 to R5: bytes around a ring of four, with neither side ever waiting.
#[test]
fn loom_bytes_go_around_the_ring() {
    check("bytes", None, || {
        let channel = Channel::new(&[4]);
        let mut writer = Writer::new(&channel);
        let thread = thread::spawn(move || {
            for n in [3, 2, 3] {
                let now = writer.refresh().min(n);
                writer.commit(now);
            }
            writer.producer.tail()
        });
        let mut reader = Reader::new(&channel);
        for n in [2, 4] {
            let now = reader.refresh().min(n);
            reader.take(now);
        }
        let committed = thread.join().expect("the writer ends");
        while reader.refresh() > 0 {
            reader.take(1);
        }
        assert_eq!(reader.consumer.head(), committed);
    });
}

/// R2 alone: before it has its peer's half, a writer has no fence at all, so that nothing but the tail orders the bytes.
#[test]
fn loom_the_tail_alone_carries_the_bytes() {
    check("tail", None, || {
        let channel = Channel::new(&[4]);
        let mut writer = Writer::new(&channel);
        writer.attached = false;
        let thread = thread::spawn(move || {
            writer.commit(1);
            writer.commit(2);
        });
        let mut reader = Reader::new(&channel);
        for _ in 0..3 {
            let now = reader.refresh();
            reader.take(now);
        }
        thread.join().expect("the writer ends");
    });
}

/// W: the reader sleeps at every possible moment, until one byte is there, or until several are.
#[test]
fn loom_a_sleeping_reader_is_woken() {
    for want in [1, 2] {
        check("sleeping reader", None, move || {
            let channel = Channel::new(&[4]);
            let mut writer = Writer::new(&channel);
            let thread = thread::spawn(move || {
                writer.commit(1);
                writer.commit(1);
            });
            let mut reader = Reader::new(&channel);
            assert!(reader.wait(want));
            assert!(reader.consumer.available() >= want);
            thread.join().expect("the writer ends");
        });
    }
}

/// W: the writer sleeps at every possible moment, until one byte is free, or until several are.
#[test]
fn loom_a_sleeping_writer_is_woken() {
    for want in [1, 2] {
        check("sleeping writer", None, move || {
            let channel = Channel::new(&[4]);
            let mut writer = Writer::new(&channel);
            writer.commit(4);
            let mut reader = Reader::new(&channel);
            let thread = thread::spawn(move || {
                reader.refresh();
                reader.take(1);
                reader.take(1);
            });
            assert!(writer.write_all(want, want));
            thread.join().expect("the reader ends");
        });
    }
}

/// Both sleep and wake each other in turn: ten bytes through a ring of four, to the end of the stream.
#[test]
fn loom_a_stream_flows_to_its_end() {
    check("stream", Some(3), || {
        let channel = Channel::new(&[4]);
        let mut writer = Writer::new(&channel);
        let thread = thread::spawn(move || {
            assert!(writer.write_all(10, 3));
            writer.finish();
        });
        assert_eq!(Reader::new(&channel).read_to_end(4), 10);
        thread.join().expect("the writer ends");
    });
}

/// S1 to S3: *finished* is stored while the reader arms; it neither sleeps through it nor misses the last byte.
///
/// Also before the peer has attached: then no fence of the commit stands between the last byte and the state.
#[test]
fn loom_finish_while_the_reader_arms() {
    for attached in [true, false] {
        check("finish", None, move || {
            let channel = Channel::new(&[4]);
            let mut writer = Writer::new(&channel);
            writer.attached = attached;
            let thread = thread::spawn(move || {
                writer.commit(1);
                writer.finish();
            });
            assert_eq!(Reader::new(&channel).read_to_end(4), 1);
            thread.join().expect("the writer ends");
        });
    }
}

/// S4: the reader closes while the writer arms.
#[test]
fn loom_close_while_the_writer_arms() {
    check("close", None, || {
        let channel = Channel::new(&[4]);
        let mut writer = Writer::new(&channel);
        writer.commit(4);
        let mut reader = Reader::new(&channel);
        let thread = thread::spawn(move || {
            reader.refresh();
            reader.take(1);
            reader.close();
        });
        assert!(!writer.write_all(4, 2), "two bytes were never free");
        thread.join().expect("the reader ends");
    });
}

/// S5: bytes that are committed while the reader closes are not lost without *Reset*, unless the writer sees that it closes.
#[test]
fn loom_commit_while_the_reader_closes() {
    check("reset", None, || {
        let channel = Channel::new(&[4]);
        let mut writer = Writer::new(&channel);
        let thread = thread::spawn(move || {
            writer.commit(1);
            RxState::load(&writer.channel.rx.control.state).expect("the reader is honest")
        });
        let said = half::ReaderView { own: &channel.rx, peer: &channel.tx }.close();
        let seen = thread.join().expect("the writer ends");
        assert!(seen != RxState::Open || said == RxState::Reset, "{said:?} of a byte after which the reader was open");
    });
}

/// A2, A3: the ring is replaced between commits, by a smaller and by a larger one.
#[test]
fn loom_the_ring_changes_size_under_way() {
    for capacities in [[4, 8], [8, 4]] {
        check("switch", Some(3), move || {
            let channel = Channel::new(&capacities);
            let mut writer = Writer::new(&channel);
            let thread = thread::spawn(move || {
                writer.commit(2);
                writer.commit(1);
                writer.switch();
                writer.commit(1);
                assert!(writer.write_all(2, 2));
                writer.finish();
            });
            assert_eq!(Reader::new(&channel).read_to_end(2), 6);
            thread.join().expect("the writer ends");
        });
    }
}

/// A4: the ring is replaced whenever that is allowed: unused, first, and again as soon as it was read from.
#[test]
fn loom_the_ring_changes_size_again_and_again() {
    check("switches", Some(2), || {
        let channel = Channel::new(&[4, 4, 8, 4, 8]);
        let mut writer = Writer::new(&channel);
        let thread = thread::spawn(move || {
            writer.commit(1);
            writer.switch();
            // The reader cannot have read from that ring, so it may be dropped.
            writer.switch();
            for _ in 0..2 {
                assert!(writer.write_all(1, 1));
                writer.refresh();
                if writer.producer.may_switch() {
                    writer.switch();
                }
            }
            assert!(writer.write_all(1, 1));
            writer.finish();
        });
        assert_eq!(Reader::new(&channel).read_to_end(4), 4);
        thread.join().expect("the writer ends");
    });
}

/// A3: the reader has armed for more than the old ring will ever hold when the writer changes to another.
#[test]
fn loom_the_ring_changes_size_while_the_reader_arms() {
    check("switch while arming", Some(4), || {
        let channel = Channel::new(&[4, 8]);
        let mut writer = Writer::new(&channel);
        let thread = thread::spawn(move || {
            writer.commit(1);
            writer.switch();
            writer.commit(2);
        });
        let mut reader = Reader::new(&channel);
        while reader.consumer.head() < 3 {
            assert!(reader.wait(3 - reader.consumer.head()));
            let now = reader.consumer.available();
            reader.take(now);
        }
        thread.join().expect("the writer ends");
    });
}

/// A1: the connecting side writes, fills its ring and sleeps before its peer has attached; the peer may sleep already.
#[test]
fn loom_the_peer_attaches_at_any_moment() {
    check("attach", Some(3), || {
        let channel = Channel::new(&[4]);
        let mut writer = Writer::new(&channel);
        writer.attached = false;
        let thread = thread::spawn(move || {
            assert!(writer.write_all(6, 2));
            writer.finish();
        });
        let reader = Reader::new(&channel);
        channel.attach.store(true, Ordering::Release);
        channel.to_writer.notify();
        assert_eq!(reader.read_to_end(4), 6);
        thread.join().expect("the writer ends");
    });
}

/// B2: a publisher with a full ring waits for a reader that joined late and has not begun, and no byte that is unread is overwritten.
#[test]
fn loom_a_publisher_waits_for_a_reader_that_begins() {
    check("follower", Some(3), || {
        let channel = Channel::new(&[2]);
        let mut publisher = half::Broadcaster::new(2);
        // Sent before the reader joined.
        channel.rings[0].write(0, byte(0));
        publisher.commit(&channel.tx, 1, FENCING);
        let begins = publisher.tail();
        let mut follower = publisher.follower();
        let its_channel = channel.clone();
        let thread = thread::spawn(move || {
            let channel = its_channel;
            for _ in 0..3 {
                loop {
                    match follower.next(&channel.tx, Some(&channel.rx), false, Need::Room(1), Idle::Sleep) {
                        Effect::Ready => break,
                        Effect::Fence => fence(Ordering::SeqCst), // heavy
                        Effect::Sleep { .. } => channel.to_writer.wait(),
                        other => panic!("an honest peer gave {other:?}"),
                    }
                }
                publisher.announce(&channel.tx, 1);
                channel.rings[0].write(publisher.tail(), byte(publisher.tail()));
                publisher.commit(&channel.tx, 1, FENCING);
                if follower.follow(&channel.rx, 1) {
                    channel.to_reader.notify();
                }
            }
        });
        let mut reader = Reader::new(&channel);
        reader.consumer.start(&channel.rx, 2, begins);
        while reader.consumer.head() < 4 {
            assert!(reader.wait(1));
            reader.take(1);
        }
        thread.join().expect("the publisher ends");
    });
}

/// W1, for a word that two threads of one side share: whichever of them stores its wish last, each is woken when what it waits for is there.
/// One of them waits for two bytes, as a socket with `SO_RCVLOWAT` does.
#[test]
fn loom_two_sleepers_share_a_wish() {
    for wanted in [[1, 1], [1, 2]] {
        check("shared wish", Some(3), move || {
            let channel = Channel::new(&[4]);
            let bells = Arc::new([Notify::new(), Notify::new()]);
            let sleepers: Vec<_> = (0..2usize)
                .map(|which| {
                    let (channel, bells, wanted) = (channel.clone(), bells.clone(), wanted[which]);
                    thread::spawn(move || {
                        let view = half::ReaderView { own: &channel.rx, peer: &channel.tx };
                        let mut rounds = Rounds::new();
                        loop {
                            let look = Fenced::after(view.arm()).look(|| (view.unread(4) >= wanted).then_some(()));
                            let SecondLook::Nothing(quiet) = look else { return };
                            match rounds.next(quiet, |wish| view.is_armed(wish)) {
                                SleepStep::ArmAgain => {}
                                SleepStep::Sleep(None) => bells[which].wait(),
                                SleepStep::Sleep(Some(_)) => thread::yield_now(),
                            }
                        }
                    })
                })
                .collect();
            let mut writer = half::WritingHalf::new(4);
            for _ in 0..*wanted.iter().max().expect("two") {
                if writer.commit(&channel.tx, Some(&channel.rx), 1, FENCING) {
                    // One link, whose bell all who sleep on it hear.
                    bells.iter().for_each(Notify::notify);
                }
            }
            for sleeper in sleepers {
                sleeper.join().expect("it is woken");
            }
        });
    }
}

/// W1, for room: one thread sleeps until there is some, while another uses up what comes.
#[test]
fn loom_a_sleeper_for_room_beside_a_writer() {
    check("shared room", Some(3), || {
        let channel = Channel::new(&[2]);
        let mut writer = half::WritingHalf::new(2);
        writer.commit(&channel.tx, Some(&channel.rx), 2, FENCING);
        let its_channel = channel.clone();
        let sleeper = thread::spawn(move || {
            let view = half::WriterView { own: &its_channel.tx, peer: &its_channel.rx };
            let mut rounds = Rounds::new();
            loop {
                let look = Fenced::after(view.arm(2, 2)).look(|| (view.unread(2) == 0).then_some(()));
                let SecondLook::Nothing(quiet) = look else { return };
                match rounds.next(quiet, |awaited| view.is_armed(awaited)) {
                    SleepStep::ArmAgain => {}
                    SleepStep::Sleep(None) => its_channel.to_writer.wait(),
                    SleepStep::Sleep(Some(_)) => thread::yield_now(),
                }
            }
        });
        let its_channel = channel.clone();
        let reader = thread::spawn(move || {
            let (channel, mut reader) = (its_channel, half::ReadingHalf::new(2, 0));
            while reader.head() < 3 {
                let n = reader.refresh(&channel.tx).expect("the peer is honest");
                if n == 0 {
                    thread::yield_now();
                } else if reader.release(&channel.rx, &channel.tx, n, FENCING) {
                    channel.to_writer.notify();
                }
            }
        });
        // A nonblocking call polls like this.
        while writer.refresh(&channel.rx).expect("the peer is honest") == 0 {
            thread::yield_now();
        }
        writer.commit(&channel.tx, Some(&channel.rx), 1, FENCING);
        reader.join().expect("the reader ends");
        sleeper.join().expect("it is woken");
    });
}

/// B3: a copy that a publisher may have overwritten is discarded, and a copy that is kept is sound.
///
/// The race is meant, so the bytes are atomics here, as they are for `shm::bytes`.
#[test]
fn loom_a_copy_that_was_overwritten_is_discarded() {
    const CAPACITY: u64 = 2;
    check("intent", None, || {
        let tx = Arc::new(TxHalf::new());
        let ring: Arc<[AtomicU8; CAPACITY as usize]> = Arc::new([AtomicU8::new(0), AtomicU8::new(0)]);
        let slot = |at: u64| (at % CAPACITY) as usize;
        let publish = move |publisher: &mut half::Broadcaster, tx: &TxHalf, ring: &[AtomicU8; 2], n: u64| {
            publisher.announce(tx, n);
            for at in publisher.tail()..publisher.tail() + n {
                ring[slot(at)].store(byte(at), Ordering::Relaxed);
            }
            publisher.commit(tx, n, FENCING);
        };
        let mut publisher = half::Broadcaster::new(CAPACITY);
        publish(&mut publisher, &tx, &ring, 2);
        let (its_tx, its_ring) = (tx.clone(), ring.clone());
        let thread = thread::spawn(move || {
            publish(&mut publisher, &its_tx, &its_ring, 1);
            publish(&mut publisher, &its_tx, &its_ring, 2);
        });
        // A subscriber that starts at 0, and one that finds a later tail.
        let mut head = 0;
        for _ in 0..2 {
            let tail = tx.cursor.tail.load(Ordering::Acquire);
            let copy: Vec<u8> =
                (head..tail.min(head + CAPACITY)).map(|at| ring[slot(at)].load(Ordering::Relaxed)).collect();
            fence(Ordering::SeqCst);
            if tx.control.intent.load(Ordering::Relaxed) <= head + CAPACITY {
                expect_bytes(head, &copy);
            }
            head = tail;
        }
        thread.join().expect("the publisher ends");
    });
}

/// B4: a reader that its publisher overruns takes only whole records, in order, never calls an honest publisher corrupt, and has the newest
/// one in the end.
#[test]
fn loom_an_overrun_reader_keeps_the_newest_record() {
    const CAPACITY: u64 = 2;
    const RECORDS: u64 = 5;
    check("overrun", Some(3), || {
        let tx = Arc::new(TxHalf::new());
        let ring: Arc<[AtomicU8; CAPACITY as usize]> = Arc::new([AtomicU8::new(0), AtomicU8::new(0)]);
        let (its_tx, its_ring) = (tx.clone(), ring.clone());
        let thread = thread::spawn(move || {
            let mut publisher = half::Broadcaster::new(CAPACITY);
            for at in 0..RECORDS {
                publisher.announce(&its_tx, 1);
                its_ring[(at % CAPACITY) as usize].store(byte(at), Ordering::Relaxed);
                publisher.commit(&its_tx, 1, FENCING);
            }
        });
        let (rx, mut reader) = (RxHalf::new(), Consumer::new(CAPACITY, 0).overrun());
        let read = |reader: &mut Consumer| {
            let from = reader.head();
            if reader.refresh(&tx).expect("the publisher is honest") == 0 {
                return None;
            }
            loop {
                let at = reader.head();
                let copy = ring[(at % CAPACITY) as usize].load(Ordering::Relaxed);
                if !reader.is_overwritten(&tx) {
                    expect_bytes(at, &[copy]);
                    assert!(at >= from);
                    reader.release(&rx, &tx, 1, FENCING);
                    return Some(at);
                }
                reader.recover(&tx).expect("the publisher is honest");
                assert!(reader.head() > at);
            }
        };
        let mut last = None;
        for _ in 0..2 {
            last = read(&mut reader).or(last);
        }
        reader.skip_to_newest(&tx).expect("the publisher is honest");
        thread.join().expect("the publisher ends");
        while let Some(at) = read(&mut reader) {
            assert!(last.is_none_or(|last| last < at));
            last = Some(at);
        }
        assert_eq!(last, Some(RECORDS - 1));
    });
}

/// R4, A3: an adversary changes its words between any two loads of one refresh. No claim exceeds the ring, none panics.
#[test]
fn loom_a_liar_in_the_middle_of_a_refresh() {
    check("lying writer", Some(4), || {
        let tx = Arc::new(TxHalf::new());
        let liar = tx.clone();
        let thread = thread::spawn(move || {
            liar.control.switch_at.store(3, Ordering::Relaxed);
            liar.cursor.tail.store(4, Ordering::Relaxed);
            liar.control.generation.store(1, Ordering::Relaxed);
            liar.cursor.tail.store(u64::MAX, Ordering::Relaxed);
            liar.control.switch_at.store(9, Ordering::Relaxed);
            liar.cursor.tail.store(2, Ordering::Relaxed);
            liar.control.generation.store(u32::MAX, Ordering::Relaxed);
        });
        let (rx, mut consumer) = (RxHalf::new(), Consumer::new(4, 0));
        for _ in 0..3 {
            let before = consumer.available();
            match consumer.refresh(&tx) {
                Ok(available) => assert!(available >= before && available == consumer.available()),
                Err(_) => assert_eq!(consumer.available(), before, "a lie is not believed"),
            }
            assert!(consumer.available() <= consumer.capacity());
            if consumer.must_switch() {
                consumer.switch(8);
                assert_eq!(consumer.available(), 0);
            }
            let n = consumer.available().min(1);
            consumer.release(&rx, &tx, n, FENCING);
        }
        thread.join().expect("the liar ends");
    });
    check("lying reader", Some(3), || {
        let rx = Arc::new(RxHalf::new());
        let liar = rx.clone();
        let thread = thread::spawn(move || {
            for head in [2, u64::MAX, 1, 0] {
                liar.cursor.head.store(head, Ordering::Relaxed);
                liar.control.data_wanted.store(head, Ordering::Relaxed);
            }
        });
        let (tx, mut producer) = (TxHalf::new(), Producer::new(4));
        producer.commit(&tx, None::<&RxHalf>, 4, FENCING);
        for _ in 0..3 {
            let before = producer.free();
            let refreshed = producer.refresh(&rx);
            assert!(refreshed != Err(Corrupt::BadSwitch) && producer.free() >= before && producer.free() <= 4);
            let n = producer.free().min(1);
            producer.commit(&tx, Some(&rx), n, FENCING);
        }
        thread.join().expect("the liar ends");
    });
}
