//! Unmodified programs under `partywall run`, with the real broker and library: what `top`, `list`, `stat` and `policy` say.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdout, Command, Output, Stdio};

use common::{Guard, World, library, said};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Answers each question of 64 bytes with the same and a full stop, to as many as ask.
const SERVER: &str = "\
import socket, sys, threading
def serve(connection):
    question = b''
    while part := connection.recv(64 - len(question)):
        question += part
        if len(question) == 64:
            connection.sendall(question + b'.')
            question = b''
listener = socket.create_server(('127.0.0.1', 0))
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
";

/// Before the server's own text: writes over the environment that it was started with, as servers do that set a title (nginx, redis).
const TITLE: &str = "\
import ctypes, os
for key, value in os.environ.items():
    os.putenv(key, value)
fields = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
start, end = int(fields[47]), int(fields[48])
ctypes.memset(start, 32, end - start)
";

/// For each number that it reads, asks that number of questions of 64 bytes, and says when all are answered.
const CLIENT: &str = "\
import socket, sys
with socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as connection:
    print('connected', flush=True)
    for line in sys.stdin:
        for n in range(int(line)):
            question = n.to_bytes(8, 'little') * 8
            connection.sendall(question)
            answer = b''
            while len(answer) < 65:
                part = connection.recv(65 - len(answer))
                assert part, 'the server is gone'
                answer += part
            assert answer == question + b'.', (n, answer)
        print('answered', flush=True)
";

/// A program that talks to us on its standard input and output.
struct Talker {
    guard: Guard,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Talker {
    fn start(mut command: Command) -> Self {
        let mut guard = Guard::spawn(command.stdin(Stdio::piped()).stderr(Stdio::inherit()));
        let lines = BufReader::new(guard.0.stdout.take().unwrap()).lines();
        Self { guard, lines }
    }

    fn hear(&mut self) -> String {
        self.lines.next().expect("it says something").unwrap()
    }

    fn ask(&mut self, questions: u32) {
        writeln!(self.guard.0.stdin.as_mut().unwrap(), "{questions}").unwrap();
        assert_eq!(self.hear(), "answered");
    }
}

/// The interpreter itself: a version manager's `python3` is a script that would start another process.
fn python() -> Option<String> {
    let output = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    match output {
        Ok(output) if output.status.success() => Some(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        _ => {
            eprintln!("no python3: not tested");
            None
        }
    }
}

/// Client and server, connected.
fn pair(world: &World, python: &str, client_runs: bool) -> (Talker, Talker, String) {
    library();
    let mut server = Talker::start(world.partywall("", &["run", "--", python, "-c", SERVER]));
    let port = server.hear();
    let mut command = if client_runs {
        world.partywall("", &["run", "--", python, "-c", CLIENT, &port])
    } else {
        let mut plain = Command::new(python);
        plain.args(["-c", CLIENT, &port]).stdout(Stdio::piped());
        plain
    };
    command.env_remove("LD_PRELOAD");
    let mut client = Talker::start(command);
    assert_eq!(client.hear(), "connected");
    (server, client, port)
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", said(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn top(world: &World) -> Vec<Value> {
    let look = json(&world.run("watcher", &["top", "--once", "--json"]));
    look["connections"].as_array().unwrap().clone()
}

/// The row of the client's end in the output of `top`, however `top` found it.
fn of<'a>(rows: &'a [Value], talker: &Talker) -> Option<&'a Value> {
    let pid = talker.guard.0.id();
    rows.iter().find(|row| row["pid"] == pid)
}

/// Lets the client ask until its connection is a channel; returns what `list` says of that.
fn await_channel(world: &World, client: &mut Talker) -> Value {
    let mut channels = Vec::new();
    world.await_that("the connection is a channel", || {
        client.ask(10);
        let listing = json(&world.run("watcher", &["list", "channels", "--json"]));
        channels = listing["channels"].as_array().unwrap().clone();
        channels.len() == 1
    });
    channels.remove(0)
}

