//! Clients and servers of calls that lie.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::call_records::*;
use common::world::World;
use common::*;
use partywall::rpc::{CallClient, CallError, CallServer, CallServerBuilder, HeapOptions};
use partywall::{ChannelRegion, Error, MessageListener, MessageSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const HEAP: u32 = u32::from_le_bytes(*b"heap");
const ECHO: u32 = partywall::rpc::Method::named("echo").number();

fn functions() -> CallServerBuilder {
    CallServer::builder()
        .method("null", |_| Ok(().into()))
        .method("echo", |call| Ok(call.args().to_vec().into()))
        .method("zeros", |call| Ok(call.heap().allocate(10_000)?.into()))
        .method("walk", |call| {
            let mut next = u64::from_le_bytes(call.args().array(0)?);
            while next != 0 {
                next = u64::from_le_bytes(call.follow(next, 8)?.array(0)?);
            }
            Ok(().into())
        })
}

/// A hostile client, and an honest one that must not notice it.
struct Lied {
    world: World,
    server: CallServer,
    honest: CallClient,
}

impl Lied {
    fn new(functions: CallServerBuilder) -> Self {
        let world = World::new();
        let server = functions.bind(&world.web, "calls").unwrap();
        // The honest client is of another domain, because clients of one domain share their limits.
        let honest = CallClient::builder().connect(&world.web, "web:calls").unwrap();
        Self { world, server, honest }
    }

    fn liar(&self) -> MessageSocket {
        let mut liar = MessageSocket::connect_with(&self.world.shop, "web:calls", &options()).unwrap();
        liar.send(&hello()).unwrap();
        liar
    }

    /// A heap of the liar's, as it was announced.
    fn heap(&self, liar: &mut MessageSocket, size: u64, address: u64) -> ChannelRegion {
        let mut region = None;
        eventually("the server takes a heap", || {
            region = liar.regions().add(HEAP, size).ok();
            region.is_some()
        });
        let region = region.unwrap();
        liar.send(&record(SEGMENT | BY_REFERENCE, region.number(), 0, &[address, size])).unwrap();
        region
    }

    /// Asserts that the server ends the liar's connection, and serves on.
    fn assert_ended(&self, what: &str, liar: MessageSocket) {
        self.honest.call("null", &[]).unwrap();
        eventually(what, || self.server.clients() == 1);
        drop(liar);
    }

    /// Asserts that the server still serves the liar.
    fn assert_served(&self, what: &str) {
        self.honest.call("null", &[]).unwrap();
        assert_eq!(self.server.clients(), 2, "{what}");
    }
}

#[test]
fn record_without_meaning_ends_that_client_alone() {
    let _guard = hang_guard();
    let lied = Lied::new(functions());
    let cases = [
        ("kind 0", record(0, 0, 0, &[])),
        ("kind 255", record(255, 0, 0, &[])),
        ("unknown flag", record(CALL | 2 << 8, 0, 0, &[])),
        ("too long", record(CALL | 41 << 32, 0, 0, &[])),
        ("second hello", hello()),
        ("reply to a server", record(REPLY, 0, 0, &[])),
        ("release of nothing", record(RELEASE | BY_REFERENCE, 0, 0, &[0x3000_0000_0000, 0])),
        ("release inline", record(RELEASE, 0, 0, &[])),
        ("segment that was not passed on", record(SEGMENT | BY_REFERENCE, 9, 0, &[0x3000_0000_0000, 4096])),
        ("segment past the last address", record(SEGMENT | BY_REFERENCE, 1, 0, &[u64::MAX - 4096, 8192])),
        ("half a record", vec![0; 24]),
    ];
    for (what, lie) in cases {
        let mut liar = lied.liar();
        liar.send(&lie).unwrap();
        if lie.len() < 56 {
            liar.finish();
        }
        lied.assert_ended(what, liar);
    }
    for first in [record(HELLO, 0, 2, &[]), record(CALL, 0, 0, &[]), record(HELLO, 1, 1, &[])] {
        let mut liar = MessageSocket::connect_with(&lied.world.shop, "web:calls", &options()).unwrap();
        liar.send(&first).unwrap();
        lied.assert_ended("no hello", liar);
    }
}

#[test]
fn pointer_outside_the_heap_is_an_error_of_that_call() {
    let _guard = hang_guard();
    let lied = Lied::new(functions());
    let mut liar = lied.liar();
    let base = 0x3000_4000_0000;
    let _heap = lied.heap(&mut liar, 8192, base);
    for (address, len) in [
        (0, 8),
        (base - 1, 8),
        (base + 8192, 1),
        (base + 8000, 193),
        (base, u64::MAX),
        (u64::MAX, 8),
        (u64::MAX - 8, 16),
        (base + 8192, 0),
    ] {
        liar.send(&record(CALL | BY_REFERENCE, 0, ECHO, &[address, len])).unwrap();
        liar.send(&record(NOTICE | BY_REFERENCE, 0, ECHO, &[address, len])).unwrap();
    }
    lied.assert_served("errors, and no end");
    // A segment over the one that is there.
    liar.send(&record(SEGMENT | BY_REFERENCE, 7, 0, &[base + 4096, 8192])).unwrap();
    lied.assert_ended("overlapping segments", liar);
}

#[test]
fn structure_without_an_end_is_left_at_the_limit() {
    let _guard = hang_guard();
    let lied = Lied::new(functions().max_follows(1000));
    let mut block = lied.honest.heap().allocate(8).unwrap();
    let address = block.address().to_le_bytes();
    block.copy_from_slice(&address);
    assert!(matches!(lied.honest.call("walk", &address), Err(CallError::BadPointer)));
    lied.honest.call("null", &[]).unwrap();
}

#[test]
fn arguments_that_change_under_the_server_are_copied_once() {
    let _guard = hang_guard();
    static ENDED: AtomicBool = AtomicBool::new(false);
    let two_looks = functions().method("twice", |call| {
        // A length that is judged and then used must be the same: the reader decides by its copy.
        let first: [u8; 8] = call.args().array(0)?;
        let len = u64::from_le_bytes(first) % 64;
        let mut bytes = vec![0; len as usize];
        call.args().read_at(8, &mut bytes)?;
        Ok(bytes.into())
    });
    let lied = Lied::new(two_looks);
    let mut liar = lied.liar();
    let mut heap = lied.heap(&mut liar, 4096, 0x3000_8000_0000);
    let scribbler = std::thread::spawn(move || {
        let mut n = 0u64;
        while !ENDED.load(Ordering::Relaxed) {
            n += 1;
            heap.bytes_mut()[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        }
        heap
    });
    let twice = partywall::rpc::Method::named("twice").number();
    for _ in 0..400 {
        liar.send(&record(NOTICE | BY_REFERENCE, 0, twice, &[0x3000_8000_0000, 72])).unwrap();
    }
    lied.honest.call("null", &[]).unwrap();
    ENDED.store(true, Ordering::Relaxed);
    scribbler.join().unwrap();
    lied.assert_served("whatever the bytes were");
}

#[test]
fn client_that_reads_no_replies_is_disconnected() {
    let _guard = hang_guard();
    let lied = Lied::new(functions());
    let mut liar = lied.liar();
    liar.set_timeout(Some(Duration::from_secs(20)));
    let mut error = None;
    for n in 0..10_000 {
        if let Err(e) = liar.send(&record(CALL, n, ECHO, &[])) {
            error = Some(e);
            break;
        }
    }
    assert!(matches!(error, Some(Error::Accused | Error::Closed(_) | Error::Dead { .. })), "{error:?}");
    lied.assert_ended("no replies are read", liar);
}

#[test]
fn client_that_never_releases_exhausts_its_own_heap_alone() {
    let _guard = hang_guard();
    let small = HeapOptions::default().first(1 << 16).max(1 << 17);
    let lied = Lied::new(functions().heap(small));
    let mut liar = lied.liar();
    liar.regions().take(HEAP, 8, 1 << 30).unwrap();
    let zeros = partywall::rpc::Method::named("zeros").number();
    for n in 0..400 {
        liar.send(&record(CALL, n, zeros, &[])).unwrap();
    }
    assert_eq!(lied.honest.call("zeros", &[]).unwrap().len(), 10_000);
    lied.assert_served("it may hold what it was lent");
    drop(liar);
    eventually("its end gives all back", || lied.server.clients() == 1);
}

#[test]
fn release_twice_ends_that_client() {
    let _guard = hang_guard();
    let (told, addresses) = channel();
    let told = std::sync::Mutex::new(told);
    let lied = Lied::new(functions().method("lend", move |call| {
        let block = call.heap().allocate(100)?;
        told.lock().unwrap().send(block.address()).unwrap();
        Ok(block.into())
    }));
    let mut liar = lied.liar();
    liar.regions().take(HEAP, 8, 1 << 30).unwrap();
    liar.send(&record(CALL, 0, partywall::rpc::Method::named("lend").number(), &[])).unwrap();
    let address = addresses.recv_timeout(HANG).unwrap();
    liar.send(&record(RELEASE | BY_REFERENCE, 0, 0, &[address, 0])).unwrap();
    lied.assert_served("once is right");
    liar.send(&record(RELEASE | BY_REFERENCE, 0, 0, &[address, 0])).unwrap();
    lied.assert_ended("twice is a lie", liar);
}

/// A server that sends these records behind its hello, once it has a call.
fn lying_server(world: &World, lies: Vec<Vec<u8>>) -> Receiver<MessageSocket> {
    let mut listener = MessageListener::bind(&world.web, "lies", &options()).unwrap();
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut socket = listener.accept().unwrap().0;
        socket.send(&hello()).unwrap();
        for lie in lies {
            socket.send(&lie).unwrap();
        }
        let _ = sender.send(socket);
    });
    receiver
}

