//! Calls back: a function of a server calls its client during the client's call (protocol K8).
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::gate::gate;
use common::process::{self, child};
use common::world::World;
use common::*;
use partywall::rpc::{CallClient, CallClientBuilder, CallError, CallServer, CallServerBuilder, IncomingCall, Method};
use partywall::{Domain, Error};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

const MOST_CALLS_BACK: u32 = 1 << 16;

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
    let (wait, _, go) = gate();
    let server = asking().method("impatient", move |call| {
        let first = call.call_back_within(Duration::from_millis(5), "slow", &[7; 1000]);
        // It would be given the memory of the arguments, if that were free.
        call.heap().allocate(1000)?.fill(8);
        let second = call.call_back("slow", &[]);
        // Only now does the first one end.
        let _ = go.send(());
        assert!(matches!(first, Err(CallError::TimedOut)), "{first:?}");
        assert!(matches!(second, Err(CallError::Refused(_))), "{second:?}");
        Ok(vec![5].into())
    });
    let _server = server.bind(&world.web, "calls").unwrap();
    let client = echoing().method("slow", move |call| {
        wait();
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
