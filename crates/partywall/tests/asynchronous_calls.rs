//! Calls under tokio: many under way, cancelled ones, the ends of both sides, and peers that lie.
#![cfg(feature = "tokio")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::call_records::{self, BY_REFERENCE, CALL, HELLO, RELEASE, REPLY, SEGMENT, hello, record};
use common::process::{self, child};
use common::world::World;
use common::*;
use partywall::asynchronous::{AsyncCallClient, AsyncCallServer, AsyncCallServerBuilder};
use partywall::rpc::{
    CallClient, CallClientBuilder, CallError, CallServer, HeapOptions, HeapSlice, IncomingCall, Method, PeerSlice,
};
use partywall::{Domain, MessageListener, MessageSocket};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};

partywall::service! {
    trait Math, tasks MathTasks, client MathClient {
        fn null();
        fn sum(numbers: &[u64]) -> u64;
        fn squares(count: u32) -> HeapSlice<u64>;
        fn greet(name: &str) -> String;
        fn fail(code: u32);
        fn panic(at_once: bool);
    }
}

struct Tasks;

impl MathTasks for Tasks {
    async fn null(&self, _: IncomingCall<'static>) -> Result<(), CallError> {
        Ok(())
    }
    async fn sum(&self, _: IncomingCall<'static>, numbers: PeerSlice<u64>) -> Result<u64, CallError> {
        tokio::task::yield_now().await;
        numbers.iter().sum()
    }
    async fn squares(&self, call: IncomingCall<'static>, count: u32) -> Result<HeapSlice<u64>, CallError> {
        let mut squares = HeapSlice::filled(call.heap(), count as usize, 0u64)?;
        for (n, square) in (0u64..).zip(squares.iter_mut()) {
            *square = n * n;
        }
        Ok(squares)
    }
    async fn greet(&self, call: IncomingCall<'static>, name: String) -> Result<String, CallError> {
        Ok(format!("Hello {name}, from {}", call.peer().service))
    }
    async fn fail(&self, _: IncomingCall<'static>, code: u32) -> Result<(), CallError> {
        Err(CallError::application(code, "as was asked".repeat(10)))
    }
    async fn panic(&self, _: IncomingCall<'static>, at_once: bool) -> Result<(), CallError> {
        if !at_once {
            tokio::task::yield_now().await;
        }
        panic!("a method of the test")
    }
}

/// Functions beside the typed ones. What `wait` waits for is given by `gate`.
fn functions(gate: &Arc<Semaphore>) -> AsyncCallServerBuilder {
    let gate = Arc::clone(gate);
    Tasks
        .add_to(AsyncCallServer::builder())
        .method("echo", |call| async move { Ok(call.args().to_vec().into()) })
        .method("zeros", |call| async move {
            let len = u64::from_le_bytes(call.args().array(0)?);
            let mut block = call.heap().allocate(len as usize)?;
            block.fill(0);
            Ok(block.into())
        })
        .method("wait", move |call| {
            let gate = Arc::clone(&gate);
            async move {
                gate.acquire().await.unwrap().forget();
                Ok(call.args().to_vec().into())
            }
        })
        .method("end", |_| async { std::process::abort() })
}

fn closed_gate() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(0))
}

#[test]
fn child_main() {
    let Some((role, broker)) = process::role() else { return };
    let join = |name: &str| Domain::builder().name(name).broker(&broker).join().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match role.as_str() {
            "server" => {
                let _server = functions(&closed_gate()).calls_at_once(1000).bind(&join("web"), "child").await.unwrap();
                std::future::pending::<()>().await;
            }
            "client" => {
                let client = connect(&join("shop"), "web:calls").await;
                let mut calls = Vec::new();
                for _ in 0..100 {
                    calls.push(client.start("zeros", &10_000u64.to_le_bytes()).await.unwrap());
                    calls.push(client.start("wait", &[]).await.unwrap());
                }
                std::process::abort();
            }
            other => panic!("{other}"),
        }
    });
}

