//! Guests and front ends that break the rules of a disk: requests that cannot be are failed, and the next one is served.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod disk_common;

use disk_common::random::{Random, noise};
use disk_common::{DISCARD, Disk, FLUSH, GET_ID, HANG, IN, IOERR, MIB, OK, OUT, UNSUPP, WRITE_ZEROES, offer_at, range};
use partywall_vhost::disk::driver::{DiskDriver, DiskDriverOptions};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::{Bytes, GuestAddress};

const NEXT: u32 = 1;
const WRITE: u32 = 2;
const INDIRECT: u32 = 4;
const SECTORS: u64 = MIB / 512;

fn is_well(disk: &Disk) {
    let mut driver = connect(disk);
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, OK);
    assert_eq!(driver.run(IN, 0, &[], 4096).unwrap(), (OK, noise(1, 4096)));
}

/// Connects once the disk has noticed that the front end before has gone.
fn connect(disk: &Disk) -> DiskDriver {
    let deadline = std::time::Instant::now() + HANG;
    loop {
        match DiskDriver::connect(&disk.socket(), DiskDriverOptions::default()) {
            Ok(driver) => return driver,
            Err(e) => assert!(std::time::Instant::now() < deadline, "{e}"),
        }
    }
}

#[test]
fn requests_that_cannot_be_are_failed_and_the_next_is_served() {
    let disk = Disk::new(MIB, |_| {});
    std::fs::write(disk.image(), noise(9, MIB as usize)).unwrap();
    let mut driver = disk.driver();
    // Its kind, sector, data and wanted bytes, and its status.
    type Impossible = (&'static str, u32, u64, Vec<u8>, u32, u8);
    let cases: &[Impossible] = &[
        ("a read beyond the end", IN, SECTORS, vec![], 512, IOERR),
        ("a read across the end", IN, SECTORS - 1, vec![], 1024, IOERR),
        ("a read that wraps around", IN, u64::MAX, vec![], 512, IOERR),
        ("a sector whose byte wraps around", IN, u64::MAX / 512 + 1, vec![], 512, IOERR),
        ("a write beyond the end", OUT, SECTORS, vec![1; 512], 0, IOERR),
        ("a write that wraps around", OUT, u64::MAX / 512, vec![1; 1024], 0, IOERR),
        ("a read of half a sector", IN, 0, vec![], 256, IOERR),
        ("a write of a sector and a byte", OUT, 0, vec![1; 513], 0, IOERR),
        ("a read of nothing", IN, 0, vec![], 0, IOERR),
        ("a write of nothing", OUT, 0, vec![], 0, IOERR),
        ("a read into buffers for reading", IN, 0, vec![1; 512], 0, IOERR),
        ("a write out of buffers for writing", OUT, 0, vec![], 512, IOERR),
        ("an unknown request", 77, 0, vec![], 512, UNSUPP),
        ("a SCSI command", 2, 0, vec![1; 512], 0, UNSUPP),
        ("a secure erase", 14, 0, range(0, 8, 0), 0, UNSUPP),
        ("a serial number into too little", GET_ID, 0, vec![], 19, IOERR),
        ("a discard beyond the end", DISCARD, 0, range(SECTORS, 1, 0), 0, IOERR),
        ("a discard that wraps around", DISCARD, 0, range(u64::MAX, 1, 0), 0, IOERR),
        ("a discard of nothing", DISCARD, 0, range(0, 0, 0), 0, IOERR),
        ("a discard of too much", DISCARD, 0, range(0, u32::MAX, 0), 0, IOERR),
        ("a discard with flags", DISCARD, 0, range(0, 8, 1), 0, UNSUPP),
        ("two ranges", DISCARD, 0, [range(0, 8, 0), range(8, 8, 0)].concat(), 0, IOERR),
        ("half a range", WRITE_ZEROES, 0, vec![0; 8], 0, IOERR),
        ("zeroes with unknown flags", WRITE_ZEROES, 0, range(0, 8, 2), 0, UNSUPP),
        ("zeroes across the end", WRITE_ZEROES, 0, range(SECTORS - 1, 2, 1), 0, IOERR),
    ];
    for (what, kind, sector, data, wanted, status) in cases {
        assert_eq!(driver.run(*kind, *sector, data, *wanted).unwrap().0, *status, "{what}");
    }
    assert_eq!(disk.counters().refused, cases.len() as u64);
    assert_eq!(disk.counters().broken, 0);
    assert!(std::fs::read(disk.image()).unwrap() == noise(9, MIB as usize), "something was written");
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
}

#[test]
fn write_from_outside_of_memory_fails_and_queue_goes_on() {
    let disk = Disk::new(MIB, |_| {});
    let mut driver = disk.driver();
    // A window that the machine only reads is in no memory table. A read into it is a driver's fault, as before.
    for (address, kind, flags) in [(0x1_0000_0000, OUT, 0), (u64::MAX - 511, OUT, 0), (0x1_0000_0000, IN, WRITE)] {
        offer_at(&mut driver, kind, address, flags);
        if kind == OUT {
            assert_eq!(driver.wait(0, Duration::ZERO, HANG).unwrap().unwrap().status, IOERR, "{address:x}");
        } else {
            disk.wait_counters(|counters| counters.broken == 1);
        }
    }
    assert_eq!((disk.counters().failed, disk.counters().broken), (2, 1));
    drop(driver);
    is_well(&disk);
}

#[test]
fn chains_that_break_the_rules_end_their_own_queue() {
    let disk = Disk::new(MIB, |_| {});
    // Its number, address, length, flags, and the next one; the header is at 0x40_0000.
    type Row = (u16, u64, u32, u32, u16);
    let (header, data, end) = (0x40_0000, 0x80_0000, 0x1_0000_0000);
    let cases: &[(&str, &[Row], u16)] = &[
        ("no room for a status", &[(0, header, 16, 0, 0)], 0),
        ("a loop", &[(0, header, 16, NEXT, 1), (1, data, 512, NEXT | WRITE, 1)], 0),
        ("a loop of one", &[(0, header, 16, NEXT, 0)], 0),
        ("a next one outside of the table", &[(0, header, 16, NEXT, 9999)], 0),
        ("a head outside of the table", &[], 9999),
        ("a header outside of the memory", &[(0, end, 16, NEXT, 1), (1, data, 1, WRITE, 0)], 0),
        ("data outside of the memory", &[(0, header, 16, NEXT, 1), (1, u64::MAX, 513, WRITE, 0)], 0),
        ("data across the end of the memory", &[(0, header, 16, NEXT, 1), (1, data, u32::MAX, WRITE, 0)], 0),
        ("an empty buffer", &[(0, header, 16, NEXT, 1), (1, data, 0, WRITE, 0)], 0),
        ("reading behind writing", &[(0, data, 1, NEXT | WRITE, 1), (1, header, 16, 0, 0)], 0),
        ("an indirect table of odd length", &[(0, header, 17, INDIRECT, 0)], 0),
        ("an empty indirect table", &[(0, header, 0, INDIRECT, 0)], 0),
        ("an indirect table that goes on", &[(0, header, 32, INDIRECT | NEXT, 1), (1, data, 1, WRITE, 0)], 0),
        ("an indirect table in itself", &[(0, 0, 16, INDIRECT, 0)], 0),
    ];
    for (broken, (what, rows, head)) in cases.iter().enumerate() {
        let mut bad = connect(&disk);
        let memory = bad.memory().clone();
        for (id, address, length, flags, next) in *rows {
            bad.rings[0].describe(&memory, *id, *address, *length, *flags, *next).unwrap();
        }
        bad.rings[0].offer(&memory, *head).unwrap();
        bad.rings[0].ring_always().unwrap();
        disk.wait_counters(|counters| counters.broken > broken as u64);
        assert_eq!(bad.reply(0).unwrap(), None, "{what}");
    }
    let bad = connect(&disk);
    bad.memory().write_obj(30_000_u16, GuestAddress(bad.rings[0].available.0 + 2)).unwrap();
    bad.rings[0].ring_always().unwrap();
    disk.wait_counters(|counters| counters.broken > cases.len() as u64);
    drop(bad);
    is_well(&disk);
}

#[test]
fn requests_that_change_while_they_are_read_do_no_harm() {
    let disk = Disk::new(MIB, |options| options.read_only = true);
    let mut bad = disk.driver();
    let (memory, stop) = (bad.memory().clone(), std::sync::atomic::AtomicBool::new(false));
    let (header, table) = (bad.header(0, 31), bad.rings[0].descriptors);
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut random = Random(7);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for place in 0..32 {
                    let _ = memory.write_obj(random.below(16) as u32, GuestAddress(header.0 - 32 * place));
                    let _ = memory.write_obj(random.below(1 << 20) as u32, GuestAddress(table.0 + 48 * place + 24));
                }
            }
        });
        for n in 0..3000_u64 {
            let Some(place) = bad.take_place(0) else { break };
            bad.offer(0, place, IN, n % SECTORS, 512, false).unwrap();
            bad.rings[0].ring_always().unwrap();
            // A chain that is broken by now ends the queue.
            if bad.wait(0, Duration::ZERO, Duration::from_millis(200)).unwrap().is_none() {
                break;
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    drop(bad);
    let mut driver = connect(&disk);
    assert_eq!(driver.run(IN, 0, &[], 4096).unwrap(), (OK, vec![0; 4096]));
}

#[test]
fn random_bytes_in_queues_do_no_harm() {
    let disk = Disk::new(MIB, |_| {});
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..60 {
        let mut bad = connect(&disk);
        let memory = bad.memory().clone();
        for _ in 0..200 {
            let part = [0, 0x5000, 0x6000, 0x40_0000][random.below(4) as usize];
            let reach = [16, 64, 0x800][random.below(3) as usize];
            let place = GuestAddress(part + random.below(reach));
            let value = if random.below(2) == 0 { random.below(8) } else { random.next() };
            memory.write_obj(value as u8, place).unwrap();
            if random.below(8) == 0 {
                bad.rings[0].offer(&memory, random.below(130) as u16).unwrap();
                bad.rings[0].ring_always().unwrap();
            }
        }
    }
    is_well(&disk);
}

#[test]
fn front_end_that_breaks_the_protocol_loses_its_connection() {
    let disk = Disk::new(MIB, |_| {});
    type Breach = fn(&mut DiskDriver) -> bool;
    let plain = || {
        let file = rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        file
    };
    let cases: &[(&str, Breach)] = &[
        ("a queue resized while it runs", |bad| bad.frontend().unwrap().set_vring_num(0, 64).is_err()),
        ("memory for requests in flight while queues run", |bad| {
            let told = VhostUserInflight::new(4096, 0, 1, 4);
            let file = bad.inflight().unwrap().try_clone().unwrap();
            bad.frontend().unwrap().set_inflight_fd(&told, file.as_raw_fd()).is_err()
        }),
        ("requests in flight of very many queues", |bad| {
            bad.frontend().unwrap().get_inflight_fd(&VhostUserInflight::new(0, 0, 9999, 1024)).is_err()
        }),
        ("requests in flight of very large queues", |bad| {
            bad.frontend().unwrap().get_inflight_fd(&VhostUserInflight::new(0, 0, 1, 65_535)).is_err()
        }),
    ];
    for (broken, (what, breach)) in cases.iter().enumerate() {
        let mut bad = connect(&disk);
        assert!(breach(&mut bad), "{what}");
        disk.wait_counters(|counters| counters.broken > broken as u64);
    }
    let words = |all: [u32; 3]| all.map(u32::to_le_bytes).concat();
    let broken = disk.counters().broken;
    for (n, (what, bytes)) in [
        ("a configuration of very many bytes", [words([24, 1, 12]), words([0, u32::MAX, 0])].concat()),
        ("a configuration that wraps around", [words([24, 1, 12]), words([u32::MAX, 2, 0])].concat()),
        ("a configuration without a header", words([24, 1, 0])),
        ("memory for requests in flight without a descriptor", [words([32, 1, 24]), vec![0; 24]].concat()),
        ("a socket of the back end without a descriptor", words([21, 1, 0])),
    ]
    .into_iter()
    .enumerate()
    {
        let mut socket = wait_free(&disk);
        socket.write_all(&bytes).unwrap();
        assert_eq!(socket.read(&mut [0; 1]).unwrap_or(0), 0, "{what}");
        disk.wait_counters(|counters| counters.broken > broken + n as u64);
    }
    // Memory for requests in flight that its owner could make shorter.
    let mut socket = wait_free(&disk);
    let body: Vec<u8> = [4096_u64.to_le_bytes(), [0; 8], [1, 0, 4, 0, 0, 0, 0, 0]].concat();
    send_fd(&socket, &[words([32, 1, 24]), body].concat(), &plain());
    assert_eq!(socket.read(&mut [0; 1]).unwrap_or(0), 0);
    is_well(&disk);
}

/// Offers writes of one byte over and over, as many as there are places, to blocks of 4 KiB in order.
fn offer_writes(driver: &mut DiskDriver, byte: u8) -> usize {
    let mut count = 0;
    while let Some(place) = driver.take_place(0) {
        let at = driver.data(0, place);
        driver.memory().write_slice(&[byte; 4096], at).unwrap();
        driver.offer(0, place, OUT, 8 * count as u64, 4096, true).unwrap();
        count += 1;
    }
    driver.rings[0].ring_always().unwrap();
    count
}

#[test]
fn features_changed_under_running_requests_end_the_connection() {
    let disk = Disk::new(MIB, |options| options.faults.delay = Duration::from_millis(20));
    for round in 1..=20_u8 {
        let mut bad = connect(&disk);
        let count = offer_writes(&mut bad, round);
        let features = bad.features() & !(1 << virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH);
        assert!(bad.frontend().unwrap().set_features(features).is_err());
        disk.wait_counters(|counters| counters.broken == u64::from(round));
        drop(bad);
        drop(connect(&disk));
        let image = std::fs::read(disk.image()).unwrap();
        for block in image.chunks(4096).take(count) {
            assert!(block[0] <= round && block.iter().all(|byte| *byte == block[0]), "a request is done by half");
        }
    }
    is_well(&disk);
}

#[test]
fn features_renegotiated_between_requests_lose_none() {
    let disk = Disk::new(MIB, |options| options.faults.delay = Duration::from_millis(2));
    let mut bad = connect(&disk);
    let (all, flush) = (bad.features(), 1 << virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH);
    for round in 1..=40_u8 {
        let count = offer_writes(&mut bad, round);
        let config = bad.rings[0].config();
        let [kick, call] = bad.doorbells(0).unwrap();
        let features = if round % 2 == 0 { all } else { all & !flush };
        let frontend = bad.frontend().unwrap();
        // The queue stops with requests under way, and starts with other features.
        let base = frontend.get_vring_base(0).unwrap();
        frontend.set_features(features).unwrap();
        frontend.set_vring_addr(0, &config).unwrap();
        frontend.set_vring_base(0, base as u16).unwrap();
        frontend.set_vring_kick(0, &kick).unwrap();
        frontend.set_vring_call(0, &call).unwrap();
        bad.rings[0].ring_always().unwrap();
        for _ in 0..count {
            let reply = bad.wait(0, Duration::ZERO, HANG).unwrap().expect("a request is lost");
            assert_eq!(reply.status, OK);
        }
        let image = std::fs::read(disk.image()).unwrap();
        assert!(image[..4096 * count].iter().all(|byte| *byte == round), "a completed write of round {round} is lost");
    }
    assert_eq!(disk.counters().broken, 0);
}

#[test]
fn queue_resized_under_requests_does_each_once() {
    let disk = Disk::new(MIB, |options| options.faults.delay = Duration::from_millis(1));
    let mut driver = connect(&disk);
    let mut writes = 0;
    for round in 1..=60_u8 {
        let before = std::fs::read(disk.image()).unwrap();
        let count = offer_writes(&mut driver, round);
        // Some of them are under way or complete, and the others are not taken.
        let first = (round % 2 == 0).then(|| driver.wait(0, Duration::ZERO, HANG).unwrap().expect("a request is lost"));
        let mut replies = driver.restart([32, 5, 10, 1, 21][usize::from(round) % 5]).unwrap();
        replies.extend(first);
        writes += replies.len() as u64;
        assert!(replies.iter().all(|reply| reply.status == OK), "round {round}: {replies:?}");
        assert_eq!(disk.counters().writes, writes, "round {round}: a request was done twice, or without an answer");
        let image = std::fs::read(disk.image()).unwrap();
        for (n, block) in image.chunks(4096).take(count).enumerate() {
            let expected = if n < replies.len() { round } else { before[4096 * n] };
            assert!(block.iter().all(|byte| *byte == expected), "round {round}, block {n}");
        }
        assert_eq!(driver.run(OUT, 8 * 100, &[round; 512], 0).unwrap().0, OK);
        writes += 1;
    }
    assert_eq!(disk.counters().broken, 0);
}

#[test]
fn data_over_its_own_status_or_header_is_served_once() {
    let disk = Disk::new(MIB, |_| {});
    std::fs::write(disk.image(), noise(9, MIB as usize)).unwrap();
    let mut driver = disk.driver();
    let memory = driver.memory().clone();
    let place = driver.take_place(0).unwrap();
    let (header, first) = (driver.header(0, place), 3 * place);
    let (at, status) = (header.0, header.0 + 16);
    // The kind, the places of the data and of the status, and the sector. The header is at `at`.
    let cases = [
        ("a read over its status", IN, at + 16 - 100, status, 3),
        ("a read over its header", IN, at - 100, status, 4),
        ("a read that ends with its status", IN, at + 17 - 512, status, 5),
        ("a read whose status is in its header", IN, at + 4096, at + 9, 6),
        ("a read over the descriptors", IN, driver.rings[0].descriptors.0, status, 7),
        ("a write of the bytes of its header and status", OUT, at, status, 8),
        ("a write whose status is in its header", OUT, at + 4096, at + 9, 9),
        ("a write whose status is in its data", OUT, at + 4096, at + 4096 + 77, 10),
    ];
    for (what, kind, data, status, sector) in cases {
        memory.write_slice(&[0xee; 512], GuestAddress(data)).unwrap();
        memory.write_slice(&[&kind.to_le_bytes()[..], &[0; 4], &u64::to_le_bytes(sector)].concat(), header).unwrap();
        let writes = if kind == IN { WRITE } else { 0 };
        let ring = &mut driver.rings[0];
        ring.describe(&memory, first, at, 16, NEXT, first + 1).unwrap();
        ring.describe(&memory, first + 1, data, 512, NEXT | writes, first + 2).unwrap();
        ring.describe(&memory, first + 2, status, 1, WRITE, 0).unwrap();
        let mut expected = [0; 512];
        let source = if kind == IN { None } else { Some(GuestAddress(data)) };
        let offset = 512 * sector as usize;
        match source {
            None => expected.copy_from_slice(&std::fs::read(disk.image()).unwrap()[offset..][..512]),
            Some(source) => memory.read_slice(&mut expected, source).unwrap(),
        }
        ring.offer(&memory, first).unwrap();
        driver.kick(0).unwrap();
        driver.wait(0, Duration::ZERO, HANG).unwrap().unwrap_or_else(|| panic!("{what} has no answer"));
        assert_eq!(driver.take_place(0), Some(place));
        assert_eq!(memory.read_obj::<u8>(GuestAddress(status)).unwrap(), OK, "{what}");
        let mut got = [0; 512];
        if kind == IN {
            memory.read_slice(&mut got, GuestAddress(data)).unwrap();
        } else {
            got.copy_from_slice(&std::fs::read(disk.image()).unwrap()[offset..][..512]);
        }
        // The status is written last.
        if kind == IN && (data..data + 512).contains(&status) {
            expected[(status - data) as usize] = OK;
        }
        assert!(got == expected, "{what}");
    }
    let counters = disk.counters();
    assert_eq!((counters.reads, counters.writes, counters.broken, counters.refused), (5, 3, 0, 0));
}

#[test]
fn requests_on_the_same_bytes_are_done_each() {
    let disk = Disk::new(MIB, |options| options.faults.delay = Duration::from_millis(1));
    let mut bad = connect(&disk);
    let memory = bad.memory().clone();
    let place = bad.take_place(0).unwrap();
    let (header, data, first) = (bad.header(0, place), bad.data(0, place), 3 * place);
    memory.write_slice(&[7; 1024], data).unwrap();
    // Both parts of the data are the same bytes.
    memory.write_slice(&[&OUT.to_le_bytes()[..], &[0; 12]].concat(), header).unwrap();
    bad.rings[0].describe(&memory, first, header.0, 16, NEXT, first + 1).unwrap();
    bad.rings[0].describe(&memory, first + 1, data.0, 1024, NEXT, first + 2).unwrap();
    bad.rings[0].describe(&memory, first + 2, data.0, 512, NEXT, first + 3).unwrap();
    bad.rings[0].describe(&memory, first + 3, header.0 + 16, 1, WRITE, 0).unwrap();
    // One chain over and over, also while it is in flight.
    (0..100).for_each(|_| bad.rings[0].offer(&memory, first).unwrap());
    bad.rings[0].ring_always().unwrap();
    let counters = disk.wait_counters(|counters| counters.writes == 100);
    assert_eq!((counters.written_bytes, counters.broken), (100 * 1536, 0));
    assert!(std::fs::read(disk.image()).unwrap()[..2048] == [[7; 1536].as_slice(), &[0; 512]].concat());
    let index = GuestAddress(bad.rings[0].used.0 + 2);
    let deadline = std::time::Instant::now() + HANG;
    while memory.read_obj::<u16>(index).unwrap() != 100 {
        assert!(std::time::Instant::now() < deadline, "a request has no answer");
    }
    drop(bad);
    is_well(&disk);
}

#[test]
fn read_over_rings_ends_only_its_own_queue() {
    let disk = Disk::new(MIB, |_| {});
    for (fill, part) in [0xff, 0, 1].into_iter().flat_map(|fill| [0, 1, 2].map(|part| (fill, part))) {
        std::fs::write(disk.image(), vec![fill; MIB as usize]).unwrap();
        let mut bad = connect(&disk);
        let ring = &bad.rings[0];
        let at = [ring.descriptors, ring.available, ring.used][part].0;
        let before = disk.counters();
        offer_at(&mut bad, IN, at, WRITE);
        disk.wait_counters(|counters| counters.reads > before.reads);
        // The available index of a full read of 0xff has jumped. A request from overwritten parts may be anything.
        bad.rings[0].ring_always().unwrap();
        if (fill, part) == (0xff, 1) {
            disk.wait_counters(|counters| counters.broken > before.broken);
        }
        (0..8).for_each(|_| offer_at(&mut bad, IN, at, WRITE));
        drop(bad);
        is_well(&disk);
    }
}

#[test]
fn descriptors_that_linger_do_not_hold_the_disk_up() {
    let disk = Disk::new(MIB, |_| {});
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peers = Vec::new();
    let mut linger = || {
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peers.push(listener.accept().unwrap().0);
        socket.set_nonblocking(true).unwrap();
        while (&socket).write(&[0; 65_536]).is_ok() {}
        socket.set_nonblocking(false).unwrap();
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(300))).unwrap();
        socket
    };
    let words = |all: [u32; 3]| all.map(u32::to_le_bytes).concat();
    // As a doorbell, as memory, and in a message that is never read.
    for bytes in [
        [words([12, 1, 8]), vec![0; 8]].concat(),
        [words([5, 1, 40]), 1_u64.to_le_bytes().to_vec(), vec![0; 32]].concat(),
        words([1, 2, 0]),
    ] {
        let (socket, sent) = (wait_free(&disk), linger());
        send_fd(&socket, &bytes, &sent);
        // The last copy of it lingers, which may be this one.
        std::thread::spawn(move || drop(sent));
    }
    let mut socket = wait_free(&disk);
    socket.write_all(&words([999, 1, 0])).unwrap();
    let sent = linger();
    send_fd(&socket, &words([1, 1, 0]), &sent);
    std::thread::spawn(move || drop(sent));
    is_well(&disk);
}

fn send_fd(socket: &UnixStream, bytes: &[u8], fd: &impl std::os::fd::AsFd) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let part = [std::io::IoSlice::new(bytes)];
    // The disk may have hung up already.
    let _ = rustix::net::sendmsg(socket, &part, &mut control, rustix::net::SendFlags::NOSIGNAL);
}

/// Connects, and shows by a question that the disk serves this connection.
fn wait_free(disk: &Disk) -> UnixStream {
    let deadline = std::time::Instant::now() + HANG;
    loop {
        let mut socket = UnixStream::connect(disk.socket()).unwrap();
        let asked = socket.write_all(&[1_u32, 1, 0].map(u32::to_le_bytes).concat());
        if asked.is_ok() && socket.read_exact(&mut [0; 20]).is_ok() {
            return socket;
        }
        assert!(std::time::Instant::now() < deadline);
    }
}
