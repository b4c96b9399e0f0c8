//! Calls back: a function of a server calls its client during the client's call (protocol K8).
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{self, child};
use common::world::World;
use common::*;
use partywall::rpc::{CallClient, CallClientBuilder, CallError, CallServer, CallServerBuilder, IncomingCall, Method};
use partywall::{Domain, Error, MessageListener, MessageSocket, Options, RingSize};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

const MOST_CALLS_BACK: u32 = 1 << 16;
const HELLO: u64 = 1;
const CALL: u64 = 2;
const NOTICE: u64 = 3;
const REPLY: u64 = 4;
const BY_REFERENCE: u64 = 1 << 8;
const NULL: u32 = Method::named("null").number();
const ASK: u32 = Method::named("ask").number();

fn args(call: &IncomingCall<'_>) -> Vec<u8> {
    call.args().to_vec()
}

/// `ask` calls the client back with its arguments and returns what comes back.
fn asking() -> CallServerBuilder {
    CallServer::builder()
        .method("null", |_| Ok(().into()))
        .method("ask", |call| Ok(call.call_back("answer", &args(call))?.to_vec().into()))
}

fn connect(world: &World, builder: &CallClientBuilder) -> CallClient {
    builder.connect(&world.shop, "web:calls").unwrap()
}

fn echoing() -> CallClientBuilder {
    CallClient::builder().method("answer", |call| Ok(args(call).into()))
}

/// A function that has begun when this returns something, and which continues when `go` is dropped.
fn gate() -> (impl Fn() + Send + Sync + 'static, Receiver<()>, std::sync::mpsc::Sender<()>) {
    let (begun, has_begun) = channel();
    let (go, may_go) = channel::<()>();
    let pair = Mutex::new((begun, may_go));
    let wait = move || {
        let pair = pair.lock().unwrap();
        let _ = pair.0.send(());
        let _ = pair.1.recv();
    };
    (wait, has_begun, go)
}

#[test]
fn child_main() {
    let Some((role, broker)) = process::role() else { return };
    let join = |name: &str| Domain::builder().name(name).broker(&broker).join().unwrap();
    match role.as_str() {
        "server" => {
            let _server = asking().bind(&join("web"), "child").unwrap();
            std::thread::park();
        }
        "client" => {
            let builder = CallClient::builder().method("answer", |_| std::process::abort());
            let _ = builder.connect(&join("shop"), "web:calls").unwrap().call("ask", &[]);
        }
        other => panic!("{other}"),
    }
}

#[test]
fn call_back_passes_bytes_of_every_size_both_ways() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = asking().bind(&world.web, "calls").unwrap();
    let client = connect(&world, &echoing());
    for len in [0, 1, 40, 41, 4096, 100_000, 1 << 20] {
        let sent = Pattern.bytes(len as u64, len);
        assert_eq!(client.call("ask", &sent).unwrap().to_vec(), sent, "{len}");
    }
    let before = client.heap().stats();
    for _ in 0..100 {
        client.call("ask", &[7; 100_000]).unwrap();
    }
    assert_eq!(client.heap().stats(), before, "blocks of calls back are freed with their call");
}

#[test]
fn results_of_one_call_stay_readable_until_its_reply() {
    let _guard = hang_guard();
    let world = World::new();
    let sums = CallServer::builder().method("sum", |call| {
        let parts = (0..50u8).map(|n| call.call_back("part", &[n])).collect::<Result<Vec<_>, _>>()?;
        let sum: u64 = parts.iter().flat_map(|part| part.to_vec()).map(u64::from).sum();
        Ok(sum.to_le_bytes().into())
    });
    let _server = sums.bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().method("part", |call| {
        let mut block = call.heap().allocate(1000)?;
        block.fill(call.args().array::<1>(0)?[0]);
        Ok(block.into())
    });
    let client = connect(&world, &client);
    let sum = client.call("sum", &[]).unwrap();
    assert_eq!(u64::from_le_bytes(sum.array(0).unwrap()), (0..50).sum::<u64>() * 1000);
    assert_eq!(client.heap().stats().blocks, 0);
}