async fn connect(domain: &Domain, target: &str) -> AsyncCallClient {
    AsyncCallClient::connect_with(domain, target, &CallClientBuilder::default()).await.unwrap()
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed() < HANG / 2, "never: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn begin<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Option<T> {
    std::future::poll_fn(|cx| match std::pin::Pin::new(&mut *future).poll(cx) {
        std::task::Poll::Ready(done) => std::task::Poll::Ready(Some(done)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}

/// Calls of 20 tasks, answered with what they have sent.
async fn call_from_tasks(client: &AsyncCallClient, first: u64) {
    let mut tasks = tokio::task::JoinSet::new();
    for task in first..first + 20 {
        let client = client.clone();
        tasks.spawn(async move {
            for n in 0..100u64 {
                let sent = Pattern.bytes(task * 1000 + n, (task * n % 300) as usize);
                assert_eq!(client.call("echo", &sent).await.unwrap().to_vec(), sent);
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
}

#[tokio::test]
async fn tasks_of_two_runtimes_share_a_connection() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions(&closed_gate()).bind(&world.web, "calls").await.unwrap();
    let client = connect(&world.shop, "web:calls").await;
    let other = client.clone();
    let thread = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(call_from_tasks(&other, 100));
    });
    call_from_tasks(&client, 1).await;
    thread.await.unwrap();
    assert_eq!(client.heap().stats().blocks, 0, "copies of arguments were given back");
}

#[tokio::test]
async fn more_calls_than_the_window_wait_and_are_answered() {
    let _guard = hang_guard();
    let world = World::new();
    let gate = closed_gate();
    let _server = functions(&gate).bind(&world.web, "calls").await.unwrap();
    let client = connect(&world.shop, "web:calls").await;
    let tasks: Vec<_> = (0..2000u64)
        .map(|n| {
            let client = client.clone();
            tokio::spawn(async move { (n, client.call("wait", &n.to_le_bytes()).await.unwrap().array(0).unwrap()) })
        })
        .collect();
    // All of them have begun, or wait for the window.
    tokio::task::yield_now().await;
    gate.add_permits(2000);
    for task in tasks {
        let (n, answer) = task.await.unwrap();
        assert_eq!(u64::from_le_bytes(answer), n);
    }
}

#[tokio::test]
async fn cancelled_calls_leave_their_places() {
    let _guard = hang_guard();
    let world = World::new();
    let gate = closed_gate();
    let _server = functions(&gate).bind(&world.web, "calls").await.unwrap();
    let client = connect(&world.shop, "web:calls").await;
    // Three windows of calls that are given up: when nothing is sent, before the answer, and behind it.
    for round in 0..3u64 {
        let mut calls = Vec::new();
        for n in 0..512u64 {
            let sent = (round * 512 + n).to_le_bytes().repeat(n as usize % 20);
            calls.push(client.start("wait", &sent).await.unwrap());
        }
        let mut waiting = Box::pin(client.call("echo", b"behind them"));
        assert!(begin(&mut waiting).await.is_none(), "the window is full");
        drop(waiting);
        calls.drain(..200);
        assert!(begin(&mut calls[0]).await.is_none());
        gate.add_permits(512);
        drop(calls.drain(..200));
        for call in calls {
            call.await.unwrap();
        }
    }
    assert_eq!(client.call("echo", b"the end").await.unwrap().to_vec(), b"the end");
    assert_eq!(client.heap().stats().blocks, 0, "arguments of calls that were given up came back with their answers");
}

/// The server's heap holds eighty of these results.
#[tokio::test]
async fn results_of_cancelled_calls_are_given_back() {
    let _guard = hang_guard();
    let world = World::new();
    let small = CallServer::builder().heap(HeapOptions::default().max(16 << 20));
    let _server = functions(&closed_gate()).limits(small).bind(&world.web, "calls").await.unwrap();
    let client = connect(&world.shop, "web:calls").await;
    let zeros = 200_000u64.to_le_bytes();
    for _ in 0..3000 {
        let mut call = client.start("zeros", &zeros).await.unwrap();
        let _ = begin(&mut call).await;
    }
    // Behind the last of them.
    assert_eq!(client.call("echo", b"the end").await.unwrap().to_vec(), b"the end");
    assert_eq!(client.call("zeros", &zeros).await.unwrap().len(), 200_000);
}

#[tokio::test]
async fn call_times_out_and_its_late_result_is_dropped() {
    let _guard = hang_guard();
    let world = World::new();
    let gate = closed_gate();
    let _server = functions(&gate).bind(&world.web, "calls").await.unwrap();
    let hasty = CallClient::builder().timeout(Duration::from_millis(2));
    let client = AsyncCallClient::connect_with(&world.shop, "web:calls", &hasty).await.unwrap();
    for _ in 0..20 {
        assert!(matches!(client.call("wait", &[0; 1000]).await, Err(CallError::TimedOut)));
    }
    gate.add_permits(20);
    let answer = client.call_within(HANG, "echo", &[7; 100]).await.unwrap();
    assert_eq!(answer.to_vec(), [7; 100]);
    until("late answers give the arguments back", || client.heap().stats().blocks == 0).await;
}

#[tokio::test]
async fn typed_methods_work_with_tasks_and_with_threads() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = functions(&closed_gate()).bind(&world.web, "calls").await.unwrap();
    let client = MathClient::new(connect(&world.shop, "web:calls").await);
    client.null().await.unwrap();
    let numbers: Vec<u64> = (0..10_000).collect();
    assert_eq!(client.sum(&numbers).await.unwrap(), numbers.iter().sum::<u64>());
    assert_eq!(client.sum(&numbers[..3]).await.unwrap(), 3);
    assert_eq!(client.squares(1000).await.unwrap().get(999).unwrap(), 998_001);
    assert_eq!(client.greet("Zoë").await.unwrap(), "Hello Zoë, from calls");
    let failed = client.within(HANG).fail(7).await;
    assert!(matches!(failed, Err(CallError::Application { code: 7, message }) if message.len() == 120));
    for at_once in [true, false] {
        assert!(matches!(client.panic(at_once).await, Err(CallError::Panicked)));
    }
    let bad = client.calls().call("Math.panic", &[2]).await;
    assert!(matches!(&bad, Err(CallError::Refused(text)) if text.contains("bool")), "{bad:?}");
    assert!(matches!(client.calls().call("nothing", &[]).await, Err(CallError::UnknownMethod)));
    let shop = world.shop.clone();
    let blocking = tokio::task::spawn_blocking(move || {
        let client = MathClient::new(CallClient::builder().connect(&shop, "web:calls").unwrap());
        (client.sum(&[1, 2, 3]).unwrap(), client.greet("Al").unwrap())
    });
    assert_eq!(blocking.await.unwrap(), (6, "Hello Al, from calls".to_owned()));
}

#[tokio::test]
async fn calls_of_one_client_run_concurrently_up_to_limit() {
    let _guard = hang_guard();
    let world = World::new();
    let (now, most, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let counted = {
        let (now, most, go) = (Arc::clone(&now), Arc::clone(&most), Arc::clone(&go));
        move |_: IncomingCall<'static>| {
            let (now, most, go) = (Arc::clone(&now), Arc::clone(&most), Arc::clone(&go));
            async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                go.notified().await;
                now.fetch_sub(1, Ordering::SeqCst);
                Ok(().into())
            }
        }
    };
    let server = AsyncCallServer::builder().calls_at_once(5).method("count", counted);
    let server = server.bind(&world.web, "calls").await.unwrap();
    let client = connect(&world.shop, "web:calls").await;
    let mut calls = Vec::new();
    for _ in 0..50 {
        calls.push(client.start("count", &[]).await.unwrap());
    }
    until("five are executed", || now.load(Ordering::SeqCst) == 5).await;
    let other = connect(&world.shop, "web:calls").await;
    let of_other = other.start("count", &[]).await.unwrap();
    until("another client's call is executed as well", || now.load(Ordering::SeqCst) == 6).await;
    assert_eq!(server.clients(), 2);
    let going = tokio::spawn(async move {
        loop {
            go.notify_one();
            tokio::task::yield_now().await;
        }
    });
    for call in calls {
        call.await.unwrap();
    }
    of_other.await.unwrap();
    going.abort();
    assert_eq!(most.load(Ordering::SeqCst), 6);
}

#[tokio::test]
async fn notices_are_executed_and_wait_for_room() {
    let _guard = hang_guard();
    let world = World::new();
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&seen);
    let server = AsyncCallServer::builder().calls_at_once(2).method("count", move |_| {
        let counted = Arc::clone(&counted);
        async move {
            tokio::task::yield_now().await;
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(().into())
        }
    });
    let _server = server.bind(&world.web, "calls").await.unwrap();
    let client = connect(&world.shop, "web:calls").await;
    // More than the ring holds, from two tasks.
    let other = client.clone();
    let half = tokio::spawn(async move {
        for _ in 0..5000 {
            other.notify("count", &[]).await.unwrap();
        }
    });
    for _ in 0..5000 {
        client.notify("count", &[]).await.unwrap();
    }
    half.await.unwrap();
    let too_long = client.notify("count", &[0; 41]).await;
    assert!(matches!(too_long, Err(CallError::OutOfMemory(_))), "{too_long:?}");
    until("all are executed", || seen.load(Ordering::SeqCst) == 10_000).await;
}

#[tokio::test]
async fn dropped_client_closes_its_connection() {
    let _guard = hang_guard();
    let world = World::new();
    let gate = closed_gate();
    let server = functions(&gate).bind(&world.web, "calls").await.unwrap();
    let client = connect(&world.shop, "web:calls").await;
    let call = client.start("wait", &[]).await.unwrap();
    let reply = client.call("zeros", &1000u64.to_le_bytes()).await.unwrap();
    drop(client);
    drop(call);
    assert_eq!((server.clients(), reply.to_vec()), (1, vec![0; 1000]));
    drop(reply);
    until("the last reply has gone", || server.clients() == 0).await;
    assert_eq!(Arc::strong_count(&gate), 2, "the future of the call under way was dropped");
}

#[tokio::test]
async fn dropped_server_is_closed_to_its_clients() {
    let _guard = hang_guard();
    let world = World::new();
    let server = functions(&closed_gate()).bind(&world.web, "calls").await.unwrap();
    let client = connect(&world.shop, "web:calls").await;
    let call = client.start("wait", &[]).await.unwrap();
    client.call("echo", &[]).await.unwrap();
    drop(server);
    let result = call.await;
    assert!(matches!(result, Err(CallError::Closed { seen: true })), "{result:?}");
    let again = client.call("echo", &[]).await;
    assert!(matches!(again, Err(CallError::Closed { seen: false })), "{again:?}");
}

#[tokio::test]
async fn server_killed_in_a_call_is_dead_to_every_task() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = child("server", world.broker.path());
    let client = loop {
        match AsyncCallClient::connect_with(&world.shop, "web:child", &CallClientBuilder::default()).await {
            Ok(client) => break client,
            Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
        }
    };
    let tasks: Vec<_> = (0..600)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.call("wait", &[]).await.map(drop) })
        })
        .collect();
    tokio::task::yield_now().await;
    // The window is full, and some wait for it. A notice needs no place in it.
    client.notify("end", &[]).await.unwrap();
    for task in tasks {
        let result = task.await.unwrap();
        assert!(matches!(result, Err(CallError::Dead { .. })), "{result:?}");
    }
    assert!(matches!(client.call("wait", &[]).await, Err(CallError::Dead { seen: false })));
}

