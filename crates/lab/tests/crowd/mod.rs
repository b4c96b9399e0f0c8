//! A server in a guest that sleeps in `epoll_wait`, and 300 clients at once: of the other guest, of the host, and of the host without Partywall.

use crate::RUN;
use crate::world::{HANG, Inside, Process, World, python};
use partywall_lab::{Guest, Network};
use std::io::Read as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

const PORT: u16 = 7004;
/// Connections from each kind of client.
const EACH: usize = 100;
/// Rings that each kind of client with Partywall has before the counts are compared. Emulated machines take some seconds for these.
const RINGS: usize = 20;

/// Clients of guest `b` and of the host, all at once, are served by a server in guest `a`: by rings, and by TCP those that have none yet or no library.
pub(crate) fn sleeping_server_serves_hundreds_at_once(world: &World, network: &Network, a: &Guest, b: &Guest) {
    let programs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    for (guest, name) in [(a, "sleeping_server.py"), (b, "many_clients.py")] {
        guest.put(&std::fs::read(programs.join(name)).unwrap(), &format!("/tmp/{name}"), 0o644).unwrap();
    }
    let python = python::command(RUN);
    let waits = |guest: &Guest, file: &str, for_: &str| {
        let has = guest.wait_until(&format!("grep -q '{for_}' {file}"));
        let said = || guest.sh(&format!("tail -n 5 {file}"));
        assert!(has, "{}: {for_} is not in\n{}{}", guest.name(), said(), world.log());
    };
    a.sh(&format!("(ulimit -n 16384; {python} /tmp/sleeping_server.py 0.0.0.0 {PORT} > /tmp/crowd.out 2>&1; echo ended with $? >> /tmp/crowd.out) & true"));
    waits(a, "/tmp/crowd.out", "listens");
    b.sh(&format!(
        "(ulimit -n 16384; {python} /tmp/many_clients.py 10.77.0.1 {PORT} {EACH} /tmp/enough > /tmp/crowd.out 2>&1; \
         echo ended with $? >> /tmp/crowd.out) & true"
    ));
    let enough = world.path("enough");
    let client = |under: &[&str]| {
        let mut command = match under {
            [] => network.command("/usr/bin/python3"),
            _ => network.command(world.command(&[]).get_program()),
        };
        if !under.is_empty() {
            command.arg("--broker").arg(world.path("broker.sock")).args(under).arg("/usr/bin/python3");
        }
        command.arg(programs.join("many_clients.py")).args(["10.77.0.1", &PORT.to_string(), &EACH.to_string()]);
        command.arg(&enough).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Process(command.spawn().unwrap())
    };
    let run: Vec<_> = RUN.split(' ').skip(1).collect();
    let of_host: Vec<_> = network.host().iter().flat_map(|_| [client(&run), client(&[])]).collect();
    let total = EACH * (1 + of_host.len());
    waits(b, "/tmp/crowd.out", "all are served");
    counts_are_shown(world, a, total);

    b.sh("touch /tmp/enough");
    std::fs::write(&enough, "").unwrap();
    waits(b, "/tmp/crowd.out", "ended with 0");
    for mut client in of_host {
        let status = client.0.wait().unwrap();
        let mut said = String::new();
        client.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        client.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(status.success() && said.contains("all are served"), "{said}");
    }
    waits(a, "/tmp/crowd.out", "ended with 0");
    let said = a.sh("cat /tmp/crowd.out");
    assert!(said.contains(&format!("at most {total} at once")), "{said}");
}

/// The server's guest shows each connection, on a ring or on TCP with a reason, and the host lists those on rings.
fn counts_are_shown(world: &World, a: &Guest, total: usize) {
    let deadline = Instant::now() + HANG;
    loop {
        let shown: serde_json::Value = serde_json::from_str(&a.sh("partywall top --once --json")).unwrap();
        let all = shown["connections"].as_array().unwrap();
        let ends: Vec<_> = all.iter().filter(|row| row["local"] == format!("10.77.0.1:{PORT}")).collect();
        let by_ring = |peer: &str| {
            ends.iter().filter(|row| row["way"] == "ring" && row["peer"].as_str().unwrap().starts_with(peer)).count()
        };
        let (guest, host) = (by_ring("10.77.0.2:"), by_ring("10.77.0.254:"));
        let with_reason = ends.iter().filter(|row| row["way"] != "ring" && row["reason"].is_string()).count();
        let listed = world.partywall(&["list", "channels"]).text().matches(&format!(":tcp-{PORT} ")).count();
        let is_alone = total == EACH;
        if ends.len() == total && guest >= RINGS && (is_alone || host >= RINGS) {
            assert!(guest + host <= listed && listed <= 2 * EACH, "{guest} + {host} rings, {listed} channels");
            assert!(is_alone || with_reason >= EACH, "{with_reason} on TCP with a reason: {shown}");
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{} of {total}, {guest} + {host} rings: {}",
            ends.len(),
            a.sh("partywall top --once")
        );
        // The commands use the guest's only processor, too.
        std::thread::sleep(Duration::from_millis(500));
    }
}
