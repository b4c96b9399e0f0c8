//! Unmodified programs in virtual machines: redis in one guest, its clients in another, in the same one and on the host, all under
//! `partywall run`; connections that go to another program; and what becomes of connections when a program, the broker, an agent or a
//! machine ends.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod agent_dies;
mod as_tcp;
mod crowd;
mod shown;
#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, GuestOptions, ImageOptions, Network};
use std::process::Stdio;
use std::time::Instant;
use world::{HANG, Inside, World, preload_library, processes, python, skipped};

const LIBRARY: &str = "libpartywall_preload.so";
/// Runs a program with the library, so that its connections move to rings soon.
const RUN: &str = "partywall run --quiet --move after=4,bytes=1K";
/// The log line of the library when a connection has its rings.
const ON_RING: &str = "has a ring";
/// And when the way to the peer's machine is gone.
const LINK_LOST: &str = "the way to the peer's machine was lost";

#[test]
fn unmodified_programs_in_guests_meet_by_memory() {
    for name in ["redis-server", "redis-benchmark", "redis-cli"] {
        let there = std::path::Path::new("/usr/bin").join(name).exists();
        assert!(there, "{name} is missing (scripts/setup.sh programs brings it)");
    }
    let network = Network::new().unwrap();
    let image = ["redis-server", "redis-benchmark", "redis-cli"]
        .into_iter()
        .fold(ImageOptions::default(), |image, name| image.program(format!("/usr/bin/{name}"), name))
        .program("/usr/bin/setpriv", "setpriv")
        .program(preload_library(), LIBRARY);
    let image = agent_dies::with(python::with(image)).module("unix_diag");
    let mut world = World::with("sockets", image);
    let [a, b] = world.boot_as(["a", "b"].map(|name| GuestOptions::new(name).memory(512).network(&network).unwrap()));
    let said = doctor(&a);
    for part in ["fail reachable: none on", "ok agent: runs as process", "warn windows: not found"] {
        assert!(said.contains(part), "before the machine is attached, {part} is not in\n{said}");
    }
    for guest in [&a, &b] {
        let said = world.attach(guest);
        assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), world.log());
    }
    world.wait_ready(2);
    let said = doctor(&a);
    for part in ["ok reachable: answers on", "ok agent: runs as process", "ok windows: 4 (2 to write, towards b, host)"]
    {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
    assert!(!said.contains("warn"), "connections of the program would move, and doctor says\n{said}");
    let translates = translate(&network, &a, &b);
    record_numbers(&a);
    serve(&a);
    for guest in [&a, &b] {
        guest.sh("dd if=/dev/urandom of=/tmp/file bs=100k count=21 2>/dev/null; sha256sum < /tmp/file > /tmp/sum");
    }

    file_survives_the_way_there_and_back(&b, "10.77.0.1");
    file_survives_the_way_there_and_back(&a, "127.0.0.1");
    host_meets_guest(&world, &network);
    assert_eq!(agent_reads_record(&a), "yes", "the numbers of the connections so far");
    assert_eq!(agent_reads_record(&b), "no");
    if translates {
        client_behind_masquerade_meets_guest(&b);
        client_of_forwarded_address_meets_guest(&world, &b);
    }
    shown::commands_show_connection_between_guests(&world, &a, &b);
    for guest in [&a, &b] {
        python::bring(guest);
    }
    crowd::sleeping_server_serves_hundreds_at_once(&world, &network, &a, &b);
    as_tcp::connections_do_what_they_do_over_tcp(&world, &a, &b);
    connection_is_passed_to_another_program(&a, &b);
    connection_goes_through_exec(&a, &b);
    program_of_another_user_needs_socket(&b);
    program_is_killed(&a, &b, KilledEnd::Receiver);
    program_is_killed(&a, &b, KilledEnd::Sender);
    b.kill_agent();
    agent_dies::repair_mode_of_killed_agent_ends(&world, &a, &b);
    agent_is_killed(&a, &b);
    broker_is_killed(&mut world, &a, &b);
    machine_is_killed(&world, &a, b);
}

