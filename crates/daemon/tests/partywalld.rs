//! The program itself: starting, stopping, dying, starting again.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use common::*;
use partywall_protocol::wire::{self, Directions, Kind, Message, Refusal, RegionReference, Side};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const PARTYWALLD: &str = env!("CARGO_BIN_EXE_partywalld");

/// A running `partywalld`, that is killed if the test fails.
struct Daemon {
    child: Child,
    notify: UnixDatagram,
}

fn command(socket: &Path) -> Command {
    let mut command = Command::new(PARTYWALLD);
    command.arg("--socket").arg(socket).stdin(Stdio::null()).stderr(Stdio::piped());
    command.env_remove("PARTYWALL_LOG").env_remove("NOTIFY_SOCKET");
    command
}

impl Daemon {
    fn start(dir: &TempDir, command: Command) -> Self {
        let daemon = Self::spawn(dir, command);
        daemon.until_told("READY=1");
        daemon
    }

    fn spawn(dir: &TempDir, mut command: Command) -> Self {
        let path = dir.path().join("notify");
        let _ = std::fs::remove_file(&path);
        let notify = UnixDatagram::bind(&path).unwrap();
        notify.set_read_timeout(Some(HANG)).unwrap();
        let child = command.env("NOTIFY_SOCKET", &path).spawn().unwrap();
        Self { child, notify }
    }