#[tokio::test]
async fn client_killed_with_calls_under_way_leaves_nothing() {
    let _guard = hang_guard();
    let world = World::new();
    let gate = closed_gate();
    let server = functions(&gate).bind(&world.web, "calls").await.unwrap();
    let honest = connect(&world.web, "web:calls").await;
    let mut process = child("client", world.broker.path());
    tokio::task::spawn_blocking(move || process.wait()).await.unwrap();
    until("the dead client is gone", || server.clients() == 1).await;
    until("and the futures of its calls", || Arc::strong_count(&gate) == 2).await;
    assert_eq!(honest.call("echo", b"on").await.unwrap().to_vec(), b"on");
}

#[tokio::test]
async fn client_that_lies_is_ended_alone() {
    let _guard = hang_guard();
    let world = World::new();
    let server = functions(&closed_gate()).bind(&world.web, "calls").await.unwrap();
    let honest = connect(&world.web, "web:calls").await;
    let shop = world.shop.clone();
    let echo = Method::named("echo").number();
    let cases = [
        ("no hello", vec![record(CALL, 0, 0, &[])]),
        ("another version", vec![record(HELLO, 0, 2, &[])]),
        ("kind 255", vec![hello(), record(255, 0, 0, &[])]),
        ("a second hello", vec![hello(), hello()]),
        ("a reply", vec![hello(), record(REPLY, 0, 0, &[])]),
        ("a release of nothing", vec![hello(), record(RELEASE | BY_REFERENCE, 0, 0, &[0x3000_0000_0000, 0])]),
        ("a segment that is not there", vec![hello(), record(SEGMENT | BY_REFERENCE, 9, 0, &[4096, 4096])]),
    ];
    for (what, records) in cases {
        let shop = shop.clone();
        let liar = tokio::task::spawn_blocking(move || {
            let mut liar = MessageSocket::connect_with(&shop, "web:calls", &call_records::options()).unwrap();
            for record in records {
                let _ = liar.send(&record);
            }
            liar
        });
        let liar = liar.await.unwrap();
        until(what, || server.clients() == 1).await;
        drop(liar);
        honest.call("echo", &[]).await.unwrap();
    }
    // Answers that nobody reads.
    let flood = tokio::task::spawn_blocking(move || {
        let mut liar = MessageSocket::connect_with(&shop, "web:calls", &call_records::options()).unwrap();
        liar.set_timeout(Some(Duration::from_secs(20)));
        liar.send(&hello()).unwrap();
        let failed = (0..10_000).find_map(|n| liar.send(&record(CALL, n, echo, &[])).err());
        (liar, failed)
    });
    let (liar, failed) = flood.await.unwrap();
    assert!(failed.is_some(), "ten thousand calls were taken");
    until("it is ended", || server.clients() == 1).await;
    drop(liar);
    honest.call("echo", &[]).await.unwrap();
}

