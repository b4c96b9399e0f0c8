//! Datagrams of unmodified programs in virtual machines that the operator's list names: sockperf in one guest, its clients in another, and
//! what becomes of their flows when the list, an agent or a machine is gone. And datagrams within one guest, which no list names.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, GuestOptions, ImageOptions, Network};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use world::{HANG, Inside, World, preload_library, processes, python};

const LIBRARY: &str = "libpartywall_preload.so";
/// The addresses of the guests on their network.
const SERVER: &str = "10.77.0.1";
const CLIENT: &str = "10.77.0.2";
const PORT: u16 = 7000;
/// That of the server for datagrams of a client that is killed.
const LAST_PORT: u16 = 7020;
/// That of a server with a group of sockets.
const GROUP_PORT: u16 = 7021;
/// The log lines of the library when a flow has its ring, at the sender and at the receiver, and when a flow has ended.
const SENDS: &str = "go by a ring";
const RECEIVES: &str = "by a ring of";
const ENDED: &str = "no longer go by a ring";

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
    let is_ready = guest.wait_until("grep -q 'to block on socket' /tmp/sockperf.log");
    assert!(is_ready, "{}", guest.sh("cat /tmp/sockperf.log /tmp/server.log"));
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
    let line = format!("{} 2>&1; true", ask(SERVER, 5));
    let said = client.sh(&line);
    let sent = figure(&said, "SentMessages=");
    assert!(sent > 0 && !said.contains("integrity test failed"), "{said}");
    let by_kernel = sent_by_kernel(client) - before;
    let log = client.sh("cat /tmp/client.log 2> /dev/null; true");
    println!("{sent} sent, {by_kernel} of them by the kernel");
    log.contains(SENDS) && by_kernel < sent
}

/// A line by which a client asks the server at an address for some seconds.
fn ask(server: &str, seconds: u32) -> String {
    format!(
        "rm -f /tmp/client.log; PARTYWALL_PRELOAD_LOG=/tmp/client.log partywall run --quiet --move after=4 \
         sockperf pp -i {server} -p {PORT} -t {seconds} --data-integrity"
    )
}

/// The server's own guest asks it at an address; whether there were rings in both directions. Each datagram must be answered as it was sent.
/// On one emulated processor each of the two sleeps for too long to use them.
fn asks_within_with_ring(guest: &Guest, server: &str) -> bool {
    guest.sh("cp /tmp/server.log /tmp/server.before");
    let said = guest.sh(&format!("{} 2>&1; true", ask(server, 5)));
    assert!(figure(&said, "ReceivedMessages=") > 0 && !said.contains("integrity test failed"), "{said}");
    let new = guest.sh("tail -n +$(($(wc -l < /tmp/server.before) + 1)) /tmp/server.log");
    let log = log_of(guest);
    log.contains(SENDS) && log.contains(RECEIVES) && new.contains(RECEIVES)
}

/// What becomes of the flows of a client that is killed, and of later clients, in the server's own guest.
fn datagrams_within_a_guest_get_rings(world: &World, guest: &Guest, addresses: &[&str]) {
    wait_for_flows(world, "earlier clients have ended", |flows| flows == 0);
    // A client may end by itself before it has rings, or before it is killed. The next one has another chance.
    let is_killed = (0..10).any(|_| {
        guest.sh("rm -f /tmp/stop");
        let ask = ask(addresses[0], 30);
        let clients = guest.begin(&format!("while [ ! -e /tmp/stop ]; do {ask}; done > /dev/null 2>&1; true"));
        wait_for_flows(world, "a client in the server's guest has rings", |flows| flows > 0);
        let client = processes("sockperf", "sockperf pp");
        let said = guest.sh(&format!("touch /tmp/stop; kill -9 ${client} 2> /dev/null && echo killed; true"));
        drop(clients.wait(HANG));
        wait_for_flows(world, "the client was killed", |flows| flows == 0);
        said.contains("killed")
    });
    assert!(is_killed, "no client could be killed");
    for server in addresses {
        let has_ring = (0..10).any(|_| asks_within_with_ring(guest, server));
        assert!(has_ring, "{server}\n{}\n{}\n{}", guest.sh("cat /tmp/server.log"), log_of(guest), world.log());
        wait_for_flows(world, "the client has ended", |flows| flows == 0);
    }
}

