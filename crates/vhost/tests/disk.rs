//! A disk with a driver on it, no machine around them: what is read is what was written, whatever was negotiated.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod disk_common;

use disk_common::random::{Random, noise};
use disk_common::{DISCARD, Disk, FLUSH, GET_ID, HANG, IN, IOERR, MIB, OK, OUT, UNSUPP, WRITE_ZEROES, range};
use partywall_vhost::disk::DiskCounters;
use partywall_vhost::disk::control::{DiskControl, DiskReport};
use partywall_vhost::disk::driver::DiskDriverOptions;
use partywall_vhost::disk::load::{DiskLoad, LoadGenerator};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vm_memory::Bytes;

const FLUSH_BIT: u64 = 1 << 9;

#[test]
fn sectors_are_read_as_they_were_written_and_reach_the_file() {
    let disk = Disk::new(8 * MIB, |_| {});
    let mut driver = disk.driver();
    assert_eq!(driver.sectors().unwrap(), 8 * MIB / 512);
    for (seed, sector, length) in [(1, 0, 512), (2, 7, 4096), (3, 16_256, 65_536), (4, 16_383, 512)] {
        let sent = noise(seed, length);
        assert_eq!(driver.run(OUT, sector, &sent, 0).unwrap().0, OK);
        assert_eq!(driver.run(IN, sector, &[], length as u32).unwrap(), (OK, sent.clone()));
        let mut stored = vec![0; length];
        std::fs::File::open(disk.image()).unwrap().read_exact_at(&mut stored, 512 * sector).unwrap();
        assert!(stored == sent, "sector {sector}");
    }
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    let (status, serial) = driver.run(GET_ID, 0, &[], 20).unwrap();
    assert_eq!((status, &serial[..6]), (OK, &b"image\0"[..]));
    let counters = disk.counters();
    assert_eq!((counters.reads, counters.writes, counters.flushes, counters.failed), (4, 4, 1, 0));
}

#[test]
fn wait_for_any_queue_returns_request_and_its_queue() {
    let disk = Disk::new(8 * MIB, |_| {});
    let mut driver = disk.driver_with(DiskDriverOptions { queues: 3, ..DiskDriverOptions::default() });
    for queue in [2, 0, 1] {
        let place = driver.take_place(queue).unwrap();
        driver.offer(queue, place, IN, 0, 512, false).unwrap();
        driver.kick(queue).unwrap();
        let (of, reply) = driver.wait_any(Duration::ZERO, HANG).unwrap().unwrap();
        assert_eq!((of, reply.place, reply.status), (queue, place, OK));
    }
    assert_eq!(driver.wait_any(Duration::ZERO, Duration::ZERO).unwrap(), None);
}

#[test]
fn load_fills_each_of_its_queues() {
    let disk = Disk::new(8 * MIB, |_| {});
    let mut generator = LoadGenerator::connect(&disk.socket(), 3, 4096, 4).unwrap();
    // It ends after its first look, so each queue is filled once.
    let load = DiskLoad { writes: false, bytes: 4096, depth: 4, measured: Duration::ZERO, spin: Duration::ZERO };
    assert_eq!(generator.run(load).unwrap().requests, 12);
    assert_eq!(disk.counters().reads, 12);
}

/// Random requests beside a plain file: all queues, many in flight, none of them overlapping another.
fn oracle(disk: &Disk, block: u64, rounds: u64) {
    let options = DiskDriverOptions { queues: 3, depth: 16, ..DiskDriverOptions::default() };
    let mut driver = disk.driver_with(options);
    let sectors = driver.sectors().unwrap();
    let mut model = std::fs::read(disk.image()).unwrap();
    let mut random = Random(0x1234_5678_9abc_def1 ^ block);
    // Each place has its own part of the disk, so that requests in flight do not overlap.
    let part = sectors / 48;
    let mut expected = vec![None; 48];
    let mut done = 0;
    let mut in_flight = [0; 3];
    while done < rounds || in_flight != [0; 3] {
        for (queue, in_flight) in in_flight.iter_mut().enumerate() {
            while done < rounds
                && let Some(place) = driver.take_place(queue)
            {
                *in_flight += 1;
                let slot = queue * 16 + usize::from(place);
                let count = (1 + random.below(16)) * block / 512;
                let sector = slot as u64 * part + random.below((part - count) / (block / 512)) * (block / 512);
                let (from, length) = ((sector * 512) as usize, (count * 512) as usize);
                let area = &mut model[from..from + length];
                let at = driver.data(queue, place);
                let kind = random.below(12);
                let (kind, data) = match kind {
                    0..5 => (IN, vec![]),
                    5..10 => (OUT, noise(random.next(), length)),
                    10 => (WRITE_ZEROES, range(sector, count as u32, random.below(2) as u32)),
                    _ => (FLUSH, vec![]),
                };
                match kind {
                    OUT => area.copy_from_slice(&data),
                    WRITE_ZEROES => area.fill(0),
                    _ => {}
                }
                expected[slot] = (kind == IN).then(|| area.to_vec());
                driver.memory().write_slice(&data, at).unwrap();
                let length = match kind {
                    IN => length,
                    _ => data.len(),
                };
                driver.offer(queue, place, kind, sector, length as u32, !data.is_empty()).unwrap();
            }
            if *in_flight == 0 {
                continue;
            }
            driver.kick(queue).unwrap();
            let reply = driver.wait(queue, Duration::ZERO, HANG).unwrap().expect("no answer");
            let mut reply = Some(reply);
            while let Some(one) = reply {
                assert_eq!(one.status, OK);
                let slot = queue * 16 + usize::from(one.place);
                if let Some(wanted) = expected[slot].take() {
                    let mut got = vec![0; wanted.len()];
                    driver.memory().read_slice(&mut got, driver.data(queue, one.place)).unwrap();
                    assert!(got == wanted, "another content than was written, slot {slot}");
                    assert_eq!(one.written as usize, wanted.len() + 1);
                }
                done += 1;
                *in_flight -= 1;
                reply = driver.reply(queue).unwrap();
            }
        }
    }
    assert!(std::fs::read(disk.image()).unwrap() == model, "the file has another content than was written");
}

