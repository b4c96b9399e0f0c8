//! `partywall events` follows a real broker: refusals with their clause, its end and its return, and what each user may see.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::ChildStdout;

use common::{Guard, World};
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
