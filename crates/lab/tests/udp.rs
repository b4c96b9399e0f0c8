//! Datagrams of unmodified programs in virtual machines that the operator's list names: sockperf in one guest, its clients in another and on
//! the host.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, GuestOptions, ImageOptions, Network};
use std::process::{Command, Stdio};
use std::time::Instant;
use world::{HANG, Inside, World, preload_library};

const LIBRARY: &str = "libpartywall_preload.so";
/// The addresses of the guests on their network.
const SERVER: &str = "10.77.0.1";
const CLIENT: &str = "10.77.0.2";
const PORT: u16 = 7000;
/// The log lines of the library when a flow has its ring, at the sender and at the receiver.
const SENDS: &str = "go by a ring";
const RECEIVES: &str = "by a ring of";

/// `[[network]]` tables for machines.
fn networks(list: &[(&str, &str)]) -> String {
    let table = |(machine, address): &(&str, &str)| {
        format!("[[network]]\nmachine = \"{machine}\"\naddresses = [\"{address}\"]\n")
    };
    list.iter().map(table).collect()
}

/// Starts a server that answers each datagram.
fn serve(guest: &Guest) {
    guest.sh(&format!(
        "PARTYWALL_PRELOAD_LOG=/tmp/server.log partywall run --quiet --move after=4 sockperf sr -i 0.0.0.0 -p {PORT} > /tmp/sockperf.log 2>&1 & true"
    ));
    let deadline = Instant::now() + HANG;
    while !guest.sh("cat /tmp/sockperf.log").contains("to block on socket") {
        assert!(Instant::now() < deadline, "{}", guest.sh("cat /tmp/sockperf.log /tmp/server.log"));
    }
}

/// Datagrams that a guest's kernel has sent.
fn sent_by_kernel(guest: &Guest) -> u64 {
    let all = guest.sh("grep '^Udp: [0-9]' /proc/net/snmp");
    all.split_whitespace().nth(4).unwrap().parse().unwrap()
}

/// The figure of sockperf with this name.
fn figure(said: &str, name: &str) -> u64 {
    let at = said.find(name).unwrap_or_else(|| panic!("no {name} in {said}"));
    said[at + name.len()..].split(|c: char| !c.is_ascii_digit()).find(|part| !part.is_empty()).unwrap().parse().unwrap()
}

/// Asks the server for some seconds; whether datagrams of the client went by a ring. Each must be answered as it was sent.
fn asks_by_ring(client: &Guest) -> bool {
    let before = sent_by_kernel(client);
    let line = format!(
        "rm -f /tmp/client.log; PARTYWALL_PRELOAD_LOG=/tmp/client.log partywall run --quiet --move after=4 \
         sockperf pp -i {SERVER} -p {PORT} -t 5 --data-integrity 2>&1; true"
    );
    let said = client.sh(&line);
    let sent = figure(&said, "SentMessages=");
    assert!(sent > 0 && !said.contains("integrity test failed"), "{said}");
    let by_kernel = sent_by_kernel(client) - before;
    let log = client.sh("cat /tmp/client.log 2> /dev/null; true");
    println!("{sent} sent, {by_kernel} of them by the kernel");
    log.contains(SENDS) && by_kernel < sent
}

/// A name for the network namespace that the host's address of a network is in.
struct HostNetwork(String);

impl HostNetwork {
    /// `None` if only root could put a program of the host on the network.
    fn name(network: &Network) -> Option<(Self, String)> {
        let address = network.host()?;
        let name = format!("partywall-lab-udp-{}", std::process::id());
        let attach = network.command("sh").args(["-c", &format!("ip netns attach {name} $$")]).status().unwrap();
        assert!(attach.success());
        let entry = format!("[[network]]\nnamespace = \"/run/netns/{name}\"\naddresses = [\"{address}\"]\n");
        Some((Self(name), entry))
    }
}

impl Drop for HostNetwork {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.0]).status();
    }
}

/// A program of the host asks the server for some seconds; whether its datagrams and the answers went by rings.
fn host_asks_by_ring(world: &World, network: &Network) -> bool {
    let log = world.path("client.log");
    let _ = std::fs::remove_file(&log);
    let mut command = network.command(world.command(&[]).get_program());
    command
        .arg("--broker")
        .arg(world.path("broker.sock"))
        .args(["run", "--quiet", "--move", "after=4", "sockperf", "pp"]);
    command.args(["-i", SERVER, "-p", &PORT.to_string(), "-t", "5", "--data-integrity"]);
    command.env("PARTYWALL_PRELOAD_LOG", &log).stdin(Stdio::null());
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(figure(&said, "ReceivedMessages=") > 0 && !said.contains("integrity test failed"), "{said}");
    let log = std::fs::read_to_string(log).unwrap_or_default();
    println!("host: {log}");
    log.contains(SENDS) && log.contains(RECEIVES)
}

#[test]
fn datagrams_of_listed_machines_use_rings() {
    let program = std::path::Path::new("/usr/bin/sockperf");
    assert!(program.exists(), "sockperf is missing (scripts/setup.sh programs brings it)");
    let network = Network::new().unwrap();
    let image =
        ImageOptions::default().program(program, "sockperf").program(preload_library(), LIBRARY).module("udp_diag");
    let mut world = World::with("datagrams", image);
    let [a, b] = world.boot_as(["a", "b"].map(|name| GuestOptions::new(name).memory(512).network(&network).unwrap()));
    let entries = world.entry(&a) + &world.entry(&b);
    let named = HostNetwork::name(&network);
    let host = named.as_ref().map_or("", |(_, entry)| entry);
    let both = networks(&[("a", SERVER), ("b", CLIENT)]) + host;
    world.kill_broker();
    world.start_broker_with(&(entries + &both));
    world.wait_ready(2);
    serve(&a);
    assert!(
        (0..10).any(|_| asks_by_ring(&b)),
        "{}\n{}\n{}",
        a.sh("cat /tmp/server.log"),
        b.sh("cat /tmp/client.log"),
        world.log()
    );
    assert!(a.sh("cat /tmp/server.log").contains(RECEIVES), "{}", a.sh("cat /tmp/server.log"));

    if named.is_some() {
        assert!((0..10).any(|_| host_asks_by_ring(&world, &network)), "{}", world.log());
    } else {
        println!("skipped: a program of the host beside guests, since only root can put it on their network");
    }
}