/// What a program has sent by a ring before it is killed, or before another program has its address, is received by a program of its guest that
/// looks later. The first is reported by the agent when the program's session ends, and the second when the kernel finds the other socket.
fn last_datagrams_of_gone_sender_are_received(world: &World, guest: &Guest) {
    const PROGRAM: &str = "/tmp/last_datagrams.py";
    guest.put(include_bytes!("programs/last_datagrams.py"), PROGRAM, 0o644).unwrap();
    let run = python::command("partywall run --quiet --move after=4");
    guest.sh(&format!("{run} {PROGRAM} serve {LAST_PORT} /tmp/gone > /tmp/last.out 2>&1 & true"));
    assert!(guest.wait_until("grep -q serves /tmp/last.out"), "{}", guest.sh("cat /tmp/last.out"));
    let kill = |argument: &str| format!("kill -9 ${}", processes("python3", &format!("last_datagrams.py {argument}")));
    let mut clients = 0;
    for end in ["KILL", "STOP"] {
        // While the broker is late, datagrams go by the kernel.
        let is_by_ring = (0..10).any(|_| {
            clients += 1;
            guest.sh(&format!("rm -f /tmp/gone; {run} {PROGRAM} send {LAST_PORT} {end} > /tmp/send.out 2>&1 & true"));
            assert!(guest.wait_until("grep -q 'by the kernel' /tmp/send.out"), "{}", guest.sh("cat /tmp/send.out"));
            let sent = guest.sh("cat /tmp/send.out");
            let (port, by_kernel) = sent.trim().split_once(' ').unwrap();
            if end == "STOP" {
                guest.sh(&format!("{} {PROGRAM} take {port} > /tmp/take.out 2>&1 & true", python::command("")));
                assert!(guest.wait_until("grep -q 'has it' /tmp/take.out"), "{}", guest.sh("cat /tmp/take.out"));
            }
            wait_for_flows(world, "the client is gone", |flows| flows == 0);
            let is_read =
                guest.wait_until(&format!("touch /tmp/gone; test $(grep -c '^read' /tmp/last.out) -eq {clients}"));
            let read = guest.sh("cat /tmp/last.out");
            println!("{end}: {sent}{read}");
            assert!(is_read && read.trim_end().ends_with("read 1 2 3 4 5"), "{end}: {sent}{read}{}", world.log());
            if end == "STOP" {
                guest.sh(&format!("{}; {}", kill("take"), kill("send")));
            }
            by_kernel == "0 by the kernel"
        });
        assert!(is_by_ring, "datagrams within a guest go by the kernel");
    }
    guest.sh(&kill("serve"));
}

