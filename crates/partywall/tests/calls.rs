//! Calls between two domains: results, errors, threads, memory, and the ends of both sides.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::gate::gate;
use common::process::{self, child};
use common::*;
use partywall::rpc::{CallClient, CallError, CallServer, CallServerBuilder, HeapOptions};
use partywall::{Domain, Error};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// A list of values in the heap of a client, by the address of its first node.
fn list(client: &CallClient, values: u64) -> (u64, Vec<partywall::rpc::Block>) {
    let (mut first, mut nodes) = (0u64, Vec::new());
    for value in 0..values {
        let mut node = client.heap().allocate(16).unwrap();
        node[..8].copy_from_slice(&value.to_le_bytes());
        node[8..].copy_from_slice(&first.to_le_bytes());
        first = node.address();
        nodes.push(node);
    }
    (first, nodes)
}

/// Sums a list in the caller's heap. With the second argument, reads each node in place and by the pointer as it is.
fn functions() -> CallServerBuilder {
    CallServer::builder()
        .method("null", |_| Ok(().into()))
        .method("echo", |call| Ok(call.args().to_vec().into()))
        .method("len", |call| Ok((call.args().len() as u64).to_le_bytes().into()))
        .method("panic", |_| panic!("a function of the test"))
        .method("offset", |call| Ok(call.args().offset().unwrap().to_le_bytes().into()))
        .method("sum", |call| {
            let (mut next, mut sum) = (u64::from_le_bytes(call.args().array(0)?), 0u64);
            while next != 0 {
                let node = call.follow(next, 16)?;
                sum += u64::from_le_bytes(node.array(0)?);
                next = u64::from_le_bytes(node.array(8)?);
            }
            Ok(sum.to_le_bytes().into())
        })
        .method("zeros", |call| {
            let len = u64::from_le_bytes(call.args().array(0)?);
            let mut block = call.heap().allocate(len as usize)?;
            block.fill(0);
            Ok(block.into())
        })
        .method("end", |_| std::process::abort())
        .method("stay", |call| {
            // Tells its caller in another process that it has begun.
            std::fs::write(OsStr::from_bytes(&call.args().to_vec()), []).unwrap();
            loop {
                std::thread::park();
            }
        })
}

fn number(reply: &partywall::rpc::Reply) -> u64 {
    u64::from_le_bytes(reply.array(0).unwrap())
}

#[test]
fn child_main() {
    let Some((role, broker)) = process::role() else { return };
    let join = |name: &str| Domain::builder().name(name).broker(&broker).join().unwrap();
    match role.as_str() {
        "server" => {
            let _server = functions().bind(&join("web"), "child").unwrap();
            std::thread::park();
        }
        // Ends at each step of a call, as the service's name says.
        step => {
            let client = CallClient::builder().connect(&join("shop"), "web:calls").unwrap();
            let mut calls = Vec::new();
            let mut held = None;
            match step {
                "connects" => {}
                "allocates" => held = Some(client.call("len", &client.heap().allocate(1 << 20).unwrap()).unwrap()),
                "calls" => calls.extend((0..500).map(|_| client.start("zeros", &10_000u64.to_le_bytes()).unwrap())),
                "holds" => held = Some(client.call("zeros", &100_000u64.to_le_bytes()).unwrap()),
                other => panic!("{other}"),
            }
            let _alive = (calls, held);
            std::process::abort();
        }
    }
}

/// A process that serves `web:child`, and its client in this one.
fn other_process(world: &World) -> (process::Process, CallClient) {
    let server = child("server", world.broker.path());
    let mut client = None;
    eventually("the server of another process is there", || {
        client = CallClient::builder().connect(&world.shop, "web:child").ok();
        client.is_some()
    });
    (server, client.unwrap())
}

use common::world::World;

#[test]
fn bytes_of_every_size_come_back() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions().bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    for len in [0, 1, 39, 40, 41, 64, 4095, 4096, 100_000, 1 << 20] {
        let sent = Pattern.bytes(len as u64, len);
        let reply = client.call("echo", &sent).unwrap();
        assert!(reply.to_vec() == sent, "{len} bytes, copied");
        let mut block = client.heap().allocate(len).unwrap();
        block.copy_from_slice(&sent);
        assert!(client.call("echo", &block).unwrap().to_vec() == sent, "{len} bytes, in the heap");
    }
    assert_eq!(client.heap().stats().blocks, 0, "copies of arguments were given back");
}

