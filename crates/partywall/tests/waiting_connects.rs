//! A `connect` to another host that waits for the gateway, and other requests of the same process meanwhile (protocol H4).
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall::{Domain, Error, Options, Refusal};
use partywall_daemon::{Broker, Config};
use std::io::{Read as _, Write as _};
use std::thread;

#[test]
fn requests_go_on_while_connect_waits_for_other_host() {
    let _guard = hang_guard();
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.toml");
    let uid = rustix::process::getuid().as_raw();
    std::fs::write(&policy, format!("administrators = [{uid}]\n[cluster]\nhost = 'alpha'\n")).unwrap();
    let broker = Broker::start(&Config::new(folder.path().join("broker.sock")).policy_file(&policy)).unwrap();
    let join = |name: &str| Domain::builder().name(name).broker(broker.path()).join().unwrap();
    let (gateway, web, shop) = (join("gateway"), join("web"), join("shop"));
    let mut routes = gateway.bind_routes(&Options::default()).unwrap();

    let connecting = {
        let web = web.clone();
        thread::spawn(move || web.connect("db:sql"))
    };
    let route = routes.next().unwrap();
    // The gateway does not answer yet. The same domain lists, connects, binds and accepts.
    assert_eq!(web.domains().unwrap().len(), 3);
    let mut listener = web.bind("echo").unwrap();
    let mut there = shop.connect("web:echo").unwrap();
    let (mut here, _) = listener.accept().unwrap();
    there.write_all(b"hello").unwrap();
    here.read_exact(&mut [0; 5]).unwrap();
    let mut orders = shop.bind("orders").unwrap();
    let _order = web.connect("shop:orders").unwrap();
    let _accepted = orders.accept().unwrap();
    // The first request has waited all the time: the broker has not given it up.
    route.refuse(Refusal::NoSuchDomain, "no host has it").unwrap();
    let refused = connecting.join().unwrap().unwrap_err();
    assert!(matches!(refused, Error::Refused { code: Refusal::NoSuchDomain, .. }), "{refused}");
}
