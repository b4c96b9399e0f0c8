//! Servers that call back what they may not, and clients that answer falsely or not at all (protocol K8).
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::call_records::{BY_REFERENCE, CALL, HELLO, NOTICE, REPLY, hello, options, record};
use common::gate::gate;
use common::world::World;
use common::*;
use partywall::rpc::{CallClient, CallError, CallServer, IncomingCall, Method};
use partywall::{MessageListener, MessageSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const NULL: u32 = Method::named("null").number();
const ASK: u32 = Method::named("ask").number();

/// A server that sends these records once it has been called.
fn lying_server(world: &World, mut lie: impl FnMut(&mut MessageSocket) -> bool + Send + 'static) -> Lies {
    let mut listener = MessageListener::bind(&world.web, "lies", &options()).unwrap();
    let (begin, may_begin) = channel::<()>();
    let thread = std::thread::spawn(move || {
        let mut socket = listener.accept().unwrap().0;
        socket.set_timeout(Some(HANG));
        socket.send(&hello()).unwrap();
        let _ = may_begin.recv();
        while lie(&mut socket) {}
        socket
    });
    Lies { begin, thread }
}

struct Lies {
    /// Sent to, or dropped, when the client has called.
    begin: std::sync::mpsc::Sender<()>,
    thread: std::thread::JoinHandle<MessageSocket>,
}

impl Lies {
    /// Lets the server lie. Its socket stays open until the returned closure is called.
    fn begin(self) -> impl FnOnce() {
        drop(self.begin);
        let thread = self.thread;
        move || drop(thread.join().unwrap())
    }
}

#[test]
fn calls_back_without_end_time_out() {
    let _guard = hang_guard();
    let world = World::new();
    // Whether a call back can be sent before the last one is answered is the server's guess.
    let server = lying_server(&world, |socket| {
        std::thread::sleep(Duration::from_millis(2));
        socket.send(&record(CALL, 0, NULL, &[])).is_ok()
    });
    let executed = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&executed);
    let builder = CallClient::builder().method("null", move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(().into())
    });
    let client = builder.connect(&world.shop, "web:lies").unwrap();
    let mut call = client.start("ask", &[]).unwrap();
    let end = server.begin();
    while executed.load(Ordering::Relaxed) == 0 {
        assert!(call.wait_for(Duration::from_millis(5)).unwrap().is_none());
    }
    call.set_timeout(Some(Duration::from_millis(100)));
    // A busy machine may let two of them meet, which is corrupt.
    let result = call.wait();
    assert!(matches!(result, Err(CallError::TimedOut | CallError::Corrupt(_))), "{result:?}");
    drop(client);
    end();
}

#[test]
fn calls_back_of_a_given_up_call_without_end_are_corrupt() {
    let _guard = hang_guard();
    let world = World::new();
    let sent = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&sent);
    // It reads no replies, so the client keeps refusals.
    let server = lying_server(&world, move |socket| {
        counted.fetch_add(1, Ordering::Relaxed);
        socket.send(&record(CALL, 0, NULL, &[])).is_ok()
    });
    let client = CallClient::builder().method("null", |_| Ok(().into())).connect(&world.shop, "web:lies").unwrap();
    drop(client.start("ask", &[]).unwrap());
    let call = client.start("ask", &[]).unwrap();
    let end = server.begin();
    let result = call.wait();
    assert!(matches!(result, Err(CallError::Corrupt(_))), "{result:?}");
    drop(client);
    end();
    // Both rings, and 512 refusals that the client keeps.
    assert!(sent.load(Ordering::Relaxed) < 3 * 1024, "{sent:?}");
}

