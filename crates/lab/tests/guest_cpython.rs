//! CPython's own tests of everything that has to do with sockets, in a virtual machine: without the library, and with it and the machine's agent.
//! Every one ends the same way, and connections within the machine go by rings. What ends well on the host ends well in the machine.
//!
//! The machine has the host's Python, its modules and their tests on a disk. The short list runs with the other tests, the long one by `make compat`.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[path = "../../preload/tests/suites/mod.rs"]
mod suites;
#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, GuestOptions, ImageOptions};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use suites::{PYTHON_LIBRARY, Suite, SuiteRun};
use world::{Inside, World, preload_library, python};

const LIBRARY: &str = "libpartywall_preload.so";
/// The log line of the library when a connection has its rings.
const ON_RING: &str = "has a ring";
/// Where the libraries of Python's modules log that.
const LOG: &str = "/tmp/rings.log";
/// Seconds that a suite may take. An emulated machine is some ten times as slow as its host.
const LIMIT: u32 = 3000;

/// TCP in `epoll` and `select`, closed by halves, in threads and in servers that fork; UDP; and exchanges that are long enough for rings.
const SHORT: &[Suite] = &[
    ("test.test_epoll", &[]),
    ("test.test_asyncore", &["*IPv4Select*"]),
    ("test.test_socket", &["*BasicTCPTest*", "*BasicUDPTest*", "*NonBlockingTCPTests*"]),
    ("test.test_socketserver", &[]),
    ("test.test_asynchat", &["*.TestAsynchat.*"]),
];

/// A machine with Python and its tests.
struct PythonMachine {
    guest: Guest,
    // What the guest uses goes after it.
    _world: World,
}

impl PythonMachine {
    fn boot(name: &str) -> Self {
        let modules = Path::new(PYTHON_LIBRARY).join("lib-dynload");
        let image = python::with(ImageOptions::default()).program(preload_library(), LIBRARY);
        let image =
            ["virtio_blk", "ext4", "unix_diag", "udp_diag"].iter().fold(image, |image, name| image.module(name));
        // The libraries that they are linked with go along.
        let image = ["_ssl", "_ctypes", "_bz2", "_lzma", "_uuid"].iter().fold(image, |image, module| {
            let file = modules.join(format!("{module}.cpython-311-x86_64-linux-gnu.so"));
            image.program(file, &format!("{module}.so"))
        });
        let world = World::with(name, image);
        let disk = world.path("python.img");
        make_disk(&disk);
        let drive = format!("file={},if=none,id=python,format=raw,readonly=on", disk.display());
        let options = GuestOptions::new("a").memory(512);
        let [guest] = world.boot_as([options.arguments(["-drive", &drive, "-device", "virtio-blk-pci,drive=python"])]);
        guest.sh(&format!(
            "mkdir -p {PYTHON_LIBRARY} /etc && mount -t ext4 -o ro /dev/vda {PYTHON_LIBRARY} && \
             printf '127.0.0.1 localhost\n127.0.1.1 a\n' > /etc/hosts && echo 'root:x:0:0:root:/:/bin/sh' > /etc/passwd"
        ));
        for names in ["/etc/services", "/etc/protocols"] {
            guest.put(&std::fs::read(names).unwrap_or_default(), names, 0o644).unwrap();
        }
        let runner = Path::new(env!("CARGO_MANIFEST_DIR")).join("../preload").join(suites::RUNNER);
        guest.put(&std::fs::read(runner).unwrap(), "/tmp/run_tests.py", 0o644).unwrap();
        let said = world.attach(&guest);
        assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), world.log());
        world.wait_ready(1);
        Self { guest, _world: world }
    }

    fn run(&self, (module, patterns): Suite, under: &str) -> SuiteRun {
        let patterns: String = patterns.iter().map(|pattern| format!(" '{pattern}'")).collect();
        let line = format!(
            "rm -rf /tmp/suite && mkdir /tmp/suite && cd /tmp/suite && export TMPDIR=/tmp/suite && \
             {under} python3 /tmp/run_tests.py --timeout {LIMIT} {module}{patterns} > /tmp/out 2> /tmp/err"
        );
        let end = self.guest.begin(&line).wait(Duration::from_secs(u64::from(LIMIT) + 60)).unwrap().status;
        let read = |path| self.guest.get(path).unwrap();
        SuiteRun::new(module, &read("/tmp/out"), &read("/tmp/err"), format!("exit status: {end}"))
    }

    fn plain(&self, suite: Suite) -> SuiteRun {
        self.run(suite, "")
    }

    /// With the library, and how many ends of connections have got rings.
    fn ours(&self, suite: Suite) -> (SuiteRun, usize) {
        self.guest.sh(&format!("rm -f {LOG}"));
        let run = self.run(suite, &format!("PARTYWALL_PRELOAD_LOG={LOG} partywall run --quiet --move now"));
        let rings = self.guest.sh(&format!("[ ! -e {LOG} ] || grep -c '{ON_RING}' {LOG} || true"));
        (run, rings.trim().parse().unwrap_or(0))
    }
}

/// A file system with Python's modules and their tests.
fn make_disk(path: &Path) {
    std::fs::File::create(path).unwrap().set_len(512 << 20).unwrap();
    let mut make = Command::new("/sbin/mke2fs");
    let made = make.args(["-q", "-F", "-t", "ext4", "-d", PYTHON_LIBRARY]).arg(path).status();
    assert!(made.unwrap().success(), "mke2fs has failed");
}

/// A suite on the host, without the library.
fn outside((module, patterns): Suite) -> SuiteRun {
    let folder = tempfile::tempdir().unwrap();
    let runner = Path::new(env!("CARGO_MANIFEST_DIR")).join("../preload").join(suites::RUNNER);
    let mut command = Command::new(python::PYTHON);
    command.arg(runner).arg(module).args(patterns).current_dir(folder.path()).env("TMPDIR", folder.path());
    let done = command.env_remove("LD_PRELOAD").output().unwrap();
    SuiteRun::new(module, &done.stdout, &done.stderr, done.status.to_string())
}

fn compare(name: &str, suites: &[Suite]) {
    if !suites::are_installed(|why| println!("skipped: {why}")) {
        return;
    }
    let machine = PythonMachine::boot(name);
    let (mut differences, mut total) = (Vec::new(), 0);
    for suite in suites {
        let begin = Instant::now();
        let plain = machine.plain(*suite);
        println!("{}: {:.1?} without the library: {}", suite.0, begin.elapsed(), plain.tally());
        let begin = Instant::now();
        let (ours, rings) = machine.ours(*suite);
        println!("{}: {:.1?} with it: {}; {rings} ends have got rings", suite.0, begin.elapsed(), ours.tally());
        let here = suites::differences(&plain, &ours, || machine.plain(*suite));
        println!("{}: {} differ", suite.0, here.len());
        differences.extend(here);
        if SHORT.contains(suite) {
            differences.extend(suites::lost_inside(&outside(*suite), &ours));
        }
        total += rings;
    }
    suites::assert_none(&differences);
    assert!(total > 0, "no connection has got a ring: {}", machine.guest.sh("cat /tmp/agent.log"));
}

#[test]
fn short_suites_in_guest_end_the_same_way() {
    compare("cpython", SHORT);
}

#[test]
#[ignore = "takes half an hour in an emulated machine: make compat"]
fn all_suites_in_guest_end_the_same_way() {
    compare("cpython-all", &suites::long());
}