#[test]
fn random_requests_agree_with_a_plain_file() {
    oracle(&Disk::new(6 * MIB, |options| options.queues = 3), 512, 3000);
}

#[test]
fn unbuffered_random_requests_agree_with_plain_file() {
    // Not every file system has unbuffered access.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::File::create(folder.path().join("image")).unwrap().set_len(6 * MIB).unwrap();
    let disk = Disk::on(folder, |options| (options.queues, options.direct) = (3, true));
    oracle(&disk, 4096, 1500);
    assert_eq!(disk.counters().copied_bytes, 0, "the kernel reads and writes the machine's memory");
    let mut driver = disk.driver();
    // Buffers and sectors that unbuffered access cannot take.
    for (seed, sector, skip) in [(1, 3, 0), (2, 8, 1), (3, 11, 511)] {
        let sent = noise(seed, 1536);
        let place = driver.take_place(0).unwrap();
        let at = driver.data(0, place).0 + skip;
        driver.memory().write_slice(&sent, vm_memory::GuestAddress(at)).unwrap();
        for (kind, writes) in [(OUT, true), (IN, false)] {
            let memory = driver.memory().clone();
            let header = driver.header(0, place);
            memory.write_obj(kind, header).unwrap();
            memory.write_obj(sector as u64, vm_memory::GuestAddress(header.0 + 8)).unwrap();
            let first = 3 * place;
            let ring = &mut driver.rings[0];
            ring.describe(&memory, first, header.0, 16, 1, first + 1).unwrap();
            ring.describe(&memory, first + 1, at, 1536, 1 | if writes { 0 } else { 2 }, first + 2).unwrap();
            ring.describe(&memory, first + 2, header.0 + 16, 1, 2, 0).unwrap();
            ring.offer(&memory, first).unwrap();
            driver.kick(0).unwrap();
            assert_eq!(driver.wait(0, Duration::ZERO, HANG).unwrap().unwrap().status, OK);
            assert_eq!(driver.take_place(0), Some(place));
            if writes {
                memory.write_slice(&[0; 1536], vm_memory::GuestAddress(at)).unwrap();
            }
        }
        let mut got = vec![0; 1536];
        driver.memory().read_slice(&mut got, vm_memory::GuestAddress(at)).unwrap();
        assert!(got == sent, "sector {sector}, {skip} bytes into a block");
    }
    let DiskCounters { copied_read_bytes, copied_written_bytes, .. } = disk.counters();
    // Blocks of 512 bytes take the first of the three as it is.
    for copied in [copied_read_bytes, copied_written_bytes] {
        assert!([2 * 1536, 3 * 1536].contains(&copied), "{copied} bytes were copied");
    }
}

#[test]
fn discarded_sectors_are_given_back_and_zeroes_are_read() {
    let disk = Disk::new(4 * MIB, |_| {});
    let mut driver = disk.driver();
    for sector in (0..8192).step_by(128) {
        assert_eq!(driver.run(OUT, sector, &noise(sector, 65_536), 0).unwrap().0, OK);
    }
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    let blocks = || std::fs::metadata(disk.image()).unwrap().blocks();
    let before = blocks();
    assert_eq!(driver.run(DISCARD, 0, &range(0, 4096, 0), 0).unwrap().0, OK);
    assert!(blocks() < before, "nothing was given back");
    assert_eq!(driver.run(WRITE_ZEROES, 0, &range(4096, 128, 0), 0).unwrap().0, OK);
    assert_eq!(driver.run(WRITE_ZEROES, 0, &range(4224, 128, 1), 0).unwrap().0, OK);
    for sector in [0, 2048, 4096, 4224] {
        assert_eq!(driver.run(IN, sector, &[], 65_536).unwrap(), (OK, vec![0; 65_536]));
    }
    assert_eq!(driver.run(IN, 4352, &[], 65_536).unwrap(), (OK, noise(4352, 65_536)));
    let kept = Disk::new(MIB, |options| options.discard = false);
    assert_eq!(kept.driver().run(DISCARD, 0, &range(0, 8, 0), 0).unwrap().0, UNSUPP);
}