#[test]
fn call_back_that_no_server_may_make_is_corrupt() {
    let _guard = hang_guard();
    let cases = [
        ("in no call", vec![record(CALL, 7, NULL, &[])]),
        ("in a call of another generation", vec![record(CALL, 1 << 20, NULL, &[])]),
        ("two for one call", vec![record(CALL, 0, NULL, &[]), record(CALL, 0, NULL, &[])]),
        ("notice to a client", vec![record(NOTICE, 0, NULL, &[])]),
        ("in a call that was answered", vec![record(REPLY, 0, 0, &[]), record(CALL, 0, NULL, &[])]),
        ("of a client that takes none", vec![record(CALL, 0, NULL, &[])]),
    ];
    for (what, lies) in cases {
        let world = World::new();
        let mut lies = lies.into_iter();
        let server = lying_server(&world, move |socket| lies.next().is_some_and(|lie| socket.send(&lie).is_ok()));
        let (wait, _has_begun, go) = gate();
        let slow = move |_: &IncomingCall<'_>| {
            wait();
            Ok(().into())
        };
        let takes_none = what == "of a client that takes none";
        let builder = CallClient::builder();
        let builder = if takes_none { builder } else { builder.method("null", slow) };
        let client = builder.connect(&world.shop, "web:lies").unwrap();
        let (first, second) = (client.start("ask", &[]).unwrap(), client.start("ask", &[]).unwrap());
        let end = server.begin();
        // The second call's thread receives while the first call waits, or executes a call back until the connection has ended.
        let first = std::thread::spawn(move || first.wait().map(drop));
        let second = second.wait().map(drop);
        drop(go);
        let _ = first.join().unwrap();
        assert!(matches!(second, Err(CallError::Corrupt(_))), "{what}: {second:?}");
        drop(client);
        end();
    }
}

#[test]
fn bad_pointer_of_a_server_is_refused_by_the_client() {
    let _guard = hang_guard();
    let world = World::new();
    let pointer = record(CALL | BY_REFERENCE, 0, NULL, &[0x3000_0000_0000, 8]);
    let mut lies = [pointer, record(REPLY, 0, 0, &[])].into_iter();
    let server = lying_server(&world, move |socket| lies.next().is_some_and(|lie| socket.send(&lie).is_ok()));
    let client = CallClient::builder().method("null", |_| panic!("it must not run"));
    let client = client.connect(&world.shop, "web:lies").unwrap();
    let call = client.start("ask", &[]).unwrap();
    let end = server.begin();
    call.wait().unwrap();
    drop(client);
    end();
}

/// A hostile client of a server whose function `ask` calls it back and reports the outcome. It reads nothing: a reply that it sends together
/// with its call is in the ring when the server waits for it.
struct HostileClient {
    server: CallServer,
    liar: MessageSocket,
    outcomes: Receiver<Result<Vec<u8>, CallError>>,
    notices: Receiver<()>,
    _world: World,
}

impl HostileClient {
    fn new(longest: Duration) -> Self {
        let world = World::new();
        let (sender, outcomes) = channel();
        let (noticed, notices) = channel();
        let (sender, noticed) = (Mutex::new(sender), Mutex::new(noticed));
        let server = CallServer::builder()
            .method("null", move |_| {
                noticed.lock().unwrap().send(()).unwrap();
                Ok(().into())
            })
            .method("ask", move |call| {
                let outcome = call.call_back_within(longest, "null", &[]).map(|view| view.to_vec());
                sender.lock().unwrap().send(outcome).unwrap();
                Ok(().into())
            });
        let server = server.bind(&world.web, "calls").unwrap();
        let mut liar = MessageSocket::connect_with(&world.shop, "web:calls", &options()).unwrap();
        liar.set_timeout(Some(HANG));
        liar.send(&record(HELLO | 1 << 16, 0, 1, &[])).unwrap();
        Self { server, liar, outcomes, notices, _world: world }
    }

    fn send(&mut self, record: &[u8]) {
        self.liar.send(record).unwrap();
    }

    fn outcome(&self) -> Result<Vec<u8>, CallError> {
        self.outcomes.recv_timeout(HANG).unwrap()
    }

    fn assert_served(&mut self) {
        while self.notices.try_recv().is_ok() {}
        self.send(&record(NOTICE, 0, NULL, &[]));
        self.notices.recv_timeout(HANG).unwrap();
    }
}

