//! A switch with drivers on its ports, no machine around them: frames arrive as they were sent, whatever was negotiated, and ports come
//! and go.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::datagram::{cut_header, datagram};
use common::segment::{large_segment, segments};
use common::{EVERYBODY, HANG, World, frame, introduce, mac, next};
use partywall_vhost::PAIRS;
use partywall_vhost::control::{ControlRequest, PortSpec};
use partywall_vhost::driver::load::{FrameGenerator, RoundTrips};
use partywall_vhost::driver::{DriverOptions, GuestDriver, datagram_features, mergeable_features, plain_features};
use partywall_vhost::engine::{Engine, EngineOptions};
use partywall_vhost::switch::MacAddress;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

#[test]
fn frames_of_all_sizes_arrive_as_they_were_sent() {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    introduce(&mut b, 2);
    next(&mut a);
    for body in [0, 1, 46, 178, 179, 180, 1500, 2010, 2022, 2023, 9000, 65_535] {
        let sent = frame(mac(2), mac(1), body);
        assert!(a.send(&sent).unwrap());
        assert!(next(&mut b) == sent, "a frame of {body} bytes");
    }
    // More than the queues hold, in both directions.
    for round in 0..2000_u32 {
        let sent = [&frame(mac(2), mac(1), 20)[..], &round.to_le_bytes()].concat();
        assert!(a.send(&sent).unwrap() && next(&mut b) == sent);
        let answer = [&frame(mac(1), mac(2), 900)[..], &round.to_le_bytes()].concat();
        assert!(b.send(&answer).unwrap() && next(&mut a) == answer);
    }
    assert_eq!(world.counters("b").received, 2012);
}

#[test]
fn broadcast_frame_reaches_all_ports_except_sender() {
    let world = World::new();
    let mut drivers: Vec<_> = ["a", "b", "c"].map(|name| world.driver(name)).into_iter().collect();
    let sent = frame(EVERYBODY, mac(1), 100);
    assert!(drivers[0].send(&sent).unwrap());
    assert!(next(&mut drivers[1]) == sent && next(&mut drivers[2]) == sent);
    assert!(drivers[0].drain(HANG).unwrap() && drivers[0].take().unwrap().is_none());
}

