//! Live migration: a guest sends a long stream to its neighbour, through memory, answers its calls by a server that has several threads, and
//! answers its datagrams. It is migrated to another host, which is joined to the first by a link, where all of them go on by the network, and
//! back, where they go on by memory. On each way the source's broker is killed after the machine has released its windows, and once the agent
//! in the machine too.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, GuestOptions, ImageOptions, Network, Running};
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{ChildStderr, Stdio};
use std::time::{Duration, Instant};
use world::{HANG, Inside, Process, World, preload_library, processes, python};

const LIBRARY: &str = "libpartywall_preload.so";
/// The log lines of the library when a connection has its rings, and when it has unmapped them.
const ON_RING: &str = "has a ring";
const UNMAPPED: &str = "the rings are unmapped";
/// What the link between the hosts carries, in megabits a second.
const LINK: u32 = 1000;
/// Where a host waits for a machine.
const ARRIVAL: u16 = 4444;
/// The exit code of our commands when a machine at one end of their channel is being migrated.
const MOVED: i32 = 4;
/// Datagrams go by rings between the machines where they are neighbours.
const NETWORKS: &str = "
[[network]]
machine = 'a'
addresses = ['10.77.0.1']
[[network]]
machine = 'b'
addresses = ['10.77.0.2']
";
/// The log line of the library when a flow of datagrams has a ring.
const FLOW_ON_RING: &str = "go by a ring";
const DATAGRAM_PORT: u16 = 7010;
/// The services of the channels that [`IdleChannels`] opens to the migrating machine.
const FROM_NEIGHBOUR: &str = "kept";
const FROM_HOST: &str = "hosted";

#[test]
fn stream_survives_migration_there_and_back() {
    let network = Network::new().unwrap();
    if network.host().is_none() {
        println!("skipped: a migration between two hosts, since only root can put three machines on a network");
        return;
    }
    let far_network = network.joined(LINK).unwrap();
    let image = || {
        let image = python::with(ImageOptions::default()).program(preload_library(), LIBRARY).module("udp_diag");
        ["redis-server", "redis-cli"]
            .into_iter()
            .fold(image, |image, name| image.program(format!("/usr/bin/{name}"), name))
    };
    let (mut home, mut far) = (World::with("migration", image()), World::with("migration-far", image()));
    for world in [&home, &far] {
        world.set_policy(NETWORKS);
    }
    let options = || GuestOptions::new("a").memory(512);
    let [a, b] = home
        .boot_as([options().network(&network).unwrap(), GuestOptions::new("b").memory(512).network(&network).unwrap()]);
    let said = home.attach_migratable(&a);
    assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), home.log());
    let said = home.attach(&b);
    assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), home.log());
    home.wait_ready(2);
    assert_eq!([mobility(&home, "a"), mobility(&home, "b")], ["migratable", "fixed"]);
    let refused = home.partywall(&["vm", "detach", "b", "--for-migration"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status == 3 && why.contains("nvdimm"), "{why}");

    begin_stream(&a, &b);
    begin_calls(&a, &b);
    begin_datagrams(&a, &b);
    wait_for(&a, "/tmp/send.log", ON_RING);
    wait_for(&b, "/tmp/calls.log", ON_RING);

    // There is no destination: the machine stays, with its windows.
    let idle = IdleChannels::open(&home, &a, &b);
    let failed = home.partywall(&["vm", "migrate", "a", "--to", "unix:/nonexistent/socket"]);
    let why = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(failed.status != 0 && why.contains("has its windows again"), "{why}{}", explain(&home, &a, &b));
    home.wait_ready(2);
    idle.moved(&a);
    file_goes(&b, &a);
    wait_for(&a, "/tmp/send.log", UNMAPPED);
    old_connections_are_on_rings(&a, &b, 2);
    datagrams_are_on_rings(&a, &b, 2);
    new_connection_has_a_ring(&a, &b, "after a migration that failed");

    let idle = IdleChannels::open(&home, &a, &b);
    let away = migrate(MigratedBy::LibvirtsSteps, &mut home, a, &b, (&far, &far_network), options);
    far.wait_ready(1);
    idle.moved(&away);
    assert_eq!(mobility(&far, "a"), "migratable");
    flows(&b);

    let back = migrate(MigratedBy::OurCommand, &mut far, away, &b, (&home, &network), options);
    home.wait_ready(2);
    file_goes(&b, &back);
    old_connections_are_on_rings(&back, &b, 3);
    datagrams_are_on_rings(&back, &b, 3);
    new_connection_has_a_ring(&back, &b, "after its return");
    flows(&b);
    end_stream(&back, &b);
    end_calls(&b);
    end_datagrams(&b);
    println!("{}", time_line(&b.sh("cat /tmp/line")));
    machine_migrated_without_detach_gets_windows(back, (&far, &far_network), options);
}

