//! What the commands of `partywall` show, in two guests and on their host, of a connection between unmodified programs in the guests.

use crate::world::{HANG, Inside, World, processes};
use partywall_lab::Guest;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Precedes the output of each command of a round.
const MARK: &str = "#### ";

/// What each command has printed in a guest, in one round of its shell, with its exit code at the end.
fn said(guest: &Guest, commands: &[&'static str]) -> BTreeMap<&'static str, String> {
    let line = |command: &&str| format!("echo; echo '{MARK}'; partywall {command} 2>&1; echo \"exit code $?\"; ");
    let all = guest.sh(&commands.iter().map(line).collect::<String>());
    let parts: Vec<_> = all.split(MARK).skip(1).map(|part| part.trim().to_owned()).collect();
    assert_eq!(parts.len(), commands.len(), "{all}");
    commands.iter().copied().zip(parts).collect()
}

/// The JSON that a command has printed.
fn json(said: &str) -> Value {
    let (text, code) = said.rsplit_once("exit code ").unwrap();
    assert_eq!(code, "0", "{said}");
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {said}"))
}

/// The first connection that fits.
fn connection<'a>(shown: &'a Value, peer: &str, program: &str) -> Option<&'a Value> {
    let all = shown["connections"].as_array()?;
    all.iter().find(|row| row["program"] == program && row["peer"].as_str().is_some_and(|of| of.starts_with(peer)))
}

/// A client in guest `b` that calls redis in guest `a` now and then by one connection, until it is killed.
fn begin_client(b: &Guest, run: &str) {
    b.sh(&format!("({run} redis-cli -h 10.77.0.1 -r 1000000 -i 0.05 echo called > /tmp/called 2>&1) &"));
}

