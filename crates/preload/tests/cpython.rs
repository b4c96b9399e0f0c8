//! CPython's own tests of everything that has to do with sockets, without the library and with it: every one ends the same way.
//!
//! Debian's package libpython3.11-testsuite has them. The short list runs with the other tests, the long one by `make compat`. The lab runs them
//! in a virtual machine.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod suites;
mod support;

use std::{
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use suites::{Suite, SuiteRun};
use support::{guard::Guard, switch::Switch, world::World};

const SHORT: &[Suite] = &[
    ("test.test_epoll", &[]),
    ("test.test_select", &[]),
    ("test.test_socketserver", &[]),
    ("test.test_telnetlib", &[]),
    ("test.test_httplib", &[]),
    ("test.test_urllib2_localnet", &[]),
    ("test.test_socket", &["*TCP*", "*FileObject*", "*SocketPair*", "*InheritanceTest*", "*BufferIO*"]),
];

fn run((module, patterns): Suite, world: Option<&World>) -> SuiteRun {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("/usr/bin/python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(suites::RUNNER)).arg(module).args(patterns);
    command.current_dir(folder.path()).env("TMPDIR", folder.path()).env_remove("LD_PRELOAD");
    if let Some(world) = world {
        world.preload(&mut command);
    }
    let out = std::fs::File::create(folder.path().join("out")).unwrap();
    let err = std::fs::File::create(folder.path().join("err")).unwrap();
    let mut child = Guard::spawn(command.stdin(Stdio::null()).stdout(out).stderr(err));
    let end = child.wait_for(Duration::from_secs(700));
    let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
    let end = end.map_or_else(|| "a hang".into(), |status| status.to_string());
    SuiteRun::new(module, &read("out"), &read("err"), end)
}

fn compare(suites: &[Suite]) {
    if !suites::are_installed(support::skipped) {
        return;
    }
    let mut differences = Vec::new();
    for suite in suites {
        let world = World::new();
        let switch = Switch::new(&world);
        let (plain, ours) = (run(*suite, None), run(*suite, Some(&world)));
        let here = suites::differences(&plain, &ours, || run(*suite, None));
        eprintln!("{}: {}; {} differ; {:?}", suite.0, plain.tally(), here.len(), switch.seen());
        differences.extend(here);
    }
    suites::assert_none(&differences);
}

#[test]
fn short_suites_end_the_same_way() {
    compare(SHORT);
}

#[test]
#[ignore = "takes a quarter of an hour: make compat"]
fn all_suites_end_the_same_way() {
    compare(&suites::long());
}
