//! Connections whose addresses are translated on the way.

mod support;

use std::path::Path;
use std::process::Stdio;

use support::guard::Guard;
use support::netns::Namespaces;
use support::stage::{Stage, python, script};
use support::switch::{Policy, Switch};
use support::world::World;
use support::{eventually, free_port};

/// A client that talks until its standard input is closed.
fn client(stage: &Stage<'_>, address: &str, port: &str) -> Guard {
    let arguments = [&script("endless_client.py"), address, port];
    Guard::spawn(stage.command(1, Path::new(&python())).args(arguments).stdin(Stdio::piped()))
}

/// Closes the client's standard input; what it printed.
fn end(mut client: Guard) -> String {
    drop(client.0.stdin.take());
    let output = client.output();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn masqueraded_connections_get_rings_and_strangers_stay_on_tcp() {
    let Some(spaces) = Namespaces::behind_router() else { return };
    let world = World::new();
    Policy::new(world.socket()).set("now");
    let switch = Switch::watch(&world);
    let folder = || tempfile::Builder::new().prefix("partywall-translated-").tempdir().unwrap();
    let stage = Stage { world: Some(&world), spaces: Some(&spaces), folder: folder() };
    let outside = Stage { world: None, spaces: Some(&spaces), folder: folder() };
    let (port, server) = (free_port(), script("echo_server.py"));
    let mut server = stage.server(&python(), &[&server, Namespaces::BEHIND_ROUTER, &port.to_string()]);
    stage.await_listener(&mut server, port);

    let port = port.to_string();
    let client = |stage: &Stage<'_>| client(stage, Namespaces::BEHIND_ROUTER, &port);
    let stranger = client(&outside);
    let ours = [client(&stage), client(&stage)];
    eventually("both connections of programs are on rings", || switch.channels_with(1 << 20) == 2);
    assert!(end(stranger).starts_with("echoed all of"));
    for client in ours {
        assert!(end(client).starts_with("echoed all of"));
    }
    assert_eq!(switch.seen().channels, 2, "the stranger's is on TCP");
}

/// A connection to an address of the router, which leads to the server, as to a published port of a container.
#[test]
fn connections_to_listed_forwarded_address_get_rings() {
    let Some(spaces) = Namespaces::behind_router() else { return };
    let (world, port, published) = (World::new(), free_port(), free_port());
    let (at, to) = (format!("{}:{published}", Namespaces::ROUTER), format!("{}:{port}", Namespaces::BEHIND_ROUTER));
    spaces.forward(published, &to);
    let mut rules = Policy::new(world.socket());
    rules.set("now");
    let switch = Switch::watch(&world);
    let folder = tempfile::Builder::new().prefix("partywall-forwarded-").tempdir().unwrap();
    let stage = Stage { world: Some(&world), spaces: Some(&spaces), folder };
    let server = script("echo_server.py");
    let mut server = stage.server(&python(), &[&server, Namespaces::BEHIND_ROUTER, &port.to_string()]);
    stage.await_listener(&mut server, port);
    let client = || client(&stage, Namespaces::ROUTER, &published.to_string());

    let unlisted = client();
    eventually("the client talks before its address is listed", || spaces.serves(port));
    world.set_further_policy(&format!("[[forward]]\naddresses = [\"{at}\"]\nto = \"{to}\"\n"));
    rules.set("now");
    let translated_at_both_ends = client();
    eventually("the connection that the router gives its own address is on a ring", || {
        switch.channels_with(1 << 20) == 1
    });
    spaces.end_masquerade();
    let translated_at_one_end = client();
    eventually("the connection whose destination alone is translated is too", || switch.channels_with(1 << 20) == 2);
    for client in [unlisted, translated_at_both_ends, translated_at_one_end] {
        assert!(end(client).starts_with("echoed all of"));
    }
    assert_eq!(switch.seen().channels, 2, "the connection to an unlisted address stays on TCP");
}
