//! A back end that is killed, at any time: the next one goes on, no request is lost or
//! done twice in a way that a guest can see.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod disk_common;

use disk_common::random::{Random, noise};
use disk_common::{Disk, HANG, IN, MIB, OK, OUT};
use partywall_vhost::disk::control::{self, DiskControl, DiskReport};
use partywall_vhost::disk::driver::{DiskDriver, DiskDriverOptions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vm_memory::Bytes;

/// The program, killed with the test.
struct BackEnd(Child);

impl BackEnd {
    fn start(folder: &Path, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-blk"));
        command.arg("serve").arg(folder.join("image")).arg("--socket").arg(folder.join("socket")).args(more);
        let mut child = Self(command.env("RUST_LOG", "warn").stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("serving"), "{line}");
        child
    }

    fn terminate(&self) {
        let process = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn folder(size: u64) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::File::create(folder.path().join("image")).unwrap().set_len(size).unwrap();
    folder
}

fn report(folder: &Path) -> DiskReport {
    serde_json::from_value(control::ask(&folder.join("socket"), &DiskControl::Show).unwrap()).unwrap()
}

#[test]
fn requests_in_flight_of_a_killed_back_end_are_done_by_the_next() {
    let folder = folder(MIB);
    let socket = folder.path().join("socket");
    // All requests are taken and still under way when it is killed.
    let first = BackEnd::start(folder.path(), &["--inject-delay", "600000"]);
    let mut driver = DiskDriver::connect(&socket, DiskDriverOptions::default()).unwrap();
    for n in 0..20_u64 {
        let place = driver.take_place(0).unwrap();
        driver.memory().write_slice(&noise(n, 4096), driver.data(0, place)).unwrap();
        driver.offer(0, place, OUT, 8 * n, 4096, true).unwrap();
    }
    driver.kick(0).unwrap();
    let deadline = Instant::now() + HANG;
    while report(folder.path()).under_way < 20 {
        assert!(Instant::now() < deadline);
    }
    assert!(report(folder.path()).recovers);
    // Some more, which it is too late for.
    first.kill();
    for n in 20..25_u64 {
        let place = driver.take_place(0).unwrap();
        driver.memory().write_slice(&noise(n, 4096), driver.data(0, place)).unwrap();
        driver.offer(0, place, OUT, 8 * n, 4096, true).unwrap();
    }
    let _second = BackEnd::start(folder.path(), &[]);
    driver.reconnect(&socket).unwrap();
    for _ in 0..25 {
        assert_eq!(driver.wait(0, Duration::ZERO, HANG).unwrap().expect("a request was lost").status, OK);
    }
    assert_eq!(driver.reply(0).unwrap(), None, "a request was done twice");
    for n in 0..25 {
        assert_eq!(driver.run(IN, 8 * n, &[], 4096).unwrap(), (OK, noise(n, 4096)));
    }
    let counters = report(folder.path()).counters;
    assert_eq!((counters.recovered, counters.writes), (20, 25));
}

/// A back end that was asked to end, and has requests under way for some time.
fn ending(folder: &Path) -> (BackEnd, DiskDriver) {
    let back_end = BackEnd::start(folder, &["--read-only", "--inject-delay", "3000"]);
    let mut driver = DiskDriver::connect(&folder.join("socket"), DiskDriverOptions::default()).unwrap();
    let place = driver.take_place(0).unwrap();
    driver.offer(0, place, IN, 0, 4096, false).unwrap();
    driver.kick(0).unwrap();
    let deadline = Instant::now() + HANG;
    let is_taken = |report: DiskReport| report.under_way + report.counters.reads > 0;
    while !is_taken(report(folder)) {
        assert!(Instant::now() < deadline);
    }
    back_end.terminate();
    (back_end, driver)
}

#[test]
fn back_end_that_waits_for_the_disk_ends_at_a_signal() {
    let folder = folder(MIB);
    let first = BackEnd::start(folder.path(), &[]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-blk"));
    command.arg("serve").arg(folder.path().join("image")).arg("--socket").arg(folder.path().join("second"));
    let output =
        command.env_remove("RUST_LOG").env_remove("JOURNAL_STREAM").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut second = BackEnd(output.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(second.0.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("waiting until another process has unlocked"), "{line}");
    // Standard error is a pipe.
    assert!(line.starts_with("20") && !line.contains('\x1b'), "the time, and no colours: {line:?}");
    second.terminate();
    assert!(second.0.wait().unwrap().success());
    let mut said = String::new();
    second.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "", "it has served nothing");
    first.kill();
}

#[test]
fn control_socket_of_an_ending_back_end_goes_last() {
    let folder = folder(MIB);
    let socket = folder.path().join("socket");
    let (_ending, mut driver) = ending(folder.path());
    let deadline = Instant::now() + HANG;
    while control::path(&socket).exists() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!socket.exists(), "the next back end is started while this one is there");
    assert_eq!(driver.reply(0).unwrap().expect("its request was not finished").status, OK);
}

#[test]
fn ending_back_end_leaves_the_sockets_of_the_next() {
    let folder = folder(MIB);
    let socket = folder.path().join("socket");
    let (mut first, driver) = ending(folder.path());
    let _second = BackEnd::start(folder.path(), &["--read-only"]);
    assert!(first.0.wait().unwrap().success());
    drop(driver);
    let mut driver = DiskDriver::connect(&socket, DiskDriverOptions::default()).unwrap();
    assert_eq!(driver.run(IN, 0, &[], 4096).unwrap(), (OK, vec![0; 4096]));
    assert!(report(folder.path()).occupied);
}

#[test]
fn back_ends_killed_under_load_lose_and_repeat_nothing() {
    const PLACES: usize = 64;
    let folder = folder(16 * MIB);
    let socket = folder.path().join("socket");
    let options = DiskDriverOptions { queues: 2, depth: 32, ..DiskDriverOptions::default() };
    let mut back_end = Some(BackEnd::start(folder.path(), &[]));
    let mut driver = DiskDriver::connect(&socket, options).unwrap();
    let mut random = Random(0xfeed_f00d_1357_9bdf);
    // Each place writes its own part of the disk, with a number that only grows, and reads it back.
    let mut model = vec![0_u64; PLACES];
    let mut reads = [false; PLACES];
    let (mut done, mut recovered) = (0_u64, 0);
    for kills in 0..6 {
        let end = done + 300 + random.below(700);
        loop {
            let mut idle = true;
            for queue in 0..2 {
                while done < end
                    && let Some(place) = driver.take_place(queue)
                {
                    let slot = queue * 32 + usize::from(place);
                    reads[slot] = random.below(3) == 0;
                    if !reads[slot] {
                        model[slot] += 1;
                        let content = noise(model[slot] * 64 + slot as u64, 1024);
                        driver.memory().write_slice(&content, driver.data(queue, place)).unwrap();
                    }
                    let kind = if reads[slot] { IN } else { OUT };
                    driver.offer(queue, place, kind, slot as u64 * 16, 1024, !reads[slot]).unwrap();
                }
                driver.kick(queue).unwrap();
                while let Some(reply) = driver.reply(queue).unwrap() {
                    assert_eq!(reply.status, OK);
                    let slot = queue * 32 + usize::from(reply.place);
                    if reads[slot] {
                        let mut got = vec![0; 1024];
                        driver.memory().read_slice(&mut got, driver.data(queue, reply.place)).unwrap();
                        let wanted =
                            if model[slot] == 0 { vec![0; 1024] } else { noise(model[slot] * 64 + slot as u64, 1024) };
                        assert!(got == wanted, "an old content of slot {slot}, after {kills} kills");
                    }
                    done += 1;
                    idle = false;
                }
            }
            if done >= end {
                break;
            }
            if idle {
                std::thread::yield_now();
            }
        }
        // Many are offered or in flight now.
        if kills % 3 == 0 {
            recovered += report(folder.path()).counters.recovered;
        }
        back_end.take().unwrap().kill();
        back_end = Some(BackEnd::start(folder.path(), &[]));
        driver.reconnect(&socket).unwrap();
    }
    for queue in 0..2 {
        let mut free = 0;
        while driver.take_place(queue).is_some() {
            free += 1;
        }
        for _ in free..32 {
            assert_eq!(driver.wait(queue, Duration::ZERO, HANG).unwrap().expect("a request was lost").status, OK);
        }
        assert_eq!(driver.reply(queue).unwrap(), None, "a request was done twice");
    }
    let image = std::fs::File::open(folder.path().join("image")).unwrap();
    for (slot, version) in model.iter().enumerate().filter(|(_, version)| **version > 0) {
        let mut stored = vec![0; 1024];
        image.read_exact_at(&mut stored, slot as u64 * 8192).unwrap();
        assert!(stored == noise(version * 64 + slot as u64, 1024), "slot {slot}");
    }
    println!("{done} requests, {recovered} of them recovered in the rounds that were counted");
}

#[test]
fn front_end_that_leaves_under_load_finds_its_requests_again() {
    let disk = Disk::new(MIB, |options| options.faults.delay = Duration::from_millis(300));
    let mut driver = disk.driver();
    let wait_for_all = |driver: &mut DiskDriver| {
        for _ in 0..8 {
            assert_eq!(driver.wait(0, Duration::ZERO, HANG).unwrap().expect("a request was lost").status, OK);
        }
        assert_eq!(driver.reply(0).unwrap(), None);
    };
    let deadline = Instant::now() + HANG;
    let mut writes = 0;
    loop {
        for n in 0..8_u64 {
            let place = driver.take_place(0).unwrap();
            driver.memory().write_slice(&noise(n, 4096), driver.data(0, place)).unwrap();
            driver.offer(0, place, OUT, 8 * n, 4096, true).unwrap();
        }
        driver.kick(0).unwrap();
        writes += 8;
        let taken = loop {
            let taken = disk.report();
            if taken.under_way > 0 || taken.counters.writes == writes {
                break taken;
            }
            assert!(Instant::now() < deadline);
        };
        if taken.under_way > 0 {
            break;
        }
        // A loaded machine has stopped this thread for longer than the delay, so all are done. They are offered again.
        wait_for_all(&mut driver);
    }
    driver.reconnect(&disk.socket()).unwrap();
    wait_for_all(&mut driver);
    assert_eq!(disk.wait_counters(|_| true).writes, writes);
}
