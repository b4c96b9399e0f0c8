//! The broker's socket for containers, with clients that the kernel cannot tell from those of the host.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::Client;
use partywall_daemon::{Broker, Config};
use partywall_protocol::wire::{Message, Refusal, Text};

/// Whether the broker accepts a request that only administrators may make.
fn administers(client: &mut Client) -> bool {
    let rules = Message::SetMoveRules { reset: false, clauses: Text("never".into()), ring_size: 0, spin_us: u32::MAX };
    match client.ask(&rules) {
        Message::MoveRulesAre { .. } => true,
        Message::Refused { code: Refusal::Denied, .. } => false,
        other => panic!("{other:?}"),
    }
}

fn broker(dir: &Path, policy: &str) -> Broker {
    std::fs::create_dir(dir.join("containers")).unwrap();
    let file = dir.join("policy.toml");
    std::fs::write(&file, policy).unwrap();
    Broker::start(&Config::new(dir.join("broker.sock")).policy_file(file)).unwrap()
}

#[test]
fn client_of_the_containers_socket_is_no_administrator() {
    let dir = tempfile::tempdir().unwrap();
    let uid = rustix::process::geteuid().as_raw();
    let policy = format!("administrators = [{uid}]\n[[join]]\ndomain = '*'\nusers = [{uid}]\n");
    let broker = broker(dir.path(), &policy);
    // Both are this process, of the broker's own namespaces: as in a container of `podman run --pid=host`.
    assert!(administers(&mut Client::join(broker.path(), "web")));
    let socket = dir.path().join("containers/broker.sock");
    assert!(!administers(&mut Client::join(&socket, "container")));
    drop(broker);
    assert!(!socket.exists(), "the broker leaves no socket behind");
}

#[test]
fn administrators_in_containers_are_those_of_the_policy() {
    let dir = tempfile::tempdir().unwrap();
    let uid = rustix::process::geteuid().as_raw();
    let policy = format!("administrators = []\nadministrators_in_containers = [{uid}]\n");
    let broker = broker(dir.path(), &policy);
    assert!(administers(&mut Client::join(&dir.path().join("containers/broker.sock"), "container")));
    drop(broker);
}

/// In the environment of the process in the container: the socket of the broker that it asks.
const BROKER_OF_CONTAINER: &str = "PARTYWALL_TEST_BROKER_OF_CONTAINER";

/// The same number as the broker's user, in another pid namespace or user namespace, at the broker's own socket: as in containers that have
/// that socket mounted.
#[test]
fn root_of_a_container_does_not_set_the_rules_of_the_host() {
    if let Some(broker) = std::env::var_os(BROKER_OF_CONTAINER) {
        println!("administers: {}", administers(&mut Client::join(Path::new(&broker), "container")));
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let uid = rustix::process::geteuid().as_raw();
    let policy = format!("administrators = [{uid}]\n[[join]]\ndomain = '*'\nusers = [{uid}]\n");
    let broker = broker(dir.path(), &policy);
    let asks = |unshare: &[&str]| {
        let mut command = match unshare {
            [] => Command::new(std::env::current_exe().unwrap()),
            options => {
                let mut command = Command::new("unshare");
                command.args(options).arg(std::env::current_exe().unwrap());
                command
            }
        };
        command.args(["--exact", "root_of_a_container_does_not_set_the_rules_of_the_host", "--nocapture"]);
        command.env(BROKER_OF_CONTAINER, broker.path()).stdin(Stdio::null());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let answer = said.lines().find_map(|line| line.split_once("administers: ")).map(|(_, answer)| answer == "true");
        if answer.is_none() {
            eprintln!("SKIPPED: {unshare:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
        }
        answer
    };
    assert_eq!(asks(&[]), Some(true), "a process of the broker's own namespaces");
    for namespaces in [&["--user", "--map-root-user"][..], &["--pid", "--fork", "--kill-child"]] {
        assert_ne!(asks(namespaces), Some(true), "{namespaces:?}");
    }
}
