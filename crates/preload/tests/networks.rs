//! Datagrams of programs in different network namespaces, which the operator's list joins.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{ChildStdout, Stdio},
};

use support::{client::Client, eventually, free_port, guard::Guard, netns::Namespaces, stage::python, world::World};

/// The server's namespace, the client's, and one that is in no list.
const SERVER: usize = 0;
const CLIENT: usize = 1;
const THIRD: usize = 2;

/// A program of `datagram_peers.py` in one of the namespaces.
struct Program {
    guard: Guard,
    lines: BufReader<ChildStdout>,
}

impl Program {
    fn start(world: &World, spaces: &Namespaces, which: usize, bind: &str, arguments: &[&str]) -> Self {
        let mut inner = std::process::Command::new(python());
        world.preload(&mut inner);
        inner.env(partywall_protocol::environment::MOVES, "after=1");
        inner.env("PEERS_AT", Namespaces::ADDRESSES[0]).env("PEERS_BIND", bind);
        // The variables are for the program alone, not for what brings it to its place.
        let mut command = spaces.command(which, Path::new("/usr/bin/env"));
        for (name, value) in inner.get_envs() {
            let mut setting = name.to_owned();
            setting.push("=");
            setting.push(value.unwrap());
            command.arg(setting);
        }
        command.arg(python()).arg(format!("{}/tests/programs/datagram_peers.py", env!("CARGO_MANIFEST_DIR")));
        command.args(arguments).env_remove("LD_PRELOAD").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut guard = Guard::spawn(&mut command);
        let lines = BufReader::new(guard.0.stdout.take().unwrap());
        Self { guard, lines }
    }

    fn server(world: &World, spaces: &Namespaces, bind: &str, role: &str, port: u16) -> Self {
        let mut server = Self::start(world, spaces, SERVER, bind, &[role, &port.to_string()]);
        assert_eq!(server.line(), "ready");
        server
    }

    fn client(world: &World, spaces: &Namespaces, which: usize, port: u16, count: u32) -> Self {
        Self::start(world, spaces, which, "", &["ping", &port.to_string(), &count.to_string()])
    }

