//! Programs that enter sockets into epoll sets before they connect them: the same output without the library and with it, and each of
//! their connections on a ring.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use support::{
    free_port,
    stage::{Stage, python, script},
    switch::{Policy, Switch},
    world::World,
};

/// The client's connections that may go by rings: all except the one that it shares with a child.
const ON_RINGS: u64 = 5;

fn talk(world: Option<&World>) -> String {
    talk_in(world, &[])
}

/// Runs only the functions with these names.
fn talk_in(world: Option<&World>, functions: &[&str]) -> String {
    let folder = tempfile::Builder::new().prefix("partywall-early-").tempdir().unwrap();
    let stage = Stage { world, spaces: None, folder };
    let (port, address) = (free_port(), stage.address());
    let p = port.to_string();
    let mut running = stage.server(&python(), &[&script("echo_server.py"), address, &p]);
    stage.await_listener(&mut running, port);
    let out = stage.client(&python(), &[&[&*script("early_client.py"), address, &p], functions].concat());
    running.stop();
    out
}

#[test]
fn sockets_entered_before_connect_get_rings() {
    let plain = talk(None);
    for policy in ["now", "after=16"] {
        // When a connection gets its ring is chance, and a busy machine may bring one too late.
        let mut most = 0;
        for _ in 0..5 {
            let world = World::new();
            let switch = Switch::new(&world);
            Policy::new(world.socket()).set(policy);
            assert_eq!(plain, talk(Some(&world)), "policy {policy}");
            most = most.max(switch.channels_with(32 << 10));
            if most >= ON_RINGS {
                break;
            }
        }
        assert!(most >= ON_RINGS, "policy {policy}: {most} connections sent by rings");
    }
}

/// Where no broker can say that the peer is none of ours, the bytes of a socket that is in a set count from before `connect`. Where it fails, that
/// is undone.
#[test]
fn connect_that_fails_while_it_is_watched_is_as_by_tcp() {
    let functions = ["by_refused_connect"];
    let plain = talk_in(None, &functions);
    let world = World::new();
    assert_eq!(plain, talk_in(Some(&world), &functions), "with a broker");
    world.kill_broker();
    assert_eq!(plain, talk_in(Some(&world), &functions), "without one");
}
