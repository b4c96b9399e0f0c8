//! Calls by a thread that holds the client: beside other threads, calls back, and replies that outlive them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::gate::gate;
use common::world::World;
use common::*;
use partywall::rpc::{CallClient, CallClientBuilder, CallError, CallServer, CallServerBuilder, HeapOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

fn functions() -> CallServerBuilder {
    CallServer::builder()
        .method("echo", |call| Ok(call.args().to_vec().into()))
        .method("fail", |_| Err(CallError::application(7, "as asked")))
        .method("ask", |call| Ok(call.call_back("answer", &call.args().to_vec())?.to_vec().into()))
        .method("zeros", |call| {
            let mut block = call.heap().allocate(10_000)?;
            block.fill(0);
            Ok(block.into())
        })
}

fn connect(world: &World, builder: &CallClientBuilder) -> CallClient {
    builder.connect(&world.shop, "web:calls").unwrap()
}

fn is_refused<T>(result: Result<T, CallError>) -> bool {
    matches!(result, Err(CallError::Refused(_)))
}

#[test]
fn held_client_answers_calls_in_the_order_of_their_start() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions().bind(&world.web, "calls").unwrap();
    let client = connect(&world, &CallClient::builder());
    let mut held = client.exclusive().unwrap();
    for round in 0..3u64 {
        // More than may be unanswered at a time, and more than a record carries.
        let sent = |n: u64| Pattern.bytes(round << 32 | n, (n * 7 % 100) as usize);
        for n in 0..700 {
            held.start("echo", &sent(n)).unwrap();
        }
        for n in 0..700 {
            assert_eq!(held.wait_next().unwrap().unwrap().to_vec(), sent(n), "call {n}");
        }
        assert!(held.wait_next().is_none());
        assert!(matches!(held.call("fail", &[]), Err(CallError::Application { code: 7, .. })));
        held.start("fail", &[]).unwrap();
        assert!(matches!(held.wait_next(), Some(Err(CallError::Application { code: 7, .. }))));
    }
    drop(held);
    assert_eq!(client.heap().stats().blocks, 0);
}