/// The findings of `partywall doctor -- PROGRAM` in a guest, a line for each check.
fn doctor(guest: &Guest) -> String {
    let said = guest.run(&["partywall", "doctor", "--json", "--", "redis-cli"]).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    let word = |check: &serde_json::Value, part: &str| check[part].as_str().unwrap_or_default().to_owned();
    let line = |check| format!("{} {}: {}\n", word(check, "status"), word(check, "name"), word(check, "found"));
    report["checks"].as_array().unwrap().iter().map(line).collect()
}

/// Has the kernel of one of two machines record sequence numbers (protocol T3.11). That of the other reports them in repair mode, and they match.
fn record_numbers(guest: &Guest) {
    let said = guest.sh(
        "mount -t bpf -o mode=0700 bpf /sys/fs/bpf && mount -t cgroup2 cgroup2 /sys/fs/cgroup && partywall numbers on",
    );
    assert!(said.starts_with("on: "), "{said}");
}

/// Whether the agent of a machine has opened a record, which it does when it needs one.
fn agent_reads_record(guest: &Guest) -> String {
    let look = "for process in /proc/[0-9]*; do if [ \"$(cat $process/comm 2>/dev/null)\" = partywall-agent ]; then \
                ls -l $process/fd | grep -q bpf-map && echo yes || echo no; fi; done";
    guest.sh(look).trim().to_owned()
}

/// Starts redis in a guest.
fn serve(guest: &Guest) {
    guest.sh("PARTYWALL_PRELOAD_LOG=/tmp/server.log partywall run --quiet --move after=4,bytes=1K redis-server --bind 0.0.0.0 --protected-mode no --save '' > /tmp/redis.log 2>&1 & true");
    let deadline = Instant::now() + HANG;
    while !guest.sh("cat /tmp/redis.log").contains("Ready to accept connections") {
        assert!(Instant::now() < deadline, "{}", guest.sh("cat /tmp/redis.log"));
    }
}

/// A line that runs a client of redis, whose library writes to `/tmp/client.log`.
fn client(line: &str) -> String {
    format!("rm -f /tmp/client.log; PARTYWALL_PRELOAD_LOG=/tmp/client.log {RUN} {line}")
}

fn file_survives_the_way_there_and_back(guest: &Guest, server: &str) {
    guest.sh(&client(&format!("redis-cli -h {server} -x set file < /tmp/file > /dev/null")));
    assert!(
        guest
            .sh(&format!("redis-cli -h {server} get file | head -c 2150400 | sha256sum | cmp - /tmp/sum && echo same"))
            .contains("same")
    );
    // Once the connection has rings, the answer, which is as long as the file, comes by them.
    let calls = format!(
        "n=0; while ! grep -q '{ON_RING}' /tmp/client.log && [ $n -lt 3000 ]; do echo set key$n $n; usleep 10000; n=$((n+1)); done; \
         echo get file"
    );
    let run = format!("PARTYWALL_PRELOAD_LOG=/tmp/client.log {RUN}");
    let line =
        format!("rm -f /tmp/client.log; touch /tmp/client.log; ({calls}) | {run} redis-cli -h {server} > /tmp/answers");
    assert_eq!(guest.begin(&line).wait(HANG).unwrap().status, 0);
    let same = guest.sh("tail -c 2150401 /tmp/answers | head -c 2150400 | sha256sum | cmp - /tmp/sum && echo same");
    let log = guest.sh("cat /tmp/client.log");
    assert!(same.contains("same") && log.contains(ON_RING), "{server}: {same}{log}");
}

fn host_meets_guest(world: &World, network: &Network) {
    if network.host().is_none() {
        skipped("a program of the host beside guests, since only root can put it on their network");
        return;
    }
    let log = world.path("client.log");
    let mut command = network.command(world.command(&[]).get_program());
    command.arg("--broker").arg(world.path("broker.sock"));
    command.args(["run", "--quiet", "--move", "after=4,bytes=1K", "redis-benchmark"]);
    command.args(["-h", "10.77.0.1", "-n", "3000", "-c", "2", "-t", "set,get", "-d", "2000", "-q"]);
    command.env("PARTYWALL_PRELOAD_LOG", &log).stdin(Stdio::null());
    let done = command.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains(ON_RING), "{log}{}", world.log());
}

