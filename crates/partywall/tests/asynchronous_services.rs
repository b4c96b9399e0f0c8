//! Connecting, accepting, messages and broadcasts under tokio: cancelled calls lose nothing, and a listener outlives its broker.
#![cfg(feature = "tokio")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall::asynchronous::{AsyncListener, AsyncMessageListener, AsyncMessageSocket, AsyncStream, AsyncSubscriber};
use partywall::{Domain, Error, MessageListener, MessageSocket, Options, Publisher, Refusal, RingSize, SlowReader};
use partywall_daemon::{Broker, Config};
use std::future::Future;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn join(broker: &Broker, name: &str) -> Domain {
    Domain::builder().name(name).broker(broker.path()).join().unwrap()
}

/// Polls a future a few times, and drops it unless it is done.
async fn begin_and_cancel<T>(polls: u8, future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    for _ in 0..polls {
        let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(future.as_mut().poll(cx))).await;
        if let std::task::Poll::Ready(done) = polled {
            return Some(done);
        }
        // Lets the runtime hear of descriptors.
        tokio::time::sleep(Duration::from_micros(100)).await;
    }
    None
}

#[tokio::test]
async fn cancelled_accepts_lose_no_connection() {
    let _guard = hang_guard();
    let broker = Broker::embedded().unwrap();
    let web = join(&broker, "web");
    let mut listener = AsyncListener::new(web.bind("echo").unwrap());
    let (mut clients, mut accepted) = (Vec::new(), Vec::new());
    for n in 0..40u8 {
        let mut client = AsyncStream::connect_with(&web, "web:echo", &Options::default()).await.unwrap();
        client.write_all(&[n]).await.unwrap();
        clients.push(client);
        // At every stage of it.
        accepted.extend(begin_and_cancel(n % 5, listener.accept()).await);
    }
    while accepted.len() < 40 {
        accepted.push(listener.accept().await);
    }
    for (n, visit) in accepted.into_iter().enumerate() {
        let (mut stream, peer) = visit.unwrap();
        assert_eq!((usize::from(stream.read_u8().await.unwrap()), peer.name.as_str()), (n, "web"));
    }
}

#[tokio::test]
async fn one_way_visitor_does_not_end_a_listener() {
    let _guard = hang_guard();
    let broker = Broker::embedded().unwrap();
    let web = join(&broker, "web");
    let mut listener = AsyncListener::new(web.bind("echo").unwrap());
    let one_way = web.connect_with("web:echo", &Options::default().one_way(true)).unwrap();
    let mut client = AsyncStream::connect_with(&web, "web:echo", &Options::default()).await.unwrap();
    client.write_all(b"x").await.unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x');
    drop(one_way);
}

#[tokio::test]
async fn connect_reports_refusals() {
    let _guard = hang_guard();
    let broker = Broker::embedded().unwrap();
    let web = join(&broker, "web");
    let stream = AsyncStream::connect_with(&web, "web:nothing", &Options::default()).await;
    assert!(matches!(stream, Err(Error::Refused { code: Refusal::NoSuchService, .. })), "{stream:?}");
    let socket = AsyncMessageSocket::connect_with(&web, "nobody:x", &Options::default()).await;
    assert!(matches!(socket, Err(Error::Refused { code: Refusal::NoSuchDomain, .. })), "{socket:?}");
    let one_way = Options::default().one_way(true);
    let _listener = web.bind("log").unwrap();
    assert!(matches!(AsyncStream::connect_with(&web, "web:log", &one_way).await, Err(Error::Closed(_))));
}

