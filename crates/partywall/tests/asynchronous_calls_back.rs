//! Calls back under tokio: of servers and clients of tasks, alone and with threads on the other side, and with peers that lie (protocol K8).
#![cfg(feature = "tokio")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::call_records::{CALL, HELLO, NOTICE, REPLY, hello, options, record};
use common::world::World;
use common::*;
use partywall::asynchronous::{AsyncCallClient, AsyncCallClientBuilder, AsyncCallServer, AsyncCallServerBuilder};
use partywall::rpc::{CallClient, CallError, CallServer, CallServerBuilder, IncomingCall, Method};
use partywall::{MessageListener, MessageSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};

const NULL: u32 = Method::named("null").number();
const ASK: u32 = Method::named("ask").number();

/// `ask` calls the client back with its arguments and returns what comes back.
fn asking() -> AsyncCallServerBuilder {
    AsyncCallServer::builder()
        .method("null", |_| async { Ok(().into()) })
        .method("echo", |call| async move { Ok(call.args().to_vec().into()) })
        .method("ask", |call| async move {
            let args = call.args().to_vec();
            Ok(call.call_back_later("answer", &args).await?.to_vec().into())
        })
}

fn asking_with_threads() -> CallServerBuilder {
    CallServer::builder().method("ask", |call| {
        let args = call.args().to_vec();
        Ok(call.call_back("answer", &args)?.to_vec().into())
    })
}

fn echoing() -> AsyncCallClientBuilder {
    AsyncCallClient::builder().method("answer", |call| async move {
        tokio::task::yield_now().await;
        Ok(call.args().to_vec().into())
    })
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed() < HANG / 2, "never: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn ask_with_every_size(client: &AsyncCallClient) {
    for len in [0, 1, 40, 41, 4096, 100_000, 1 << 20] {
        let sent = Pattern.bytes(len as u64, len);
        assert_eq!(client.call("ask", &sent).await.unwrap().to_vec(), sent, "{len}");
    }
    let before = client.heap().stats();
    for _ in 0..100 {
        client.call("ask", &[7; 100_000]).await.unwrap();
    }
    assert_eq!(client.heap().stats(), before, "blocks of calls back are freed with their call");
}

#[tokio::test]
async fn tasks_call_back_and_are_called_back() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = asking().bind(&world.web, "calls").await.unwrap();
    let client = echoing().connect(&world.shop, "web:calls").await.unwrap();
    ask_with_every_size(&client).await;
    let calls: Vec<_> = (0..1000u32)
        .map(|n| {
            let client = client.clone();
            tokio::spawn(async move { client.call("ask", &n.to_le_bytes()).await.unwrap().to_vec() })
        })
        .collect();
    for (n, call) in (0u32..).zip(calls) {
        assert_eq!(call.await.unwrap(), n.to_le_bytes());
    }
}

#[tokio::test]
async fn server_with_threads_calls_tasks_back() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = asking_with_threads().bind(&world.web, "calls").unwrap();
    ask_with_every_size(&echoing().connect(&world.shop, "web:calls").await.unwrap()).await;
}

#[tokio::test]
async fn server_of_tasks_calls_threads_back() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = asking().bind(&world.web, "calls").await.unwrap();
    let shop = world.shop.clone();
    let calls = tokio::task::spawn_blocking(move || {
        let client = CallClient::builder().method("answer", |call| Ok(call.args().to_vec().into()));
        let client = client.connect(&shop, "web:calls").unwrap();
        for len in [0, 40, 100_000] {
            let sent = Pattern.bytes(len as u64, len);
            assert_eq!(client.call("ask", &sent).unwrap().to_vec(), sent, "{len}");
        }
    });
    calls.await.unwrap();
}

#[tokio::test]
async fn server_at_its_limit_of_calls_still_takes_answers() {
    let _guard = hang_guard();
    let world = World::new();
    let executed = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&executed);
    let server = asking().calls_at_once(1).method("count", move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        async { Ok(().into()) }
    });
    let _server = server.bind(&world.web, "calls").await.unwrap();
    let (begun, go) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
    let (began, waits) = (Arc::clone(&begun), Arc::clone(&go));
    let client = AsyncCallClient::builder().method("answer", move |_| {
        let (began, waits) = (Arc::clone(&began), Arc::clone(&waits));
        async move {
            began.notify_one();
            waits.acquire().await.unwrap().forget();
            Ok(().into())
        }
    });
    let client = client.connect(&world.shop, "web:calls").await.unwrap();
    let ask = client.start("ask", &[]).await.unwrap();
    begun.notified().await;
    let echo = client.start("echo", b"later").await.unwrap();
    for _ in 0..50 {
        client.notify("count", &[]).await.unwrap();
    }
    go.add_permits(1);
    ask.await.unwrap();
    assert_eq!(echo.await.unwrap().to_vec(), b"later");
    client.call("null", &[]).await.unwrap();
    until("notices that were kept are executed", || executed.load(Ordering::Relaxed) == 50).await;
}

