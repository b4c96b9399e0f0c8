//! Further regions of a channel: between two processes, across a broker's restart, and with peers and brokers that lie.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{self, Daemon, child};
use common::raw::{RawPeer, YesBroker, say};
use common::*;
use partywall::{Domain, Error, Options, PeerChannelRegion, Refusal, Regions, Stream};
use partywall_protocol::wire::{Message, RegionReference, Side};
use partywall_region::{OwnRegion, RegionOptions};
use partywall_shm::layout::{Geometry, PAGE, RegionKind};
use partywall_shm::state::TxState;
use rustix::fd::{AsFd, OwnedFd};
use std::io::{Read, Write};
use std::os::fd::BorrowedFd;

const KIND: u32 = 0x7461_626c;
const SIZE: u64 = 1 << 20;
/// How many regions the process of `child_main` adds, one after the other.
const ROUNDS: u64 = 20;

fn refused<T: std::fmt::Debug>(result: Result<T, Error>, wanted: Refusal) {
    assert!(matches!(&result, Err(Error::Refused { code, .. }) if *code == wanted), "{result:?}");
}

/// The next region, once it has come.
fn next(regions: &Regions) -> PeerChannelRegion {
    let mut found = None;
    eventually("a region comes", || {
        found = regions.next().unwrap();
        found.is_some()
    });
    found.unwrap()
}

#[test]
fn child_main() {
    let Some((role, broker)) = process::role() else { return };
    assert_eq!(role, "writer");
    let shop = Domain::builder().name("shop").broker(&broker).join().unwrap();
    let mut stream = shop.connect("web:tables").unwrap();
    stream.read_exact(&mut [0]).unwrap();
    let regions = stream.regions();
    for round in 0..ROUNDS {
        let mut region = regions.add(KIND, SIZE).unwrap();
        let content = Pattern.bytes(round * SIZE, SIZE as usize);
        region.bytes_mut().copy_from_slice(&content);
        stream.write_all(&[1]).unwrap();
        // Held until the other process has read it.
        stream.read_exact(&mut [0]).unwrap();
    }
    let _held = regions.add(KIND, SIZE).unwrap();
    stream.write_all(&[2]).unwrap();
    // Until it is killed.
    let _ = stream.read(&mut [0]);
}

#[test]
fn region_is_available_when_its_announcement_is_read() {
    let _guard = hang_guard();
    let world = World::new();
    let mut listener = world.web.bind("tables").unwrap();
    let mut writer = child("writer", world.broker.path());
    let mut stream = listener.accept().unwrap().0;
    let regions = stream.regions();
    // One at a time: each must stop counting before the next one is added.
    regions.take(KIND, 1, SIZE).unwrap();
    stream.write_all(b"!").unwrap();
    let mut content = vec![0; SIZE as usize];
    for round in 0..ROUNDS {
        stream.read_exact(&mut [0]).unwrap();
        let region = regions.next().unwrap().expect("it was added before the byte was sent");
        assert_eq!((region.kind(), u64::from(region.number()), region.size()), (KIND, round + 1, SIZE));
        region.read_at(0, &mut content).unwrap();
        Pattern.check(round * SIZE, &content);
        assert!(!region.is_given_up().unwrap());
        drop(region);
        stream.write_all(b"!").unwrap();
    }
    // The memory outlives the process that made it, and is returned when it is dropped.
    stream.read_exact(&mut [0]).unwrap();
    let last = next(&regions);
    writer.kill();
    assert!(!writer.wait());
    assert_fails!(stream.read(&mut [0]), Error::Dead { .. });
    last.read_at(0, &mut content).unwrap();
    assert!(content.iter().all(|byte| *byte == 0));
    assert!(!last.is_given_up().unwrap(), "a process that was killed gave nothing up");
    drop(stream);
    assert_fails!(regions.next(), Error::Closed(_));
    last.read_at(SIZE - 1, &mut [0]).unwrap();
    drop(last);
    world.assert_no_channel_is_left();
}

