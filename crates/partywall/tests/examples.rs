//! The examples do what they say.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{Process, built};
use common::*;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn example(name: &str) -> PathBuf {
    built(&format!("examples/{name}"), &["--package", "partywall", "--examples", "--features", "tokio"])
}

/// An example with these arguments, for this broker.
fn begin(name: &str, words: &[&str], broker: &Path) -> Command {
    let mut command = Command::new(example(name));
    command.args(words).env("PARTYWALL_BROKER", broker);
    command
}

/// Starts the side of an example that waits for others. It is killed at the end.
fn start(name: &str, words: &[&str], broker: &Path) -> Process {
    Process::new(begin(name, words, broker).stdout(Stdio::null()).spawn().unwrap())
}

/// The output of the other side, once the first one is there.
fn output(name: &str, words: &[&str], broker: &Path) -> String {
    let mut said = None;
    eventually("the other side is there", || {
        let done = begin(name, words, broker).output().unwrap();
        said = done.status.success().then(|| String::from_utf8(done.stdout).unwrap());
        said.is_some()
    });
    said.unwrap()
}

#[test]
fn messages_arrive_whole_and_are_answered() {
    let _guard = hang_guard();
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let _server = start("messages", &["serve"], broker.path());
    let said = output("messages", &["order", "2", "apples"], broker.path());
    assert_eq!(said, "2 words for visitor: 2, apples\n");
}

#[test]
fn broadcast_example_takes_newer_and_newer_samples() {
    let _guard = hang_guard();
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let _publisher = start("broadcast", &["publish"], broker.path());
    let said = output("broadcast", &["subscribe", "3"], broker.path());
    let numbers: Vec<[u64; 2]> = said
        .lines()
        .map(|line| {
            let (sample, lost) = line.strip_suffix(" left out").unwrap().split_once(", ").unwrap();
            [sample.strip_prefix("sample ").unwrap(), lost].map(|number| number.parse().unwrap())
        })
        .collect();
    let [[first, 0], .., [last, lost]] = numbers[..] else { panic!("{said}") };
    assert_eq!((numbers.len(), lost + 3), (3, last - first + 1), "{said}");
}

#[test]
fn call_example_sums_in_the_server() {
    let _guard = hang_guard();
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let _server = start("calls", &["serve"], broker.path());
    assert_eq!(output("calls", &["sum", "1", "2", "39"], broker.path()), "42\n");
}

#[test]
fn typed_call_example_passes_values_and_heap_slices() {
    let _guard = hang_guard();
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let _server = start("typed_calls", &["serve"], broker.path());
    assert_eq!(output("typed_calls", &["find", "Emma"], broker.path()), "shelf 7, 474 pages\n");
    assert_eq!(output("typed_calls", &["find", "Ulysses"], broker.path()), "no such book\n");
    assert_eq!(output("typed_calls", &["pages", "200", "300"], broker.path()), "500 pages\n2 books in the library\n");
    let error = begin("typed_calls", &["find", ""], broker.path()).output().unwrap();
    let text = String::from_utf8(error.stderr).unwrap();
    assert!(!error.status.success() && text.contains("visitor asks for a book without a title"), "{text}");
}

#[test]
fn shared_tree_example_walks_a_tree_at_the_clients_addresses() {
    let _guard = hang_guard();
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let _server = start("shared_tree", &["serve", "shop", "trees"], broker.path());
    let said = output("shared_tree", &["sum", "visitor", "shop:trees", "100000"], broker.path());
    assert_eq!(said, "100000 nodes, sum 4999950000, read at the client's addresses\n");
}

#[test]
fn asynchronous_example_asks_all_at_once() {
    let _guard = hang_guard();
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let _server = start("asynchronous", &["serve"], broker.path());
    assert_eq!(output("asynchronous", &["ask", "one", "two", "three"], broker.path()), "ONE\nTWO\nTHREE\n");
}

#[test]
fn group_example_reads_the_lent_buffer_in_place() {
    let _guard = hang_guard();
    let dir = tempfile::tempdir().unwrap();
    let policy = dir.path().join("policy.toml");
    std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['maker', 'reader']\nroom = '16M'\n").unwrap();
    let config = partywall_daemon::Config::new(dir.path().join("broker.sock")).policy_file(policy);
    let broker = partywall_daemon::Broker::start(&config).unwrap();
    let mut maker = begin("group", &["lend", "hello"], broker.path()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(maker.stdout.take().unwrap()).lines();
    let mut maker = Process::new(maker);
    let handle = lines.next().unwrap().unwrap();
    let said = begin("group", &["read", &handle], broker.path()).output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let (text, address) = (String::from_utf8(said.stdout).unwrap(), lines.next().unwrap().unwrap());
    let address = address.strip_prefix("read; the buffer at ").and_then(|rest| rest.split_once(' ')).unwrap().0;
    assert_eq!(text, format!("hello at {address}\n"));
    assert!(maker.wait());
}

#[test]
fn echo_examples_answer_and_report_missing_server() {
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
fn shared_table_example_reads_tables_in_place() {
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