/// An address of guest `a` that guest `b` reaches only by way of the host, which translates the addresses of `b` to this one.
const BEHIND: &str = "10.78.0.1";
const TRANSLATED: &str = "10.78.0.254";
/// A port of the host on the guests' network that leads to redis at that address, as a published port leads to a container.
const HOST: &str = "10.77.0.254";
const FORWARDED: u16 = 7379;

/// Gives guest `a` such an address. `false`, said aloud, where the host cannot translate.
fn translate(network: &Network, a: &Guest, b: &Guest) -> bool {
    let line = format!(
        "ip address add {TRANSLATED}/24 dev bridge0 && cd /proc/sys/net/ipv4 && echo 1 > ip_forward && \
         echo 0 > conf/all/send_redirects && echo 0 > conf/bridge0/send_redirects && \
         export PATH=$PATH:/usr/sbin && iptables -t nat -A POSTROUTING -d {BEHIND} -j MASQUERADE && \
         iptables -t nat -A PREROUTING -d {HOST} -p tcp --dport {FORWARDED} -j DNAT --to-destination {BEHIND}:6379"
    );
    if network.host().is_none() || !network.command("sh").args(["-c", &line]).output().unwrap().status.success() {
        skipped("a client behind a masquerade, since the host's `iptables` cannot translate on this network");
        return false;
    }
    a.sh(&format!("ip address add {BEHIND}/24 dev eth0"));
    b.sh(&format!("ip route add {BEHIND} via {HOST}"));
    true
}

fn client_behind_masquerade_meets_guest(b: &Guest) {
    let seen = b.sh(&format!("redis-cli -h {BEHIND} client list"));
    assert!(seen.contains(&format!("addr={TRANSLATED}:")), "not translated: {seen}");
    let (answers, log) = pings(b, BEHIND, 900);
    assert!(log.contains(ON_RING), "{log}{answers}");
}

fn client_of_forwarded_address_meets_guest(world: &World, b: &Guest) {
    world.set_policy(&format!("[[forward]]\naddresses = ['{HOST}:{FORWARDED}']\nto = '{BEHIND}:6379'\n"));
    let deadline = Instant::now() + HANG;
    loop {
        let (answers, log) = pings(b, &format!("{HOST} -p {FORWARDED}"), 150);
        if log.contains(ON_RING) {
            return;
        }
        // The policy was not in force when it connected.
        assert!(Instant::now() < deadline, "{log}{answers}{}", world.log());
    }
}

/// A client calls redis at this address until its connection has a ring, at most `most` times, and twice more. Each call must be answered.
/// Returns the answers, and what the library has logged.
fn pings(b: &Guest, at: &str, most: u32) -> (String, String) {
    let calls = format!(
        "n=0; while ! grep -q '{ON_RING}' /tmp/client.log && [ $n -lt {most} ]; do echo ping; usleep 100000; n=$((n+1)); done; \
         echo ping; echo ping; echo $((n+2)) > /tmp/pings"
    );
    let run = format!("PARTYWALL_PRELOAD_LOG=/tmp/client.log {RUN}");
    let client = b.begin(&format!("rm -f /tmp/client.log; touch /tmp/client.log; ({calls}) | {run} redis-cli -h {at}"));
    let answers = client.wait(HANG).unwrap().text();
    let calls = b.sh("cat /tmp/pings");
    assert_eq!(answers.matches("PONG").count().to_string(), calls.trim(), "{answers}");
    (answers, b.sh("cat /tmp/client.log"))
}

/// The condition that three connections of a client have had rings.
fn three_rings() -> String {
    format!("[ $(cat /tmp/client.log 2>/dev/null | grep -c '{ON_RING}') -ge 3 ]")
}