#[test]
fn reply_that_no_client_may_send_ends_that_client() {
    let _guard = hang_guard();
    let cases = [
        ("to no call back", record(REPLY, 6, 0, &[])),
        ("unknown status", record(REPLY | 99 << 16, 5, 0, &[])),
        ("outside its heap", record(REPLY | BY_REFERENCE, 5, 0, &[0x3000_0000_0000, 8])),
        ("the application's error 0", record(REPLY | 3 << 16, 5, 0, &[])),
    ];
    for (what, lie) in cases {
        let mut hostile = HostileClient::new(HANG);
        hostile.send(&record(CALL, 5, ASK, &[]));
        hostile.send(&lie);
        let outcome = hostile.outcome();
        assert!(matches!(outcome, Err(CallError::Corrupt(_))), "{what}: {outcome:?}");
        eventually(what, || hostile.server.clients() == 0);
    }
    let mut honest = HostileClient::new(HANG);
    honest.send(&record(CALL, 5, ASK, &[]));
    honest.send(&record(REPLY | 3 << 32, 5, 0, &[0x00c0_ffee]));
    assert_eq!(honest.outcome().unwrap(), [0xee, 0xff, 0xc0]);
    honest.assert_served();
    for status in [2u64, 0x8001] {
        let world = World::new();
        let server = CallServer::builder().bind(&world.web, "calls").unwrap();
        let mut liar = MessageSocket::connect_with(&world.shop, "web:calls", &options()).unwrap();
        eventually("it is connected", || server.clients() == 1);
        liar.send(&record(HELLO | status << 16, 0, 1, &[])).unwrap();
        eventually("a hello without meaning", || server.clients() == 0);
    }
}

#[test]
fn client_that_floods_in_a_call_back_ends_the_call_back_alone() {
    let _guard = hang_guard();
    let mut hostile = HostileClient::new(HANG);
    hostile.send(&record(CALL, 5, ASK, &[]));
    for _ in 0..1100 {
        hostile.send(&record(NOTICE, 0, NULL, &[]));
    }
    let outcome = hostile.outcome();
    assert!(matches!(outcome, Err(CallError::Refused(_))), "{outcome:?}");
    for _ in 0..1100 {
        hostile.notices.recv_timeout(HANG).unwrap();
    }
    // Its late reply is dropped, once.
    hostile.send(&record(REPLY, 5, 0, &[]));
    hostile.assert_served();
    hostile.send(&record(REPLY, 5, 0, &[]));
    eventually("the second reply is a lie", || hostile.server.clients() == 0);
}

#[test]
fn client_that_sends_without_end_lets_a_call_back_time_out() {
    let _guard = hang_guard();
    let mut hostile = HostileClient::new(Duration::from_millis(50));
    hostile.send(&record(CALL, 5, ASK, &[]));
    let outcome = loop {
        // Slowly: it is never too many, even if the server gets no processor for seconds, and there is always another one soon.
        hostile.send(&record(NOTICE, 0, NULL, &[]));
        std::thread::sleep(Duration::from_millis(5));
        if let Ok(outcome) = hostile.outcomes.try_recv() {
            break outcome;
        }
    };
    assert!(matches!(outcome, Err(CallError::TimedOut)), "{outcome:?}");
    hostile.assert_served();
}

#[test]
fn unanswered_call_back_excludes_another_of_the_same_call() {
    let _guard = hang_guard();
    // The limit is so short that a reply that comes with the next call is late.
    let mut hostile = HostileClient::new(Duration::ZERO);
    hostile.send(&record(CALL, 17, ASK, &[]));
    assert!(matches!(hostile.outcome(), Err(CallError::TimedOut)));
    hostile.send(&record(CALL, 17, ASK, &[]));
    let outcome = hostile.outcome();
    assert!(matches!(outcome, Err(CallError::Refused(_))), "{outcome:?}");
    hostile.send(&record(REPLY, 17, 0, &[]));
    hostile.send(&record(CALL, 17, ASK, &[]));
    assert!(matches!(hostile.outcome(), Err(CallError::TimedOut)));
}
