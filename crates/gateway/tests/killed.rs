//! Gateways that are killed while streams are busy, and while connects are under way: what programs see.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::traffic::busy_stream;
use common::{Cluster, OPEN, assert_echoes, connect, connect_again, echo, eventually};
use partywall::Domain;

fn two_hosts() -> Option<Cluster> {
    Cluster::start(&[("alpha", OPEN), ("beta", OPEN)])
}

/// Kills the gateway of a host and starts the next one.
fn kill_gateway(cluster: &mut Cluster, victim: usize) {
    cluster.hosts[victim].gateway.as_mut().unwrap().kill();
    cluster.hosts[victim].start_gateway();
}

#[test]
fn gateway_killed_under_bulk_transfer_ends_both_ends_as_dead() {
    let Some(mut cluster) = two_hosts() else { return };
    let (db, web) = (echo(&cluster.hosts[1], "db"), echo(&cluster.hosts[0], "web"));
    let mut listener = db.bind("queries").unwrap();
    for victim in [0, 1] {
        let busy = busy_stream(&web, "db:queries", &mut listener, &Arc::default());
        kill_gateway(&mut cluster, victim);
        let [client, server] = busy.map(|end| end.end());
        // What has come was compared with what was sent, byte by byte.
        for (sent, came) in [(client.0, server.1), (server.0, client.1)] {
            let kinds = [&sent, &came].map(|end| end.error.as_ref().map(std::io::Error::kind));
            assert_eq!(kinds, [Some(ErrorKind::ConnectionAborted); 2], "gateway {victim}: {sent:?} {came:?}");
            // A write that failed may have been carried in part.
            assert!(came.bytes <= sent.bytes + (16 << 10), "gateway {victim}: {sent:?} {came:?}");
        }
        assert_echoes(connect_again(&web, "db:echo"));
        assert_echoes(connect_again(&db, "web:echo"));
    }
}

#[test]
fn gateway_killed_while_a_connect_waits_for_it_refuses_it() {
    let Some(mut cluster) = two_hosts() else { return };
    let (db, web) = (echo(&cluster.hosts[1], "db"), echo(&cluster.hosts[0], "web"));
    // After a kill, no connection is there, and a connect begins with the handshake of the gateways.
    for (victim, is_connected) in [(1, false), (1, true), (0, false), (0, true)] {
        if is_connected {
            assert_echoes(connect_again(&web, "db:echo"));
        }
        let what = format!("gateway {victim}, connected: {is_connected}");
        // It takes no packet and no message any longer, so that connects stay where they are.
        cluster.hosts[victim].gateway.as_ref().unwrap().signal("STOP");
        let begun = AtomicUsize::new(0);
        thread::scope(|scope| {
            let connects: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        begun.fetch_add(1, Ordering::Relaxed);
                        web.connect("db:echo").map(drop)
                    })
                })
                .collect();
            eventually("all connects have begun", || begun.load(Ordering::Relaxed) == 4);
            // They are with the gateways by then, or come to a gateway that is dead; both have to end.
            thread::sleep(Duration::from_millis(200));
            cluster.hosts[victim].gateway.as_mut().unwrap().kill();
            for connect in connects {
                eventually(&format!("{what}: a connect ends"), || connect.is_finished());
                assert!(connect.join().unwrap().is_err(), "{what}: a connect has reached a dead gateway");
            }
        });
        cluster.hosts[victim].start_gateway();
    }
    assert_echoes(connect_again(&web, "db:echo"));
    assert_echoes(connect_again(&db, "web:echo"));
}

/// Has five bytes echoed by a new stream: whether they came back. A stream that ends in order with other bytes is an error.
fn echoes_once(web: &Domain) -> Result<bool, String> {
    let Ok(mut stream) = web.connect("db:echo") else { return Ok(false) };
    let mut come = String::new();
    let sent = stream.write_all(b"hello").and_then(|()| stream.shutdown(Shutdown::Write).map_err(Into::into));
    match sent.and_then(|()| stream.read_to_string(&mut come)) {
        Ok(_) if come == "hello" => Ok(true),
        Ok(_) => Err(format!("a stream ended in order after `{come}`")),
        Err(_) => Ok(false),
    }
}

#[test]
fn gateway_killed_under_connects_truncates_no_stream() {
    let Some(mut cluster) = two_hosts() else { return };
    let (_db, web) = (echo(&cluster.hosts[1], "db"), cluster.hosts[0].join("web"));
    assert_echoes(connect(&web, "db:echo"));
    let (stop, done, wrong) = (AtomicBool::new(false), AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    match echoes_once(&web) {
                        Ok(echoed) => drop(done.fetch_add(usize::from(echoed), Ordering::Relaxed)),
                        Err(end) => wrong.lock().unwrap().push(end),
                    }
                }
            });
        }
        let more = || {
            let before = done.load(Ordering::Relaxed);
            eventually("streams pass", || done.load(Ordering::Relaxed) > before + 20);
        };
        let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for victim in [0, 1, 0, 1] {
                more();
                kill_gateway(&mut cluster, victim);
            }
            more();
        }));
        stop.store(true, Ordering::Relaxed);
        killed.unwrap();
    });
    assert!(wrong.lock().unwrap().is_empty(), "{wrong:?}");
}
