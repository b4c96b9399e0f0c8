//! `partywall events` follows a real broker: refusals with their clause, its end and its return, and what each user may see.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{ChildStdout, Command, Stdio};

use common::{Guard, World, library};
use serde_json::Value;

/// A follower, once it follows.
struct Following {
    _command: Guard,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Following {
    fn start(world: &World, arguments: &[&str]) -> Self {
        let all: Vec<&str> = ["events", "--json"].iter().chain(arguments).copied().collect();
        let mut command = Guard::spawn(&mut world.partywall("watcher", &all));
        let mut errors = BufReader::new(command.0.stderr.take().unwrap()).lines();
        assert_eq!(errors.next().unwrap().unwrap(), "partywall: following events");
        let lines = BufReader::new(command.0.stdout.take().unwrap()).lines();
        Self { _command: command, lines }
    }

    /// The next event of this name.
    fn next(&mut self, name: &str) -> Value {
        loop {
            let line = self.lines.next().expect("the command goes on").unwrap();
            let event: Value = serde_json::from_str(&line).unwrap();
            if event["event"] == name {
                return event;
            }
        }
    }
}

#[test]
fn events_name_both_sides_and_the_clause() {
    let uid = rustix::process::geteuid().as_raw();
    let policy = format!(
        "administrators = []\n[[join]]\ndomain = '*'\nusers = [{uid}]\n[[connect]]\nfrom = 'web'\nto = 'db'\nservice = 'in'\n"
    );
    let world = World::with_policy(Some(&policy));
    let mut following = Following::start(&world, &[]);
    let _db = Guard::spawn(&mut world.partywall("db", &["cat", "-l", "in", "--recv-only"]));
    world.await_service("db", "in");
    assert!(world.run("web", &["cat", "db:in"]).status.success());
    let made = following.next("connected");
    assert_eq!((&made["from"], &made["to"], &made["service"]), (&"web".into(), &"db".into(), &"in".into()), "{made}");
    assert_eq!((&made["line"], &made["uid"]), (&5.into(), &uid.into()), "{made}");
    assert!(made["rule"].as_str().unwrap().starts_with("[[connect]] rule 1"), "{made}");
    assert_eq!(world.run("web", &["cat", "db:out"]).status.code(), Some(3));
    let denied = following.next("connect-refused");
    assert_eq!((&denied["refusal"], &denied["service"]), (&"denied by policy".into(), &"out".into()), "{denied}");
    let log = std::fs::read_to_string(world.path("broker.log")).unwrap();
    let logged = |words: &[&str]| log.lines().any(|line| words.iter().all(|word| line.contains(word)));
    assert!(logged(&["connected", "web", "db", "[[connect]] rule 1"]), "{log}");
    assert!(logged(&["connect denied by policy", "web", "out", "no [[connect]] rule"]), "{log}");
}

/// Sends back what it receives.
const ECHO: &str = "\
import socket, threading
def serve(connection):
    while data := connection.recv(64):
        connection.sendall(data)
listener = socket.create_server(('127.0.0.1', 0))
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
";

/// Asks until its standard input ends, so that the connection lives for as long as the test needs it.
const ASK: &str = "\
import select, socket, sys
with socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as connection:
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        connection.sendall(b'x')
        assert connection.recv(64) == b'x'
";

#[test]
fn rings_of_unmodified_programs_are_reported_with_the_clause() {
    let python = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let Some(python) = python.ok().filter(|found| found.status.success()) else {
        return eprintln!("no python3: not tested");
    };
    let python = String::from_utf8(python.stdout).unwrap().trim().to_owned();
    library();
    let uid = rustix::process::geteuid().as_raw();
    let policy = format!(
        "administrators = []\n[[join]]\ndomain = '*'\nusers = [{uid}]\n[[connect]]\nfrom = 'web'\nto = 'db'\n\
         [sockets]\nmove = 'now'\nsame_user = false\n"
    );
    let world = World::with_policy(Some(&policy));
    let mut following = Following::start(&world, &["--event", "ring-made", "--event", "ring-refused"]);
    let mut server = Guard::spawn(&mut world.partywall("db", &["run", "--", &python, "-c", ECHO]));
    let port = BufReader::new(server.0.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    let service = format!("tcp-{port}");
    let connect = |domain: &str| {
        let mut command = world.partywall(domain, &["run", "--", &python, "-c", ASK, &port]);
        Guard::spawn(command.stdin(Stdio::piped()))
    };

    let web = connect("web");
    let made = following.next("ring-made");
    assert_eq!((&made["from"], &made["to"], &made["service"]), (&"web".into(), &"db".into(), &service.as_str().into()));
    assert_eq!((&made["line"], &made["uid"], &made["pid"]), (&5.into(), &uid.into(), &web.0.id().into()), "{made}");
    assert!(made["rule"].as_str().unwrap().starts_with("[[connect]] rule 1"), "{made}");

    let other = connect("other");
    let refused = following.next("ring-refused");
    assert_eq!((&refused["from"], &refused["service"]), (&"other".into(), &service.as_str().into()), "{refused}");
    assert_eq!((&refused["refusal"], &refused["pid"]), (&"denied by policy".into(), &other.0.id().into()), "{refused}");
    assert!(refused["rule"].as_str().unwrap().contains("no [[connect]] rule"), "{refused}");
    // Only administrators learn whose service it was.
    assert!(refused["to"].as_str().is_none_or(str::is_empty), "{refused}");
}

#[test]
fn follower_goes_on_with_the_next_broker() {
    let mut world = World::new();
    let mut following = Following::start(&world, &["--event", "joined", "--filter", "visitor"]);
    world.kill_broker();
    following.next("broker-gone");
    world.start_broker();
    following.next("broker-back");
    assert!(world.run("visitor", &["list"]).status.success());
    assert_eq!(following.next("joined")["from"], "visitor");
}

#[test]
fn count_and_time_end_the_command() {
    let world = World::new();
    let mut one = Following::start(&world, &["--count", "1"]);
    let done = world.run("other", &["events", "--for", "0.05"]);
    assert!(done.status.success(), "{}", common::said(&done));
    one.next("joined");
    assert!(one.lines.next().is_none());
}