#[tokio::test]
async fn errors_of_calls_back_reach_the_task() {
    let _guard = hang_guard();
    let world = World::new();
    let kept = Arc::new(Mutex::new(None));
    let keeps = Arc::clone(&kept);
    let server = asking().method("keep", move |call| {
        *keeps.lock().unwrap() = Some(call.to_owned());
        async { Ok(().into()) }
    });
    let server = server.method("blocking", |call| async move { Ok(call.call_back("answer", &[])?.to_vec().into()) });
    let _server = server.bind(&world.web, "calls").await.unwrap();
    let without = AsyncCallClient::connect_with(&world.shop, "web:calls", &CallClient::builder()).await.unwrap();
    let refused = without.call("ask", &[]).await;
    assert!(matches!(refused, Err(CallError::Refused(_))), "{refused:?}");
    let client = AsyncCallClient::builder()
        .method("answer", |_| async { Err(CallError::application(7, "no answer".repeat(10))) })
        .connect(&world.shop, "web:calls")
        .await
        .unwrap();
    let failed = client.call("ask", &[]).await;
    assert!(matches!(failed, Err(CallError::Application { code: 7, .. })), "{failed:?}");
    let blocking = client.call("blocking", &[]).await;
    assert!(matches!(blocking, Err(CallError::Refused(_))), "{blocking:?}");
    let panics = AsyncCallClient::builder().method("answer", |_| async { panic!("a function of the test") });
    let panics = panics.connect(&world.shop, "web:calls").await.unwrap().call("ask", &[]).await.map(drop);
    assert!(panics.is_err(), "{panics:?}");
    // A call that is over calls nothing back.
    client.call("keep", &[]).await.unwrap();
    let call: IncomingCall<'static> = kept.lock().unwrap().take().unwrap();
    let over = call.call_back_later("answer", &[]).await;
    assert!(matches!(over, Err(CallError::Refused(_))), "{over:?}");
    let threads = CallClient::builder().method("answer", |_| Ok(().into()));
    assert!(AsyncCallClient::connect_with(&world.shop, "web:calls", &threads).await.is_err());
}

#[tokio::test]
async fn call_back_that_takes_too_long_is_given_up() {
    let _guard = hang_guard();
    let world = World::new();
    let server = AsyncCallServer::builder()
        .method("patient", |call| async move { Ok(call.call_back_later("answer", &[]).await?.to_vec().into()) });
    let server = server.method("ask", |call| async move {
        // The heap has memory, so the call back is sent at once.
        drop(call.heap().allocate(1000)?);
        let late = tokio::time::timeout(Duration::from_millis(5), call.call_back_later("answer", &[1; 1000])).await;
        assert!(late.is_err(), "{late:?}");
        let second = call.call_back_later("answer", &[]).await;
        assert!(matches!(second, Err(CallError::Refused(_))), "{second:?}");
        Ok(().into())
    });
    let _server = server.bind(&world.web, "calls").await.unwrap();
    let go = Arc::new(Semaphore::new(0));
    let waits = Arc::clone(&go);
    let client = AsyncCallClient::builder().method("answer", move |_| {
        let waits = Arc::clone(&waits);
        async move {
            let _permit = waits.acquire().await.unwrap();
            Ok(vec![7; 1000].into())
        }
    });
    let client = client.connect(&world.shop, "web:calls").await.unwrap();
    for _ in 0..5 {
        client.call("ask", &[]).await.unwrap();
    }
    go.add_permits(1);
    // Late answers are dropped, and their memory is free again.
    until("all blocks are free", || client.heap().stats().blocks == 0).await;
    assert_eq!(client.call("patient", &[]).await.unwrap().to_vec(), [7; 1000]);
}

#[tokio::test]
async fn function_that_is_called_back_cannot_wait_for_its_server() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = asking().bind(&world.web, "calls").await.unwrap();
    let own = Arc::new(Mutex::new(None::<AsyncCallClient>));
    let other = Arc::clone(&own);
    let client = AsyncCallClient::builder().method("answer", move |_| {
        let client = other.lock().unwrap().clone().unwrap();
        async move {
            let refused = client.call("null", &[]).await;
            assert!(matches!(refused, Err(CallError::Refused(_))), "{refused:?}");
            client.notify("null", &[]).await?;
            Ok([1].into())
        }
    });
    let client = client.connect(&world.shop, "web:calls").await.unwrap();
    *own.lock().unwrap() = Some(client.clone());
    assert_eq!(client.call("ask", &[]).await.unwrap().to_vec(), [1]);
    own.lock().unwrap().take();
}

