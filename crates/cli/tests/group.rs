//! `partywall group`: a file put before a group's members, and read where it is.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::random::noise;
use common::{Guard, World, said};
use std::io::{BufRead, BufReader};
use std::process::Stdio;

const POLICY: &str =
    "administrators = [0, \"*\"]\n[[group]]\nname = \"pool\"\ndomains = [\"a\", \"c\"]\nroom = 2097152\n";

/// `put` as domain `a`, and the handles that it prints.
fn put(world: &World, words: &[&str], handles: usize) -> (Guard, Vec<String>) {
    let mut command = world.partywall("a", &[&["group", "put", "pool"], words].concat());
    let mut guard = Guard::spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let lines = BufReader::new(guard.0.stdout.take().unwrap()).lines();
    let handles = lines.take(handles).map(|line| line.unwrap()).collect();
    (guard, handles)
}

#[test]
fn group_file_is_read_in_place_by_each_handle_holder() {
    let world = World::with_policy(Some(POLICY));
    let content = noise(5, 1_500_001);
    let file = world.path("file");
    std::fs::write(&file, &content).unwrap();
    let file = file.to_str().unwrap();
    let (mut owner, handles) = put(&world, &[file, "-n", "2"], 2);
    for handle in &handles {
        let got = world.run("c", &["group", "get", handle]);
        assert!(got.status.success(), "{}", said(&got));
        assert!(got.stdout == content);
    }
    assert!(owner.wait().success(), "all have read");

    // Used up; and each way to be wrong has its words and its code.
    for (words, code, word) in [
        (["get", handles[0].as_str()], 3, "gone"),
        (["get", "pool:00"], 2, "80 hexadecimal digits"),
        (["get", "00"], 2, "GROUP:HEX"),
        (["put", "nowhere"], 3, "no group nowhere of which c is a member"),
    ] {
        let output = world.run("c", &[&["group"], &words[..]].concat());
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", said(&output));
        assert!(said(&output).contains(word), "{words:?}: {}", said(&output));
    }
    let stranger = world.run("b", &["group", "put", "pool", file]);
    assert_eq!(stranger.status.code(), Some(3), "{}", said(&stranger));

    let (mut unread, _) = put(&world, &[file, "--timeout", "50ms"], 1);
    assert_eq!(unread.code(), Some(6), "timed out");
    let list = world.run("c", &["group", "list"]);
    let text = String::from_utf8(list.stdout).unwrap();
    let members: Vec<&str> = text.lines().skip(1).map(|l| l.split_whitespace().nth(1).unwrap()).collect();
    assert_eq!(members, ["a", "c"], "{text}");
    assert!(text.contains("0x200000000000"), "{text}");
}