#[test]
fn call_errors_name_cause_and_keep_connection() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions()
        .method("fail", |_| Err(CallError::application(77, "x".repeat(5000))))
        .bind(&world.web, "calls")
        .unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    assert!(matches!(client.call("nothing", &[]), Err(CallError::UnknownMethod)));
    assert!(matches!(client.call("panic", &[]), Err(CallError::Panicked)));
    let Err(CallError::Application { code: 77, message }) = client.call("fail", &[]) else { panic!("no error") };
    assert_eq!(message, "x".repeat(4096), "a longer text is cut");
    assert!(matches!(client.call("zeros", &u64::MAX.to_le_bytes()), Err(CallError::OutOfMemory(_))));
    assert!(matches!(client.call("zeros", &[]), Err(CallError::BadPointer)), "its arguments are too short");
    client.call("null", &[]).unwrap();
}

#[test]
fn code_that_no_error_has_is_refused_by_the_server() {
    let _guard = hang_guard();
    let world = World::new();
    let failing = CallServer::builder()
        .method("fail", |call| Err(CallError::application(u32::from_le_bytes(call.args().array(0)?), "a text")));
    let _server = failing.bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    let largest = i32::MAX as u32 - 1000;
    for (code, is_passed_on) in [(1, true), (largest, true), (0, false), (largest + 1, false), (u32::MAX, false)] {
        match client.call("fail", &code.to_le_bytes()) {
            Err(CallError::Application { code: got, .. }) => assert!(is_passed_on && got == code, "{code}: {got}"),
            Err(CallError::Refused(text)) => assert!(!is_passed_on && text.ends_with("a text"), "{code}: {text}"),
            other => panic!("{code}: {other:?}"),
        }
    }
}

#[test]
fn service_that_is_not_of_calls_is_refused() {
    let _guard = hang_guard();
    let world = World::new();
    let mut listener =
        partywall::MessageListener::bind(&world.web, "messages", &partywall::Options::default()).unwrap();
    let messages = std::thread::spawn(move || {
        let mut socket = listener.accept().unwrap().0;
        socket.send(&[7; 100]).unwrap();
        socket
    });
    let result = CallClient::builder().connect(&world.shop, "web:messages");
    assert!(matches!(result, Err(Error::Corrupt(_))), "{result:?}");
    drop(messages.join().unwrap());
}

#[test]
fn many_calls_under_way_are_each_answered_once() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions().bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    // More than may be unanswered: to begin one more receives some.
    let calls: Vec<_> = (0..10_000u64).map(|n| client.start("echo", &n.to_le_bytes()).unwrap()).collect();
    for (n, call) in calls.into_iter().enumerate().rev() {
        assert_eq!(number(&call.wait().unwrap()), n as u64);
    }
    // Results by reference, half of which no caller waits for.
    let calls: Vec<_> = (0..2000).map(|_| client.start("zeros", &1000u64.to_le_bytes()).unwrap()).collect();
    for call in calls.into_iter().step_by(2) {
        assert_eq!(call.wait().unwrap().len(), 1000);
    }
    client.call("null", &[]).unwrap();
}

#[test]
fn threads_share_a_connection() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions().bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let client = &client;
            scope.spawn(move || {
                for n in 0..500 {
                    let sent = Pattern.bytes(thread << 32 | n, (n * 7 % 300) as usize);
                    assert!(client.call("echo", &sent).unwrap().to_vec() == sent, "call {n} of thread {thread}");
                }
            });
        }
    });
    assert_eq!(client.heap().stats().blocks, 0);
}

#[test]
fn slow_call_of_one_client_delays_no_other() {
    let _guard = hang_guard();
    let world = World::new();
    let (begun, wait) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let in_call = (Arc::clone(&begun), Arc::clone(&wait));
    let slow = functions().method("wait", move |_| {
        in_call.0.wait();
        in_call.1.wait();
        Ok(().into())
    });
    let server = slow.bind(&world.web, "calls").unwrap();
    let connect = || CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    let (one, other) = (connect(), connect());
    let waiting = one.start("wait", &[]).unwrap();
    begun.wait();
    other.call("null", &[]).unwrap();
    assert!(matches!(one.call_within(Duration::from_millis(5), "null", &[]), Err(CallError::TimedOut)));
    wait.wait();
    waiting.wait().unwrap();
    one.call("null", &[]).unwrap();
    assert_eq!(server.clients(), 2);
    drop(one);
    eventually("a client that has gone is forgotten", || server.clients() == 1);
}