#[test]
fn region_is_refused_to_its_owner_unless_the_peer_takes_it() {
    let _guard = hang_guard();
    let world = World::new();
    let (client, server) = world.connection(&Options::default());
    refused(client.regions().add(KIND, 4096), Refusal::KindMismatch);
    server.regions().take(KIND, 2, 3 * 4096).unwrap();
    refused(client.regions().add(KIND + 1, 4096), Refusal::KindMismatch);
    refused(server.regions().add(KIND, 4096), Refusal::KindMismatch);
    let first = client.regions().add(KIND, 4096).unwrap();
    refused(client.regions().add(KIND, 4 * 4096), Refusal::Quota);
    let _second = client.regions().add(KIND, 8192).unwrap();
    refused(client.regions().add(KIND, 4096), Refusal::Quota);
    // Given up by the owner alone, it still counts for the reader.
    drop(first);
    refused(client.regions().add(KIND, 4096), Refusal::Quota);
    let theirs = next(&server.regions());
    assert!(theirs.is_given_up().unwrap());
    drop(theirs);
    // The reader's word reaches the broker by another session.
    eventually("the place is free again", || client.regions().add(KIND, 4096).is_ok());
    for size in [0, 1, 4095, 6000, 1 << 31, u64::MAX] {
        assert_fails!(client.regions().add(KIND, size), Error::Invalid(_));
    }
    server.regions().take(KIND, 0, 0).unwrap();
    refused(client.regions().add(KIND, 4096), Refusal::KindMismatch);
}

#[test]
fn owner_has_at_most_eight_regions_of_a_channel() {
    let _guard = hang_guard();
    let world = World::new();
    let (client, server) = world.connection(&Options::default());
    server.regions().take(KIND, 200, SIZE).unwrap();
    let regions = client.regions();
    let mut owned: Vec<_> = (0..8).map(|_| regions.add(KIND, 4096).unwrap()).collect();
    refused(regions.add(KIND, 4096), Refusal::Quota);
    owned.pop();
    owned.push(regions.add(KIND, 4096).unwrap());
    assert_eq!(owned.iter().map(|region| region.number()).max(), Some(10), "a refused number is not used again");
}

/// A stream by a broker that can be restarted: the connecting side, the accepting side, and their domains.
fn connected_by(daemon: &Daemon) -> (Stream, Stream, [Domain; 2]) {
    let join = |name: &str| Domain::builder().name(name).broker(daemon.path()).join().unwrap();
    let (web, shop) = (join("web"), join("shop"));
    let mut listener = web.bind("tables").unwrap();
    let client = shop.connect("web:tables").unwrap();
    (client, listener.accept().unwrap().0, [web, shop])
}

#[test]
fn accepted_region_kinds_are_repeated_to_next_broker() {
    let _guard = hang_guard();
    let mut daemon = Daemon::start();
    let (client, server, _domains) = connected_by(&daemon);
    server.regions().take(KIND, 4, SIZE).unwrap();
    let before = client.regions().add(KIND, 4096).unwrap();
    let held = next(&server.regions());
    daemon.restart();
    let mut after = None;
    eventually("the new broker passes on a region", || {
        after = client.regions().add(KIND, 8192).ok();
        after.is_some()
    });
    let theirs = next(&server.regions());
    assert_eq!(theirs.size(), 8192);
    assert!(theirs.number() > held.number(), "numbers go up across brokers");
    held.read_at(0, &mut [0]).unwrap();
    drop(before);
    assert!(held.is_given_up().unwrap());
}

#[test]
fn regions_count_for_both_sides_after_a_restart_of_the_broker() {
    let _guard = hang_guard();
    let mut daemon = Daemon::start();
    let (client, server, _domains) = connected_by(&daemon);
    let (regions, theirs) = (client.regions(), server.regions());
    const MANY: u32 = KIND + 1;
    const OF_READER: u32 = KIND + 2;
    theirs.take(KIND, 1, SIZE).unwrap();
    theirs.take(MANY, 200, SIZE).unwrap();
    regions.take(OF_READER, 1, SIZE).unwrap();
    let mut single = regions.add(KIND, 4096).unwrap();
    single.bytes_mut()[..5].copy_from_slice(b"alive");
    let held = next(&theirs);
    let mut many: Vec<_> = (0..7).map(|_| regions.add(MANY, 4096).unwrap()).collect();
    daemon.restart();
    // A side reports the regions that it has first, and what it takes last. The owner adds none before it has reported all: the new one would
    // count before those.
    eventually("the owner has reported its regions", || theirs.add(OF_READER, 4096).is_ok());
    let owned = failure("add a ninth", regions.add(MANY, 4096));
    assert!(owned.to_string().contains("this side owns 8"), "{owned}");
    let mut alive = [0; 5];
    held.read_at(0, &mut alive).unwrap();
    assert_eq!(&alive, b"alive");
    // Given up, they stop counting.
    drop(many.pop());
    eventually("the reader has reported its regions", || match regions.add(KIND, 4096) {
        Ok(_) => panic!("the reader takes one region of this kind, and has one"),
        Err(Error::Refused { code: Refusal::KindMismatch, .. }) => false,
        Err(Error::Refused { code: Refusal::Quota, reason }) => {
            assert!(reason.contains("the other side has 1 regions"), "{reason}");
            true
        }
        Err(e) => panic!("{e}"),
    });
    // It reports the kinds that it takes in order.
    eventually("the reader has reported the other kind", || match regions.add(MANY, 4096) {
        Err(Error::Refused { code: Refusal::KindMismatch, .. }) => false,
        added => {
            many.push(added.unwrap());
            true
        }
    });
    drop(single);
    held.give_up().unwrap();
    let _again = regions.add(KIND, 4096).unwrap();
    refused(regions.add(MANY, 4096), Refusal::Quota);
}