#[tokio::test]
async fn cancelled_message_calls_lose_no_message() {
    let _guard = hang_guard();
    let broker = Broker::embedded().unwrap();
    let web = join(&broker, "web");
    let small = Options::default().ring(RingSize::Fixed(4096));
    let listener = MessageListener::bind(&web, "orders", &small).unwrap();
    let mut listener = AsyncMessageListener::new(listener);
    let mut client = AsyncMessageSocket::connect_with(&web, "web:orders", &small).await.unwrap();
    let (server, _) = match begin_and_cancel(2, listener.accept()).await {
        Some(accepted) => accepted.unwrap(),
        None => listener.accept().await.unwrap(),
    };
    let (Some(mut sender), Some(mut receiver)) = server.into_halves() else { panic!("two ways") };
    let echo = tokio::spawn(async move {
        let mut message = Vec::new();
        while receiver.recv(&mut message).await.is_ok() {
            sender.send(&message).await.unwrap();
        }
    });
    let mut answer = Vec::new();
    for n in 0..2000usize {
        assert!(begin_and_cancel(1, client.recv(&mut answer)).await.is_none());
        let message = Pattern.bytes(n as u64, n % 1500);
        client.send(&message).await.unwrap();
        client.recv(&mut answer).await.unwrap();
        assert_eq!(answer, message);
    }
    client.finish();
    let end = client.recv(&mut answer).await;
    assert!(matches!(end, Err(Error::Closed(_))), "{end:?}");
    echo.await.unwrap();
}