/// A tool migrates the machine without a word to its broker, so the guest brings devices that the destination does not have.
fn machine_migrated_without_detach_gets_windows(
    leaves: Guest,
    (to, network): (&World, &Network),
    options: impl Fn() -> GuestOptions,
) {
    let uri = format!("tcp:{}:{}", network.host().unwrap(), ARRIVAL + 1);
    let arrives = to.expect(options().arrives_on(network), &uri, &leaves);
    have_qemu_migrate(&leaves, &uri);
    drop(leaves);
    arrives.wait_arrival().unwrap();
    // Of another size than those that the guest brings, so that none lies where one of those was.
    let said = to.attach_migratable_with(&arrives, "32M");
    assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), to.log());
    to.wait_ready(1);
    let log = arrives.sh("tail -n 12 /tmp/agent.log");
    assert!(log.contains(&format!("is there size={}", 30 << 20)) && log.contains("were removed"), "{log}");
    assert_eq!(arrives.sh("ls /dev/dax* | wc -l"), "2", "{log}");
}

/// Channels of the library to the migrating machine without traffic: one from its neighbour, one from the host.
struct IdleChannels<'a> {
    neighbour: Running<'a>,
    host: Process,
    said_by_host: BufReader<ChildStderr>,
}

impl<'a> IdleChannels<'a> {
    fn open(home: &World, a: &Guest, b: &'a Guest) -> Self {
        a.sh("[ -e /tmp/hold ] || mkfifo /tmp/hold");
        for service in [FROM_NEIGHBOUR, FROM_HOST] {
            a.sh(&format!(
                "rm -f /tmp/{service}.out; (exec 3<> /tmp/hold; partywall --domain a -v cat -l {service} <&3; echo ended with $?) \
                 > /tmp/{service}.out 2>&1 & true"
            ));
            b.wait_service(service);
        }
        let mut neighbour = b.begin(&format!("exec partywall --domain b -v cat a:{FROM_NEIGHBOUR} 2>&1"));
        neighbour.wait_for("connected to", HANG).unwrap();
        let mut host = home.command(&["--domain", "h", "-v", "cat", &format!("a:{FROM_HOST}")]);
        let mut host = Process(host.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
        let mut said_by_host = BufReader::new(host.0.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("connected to") {
            line.clear();
            assert_ne!(said_by_host.read_line(&mut line).unwrap(), 0, "the host's program has ended");
        }
        for service in [FROM_NEIGHBOUR, FROM_HOST] {
            wait_for(a, &format!("/tmp/{service}.out"), "connection from");
        }
        Self { neighbour, host, said_by_host }
    }

    /// Both channels have ended at both ends, and each program was told where to connect again.
    fn moved(mut self, a: &Guest) {
        let again = |service: &str| format!("connect again to `a:{service}`");
        let done = self.neighbour.wait(HANG).unwrap();
        let said = done.text();
        assert!(done.status == MOVED && said.contains(&again(FROM_NEIGHBOUR)), "neighbour: {} {said}", done.status);
        let (status, mut said) = (self.host.0.wait().unwrap(), String::new());
        self.said_by_host.read_to_string(&mut said).unwrap();
        assert!(status.code() == Some(MOVED) && said.contains(&again(FROM_HOST)), "host: {status} {said}");
        for service in [FROM_NEIGHBOUR, FROM_HOST] {
            let file = format!("/tmp/{service}.out");
            wait_for(a, &file, "ended with");
            let said = a.sh(&format!("cat {file}"));
            let says_so = said.contains("being migrated") && said.contains("accept the next");
            assert!(says_so && said.contains(&format!("ended with {MOVED}")), "{service}: {said}");
        }
    }
}

/// A new channel to the machine carries a file.
fn file_goes(from: &Guest, to: &Guest) {
    let receiver = to.begin("exec partywall --domain a cat -l again < /dev/null > /tmp/again");
    from.wait_service("again");
    from.sh("[ -e /tmp/file ] || dd if=/dev/urandom of=/tmp/file bs=100k count=31 2>/dev/null");
    from.sh("timeout 60 partywall --domain b cat a:again < /tmp/file");
    let done = receiver.wait(HANG).unwrap();
    assert_eq!(done.status, 0, "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(to.sh("sha256sum < /tmp/again"), from.sh("sha256sum < /tmp/file"));
}

/// A machine's line of the broker's list; `null` if the broker does not know the machine.
fn listed(world: &World, name: &str) -> serde_json::Value {
    let said = world.partywall(&["vm", "list", "--json"]);
    let lines: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap_or_default();
    let all = lines.as_array().cloned().unwrap_or_default();
    all.into_iter().find(|line| line["name"] == name).unwrap_or_default()
}

fn mobility(world: &World, name: &str) -> String {
    listed(world, name)["mobility"].as_str().unwrap_or_default().to_owned()
}

/// Whether a machine's agent is there, and both sides see the machine's windows, except for those of a machine that is leaving.
fn is_ready(world: &World, name: &str) -> bool {
    let line = listed(world, name);
    line["agent"] == true && line["ready"].as_u64() >= Some(2)
}

fn explain(world: &World, a: &Guest, b: &Guest) -> String {
    format!(
        "{}\na: {}\nb: {}",
        world.log(),
        a.sh("tail -n 30 /tmp/agent.log /tmp/send.log /tmp/send.out"),
        b.sh("tail -n 30 /tmp/agent.log /tmp/receive.log /tmp/receive.out")
    )
}

/// Starts a stream of some hundred kilobytes a second from `a` to `b`, which goes on until `/tmp/stop` is there.
fn begin_stream(a: &Guest, b: &Guest) {
    let run = "partywall run --quiet --policy after=4,bytes=1K partywall tcp-cat";
    b.sh(&format!(
        "PARTYWALL_PRELOAD_LOG=/tmp/receive.log {run} -l 0.0.0.0:7000 --output /tmp/got > /tmp/receive.out 2>&1 & true"
    ));
    wait_for(b, "/tmp/receive.out", ":7000");
    b.sh("(while [ ! -e /tmp/stop ]; do echo $(cut -d ' ' -f 1 /proc/uptime) $(stat -c %s /tmp/got); usleep 200000; done) > /tmp/line 2>&1 & true");
    a.sh("dd if=/dev/urandom of=/tmp/piece bs=1k count=16 2>/dev/null");
    let source = "n=0; while [ ! -e /tmp/stop ]; do echo $n; cat /tmp/piece; n=$((n+1)); usleep 50000; done";
    a.sh(&format!(
        "({source}) 2>/dev/null | tee /tmp/sent | PARTYWALL_PRELOAD_LOG=/tmp/send.log {run} --input /proc/self/fd/0 10.77.0.2:7000 \
         > /tmp/send.out 2>&1 & true"
    ));
}

fn end_stream(a: &Guest, b: &Guest) {
    a.sh("touch /tmp/stop");
    let has_ended = wait_end(b, "partywall", "tcp-cat");
    b.sh("touch /tmp/stop");
    assert!(has_ended, "{}{}", a.sh("cat /tmp/send.log"), b.sh("cat /tmp/receive.log"));
    let sums = [a.sh("sha256sum < /tmp/sent; wc -c < /tmp/sent"), b.sh("sha256sum < /tmp/got; wc -c < /tmp/got")];
    let logs =
        || format!("{}\n{}", a.sh("cat /tmp/send.out /tmp/send.log"), b.sh("cat /tmp/receive.out /tmp/receive.log"));
    assert_eq!(sums[0], sums[1], "{}", logs());
    assert!(!logs().contains("reset"), "{}", logs());
}

/// Starts a server in `a`, and a client in `b` with one connection, which calls until `/tmp/stop` is there. Each call is a number higher.
fn begin_calls(a: &Guest, b: &Guest) {
    let run = "partywall run --quiet --policy after=4,bytes=1K";
    a.sh(&format!(
        "PARTYWALL_PRELOAD_LOG=/tmp/redis.log {run} redis-server --bind 0.0.0.0 --protected-mode no --save '' \
         > /tmp/redis.out 2>&1 & true"
    ));
    wait_for(a, "/tmp/redis.out", "Ready to accept connections");
    let threads = a.sh("grep -h ^Threads $(grep -l redis-server /proc/[0-9]*/maps | sed s/maps/status/) | tr -dc 0-9");
    assert!(threads.parse::<u32>().unwrap() > 1, "the server has {threads} threads");
    b.sh(&format!(
        "(while [ ! -e /tmp/stop ]; do echo incr calls; usleep 200000; done) \
         | PARTYWALL_PRELOAD_LOG=/tmp/calls.log {run} redis-cli -h 10.77.0.1 > /tmp/calls.out 2>&1 & true"
    ));
}

/// Each call has had its answer, over one connection.
fn end_calls(b: &Guest) {
    assert!(wait_end(b, "redis-cli", "10.77.0.1"), "{}", b.sh("tail -n 40 /tmp/calls.out /tmp/calls.log"));
    let answers = b.sh("cat /tmp/calls.out");
    let wanted: Vec<String> = (1..=answers.lines().count()).map(|n| n.to_string()).collect();
    assert!(answers.lines().eq(wanted.iter().map(String::as_str)), "{answers}");
    // Its own connection is the second.
    let counted = b.sh("redis-cli -h 10.77.0.1 info stats | grep total_connections_received");
    assert_eq!(counted.trim().split_once(':').unwrap().1, "2", "{}", b.sh("cat /tmp/calls.log"));
}

/// Starts a server in `a` that sends datagrams back, and a client in `b`.
fn begin_datagrams(a: &Guest, b: &Guest) {
    let programs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    for (guest, name) in [(a, "datagram_echo.py"), (b, "datagram_asker.py")] {
        python::bring(guest);
        guest.put(&std::fs::read(programs.join(name)).unwrap(), &format!("/tmp/{name}"), 0o644).unwrap();
    }
    let python = python::command("partywall run --quiet --move after=4");
    a.sh(&format!(
        "PARTYWALL_PRELOAD_LOG=/tmp/echo.log {python} /tmp/datagram_echo.py {DATAGRAM_PORT} > /tmp/echo.out 2>&1 & true"
    ));
    wait_for(a, "/tmp/echo.out", "answers");
    b.sh(&format!(
        "PARTYWALL_PRELOAD_LOG=/tmp/asker.log {python} /tmp/datagram_asker.py 10.77.0.1 {DATAGRAM_PORT} /tmp/stop > /tmp/asker.out 2>&1 \
         & true"
    ));
    datagrams_are_on_rings(a, b, 1);
}

/// The datagrams in both directions have rings for this time.
fn datagrams_are_on_rings(a: &Guest, b: &Guest, times: u32) {
    for (guest, log) in [(b, "/tmp/asker.log"), (a, "/tmp/echo.log")] {
        let has = guest.wait_until(&format!("[ $(grep '{FLOW_ON_RING}' {log} | grep -vc 'no longer') -ge {times} ]"));
        let logs = || [(a, "/tmp/echo.log"), (b, "/tmp/asker.log")].map(|(guest, log)| guest.sh(&format!("cat {log}")));
        assert!(has, "{log}: not for the {times}. time: {}", logs().join("\n"));
    }
}

/// Datagrams may have been lost or overtaken where their way changed, as always. None has come twice or changed.
fn end_datagrams(b: &Guest) {
    assert!(wait_end(b, "python3", "datagram_asker"), "{}", b.sh("cat /tmp/asker.out /tmp/asker.log"));
    let said = b.sh("cat /tmp/asker.out");
    println!("datagrams: {said}");
    assert!(said.ends_with(", twice 0, changed 0"), "{said}\n{}", b.sh("cat /tmp/asker.log"));
}

/// Waits in a guest until no process of this program runs with this in its arguments. `false` if one goes on.
fn wait_end(guest: &Guest, program: &str, argument: &str) -> bool {
    guest.wait_until(&format!("[ -z \"${}\" ]", processes(program, argument)))
}

/// Waits in a guest until one of its files contains this.
fn wait_for(guest: &Guest, file: &str, text: &str) {
    let has = guest.wait_until(&format!("grep -q '{text}' {file} 2>/dev/null"));
    let files = || guest.sh(&format!("tail -n 40 {file} /tmp/*.out /tmp/agent.log; true"));
    assert!(has, "no {text:?} in {file}: {}", files());
}

/// The connections of the stream and of the calls have rings for this time, at both ends, and no program has made another connection.
fn old_connections_are_on_rings(a: &Guest, b: &Guest, times: u32) {
    let logs = [(a, "/tmp/send.log"), (b, "/tmp/receive.log"), (a, "/tmp/redis.log"), (b, "/tmp/calls.log")];
    for (guest, log) in logs {
        let has = guest.wait_until(&format!("[ $(grep -c '{ON_RING}' {log}) -ge {times} ]"));
        let all = || logs.map(|(guest, log)| guest.sh(&format!("tail -n 40 {log} /tmp/agent.log"))).join("\n");
        assert!(has, "{log}: not on rings for the {times}. time: {}", all());
    }
    flows(b);
}

/// The stream brings something.
fn flows(b: &Guest) {
    let had: u64 = b.sh("stat -c %s /tmp/got").trim().parse().unwrap();
    let goes_on = b.wait_until(&format!("[ $(stat -c %s /tmp/got) -ge {} ]", had + 65536));
    assert!(goes_on, "the stream stands still: {}", b.sh("tail -n 40 /tmp/receive.log"));
}

/// How a guest is migrated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MigratedBy {
    /// `partywall vm migrate`, and `partywall vm attach` where it arrives.
    OurCommand,
    /// As libvirt does it, with our command before it, and our hook at both hosts.
    LibvirtsSteps,
}

/// Migrates a guest over the link between the hosts, and attaches it where it arrives.
fn migrate(
    by: MigratedBy,
    from: &mut World,
    leaves: Guest,
    b: &Guest,
    (to, network): (&World, &Network),
    options: impl Fn() -> GuestOptions,
) -> Guest {
    let uri = format!("tcp:{}:{ARRIVAL}", network.host().unwrap());
    let arrives = to.expect(options().arrives_on(network), &uri, &leaves);
    if by == MigratedBy::OurCommand {
        let text = migrate_while_broker_dies(from, &uri, &leaves, b);
        println!("{text}");
        let downtime = text.split("QEMU stopped it for ").nth(1).and_then(|rest| rest.split(' ').next());
        assert!(downtime.and_then(|ms| ms.parse::<u64>().ok()).is_some_and(|ms| ms > 0), "{text}");
        drop(leaves);
        arrives.wait_arrival().unwrap();
        let said = to.attach_migratable(&arrives);
        assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), to.log());
        return arrives;
    }
    let said = from.partywall(&["vm", "detach", "a", "--for-migration"]);
    assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), explain(from, &leaves, b));
    broker_and_agent_die(from, &leaves);
    have_qemu_migrate(&leaves, &uri);
    call_hook(from, &leaves, "stopped end");
    assert_eq!(mobility(from, "a"), "", "the hook has detached it");
    drop(leaves);
    arrives.wait_arrival().unwrap();
    call_hook(to, &arrives, "started begin");
    let deadline = Instant::now() + HANG;
    while mobility(to, "a").is_empty() {
        let why = std::fs::read_to_string(to.path("reported")).unwrap_or_default();
        assert!(why.is_empty() && Instant::now() < deadline, "the hook has not attached it: {why}");
        std::thread::sleep(Duration::from_millis(50));
    }
    arrives
}