    /// A client that sends until it is given a line, and then this number of datagrams more.
    fn endless_client(world: &World, spaces: &Namespaces, port: u16, count: u32) -> Self {
        Self::start(world, spaces, CLIENT, "", &["endless", &port.to_string(), &count.to_string()])
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

/// `[[network]]` tables for these namespaces.
fn networks(list: &[(String, &str)]) -> String {
    let table = |(namespace, address): &(String, &str)| {
        format!("[[network]]\nnamespace = \"{namespace}\"\naddresses = [\"{address}\"]\n")
    };
    list.iter().map(table).collect()
}

fn both(spaces: &Namespaces) -> String {
    networks(&[(spaces.path(SERVER), Namespaces::ADDRESSES[0]), (spaces.path(CLIENT), Namespaces::ADDRESSES[1])])
}

/// The number of flows to this port, and from it, that have carried anything.
fn flows(world: &World, port: u16) -> [usize; 2] {
    let mut client = Client::join(&world.socket(), "watcher").unwrap();
    let to_server = format!("udp-{port}");
    let mut flows = [0; 2];
    for row in client.channels().iter().filter(|row| row.service.as_str().starts_with("udp-")) {
        let has_bytes = client.look(row.channel).is_some_and(|sides| sides.iter().any(|(tail, _)| *tail > 0));
        flows[usize::from(row.service != to_server)] += usize::from(has_bytes);
    }
    flows
}

/// Whether datagrams go by rings in both directions for one of some clients. Each gets an answer to all that it sends.
fn any_by_rings(world: &World, spaces: &Namespaces, which: usize, port: u16, clients: usize) -> bool {
    (0..clients).any(|_| {
        let mut client = Program::client(world, spaces, which, port, 6000);
        assert_eq!(client.line(), "answered 6000");
        // It ends with its input, and its rings with it.
        flows(world, port).iter().all(|flows| *flows > 0)
    })
}

#[test]
fn datagrams_of_listed_namespaces_use_rings_both_ways() {
    let Some(spaces) = Namespaces::three() else { return };
    let world = World::new();
    world.set_further_policy(&both(&spaces));
    for (bind, role) in [("0.0.0.0", "epoll"), (Namespaces::ADDRESSES[0], "echo"), ("0.0.0.0", "group")] {
        let port = free_port();
        let _server = Program::server(&world, &spaces, bind, role, port);
        assert!(any_by_rings(&world, &spaces, CLIENT, port, 20), "{role} at {bind}");
        assert!(
            !any_by_rings(&world, &spaces, THIRD, port, 2),
            "{role} at {bind}, from a namespace that is not listed"
        );
        assert_eq!(flows(&world, port), [0, 0], "{role} at {bind}");
    }
}

#[test]
fn datagrams_within_listed_namespace_use_rings() {
    let Some(spaces) = Namespaces::three() else { return };
    let world = World::new();
    world.set_further_policy(&both(&spaces));
    let port = free_port();
    let _server = Program::server(&world, &spaces, "0.0.0.0", "echo", port);
    assert!(any_by_rings(&world, &spaces, SERVER, port, 20));
}

#[test]
fn datagrams_of_unlisted_namespaces_stay_on_kernel() {
    let Some(spaces) = Namespaces::three() else { return };
    let world = World::new();
    let port = free_port();
    let _server = Program::server(&world, &spaces, "0.0.0.0", "echo", port);
    assert!(!any_by_rings(&world, &spaces, CLIENT, port, 2), "without a list");
    // The list says that the server's address is the third namespace's.
    world.set_further_policy(&networks(&[
        (spaces.path(THIRD), Namespaces::ADDRESSES[0]),
        (spaces.path(CLIENT), Namespaces::ADDRESSES[1]),
    ]));
    let port = free_port();
    let _server = Program::server(&world, &spaces, "0.0.0.0", "echo", port);
    assert!(!any_by_rings(&world, &spaces, CLIENT, port, 2), "the address is another's");
    assert_eq!(flows(&world, port), [0, 0]);
}

#[test]
fn namespaces_that_are_listed_later_get_rings() {
    let Some(spaces) = Namespaces::three() else { return };
    let world = World::new();
    let port = free_port();
    let _server = Program::server(&world, &spaces, "0.0.0.0", "epoll", port);
    assert!(!any_by_rings(&world, &spaces, CLIENT, port, 2), "not listed yet");
    world.set_further_policy(&both(&spaces));
    assert!(any_by_rings(&world, &spaces, CLIENT, port, 20));
}

/// Runs a client whose flows end in the middle, and which gets an answer to everything it sends. Returns what the ending has made.
fn lives_through<T>(world: &World, spaces: &Namespaces, port: u16, end: impl FnOnce() -> T) -> T {
    let mut client = Program::endless_client(world, spaces, port, 6000);
    eventually("it goes by rings", || flows(world, port).iter().all(|flows| *flows > 0));
    let ended = end();
    eventually("its flows have ended", || flows(world, port) == [0, 0]);
    assert_eq!(client.guard.ended(), None, "it still sends");
    client.guard.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    assert_eq!(client.line(), "answered 6000");
    assert_eq!(flows(world, port), [0, 0]);
    ended
}

#[test]
fn flows_end_without_loss_when_the_list_is_gone() {
    let Some(spaces) = Namespaces::three() else { return };
    let world = World::new();
    world.set_further_policy(&both(&spaces));
    let port = free_port();
    let _server = Program::server(&world, &spaces, "0.0.0.0", "epoll", port);
    lives_through(&world, &spaces, port, || world.set_further_policy(""));
}

#[test]
fn flows_end_without_loss_when_a_namespace_loses_its_name() {
    let Some(spaces) = Namespaces::three() else { return };
    let world = World::new();
    world.set_further_policy(&both(&spaces));
    let port = free_port();
    let _server = Program::server(&world, &spaces, "0.0.0.0", "epoll", port);
    lives_through(&world, &spaces, port, || spaces.unname(CLIENT));
}

#[test]
fn broker_does_not_keep_a_namespace_of_ended_programs() {
    let Some(spaces) = Namespaces::three() else { return };
    let world = World::new();
    world.set_further_policy(&both(&spaces));
    let port = free_port();
    let server = Program::server(&world, &spaces, "0.0.0.0", "epoll", port);
    let before = world.broker_descriptors();
    let client = Program::client(&world, &spaces, CLIENT, port, u32::MAX);
    eventually("it goes by rings", || flows(&world, port).iter().all(|flows| *flows > 0));
    let used = world.broker_descriptors();
    assert!(used > before, "sockets in both namespaces");
    spaces.unname(CLIENT);
    drop(client);
    // With the namespace, the kernel removes the end of its link in the server's.
    eventually("the namespace is gone", || {
        let mut list = spaces.command(SERVER, Path::new("ip"));
        let output = list.args(["-o", "link", "show"]).output().unwrap();
        !String::from_utf8_lossy(&output.stdout).contains("pw-test")
    });
    drop(server);
}

#[test]
fn namespace_that_is_made_again_gets_rings() {
    let Some(spaces) = Namespaces::three() else { return };
    let world = World::new();
    world.set_further_policy(&both(&spaces));
    let again = |spaces: &Namespaces| {
        let port = free_port();
        let _server = Program::server(&world, spaces, "0.0.0.0", "epoll", port);
        assert!(any_by_rings(&world, spaces, CLIENT, port, 20));
    };
    again(&spaces);
    spaces.make_again();
    again(&spaces);
}

#[test]
fn broker_without_the_capability_leaves_datagrams_to_kernel() {
    let Some(spaces) = Namespaces::three() else { return };
    let world = World::with_broker_started_by(&["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]);
    world.set_further_policy(&both(&spaces));
    let port = free_port();
    let _server = Program::server(&world, &spaces, "0.0.0.0", "echo", port);
    assert!(!any_by_rings(&world, &spaces, CLIENT, port, 2));
    let log = std::fs::read_to_string(world.path("broker.log")).unwrap();
    assert!(log.contains("CAP_SYS_ADMIN"), "{log}");
}