#[test]
fn call_back_runs_on_the_thread_that_waits_for_its_call() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = asking().bind(&world.web, "calls").unwrap();
    let name = |_: &IncomingCall<'_>| {
        let thread = format!("{:?}", std::thread::current().id());
        Ok(thread.into_bytes().into())
    };
    let client = connect(&world, &CallClient::builder().method("answer", name));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let here = format!("{:?}", std::thread::current().id());
                for _ in 0..500 {
                    let there = client.call("ask", &[]).unwrap().to_vec();
                    assert_eq!(String::from_utf8(there).unwrap(), here);
                }
            });
        }
    });
}

#[test]
fn errors_of_call_back_reach_the_function() {
    let _guard = hang_guard();
    let world = World::new();
    let relay = CallServer::builder().method("relay", |call| match call.call_back(Method::named("f"), &args(call)) {
        Err(CallError::Application { code: 7, message }) if message == "no" => Ok(vec![1].into()),
        Err(CallError::Panicked) => Ok(vec![2].into()),
        Err(CallError::BadPointer) => Ok(vec![3].into()),
        other => panic!("{other:?}"),
    });
    let _server = relay.method("other", |call| call.call_back("nothing", &[]).map(|_| ().into()));
    let _server = _server.bind(&world.web, "calls").unwrap();
    let client = CallClient::builder().method("f", |call| match call.args().array::<1>(0)? {
        [1] => Err(CallError::application(7, "no")),
        [2] => panic!("a function of the test"),
        _ => call.follow(8, 8).map(|_| ().into()),
    });
    let client = connect(&world, &client);
    for n in 1..=3u8 {
        assert_eq!(client.call("relay", &[n]).unwrap().to_vec(), [n]);
    }
    assert!(matches!(client.call("other", &[]), Err(CallError::UnknownMethod)));
}

#[test]
fn calls_during_a_call_back_are_executed_after_it_in_order() {
    let _guard = hang_guard();
    let world = World::new();
    let log = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&log);
    let server = asking().method("note", move |call| {
        noted.lock().unwrap().push(u64::from_le_bytes(call.args().array(0)?));
        Ok(().into())
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let (wait, has_begun, go) = gate();
    let client = CallClient::builder().method("answer", move |_| {
        wait();
        Ok(().into())
    });
    let client = connect(&world, &client);
    let asking = std::thread::spawn({
        let client = client.clone();
        move || client.call("ask", &[]).map(drop)
    });
    has_begun.recv_timeout(HANG).unwrap();
    let calls: Vec<_> = (0..200u64)
        .map(|n| {
            client.notify("note", &(2 * n).to_le_bytes()).unwrap();
            client.start("note", &(2 * n + 1).to_le_bytes()).unwrap()
        })
        .collect();
    assert!(log.lock().unwrap().is_empty(), "the server waits for the call back");
    drop(go);
    asking.join().unwrap().unwrap();
    calls.into_iter().for_each(|call| assert!(call.wait().unwrap().is_empty()));
    assert!((0..400).eq(log.lock().unwrap().iter().copied()));
}

#[test]
fn function_that_is_called_back_cannot_wait_for_its_server() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = asking().bind(&world.web, "calls").unwrap();
    let slot: Arc<Mutex<Option<CallClient>>> = Arc::default();
    let own = Arc::clone(&slot);
    let client = CallClient::builder().method("answer", move |_| {
        let own = own.lock().unwrap();
        let client = own.as_ref().unwrap();
        assert!(matches!(client.call("null", &[]), Err(CallError::Refused(_))));
        assert!(matches!(client.start("null", &[]), Err(CallError::Refused(_))));
        client.notify("null", &[])?;
        Ok(vec![9].into())
    });
    let client = connect(&world, &client);
    *slot.lock().unwrap() = Some(client.clone());
    assert_eq!(client.call("ask", &[]).unwrap().to_vec(), [9]);
    client.call("null", &[]).unwrap();
    slot.lock().unwrap().take();
}