#[tokio::test]
async fn dropped_client_ends_functions_of_both_sides() {
    let _guard = hang_guard();
    let world = World::new();
    let running = Arc::new(());
    let held = Arc::clone(&running);
    let server = AsyncCallServer::builder().method("ask", move |call| {
        let held = Arc::clone(&held);
        async move {
            let _held = held;
            Ok(call.call_back_later("answer", &[]).await?.to_vec().into())
        }
    });
    let server = server.bind(&world.web, "calls").await.unwrap();
    let (begun, held) = (Arc::new(Notify::new()), Arc::clone(&running));
    let began = Arc::clone(&begun);
    let client = AsyncCallClient::builder().method("answer", move |_| {
        let (began, held) = (Arc::clone(&began), Arc::clone(&held));
        async move {
            let _held = held;
            began.notify_one();
            std::future::pending().await
        }
    });
    let client = client.connect(&world.shop, "web:calls").await.unwrap();
    let call = client.start("ask", &[]).await.unwrap();
    begun.notified().await;
    assert_eq!(Arc::strong_count(&running), 5);
    drop((call, client));
    // The functions of the server and of the client's builder hold one each.
    until("the futures are dropped", || Arc::strong_count(&running) == 3).await;
    until("the client has left", || server.clients() == 0).await;
}

#[tokio::test]
async fn call_back_that_no_server_may_make_is_corrupt_to_tasks() {
    let _guard = hang_guard();
    let cases = [
        ("in no call", vec![record(CALL, 7, NULL, &[])]),
        ("two for one call", vec![record(CALL, 0, NULL, &[]), record(CALL, 0, NULL, &[])]),
        ("in a call that was answered", vec![record(REPLY, 0, 0, &[]), record(CALL, 0, NULL, &[])]),
    ];
    for (what, lies) in cases {
        let world = World::new();
        let mut listener = MessageListener::bind(&world.web, "lies", &options()).unwrap();
        let (begin, may_begin) = std::sync::mpsc::channel::<()>();
        let server = std::thread::spawn(move || {
            let mut socket = listener.accept().unwrap().0;
            socket.set_timeout(Some(HANG));
            socket.send(&hello()).unwrap();
            let _ = may_begin.recv();
            lies.iter().for_each(|lie| socket.send(lie).unwrap());
            socket
        });
        let client = AsyncCallClient::builder().method("null", |_| std::future::pending());
        let client = client.connect(&world.shop, "web:lies").await.unwrap();
        let _first = client.start("ask", &[]).await.unwrap();
        let second = client.start("ask", &[]).await.unwrap();
        drop(begin);
        let second = second.await;
        assert!(matches!(second, Err(CallError::Corrupt(_))), "{what}: {second:?}");
        drop(server.join().unwrap());
    }
}

#[tokio::test]
async fn client_that_floods_ends_the_call_back_alone() {
    let _guard = hang_guard();
    let world = World::new();
    let executed = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&executed);
    let outcomes = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&outcomes);
    let server = AsyncCallServer::builder()
        .calls_at_once(1)
        .method("null", move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            async { Ok(().into()) }
        })
        .method("ask", move |call| {
            let seen = Arc::clone(&seen);
            async move {
                let outcome = call.call_back_later("answer", &[]).await.map(|view| view.to_vec());
                seen.lock().unwrap().push(outcome);
                Ok(().into())
            }
        });
    let server = server.bind(&world.web, "calls").await.unwrap();
    let shop = world.shop.clone();
    let hostile = tokio::task::spawn_blocking(move || {
        let mut socket = MessageSocket::connect_with(&shop, "web:calls", &options()).unwrap();
        socket.set_timeout(Some(HANG));
        // It takes calls.
        socket.send(&record(HELLO | 1 << 16, 0, 1, &[])).unwrap();
        socket.send(&record(CALL, 5, ASK, &[])).unwrap();
        for _ in 0..1100 {
            socket.send(&record(NOTICE, 0, NULL, &[])).unwrap();
        }
        socket
    });
    let mut socket = hostile.await.unwrap();
    until("the call back is given up", || !outcomes.lock().unwrap().is_empty()).await;
    let outcome = outcomes.lock().unwrap().pop().unwrap();
    assert!(matches!(outcome, Err(CallError::Refused(_))), "{outcome:?}");
    until("all notices are executed", || executed.load(Ordering::Relaxed) == 1100).await;
    // Its late reply is dropped, once.
    socket.send(&record(REPLY, 5, 0, &[])).unwrap();
    socket.send(&record(NOTICE, 0, NULL, &[])).unwrap();
    until("the server goes on", || executed.load(Ordering::Relaxed) == 1101).await;
    socket.send(&record(REPLY, 5, 0, &[])).unwrap();
    until("the second reply is a lie", || server.clients() == 0).await;
}