/// Bytes that the client has sent through its ring; 0 if it has none.
fn written(world: &World) -> u64 {
    let stat = json(&world.run("watcher", &["stat", "--json"]));
    stat["channels"][0]["sides"][0]["written"]["bytes"].as_u64().unwrap_or(0)
}

#[test]
fn connection_of_two_programs_is_a_channel_on_the_ring() {
    let Some(python) = python() else { return };
    let world = World::new();
    let (_server, mut client, port) = pair(&world, &python, true);
    let channel = await_channel(&world, &mut client);
    assert_eq!(channel["kind"], "socket");
    assert_eq!(channel["service"], format!("tcp-{port}"));
    // The channel is there before both ends have moved each direction to it.
    world.await_that("both ends are on the ring", || {
        client.ask(10);
        let why = json(&world.run("watcher", &["why", &format!("127.0.0.1:{port}"), "--json"]));
        let ends = why["connections"].as_array().unwrap();
        ends.len() == 2 && ends.iter().all(|end| end["way"] == "ring")
    });
    let before = written(&world);
    client.ask(100);
    assert_eq!(written(&world) - before, 6400, "all of it went through the ring");
    let text = world.run("watcher", &["stat"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("sends on the ring since change 1, receives on the ring"), "{text}");
    let rows = top(&world);
    let row = of(&rows, &client).unwrap_or_else(|| panic!("{rows:?}"));
    assert_eq!((&row["way"], &row["why"], &row["channel"]), (&"ring".into(), &"".into(), &channel["channel"]), "{row}");
    assert_eq!(row["sent"]["ring"].as_u64(), Some(written(&world)));
    assert!(
        row["received"]["ring"].as_u64() > row["sent"]["ring"].as_u64(),
        "answers are longer than questions: {row}"
    );
    assert!(row["sent"]["tcp"].as_u64() > Some(0), "it began on TCP: {row}");
    let why = json(&world.run("watcher", &["why", &format!("127.0.0.1:{port}"), "--json"]));
    let ends = why["connections"].as_array().unwrap();
    assert_eq!(ends.len(), 2, "{why}");
    assert!(ends.iter().all(|end| end["way"] == "ring" && end["reason"].is_null() && end["change"].is_null()), "{why}");
    let moves =
        |end: &Value| end["moves"].as_array().unwrap().iter().map(|m| m["direction"].clone()).collect::<Vec<_>>();
    assert!(
        ends.iter().all(|end| moves(end).len() == 2 && end["moves"][0]["way"] == "ring"),
        "each direction moved once: {why}"
    );
}

#[test]
fn policy_change_returns_connection_to_tcp_in_mid_stream() {
    let Some(python) = python() else { return };
    let world = World::new();
    let (_server, mut client, _) = pair(&world, &python, true);
    await_channel(&world, &mut client);
    // Live, and not a byte lost: the client checks every answer.
    assert!(world.run("watcher", &["moves", "--mode", "never"]).status.success());
    let mut row = Value::Null;
    world.await_that("it is on TCP", || {
        client.ask(10);
        row = of(&top(&world), &client).cloned().unwrap_or_default();
        row["way"] == "tcp"
    });
    let before = written(&world);
    client.ask(100);
    assert_eq!(written(&world), before, "no more of it goes through the ring");
    assert_ne!(row["why"], "", "{row}");
    let moves = row["moves"].as_array().unwrap();
    let to_tcp: Vec<&Value> = moves.iter().filter(|one| one["way"] == "tcp").collect();
    assert!(moves.len() >= 3 && !to_tcp.is_empty(), "to the ring and back: {row}");
    assert!(
        to_tcp.iter().all(|one| ["moves-never", "peer-on-tcp"].contains(&one["reason"].as_str().unwrap())),
        "{row}"
    );
    let why = world.run("watcher", &["why", &client.guard.0.id().to_string()]);
    let text = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(text.contains("  moves      20") && text.contains("sends by the ring"), "{text}");
}

#[test]
fn list_of_programs_holds_live_and_names_itself_as_reason() {
    let Some(python) = python() else { return };
    let executable = std::fs::canonicalize(&python).unwrap().display().to_string();
    let policy = |lists: &str| {
        let uid = rustix::process::geteuid().as_raw();
        format!("administrators = [{uid}]\n[sockets]\nmove = 'after=4'\n{lists}\n")
    };
    let world = World::with_policy(Some(&policy("[programs]\nallow = ['no-such-program']")));
    let (_server, mut client, port) = pair(&world, &python, true);
    let row = |client: &mut Talker| {
        client.ask(10);
        of(&top(&world), client).cloned().unwrap_or_default()
    };
    let mut seen = Value::Null;
    world.await_that("the connection stays on TCP", || {
        seen = row(&mut client);
        seen["reason"] == "program-not-listed"
    });
    assert_eq!((&seen["way"], seen["sent"]["ring"].as_u64()), (&"tcp".into(), Some(0)), "{seen}");
    let why = world.run("watcher", &["why", &format!("127.0.0.1:{port}")]);
    let text = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(text.contains("program-not-listed: the policy's list") && text.contains("[programs]"), "{text}");
    let tested = |world: &World| world.run("watcher", &["policy", "test", "--program", &executable]);
    let refused = tested(&world);
    assert_eq!(refused.status.code(), Some(3), "{}", said(&refused));
    assert!(String::from_utf8_lossy(&refused.stdout).contains("`allow` of [programs] does not list the program"));

    world.set_policy(&policy(&format!("[programs]\nallow = ['{executable}']")));
    world.await_that("it moves, since its program is listed", || row(&mut client)["way"] == "ring");
    assert!(tested(&world).status.success());

    // Back in mid-stream, where the client checks each answer.
    world.set_policy(&policy("[programs]\ndeny = ['python*']"));
    world.await_that("it is on TCP again", || row(&mut client)["way"] == "tcp");
    world.set_policy(&policy(""));
    world.await_that("without lists it moves", || row(&mut client)["way"] == "ring");
}

#[test]
fn moves_to_the_ring_and_back_are_followed_with_their_reason() {
    let Some(python) = python() else { return };
    let world = World::new();
    let (_server, mut client, port) = pair(&world, &python, true);
    let mut events =
        world.partywall("watcher", &["events", "--json", "--event", "moved", "--filter", &format!(":{port}")]);
    let mut events = Guard::spawn(&mut events);
    let mut lines = BufReader::new(events.0.stdout.take().unwrap()).lines();
    BufReader::new(events.0.stderr.take().unwrap()).lines().next().unwrap().unwrap();
    let mut next = |way: &str| loop {
        let event: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        if event["way"] == way && event["direction"] == "sends" {
            return event;
        }
    };
    await_channel(&world, &mut client);
    client.ask(100);
    assert!(next("ring")["reason"].is_null());
    assert!(world.run("watcher", &["moves", "--mode", "never"]).status.success());
    client.ask(100);
    let back = next("tcp");
    assert!(["moves-never", "peer-on-tcp"].contains(&back["reason"].as_str().unwrap()), "{back}");
}

#[test]
fn peers_that_leave_temporarily_return_to_the_ring() {
    let Some(python) = python() else { return };
    let world = World::new();
    let (_server, mut client, _) = pair(&world, &python, true);
    await_channel(&world, &mut client);
    for set_before in [false, true] {
        if set_before {
            assert!(world.run("watcher", &["moves", "--mode", "now", "--spin", "7us"]).status.success());
        }
        let held = json(&world.run("watcher", &["moves", "--json"]));
        let away = Guard::spawn(&mut world.partywall("watcher", &["moves", "--mode", "never", "--for", "1h"]));
        world.await_that("it is on TCP meanwhile", || {
            client.ask(10);
            of(&top(&world), &client).is_some_and(|row| row["way"] == "tcp")
        });
        // An interrupt ends the while early.
        kill_process(Pid::from_child(&away.0), Signal::INT).unwrap();
        let away = away.output();
        assert!(away.status.success(), "{}", said(&away));
        assert_eq!(json(&world.run("watcher", &["moves", "--json"])), held, "what held before holds again");
        world.await_that("it is on the ring again", || {
            client.ask(10);
            of(&top(&world), &client).is_some_and(|row| row["way"] == "ring")
        });
    }
    // And it ends by itself.
    let held = json(&world.run("watcher", &["moves", "--json"]));
    assert!(world.run("watcher", &["moves", "--mode", "never", "--for", "50ms"]).status.success());
    assert_eq!(json(&world.run("watcher", &["moves", "--json"])), held);
    let alone = world.run("watcher", &["moves", "--for", "1s"]);
    assert_eq!(alone.status.code(), Some(2), "{alone:?}");
}

#[test]
fn top_shows_transport_and_reason_of_each_connection() {
    let Some(python) = python() else { return };
    let world = World::new();
    let (server, mut client, _) = pair(&world, &python, false);
    client.ask(50);
    let mut rows = Vec::new();
    world.await_that("the server's end is shown", || {
        rows = top(&world);
        of(&rows, &server).is_some()
    });
    let row = of(&rows, &server).unwrap();
    assert_eq!(row["way"], "tcp", "{row}");
    assert!(row["why"].as_str().unwrap().contains("not to be under Partywall"), "{row}");
    let text = world.run("watcher", &["top", "--once"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.starts_with("PROGRAM") && text.contains("peer-silent: the peer offers no ring"), "{text}");
    assert_eq!(row["reason"], "peer-silent");
    let descriptor = format!("{}:{}", server.guard.0.id(), row["fd"]);
    let why = json(&world.run("watcher", &["why", &descriptor, "--json"]));
    assert_eq!(why["connections"][0]["reason"], "peer-silent", "the same as in top: {why}");
    assert!(why["connections"][0]["change"].as_str().unwrap().contains("partywall run"), "{why}");
    // A program without the library is found too.
    let why = world.run("watcher", &["why", &client.guard.0.id().to_string()]);
    let text = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(why.status.success() && text.contains("reason     no-library: "), "{text}");
    let absent = world.run("watcher", &["why", "127.0.0.1:1"]);
    assert_eq!(absent.status.code(), Some(3), "{}", said(&absent));
    let two = world.run("watcher", &["top", "--count", "2", "--interval", "50ms", "--json"]);
    assert_eq!(String::from_utf8_lossy(&two.stdout).lines().count(), 2);
}

#[test]
fn counters_go_on_rising_when_the_broker_is_away() {
    let Some(python) = python() else { return };
    let mut world = World::new();
    let (_server, mut client, _) = pair(&world, &python, true);
    await_channel(&world, &mut client);
    let mut command = world.partywall("watcher", &["top", "--json", "--interval", "50ms"]);
    let mut top = Guard::spawn(command.stderr(Stdio::inherit()));
    let mut looks = BufReader::new(top.0.stdout.take().unwrap()).lines();
    let pid = client.guard.0.id();
    // Bytes sent by the ring and in all, and whether the broker is missed.
    let mut look = || {
        let look: Value = serde_json::from_str(&looks.next().unwrap().unwrap()).unwrap();
        let row = look["connections"].as_array().unwrap().iter().find(|row| row["pid"] == pid).unwrap();
        let [ring, tcp] = ["ring", "tcp"].map(|way| row["sent"][way].as_u64().unwrap());
        (ring, ring + tcp, look["notes"].to_string().contains("without a broker"))
    };
    client.ask(100);
    let mut before = look();
    world.await_that("its ring is counted", || {
        before = look();
        before.0 >= 6400
    });
    world.kill_broker();
    let mut after = before;
    world.await_that("the broker is missed", || {
        after = look();
        assert!(after.0 >= before.0 && after.1 >= before.1, "{after:?} after {before:?}");
        after.2
    });
    client.ask(100);
    world.await_that("what is sent without a broker is counted", || {
        after = look();
        assert!(after.0 >= before.0, "{after:?} after {before:?}");
        after.1 >= before.1 + 6400
    });
    assert!(after.0 > before.0, "it went through the ring: {after:?} after {before:?}");
}

#[test]
fn top_shows_server_that_overwrote_its_environment() {
    let Some(python) = python() else { return };
    let world = World::new();
    library();
    let mut server = Talker::start(world.partywall("", &["run", "--", &python, "-c", &format!("{TITLE}{SERVER}")]));
    let port = server.hear();
    let environment = std::fs::read(format!("/proc/{}/environ", server.guard.0.id())).unwrap();
    assert!(!environment.is_empty() && environment.iter().all(|byte| *byte == b' '), "it was not overwritten");
    let mut client = Talker::start(world.partywall("", &["run", "--", &python, "-c", CLIENT, &port]));
    assert_eq!(client.hear(), "connected");
    client.ask(1);
    let mut rows = Vec::new();
    world.await_that("the server's end is shown", || {
        rows = top(&world);
        of(&rows, &server).is_some()
    });
    let row = of(&rows, &server).unwrap();
    assert!(row["local"].as_str().unwrap().ends_with(&format!(":{port}")), "{row}");
    assert!(!row["why"].as_str().unwrap().contains("not in the program"), "{row}");
}

#[test]
fn only_administrators_may_set_move_rules() {
    let world = World::new();
    let shown = json(&world.run("watcher", &["moves", "--json"]));
    assert_eq!((&shown["live"], shown["rules"].as_array().unwrap().len()), (&false.into(), 0));
    let set =
        ["moves", "--json", "--after-calls", "5", "--after-bytes", "1M", "--rule", "never@port=22", "--ring", "64K"];
    let shown = json(&world.run("watcher", &set));
    assert_eq!((&shown["live"], &shown["move"]), (&true.into(), &"after=5,bytes=1048576".into()));
    assert_eq!(shown["rules"][0]["for"], "port=22");
    assert_eq!(shown["ring_size"], 65536);
    // Settings that were not given stay as they are.
    let shown = json(&world.run("watcher", &["moves", "--json", "--mode", "never", "--spin", "7us"]));
    assert_eq!((&shown["move"], &shown["ring_size"], &shown["spin_us"]), (&"never".into(), &65536.into(), &7.into()));
    assert_eq!(shown["rules"].as_array().unwrap().len(), 1);
    let absent = world.run("watcher", &["moves", "--remove", "port=23"]);
    assert_eq!(absent.status.code(), Some(2), "{}", said(&absent));
    let shown = json(&world.run("watcher", &["moves", "--json", "--reset"]));
    assert_eq!(shown["live"], false);

    let world = World::with_policy(Some("administrators = []\n[[join]]\ndomain = \"*\"\nusers = [\"*\"]\n"));
    assert!(world.run("watcher", &["moves"]).status.success());
    for arguments in [&["moves", "--mode", "now"][..], &["moves", "--reset"]] {
        let refused = world.run("watcher", arguments);
        assert_eq!(refused.status.code(), Some(3));
        assert!(said(&refused).contains("administrators"), "{}", said(&refused));
    }
}

#[test]
fn top_works_without_a_broker_and_says_that_there_is_none() {
    let output = Guard::spawn(&mut common::partywall(&["--broker", "/nonexistent/socket", "top", "--once"])).output();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("no broker answers"), "{text}");
    for wrong in [&["top", "--interval", "1ms"][..], &["top", "--count", "0"]] {
        assert_eq!(Guard::spawn(&mut common::partywall(wrong)).output().status.code(), Some(2), "{wrong:?}");
    }
}