#[test]
fn server_that_lies_is_corrupt_to_its_client() {
    let _guard = hang_guard();
    let cases = [
        ("answers what was not asked", record(REPLY, 77, 0, &[])),
        ("answers another generation", record(REPLY, 1 << 20, 0, &[])),
        ("unknown status", record(REPLY | 99 << 16, 0, 0, &[])),
        ("the application's error 0", record(REPLY | 3 << 16, 0, 0, &[])),
        ("an error that C has no number for", record(REPLY | 3 << 16, 0, i32::MAX as u32 - 999, &[])),
        ("the error that C would take for success", record(REPLY | 3 << 16, 0, u32::MAX - 999, &[])),
        ("result outside its heap", record(REPLY | BY_REFERENCE, 0, 0, &[0x3000_0000_0000, 8])),
        ("calls its client", record(CALL, 0, 0, &[])),
        ("releases", record(RELEASE | BY_REFERENCE, 0, 0, &[0, 0])),
        ("segment that was not passed on", record(SEGMENT | BY_REFERENCE, 1, 0, &[0x3000_0000_0000, 4096])),
        ("nonsense", vec![0xff; 56]),
    ];
    for ((what, lie), is_held) in cases.iter().flat_map(|case| [(case, false), (case, true)]) {
        let world = World::new();
        let server = lying_server(&world, vec![lie.clone()]);
        let client = CallClient::builder().connect(&world.shop, "web:lies").unwrap();
        let call = || if is_held { client.exclusive()?.call("echo", &[]) } else { client.call("echo", &[]) };
        let result = call();
        assert!(matches!(result, Err(CallError::Corrupt(_))), "{what}: {result:?}");
        let again = call();
        assert!(matches!(again, Err(CallError::Corrupt(_))), "{what}, again: {again:?}");
        drop(server.recv_timeout(HANG));
    }
}