#[test]
fn call_started_before_is_not_waited_for_in_a_call_back() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = asking().bind(&world.web, "calls").unwrap();
    let slot: Arc<Mutex<Option<partywall::rpc::Ongoing>>> = Arc::default();
    let own = Arc::clone(&slot);
    let client = CallClient::builder().method("answer", move |_| {
        let later = own.lock().unwrap().take().unwrap();
        assert!(matches!(later.wait(), Err(CallError::Refused(_))));
        Ok(().into())
    });
    let client = connect(&world, &client);
    let first = client.start("ask", &[]).unwrap();
    *slot.lock().unwrap() = Some(client.start("null", &[]).unwrap());
    first.wait().unwrap();
    client.call("null", &[]).unwrap();
}

#[test]
fn call_back_is_refused_where_it_cannot_be_made() {
    let _guard = hang_guard();
    let world = World::new();
    let (sender, refusals) = channel();
    let sender = Mutex::new(sender);
    let server = asking().method("note", move |call| {
        sender.lock().unwrap().send(call.call_back("answer", &[]).map(drop)).unwrap();
        Ok(().into())
    });
    let server = server.method("elsewhere", |call| {
        let call = call.to_owned();
        std::thread::spawn(move || call.call_back("answer", &[]).map(|_| ().into())).join().unwrap()
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let deaf = CallClient::builder().connect(&world.shop, "web:calls").unwrap();
    match deaf.call("ask", &[]) {
        Err(CallError::Refused(why)) => assert!(why.contains("CallClientBuilder::method"), "{why}"),
        other => panic!("{other:?}"),
    }
    let client = connect(&world, &echoing());
    client.notify("note", &[]).unwrap();
    let result = refusals.recv_timeout(HANG).unwrap();
    assert!(matches!(result, Err(CallError::Refused(_))), "a notice: {result:?}");
    assert!(matches!(client.call("elsewhere", &[]), Err(CallError::Refused(_))));
    let clash = echoing().method("answer", |_| Ok(().into())).connect(&world.shop, "web:calls");
    assert!(matches!(clash, Err(Error::Invalid(_))));
    for client in [client, deaf] {
        client.call("null", &[]).unwrap();
    }
}

#[test]
fn call_back_of_a_given_up_call_is_refused() {
    let _guard = hang_guard();
    let world = World::new();
    let (sender, results) = channel();
    let sender = Mutex::new(sender);
    let (wait, has_begun, go) = gate();
    let server = asking().method("late", move |call| {
        wait();
        let result = call.call_back("answer", &[]).map(drop);
        sender.lock().unwrap().send(result).unwrap();
        Ok(().into())
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let client = connect(&world, &echoing());
    // Its caller has gone before the call back arrives.
    drop(client.start("late", &[]).unwrap());
    has_begun.recv_timeout(HANG).unwrap();
    drop(go);
    client.call("null", &[]).unwrap();
    assert!(matches!(results.recv_timeout(HANG).unwrap(), Err(CallError::Refused(_))));
    // It has arrived when its caller goes.
    let given_up = client.start("ask", &[]).unwrap();
    let null = client.start("null", &[]).unwrap();
    let mut null = Some(null);
    let result = null.as_mut().unwrap().wait_for(Duration::from_millis(50));
    assert!(matches!(result, Ok(None)), "the call back waits for its caller: {result:?}");
    drop(given_up);
    null.unwrap().wait().unwrap();
}

#[test]
fn call_back_that_takes_too_long_is_given_up() {
    let _guard = hang_guard();
    let world = World::new();
    let server = asking().method("impatient", |call| {
        let first = call.call_back_within(Duration::from_millis(5), "slow", &[7; 1000]);
        assert!(matches!(first, Err(CallError::TimedOut)), "{first:?}");
        // It would be given the memory of the arguments, if that were free.
        call.heap().allocate(1000)?.fill(8);
        let second = call.call_back("slow", &[]);
        assert!(matches!(second, Err(CallError::Refused(_))), "{second:?}");
        Ok(vec![5].into())
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let client = echoing().method("slow", |call| {
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(args(call), [7; 1000], "the arguments stay until the function has ended");
        Ok(vec![1; 1000].into())
    });
    let client = connect(&world, &client);
    for _ in 0..3 {
        assert_eq!(client.call("impatient", &[]).unwrap().to_vec(), [5]);
        assert_eq!(client.call("ask", b"sound").unwrap().to_vec(), b"sound");
    }
    assert_eq!(client.heap().stats().blocks, 0);
}

#[test]
fn client_killed_in_a_call_back_is_dead_to_the_function() {
    let _guard = hang_guard();
    let world = World::new();
    let (sender, results) = channel();
    let sender = Mutex::new(sender);
    let server = CallServer::builder().method("ask", move |call| {
        sender.lock().unwrap().send(call.call_back("answer", &[0; 1000]).map(drop)).unwrap();
        Ok(().into())
    });
    let server = server.bind(&world.web, "calls").unwrap();
    let mut client = child("client", world.broker.path());
    assert!(!client.wait());
    let result = results.recv_timeout(HANG).unwrap();
    assert!(matches!(result, Err(CallError::Dead { seen: true })), "{result:?}");
    eventually("its connection ends", || server.clients() == 0);
    drop(server);
    world.assert_no_channel_is_left();
}

#[test]
fn server_killed_in_a_call_back_is_dead_to_the_client() {
    let _guard = hang_guard();
    let world = World::new();
    let server = child("server", world.broker.path());
    let server = Arc::new(Mutex::new(server));
    let victim = Arc::clone(&server);
    let builder = CallClient::builder().method("answer", move |_| {
        let mut victim = victim.lock().unwrap();
        victim.kill();
        victim.wait();
        Ok(vec![0; 1000].into())
    });
    let mut client = None;
    eventually("the server of another process is there", || {
        client = builder.connect(&world.shop, "web:child").ok();
        client.is_some()
    });
    let client = client.unwrap();
    let result = client.call("ask", &[]);
    assert!(matches!(result, Err(CallError::Dead { seen: true })), "{result:?}");
    drop((client, builder));
    world.assert_no_channel_is_left();
}

#[test]
fn server_that_stops_ends_a_call_back() {
    let _guard = hang_guard();
    let world = World::new();
    let (sender, results) = channel();
    let sender = Mutex::new(sender);
    let server = CallServer::builder().method("ask", move |call| {
        sender.lock().unwrap().send(call.call_back("answer", &[]).map(drop)).unwrap();
        Ok(().into())
    });
    let server = server.bind(&world.web, "calls").unwrap();
    let (wait, has_begun, go) = gate();
    let client = CallClient::builder().method("answer", move |_| {
        wait();
        Ok(().into())
    });
    let client = connect(&world, &client);
    let call = std::thread::spawn({
        let client = client.clone();
        move || client.call("ask", &[]).map(drop)
    });
    has_begun.recv_timeout(HANG).unwrap();
    server.stop();
    let result = results.recv_timeout(HANG).unwrap();
    assert!(matches!(result, Err(CallError::Dead { .. } | CallError::Closed { .. })), "{result:?}");
    drop(go);
    call.join().unwrap().unwrap();
    assert!(matches!(client.call("ask", &[]), Err(CallError::Closed { .. })));
    drop(client);
    world.assert_no_channel_is_left();
}

/// The words of a record behind its stamp.
fn record(kind: u64, id: u32, method: u32, payload: &[u64]) -> Vec<u8> {
    let mut words = vec![u64::from(id) | u64::from(method) << 32, kind];
    words.extend(payload);
    words.resize(7, 0);
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn options() -> Options {
    Options::default().ring(RingSize::Fixed(1 << 16))
}

/// A server that sends these records once it has been called.
fn lying_server(world: &World, mut lie: impl FnMut(&mut MessageSocket) -> bool + Send + 'static) -> Lies {
    let mut listener = MessageListener::bind(&world.web, "lies", &options()).unwrap();
    let (begin, may_begin) = channel::<()>();
    let thread = std::thread::spawn(move || {
        let mut socket = listener.accept().unwrap().0;
        socket.set_timeout(Some(HANG));
        socket.send(&record(HELLO, 0, 1, &[])).unwrap();
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
        let server = asking().bind(&world.web, "calls").unwrap();
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
        // Slowly: it is never too many, and there is always another one soon.
        hostile.send(&record(NOTICE, 0, NULL, &[]));
        std::thread::sleep(Duration::from_micros(200));
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

/// Opens a gate when it is dropped, so that a test that fails ends.
struct OpensGate<'a>(&'a (Mutex<bool>, Condvar));

impl Drop for OpensGate<'_> {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

#[test]
fn client_with_512_unanswered_calls_back_gets_no_other() {
    let _guard = hang_guard();
    let world = World::new();
    let (sender, outcomes) = channel();
    let sender = Mutex::new(sender);
    let server = CallServer::builder().method("ask", move |call| {
        let outcome = call.call_back_within(Duration::from_millis(1), "wait", &[]);
        sender.lock().unwrap().send(outcome.map(drop)).unwrap();
        Ok(().into())
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let (gate, begun) = (Arc::new((Mutex::new(false), Condvar::new())), Arc::new(AtomicU64::new(0)));
    let (shut, counted) = (Arc::clone(&gate), Arc::clone(&begun));
    let client = CallClient::builder().method("wait", move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        let is_open = shut.0.lock().unwrap();
        drop(shut.1.wait_while(is_open, |is_open| !*is_open).unwrap());
        Ok(().into())
    });
    let client = connect(&world, &client);
    std::thread::scope(|scope| {
        let gate = OpensGate(&gate);
        let ask = || {
            let client = &client;
            let builder = std::thread::Builder::new().stack_size(256 << 10);
            builder.spawn_scoped(scope, move || client.call("ask", &[]).map(drop)).unwrap()
        };
        while begun.load(Ordering::Relaxed) < 512 {
            let before = begun.load(Ordering::Relaxed);
            let call = ask();
            let outcome = outcomes.recv_timeout(HANG).unwrap();
            assert!(matches!(outcome, Err(CallError::TimedOut)), "{before}: {outcome:?}");
            // A client that was slow gets the call back and the reply together, and refuses.
            eventually("it waits, or refuses", || begun.load(Ordering::Relaxed) > before || call.is_finished());
        }
        ask().join().unwrap().unwrap();
        let outcome = outcomes.recv_timeout(HANG).unwrap();
        assert!(matches!(outcome, Err(CallError::Refused(_))), "{outcome:?}");
        drop(gate);
    });
    client.call("ask", &[]).unwrap();
    let outcome = outcomes.recv_timeout(HANG).unwrap();
    assert!(matches!(outcome, Ok(()) | Err(CallError::TimedOut)), "{outcome:?}");
}

#[test]
fn call_may_call_back_65536_times() {
    let _guard = hang_guard();
    let world = World::new();
    let server = asking().method("many", |call| {
        for _ in 0..MOST_CALLS_BACK {
            call.call_back("answer", &[])?;
        }
        let more = call.call_back("answer", &[]);
        assert!(matches!(more, Err(CallError::Refused(_))), "{more:?}");
        Ok(().into())
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let client = connect(&world, &echoing());
    client.call("many", &[]).unwrap();
    client.call("ask", &[]).unwrap();
}