#[test]
fn structure_in_another_process_is_read_at_its_own_addresses() {
    let _guard = hang_guard();
    let world = World::new();
    let (mut server, client) = other_process(&world);
    let (first, nodes) = list(&client, 1000);
    assert_eq!(number(&client.call("sum", &first.to_le_bytes()).unwrap()), (0..1000u64).sum::<u64>());
    let block = client.heap().allocate(100).unwrap();
    assert_eq!(number(&client.call("offset", &block).unwrap()), 0, "mapped at the same address on both sides");
    drop(nodes);
    server.kill();
    assert!(matches!(client.call("null", &[]), Err(CallError::Dead { .. })));
}

#[test]
fn heap_in_the_same_process_is_read_by_an_offset() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions().bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    let block = client.heap().allocate(100).unwrap();
    assert_ne!(number(&client.call("offset", &block).unwrap()), 0, "the address is taken by the client's own mapping");
    // A server that insists ends the connection, and this client alone.
    let _strict = functions().same_address(true).bind(&world.web, "strict").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:strict").unwrap();
    client.call("null", &[]).unwrap();
    let block = client.heap().allocate(100).unwrap();
    assert!(matches!(client.call("len", &block), Err(CallError::Closed { .. })));
}

#[test]
fn heap_grows_by_segments_up_to_its_limit() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions().max_peer_heap(1 << 20).bind(&world.web, "calls").unwrap();
    let heap = HeapOptions::default().first(4096).max(1 << 19);
    let client = CallClient::builder().heap(heap).connect(&world.shop, "web:calls").unwrap();
    let mut blocks = Vec::new();
    let full = loop {
        match client.heap().allocate(3000) {
            Ok(block) => blocks.push(block),
            Err(e) => break e,
        }
    };
    assert!(matches!(full, Error::TooLarge { .. }), "{full:?}");
    let stats = client.heap().stats();
    assert!(stats.bytes <= 1 << 19 && stats.segments > 3, "{stats:?}");
    assert!(stats.bytes_used * 2 > stats.bytes, "most of it can be used: {stats:?}");
    for (i, block) in blocks.iter_mut().enumerate() {
        block.fill(i as u8);
    }
    for (i, block) in blocks.iter().enumerate() {
        assert!(client.call("echo", block).unwrap().to_vec() == vec![i as u8; 3000], "block {i}");
    }
    drop(blocks);
    assert_eq!((client.heap().stats().blocks, client.heap().stats().bytes_used), (0, 0));
    // All of it is one space again.
    client.heap().allocate(100_000).unwrap();
}

#[test]
fn first_segment_fits_its_first_block() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions().bind(&world.web, "calls").unwrap();
    for locked in [false, true] {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        if locked && limit.is_some_and(|limit| limit < 128 << 10) {
            eprintln!("SKIPPED: a locked heap of 124 KiB, because RLIMIT_MEMLOCK is {limit:?} (`ulimit -l`)");
            continue;
        }
        let heap = HeapOptions::default().first(4096).locked(locked);
        let client = CallClient::builder().heap(heap).connect(&world.shop, "web:calls").unwrap();
        let mut block = client.heap().allocate(50_001).unwrap();
        assert_eq!(client.heap().stats().bytes, 13 * 4096, "whole pages, and no power of two");
        block.fill(3);
        block[50_000] = 4;
        assert!(client.call("echo", &block).unwrap().to_vec() == block[..], "the server reads all of it");
        // Further segments are powers of two.
        let _second = client.heap().allocate(50_001).unwrap();
        assert_eq!(client.heap().stats().bytes, 29 * 4096);
    }
}

#[test]
fn blocks_do_not_overlap_whatever_is_freed_between() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions().bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    let (mut blocks, mut seed) = (Vec::<(partywall::rpc::Block, u8)>::new(), 12345u64);
    for round in 0..5000u32 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if seed >> 63 == 0 || blocks.is_empty() {
            let (len, alignment) = ((seed >> 40) as usize % 5000, 1 << ((seed >> 20) % 13));
            let mut block = client.heap().allocate_aligned(len, alignment).unwrap();
            assert_eq!(block.address() % alignment as u64, 0);
            block.fill(round as u8);
            blocks.push((block, round as u8));
        } else {
            let (block, byte) = blocks.swap_remove((seed >> 33) as usize % blocks.len());
            assert!(block.iter().all(|found| *found == byte), "round {round}: {block:?}");
        }
    }
}