/// Keeps some connections of guest `b` to redis in `a` busy until told to end, and `during` while they are on rings. One of them does not end before
/// that. Returns what its library has logged.
fn while_busy(b: &Guest, during: impl FnOnce()) -> String {
    b.sh("rm -f /tmp/stop /tmp/busy.log /tmp/client.log /tmp/endless.*");
    let run = format!("{RUN} redis-benchmark -h 10.77.0.1 -d 3000 -q");
    let running = b.begin(&format!(
        "while [ ! -e /tmp/stop ]; do PARTYWALL_PRELOAD_LOG=/tmp/client.log {run} -n 2000 -c 3 -t set,get >> /tmp/busy.log 2>&1 \
         || echo FAILED >> /tmp/busy.log; done"
    ));
    b.sh(&format!(
        "(PARTYWALL_PRELOAD_LOG=/tmp/endless.log {run} -n 100000000 -c 1 -t set > /tmp/endless.out 2>&1; \
         echo ended with $? >> /tmp/endless.out) & true"
    ));
    let endless = || b.sh("cat /tmp/endless.log; tail -c 1000 /tmp/endless.out");
    assert!(b.wait_until(&three_rings()), "{}", b.sh("cat /tmp/client.log /tmp/busy.log /tmp/agent.log"));
    assert!(b.wait_until(&format!("grep -q '{ON_RING}' /tmp/endless.log 2>/dev/null")), "{}", endless());
    during();
    b.wait_until(&format!("grep -q \"{LINK_LOST}\" /tmp/endless.log"));
    b.sh("touch /tmp/stop");
    drop(running.wait(HANG));
    let said = b.sh("cat /tmp/busy.log");
    assert!(!said.contains("FAILED") && !said.contains("rror"), "{said}");
    assert!(!endless().contains("ended with"), "{}", endless());
    b.sh(&format!("kill ${}", processes("redis-benchmark", "100000000")));
    assert!(b.wait_until("grep -q 'ended with' /tmp/endless.out"), "{}", endless());
    b.sh("cat /tmp/endless.log")
}

fn agent_is_killed(a: &Guest, b: &Guest) {
    let log = while_busy(b, || {
        b.kill_agent();
        b.sh("sleep 1");
        let said = doctor(b);
        assert!(said.contains("warn agent: does not run") && said.contains("fail reachable: none on"), "{said}");
        b.start_agent();
        b.sh("while ! partywall list > /dev/null 2>&1; do sleep 0.2; done; sleep 1");
    });
    assert!(log.contains(LINK_LOST), "{log}{}", a.sh("cat /tmp/server.log"));
    file_survives_the_way_there_and_back(b, "10.77.0.1");
}

fn broker_is_killed(world: &mut World, a: &Guest, b: &Guest) {
    let entries = world.entry(a) + &world.entry(b);
    let log = while_busy(b, || {
        world.kill_broker();
        b.sh("sleep 1");
        world.start_broker_with(&entries);
        world.wait_ready(2);
        b.sh("sleep 1");
    });
    assert!(log.contains(LINK_LOST), "{log}{}", a.sh("cat /tmp/server.log"));
    file_survives_the_way_there_and_back(b, "10.77.0.1");
}

/// A server in guest `a` passes the connection of a client in guest `b` to another program, which has rings for it.
fn connection_is_passed_to_another_program(a: &Guest, b: &Guest) {
    let logs = told_talk(a, b, ("passing_server.py", "'at once'"), "", &[(&rings(1), "talk 200")]);
    assert!(logs[0].contains("is held by no other process"), "the worker has received it: {logs:?}");
    assert!(logs.iter().all(|log| log.contains(ON_RING)), "{logs:?}");
}

/// A server in guest `a`, which has closed its listener, is replaced with the connection of a client in guest `b`, which has rings again.
fn connection_goes_through_exec(a: &Guest, b: &Guest) {
    let logs = told_talk(a, b, ("exec_server.py", ""), "", &[(&rings(1), "mark"), (&rings(2), "talk 200")]);
    assert!(logs.iter().all(|log| log.matches(ON_RING).count() >= 2), "{logs:?}");
}

