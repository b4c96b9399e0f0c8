//! The examples do what they say.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{Process, built};
use common::*;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

fn example(name: &str) -> PathBuf {
    built(&format!("examples/{name}"), &["--package", "partywall", "--examples"])
}

#[test]
fn the_echo_pair_echoes() {
    let _guard = hang_guard();
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let mut server = Command::new(example("echo_server"));
    let mut server = server.env("PARTYWALL_BROKER", broker.path()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = server.stdout.take().unwrap();
    let mut server = Process::new(server);
    let say = |words: &[&str]| -> Output {
        Command::new(example("echo_client")).args(words).env("PARTYWALL_BROKER", broker.path()).output().unwrap()
    };
    let mut answer = say(&[]);
    eventually("the server answers", || {
        answer = say(&[]);
        answer.status.success()
    });
    assert_eq!(answer.stdout, b"hello\n");
    assert_eq!(say(&["two", "words"]).stdout, b"two words\n");
    server.kill();
    let mut said = String::new();
    stdout.read_to_string(&mut said).unwrap();
    server.wait();
    assert!(said.starts_with("offering web:echo\nvisitor has come\n"), "{said}");
    // Without anyone there, the client says what is missing.
    let alone = say(&[]);
    let complaint = String::from_utf8(alone.stderr).unwrap();
    assert!(!alone.status.success() && complaint.contains("web"), "{complaint}");
}

#[test]
fn the_shared_table_is_read_where_it_is() {
    let _guard = hang_guard();
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let begin = |words: [&str; 3]| {
        let mut command = Command::new(example("shared_table"));
        command.args(words).env("PARTYWALL_BROKER", broker.path());
        command
    };
    let mut server = Process::new(begin(["serve", "shop", "tables"]).stdout(Stdio::null()).spawn().unwrap());
    let mut read = begin(["read", "visitor", "shop:tables"]).output().unwrap();
    eventually("the table is there", || {
        if !read.status.success() {
            read = begin(["read", "visitor", "shop:tables"]).output().unwrap();
        }
        read.status.success()
    });
    assert_eq!(String::from_utf8(read.stdout).unwrap(), format!("read 14 tables, sum {}\n", 91 * (256 << 10)));
    assert!(server.wait());
}