#[test]
fn text_of_an_error_is_copied_up_to_its_limit() {
    let _guard = hang_guard();
    let world = World::new();
    let mut listener = MessageListener::bind(&world.web, "lies", &options()).unwrap();
    let server = std::thread::spawn(move || {
        let mut socket = listener.accept().unwrap().0;
        socket.send(&hello()).unwrap();
        let mut region = None;
        eventually("the client takes a heap", || {
            region = socket.regions().add(HEAP, 1 << 20).ok();
            region.is_some()
        });
        let (region, base) = (region.unwrap(), 0x3000_4000_0000);
        socket.send(&record(SEGMENT | BY_REFERENCE, region.number(), 0, &[base, 1 << 20])).unwrap();
        socket.send(&record(REPLY | BY_REFERENCE | 2 << 16, 0, 0, &[base, 1 << 20])).unwrap();
        (socket, region)
    });
    let client = CallClient::builder().connect(&world.shop, "web:lies").unwrap();
    match client.call("echo", &[]) {
        Err(CallError::Refused(text)) => assert_eq!(text.len(), 4096),
        other => panic!("{other:?}"),
    }
    drop(server.join().unwrap());
}

#[test]
fn heap_at_addresses_of_another_channel_is_mapped_elsewhere() {
    let _guard = hang_guard();
    let (told, offsets) = channel();
    let told = std::sync::Mutex::new(told);
    let lied = Lied::new(functions().method("offset", move |call| {
        told.lock().unwrap().send(call.args().offset()).unwrap();
        Ok(().into())
    }));
    let offset = partywall::rpc::Method::named("offset").number();
    // The world's channels have small numbers, and this is where the 300th has its heap.
    let anothers = 0x3000_0000_0000 + (600 << 32) + 4096;
    let mut liar = lied.liar();
    let _heap = lied.heap(&mut liar, 8192, anothers);
    liar.send(&record(NOTICE | BY_REFERENCE, 0, offset, &[anothers, 8])).unwrap();
    assert_ne!(offsets.recv_timeout(HANG).unwrap(), Some(0));
    lied.assert_served("it is read where it is");
}

#[test]
fn server_that_answers_twice_is_corrupt() {
    let _guard = hang_guard();
    let world = World::new();
    let server = lying_server(&world, vec![record(REPLY, 0, 0, &[]), record(REPLY, 0, 0, &[])]);
    let client = CallClient::builder().connect(&world.shop, "web:lies").unwrap();
    client.call("echo", &[]).unwrap();
    let result = client.call("echo", &[]);
    assert!(matches!(result, Err(CallError::Corrupt(_))), "{result:?}");
    drop(server);
}

#[test]
fn server_that_never_answers_is_timed_out() {
    let _guard = hang_guard();
    let world = World::new();
    let server = lying_server(&world, Vec::new());
    let client = CallClient::builder().timeout(Duration::from_millis(5)).connect(&world.shop, "web:lies").unwrap();
    // More than may be unanswered, and more than the ring holds.
    for _ in 0..600 {
        let result = client.call_within(Duration::from_millis(1), "echo", &[]);
        assert!(matches!(result, Err(CallError::TimedOut)), "{result:?}");
        if client.start("echo", &[]).is_err() {
            break;
        }
    }
    for _ in 0..2000 {
        if client.notify("echo", &[]).is_err() {
            drop(server);
            return;
        }
    }
    panic!("a ring that nobody reads took everything");
}