/// Only root may connect to the agent's socket by default. A program of another user says so, and has rings once the socket admits its group.
fn program_of_another_user_needs_socket(b: &Guest) {
    const AS_OTHER: &str = "/bin/setpriv --reuid 1000 --regid 1000 --clear-groups";
    let refused = b.sh(&format!("{AS_OTHER} partywall run true 2>&1; {AS_OTHER} partywall list 2>&1; true"));
    let expected = "this user may not connect to /run/partywall/broker.sock (mode 600 of user 0 and group 0)";
    assert!(refused.contains(expected) && refused.contains("--socket-mode 660"), "{refused}");
    let talk = format!("{RUN} redis-benchmark -h 10.77.0.1 -c 1 -n 500 -t get -q > /dev/null");
    let talk = format!("PARTYWALL_PRELOAD_LOG=/tmp/other.log {AS_OTHER} {talk}");
    b.sh(&format!("touch /tmp/other.log; chmod 666 /tmp/other.log; {talk}"));
    assert!(!b.sh("cat /tmp/other.log").contains(ON_RING), "by default only root's programs have rings");
    b.sh("chown 0:1000 /run/partywall/broker.sock; chmod 660 /run/partywall/broker.sock");
    let log = b.sh(&format!(
        "for n in $(seq 40); do {talk}; grep -q '{ON_RING}' /tmp/other.log && break; done; cat /tmp/other.log"
    ));
    assert!(log.contains(ON_RING), "{log}");
    b.sh("chown 0:0 /run/partywall/broker.sock; chmod 600 /run/partywall/broker.sock");
}

/// The condition that the client of [`told_talk`] has had rings this often.
fn rings(times: usize) -> String {
    format!("[ $(grep -c '{ON_RING}' /tmp/told.log) -ge {times} ]")
}

/// Runs a server of the library's own tests in guest `a`, and its client, started by `launcher`, in guest `b`. Before each order, the client talks
/// until the order's condition holds in guest `b`. Both programs must end well. Returns what the library has logged at each.
fn told_talk(
    a: &Guest,
    b: &Guest,
    (server, how): (&str, &str),
    launcher: &str,
    orders: &[(&str, &str)],
) -> [String; 2] {
    let programs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../preload/tests/programs");
    for (guest, name) in [(a, server), (b, "told_client.py")] {
        guest.put(&std::fs::read(programs.join(name)).unwrap(), &format!("/tmp/{name}"), 0o644).unwrap();
    }
    let python = python::command(RUN);
    a.sh(&format!(
        "(PARTYWALL_PRELOAD_LOG=/tmp/passed.log {python} /tmp/{server} 0.0.0.0 7002 {how}; \
         echo ended with $?) > /tmp/passed.out 2>&1 & true"
    ));
    let listens = a.wait_until("grep -q ':1B5A 00000000:0000 0A' /proc/net/tcp");
    assert!(listens, "{}", a.sh("cat /tmp/passed.out"));
    // The client prints each line that it has done. The next one waits for that: where talking takes long, lines would pile up, and take minutes
    // once the condition holds.
    const TELL: &str = "m=0; tell() { echo $1 $2; m=$((m+1)); k=0; \
        while [ $(wc -l < /tmp/told.out) -lt $m ] && [ $k -lt 900 ]; do usleep 50000; k=$((k+1)); done; }; ";
    let until = |(condition, order): &(&str, &str)| {
        format!(
            "n=0; while ! {condition} && [ $n -lt 900 ]; do tell talk 20; usleep 50000; n=$((n+1)); done; tell {order}; "
        )
    };
    let orders: String = orders.iter().map(until).collect();
    let python = python::command(&format!("PARTYWALL_PRELOAD_LOG=/tmp/told.log {launcher} {RUN}"));
    let client = b.begin(&format!(
        "rm -f /tmp/told.log; touch /tmp/told.log; : > /tmp/told.out; ({TELL} tell connect; {orders} echo end) \
         | {python} /tmp/told_client.py 10.77.0.1 7002 > /tmp/told.out 2>&1; e=$?; cat /tmp/told.out; echo ended with $e"
    ));
    let said = client.wait(HANG);
    let said = said.unwrap_or_else(|error| panic!("{error}\n{}", a.sh("cat /tmp/passed.out /tmp/passed.log"))).text();
    a.wait_until("grep -q 'ended with' /tmp/passed.out");
    let waits = a.sh("cat /tmp/passed.out");
    let logs = [a.sh("cat /tmp/passed.log; rm /tmp/passed.log"), b.sh("cat /tmp/told.log")];
    assert!(said.contains("talk 200\nend\nended with 0") && waits.contains("ended with 0"), "{said}{waits}{logs:?}");
    logs
}

