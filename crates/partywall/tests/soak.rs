//! The long test: checked transfers of random sizes with pauses, rings of all kinds, and kills of peers and of the broker.
//!
//! `make soak` runs it; `PARTYWALL_SOAK_SECONDS` says for how long (60). It ends with what it has done and with what is left
//! over, which must be nothing. `PARTYWALL_SOAK_SEED` repeats the dice of an earlier run.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{self, Daemon, Process, alone, assert_nothing_left, child, footprint};
use common::*;
use partywall::{Domain, Error, Listener, Options, Stream};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

#[derive(Default)]
struct Done {
    bytes: AtomicU64,
    transfers: AtomicU64,
    kills: AtomicU64,
    restarts: AtomicU64,
    longest_us: AtomicU64,
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

fn options(dice: &mut Dice) -> Options {
    let initial = 4096 << dice.below(6);
    let options = match dice.below(3) {
        0 => fixed(initial),
        1 => adaptive(initial, initial << dice.below(8)),
        _ => Options::default(),
    };
    options.spin(Duration::from_micros([0, 20, 100][dice.below(3) as usize]))
}

#[test]
#[ignore = "long; run by make soak"]
fn soak() {
    alone("soak", || {
        let seconds = variable("PARTYWALL_SOAK_SECONDS").unwrap_or(60);
        let seed = variable("PARTYWALL_SOAK_SEED").unwrap_or_else(|| u64::from(std::process::id()));
        eprintln!("soak: {seconds} s, PARTYWALL_SOAK_SEED={seed}");
        let _guard = hang_guard_of(Duration::from_secs(seconds) + 2 * HANG);
        let end = Instant::now() + Duration::from_secs(seconds);
        let (mut daemon, done) = (Daemon::start(), Done::default());
        let join = |name: &str| Domain::builder().name(name).broker(daemon.path()).join().unwrap();
        let (web, shop) = (join("web"), join("shop"));
        let before = {
            let mut listener = web.bind("first").unwrap();
            let there = shop.connect("web:first").unwrap();
            drop((listener.accept().unwrap(), there));
            drop(listener);
            eventually("a quiet beginning", || web.channels().unwrap().is_empty());
            footprint()
        };
        thread::scope(|s| {
            for number in 0..3 {
                let (web, shop, done) = (&web, &shop, &done);
                s.spawn(move || transfers(web, shop, number, Dice::new(seed + number), end, done));
            }
            let (path, web, done_kills) = (daemon.path(), &web, &done);
            s.spawn(move || kills(web, &path, Dice::new(seed + 100), end, done_kills));
            let mut dice = Dice::new(seed + 200);
            while Instant::now() < end {
                thread::sleep(Duration::from_millis(500 + dice.below(3000)));
                daemon.kill();
                thread::sleep(Duration::from_millis(dice.below(200)));
                daemon.restart();
                done.restarts.fetch_add(1, Relaxed);
            }
        });
        eventually("the broker knows of no channel", || web.channels().is_ok_and(|rows| rows.is_empty()));
        eventually("of no domain of the dead", || web.domains().is_ok_and(|rows| rows.len() == 2));
        assert_nothing_left(before);
        eprintln!(
            "soak: {} MiB in {} transfers, {} peers killed (at most {:?} until dead), {} restarts of the broker; nothing left",
            done.bytes.load(Relaxed) >> 20,
            done.transfers.load(Relaxed),
            done.kills.load(Relaxed),
            Duration::from_micros(done.longest_us.load(Relaxed)),
            done.restarts.load(Relaxed),
        );
        assert!(done.transfers.load(Relaxed) > 0 && done.kills.load(Relaxed) > 0 && done.restarts.load(Relaxed) > 0);
    });
}

/// Connects, whatever the broker is doing, and accepts the same connection.
fn connect(domain: &Domain, target: &str, listener: &mut Listener, options: &Options) -> (Stream, Stream) {
    let mut there = None;
    let mut here = None;
    listener.set_nonblocking(true);
    eventually("a connection", || {
        if there.is_none() {
            there = domain.connect_with(target, options).ok();
        }
        here = listener.accept().ok();
        // A connection that ended with the broker has to be made again.
        if here.is_none() && there.as_mut().is_some_and(|s: &mut Stream| s.writer().unwrap().write(&[]).is_err()) {
            there = None;
        }
        here.is_some() && there.is_some()
    });
    (there.unwrap(), here.unwrap().0)
}

/// Transfers within this process, one after the other.
fn transfers(web: &Domain, shop: &Domain, number: u64, mut dice: Dice, end: Instant, done: &Done) {
    let service = format!("transfer{number}");
    while Instant::now() < end {
        let mut listener = None;
        let accepting = options(&mut dice);
        eventually("a service", || {
            listener = web.bind_with(&service, &accepting).ok();
            listener.is_some()
        });
        let mut listener = listener.unwrap();
        let (mut there, mut here) = connect(shop, &format!("web:{service}"), &mut listener, &options(&mut dice));
        let total = dice.size(25) as u64;
        let (mut writes, mut reads) = (dice.clone(), Dice::new(dice.next()));
        let (bits, pauses) = (8 + dice.below(10) as u32, dice.one_in(3));
        thread::scope(|s| {
            s.spawn(move || {
                let writer = there.writer().unwrap();
                let mut at = 0;
                while at < total {
                    let n = (writes.size(bits) as u64).min(total - at);
                    if writes.one_in(4) && n <= 4096 {
                        let mut span = writer.reserve(n as usize).unwrap();
                        Pattern.fill(at, &mut span);
                        span.commit(n as usize);
                    } else {
                        writer.write_all(&Pattern.bytes(at, n as usize)).unwrap();
                    }
                    at += n;
                    if writes.one_in(500) {
                        writer.trim().unwrap();
                    }
                    if pauses && writes.one_in(100) {
                        thread::sleep(Duration::from_micros(writes.below(3000)));
                    }
                }
                writer.finish();
                // Everything is heard back as a number.
                let mut heard = [0; 8];
                there.read_exact(&mut heard).unwrap();
                assert_eq!(u64::from_le_bytes(heard), total);
            });
            let received = Pattern.receive(here.reader().unwrap(), || reads.size(bits));
            assert_eq!(received, total);
            here.write_all(&received.to_le_bytes()).unwrap();
            here.shutdown(Shutdown::Write).unwrap();
        });
        done.bytes.fetch_add(total, Relaxed);
        done.transfers.fetch_add(1, Relaxed);
    }
}

/// Kills peers that write.
fn kills(web: &Domain, broker: &std::path::Path, mut dice: Dice, end: Instant, done: &Done) {
    while Instant::now() < end {
        let service = format!("death{}", dice.below(1000));
        let Ok(mut listener) = web.bind_with(&service, &options(&mut dice)) else { continue };
        listener.set_nonblocking(true);
        let mut process: Process = child(&service, broker);
        let mut accepted = None;
        eventually("it connects", || {
            accepted = listener.accept().ok();
            accepted.is_some()
        });
        let mut stream = accepted.unwrap().0;
        let killer = dice.below(200_000);
        thread::scope(|s| {
            let reader = s.spawn(|| {
                let (mut at, mut buf) = (0, vec![0; 30_000]);
                loop {
                    match stream.read(&mut buf) {
                        Ok(0) => panic!("an orderly end of one that was killed"),
                        Ok(n) => {
                            Pattern.check(at, &buf[..n]);
                            at += n as u64;
                        }
                        Err(e) => {
                            assert!(matches!(cause(&e), Error::Dead { .. }), "{e:?}");
                            return (at, Instant::now());
                        }
                    }
                }
            });
            thread::sleep(Duration::from_micros(killer));
            let killed = process.kill();
            let (bytes, dead) = reader.join().unwrap();
            done.bytes.fetch_add(bytes, Relaxed);
            done.longest_us.fetch_max((dead - killed).as_micros() as u64, Relaxed);
        });
        done.kills.fetch_add(1, Relaxed);
    }
}

/// Not a separate test: the process that is killed.
#[test]
fn child_main() {
    let Some((service, broker)) = process::role() else { return };
    let mut dice = Dice::new(u64::from(std::process::id()));
    let mut stream = None;
    eventually("a broker", || {
        let domain = Domain::builder().name("doomed").broker(&broker).join();
        stream = domain.and_then(|d| d.connect_with(&format!("web:{service}"), &options(&mut dice))).ok();
        stream.is_some()
    });
    let mut stream = stream.unwrap();
    Pattern.send(&mut stream, u64::MAX, || dice.size(15));
}
