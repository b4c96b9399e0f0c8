//! `ping`, `list` and `stat` against live domains.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::Write;
use std::process::Stdio;

use common::{Guard, World, said};
use serde_json::Value;

fn json(output: &std::process::Output) -> Value {
    assert!(output.status.success(), "{}", said(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn ping_measures_round_trips_and_each_way() {
    let world = World::new();
    let _responder = Guard::spawn(&mut world.partywall("b", &["ping", "-l"]));
    let picture = world.path("latency.svg");
    let picture = picture.to_str().unwrap();
    let answer =
        json(&world.run("a", &["ping", "b", "-c", "200", "--wait", "60", "--json", "--one-way", "--plot", picture]));
    assert_eq!(answer["count"], 200);
    let svg = std::fs::read_to_string(picture).unwrap();
    assert!(svg.starts_with("<svg") && svg.matches("<polyline").count() == 3, "{svg}");
    for way in ["round_trip_ns", "there_ns", "back_ns"] {
        let (p50, p99, max) = (answer[way]["p50"].as_u64(), answer[way]["p99"].as_u64(), answer[way]["max"].as_u64());
        assert!(p50 > Some(0) && p50 <= p99 && p99 <= max, "{way}: {answer}");
    }
    let text = world.run("a", &["ping", "b:ping", "-c", "50", "-s", "4K", "-i", "100us", "--spin", "0"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("50 messages of 4096 bytes") && text.contains("p99.9") && text.contains('#'), "{text}");
}

#[test]
fn doctor_warns_of_move_rules_that_move_everything_at_once() {
    let world = World::new();
    let finding = |name: &str| {
        let output = world.run("watcher", &["doctor", "--json"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let checks = report["checks"].as_array().unwrap();
        checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name}: {report}")).clone()
    };
    let before = finding("connections move");
    assert_eq!(before["status"], "ok", "{before}");
    assert!(world.run("watcher", &["moves", "--mode", "now"]).status.success());
    let after = finding("connections move");
    assert_eq!(after["status"], "warn", "{after}");
    assert!(after["found"].as_str().unwrap().ends_with("now"), "{after}");
    assert!(after["remedy"].as_str().unwrap().contains("partywall moves --after-calls"), "{after}");
    // The broker of this test runs with our rights.
    let tracking = finding("connection tracking");
    assert!(tracking["found"].as_str().unwrap().contains("track"), "{tracking}");
}

#[test]
fn doctor_and_why_report_namespaces_that_broker_cannot_enter() {
    let own = rustix::process::geteuid().as_raw();
    let policy =
        format!("administrators = [{own}]\n[[network]]\nnamespace = '/run/netns/blue'\naddresses = ['10.0.0.2']\n");
    let world = World::with_policy(Some(&policy));
    let output = world.run("watcher", &["doctor", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let finding = checks.iter().find(|check| check["name"] == "listed networks");
    let finding = finding.unwrap_or_else(|| panic!("{report}"));
    assert!(finding["found"].as_str().unwrap().contains("/run/netns/blue"), "{finding}");
    // The broker of this test runs with our rights.
    let has_right = finding["status"] == "ok";
    assert_eq!(has_right, finding["found"].as_str().unwrap().contains("has CAP_SYS_ADMIN"), "{finding}");
    let why = world.run("watcher", &["why", "no-such-program"]);
    assert_eq!(said(&why).contains("CAP_SYS_ADMIN"), !has_right, "{}", said(&why));
}

#[test]
fn ping_to_other_service_does_not_hang() {
    let world = World::new();
    let mut other = world.partywall("b", &["cat", "-l", "cat"]);
    let mut other = Guard::spawn(other.stdin(Stdio::piped()));
    other.0.stdin.as_mut().unwrap().write_all(b"I am a cat, not a ping").unwrap();
    let output = world.run("a", &["ping", "b:cat", "--wait", "60"]);
    assert_eq!(output.status.code(), Some(5), "{}", said(&output));
    assert!(said(&output).contains("no `partywall ping -l`"), "{}", said(&output));
}

#[test]
fn ping_gives_up_on_a_silent_peer() {
    let world = World::new();
    let mut silent = world.partywall("b", &["cat", "-l", "cat"]);
    let _silent = Guard::spawn(silent.stdin(Stdio::piped()));
    let output = world.run("a", &["ping", "b:cat", "--wait", "60", "--timeout", "100ms"]);
    assert_eq!(output.status.code(), Some(6), "{}", said(&output));
}

#[test]
fn list_and_stat_show_a_channel_while_it_lives() {
    let world = World::new();
    let mut listener = Guard::spawn(&mut world.partywall("b", &["cat", "-l", "in", "--recv-only"]));
    let mut sender = world.partywall("a", &["cat", "b:in", "--wait", "60"]);
    let mut sender = Guard::spawn(sender.stdin(Stdio::piped()));
    let mut stdin = sender.0.stdin.take().unwrap();
    stdin.write_all(&[7; 12_345]).unwrap();

    let side = |stat: &Value, n: usize| stat["channels"][0]["sides"][n].clone();
    let mut stat = Value::Null;
    world.await_that("both counters show the bytes", || {
        stat = json(&world.run("watcher", &["stat", "--json"]));
        side(&stat, 0)["written"]["bytes"] == 12_345 && side(&stat, 1)["read"]["bytes"] == 12_345
    });
    assert_eq!((&side(&stat, 0)["domain"], &side(&stat, 1)["domain"]), (&"a".into(), &"b".into()));
    assert_eq!(side(&stat, 0)["queued"], 0);
    assert!(side(&stat, 0)["ring_size"].as_u64() >= Some(4096), "{stat}");
    assert_eq!((&stat["channels"][0]["to"], &stat["channels"][0]["directions"]), (&"b".into(), &"both".into()));

    let listing = json(&world.run("watcher", &["list", "--json"]));
    let names: Vec<_> =
        listing["domains"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap().to_owned()).collect();
    assert!(
        names.contains(&"a".into()) && names.contains(&"b".into()) && !names.contains(&"watcher".into()),
        "{names:?}"
    );
    let channel = &listing["channels"][0];
    assert_eq!((&channel["from"], &channel["to"], &channel["service"]), (&"a".into(), &"b".into(), &"in".into()));

    assert_eq!(channel["directions"], "both");

    let number = channel["channel"].as_u64().unwrap().to_string();
    let text = world.run("watcher", &["stat", &number, "--watch", "10ms", "--count", "2"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert_eq!(text.matches("a writes").count(), 2, "{text}");
    assert!(text.contains("12.06 KiB"), "{text}");
    let text = String::from_utf8(world.run("watcher", &["list"]).stdout).unwrap();
    assert!(text.contains("b:in") && text.contains("<->"), "{text}");

    drop(stdin);
    assert_eq!((sender.code(), listener.code()), (Some(0), Some(0)));
    world.await_that("closed channels are gone", || {
        json(&world.run("watcher", &["list", "channels", "--json"]))["channels"] == Value::Array(vec![])
    });
    let text = String::from_utf8(world.run("watcher", &["stat"]).stdout).unwrap();
    assert_eq!(text.trim(), "no channel is open");
}

#[test]
fn totals_count_ports_of_switches_and_named_disks() {
    let world = World::new();
    common::devices();
    let (folder, disk, socket) = (world.path("net"), world.path("disk.raw"), world.path("disk.sock"));
    let [folder, disk, socket] = [&folder, &disk, &socket].map(|path| path.to_str().unwrap());
    std::fs::write(disk, [0; 4096]).unwrap();
    let mut switch = Guard::spawn(
        world.partywall("x", &["net", "run", "lan", "--port", "a", "--folder", folder]).stdout(Stdio::null()),
    );
    let _disk = Guard::spawn(
        world.partywall("x", &["blk", "serve", disk, "--socket", socket]).stdout(Stdio::null()).stderr(Stdio::null()),
    );
    let words = ["stat", "--total", "--json", "--net-folder", folder, "--disk", socket];
    world.await_that("the switch and the disk answer", || {
        let totals = json(&world.run("watcher", &words));
        totals["network"]["lan"]["a"].is_object() && totals["disks"][socket].is_object()
    });
    let metrics = world.path("x.prom");
    let written = ["stat", "--total", "--metrics", metrics.to_str().unwrap(), "--net-folder", folder, "--disk", socket];
    let port = "partywall_net_port_connected{switch=\"lan\",port=\"a\"} 0\n";
    // Each look waits a second for each device. One that a loaded machine keeps from answering in that time is a note.
    let mut text = String::new();
    world.await_that("the metrics name the port and the disk", || {
        assert!(world.run("watcher", &written).status.success());
        text = std::fs::read_to_string(&metrics).unwrap();
        text.contains(port) && text.contains("# TYPE partywall_blk_bytes_total counter\n")
    });
    let document = include_str!("../../../docs/metrics.md");
    let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let undocumented: Vec<&str> = families.filter(|family| !document.contains(&format!("| `{family}`"))).collect();
    assert!(undocumented.is_empty(), "{undocumented:?}");
    let top = ["top", "--once", "--json", "--net-folder", folder, "--disk", socket];
    world.await_that("`top --json` shows the port and the disk", || {
        let shown = json(&world.run("watcher", &top));
        assert!(shown["connections"].is_array() && shown["notes"].is_array(), "{shown}");
        shown["network"]["lan"]["a"].is_object() && shown["disks"][socket].is_object()
    });
    world.await_that("`top` shows the port and the disk", || {
        let table = world.run("watcher", &["top", "--once", "--net-folder", folder, "--disk", socket]);
        let table = String::from_utf8(table.stdout).unwrap();
        table.contains("net lan/a") && table.contains(&format!("blk {socket}"))
    });
    // A disk that is not served is a note, and the rest is counted.
    let absent = world.path("absent").to_str().unwrap().to_owned();
    let words_of_absent = ["stat", "--total", "--json", "--net-folder", folder, "--disk", &absent];
    world.await_that("the absent disk is a note beside the port", || {
        let totals = json(&world.run("watcher", &words_of_absent));
        totals["notes"].to_string().contains(&format!("disk {absent} is not counted"))
            && totals["network"]["lan"]["a"].is_object()
    });
    // A switch that was killed is found by the socket that it left.
    let state = || json(&world.run("watcher", &["net", "list", "--json", "--folder", folder]));
    assert_eq!((&state()[0]["name"], &state()[0]["running"]), (&"lan".into(), &true.into()));
    switch.kill();
    assert_eq!((&state()[0]["name"], &state()[0]["running"]), (&"lan".into(), &false.into()));
    world.await_that("the killed switch is a note", || {
        json(&world.run("watcher", &words))["notes"].to_string().contains("switch lan is not counted")
    });
}