/// The end of a connection whose program is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KilledEnd {
    Sender,
    Receiver,
}

/// A program is killed while bytes go to guest `a` by a ring. The program at the other end hears of it as with TCP, and has what was sent.
fn program_is_killed(a: &Guest, b: &Guest, killed: KilledEnd) {
    let run = format!("{RUN} partywall tcp-cat");
    a.sh(&format!(
        "rm -f /tmp/numbers /tmp/receiver.*; ({run} -l 0.0.0.0:7003 --output /tmp/numbers; echo ended with $?) > /tmp/receiver.out 2>&1 & true"
    ));
    assert!(a.wait_until("grep -q ':7003' /tmp/receiver.out"), "{}", a.sh("cat /tmp/receiver.out"));
    b.sh(&format!(
        "rm -f /tmp/sender.*; (i=0; while echo $i; do i=$((i+1)); done 2>/dev/null | \
         (PARTYWALL_PRELOAD_LOG=/tmp/sender.log {run} --input /proc/self/fd/0 10.77.0.1:7003; echo ended with $?) > /tmp/sender.out 2>&1) & true"
    ));
    b.wait_until(&format!("grep -q '{ON_RING}' /tmp/sender.log 2>/dev/null && usleep 500000"));
    let logs = || format!("{}\n{}", a.sh("cat /tmp/receiver.out"), b.sh("cat /tmp/sender.out /tmp/sender.log"));
    assert!(logs().contains(ON_RING), "{killed:?}: {}", logs());
    let victim = if killed == KilledEnd::Receiver { a } else { b };
    victim.sh(&format!("kill -9 ${}", processes("partywall", ":7003")));
    for (guest, file) in [(a, "/tmp/receiver.out"), (b, "/tmp/sender.out")] {
        assert!(guest.wait_until(&format!("grep -q 'ended with' {file}")), "{killed:?}: {file}: {}", logs());
    }
    let status = |guest: &Guest, file: &str| guest.sh(&format!("grep -o 'ended with [0-9]*' {file}"));
    let [receiver, sender] = [status(a, "/tmp/receiver.out"), status(b, "/tmp/sender.out")];
    match killed {
        KilledEnd::Receiver => assert!(receiver.ends_with("137") && !sender.ends_with(" 0"), "{}", logs()),
        KilledEnd::Sender => assert!(receiver.ends_with(" 0") && sender.ends_with("137"), "{}", logs()),
    }
    let prefix = a.sh("size=$(stat -c %s /tmp/numbers); [ $size -gt 1000 ] && seq 0 9999999 | head -c $size | cmp - /tmp/numbers && echo same");
    assert!(prefix.contains("same"), "{killed:?}: what came is not the beginning of what was sent: {prefix}{}", logs());
}

/// A machine is killed while its programs have rings with a server in guest `a`, which goes on to serve others.
fn machine_is_killed(world: &World, a: &Guest, b: Guest) {
    b.sh(
        "rm -f /tmp/client.log; (PARTYWALL_PRELOAD_LOG=/tmp/client.log partywall run --quiet --move after=4,bytes=1K \
         redis-benchmark -h 10.77.0.1 -n 100000000 -c 3 -t set -d 3000 -q > /dev/null 2>&1) & true",
    );
    b.wait_until(&three_rings());
    let channels = || world.partywall(&["list", "channels"]).text();
    assert!(channels().contains("b.redis-benchmark"), "{}{}", channels(), b.sh("cat /tmp/client.log"));
    drop(b);
    // As with TCP, the server's ends of these connections live until it gives them up. No byte goes by their rings any more.
    let by_ring = || {
        let said: serde_json::Value = serde_json::from_str(&a.sh("sleep 1; partywall top --once --json")).unwrap();
        let all = said["connections"].as_array().unwrap();
        all.iter().filter(|row| row["way"] == "ring" && row["peer"].to_string().contains("10.77.0.2:")).count()
    };
    let deadline = Instant::now() + HANG;
    while by_ring() > 0 {
        assert!(Instant::now() < deadline, "{}{}", a.sh("partywall top --once; cat /tmp/server.log"), world.log());
    }
    file_survives_the_way_there_and_back(a, "127.0.0.1");
}