#[test]
fn other_threads_wait_while_a_client_is_held_and_go_on() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions().bind(&world.web, "calls").unwrap();
    let client = connect(&world, &CallClient::builder());
    let (is_held, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    let (sender, begun) = channel();
    std::thread::scope(|scope| {
        let held = client.exclusive().unwrap();
        is_held.store(true, Ordering::SeqCst);
        for thread in 0..3u8 {
            let (client, is_held, answered, sender) = (&client, &is_held, &answered, sender.clone());
            scope.spawn(move || {
                sender.send(()).unwrap();
                for n in 0..200 {
                    assert_eq!(client.call("echo", &[thread, n]).unwrap().to_vec(), [thread, n]);
                    assert!(
                        !is_held.load(Ordering::SeqCst),
                        "the client is held, and no call of its thread is under way"
                    );
                    answered.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for _ in 0..3 {
            begun.recv().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(answered.load(Ordering::SeqCst), 0);
        is_held.store(false, Ordering::SeqCst);
        drop(held);
        // They go on beside a thread that holds the client in turn.
        for n in 0..200u8 {
            let mut held = client.exclusive().unwrap();
            assert_eq!(held.call("echo", &[9, n]).unwrap().to_vec(), [9, n]);
            held.start("echo", &[n]).unwrap();
            assert_eq!(held.wait_next().unwrap().unwrap().to_vec(), [n]);
        }
    });
    assert_eq!(answered.load(Ordering::SeqCst), 600);
}

#[test]
fn calls_left_under_way_by_a_held_client_are_executed_and_freed() {
    let _guard = hang_guard();
    let world = World::new();
    let executed = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&executed);
    // A few results fit, so results that are not released fail a later call.
    let small = HeapOptions::default().first(1 << 16).max(1 << 16);
    let server = functions().heap(small).method("count", move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok(().into())
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let client = connect(&world, &CallClient::builder());
    for _ in 0..20 {
        let mut held = client.exclusive().unwrap();
        for _ in 0..100 {
            held.start("count", &[0; 100]).unwrap();
        }
        held.start("zeros", &[]).unwrap();
        held.start("count", &[]).unwrap();
        for _ in 0..50 {
            held.wait_next().unwrap().unwrap();
        }
        drop(held);
        assert_eq!(client.call("echo", b"later").unwrap().to_vec(), b"later");
    }
    assert_eq!(executed.load(Ordering::SeqCst), 20 * 101);
    assert_eq!(client.heap().stats().blocks, 0, "arguments came back with the answers");
    client.call("zeros", &[]).unwrap();
}

#[test]
fn replies_dropped_by_the_holding_thread_are_released() {
    let _guard = hang_guard();
    let world = World::new();
    let small = HeapOptions::default().first(1 << 16).max(1 << 16);
    let _server = functions().heap(small).bind(&world.web, "calls").unwrap();
    let client = connect(&world, &CallClient::builder());
    let before = client.call("zeros", &[]).unwrap();
    let ongoing = client.start("zeros", &[]).unwrap();
    let mut held = client.exclusive().unwrap();
    drop((before, ongoing));
    for _ in 0..100 {
        assert_eq!(held.call("zeros", &[]).unwrap().to_vec(), [0; 10_000]);
    }
    let last = held.call("zeros", &[]).unwrap();
    drop(last);
    drop(held);
    // Another thread drops what it was given.
    for _ in 0..10 {
        let reply = client.call("zeros", &[]).unwrap();
        let held = client.exclusive().unwrap();
        let dropping = std::thread::spawn(move || drop(reply));
        drop(held);
        dropping.join().unwrap();
    }
}

#[test]
fn holding_thread_is_refused_calls_by_the_client_itself() {
    let _guard = hang_guard();
    let world = World::new();
    let (wait, _, go) = gate();
    let server = functions().method("wait", move |_| {
        wait();
        Ok(().into())
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let client = connect(&world, &CallClient::builder());
    let mut before = client.start("echo", b"before").unwrap();
    let mut held = client.exclusive().unwrap();
    assert!(is_refused(client.call("echo", &[])));
    assert!(is_refused(client.start("echo", &[])));
    assert!(is_refused(client.notify("echo", &[])));
    assert!(is_refused(client.exclusive()));
    assert!(is_refused(before.wait_for(Duration::from_secs(60))));
    assert_eq!(held.call("echo", b"held").unwrap().to_vec(), b"held");
    assert!(matches!(held.call_within(Duration::from_millis(1), "wait", &[]), Err(CallError::TimedOut)));
    drop(go);
    drop(held);
    assert_eq!(client.call("echo", b"after").unwrap().to_vec(), b"after");
}

#[test]
fn call_back_during_a_held_call_uses_the_client() {
    let _guard = hang_guard();
    let world = World::new();
    let (sender, noticed) = channel();
    let server = functions().method("notice", move |call| {
        let _ = sender.send(call.args().to_vec());
        Ok(().into())
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let own: Arc<std::sync::OnceLock<CallClient>> = Arc::default();
    let used = Arc::clone(&own);
    let builder = CallClient::builder().method("answer", move |call| {
        let client = used.get().unwrap();
        client.notify("notice", &call.args().to_vec())?;
        assert!(is_refused(client.call("echo", &[])), "a call during a call back");
        Ok(call.args().to_vec().into())
    });
    let client = connect(&world, &builder);
    own.set(client.clone()).unwrap();
    let mut held = client.exclusive().unwrap();
    for n in 0..10 {
        assert_eq!(held.call("ask", &[n]).unwrap().to_vec(), [n]);
        held.start("ask", &[n + 100]).unwrap();
        assert_eq!(held.wait_next().unwrap().unwrap().to_vec(), [n + 100]);
        assert!(is_refused(client.notify("notice", &[])), "the thread holds the client again");
    }
    drop(held);
    let expected: Vec<Vec<u8>> = (0..10).flat_map(|n| [vec![n], vec![n + 100]]).collect();
    assert_eq!((0..20).map(|_| noticed.recv().unwrap()).collect::<Vec<_>>(), expected);
}