/// Each client's datagrams go by a ring to the member of a `SO_REUSEPORT` group that the kernel has chosen for it. When the server has a program choose
/// the member, all of them go by the kernel.
fn group_within_a_guest_gets_rings(world: &World, guest: &Guest) {
    const PROGRAM: &str = "/tmp/group_datagrams.py";
    guest.put(include_bytes!("programs/group_datagrams.py"), PROGRAM, 0o644).unwrap();
    let run = python::command("PARTYWALL_PRELOAD_LOG=/tmp/group.log partywall run --quiet --move after=4");
    let signal = |signal: &str, role: &str| {
        guest.sh(&format!("kill -{signal} ${}", processes("python3", &format!("group_datagrams.py {role}"))));
    };
    let wait_for_server = |line: &str| {
        assert!(guest.wait_until(&format!("grep -q {line} /tmp/group.out")), "{}", guest.sh("cat /tmp/group.out"));
    };
    guest.sh(&format!("{run} {PROGRAM} serve {GROUP_PORT} one two three > /tmp/group.out 2>&1 & true"));
    wait_for_server("serves");
    // While the broker is late, datagrams go by the kernel.
    let is_by_ring = (0..10).any(|_| {
        guest.sh(&format!("rm -f /tmp/ask.out; {run} {PROGRAM} ask {GROUP_PORT} one > /tmp/ask.out 2>&1 & true"));
        let is_said = guest.wait_until("grep -q ' ' /tmp/ask.out");
        let said = guest.sh("cat /tmp/ask.out /tmp/group.out");
        println!("group: {said}");
        assert!(is_said && said.starts_with("by "), "{said}{}", world.log());
        let is_by_ring = said.starts_with("by rings");
        if !is_by_ring {
            signal("KILL", "ask");
            wait_for_flows(world, "the client is gone", |flows| flows == 0);
        }
        is_by_ring
    });
    assert!(is_by_ring, "{}", guest.sh("cat /tmp/group.log"));
    signal("USR1", "serve");
    wait_for_server("steers");
    wait_for_flows(world, "a program chooses in the group", |flows| flows == 0);
    // The client checks each answer.
    let is_by_program = guest.wait_until("grep -q 'by the program' /tmp/ask.out");
    let said = guest.sh("cat /tmp/ask.out");
    println!("group after a program chooses: {said}");
    let is_well = is_by_program && said.starts_with("by rings") && said.lines().count() == 2;
    assert!(is_well, "{said}{}", guest.sh("cat /tmp/group.log"));
    signal("KILL", "ask");
    signal("KILL", "serve");
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

/// Flows of datagrams that the broker knows.
fn flows(world: &World) -> usize {
    world.partywall(&["list", "channels"]).text().matches("udp-").count()
}

fn wait_for_flows(world: &World, what: &str, is_right: impl Fn(usize) -> bool) {
    let deadline = Instant::now() + HANG;
    while !is_right(flows(world)) {
        assert!(Instant::now() < deadline, "{what}: {}{}", world.partywall(&["list", "channels"]).text(), world.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Has a guest's clients ask a server, one after the other, and `during` happen once datagrams go by rings. Each gets its answers, none twice.
fn while_asking(world: &mut World, client: &Guest, server: &str, during: impl FnOnce(&mut World)) {
    wait_for_flows(world, "earlier clients have ended", |flows| flows == 0);
    client.sh("rm -f /tmp/stop /tmp/asked /tmp/client.log");
    let running = client.begin(&format!(
        "while [ ! -e /tmp/stop ]; do PARTYWALL_PRELOAD_LOG=/tmp/client.log partywall run --quiet --move after=4 \
         sockperf pp -i {server} -p {PORT} -t 6 --data-integrity >> /tmp/asked 2>&1 || echo FAILED >> /tmp/asked; done"
    ));
    wait_for_line(client, "a client has a ring", SENDS);
    during(world);
    client.sh("touch /tmp/stop");
    drop(running.wait(HANG));
    let said = client.sh("cat /tmp/asked");
    assert!(!said.contains("FAILED") && !said.contains("integrity test failed"), "{said}");
    let received = said.matches("# duplicated messages = 0; # out-of-order messages = 0").count();
    assert_eq!(received, said.matches("# dropped messages").count(), "{said}");
}

/// Ends a guest's agent while its clients have flows, and starts another one.
fn end_and_start_agent(world: &World, guest: &Guest) {
    guest.kill_agent();
    wait_for_flows(world, "the agent is gone", |flows| flows == 0);
    guest.start_agent();
    world.wait_ready(2);
    wait_for_flows(world, "there is an agent again", |flows| flows > 0);
}

/// Waits for a line in the log of a guest's clients.
fn wait_for_line(client: &Guest, what: &str, line: &str) {
    assert!(client.wait_until(&format!("grep -q '{line}' /tmp/client.log")), "{what}: {}", log_of(client));
}

/// What the library wrote in a guest's clients.
fn log_of(client: &Guest) -> String {
    client.sh("cat /tmp/client.log 2> /dev/null; true")
}

#[test]
fn datagrams_of_listed_machines_use_rings() {
    let program = std::path::Path::new("/usr/bin/sockperf");
    assert!(program.exists(), "sockperf is missing (scripts/setup.sh programs brings it)");
    let network = Network::new().unwrap();
    let image =
        ImageOptions::default().program(program, "sockperf").program(preload_library(), LIBRARY).module("udp_diag");
    let image = python::with(image);
    let mut world = World::with("datagrams", image);
    let [a, b] = world.boot_as(["a", "b"].map(|name| GuestOptions::new(name).memory(512).network(&network).unwrap()));
    let entries = world.entry(&a) + &world.entry(&b);
    let named = HostNetwork::name(&network);
    let host = named.as_ref().map_or("", |(_, entry)| entry);
    let both = networks(&[("a", SERVER), ("b", CLIENT)]) + host;
    world.kill_broker();
    world.start_broker_with(&(entries.clone() + &both));
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

    datagrams_within_a_guest_get_rings(&world, &a, &["127.0.0.1", SERVER]);
    while_asking(&mut world, &a, "127.0.0.1", |world| end_and_start_agent(world, &a));

    while_asking(&mut world, &b, SERVER, |world| {
        let deadline = Instant::now() + HANG;
        let mut is_heard = false;
        // A client may end before it hears of it, and none gets a ring while its machine is not listed.
        while !is_heard {
            assert!(Instant::now() < deadline, "no client hears that its machine is listed no more: {}", log_of(&b));
            world.set_policy(&(entries.clone() + &networks(&[("a", SERVER)])));
            wait_for_flows(world, "a machine is listed no more", |flows| flows == 0);
            is_heard = log_of(&b).contains(ENDED);
            world.set_policy(&(entries.clone() + &both));
            wait_for_flows(world, "the machine is listed again", |flows| flows > 0);
        }

        end_and_start_agent(world, &b);

        world.kill_broker();
        world.start_broker_with(&(entries.clone() + &both));
        world.wait_ready(2);
        wait_for_flows(world, "there is another broker", |flows| flows > 0);
    });
    // sockperf reserves memory for all that it could send in its time. For 100 s, the machine has not always enough.
    let said = b.sh(&format!(
        "(while true; do partywall run --quiet --move after=4 sockperf pp -i {SERVER} -p {PORT} -t 6; done) \
         > /dev/null 2>&1 & true"
    ));
    assert!(said.is_empty(), "{said}");
    wait_for_flows(&world, "the client has rings", |flows| flows > 0);
    drop(b);
    wait_for_flows(&world, "the machine is gone", |flows| flows == 0);
    let said = a.sh(&format!("sockperf pp -i {SERVER} -p {PORT} -t 2 2>&1"));
    assert!(figure(&said, "ReceivedMessages=") > 0, "the server serves others: {said}");

    world.set_policy(&entries);
    datagrams_within_a_guest_get_rings(&world, &a, &["127.0.0.1"]);
    python::bring(&a);
    last_datagrams_of_gone_sender_are_received(&world, &a);
    group_within_a_guest_gets_rings(&world, &a);
}
