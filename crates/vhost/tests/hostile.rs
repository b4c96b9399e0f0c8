//! Guests and front ends that break the rules: each loses its own queue or connection, and the frames of others go on.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;
#[path = "../../shm/tests/random/mod.rs"]
mod random;

use common::datagram::{cut_header, datagram, udp_at};
use common::{EVERYBODY, HANG, World, frame, introduce, mac, next};
use partywall_vhost::control::PortSpec;
use partywall_vhost::driver::{DriverOptions, GuestDriver};
use random::Random;
use rustix::fs::{MemfdFlags, SealFlags};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::{Bytes, GuestAddress};

const NEXT: u32 = 1;
const WRITE: u32 = 2;
const INDIRECT: u32 = 4;

/// Two that behave, and a third, which a test turns into one that does not.
struct Scene {
    world: World,
    a: GuestDriver,
    b: GuestDriver,
    path: std::path::PathBuf,
    sent: u32,
}

impl Scene {
    fn new() -> Self {
        let world = World::new();
        let (mut a, mut b) = (world.driver("a"), world.driver("b"));
        introduce(&mut b, 2);
        next(&mut a);
        let path = world.add(PortSpec::new("bad"));
        Self { world, a, b, path, sent: 0 }
    }

    fn bad(&self) -> GuestDriver {
        GuestDriver::connect(&self.path, DriverOptions::default()).unwrap()
    }

    fn broken(&self) -> u64 {
        self.world.counters("bad").broken
    }

    /// Waits until the switch has noticed one more breach, and shows that others are well.
    fn noticed(&mut self, before: u64, what: &str) {
        self.world.wait_counters("bad", |counters| counters.broken > before);
        self.others_are_well(what);
    }

    fn others_are_well(&mut self, what: &str) {
        self.sent += 1;
        let sent = [&frame(mac(2), mac(1), 3000)[..], &self.sent.to_le_bytes()].concat();
        assert!(self.a.send(&sent).unwrap(), "{what}");
        assert!(next(&mut self.b) == sent, "{what}");
    }
}

/// One descriptor: its number, address, length, flags, and the next one.
type Row = (u16, u64, u32, u32, u16);

#[test]
fn descriptors_that_break_the_rules_end_their_own_queue() {
    let mut scene = Scene::new();
    let end = 0x1000_0000;
    let cases: &[(&str, &[Row], u16)] = &[
        ("a loop of one", &[(0, 0x10_0000, 64, NEXT, 0)], 0),
        ("a loop of two", &[(0, 0x10_0000, 64, NEXT, 1), (1, 0x10_0000, 64, NEXT, 0)], 0),
        ("a loop of nothing", &[(0, 0x10_0000, 0, NEXT, 1), (1, 0x10_0000, 0, NEXT, 0)], 0),
        ("a next one outside of the table", &[(0, 0x10_0000, 64, NEXT, 9999)], 0),
        ("a head outside of the table", &[(0, 0x10_0000, 64, 0, 0)], 9999),
        ("memory that nobody offered", &[(0, end, 64, 0, 0)], 0),
        ("the last address", &[(0, u64::MAX, 64, 0, 0)], 0),
        ("a length beyond the memory", &[(0, 0x10_0000, u32::MAX, 0, 0)], 0),
        ("lengths beyond 32 bits", &[(0, 0, 0x8_0000, NEXT, 1), (1, 0, u32::MAX, 0, 0)], 0),
        (
            "a buffer to be written among those to be read",
            &[(0, 0x10_0000, 64, NEXT, 1), (1, 0x10_0000, 64, WRITE, 0)],
            0,
        ),
        ("an empty buffer", &[(0, 0x10_0000, 64, NEXT, 1), (1, 0x10_0000, 0, 0, 0)], 0),
        ("an indirect table outside of the memory", &[(0, end, 32, INDIRECT, 0)], 0),
        ("an indirect table of odd length", &[(0, 0x10_0000, 33, INDIRECT, 0)], 0),
        ("an indirect table that is its own entry", &[(0, 0, 16, INDIRECT, 0)], 0),
    ];
    for (what, rows, head) in cases {
        let mut bad = scene.bad();
        let before = scene.broken();
        let memory = bad.memory().clone();
        for (id, address, length, flags, next) in *rows {
            bad.transmit.describe(&memory, *id, *address, *length, *flags, *next).unwrap();
        }
        bad.transmit.offer(&memory, *head).unwrap();
        bad.transmit.ring_always().unwrap();
        scene.noticed(before, what);
    }
    // The same faults in buffers to receive into.
    for (what, rows, head) in [
        ("read-only", &[(0, 0x10_0000, 4096, 0, 0)][..], 0),
        ("a loop", &[(0, 0x10_0000, 16, NEXT | WRITE, 0)], 0),
        ("memory that nobody offered", &[(0, end, 4096, WRITE, 0)], 0),
        ("a head outside of the table", &[], 777),
    ] {
        let bad = scene.bad();
        let before = scene.broken();
        let memory = bad.memory().clone();
        // The first 256 it offered as it should; all their descriptors are what the case says from now on.
        for (_, address, length, flags, next) in rows {
            (0..256).for_each(|id| {
                bad.receive
                    .describe(&memory, id, *address, *length, *flags, if next == &0 { id } else { *next })
                    .unwrap()
            });
        }
        if head > 0 {
            let index = bad.receive.available;
            (0..256_u64).for_each(|slot| memory.write_obj(777_u16, GuestAddress(index.0 + 4 + 2 * slot)).unwrap());
        }
        introduce(&mut scene.a, 1);
        next(&mut scene.b);
        scene.noticed(before, what);
    }
}

