//! When connections of a real program have rings: after a restart of the broker, an `exec`, a change of the policy, or a late start of the
//! broker, and with few descriptors. A client does step by step what each test says.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{fs, path::Path, process::Stdio};

use support::{
    client::Client,
    eventually, free_port,
    guard::Guard,
    netns::Namespaces,
    skipped,
    stage::{Stage, python, script},
    switch::Switch,
    world::World,
};

/// A client of the echo that does what the test says.
struct Told {
    program: Guard,
    to: std::process::ChildStdin,
    from: std::io::BufReader<std::process::ChildStdout>,
}

impl Told {
    fn do_(&mut self, what: &str) {
        use std::io::{BufRead, Write};
        writeln!(self.to, "{what}").unwrap();
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), what);
    }
}

/// An echo, and a client that does what the test says. `server` starts the echo.
fn echo(stage: &Stage<'_>, server: impl FnOnce(&[&str]) -> Guard) -> (Guard, Told) {
    echo_with(stage, server, &[])
}

/// The same. Python runs the client's script below these words.
fn echo_with(stage: &Stage<'_>, server: impl FnOnce(&[&str]) -> Guard, client: &[&str]) -> (Guard, Told) {
    talk_between(stage, ["echo_server.py", "told_client.py"], server, client)
}

/// The same, with other scripts of the two.
fn talk_between(
    stage: &Stage<'_>,
    [server_script, client_script]: [&str; 2],
    server: impl FnOnce(&[&str]) -> Guard,
    client: &[&str],
) -> (Guard, Told) {
    let port = free_port();
    let p = port.to_string();
    let mut server = server(&[&script(server_script), stage.address(), &p]);
    stage.await_listener(&mut server, port);
    let mut command = stage.command(1, &python());
    command
        .args(client)
        .args([&script(client_script), stage.address(), &p])
        .stdin(Stdio::piped())
        .stderr(Stdio::inherit());
    let mut program = Guard::spawn(&mut command);
    let (to, from) = (program.0.stdin.take().unwrap(), program.0.stdout.take().unwrap());
    (server, Told { program, to, from: std::io::BufReader::new(from) })
}

/// The highest number of a ring's memory that a process has open, and how many there are.
fn rings_of(process: u32) -> (usize, u32) {
    let rings = fs::read_dir(format!("/proc/{process}/fd")).unwrap().filter_map(|entry| {
        let entry = entry.unwrap();
        let target = fs::read_link(entry.path()).ok()?;
        let name = target.to_str()?;
        let is_ring = name.starts_with("/memfd:partywall") && !name.contains("status");
        is_ring.then(|| entry.file_name().to_str().unwrap().parse::<u32>().unwrap())
    });
    rings.fold((0, 0), |(count, highest), number| (count + 1, highest.max(number)))
}

#[test]
fn new_broker_lists_existing_rings_until_they_end() {
    let (world, folder) = (World::new(), tempfile::tempdir().unwrap());
    let stage = Stage { world: Some(&world), spaces: None, folder };
    let switch = Switch::new(&world);
    let (mut server, mut client) = echo(&stage, |arguments| stage.server(&python(), arguments));
    for _ in 0..3 {
        client.do_("connect");
    }
    eventually("three are on rings", || {
        client.do_("talk 20");
        switch.seen().channels == 3
    });
    drop(switch);
    for round in 0..2 {
        world.kill_broker();
        client.do_("talk 20 1");
        world.restart_broker();
        let mut watcher = Client::join(&world.socket(), "watcher").unwrap();
        let mut sides = |client: &mut Told| {
            // Two of them are idle.
            client.do_("talk 2 1");
            let rows = watcher.channels();
            assert!(rows.iter().all(|row| row.service.starts_with("tcp-")), "{rows:?}");
            let both = rows.iter().filter(|row| row.from != 0 && row.to != 0);
            both.filter_map(|row| watcher.look(row.channel))
                .filter(|sides| sides.len() == 2)
                .flatten()
                .collect::<Vec<_>>()
        };
        eventually("they are listed, with what both sides have carried", || {
            let sides = sides(&mut client);
            sides.len() == 6 && sides.iter().all(|(bytes, _)| *bytes > 64)
        });
        // The broker closes some time after its answer what a look has taken.
        let mut before = world.broker_descriptors();
        eventually("a look leaves the broker's descriptors as they were", || {
            sides(&mut client);
            let earlier = std::mem::replace(&mut before, world.broker_descriptors());
            before == earlier
        });
        assert_eq!(sides(&mut client).len(), 6, "round {round}");
        eventually("a look leaves no descriptors in the broker", || world.broker_descriptors() == before);
    }
    client.do_("end");
    assert!(client.program.wait().success());
    let mut watcher = Client::join(&world.socket(), "watcher").unwrap();
    eventually("they are forgotten", || watcher.channels().is_empty());
    eventually("their memory is gone", || rings_of(server.id()).0 == 0);
    server.stop();
}