/// Passes a region on as a lying broker would, to a stream that takes two regions of [`KIND`], 64 KiB together.
fn passed_on(peer: &RawPeer, number: u32, kind: u32, region: RegionReference, fds: &[BorrowedFd<'_>]) {
    let side = if peer.connecting { Side::Connecting } else { Side::Accepting };
    let message = Message::RegionAdded { channel: peer.channel, side, number, kind, region };
    say(peer.session.as_ref().unwrap().as_fd(), 0, &message, fds);
}

fn memory(kind: RegionKind, size: u64) -> (Geometry, OwnRegion, OwnedFd) {
    let (region, memory) = OwnRegion::create(&RegionOptions { kind, ..RegionOptions::endpoint(size) }).unwrap();
    (region.geometry(), region, memory)
}

#[test]
fn wrong_region_is_refused_and_stream_continues() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (mut stream, mut peer, _listener, _session) = broker.accepted(&fixed(4096));
    stream.regions().take(KIND, 2, 1 << 16).unwrap();
    let (geometry, _region, honest) = memory(RegionKind::Further, 8192);
    let reference = RegionReference::own_memory(geometry);
    let (_, _ring, of_ring) = memory(RegionKind::Extension, 8192);
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, PAGE + 8192).unwrap();
    let (_, _short, shorter) = memory(RegionKind::Further, 4096);
    for (number, (what, lie)) in
        (1..).zip([("of another kind", &of_ring), ("not sealed", &unsealed), ("too small", &shorter)])
    {
        passed_on(&peer, number, KIND, reference, &[lie.as_fd()]);
        let mut result = Ok(None);
        eventually("it is looked at", || {
            result = stream.regions().next();
            !matches!(result, Ok(None))
        });
        assert!(matches!(result, Err(Error::Corrupt(_) | Error::Memory(_))), "{what}: {result:?}");
    }
    // Regions that this side does not take are dropped: another kind, more than it takes, and impossible shapes.
    passed_on(&peer, 4, KIND + 1, reference, &[honest.as_fd()]);
    let (wide, _wide, large) = memory(RegionKind::Further, 1 << 17);
    passed_on(&peer, 5, KIND, RegionReference::own_memory(wide), &[large.as_fd()]);
    passed_on(&peer, 6, KIND, RegionReference::with_ring(77), &[honest.as_fd()]);
    passed_on(&peer, 7, KIND, reference, &[honest.as_fd()]);
    assert_eq!(next(&stream.regions()).number(), 7, "nothing else was kept");
    assert!(stream.regions().next().unwrap().is_none());
    // An announcement without its memory is an error of that region alone.
    passed_on(&peer, 8, KIND, reference, &[]);
    let mut result = Ok(None);
    eventually("it is looked at", || {
        result = stream.regions().next();
        !matches!(result, Ok(None))
    });
    assert!(matches!(result, Err(Error::System { .. })), "{result:?}");
    peer.put(0, b"still");
    let mut still = [0; 5];
    stream.read_exact(&mut still).unwrap();
    assert_eq!(&still, b"still");
}

#[test]
fn invalid_state_word_of_region_is_corrupt() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (stream, peer, _listener, _session) = broker.accepted(&fixed(4096));
    stream.regions().take(KIND, 2, 1 << 16).unwrap();
    let (geometry, region, honest) = memory(RegionKind::Further, 8192);
    passed_on(&peer, 1, KIND, RegionReference::own_memory(geometry), &[honest.as_fd()]);
    let theirs = next(&stream.regions());
    assert!(!theirs.is_given_up().unwrap());
    region.page().tx.control.state.store(77, std::sync::atomic::Ordering::Release);
    assert_fails!(theirs.is_given_up(), Error::Corrupt(_));
    TxState::Finished.store(&region.page().tx.control.state);
    assert!(theirs.is_given_up().unwrap());
}
