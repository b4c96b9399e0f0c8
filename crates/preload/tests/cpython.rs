//! CPython's own tests of everything that has to do with sockets, without the library and with it: every one ends the same way.
//!
//! Debian's package libpython3.11-testsuite has them. The short list runs with the other tests, the long one by `make compat`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use support::{guard::Guard, switch::Switch, world::World};

/// Modules, and the tests of them to run; none means all.
type Suite = (&'static str, &'static [&'static str]);

const SHORT: &[Suite] = &[
    ("test.test_epoll", &[]),
    ("test.test_select", &[]),
    ("test.test_socketserver", &[]),
    ("test.test_telnetlib", &[]),
    ("test.test_httplib", &[]),
    ("test.test_urllib2_localnet", &[]),
    ("test.test_socket", &["*TCP*", "*FileObject*", "*SocketPair*", "*InheritanceTest*", "*BufferIO*"]),
];

const LONG: &[Suite] = &[
    // UDP-Lite is no longer in newer kernels, where its tests hang; those of virtual machines' sockets hang where there is no host.
    ("test.test_socket", &["!*UDPLITE*", "!*VSOCK*"]),
    ("test.test_selectors", &[]),
    ("test.test_ssl", &[]),
    ("test.test_ftplib", &[]),
    ("test.test_httplib", &[]),
    ("test.test_epoll", &[]),
    ("test.test_poll", &[]),
    ("test.test_select", &[]),
    ("test.test_socketserver", &[]),
    ("test.test_asyncore", &[]),
    ("test.test_asynchat", &[]),
    ("test.test_smtplib", &[]),
    ("test.test_poplib", &[]),
    ("test.test_imaplib", &[]),
    ("test.test_telnetlib", &[]),
    ("test.test_urllib2_localnet", &[]),
    ("test.test_httpservers", &[]),
    ("test.test_xmlrpc", &[]),
    ("test.test_logging", &[]),
    ("test.test_asyncio.test_events", &[]),
    ("test.test_asyncio.test_selector_events", &[]),
    ("test.test_asyncio.test_server", &[]),
    ("test.test_asyncio.test_sock_lowlevel", &[]),
    ("test.test_asyncio.test_sslproto", &[]),
    ("test.test_asyncio.test_ssl", &[]),
    ("test.test_asyncio.test_streams", &[]),
    ("test.test_asyncio.test_buffered_proto", &[]),
    ("test.test_asyncio.test_sendfile", &[]),
    ("test.test_asyncio.test_unix_events", &[]),
    ("test.test_asyncio.test_subprocess", &[]),
    ("test.test_multiprocessing_main_handling", &[]),
];

/// Tests that may end differently, each with its reason.
const DIFFERENCES: &[(&str, &str)] = &[];

/// How each test of a module ended; what it said, for people.
fn run((module, patterns): Suite, world: Option<&World>) -> (BTreeMap<String, String>, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("/usr/bin/python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/run_tests.py")).arg(module).args(patterns);
    command.current_dir(folder.path()).env("TMPDIR", folder.path()).env_remove("LD_PRELOAD");
    if let Some(world) = world {
        world.preload(&mut command);
    }
    let out = std::fs::File::create(folder.path().join("out")).unwrap();
    let err = std::fs::File::create(folder.path().join("err")).unwrap();
    let mut child = Guard::spawn(command.stdin(Stdio::null()).stdout(out).stderr(err));
    let end = child.wait_for(Duration::from_secs(700));
    let read = |name: &str| String::from_utf8_lossy(&std::fs::read(folder.path().join(name)).unwrap()).into_owned();
    let mut outcomes: BTreeMap<String, String> = read("out")
        .lines()
        .filter_map(|line| line.strip_prefix("RESULT ")?.split_once(' '))
        .map(|(test, outcome)| (test.to_owned(), outcome.to_owned()))
        .collect();
    let code = end.map(|status| status.to_string()).unwrap_or_else(|| "a hang".into());
    outcomes.insert(format!("{module} as a whole"), code);
    (outcomes, read("err"))
}

fn compare(suites: &[Suite]) {
    if !Path::new("/usr/lib/python3.11/test/test_socket.py").exists() {
        support::skipped(
            "CPython's tests are not on this machine; they are in Debian's package libpython3.11-testsuite",
        );
        return;
    }
    let mut differences = Vec::new();
    for suite in suites {
        let world = World::new();
        let switch = Switch::new(&world);
        let (plain, _) = run(*suite, None);
        let (ours, said) = run(*suite, Some(&world));
        let mut here = Vec::new();
        for (test, outcome) in &plain {
            let with = ours.get(test).map_or("did not run", String::as_str);
            let is_known = DIFFERENCES.iter().any(|(known, _)| test.ends_with(known));
            if with != outcome && !is_known {
                // Some of them do not end the same way twice without the library, either.
                let again = run(*suite, None).0;
                if again.get(test) == Some(outcome) {
                    here.push(format!("{test}: without the library {outcome}, with it {with}"));
                }
            }
        }
        eprintln!("{}: {} tests, {} differ; {:?}", suite.0, plain.len(), here.len(), switch.seen());
        if !here.is_empty() {
            let tail: Vec<&str> = said.lines().rev().take(150).collect();
            eprintln!("{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
        }
        differences.extend(here);
    }
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn short_suites_end_the_same_way() {
    compare(SHORT);
}

#[test]
#[ignore = "takes a quarter of an hour: make compat"]
fn all_suites_end_the_same_way() {
    match std::env::var("PARTYWALL_COMPAT") {
        Ok(only) => {
            compare(&LONG.iter().copied().filter(|(module, _)| module.ends_with(only.as_str())).collect::<Vec<_>>())
        }
        Err(_) => compare(LONG),
    }
}