#[test]
fn connection_has_rings_again_after_exec_of_its_server() {
    has_rings_again_after_exec("told_client.py", None, &[]);
}

#[test]
fn connection_has_rings_again_after_execveat_of_its_server() {
    has_rings_again_after_exec("told_client.py", None, &["execveat"]);
}

#[test]
fn connection_of_several_threads_has_rings_again_after_exec() {
    has_rings_again_after_exec("duplex_client.py", None, &[]);
}

/// The server has closed its listener, and nothing else in its namespace listens.
#[test]
fn connection_between_namespaces_has_rings_again_after_exec() {
    let Some(spaces) = Namespaces::create() else { return };
    has_rings_again_after_exec("told_client.py", Some(&spaces), &[]);
}

fn has_rings_again_after_exec(client: &str, spaces: Option<&Namespaces>, how: &[&str]) {
    let (world, folder) = (World::new(), tempfile::tempdir().unwrap());
    let stage = Stage { world: Some(&world), spaces, folder };
    let switch = Switch::new(&world);
    let server = |arguments: &[&str]| stage.server(&python(), &[arguments, how].concat());
    let (mut server, mut client) = talk_between(&stage, ["exec_server.py", client], server, &[]);
    client.do_("connect");
    eventually("they meet", || {
        client.do_("talk 100");
        switch.seen().channels == 1
    });
    // It executes itself again.
    client.do_("mark");
    eventually("the new program has a ring", || {
        client.do_("talk 20");
        switch.seen().channels == 2
    });
    let before = switch.seen().ring_bytes;
    eventually("bytes go by it", || {
        client.do_("talk 20");
        switch.seen().ring_bytes >= before + 100 * 64
    });
    client.do_("end");
    assert!(client.program.wait().success());
    assert!(server.wait().success());
}

/// A server that passes its connection to a worker in this way, and its client.
fn passing(stage: &Stage<'_>, how: &str) -> (Guard, Told) {
    let server = |arguments: &[&str]| {
        let mut all = arguments.to_vec();
        all.push(how);
        stage.server(&python(), &all)
    };
    talk_between(stage, ["passing_server.py", "told_client.py"], server, &[])
}

#[test]
fn passed_connection_has_rings_in_the_worker() {
    for (how, rings_before) in [("at once", 0), ("after use", 1)] {
        let (world, folder) = (World::new(), tempfile::tempdir().unwrap());
        let stage = Stage { world: Some(&world), spaces: None, folder };
        let switch = Switch::new(&world);
        let (mut server, mut client) = passing(&stage, how);
        client.do_("connect");
        if rings_before == 1 {
            eventually("the server has a ring", || {
                client.do_("talk 20");
                switch.seen().channels == 1
            });
            client.do_("mark");
        }
        eventually("the worker has a ring", || {
            client.do_("talk 20");
            switch.seen().channels > rings_before
        });
        let before = switch.seen().ring_bytes;
        eventually("bytes go by it", || {
            client.do_("talk 20");
            switch.seen().ring_bytes >= before + 100 * 64
        });
        client.do_("end");
        assert!(client.program.wait().success(), "{how}");
        assert!(server.wait().success(), "{how}");
    }
}

#[test]
fn connection_that_others_may_hold_stays_on_tcp() {
    let mut wrong = Vec::new();
    for how in ["twice", "and keep", "peeked", "forked", "on and on"] {
        let (world, folder) = (World::new(), tempfile::tempdir().unwrap());
        let stage = Stage { world: Some(&world), spaces: None, folder };
        let switch = Switch::new(&world);
        let (mut server, mut client) = passing(&stage, how);
        client.do_("connect");
        client.do_("talk 5000");
        if switch.seen().channels != 0 {
            wrong.push(how);
        }
        client.do_("end");
        assert!(client.program.wait().success(), "{how}");
        assert!(server.wait().success(), "{how}");
    }
    assert!(wrong.is_empty(), "{wrong:?} had rings");
}