#[tokio::test]
async fn server_that_lies_is_corrupt_to_its_client() {
    let _guard = hang_guard();
    let cases = [
        ("answers what was not asked", record(REPLY, 77, 0, &[])),
        ("unknown status", record(REPLY | 99 << 16, 0, 0, &[])),
        ("result outside its heap", record(REPLY | BY_REFERENCE, 0, 0, &[0x3000_0000_0000, 8])),
        ("calls its client", record(CALL, 0, 0, &[])),
        ("nonsense", vec![0xff; 56]),
    ];
    for (what, lie) in cases {
        let world = World::new();
        let mut listener = MessageListener::bind(&world.web, "lies", &call_records::options()).unwrap();
        let server = std::thread::spawn(move || {
            let mut socket = listener.accept().unwrap().0;
            socket.send(&hello()).unwrap();
            socket.send(&lie).unwrap();
            socket
        });
        let client = connect(&world.shop, "web:lies").await;
        for _ in 0..2 {
            let result = client.call("echo", &[]).await;
            assert!(matches!(result, Err(CallError::Corrupt(_) | CallError::Connection(_))), "{what}: {result:?}");
        }
        drop(server.join().unwrap());
    }
}

#[tokio::test]
async fn limits_hold_for_clients_of_tasks() {
    let _guard = hang_guard();
    let world = World::new();
    let limits = CallServer::builder().max_clients(2).max_clients_of_domain(1);
    let server = functions(&closed_gate()).limits(limits).bind(&world.web, "calls").await.unwrap();
    let first = connect(&world.shop, "web:calls").await;
    let refused = AsyncCallClient::connect_with(&world.shop, "web:calls", &CallClientBuilder::default()).await;
    assert!(refused.is_err());
    let _other = connect(&world.web, "web:calls").await;
    drop(first);
    until("its place is free", || server.clients() == 1).await;
    connect(&world.shop, "web:calls").await.call("echo", &[]).await.unwrap();
}
