//! The shares of threads of one client, and of clients of one server.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::gate::gate;
use common::world::World;
use common::*;
use partywall::rpc::{CallClient, CallError, CallServer, HeapOptions};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[test]
fn thread_without_room_leaves_other_threads_their_limits() {
    let _guard = hang_guard();
    let world = World::new();
    let (wait, has_begun, go) = gate();
    let server = CallServer::builder().method("null", |_| Ok(().into())).method("wait", move |_| {
        wait();
        Ok(().into())
    });
    let server = server.bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    // The server's thread is in this call, and takes nothing out of the ring.
    let slow = client.start("wait", &[]).unwrap();
    has_begun.recv_timeout(HANG).unwrap();
    let is_stuck = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stuck = scope.spawn(|| {
            while client.notify_within(Duration::from_millis(1), "null", &[]).is_ok() {}
            is_stuck.store(true, Ordering::Release);
            client.notify("null", &[])
        });
        eventually("the ring is full", || is_stuck.load(Ordering::Acquire));
        // These return although the other thread waits for room without a limit.
        for _ in 0..3 {
            let late = client.call_within(Duration::from_millis(2), "null", &[]);
            assert!(matches!(late, Err(CallError::TimedOut)), "{late:?}");
            let late = client.notify_within(Duration::from_millis(2), "null", &[]);
            assert!(matches!(late, Err(CallError::TimedOut)), "{late:?}");
        }
        go.send(()).unwrap();
        stuck.join().unwrap().unwrap();
        slow.wait().unwrap();
        client.call("null", &[]).unwrap();
        // The end of the server ends a wait for room as well.
        drop(client.start("wait", &[]).unwrap());
        let stuck = scope.spawn(|| {
            loop {
                if let Err(e) = client.notify("null", &[]) {
                    return e;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(5));
        drop(go);
        drop(server);
        let error = stuck.join().unwrap();
        assert!(matches!(error, CallError::Closed { .. } | CallError::Dead { .. }), "{error:?}");
    });
}

#[test]
fn threads_that_wait_for_room_all_go_on() {
    let _guard = hang_guard();
    let world = World::new();
    let server = CallServer::builder().method("note", |_| Ok(().into())).method("null", |_| Ok(().into()));
    let _server = server.bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..5000).for_each(|_| client.notify("note", &[]).unwrap()));
        }
    });
    client.call("null", &[]).unwrap();
}

#[test]
fn domain_takes_no_more_than_its_share_of_places() {
    let _guard = hang_guard();
    let world = World::new();
    let server = CallServer::builder().method("null", |_| Ok(().into())).max_clients(8);
    let server = server.bind(&world.web, "calls").unwrap();
    let connect = |domain| CallClient::builder().connect(domain, "web:calls");
    let greedy: Vec<_> = (0..8).filter_map(|_| connect(&world.shop).ok()).collect();
    assert_eq!((greedy.len(), server.clients()), (2, 2), "a quarter");
    connect(&world.web).unwrap().call("null", &[]).unwrap();
    drop(greedy);
    eventually("places come back", || connect(&world.shop).is_ok());
}

#[test]
fn domain_that_holds_on_to_results_takes_no_memory_from_another() {
    let _guard = hang_guard();
    let world = World::new();
    let small = HeapOptions::default().first(1 << 16).max(1 << 17);
    let server = CallServer::builder().heap(small).method("zeros", |call| Ok(call.heap().allocate(10_000)?.into()));
    let _server = server.bind(&world.web, "calls").unwrap();
    let connect = |domain| CallClient::builder().connect(domain, "web:calls").unwrap();
    let greedy = [connect(&world.shop), connect(&world.shop)];
    let mut held = Vec::new();
    for client in &greedy {
        loop {
            match client.call("zeros", &[]) {
                Ok(reply) => held.push(reply),
                Err(CallError::OutOfMemory(_)) => break,
                Err(e) => panic!("{e}"),
            }
        }
    }
    assert!(held.len() <= (1 << 17) / 10_000, "{} results of one domain, by two connections", held.len());
    let honest = connect(&world.web);
    assert_eq!(honest.call("zeros", &[]).unwrap().len(), 10_000);
    drop((held, greedy));
    let again = connect(&world.shop);
    assert_eq!(again.call("zeros", &[]).unwrap().len(), 10_000);
}