#[test]
fn read_only_disk_takes_no_writes() {
    let disk = Disk::new(MIB, |options| options.read_only = true);
    let mut driver = disk.driver();
    assert_ne!(driver.features() & (1 << 5), 0);
    assert_eq!(driver.run(OUT, 0, &[1; 512], 0).unwrap().0, IOERR);
    assert_eq!(driver.run(WRITE_ZEROES, 0, &range(0, 8, 0), 0).unwrap().0, IOERR);
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    assert_eq!(driver.run(IN, 0, &[], 512).unwrap(), (OK, vec![0; 512]));
}

#[test]
fn disk_that_grows_is_announced_and_its_new_sectors_are_served() {
    let disk = Disk::new(MIB, |_| {});
    let mut driver = disk.driver();
    assert_eq!(driver.run(IN, 2048, &[], 512).unwrap().0, IOERR);
    let size = disk.handle.ask(DiskControl::Resize { size: Some(2 * MIB) }).unwrap();
    assert_eq!(size, 2 * MIB);
    assert_eq!(driver.sectors().unwrap(), 4096);
    assert_eq!(driver.run(OUT, 4095, &[7; 512], 0).unwrap().0, OK);
    assert!(disk.handle.ask(DiskControl::Resize { size: Some(MIB) }).is_err(), "a disk that shrinks");
    // A file that others have made larger.
    std::fs::File::options().write(true).open(disk.image()).unwrap().set_len(3 * MIB + 100).unwrap();
    assert_eq!(disk.handle.ask(DiskControl::Resize { size: None }).unwrap(), 3 * MIB);
}

#[test]
fn errors_of_the_file_are_errors_of_the_guest_and_nothing_else() {
    let disk = Disk::new(MIB, |options| {
        options.faults.errors = vec!["write:8-15".parse().unwrap(), "flush".parse().unwrap()];
    });
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 4, &[1; 4096], 0).unwrap().0, IOERR);
    assert_eq!(driver.run(OUT, 16, &[1; 4096], 0).unwrap().0, OK);
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, IOERR);
    // A file that others have cut off.
    std::fs::File::options().write(true).open(disk.image()).unwrap().set_len(MIB / 2).unwrap();
    assert_eq!(driver.run(IN, 2000, &[], 512).unwrap().0, IOERR);
    assert_eq!(driver.run(IN, 16, &[], 4096).unwrap(), (OK, vec![1; 4096]));
    assert_eq!(disk.counters().failed, 3);
}

#[test]
fn driver_without_flush_gets_durable_writes() {
    let disk = Disk::new(MIB, |_| {});
    let mut driver = disk.driver_with(DiskDriverOptions { features: !FLUSH_BIT, ..DiskDriverOptions::default() });
    assert_eq!(driver.run(OUT, 0, &[3; 4096], 0).unwrap().0, OK);
    assert_eq!(driver.run(WRITE_ZEROES, 0, &range(0, 4, 1), 0).unwrap().0, OK);
    let always = Disk::new(MIB, |options| options.writethrough = true);
    let mut driver = always.driver();
    assert_eq!(driver.features() & FLUSH_BIT, 0, "a disk whose writes are all durable needs no flush");
    assert_eq!(driver.run(OUT, 0, &[3; 4096], 0).unwrap().0, OK);
}

#[test]
fn second_back_end_of_a_disk_waits_for_the_first() {
    let disk = Disk::new(MIB, |_| {});
    let (image, socket) = (disk.image(), disk.folder.path().join("second"));
    let second = std::thread::spawn(move || {
        let options = partywall_vhost::disk::DiskOptions::new(image);
        partywall_vhost::disk::engine::DiskEngine::new(options, &socket, None).map(drop)
    });
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 0, &[3; 4096], 0).unwrap().0, OK);
    assert!(!second.is_finished(), "two back ends have one disk");
    disk.handle.ask(DiskControl::Stop).unwrap();
    drop(driver);
    second.join().unwrap().unwrap();
}

#[test]
fn disk_of_a_machine_without_driver_is_occupied() {
    let disk = Disk::new(MIB, |_| {});
    let state = || {
        let shown = disk.handle.ask(DiskControl::Show).unwrap();
        let report: DiskReport = serde_json::from_value(shown).unwrap();
        (report.occupied, report.connected)
    };
    assert_eq!(state(), (false, false));
    let front_end = UnixStream::connect(disk.socket()).unwrap();
    for wanted in [true, false] {
        let deadline = Instant::now() + HANG;
        while state() != (wanted, false) {
            assert!(Instant::now() < deadline, "{:?}", state());
            std::thread::yield_now();
        }
        front_end.shutdown(std::net::Shutdown::Both).unwrap();
    }
}