#[test]
fn transmit_buffers_on_the_same_bytes_are_sent_each() {
    let mut scene = Scene::new();
    let mut bad = scene.bad();
    let memory = bad.memory().clone();
    let sent = [&[0; 12][..], &frame(mac(2), mac(9), 700)].concat();
    let place = bad.transmit.place(0).0;
    memory.write_slice(&sent, GuestAddress(place)).unwrap();
    let length = sent.len() as u32;
    // The frame, all of its bytes once more, and a part of them.
    bad.transmit.describe(&memory, 0, place, length, NEXT, 1).unwrap();
    bad.transmit.describe(&memory, 1, place, length, NEXT, 2).unwrap();
    bad.transmit.describe(&memory, 2, place + 100, 300, 0, 0).unwrap();
    let expected = [&sent[12..], &sent, &sent[100..400]].concat();
    // The same chain over and over, before any of them is complete.
    (0..50).for_each(|_| bad.transmit.offer(&memory, 0).unwrap());
    bad.transmit.ring_always().unwrap();
    for n in 0..50 {
        assert!(next(&mut scene.b) == expected, "the frame {n}");
    }
    // An indirect table whose descriptors lie over itself, after the header and the frame.
    let table = bad.transmit.place(8).0;
    let row = |address: u64, length: u32, flags: u16, next: u16| {
        [&address.to_le_bytes()[..], &length.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    let rows = [row(place, length, NEXT as u16, 1), row(table, 32, 0, 0)].concat();
    memory.write_slice(&rows, GuestAddress(table)).unwrap();
    bad.transmit.describe(&memory, 3, table, 32, INDIRECT, 0).unwrap();
    bad.transmit.offer(&memory, 3).unwrap();
    bad.transmit.ring_always().unwrap();
    assert!(next(&mut scene.b) == [&sent[12..], &rows].concat(), "a table that is a buffer");
    assert_eq!(scene.broken(), 0, "buffers on the same bytes are no breach");
    scene.others_are_well("after buffers on the same bytes");
}

#[test]
fn receive_buffers_on_the_same_bytes_get_the_frame() {
    let mut scene = Scene::new();
    let mut bad = scene.bad();
    let memory = bad.memory().clone();
    introduce(&mut bad, 9);
    next(&mut scene.a);
    next(&mut scene.b);
    // All 256 that it has offered lie on one place from now on. A frame fills several of them.
    let place = bad.receive.place(0);
    (0..256).for_each(|id| bad.receive.describe(&memory, id, place.0, 1024, WRITE, 0).unwrap());
    let sent = frame(mac(9), mac(1), 2500);
    assert!(scene.a.send(&sent).unwrap());
    scene.world.wait_counters("bad", |counters| counters.received == 1);
    let (whole, mut got) = ([&[0; 12][..], &sent].concat(), [0; 1024]);
    memory.read_slice(&mut got, place).unwrap();
    let last = 2 * 1024;
    assert!(got[..whole.len() - last] == whole[last..], "the last buffer is written last");
    assert!(got[whole.len() - last..] == whole[1024 + whole.len() - last..last], "under it is the one before");
    assert_eq!(scene.broken(), 0);
    scene.others_are_well("after receive buffers on the same bytes");
}

/// A part of a queue, and its place.
type Target = (&'static str, fn(&GuestDriver) -> GuestAddress);

#[test]
fn receive_buffers_over_rings_harm_only_their_own_port() {
    let mut scene = Scene::new();
    let targets: &[Target] = &[
        ("its own descriptors", |bad| bad.receive.descriptors),
        ("its own available ring", |bad| bad.receive.available),
        ("its own used ring", |bad| bad.receive.used),
        ("the other queue's descriptors", |bad| bad.transmit.descriptors),
        ("the other queue's available ring", |bad| bad.transmit.available),
        ("the other queue's used ring", |bad| bad.transmit.used),
    ];
    // What a frame has behind its header: indices that jump, small numbers, and descriptors of the ring that they overwrite.
    let row = |start: u64, flags: u32| {
        let words = [start.to_le_bytes(), (4096 | u64::from(flags) << 32 | 1 << 48).to_le_bytes()];
        words.concat().repeat(250)
    };
    let plain = |byte: u8| vec![byte; 4000];
    for (what, target) in targets {
        for kind in 0..7 {
            let mut bad = scene.bad();
            let memory = bad.memory().clone();
            introduce(&mut bad, 9);
            next(&mut scene.a);
            next(&mut scene.b);
            let start = target(&bad).0;
            let body = match kind {
                0 => plain(0xff),
                small @ 1..=3 => plain(small - 1),
                _ => row(start, [WRITE, NEXT, NEXT | WRITE][kind as usize - 4]),
            };
            // Buffers of different beginnings: the same bytes of a frame meet different fields of the ring.
            for id in 0..256_u16 {
                bad.receive.describe(&memory, id, start + 2 * u64::from(id % 8), 4096, WRITE, 0).unwrap();
            }
            // Its own frames go to itself.
            let own = [&[0; 12][..], &frame(mac(9), mac(9), 60)].concat();
            for id in 0..8 {
                let place = bad.transmit.place(id);
                memory.write_slice(&own, place).unwrap();
                bad.transmit.describe(&memory, id, place.0, own.len() as u32, 0, 0).unwrap();
            }
            for id in 0..8 {
                let sent = [&mac(9)[..], &mac(1), &[0x88, 0xb5], &body].concat();
                assert!(scene.a.send(&sent).unwrap());
                bad.transmit.offer(&memory, id).unwrap();
                bad.ring_receive().unwrap();
                bad.transmit.ring_always().unwrap();
            }
            assert!(scene.a.drain(HANG).unwrap(), "{what}, {kind}");
            // Frames that an overwritten descriptor has named may come first.
            scene.sent += 1;
            let sent = [&frame(mac(2), mac(1), 3000)[..], &scene.sent.to_le_bytes()].concat();
            assert!(scene.a.send(&sent).unwrap(), "{what}, {kind}");
            while next(&mut scene.b) != sent {}
        }
    }
    assert!(scene.broken() > 0, "a ring that is overwritten is a breach");
    scene.others_are_well("after buffers over rings");
}

#[test]
fn frame_without_ethernet_header_is_malformed_and_not_sent() {
    let mut scene = Scene::new();
    let mut bad = scene.bad();
    for length in 0..14 {
        assert!(bad.send(&frame(EVERYBODY, mac(9), 0)[..length]).unwrap());
    }
    let counters = scene.world.wait_counters("bad", |counters| counters.malformed + counters.sent >= 14);
    assert_eq!((counters.malformed, counters.sent, counters.sent_bytes), (14, 0, 0), "{counters:?}");
    assert!(bad.send(&frame(EVERYBODY, mac(9), 0)).unwrap());
    assert_eq!(next(&mut scene.b), frame(EVERYBODY, mac(9), 0), "the shortest frame");
    // A chain that is shorter than the header of the card.
    let (memory, place) = (bad.memory().clone(), bad.transmit.place(0));
    bad.transmit.describe(&memory, 0, place.0, 11, 0, 0).unwrap();
    bad.transmit.offer(&memory, 0).unwrap();
    bad.transmit.ring_always().unwrap();
    scene.world.wait_counters("bad", |counters| counters.malformed == 15);
    scene.others_are_well("after frames that are too short");
}

#[test]
fn indirect_table_of_very_many_buffers_ends_its_own_queue() {
    let mut scene = Scene::new();
    for (count, length) in [(65_535_u32, 0_u32), (1025, 1)] {
        let options = DriverOptions { buffer: 8192, ..DriverOptions::default() };
        let mut bad = GuestDriver::connect(&scene.path, options).unwrap();
        let before = scene.broken();
        let memory = bad.memory().clone();
        let table = bad.transmit.buffers.0;
        for n in 0..count {
            let flags = if n + 1 < count { NEXT } else { 0 };
            let mut row = [0; 16];
            row[8..12].copy_from_slice(&length.to_le_bytes());
            row[12..14].copy_from_slice(&(flags as u16).to_le_bytes());
            row[14..].copy_from_slice(&((n + 1) as u16).to_le_bytes());
            memory.write_slice(&row, GuestAddress(table + 16 * u64::from(n))).unwrap();
        }
        bad.transmit.describe(&memory, 0, table, 16 * count, INDIRECT, 0).unwrap();
        bad.transmit.offer(&memory, 0).unwrap();
        bad.transmit.ring_always().unwrap();
        scene.noticed(before, "an indirect table of very many buffers");
    }
}

#[test]
fn available_index_that_jumps_ends_its_own_queue() {
    let mut scene = Scene::new();
    let bad = scene.bad();
    bad.memory().write_obj(30_000_u16, GuestAddress(bad.transmit.available.0 + 2)).unwrap();
    bad.transmit.ring_always().unwrap();
    scene.noticed(0, "an index that jumped");
}

#[test]
fn frames_that_are_none_are_dropped_and_the_queue_goes_on() {
    let mut scene = Scene::new();
    let mut bad = scene.bad();
    let before = scene.world.counters("bad").malformed;
    for (header, sent) in [
        ([0; 12], vec![]),
        ([0; 12], vec![2; 13]),
        ([0; 12], frame(EVERYBODY, EVERYBODY, 10)),
        ([0; 12], frame(EVERYBODY, mac(9), 65_535 + 9)),
        ([1, 1, 0, 0, 1, 0, 34, 0, 16, 0, 0, 0], frame(EVERYBODY, mac(9), 60_000)),
        ([1, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0], frame(EVERYBODY, mac(9), 100)),
    ] {
        assert!(bad.send_with(&header, &sent).unwrap());
    }
    scene.world.wait_counters("bad", |counters| counters.malformed == before + 6);
    let sent = frame(mac(2), mac(9), 55);
    assert!(bad.send(&sent).unwrap());
    assert!(next(&mut scene.b) == sent);
    scene.others_are_well("after frames that were none");
}

#[test]
fn datagrams_whose_header_lies_are_dropped_and_counted() {
    let mut scene = Scene::new();
    let mut bad = scene.bad();
    let before = scene.world.counters("bad");
    let mut lies = 0;
    for v6 in [false, true] {
        let at = udp_at(v6, 0) as u8;
        let sent = datagram(v6, 0, 1, &[7; 5000]);
        let mut tcp = sent.clone();
        tcp[if v6 { 54 } else { 23 }] = 6;
        let change = |place: usize, value: u8| {
            let mut header = cut_header(v6, 0, 1000);
            header[place] = value;
            header
        };
        for (header, frame) in [
            (cut_header(v6, 0, 0), &sent),
            (cut_header(v6, 0, 5001), &sent),
            (cut_header(v6, 0, 1), &sent),
            (change(0, 0), &sent),
            (change(6, 0), &sent),
            (change(6, at - 1), &sent),
            (change(7, 0xff), &sent),
            (change(8, 16), &sent),
            (change(1, 3), &sent),
            (change(8, 16), &tcp),
            (change(0, 1), &tcp),
            (change(0, 1), &sent[..usize::from(at) + 7].to_vec()),
        ] {
            assert!(bad.send_with(&header, frame).unwrap());
            lies += 1;
        }
    }
    let counters = scene.world.wait_counters("bad", |now| now.malformed + now.sent >= before.malformed + lies);
    assert_eq!((counters.malformed - before.malformed, counters.sent), (lies, before.sent));
    scene.others_are_well("after datagrams whose header lies");
    assert!(bad.send(&frame(mac(2), mac(9), 55)).unwrap());
    assert!(next(&mut scene.b) == frame(mac(2), mac(9), 55), "none of them has arrived");
}

#[test]
fn frame_that_changes_while_it_is_read_cannot_spoof() {
    let world = World::new();
    let spec = PortSpec { mac: vec![partywall_vhost::switch::MacAddress(mac(1))], ..PortSpec::new("a") };
    let mut a = GuestDriver::connect(&world.add(spec), DriverOptions::default()).unwrap();
    let mut b = world.driver("b");
    introduce(&mut b, 2);
    next(&mut a);
    let (memory, stop) = (a.memory().clone(), std::sync::atomic::AtomicBool::new(false));
    let buffers = a.transmit.buffers;
    std::thread::scope(|s| {
        s.spawn(|| {
            // The last byte of the source address of each frame, back and forth.
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for id in 0..256_u64 {
                    for last in [7_u8, 1] {
                        let _ = memory.write_obj(last, GuestAddress(buffers.0 + 2048 * id + 12 + 11));
                    }
                }
            }
        });
        let (mut got, mut spoofed) = (0, 0);
        for _ in 0..20_000 {
            let _ = a.send(&frame(mac(2), mac(1), 400)).unwrap();
            while let Some(frame) = b.take().unwrap() {
                got += 1;
                spoofed += u32::from(frame[12 + 6..12 + 12] != mac(1));
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(got > 0 && spoofed == 0, "{spoofed} of {got} frames are from an address that their port may not use");
    });
}

#[test]
fn address_flood_by_one_port_does_not_disturb_others() {
    let mut scene = Scene::new();
    let mut bad = scene.bad();
    for n in 0..20_000_u32 {
        let [a, b, c, d] = n.to_be_bytes();
        while !bad.send(&frame(mac(2), [6, 6, a, b, c, d], 10)).unwrap() {}
        while scene.b.take().unwrap().is_some() {}
    }
    assert!(bad.drain(HANG).unwrap());
    while scene.b.take().unwrap().is_some() {}
    scene.others_are_well("after a flood of addresses");
    scene.world.wait_counters("bad", |counters| counters.sent == 20_000);
}

#[test]
fn front_end_that_breaks_the_protocol_loses_its_connection() {
    let mut scene = Scene::new();
    type Breach = fn(&mut GuestDriver) -> bool;
    let cases: &[(&str, Breach)] = &[
        ("a queue resized while it runs", |bad| bad.frontend().set_vring_num(1, 64).is_err()),
        ("a queue moved while it runs", |bad| bad.frontend().set_vring_base(1, 64).is_err()),
        ("features that change while queues run", |bad| {
            let features = bad.features() & !1;
            bad.frontend().set_features(features).is_err()
        }),
        ("features that were not offered", |bad| bad.frontend().set_features(u64::MAX).is_err()),
        ("rings outside of the memory", |bad| {
            let config = vhost::VringConfigData { desc_table_addr: 0x10, ..bad.transmit.config() };
            bad.frontend().set_vring_addr(1, &config).is_err()
        }),
    ];
    for (what, breach) in cases {
        let before = scene.broken();
        let mut bad = scene.bad();
        assert!(breach(&mut bad), "{what}");
        scene.noticed(before, what);
    }
    // Regions behind the end of their file, where an access would end the switch.
    for (size, offset) in [(1 << 30, 0), (4096, 1 << 30), (1 << 43, 0)] {
        let before = scene.broken();
        let mut bad = scene.bad();
        let region = VhostUserMemoryRegionInfo { memory_size: size, mmap_offset: offset, ..bad.region() };
        assert!(bad.frontend().set_mem_table(&[region]).is_err());
        scene.noticed(before, "memory behind the end of its file");
    }
    // Other memory at addresses that have some.
    let (first, second) = (Further::new(), Further::new());
    let moved =
        |region: VhostUserMemoryRegionInfo| VhostUserMemoryRegionInfo { userspace_addr: 0x7e00_0000_0000, ..region };
    for (what, other) in [("another file", second.region()), ("another address", moved(first.region()))] {
        let before = scene.broken();
        let mut bad = scene.bad();
        allow_slots(&mut bad);
        bad.frontend().add_mem_region(&first.region()).unwrap();
        assert!(bad.frontend().add_mem_region(&other).is_err(), "{what}");
        scene.noticed(before, what);
    }
    // Memory whose file could become shorter under the switch.
    let options = DriverOptions { sealed: false, ..DriverOptions::default() };
    let before = scene.broken();
    assert!(GuestDriver::connect(&scene.path, options).is_err());
    scene.noticed(before, "memory that is not sealed");
}

/// Memory of a guest in addition to its first region, at 4 GiB.
struct Further(std::fs::File);

impl Further {
    const AT: u64 = 1 << 32;

    fn new() -> Self {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = std::fs::File::from(rustix::fs::memfd_create("further", flags).unwrap());
        file.set_len(1 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        Self(file)
    }

    fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: Self::AT,
            memory_size: 1 << 20,
            userspace_addr: 0x7f00_0000_0000,
            mmap_offset: 0,
            mmap_handle: self.0.as_raw_fd(),
        }
    }
}

fn allow_slots(driver: &mut GuestDriver) {
    let wanted = VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    driver.frontend().set_protocol_features(wanted).unwrap();
}

#[test]
fn memory_changed_under_running_queues_loses_no_frame() {
    let mut scene = Scene::new();
    let further = Further::new();
    allow_slots(&mut scene.a);
    allow_slots(&mut scene.b);
    let (mut sent, mut got) = (0_u32, 0_u32);
    let numbered = |n: u32| [&frame(mac(2), mac(1), 1900)[..], &n.to_le_bytes()].concat();
    for round in 0..600 {
        // Fewer than the receiver has buffers for.
        while sent - got < 100 && scene.a.send(&numbered(sent)).unwrap() {
            sent += 1;
        }
        let driver = if round % 2 == 0 { &mut scene.a } else { &mut scene.b };
        let first = driver.region();
        match round / 2 % 3 {
            0 => drop(driver.frontend().set_mem_table(&[first]).unwrap()),
            // Before version 8.0, QEMU sends these once for each pair of a card's queues.
            1 => (0..2).for_each(|_| {
                driver.frontend().add_mem_region(&further.region()).unwrap();
            }),
            _ => (0..2).for_each(|_| driver.frontend().remove_mem_region(&further.region()).unwrap()),
        }
        while let Some(frame) = scene.b.take().unwrap() {
            assert!(frame[12..] == numbered(got), "the frame {got} is lost or has changed");
            got += 1;
        }
        scene.b.ring_receive().unwrap();
    }
    while got < sent {
        assert!(next(&mut scene.b) == numbered(got), "the frame {got} is lost or has changed");
        got += 1;
    }
    let [a, b] = ["a", "b"].map(|name| scene.world.counters(name));
    assert!(sent > 1000 && (a.broken, b.broken, b.no_buffers) == (0, 0, 0), "{sent} {a:?} {b:?}");
}

#[test]
fn frame_in_removed_memory_ends_its_own_queue() {
    let mut scene = Scene::new();
    let further = Further::new();
    let mut bad = scene.bad();
    allow_slots(&mut bad);
    bad.frontend().add_mem_region(&further.region()).unwrap();
    let sent = [&[0; 12][..], &frame(mac(2), mac(9), 700)].concat();
    further.0.write_all_at(&sent, 512).unwrap();
    let memory = bad.memory().clone();
    let send = |bad: &mut GuestDriver| {
        bad.transmit.describe(&memory, 0, Further::AT + 512, sent.len() as u32, 0, 0).unwrap();
        bad.transmit.offer(&memory, 0).unwrap();
        bad.transmit.ring_always().unwrap();
    };
    send(&mut bad);
    assert!(next(&mut scene.b) == sent[12..], "a frame in memory that was added");
    bad.frontend().remove_mem_region(&further.region()).unwrap();
    let before = scene.broken();
    send(&mut bad);
    scene.noticed(before, "a frame in memory that was removed");
    // The same region again is no breach.
    bad.frontend().remove_mem_region(&further.region()).unwrap();
    drop(bad);
    // Buffers to receive into that are in no memory any longer.
    let mut bad = scene.bad();
    let before = scene.broken();
    introduce(&mut bad, 9);
    next(&mut scene.a);
    next(&mut scene.b);
    let only_rings = VhostUserMemoryRegionInfo { memory_size: 0x10_0000, ..bad.region() };
    bad.frontend().set_mem_table(&[only_rings]).unwrap();
    assert!(scene.a.send(&frame(mac(9), mac(1), 100)).unwrap());
    scene.noticed(before, "buffers in memory that was removed");
    assert!(bad.take().unwrap().is_none());
}

#[test]
fn bytes_that_are_no_messages_end_a_connection() {
    let mut scene = Scene::new();
    let words = |all: [u32; 3]| all.map(u32::to_le_bytes).concat();
    for (what, bytes) in [
        ("an unknown request", words([999, 1, 0])),
        ("a body that is too long", words([1, 1, 5000])),
        ("a body of another length", [words([2, 1, 4]), vec![0; 4]].concat()),
        ("an answer", words([1, 5, 0])),
        ("another version", words([1, 2, 0])),
        ("a table without descriptors", [words([5, 1, 40]), 1_u64.to_le_bytes().to_vec(), vec![0; 32]].concat()),
        ("a doorbell without a descriptor", [words([12, 1, 8]), vec![0; 8]].concat()),
        ("a queue that does not exist", [words([18, 1, 8]), words([200, 1, 0])[..8].to_vec()].concat()),
        ("a request that was not offered", words([9, 1, 0])),
    ] {
        let before = scene.broken();
        let mut socket = wait_free(&scene.path);
        socket.write_all(&bytes).unwrap();
        scene.noticed(before, what);
        assert_eq!(socket.read(&mut [0; 1]).unwrap_or(0), 0, "{what}");
    }
    // A front end that sends half of a message and is then silent harms no other, and its end frees the port.
    let mut half = wait_free(&scene.path);
    half.write_all(&words([1, 1, 0])[..7]).unwrap();
    scene.others_are_well("half of a message");
    drop(half);
    drop(wait_free(&scene.path));
}

/// Connects, and shows by a question that the switch serves this connection and no other.
fn wait_free(path: &Path) -> UnixStream {
    let deadline = std::time::Instant::now() + HANG;
    loop {
        let mut socket = UnixStream::connect(path).unwrap();
        let asked = socket.write_all(&[1_u32, 1, 0].map(u32::to_le_bytes).concat());
        if asked.is_ok() && socket.read_exact(&mut [0; 20]).is_ok() {
            return socket;
        }
        assert!(std::time::Instant::now() < deadline);
    }
}

#[test]
fn random_bytes_in_queues_affect_only_their_own_port() {
    let mut scene = Scene::new();
    let mut chance = Random(0x9e37_79b9_7f4a_7c15);
    let mut random = || chance.next();
    for _ in 0..100 {
        let mut bad = scene.bad();
        let memory = bad.memory().clone();
        for _ in 0..200 {
            // Into descriptors and both rings of either queue, most often near their beginning.
            let part = [0, 0x5000, 0x6000][(random() % 3) as usize] + (random() % 2) * 0x10000;
            let place = GuestAddress(part + random() % [16, 64, 0x800][(random() % 3) as usize]);
            let value = if random() % 2 == 0 { random() % 8 } else { random() };
            memory.write_obj(value as u8, place).unwrap();
            if random() % 16 == 0 {
                bad.transmit.offer(&memory, (random() % 300) as u16).unwrap();
                bad.transmit.ring_always().unwrap();
            }
        }
        bad.ring_receive().unwrap();
    }
    // The frames that it has flooded come first.
    assert!(scene.a.send(&frame(mac(2), mac(1), 999)).unwrap());
    while next(&mut scene.b) != frame(mac(2), mac(1), 999) {}
    scene.others_are_well("after random bytes");
}