/// The broker of a machine that has released its windows is killed, and so is the agent in the machine. Both start again. The next broker
/// shows the machine as migrating, and the machine gets no windows.
fn broker_and_agent_die(world: &mut World, leaves: &Guest) {
    world.kill_broker();
    leaves.kill_agent();
    world.start_broker_with(NETWORKS);
    leaves.start_agent();
    let deadline = Instant::now() + HANG;
    while mobility(world, "a").is_empty() || !is_ready(world, "b") {
        assert!(Instant::now() < deadline, "the next broker does not attend to both machines: {}", world.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(mobility(world, "a"), "migrating", "the machine was about to leave: {}", world.log());
    assert_eq!(leaves.sh("ls /dev/dax* 2> /dev/null | wc -l").trim(), "0", "{}", world.log());
}

/// Runs `partywall vm migrate`. The broker is killed once the machine has released its windows, and starts again.
fn migrate_while_broker_dies(from: &mut World, uri: &str, leaves: &Guest, b: &Guest) -> String {
    let mut command = from.command(&["vm", "migrate", "a", "--to", uri]);
    let mut command = Process(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(command.0.stdout.take().unwrap());
    let (mut text, mut why) = (String::new(), String::new());
    while !text.contains("has released its windows") && lines.read_line(&mut text).unwrap() > 0 {}
    from.kill_broker();
    from.start_broker_with(NETWORKS);
    lines.read_to_string(&mut text).unwrap();
    command.0.stderr.take().unwrap().read_to_string(&mut why).unwrap();
    assert!(command.0.wait().unwrap().success(), "{text}{why}{}", explain(from, leaves, b));
    text
}

/// Has QEMU migrate a guest, as another tool would.
fn have_qemu_migrate(leaves: &Guest, uri: &str) {
    leaves.monitor_command("migrate", serde_json::json!({ "uri": uri })).unwrap();
    let deadline = Instant::now() + HANG;
    loop {
        let state = leaves.monitor_command("query-migrate", serde_json::json!({})).unwrap();
        match state["status"].as_str() {
            Some("completed") => break,
            Some("failed" | "cancelled") => panic!("{state}"),
            _ => assert!(Instant::now() < deadline, "{state}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Calls the hook for libvirt, as libvirt does, with the guest's sockets in a folder of the test. What it reports is in the file `reported`.
fn call_hook(world: &World, guest: &Guest, operation: &str) {
    let programs = world.command(&[]).get_program().to_owned();
    let folder = std::path::Path::new(&programs).parent().unwrap().to_owned();
    let path =
        format!("{}:{}:{}", world.path("").display(), folder.display(), std::env::var("PATH").unwrap_or_default());
    let logger = world.path("logger");
    std::fs::write(&logger, format!("#!/bin/sh\necho \"$@\" > {}\n", world.path("reported").display())).unwrap();
    std::fs::set_permissions(&logger, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let monitor = world.port("a").with_file_name("monitor.sock");
    let _ = std::fs::remove_file(&monitor);
    std::os::unix::fs::symlink(guest.monitor(), monitor).unwrap();
    let said = std::process::Command::new("sh")
        .arg(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/libvirt-hook.sh"))
        .args(["a"].into_iter().chain(operation.split(' ')).chain(["-"]))
        .env("PATH", path)
        .env("PARTYWALL_BROKER", world.path("broker.sock"))
        .env("PARTYWALL_LIBVIRT_SOCKETS", world.path(""))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(said.status.success(), "{operation}: {}", String::from_utf8_lossy(&said.stderr));
}

fn new_connection_has_a_ring(a: &Guest, b: &Guest, when: &str) {
    b.sh("rm -f /tmp/new.out; PARTYWALL_PRELOAD_LOG=/tmp/take.log partywall run --quiet --policy after=4,bytes=1K partywall tcp-cat -l 0.0.0.0:7001 --output /tmp/new \
          > /tmp/new.out 2>&1 & true");
    wait_for(b, "/tmp/new.out", ":7001");
    a.sh(
        "rm -f /tmp/new.log /tmp/new.end; ((n=0; while ! grep -q 'has a ring' /tmp/new.log 2>/dev/null && [ $n -lt 3000 ]; do cat /tmp/piece; \
         n=$((n+1)); usleep 20000; done) | PARTYWALL_PRELOAD_LOG=/tmp/new.log partywall run --quiet --policy after=4,bytes=1K \
         partywall tcp-cat --input /proc/self/fd/0 10.77.0.2:7001 > /tmp/new.err 2>&1; echo ended > /tmp/new.end) & true",
    );
    let has_ended = a.wait_until("[ -s /tmp/new.end ]");
    let log = a.sh("cat /tmp/new.log /tmp/new.err");
    let more = || (a.sh("tail -n 20 /tmp/agent.log; partywall list"), b.sh("cat /tmp/take.log"));
    assert!(has_ended && log.contains(ON_RING), "{when}: {log}\n{:?}", more());
}

/// The bytes that have arrived over time: kilobytes a second, and the longest pause.
fn time_line(said: &str) -> String {
    let point = |line: &str| {
        let (at, size) = line.split_once(' ')?;
        Some((at.parse::<f64>().ok()?, size.parse::<u64>().ok()?))
    };
    let points: Vec<(f64, u64)> = said.lines().filter_map(point).collect();
    let (mut longest, mut since) = (0.0f64, points.first().map_or(0.0, |point| point.0));
    let mut text = String::new();
    for pair in points.windows(2) {
        let ((from, had), (to, has)) = (pair[0], pair[1]);
        if has > had {
            longest = longest.max(to - since);
            since = to;
        }
        let rate = has.saturating_sub(had) as f64 / 1e3 / (to - from).max(0.01);
        text.push_str(&format!("{to:8.2} s {rate:9.0} kB/s\n"));
    }
    format!("{text}longest pause: {longest:.2} s")
}