#[tokio::test]
async fn subscriber_waits_for_each_message_and_sees_the_end() {
    let _guard = hang_guard();
    let broker = Broker::embedded().unwrap();
    let web = join(&broker, "web");
    let mut ticker = Publisher::bind(&web, "ticks", SlowReader::Hold, &Options::default()).unwrap();
    let mut reader = AsyncSubscriber::connect_with(&web, "web:ticks", &Options::default()).await.unwrap();
    let publishing = std::thread::spawn(move || {
        while ticker.subscribers() == 0 {
            ticker.admit().unwrap();
        }
        for n in 0..500u32 {
            ticker.send(&n.to_le_bytes()).unwrap();
            if n % 50 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let mut message = Vec::new();
    for n in 0..500u32 {
        reader.recv(&mut message).await.unwrap();
        assert_eq!(message, n.to_le_bytes());
    }
    let end = reader.recv(&mut message).await;
    assert!(matches!(end, Err(Error::Closed(_))), "{end:?}");
    publishing.join().unwrap();
}

#[tokio::test]
async fn overrun_subscriber_gets_the_newest_and_is_woken_for_the_next() {
    let _guard = hang_guard();
    let broker = Broker::embedded().unwrap();
    let web = join(&broker, "web");
    let small = Options::default().ring(RingSize::Fixed(4096));
    let mut ticker = Publisher::bind(&web, "ticks", SlowReader::Newest, &small).unwrap();
    let mut reader = AsyncSubscriber::connect_with(&web, "web:ticks", &Options::default()).await.unwrap();
    while ticker.subscribers() == 0 {
        ticker.admit().unwrap();
    }
    let mut message = Vec::new();
    for round in 0..200u32 {
        let waiting = begin_and_cancel(1, reader.recv_newest(&mut message)).await;
        assert!(waiting.is_none(), "{waiting:?}");
        if round % 2 == 0 {
            (0..500).for_each(|_| ticker.send(b"old").unwrap());
            ticker.send(&round.to_le_bytes()).unwrap();
            reader.recv_newest(&mut message).await.unwrap();
        } else {
            let (received, ()) = tokio::join!(reader.recv(&mut message), async {
                tokio::task::yield_now().await;
                ticker.send(&round.to_le_bytes()).unwrap();
            });
            received.unwrap();
        }
        assert_eq!(message, round.to_le_bytes());
    }
    assert_eq!(reader.lost(), 99 * 500, "those before the first message do not count");
}

#[tokio::test]
async fn listener_accepts_again_after_a_restart_of_the_broker() {
    let _guard = hang_guard();
    let dir = tempfile::tempdir().unwrap();
    let config = Config::new(dir.path().join("broker.sock"));
    let broker = Broker::start(&config).unwrap();
    let web = join(&broker, "web");
    let mut listener = AsyncListener::new(web.bind("echo").unwrap());
    let accepting = tokio::spawn(async move { listener.accept().await });
    tokio::task::yield_now().await;
    drop(broker);
    let broker = Broker::start(&config).unwrap();
    let visitor = join(&broker, "visitor");
    let mut client = loop {
        match AsyncStream::connect_with(&visitor, "web:echo", &Options::default()).await {
            Ok(client) => break client,
            Err(Error::Refused { .. }) => tokio::task::yield_now().await,
            Err(other) => panic!("{other}"),
        }
    };
    client.write_u8(7).await.unwrap();
    let (mut stream, peer) = accepting.await.unwrap().unwrap();
    assert_eq!((stream.read_u8().await.unwrap(), peer.name.as_str()), (7, "visitor"));
}

#[tokio::test]
async fn async_message_that_grows_the_ring_is_sent() {
    let _guard = hang_guard();
    let broker = Broker::embedded().unwrap();
    let web = join(&broker, "web");
    let mut listener = MessageListener::bind(&web, "orders", &Options::default()).unwrap();
    let mut client = AsyncMessageSocket::connect_with(&web, "web:orders", &Options::default()).await.unwrap();
    let mut server = AsyncMessageSocket::new(listener.accept().unwrap().0).unwrap();
    let mut received = Vec::new();
    // Small ones first: the bell of the accepted connection would wake the first that grows.
    for size in [1, 1, 1].into_iter().chain((0..9).map(|doubling| 20_000 << doubling)) {
        let sent = vec![7; size];
        let (sending, receiving) = tokio::join!(client.send(&sent), server.recv(&mut received));
        sending.unwrap();
        receiving.unwrap();
        assert!(received == sent, "a message of {size} bytes");
    }
}

#[test]
fn descriptor_asked_for_after_a_refused_send_wakes() {
    let _guard = hang_guard();
    let broker = Broker::embedded().unwrap();
    let web = join(&broker, "web");
    let mut listener = MessageListener::bind(&web, "orders", &Options::default()).unwrap();
    let mut client = MessageSocket::connect_with(&web, "web:orders", &Options::default()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    let mut received = Vec::new();
    for size in [1, 1, 1] {
        client.send(&vec![7; size]).unwrap();
        server.recv(&mut received).unwrap();
    }
    client.set_nonblocking(true);
    while matches!(client.send(&vec![7; 200_000]), Err(Error::WouldBlock)) {
        // The first time after the refusal.
        assert!(readable(client.send_fd().unwrap(), Duration::from_secs(60)), "nothing wakes the sender");
    }
    server.recv(&mut received).unwrap();
    assert_eq!(received.len(), 200_000);
}

#[test]
fn polled_listener_without_broker_looks_rarely() {
    let _guard = hang_guard();
    let dir = tempfile::tempdir().unwrap();
    let config = Config::new(dir.path().join("broker.sock"));
    let broker = Broker::start(&config).unwrap();
    let web = join(&broker, "web");
    let mut listener = web.bind("echo").unwrap();
    listener.set_nonblocking(true);
    drop(broker);
    let start = Instant::now();
    let mut looks = 0;
    while start.elapsed() < Duration::from_millis(500) {
        looks += 1;
        assert_fails!(listener.accept(), Error::WouldBlock);
        readable(&listener, Duration::from_millis(500));
    }
    // The pauses double, so a slow machine has fewer.
    assert!(looks < 20, "{looks} looks for a broker that is away");

    let broker = Broker::start(&config).unwrap();
    let visitor = join(&broker, "visitor");
    let connecting = std::thread::spawn(move || {
        loop {
            match visitor.connect("web:echo") {
                Err(Error::Refused { .. }) => std::thread::yield_now(),
                other => break other,
            }
        }
    });
    while let Err(error) = listener.accept() {
        assert!(matches!(error, Error::WouldBlock), "{error}");
        readable(&listener, Duration::from_secs(60));
    }
    connecting.join().unwrap().unwrap();
}
