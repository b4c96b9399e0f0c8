//! Streams whose broker is stopped while they want rings of another size: no write waits for it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::Daemon;
use common::*;
use partywall::{Domain, Error, Stream};
use rustix::process::Signal;
use std::io::Write as _;
use std::thread;

/// How much is written while the broker is stopped.
const TOTAL: u64 = 64 << 20;
const PIECE: usize = 64 << 10;

/// A connection that a real broker has made, with a ring that may grow.
fn connection(broker: &Daemon) -> (Domain, Stream, Stream) {
    let join = |name: &str| Domain::builder().name(name).broker(broker.path()).join().unwrap();
    let (web, shop) = (join("web"), join("shop"));
    let options = adaptive(4096, 1 << 20);
    let mut listener = web.bind_with("s", &options).unwrap();
    let there = shop.connect_with("web:s", &options).unwrap();
    (shop, there, listener.accept().unwrap().0)
}

/// Has a stopped broker's stream written to its end by one thread and read and checked by another, and then lets the broker go on.
fn while_the_broker_is_stopped(write: impl FnOnce(Stream) + Send) {
    let _guard = hang_guard();
    let broker = Daemon::start();
    let (domain, there, mut here) = connection(&broker);
    broker.signal(Signal::STOP);
    thread::scope(|s| {
        let writer = s.spawn(|| write(there));
        let reader = s.spawn(|| Pattern.receive(&mut here, || PIECE));
        // Both end while the broker does nothing.
        writer.join().unwrap();
        assert_eq!(reader.join().unwrap(), TOTAL);
    });
    broker.signal(Signal::CONT);
    drop(here);
    eventually("the broker forgets the channel", || domain.channels().unwrap().is_empty());
}

#[test]
fn blocking_writes_end_while_broker_is_stopped() {
    while_the_broker_is_stopped(|mut stream| {
        Pattern.send(&mut stream, TOTAL, || PIECE);
        drop(stream);
    });
}

#[test]
fn nonblocking_writes_end_while_broker_is_stopped() {
    while_the_broker_is_stopped(|mut stream| {
        stream.set_nonblocking(true);
        let mut at = 0;
        while at < TOTAL {
            let rest = (TOTAL - at).min(PIECE as u64) as usize;
            match stream.write(&Pattern.bytes(at, rest)) {
                Ok(written) => at += written as u64,
                Err(error) => {
                    assert!(matches!(cause(&error), Error::WouldBlock), "{error}");
                    thread::yield_now();
                }
            }
        }
        drop(stream);
    });
}

#[cfg(feature = "tokio")]
#[test]
fn writes_under_tokio_end_while_broker_is_stopped() {
    use partywall::asynchronous::AsyncStream;
    use tokio::io::AsyncWriteExt as _;
    while_the_broker_is_stopped(|stream| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut stream = AsyncStream::new(stream).unwrap();
            let mut at = 0;
            while at < TOTAL {
                stream.write_all(&Pattern.bytes(at, PIECE)).await.unwrap();
                at += PIECE as u64;
            }
            stream.shutdown().await.unwrap();
        });
    });
}