#[test]
fn block_that_has_an_owner_is_not_freed_by_its_address() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions().bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    let mut first = client.heap().allocate(100).unwrap();
    first.fill(1);
    assert!(!client.heap().free(first.address()));
    let mut second = client.heap().allocate(100).unwrap();
    second.fill(2);
    assert_ne!(first.address(), second.address());
    assert_eq!(*first, [1; 100]);
    let address = second.into_raw().addr() as u64;
    drop(first);
    assert_eq!(client.heap().stats().blocks, 1);
    assert!(client.heap().free(address) && !client.heap().free(address));
    assert_eq!(client.heap().stats().blocks, 0);
}

#[test]
fn results_that_are_held_stay_and_released_ones_come_back() {
    let _guard = hang_guard();
    let world = World::new();
    let small = HeapOptions::default().first(1 << 16).max(1 << 16);
    let _server = functions().heap(small).bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    let mut held = Vec::new();
    let refused = loop {
        match client.call("zeros", &10_000u64.to_le_bytes()) {
            Ok(reply) => held.push(reply),
            Err(e) => break e,
        }
    };
    assert!(matches!(refused, CallError::OutOfMemory(_)), "{refused:?}");
    assert!(held.len() >= 4, "{} replies", held.len());
    held.pop();
    client.call("zeros", &10_000u64.to_le_bytes()).unwrap();
    for _ in 0..1000 {
        drop(client.call("zeros", &10_000u64.to_le_bytes()).unwrap());
    }
}

#[test]
fn death_of_the_server_says_whether_the_call_was_seen() {
    let _guard = hang_guard();
    let world = World::new();
    let (mut server, client) = other_process(&world);
    let result = client.call("end", &[]);
    assert!(matches!(result, Err(CallError::Dead { seen: true })), "{result:?}");
    server.wait();
    let (mut server, client) = other_process(&world);
    let dir = tempfile::tempdir().unwrap();
    let begun = dir.path().join("begun");
    let busy = client.start("stay", begun.as_os_str().as_bytes()).unwrap();
    let later = client.start("null", &[]).unwrap();
    // Taken once it has left the ring: the one before it is executed until then.
    eventually("the first call is executed", || begun.exists());
    server.kill();
    assert!(matches!(busy.wait(), Err(CallError::Dead { seen: true })));
    assert!(matches!(later.wait(), Err(CallError::Dead { seen: false })));
}

#[test]
fn death_of_a_client_at_any_step_leaves_nothing() {
    let _guard = hang_guard();
    let world = World::new();
    let server = functions().bind(&world.web, "calls").unwrap();
    let witness = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    for step in ["connects", "allocates", "calls", "holds"] {
        let mut dying = child(step, world.broker.path());
        assert!(!dying.wait(), "{step}");
        witness.call("null", &[]).unwrap();
        eventually(step, || server.clients() == 1);
    }
    drop((witness, server));
    world.assert_no_channel_is_left();
}

#[test]
fn server_that_stops_closes_and_finishes_calls_under_way() {
    let _guard = hang_guard();
    let world = World::new();
    let (wait, has_begun, go) = gate();
    let server = functions().method("wait", move |_| {
        wait();
        Ok(().into())
    });
    let server = server.bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    let idle = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    let busy = client.start("wait", &[]).unwrap();
    has_begun.recv_timeout(HANG).unwrap();
    let stopping = std::thread::spawn(move || server.stop());
    // The server is stopping once it has closed the connection without a call.
    eventually("the server closes a connection", || idle.call("null", &[]).is_err());
    drop(go);
    busy.wait().unwrap();
    stopping.join().unwrap();
    for client in [client, idle] {
        assert!(matches!(client.call("null", &[]), Err(CallError::Closed { .. })));
    }
    world.assert_no_channel_is_left();
}

#[test]
fn notices_are_executed_in_order_without_answers() {
    let _guard = hang_guard();
    let world = World::new();
    let (sender, numbers) = channel();
    let sender = std::sync::Mutex::new(sender);
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    let server = CallServer::builder().method("note", move |call| {
        counted.fetch_add(1, Ordering::Relaxed);
        sender.lock().unwrap().send(u64::from_le_bytes(call.args().array(0)?)).unwrap();
        Ok(vec![0; 1000].into())
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    for n in 0..5000u64 {
        client.notify("note", &n.to_le_bytes()).unwrap();
    }
    assert!((0..5000).eq(numbers.iter().take(5000)));
    assert_eq!(count.load(Ordering::Relaxed), 5000);
}

#[test]
fn two_methods_of_one_number_are_refused() {
    let _guard = hang_guard();
    let world = World::new();
    let result = functions().method("null", |_| Ok(().into())).bind(&world.web, "calls");
    assert!(matches!(result, Err(Error::Invalid(_))), "{result:?}");
}