    fn until_told(&self, word: &str) {
        let mut buf = [0; 512];
        loop {
            let n = match self.notify.recv(&mut buf) {
                Ok(n) => n,
                // A receive with a timeout is not restarted after a signal, such as that of a child's end.
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => panic!("never told {word}: {e}"),
            };
            if std::str::from_utf8(&buf[..n]).unwrap().contains(word) {
                return;
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end, and returns its exit code and its log.
    fn end(mut self) -> (Option<i32>, String) {
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        (self.child.wait().unwrap().code(), log)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(mut command: Command) -> (Output, String) {
    let output = command.output().unwrap();
    let log = String::from_utf8(output.stderr.clone()).unwrap();
    (output, log)
}

fn place() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("broker.sock");
    (dir, socket)
}

#[test]
fn killed_broker_restarts_and_channels_are_reclaimed() {
    let (dir, socket) = place();
    let daemon = Daemon::start(&dir, command(&socket));
    let mut web = Client::connect(&socket);
    let Message::Joined { instance, epoch, .. } =
        web.ask(&Message::Join { version: wire::VERSION, name: "web".into() })
    else {
        panic!()
    };
    let mut db = Client::join(&socket, "db");
    db.bind("sql", 4);
    let (channel, links) = web.open("db", "sql");
    let incoming = db.receive().unwrap();

    daemon.signal(Signal::KILL);
    web.is_hung_up_on();
    db.is_hung_up_on();
    assert_eq!(daemon.end().0, None);
    assert!(socket.exists(), "nobody was left to remove it");
    // The channel does not notice.
    partywall_region::packet::send(links[0].as_fd(), b"B", &[]).unwrap();
    let mut buf = [0; 8];
    assert_eq!(partywall_region::packet::recv(incoming.fds[1].as_fd(), &mut buf).unwrap().len, 1);

    let daemon = Daemon::start(&dir, command(&socket));
    let mut web = Client::connect(&socket);
    let Message::Joined { instance: instance2, epoch: epoch2, .. } =
        web.ask(&Message::Join { version: wire::VERSION, name: "web".into() })
    else {
        panic!()
    };
    assert!(instance2 > instance && epoch2 > epoch);
    let mut db = Client::join(&socket, "db");
    db.bind("sql", 4);
    let mine = region(8192);
    let reclaim = |client: &mut Client, side, peer: &str| {
        let claim = Message::Reclaim {
            channel,
            side,
            peer: peer.to_owned(),
            service: "sql".to_owned(),
            kind: Kind::Stream,
            directions: Directions::BOTH,
            region: RegionReference::with_ring(8192),
        };
        client.ask_with(&claim, &[mine.as_fd()]).message
    };
    assert_eq!(reclaim(&mut web, Side::Connecting, "db"), Message::Done {});
    let lie = reclaim(&mut db, Side::Accepting, "somebody-else");
    assert!(matches!(lie, Message::Refused { code: Refusal::SelfContradiction, .. }));
    assert_eq!(reclaim(&mut db, Side::Accepting, "web"), Message::Done {});
    assert_eq!(web.ask(&Message::Inspect { channel }), Message::Regions { connecting: true, accepting: true });
    let (another, _links) = web.open("db", "sql");
    assert!(another > channel, "numbers never repeat");

    daemon.signal(Signal::TERM);
    daemon.until_told("STOPPING=1");
    let (code, log) = daemon.end();
    assert_eq!(code, Some(0), "{log}");
    assert!(!socket.exists());
}

#[test]
fn broker_whose_log_lost_its_reader_serves_and_stops() {
    let (dir, path) = place();
    let mut daemon = Daemon::start(&dir, command(&path));
    drop(daemon.child.stderr.take());
    // Each of these writes to the log, from both threads.
    daemon.signal(Signal::HUP);
    drop(Client::join(&path, "a"));
    drop(Client::join(&path, "b"));
    daemon.signal(Signal::TERM);
    let mut ended = None;
    eventually("it stops", || {
        ended = daemon.child.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(ended.unwrap().code(), Some(0));
}

#[test]
fn second_partywalld_on_same_path_exits_with_4() {
    let (dir, socket) = place();
    let first = Daemon::start(&dir, command(&socket));
    let (output, log) = run(command(&socket));
    assert_eq!(output.status.code(), Some(4), "{log}");
    assert!(log.contains("another broker serves") && log.contains("broker.sock"), "{log}");
    assert!(Client::join(&socket, "a").is_served(), "the first goes on");
    first.signal(Signal::INT);
    assert_eq!(first.end().0, Some(0));
}

#[test]
fn policy_is_checked_and_loaded_and_wrong_one_rejected() {
    let (dir, socket) = place();
    let policy = dir.path().join("policy.toml");
    let uid = rustix::process::geteuid().as_raw();
    std::fs::write(&policy, format!("administrators = []\n[[join]]\ndomain = 'web'\nusers = [{uid}]\n")).unwrap();
    let with_policy = || {
        let mut command = command(&socket);
        command.arg("--policy").arg(&policy);
        command
    };
    let check = || {
        let mut command = with_policy();
        command.arg("--check-policy");
        run(command)
    };
    let (output, _) = check();
    assert_eq!(output.status.code(), Some(0));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("a good policy") && said.contains("warning: nobody is an administrator"), "{said}");

    let daemon = Daemon::start(&dir, with_policy());
    let mut web = Client::join(&socket, "web");
    let denied = Client::connect(&socket).ask(&Message::Join { version: wire::VERSION, name: "db".into() });
    assert!(matches!(denied, Message::Refused { code: Refusal::Denied, .. }));

    std::fs::write(&policy, "[[join]]\ndomian = 'db'\n").unwrap();
    let (output, log) = check();
    assert_eq!(output.status.code(), Some(3));
    assert!(log.contains("line 2") && log.contains("domian"), "{log}");
    let (output, _) = run(with_policy());
    assert_eq!(output.status.code(), Some(3));

    std::fs::write(&policy, format!("administrators = []\n[[join]]\ndomain = 'db'\nusers = [{uid}]\n")).unwrap();
    assert!(web.is_served());
    // Signals may merge; this one is sent until it has been obeyed.
    eventually("the new policy is in force", || {
        daemon.signal(Signal::HUP);
        let answer = Client::connect(&socket).ask(&Message::Join { version: wire::VERSION, name: "db".into() });
        matches!(answer, Message::Joined { .. })
    });
    assert_eq!(web.refused(), Refusal::Denied);
    web.is_hung_up_on();
    daemon.signal(Signal::TERM);
    let (code, _) = daemon.end();
    assert_eq!(code, Some(0));
}

#[test]
fn wrong_policy_at_sighup_is_logged_and_old_one_kept() {
    let (dir, socket) = place();
    let policy = dir.path().join("policy.toml");
    let uid = rustix::process::geteuid().as_raw();
    std::fs::write(&policy, format!("administrators = [{uid}]\n")).unwrap();
    let mut start = command(&socket);
    start.arg("--policy").arg(&policy);
    let mut daemon = Daemon::start(&dir, start);
    std::fs::write(&policy, "administrators = 7\n").unwrap();
    daemon.signal(Signal::HUP);
    let mut log = std::io::BufReader::new(daemon.child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("kept the old policy") {
        assert_ne!(std::io::BufRead::read_line(&mut log, &mut said).unwrap(), 0, "it ended without a word");
    }
    assert!(said.contains("there is no [[join]] rule"), "what the file leaves out is logged at the start: {said}");
    assert!(Client::join(&socket, "a").is_served());
}

/// In a mount namespace, where the folder of the system's policy is this test's.
#[test]
fn policy_file_made_after_the_start_is_loaded_at_sighup() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root's broker has a policy file without being given one, and only root may mount");
        return;
    }
    let (dir, socket) = place();
    let mut unshare = Command::new("unshare");
    unshare.args([
        "--mount",
        "sh",
        "-c",
        "mount -t tmpfs none /etc && mkdir /etc/partywall && exec \"$@\"",
        "sh",
        PARTYWALLD,
    ]);
    unshare.arg("--socket").arg(&socket).stdin(Stdio::null()).stderr(Stdio::piped());
    unshare.env_remove("PARTYWALL_LOG");
    let daemon = Daemon::start(&dir, unshare);
    let denied = |answer| matches!(answer, Message::Refused { code: Refusal::Denied, .. });
    let join = || Client::connect(&socket).ask(&Message::Join { version: wire::VERSION, name: "db".into() });
    assert!(matches!(join(), Message::Joined { .. }), "root may be anything without a file");
    let file = format!("/proc/{}/root/etc/partywall/partywalld.toml", daemon.child.id());
    std::fs::write(&file, "administrators = []\n[[join]]\ndomain = 'web'\nusers = [0]\n").unwrap();
    eventually("the new file is in force", || {
        daemon.signal(Signal::HUP);
        denied(join())
    });
    std::fs::remove_file(&file).unwrap();
    daemon.signal(Signal::HUP);
    daemon.signal(Signal::TERM);
    let (code, log) = daemon.end();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("nobody is an administrator"), "{log}");
}

#[test]
fn printed_sample_policy_is_good() {
    let (dir, socket) = place();
    let mut print = command(&socket);
    print.arg("--print-sample-policy");
    let (output, _) = run(print);
    assert_eq!(output.status.code(), Some(0));
    let file = dir.path().join("sample.toml");
    std::fs::write(&file, output.stdout).unwrap();
    let mut check = command(&socket);
    check.arg("--check-policy").arg("--policy").arg(&file);
    let (output, log) = run(check);
    assert_eq!(output.status.code(), Some(0), "{log}");
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 1, "no warnings");
}

#[test]
fn output_whose_reader_left_ends_without_an_error() {
    let (dir, socket) = place();
    let policy = dir.path().join("policy.toml");
    std::fs::write(&policy, "administrators = []\n").unwrap();
    let check = ["--check-policy", "--policy", policy.to_str().unwrap()];
    for arguments in [&check[..], &["--check-policy"], &["--print-sample-policy"], &["--help"], &["--version"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command(&socket).args(arguments).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), said.as_ref()), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn json_log_has_an_object_on_each_line() {
    let (dir, socket) = place();
    let mut json = command(&socket);
    json.args(["--log-format", "json"]);
    let daemon = Daemon::start(&dir, json);
    drop(Client::join(&socket, "web"));
    daemon.signal(Signal::TERM);
    let (code, log) = daemon.end();
    assert_eq!(code, Some(0), "{log}");
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let joined = lines.iter().find(|line| line["message"] == "domain joined").unwrap();
    assert_eq!((joined["level"].as_str(), joined["domain"].as_str()), (Some("INFO"), Some("web")), "{joined}");
    assert_eq!(joined["pid"], std::process::id());
}

/// Starts a separate journal below a private /run, and the broker as systemd would: with the journal as its stderr. Each wait ends after
/// 90 seconds, and the script's last line says for what it waited.
const JOURNAL: &str = r#"
await() {
    for _ in {1..4500}; do ! "$@" || return 0; sleep 0.02; done
    echo "waited too long: $*"
    exit 99
}
journal_is_there() { [ -S /run/systemd/journal/socket ] && [ -d /run/log/journal/* ]; }
entry_is_there() { entries=$(journalctl -q --directory /run/log/journal -o json PARTYWALL_SOCKET=/run/broker) && [ -n "$entries" ]; }
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/journal /run/log/journal
/lib/systemd/systemd-journald 2> /dev/null &
await journal_is_there
exec 2> /run/stderr
export JOURNAL_STREAM=$(stat -L -c %d:%i /run/stderr)
"$1" --socket /run/broker &
await [ -S /run/broker ]
kill $!
wait $!
code=$?
await entry_is_there
printf '%s\n' "$entries"
cat /run/stderr
exit $code
"#;

/// Why the test below cannot run here, if it cannot.
fn lack_for_journal() -> Option<&'static str> {
    let has = |path: &str| Path::new(path).exists();
    if !has("/lib/systemd/systemd-journald") || !has("/usr/bin/journalctl") || !has("/etc/machine-id") {
        return Some("it needs systemd's journal (Debian: apt-get install systemd) and /etc/machine-id");
    }
    if Path::new(PARTYWALLD).starts_with("/run") {
        return Some("it hides /run, and the program is below it (set CARGO_TARGET_DIR)");
    }
    // Root of a container may lack CAP_SYS_ADMIN.
    let mut probe = Command::new("timeout");
    probe.args(["--signal=KILL", "10", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    let (output, _) = run({
        probe.args(["mount", "-t", "tmpfs", "tmpfs", "/run"]);
        probe
    });
    (!output.status.success()).then_some("it needs the right to mount (root with CAP_SYS_ADMIN)")
}

#[test]
fn log_in_the_journal_has_a_field_for_each_value() {
    if let Some(lack) = lack_for_journal() {
        // Past the harness, which keeps what tests print to itself.
        let said = format!("NOT TESTED: log_in_the_journal_has_a_field_for_each_value: {lack}\n");
        std::io::Write::write_all(&mut std::io::stderr(), said.as_bytes()).unwrap();
        return;
    }
    let mut unshare = Command::new("timeout");
    unshare.args(["--signal=KILL", "360", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    unshare.args(["bash", "-c", JOURNAL, "bash", PARTYWALLD]).env_remove("PARTYWALL_LOG").env_remove("NOTIFY_SOCKET");
    let (output, log) = run(unshare);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}{log}");
    let lines: Vec<&str> = text.lines().collect();
    let entry: serde_json::Value = serde_json::from_str(lines[0]).unwrap();
    assert_eq!(entry["SYSLOG_IDENTIFIER"], "partywalld", "{entry}");
    assert_eq!((entry["PRIORITY"].as_str(), entry["_TRANSPORT"].as_str()), (Some("6"), Some("journal")), "{entry}");
    let message = entry["MESSAGE"].as_str().unwrap();
    assert!(message.starts_with("serving socket=/run/broker policy="), "{message}");
    assert!(lines.iter().skip(1).all(|line| line.starts_with('{')), "stderr has lines too: {text}");
}

#[test]
fn wrong_command_line_or_path_is_reported_with_exit_code() {
    let (dir, socket) = place();
    for (arguments, code, words) in [
        (&["--no-such-flag"][..], 2, "--no-such-flag"),
        (&["--socket-mode", "rw"], 2, "octal"),
        (&["--log", "a=b=c"], 2, "--log"),
        (&["--policy", "/nonexistent.toml"], 3, "/nonexistent.toml"),
        (&["--policy", "/nonexistent.toml", "--check-policy"], 3, "/nonexistent.toml"),
    ] {
        let mut command = command(&socket);
        command.args(arguments);
        let (output, log) = run(command);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {log}");
        assert!(log.contains(words), "{arguments:?}: {log}");
    }
    let (output, log) = run(command(&dir.path().join("no/such/dir/b.sock")));
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains("no/such/dir"), "{log}");
    std::fs::write(&socket, "precious").unwrap();
    let (output, log) = run(command(&socket));
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains("not a socket"), "{log}");
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "precious");
}

#[test]
fn socket_has_requested_mode() {
    let (dir, socket) = place();
    let mut start = command(&socket);
    start.args(["--socket-mode", "660"]);
    let _daemon = Daemon::start(&dir, start);
    assert_eq!(socket.symlink_metadata().unwrap().permissions().mode() & 0o777, 0o660);
}

/// The smallest limit under which it starts leaves no descriptor for a session.
#[test]
fn broker_without_descriptors_refuses_sessions_and_survives() {
    let (dir, socket) = place();
    let limited = |limit: u32| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {limit} && exec \"$0\" --socket \"$1\""), PARTYWALLD]).arg(&socket);
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        command
    };
    let first = (8..64).find(|&limit| {
        let mut child = limited(limit).spawn().unwrap();
        let mut client = None;
        eventually("it starts or ends", || {
            client = Client::try_connect(&socket);
            client.is_some() || child.try_wait().unwrap().is_some()
        });
        // The broker may still fail after it has made its socket: it has started when it refuses a client.
        let started = client.and_then(|client| client.receive()).is_some();
        child.kill().unwrap();
        child.wait().unwrap();
        let _ = std::fs::remove_file(&socket);
        started
    });
    let limit = first.expect("it starts with 64 descriptors");
    // It has no descriptor to say that it is ready with, either.
    let daemon = Daemon::spawn(&dir, limited(limit));
    eventually("it serves", || Client::try_connect(&socket).is_some());
    for _ in 0..50 {
        let client = Client::connect(&socket);
        assert_eq!(client.refused(), Refusal::OutOfResources);
        client.is_hung_up_on();
    }
    daemon.signal(Signal::TERM);
    let (code, log) = daemon.end();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("turned away"), "{log}");
}

#[test]
fn broker_children_ignore_signals_and_end_with_broker() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("b.sock");
    let mut daemon = Daemon::start(&dir, command(&path));
    let _client = Client::join(&path, "a");
    let below = children(daemon.child.id());
    assert_eq!(below.len(), 1, "one process makes all others");
    // The kernel promises a whole list only while all children are stopped (proc(5)).
    let mut made = Vec::new();
    eventually("one reads the client's session", || {
        made = children(below[0]);
        !made.is_empty()
    });
    let all: Vec<u32> = below.into_iter().chain(made).collect();
    for process in &all {
        // As a terminal or a service manager may.
        kill_process(Pid::from_raw(*process as i32).unwrap(), Signal::TERM).unwrap();
        kill_process(Pid::from_raw(*process as i32).unwrap(), Signal::INT).unwrap();
    }
    assert!(Client::join(&path, "b").is_served());
    daemon.child.kill().unwrap();
    eventually("they have ended", || all.iter().all(|process| !is_running(*process)));
}

#[test]
fn event_loop_and_calm_readers_run_at_raised_priority() {
    use rustix::process::{getpriority_process, setpriority_process};
    // For Linux, "this process" is the thread here, which ends at once.
    if std::thread::spawn(|| setpriority_process(None, -20)).join().unwrap().is_err() {
        eprintln!("SKIPPED: needs CAP_SYS_NICE");
        return;
    }
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("b.sock");
    let daemon = Daemon::start(&dir, command(&path));
    let mut client = Client::join(&path, "a");
    let nice = |process: u32| getpriority_process(Pid::from_raw(process as i32)).unwrap();
    assert_eq!(nice(daemon.child.id()), -20);
    let may_run_in_real_time =
        Command::new("chrt").args(["--rr", "1", "true"]).status().is_ok_and(|status| status.success());
    if may_run_in_real_time {
        assert_eq!(policy(daemon.child.id()), ROUND_ROBIN);
    } else {
        eprintln!("SKIPPED in part: this system permits no real time");
    }
    let spawner = children(daemon.child.id())[0];
    assert_eq!((nice(spawner), policy(spawner)), (0, ORDINARY), "works for all users");
    // A child may end meanwhile: the spawner makes a reader by a process between.
    let reads = |process: &u32| {
        std::fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name.starts_with("partywall-read"))
    };
    let mut reader = 0;
    eventually("the reader of a user who asks for little runs at raised priority", || {
        let found = children(spawner).into_iter().find(reads);
        reader = found.unwrap_or_default();
        found.is_some_and(|reader| (nice(reader), policy(reader)) == (-20, ORDINARY))
    });
    eventually("the reader of a user who asks without pause runs at the ordinary priority", || {
        for _ in 0..200 {
            client.tell(&Message::Ping {}, &[]);
        }
        for _ in 0..200 {
            assert!(client.receive().is_some());
        }
        nice(reader) == 0
    });
    eventually("it is raised again when its user is calm", || {
        // A request every 2 ms can be as much as a reader without optimisation may use.
        std::thread::sleep(std::time::Duration::from_millis(20));
        client.is_served() && nice(reader) == -20
    });
}

#[test]
fn machines_thread_has_slices_as_short_as_readers() {
    let dir = TempDir::new().unwrap();
    let [path, policy] = ["b.sock", "policy.toml"].map(|name| dir.path().join(name));
    // Nobody answers there, and the thread asks again and again.
    let entry = "[[machine]]\nname = \"a\"\nmonitor = \"/nowhere/monitor\"\nport = \"/nowhere/port\"\n";
    std::fs::write(&policy, entry).unwrap();
    let mut command = command(&path);
    command.arg("--policy").arg(&policy);
    let daemon = Daemon::start(&dir, command);
    let process = daemon.child.id();
    let Some(usual) = slice("/proc/self") else {
        eprintln!("SKIPPED: this kernel does not show the slices of threads");
        return;
    };
    let _client = Client::join(&path, "a");
    let spawner = children(process)[0];
    let mut short = usual.clone();
    eventually("a reader has asked for its slice", || {
        short = children(spawner).iter().find_map(|reader| slice(&format!("/proc/{reader}"))).unwrap_or_default();
        // Kernels before 6.12 take no notice.
        !short.is_empty() && (short != usual || !grants_slices())
    });
    eventually("the thread of the machines has asked for as short a slice", || {
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        tasks.flatten().map(|task| task.path().display().to_string()).any(|task| {
            let name = std::fs::read_to_string(format!("{task}/comm")).unwrap_or_default();
            name == "machines\n" && slice(&task).is_some_and(|slice| slice == short)
        })
    });
}

/// The slice of a thread in nanoseconds, as the kernel shows it.
fn slice(task: &str) -> Option<String> {
    let shown = std::fs::read_to_string(format!("{task}/sched")).ok()?;
    let line = shown.lines().find(|line| line.starts_with("se.slice"))?;
    line.rsplit_once(':').map(|(_, slice)| slice.trim().to_owned())
}

/// Whether the kernel lets a thread choose its slice.
fn grants_slices() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(12))
}

/// Linux's numbers of the policies.
const ORDINARY: u32 = 0;
const ROUND_ROBIN: u32 = 2;

/// The scheduling policy of a process' first thread.
fn policy(process: u32) -> u32 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // The 41st field; the second, the name, ends at the last parenthesis.
    stat.rsplit_once(") ").unwrap().1.split(' ').nth(38).unwrap().parse().unwrap()
}

fn children(process: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap();
    list.split_whitespace().map(|number| number.parse().unwrap()).collect()
}

/// Zombies wait for the process that adopted them, and do nothing.
fn is_running(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn refused_connects_in_a_loop_do_not_fill_log() {
    let dir = TempDir::new().unwrap();
    let (path, policy) = (dir.path().join("b.sock"), dir.path().join("policy.toml"));
    std::fs::write(&policy, "administrators = []").unwrap();
    let mut command = command(&path);
    command.arg("--policy").arg(&policy);
    let mut daemon = Daemon::start(&dir, command);
    // The log is read at the same time, so that a broker that writes more is not blocked.
    let mut stderr = daemon.child.stderr.take().unwrap();
    let log = std::thread::spawn(move || {
        let mut log = String::new();
        stderr.read_to_string(&mut log).map(|_| log)
    });
    for _ in 0..2000 {
        assert_eq!(Client::connect(&path).refused(), Refusal::Denied);
    }
    kill_process(Pid::from_child(&daemon.child), Signal::TERM).unwrap();
    let log = log.join().unwrap().unwrap();
    let lines = log.lines().filter(|line| line.contains("session refused")).count();
    assert!((1..400).contains(&lines), "{lines} lines");
}
