//! What shells complete: names that the broker knows, through bash's own script too.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::process::{Command, Stdio};

use common::{Guard, PARTYWALL, World, partywall};

/// What is offered for the last of these words.
fn offered(world: &World, words: &[&str]) -> Vec<String> {
    let mut command = partywall(&["--", "partywall"]);
    command.args(words).env("PARTYWALL_BROKER", world.socket()).env("PARTYWALL_DOMAIN", "watcher");
    command
        .env("PARTYWALL_COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", words.len().to_string())
        .env("_CLAP_IFS", "\n");
    command.env("_CLAP_COMPLETE_COMP_TYPE", "9").env("_CLAP_COMPLETE_SPACE", "false");
    let output = Guard::spawn(&mut command).output();
    assert!(output.status.success(), "{}", common::said(&output));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// A broker with a service that somebody has connected to.
fn world() -> (World, [Guard; 2]) {
    let world = World::new();
    let db = Guard::spawn(&mut world.partywall("db", &["cat", "-l", "in", "--recv-only"]));
    world.await_service("db", "in");
    let web = Guard::spawn(world.partywall("web", &["cat", "db:in"]).stdin(Stdio::piped()));
    world.await_that("a channel is open", || !offered(&world, &["stat", ""]).is_empty_of_digits());
    (world, [db, web])
}

trait Digits {
    /// Whether nothing in it is a number.
    fn is_empty_of_digits(&self) -> bool;
}

impl Digits for Vec<String> {
    fn is_empty_of_digits(&self) -> bool {
        !self.iter().any(|candidate| candidate.parse::<u64>().is_ok())
    }
}

#[test]
fn services_domains_and_channels_are_offered() {
    let (world, _running) = world();
    assert_eq!(offered(&world, &["cat", "d"]), ["db:in"]);
    assert_eq!(offered(&world, &["ping", "db:"]), ["db:in"]);
    assert_eq!(offered(&world, &["policy", "test", "--from", "w"]), ["web"]);
    assert_eq!(offered(&world, &["policy", "test", "--from", "web", "--to", "db"]), ["db:in"]);
    assert_eq!(offered(&world, &["why", "--j"]), ["--json"]);
    assert!(offered(&world, &["cat", "nobody"]).is_empty());
}

#[test]
fn bash_completes_a_service_behind_its_colon() {
    let (world, _running) = world();
    let script = partywall(&["completions", "bash"]).output().unwrap().stdout;
    std::fs::write(world.path("completion"), script).unwrap();
    let folder = std::path::Path::new(PARTYWALL).parent().unwrap();
    for (words, cword, expected) in [
        ("partywall cat d", 2, "[db:in ]"),
        ("partywall cat db :", 3, "[in ]"),
        ("partywall cat db : i", 4, "[in ]"),
        ("partywall ev", 1, "[events ]"),
    ] {
        let test =
            "source \"$1\"; COMP_WORDS=($2); COMP_CWORD=$3; COMP_TYPE=9; _partywall; printf '[%s]' \"${COMPREPLY[@]}\"";
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-c", test, "bash"]).arg(world.path("completion")).args([words, &cword.to_string()]);
        bash.env("PATH", format!("{}:{}", folder.display(), std::env::var("PATH").unwrap()));
        bash.env("PARTYWALL_BROKER", world.socket()).env("PARTYWALL_DOMAIN", "watcher");
        let output = bash.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{words}: {}", common::said(&output));
    }
}

#[test]
fn shell_without_a_broker_gets_options_at_once() {
    let mut command = partywall(&["--", "partywall", "cat", "x"]);
    command.env("PARTYWALL_BROKER", "/nonexistent/broker").env("PARTYWALL_COMPLETE", "fish");
    let output = Guard::spawn(&mut command).output();
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
}