/// A frame of TCP over IPv4 whose sum and segments are left to the device, and its header.
fn large(payload: usize) -> ([u8; 12], Vec<u8>) {
    let mut sent = [&mac(2)[..], &mac(1), &[8, 0]].concat();
    sent.extend([0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    sent.extend([1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 1, 1, 0, 0, 0, 0]);
    sent.extend((0..payload).map(|n| (n % 251) as u8));
    let [low, high] = 1448_u16.to_le_bytes();
    ([1, 1, 54, 0, low, high, 34, 0, 16, 0, 0, 0], sent)
}

#[test]
fn large_frame_passes_whole_or_in_segments_as_its_receiver_can() {
    let world = World::new();
    let mut a = world.driver("a");
    let mut whole = world.driver("whole");
    introduce(&mut whole, 2);
    let (header, sent) = large(60_000);
    assert!(a.send_with(&header, &sent).unwrap());
    next(&mut a);
    let got = whole.wait(HANG).unwrap().unwrap();
    assert_eq!(got[..10], header[..10]);
    assert!(got[12..] == sent);
    world.handle.ask(ControlRequest::Remove { name: "whole".into() }).unwrap();

    for (name, features) in [("mergeable", mergeable_features()), ("plain", plain_features())] {
        let mut plain = world.driver_with(name, DriverOptions { features, ..DriverOptions::default() });
        introduce(&mut plain, 2);
        assert!(a.send_with(&header, &sent).unwrap());
        let mut payload = Vec::new();
        while payload.len() < 60_000 {
            let got = plain.wait(HANG).unwrap().expect("no segment has come");
            assert_eq!(got[..10], [0; 10]);
            assert!(got.len() <= 12 + 54 + 1448);
            payload.extend_from_slice(&got[12 + 54..]);
        }
        assert!(payload == sent[54..]);
        world.handle.ask(ControlRequest::Remove { name: name.into() }).unwrap();
        next(&mut a);
    }
}

#[test]
fn datagrams_pass_whole_or_cut_as_their_receiver_can() {
    let world = World::new();
    let mut a = world.driver("a");
    let payload: Vec<u8> = (0..60_000).map(|n| (n % 251) as u8).collect();
    let [without4, without6] = datagram_features().map(|bit| !bit);
    let cases = [
        ("all", u64::MAX),
        ("6", without4),
        ("4", without6),
        ("mergeable", mergeable_features()),
        ("plain", plain_features()),
    ];
    for (name, features) in cases {
        let mut b = world.driver_with(name, DriverOptions { features, ..DriverOptions::default() });
        let offered = datagram_features().map(|bit| b.features() & bit != 0);
        assert_eq!(offered, [["all", "4"].contains(&name), ["all", "6"].contains(&name)]);
        introduce(&mut b, 2);
        next(&mut a);
        for v6 in [false, true] {
            let (header, sent) = (cut_header(v6, 0, 1472), datagram(v6, 0, 9, &payload));
            assert!(a.send_with(&header, &sent).unwrap());
            if offered[usize::from(v6)] {
                let got = b.wait(HANG).unwrap().unwrap();
                assert!(got[..10] == header[..10] && got[12..] == sent, "{name}, IPv6: {v6}");
                continue;
            }
            for (piece, n) in payload.chunks(1472).zip(9..) {
                let got = b.wait(HANG).unwrap().expect("no datagram has come");
                assert!(got[..10] == [0; 10] && got[12..] == datagram(v6, 0, n, piece), "{name}, IPv6: {v6}, {n}");
            }
        }
        assert!(b.take().unwrap().is_none());
        assert_eq!(world.counters(name).no_buffers, 0);
        world.handle.ask(ControlRequest::Remove { name: name.into() }).unwrap();
    }
    assert_eq!(world.counters("a").sent, 10);
}

#[test]
fn frame_too_large_for_receiver_is_dropped_and_next_arrives() {
    let world = World::new();
    let mut a = world.driver("a");
    let features = plain_features();
    let mut small = world.driver_with("small", DriverOptions { features, ..DriverOptions::default() });
    introduce(&mut small, 2);
    next(&mut a);
    assert!(a.send(&frame(mac(2), mac(1), 4000)).unwrap());
    let sent = frame(mac(2), mac(1), 1500);
    assert!(a.send(&sent).unwrap());
    assert!(next(&mut small) == sent);
    let counters = world.counters("small");
    assert_eq!((counters.no_buffers, counters.broken, counters.received), (1, 0, 1));
}

#[test]
fn address_that_another_port_has_is_refused() {
    let world = World::new();
    let ip: std::net::IpAddr = "10.0.0.1".parse().unwrap();
    world.add(PortSpec { mac: vec![MacAddress(mac(1))], ip: vec![ip], ..PortSpec::new("a") });
    for port in [
        PortSpec { mac: vec![MacAddress(mac(2)), MacAddress(mac(1))], ..PortSpec::new("b") },
        PortSpec { ip: vec![ip], ..PortSpec::new("b") },
    ] {
        assert!(world.handle.ask(ControlRequest::Add { port }).is_err());
    }
    world.add(PortSpec { mac: vec![MacAddress(mac(2))], ..PortSpec::new("b") });
}

#[test]
fn receiver_that_does_not_consume_costs_its_own_frames_only() {
    let world = World::with(|options| options.hold = Duration::from_millis(5));
    let (mut a, mut stopped, mut c) = (world.driver("a"), world.driver("stopped"), world.driver("c"));
    introduce(&mut stopped, 2);
    introduce(&mut c, 3);
    // Frames to the stopped one in front of each frame to the other.
    let mut got = 0_u32;
    for round in 0..1000_u32 {
        while !a.send(&frame(mac(2), mac(1), 100)).unwrap() {}
        let sent = [&frame(mac(3), mac(1), 10)[..], &round.to_le_bytes()].concat();
        while !a.send(&sent).unwrap() {}
        while let Some(frame) = c.take().unwrap() {
            got += u32::from(frame[12..18] == mac(3));
        }
    }
    while got < 1000 {
        got += u32::from(next(&mut c)[..6] == mac(3));
    }
    let counters = world.wait_counters("stopped", |counters| counters.no_buffers >= 740);
    assert!(counters.received <= 260, "{counters:?}");
    assert_eq!(world.counters("a").held, 1, "once it is known to be stopped nobody waits for it");
    // It goes on, and frames arrive again.
    while stopped.take().unwrap().is_some() {}
    stopped.ring_receive().unwrap();
    let sent = frame(mac(2), mac(1), 77);
    assert!(a.send(&sent).unwrap());
    while next(&mut stopped) != sent {}
}

#[test]
fn guest_reconnects_and_ports_go_while_frames_flow() {
    let world = World::new();
    let mut a = world.driver("a");
    let path = world.add(PortSpec::new("b"));
    for round in 0..20 {
        let mut b =
            GuestDriver::connect(&path, DriverOptions { enables_first: round % 2 == 0, ..DriverOptions::default() })
                .unwrap();
        introduce(&mut b, 2);
        next(&mut a);
        for _ in 0..50 {
            a.send(&frame(mac(2), mac(1), 3000)).unwrap();
        }
        assert_eq!(next(&mut b).len(), 3014);
    }
    world.handle.ask(ControlRequest::Remove { name: "b".into() }).unwrap();
    assert!(!path.exists());
    assert!(a.send(&frame(mac(2), mac(1), 10)).unwrap() && a.drain(HANG).unwrap());
    let mut b = world.driver("b");
    introduce(&mut b, 2);
    next(&mut a);
    assert!(a.send(&frame(mac(2), mac(1), 10)).unwrap());
    next(&mut b);
}

#[test]
fn spoofed_frames_are_counted_and_go_nowhere() {
    let world = World::new();
    let spec = PortSpec { mac: vec![MacAddress(mac(1))], ..PortSpec::new("a") };
    let mut a = GuestDriver::connect(&world.add(spec), DriverOptions::default()).unwrap();
    let mut b = world.driver("b");
    assert!(a.send(&frame(EVERYBODY, mac(7), 10)).unwrap());
    assert!(b.send(&frame(EVERYBODY, mac(1), 10)).unwrap());
    let sent = frame(EVERYBODY, mac(1), 99);
    assert!(a.send(&sent).unwrap());
    assert!(next(&mut b) == sent, "the first that arrives is the one that may");
    assert_eq!((world.counters("a").spoofed, world.counters("b").spoofed), (1, 1));
    assert!(a.take().unwrap().is_none());
}

#[test]
fn rate_holds_frames_back_and_loses_none() {
    let world = World::new();
    let spec = PortSpec { rate: Some(4_000_000), ..PortSpec::new("a") };
    let mut a = GuestDriver::connect(&world.add(spec), DriverOptions { size: 64, ..DriverOptions::default() }).unwrap();
    let mut b = world.driver("b");
    introduce(&mut b, 2);
    next(&mut a);
    let start = std::time::Instant::now();
    let mut got = 0;
    for _ in 0..400 {
        while !a.send(&frame(mac(2), mac(1), 1986)).unwrap() {}
        got += usize::from(b.take().unwrap().is_some());
    }
    while got < 400 {
        next(&mut b);
        got += 1;
    }
    // 800,000 bytes, 200,000 of them as a burst: it can take longer, and not less.
    assert!(start.elapsed() >= Duration::from_millis(140), "{:?}", start.elapsed());
}

#[test]
fn several_slow_receivers_delay_sender_as_one_does() {
    let world = World::with(|options| options.hold = Duration::from_millis(400));
    let mut a = world.driver("a");
    let mut slow: Vec<_> = (0..12).map(|n| world.driver(&format!("slow{n}"))).collect();
    for (n, driver) in slow.iter_mut().enumerate() {
        introduce(driver, 10 + n as u8);
        next(&mut a);
    }
    // All are full first, and then each is sent one frame that it cannot take.
    for _ in 0..260 {
        while !a.send(&frame(EVERYBODY, mac(1), 60)).unwrap() {}
    }
    assert!(a.drain(HANG).unwrap());
    for n in 0..12 {
        assert!(a.send(&frame(mac(10 + n), mac(1), 60)).unwrap());
    }
    assert!(a.drain(HANG).unwrap());
    let held = world.counters("a").held;
    assert!((1..=4).contains(&held), "the sender has waited for {held} of 12 receivers");
}

#[test]
fn port_of_a_machine_without_driver_is_occupied() {
    let world = World::new();
    let path = world.add(PortSpec::new("a"));
    let state = || world.report().ports.first().map(|row| (row.occupied, row.connected)).unwrap();
    let wait = |wanted| {
        let deadline = Instant::now() + HANG;
        while state() != wanted {
            assert!(Instant::now() < deadline, "{:?}", state());
            std::thread::yield_now();
        }
    };
    assert_eq!(state(), (false, false));
    // As QEMU while its guest is in the firmware: no ring runs.
    let front_end = UnixStream::connect(&path).unwrap();
    wait((true, false));
    drop(front_end);
    wait((false, false));
    let _driver = GuestDriver::connect(&path, DriverOptions::default()).unwrap();
    wait((true, true));
}

#[test]
fn load_generator_gets_each_frame_and_each_answer() {
    for length in [64, 1500, 65_000] {
        let world = World::new();
        let [a, b] = ["a", "b"].map(|name| world.add(PortSpec::new(name)));
        let mut generator = FrameGenerator::connect(&a, &b, length).unwrap();
        let (mut sent, mut lost) = (world.counters("b").received, 0);
        for _ in 0..3 {
            let rate = generator.stream(Duration::from_millis(20)).unwrap();
            assert!(rate.frames > 0 && rate.seconds > 0.0);
            sent += rate.frames;
            lost += rate.lost;
        }
        // Frames that were in flight at the end of a stretch arrive, and are not counted.
        assert!(lost == 0 && world.counters("b").received >= sent);
        for (asleep, pause) in [(false, Duration::ZERO), (true, Duration::ZERO), (true, Duration::from_millis(1))] {
            let times = generator.round_trips(RoundTrips { count: 50, pause, asleep }).unwrap();
            assert!(times.len() == 50 && times.iter().all(|time| *time > 0));
        }
    }
}

#[test]
fn port_with_several_queue_pairs_carries_frames_on_each() {
    let world = World::new();
    let options = DriverOptions { pairs: PAIRS, ..DriverOptions::default() };
    let (mut a, mut b) = (world.driver_with("a", options), world.driver_with("b", options));
    for (pair, n) in [(0, 1), (PAIRS - 1, 2)] {
        let (from, to) = if n == 1 { (&mut a, &mut b) } else { (&mut b, &mut a) };
        assert!(from.send_on(pair, &frame(EVERYBODY, mac(n), 46)).unwrap());
        let deadline = Instant::now() + HANG;
        while (0..PAIRS).all(|pair| to.take_on(pair).unwrap().is_none()) {
            assert!(Instant::now() < deadline, "a broadcast from the pair {pair} is lost");
        }
    }
    // Flows differ in the addresses of IP; each pair sends all of them.
    const FLOWS: u8 = 32;
    let mut places: BTreeMap<u8, (usize, Vec<u8>)> = BTreeMap::new();
    for (number, pair) in (0..PAIRS).cycle().take(6 * PAIRS).enumerate() {
        for flow in 0..FLOWS {
            let mut sent = frame(mac(2), mac(1), 200);
            (sent[26], sent[40]) = (flow, number as u8);
            while !a.send_on(pair, &sent).unwrap() {}
            let deadline = Instant::now() + HANG;
            let (at, got) = loop {
                if let Some(got) = (0..PAIRS).find_map(|pair| Some((pair, b.take_on(pair).unwrap()?))) {
                    break got;
                }
                assert!(Instant::now() < deadline, "frame {number} of the flow {flow} is lost");
            };
            assert!(got[12..] == sent, "frame {number} of the flow {flow} has changed");
            let (place, numbers) = places.entry(flow).or_insert((at, Vec::new()));
            assert_eq!(*place, at, "a flow keeps its queue");
            numbers.push(number as u8);
        }
    }
    let used: BTreeSet<usize> = places.values().map(|(place, _)| *place).collect();
    assert_eq!(used, (0..PAIRS).collect());
    assert!(places.values().all(|(_, numbers)| numbers.iter().copied().eq(0..6 * PAIRS as u8)));
}

#[test]
fn vlan_frame_is_forwarded_whole_from_card_to_card() {
    let world = World::new();
    let (mut a, mut b, mut c) = (world.driver("a"), world.driver("b"), world.driver("c"));
    introduce(&mut b, 2);
    next(&mut a);
    next(&mut c);
    // One tag, and two; with a full packet behind them.
    for tags in [&[0x81, 0, 0x20, 7][..], &[0x88, 0xa8, 0, 5, 0x81, 0, 0xe0, 9]] {
        let plain = frame(mac(2), mac(1), 1500);
        let sent = [&plain[..12], tags, &plain[12..]].concat();
        assert!(a.send(&sent).unwrap());
        assert!(next(&mut b) == sent, "the tags {tags:?}");
    }
    let header = cut_header(false, 2, 1472);
    let sent = datagram(false, 2, 1, &[7; 9000]);
    assert!(a.send_with(&header, &sent).unwrap());
    let got = b.wait(HANG).unwrap().unwrap();
    assert!(got[..10] == header[..10] && got[12..] == sent, "a large frame with two tags");
    assert!(c.take().unwrap().is_none(), "a tagged frame to a known station is not flooded");
}

#[test]
fn tagged_large_frame_is_cut_behind_its_tags() {
    let world = World::new();
    let mut a = world.driver("a");
    let payload: Vec<u8> = (0..20_000).map(|n| (n % 251) as u8).collect();
    for (name, features) in [("mergeable", mergeable_features()), ("plain", plain_features())] {
        let mut b = world.driver_with(name, DriverOptions { features, ..DriverOptions::default() });
        introduce(&mut b, 2);
        next(&mut a);
        for (v6, tags) in [(false, 0), (false, 1), (false, 2), (true, 0), (true, 1), (true, 2)] {
            let what = format!("{name}, IPv6: {v6}, {tags} tags");
            let (header, sent) = large_segment(v6, tags, 1448, &payload);
            assert!(a.send_with(&header, &sent).unwrap());
            for (n, expected) in segments(v6, tags, 1448, &payload).into_iter().enumerate() {
                let got = b.wait(HANG).unwrap().unwrap_or_else(|| panic!("{what}: no segment {n}"));
                assert!(got[..10] == [0; 10] && got[12..] == expected, "{what}: the segment {n}");
            }
            let (header, sent) = (cut_header(v6, tags, 1472), datagram(v6, tags, 9, &payload));
            assert!(a.send_with(&header, &sent).unwrap());
            for (piece, n) in payload.chunks(1472).zip(9..) {
                let got = b.wait(HANG).unwrap().unwrap_or_else(|| panic!("{what}: no datagram {n}"));
                assert!(got[..10] == [0; 10] && got[12..] == datagram(v6, tags, n, piece), "{what}: the datagram {n}");
            }
        }
        assert!(b.take().unwrap().is_none());
        world.handle.ask(ControlRequest::Remove { name: name.into() }).unwrap();
    }
    assert_eq!(world.counters("a").malformed, 0);
}

#[test]
fn idle_switch_is_not_woken() {
    let folder = tempfile::tempdir().unwrap();
    let (engine, handle) = Engine::new(EngineOptions::new(folder.path())).unwrap();
    let (told, thread) = std::sync::mpsc::channel();
    let running = std::thread::spawn(move || {
        told.send(rustix::thread::gettid()).unwrap();
        engine.run()
    });
    let status = format!("/proc/self/task/{}/status", thread.recv().unwrap().as_raw_nonzero());
    let switches = || -> String {
        let status = std::fs::read_to_string(&status).unwrap();
        status.lines().filter(|line| line.starts_with("voluntary")).collect()
    };
    let [a, b] = ["a", "b"].map(|name| {
        let spec = PortSpec::new(name);
        let path = spec.socket(folder.path());
        handle.ask(ControlRequest::Add { port: spec }).unwrap();
        path
    });
    let mut generator = FrameGenerator::connect(&a, &b, 64).unwrap();
    generator.stream(Duration::from_millis(5)).unwrap();
    // It polls for a moment, and is then woken by nothing.
    let deadline = Instant::now() + HANG;
    loop {
        let before = switches();
        std::thread::sleep(Duration::from_millis(2500));
        if switches() == before {
            break;
        }
        assert!(Instant::now() < deadline, "the switch is woken again and again");
    }
    // It still serves.
    generator.stream(Duration::from_millis(5)).unwrap();
    handle.ask(ControlRequest::Stop).unwrap();
    running.join().unwrap().unwrap();
}