#[test]
fn program_with_few_descriptors_keeps_its_share() {
    let (world, folder) = (World::new(), tempfile::tempdir().unwrap());
    let stage = Stage { world: Some(&world), spaces: None, folder };
    let _switch = Switch::new(&world);
    // The upper quarter of 120 is ours: 90 to 119, and rings have the lower half of it, as far as links leave them any.
    let (mut server, mut client) = echo(&stage, |arguments| {
        let limited = "ulimit -n 120 && exec \"$@\"";
        let python = python();
        let mut all = vec!["-c", limited, "sh", python.to_str().unwrap()];
        all.extend(arguments);
        stage.server(Path::new("/bin/sh"), &all)
    });
    for connections in 1..=30 {
        client.do_("connect");
        client.do_("talk 3");
        let (count, highest) = rings_of(server.id());
        assert!(highest < 105 && count <= 15, "{connections} connections, {count} rings up to {highest}");
        if connections == 4 {
            eventually("all have rings", || {
                client.do_("talk 3");
                rings_of(server.id()).0 == 4
            });
        }
    }
    client.do_("end");
    assert!(client.program.wait().success());
    server.stop();
}

#[test]
fn earlier_tcp_connection_gets_ring_once_possible() {
    let (world, folder) = (World::new(), tempfile::tempdir().unwrap());
    let switch = Switch::new(&world);
    let stage = Stage { world: Some(&world), spaces: None, folder };
    let (mut server, mut client) = echo(&stage, |arguments| stage.server(&python(), arguments));

    // The policy said never when it was made.
    switch.turn(false);
    client.do_("connect");
    client.do_("talk 300");
    assert_eq!(switch.seen().channels, 0);
    switch.turn(true);
    eventually("it is on a ring", || {
        client.do_("talk 20");
        switch.seen().channels == 1
    });

    // There was no broker, for once.
    world.kill_broker();
    client.do_("connect");
    client.do_("talk 300");
    world.restart_broker();
    switch.turn(true);
    eventually("the second is on a ring, too", || {
        client.do_("talk 20");
        switch.seen().channels > 1 && switch.seen().ring_bytes > 0
    });
    client.do_("end");
    assert!(client.program.wait().success());
    server.stop();
}

/// Runs a script as user 65534, who need not be able to read it.
const AS_ANOTHER_USER: &str = "import os, sys
with open(sys.argv[1]) as script:
    text = script.read()
os.setuid(65534)
del sys.argv[0]
exec(compile(text, sys.argv[0], 'exec'))";

#[test]
fn refused_connection_gets_ring_once_policy_allows() {
    if !rustix::process::geteuid().is_root() {
        skipped("programs of two users take root");
        return;
    }
    let (world, folder) = (World::new(), tempfile::tempdir().unwrap());
    let policy = world.path("policy.toml");
    let allowing = fs::read_to_string(&policy).unwrap();
    let (refusing, _) = allowing.split_once("[[connect]]").unwrap();
    fs::write(&policy, refusing).unwrap();
    world.reload_policy();
    let switch = Switch::new(&world);
    let stage = Stage { world: Some(&world), spaces: None, folder };
    let server = |arguments: &[&str]| stage.server(&python(), arguments);
    let (mut server, mut client) = echo_with(&stage, server, &["-c", AS_ANOTHER_USER]);
    client.do_("connect");
    client.do_("talk 300");
    let log = || fs::read_to_string(world.path("broker.log")).unwrap();
    eventually("the broker refuses it", || {
        client.do_("talk 20");
        log().contains("no [[connect]] rule")
    });
    assert_eq!(switch.seen().channels, 0);
    fs::write(&policy, &allowing).unwrap();
    world.reload_policy();
    eventually("it is on a ring", || {
        client.do_("talk 20");
        switch.seen().ring_bytes > 0
    });
    client.do_("end");
    assert!(client.program.wait().success());
    server.stop();
}