/// Waits until both guests show the client's connection this way, at both ends.
fn wait_for_way(world: &World, a: &Guest, b: &Guest, way: &str) {
    let shows = |guest: &Guest, peer: &str, program: &str| {
        let shown = json(&said(guest, &["top --once --json"])["top --once --json"]);
        let all = shown["connections"].as_array().unwrap();
        all.iter().any(|row| {
            row["way"] == way
                && row["reason"].is_null() == (way == "ring")
                && row["channel"].is_u64()
                && row["program"] == program
                && row["peer"].to_string().contains(peer)
        })
    };
    let deadline = Instant::now() + HANG;
    while !(shows(a, "10.77.0.2:", "redis-server") && shows(b, "10.77.0.1:6379", "redis-cli")) {
        let seen = [a, b].map(|guest| guest.sh("partywall why 10.77.0.1:6379 2>&1; cat /tmp/called | tail -n 1"));
        assert!(Instant::now() < deadline, "not by {way}: {}\n{}\n{}", seen[0], seen[1], world.log());
        // The commands use the guests' only processors, too.
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// All commands, while one client of redis is on a ring and another one, without Partywall, is on TCP.
pub(crate) fn commands_show_connection_between_guests(world: &World, a: &Guest, b: &Guest) {
    begin_client(b, "PARTYWALL_PRELOAD_LOG=/tmp/shown.log partywall run --quiet --move after=4,bytes=1K");
    wait_for_way(world, a, b, "ring");
    for guest in [a, b] {
        let alone = guest.wait_until("partywall stat --total | grep -q 'socket       1 ring'");
        assert!(alone, "rings of earlier connections have not gone: {}", guest.sh("partywall stat; partywall list"));
    }
    let ends = [(a, "redis-server", "10.77.0.2:"), (b, "redis-cli", "10.77.0.1:6379")];
    for (guest, program, peer) in ends {
        let said = said(
            guest,
            &[
                "top --once",
                "top --once --json",
                "why 10.77.0.1:6379",
                "why --json 10.77.0.1:6379",
                "list",
                "stat --json",
                "stat --total",
                "moves",
                "moves --mode never",
                "policy test --from a.x --to b.y:z",
                "policy test --sockets --from b.redis-cli --to a.redis-server:tcp-6379",
            ],
        );
        let text = |command: &str, parts: &[&str]| {
            let said = &said[command];
            assert!(
                parts.iter().all(|part| said.contains(part)),
                "{}: {command}: {parts:?} are not in\n{said}",
                guest.name()
            );
        };
        text("top --once", &[program, peer, "ring", "exit code 0"]);
        text(
            "why 10.77.0.1:6379",
            &[program, peer, "  sends      by the ring", "  receives   by the ring", "exit code 0"],
        );
        text("why 10.77.0.1:6379", &["not counted"]);
        text("list", &["a.redis-server", "b.redis-cli", "tcp-6379", "exit code 0"]);
        text("stat --total", &["socket       1 ring", "not counted", "exit code 0"]);
        text("moves", &["after 128 calls or 2.00 MiB", "exit code 0"]);
        // Nobody in a machine is an administrator.
        text("moves --mode never", &["denied by policy", "exit code 3"]);
        text("policy test --from a.x --to b.y:z", &["a.x connects to b.y:z", "exit code 0"]);
        text("policy test --sockets --from b.redis-cli --to a.redis-server:tcp-6379", &["share a ring", "exit code 0"]);
        for command in ["top --once --json", "why --json 10.77.0.1:6379"] {
            let shown = json(&said[command]);
            let row = connection(&shown, peer, program).unwrap_or_else(|| panic!("{command}: {shown}"));
            assert!(
                row["way"] == "ring" && row["reason"].is_null() && row["ring_is_uncounted"] == true,
                "{command}: {row}"
            );
            let both = |direction: &str| {
                row["moves"]
                    .as_array()
                    .is_some_and(|all| all.iter().any(|of| of["direction"] == direction && of["way"] == "ring"))
            };
            assert!(both("sends") && both("receives"), "{command}: {row}");
        }
        let counted = json(&said["stat --json"]);
        let channel = counted["channels"].as_array().unwrap().iter().find(|channel| channel["service"] == "tcp-6379");
        let channel = channel.unwrap_or_else(|| panic!("{counted}"));
        // The memory of a ring in a window is not handed out.
        assert_eq!(channel["sides"], Value::Array(Vec::new()), "{counted}");
    }
    for (words, parts) in [
        (&["list"][..], &["a.redis-server", "b.redis-cli", "tcp-6379"][..]),
        (&["top", "--once"], &["b.redis-cli", "a.redis-server", "ring", "not counted"]),
        // How many there are on the host depends on what else runs there under Partywall.
        (&["stat", "--total"], &["socket       ", " ring", "not counted"]),
        (&["stat"], &["b.redis-cli", "whose counters cannot be seen from here"]),
        (&["why", "a.redis-server"], &["b.redis-cli", "a.redis-server", "ring"]),
    ] {
        let done = world.partywall(words);
        let said = done.text();
        assert!(parts.iter().all(|part| said.contains(part)), "host: {words:?}: {parts:?} are not in\n{said}");
    }
    // The broker's own list has nothing of other brokers.
    let listed: Value = serde_json::from_slice(&world.partywall(&["list", "channels", "--json"]).stdout).unwrap();
    assert_eq!(listed["channels"].as_array().unwrap().len(), 1, "{listed}");
    connection_moves_as_the_host_says(world, a, b);
    b.sh(&format!("kill -9 ${}", processes("redis-cli", "called")));
    client_without_library_has_its_reason(a, b);
}

/// The host sends the connection back to TCP in mid-stream, and to a ring again. Both ends show when, and why.
fn connection_moves_as_the_host_says(world: &World, a: &Guest, b: &Guest) {
    for (words, way) in [(&["moves", "--rule", "never@port=6379"][..], "tcp"), (&["moves", "--reset"], "ring")] {
        let done = world.partywall(words);
        assert_eq!(done.status, 0, "{}", String::from_utf8_lossy(&done.stderr));
        wait_for_way(world, a, b, way);
    }
}

/// A client that is not under Partywall.
fn client_without_library_has_its_reason(a: &Guest, b: &Guest) {
    begin_client(b, "");
    // The server's library judges the connection with its next calls.
    for (guest, reasons) in [(a, "no-peer\\|peer-silent"), (b, "no-library")] {
        let shows = guest.wait_until(&format!("partywall why 10.77.0.1:6379 2>&1 | grep -q '{reasons}'"));
        let text = guest.sh("partywall why 10.77.0.1:6379 2>&1; true");
        let is_whole = text.contains("  sends      by TCP") && text.contains("  change     ");
        assert!(shows && is_whole, "{reasons} is not in\n{text}{}", b.sh("cat /tmp/called"));
    }
    b.sh(&format!("kill -9 ${}", processes("redis-cli", "called")));
}
