//! The children and the signal handlers of a program.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use support::{
    c, free_port,
    guard::Guard,
    world::{self, World},
};

/// A program of `driver/` under the library, whose connections go by rings at once.
fn start(world: &World, program: &str, arguments: &[&str]) -> Guard {
    let mut command = Command::new(c::program(program, &[&format!("{program}.c")], &[]));
    command.args(arguments).env(partywall_protocol::environment::MOVES, "now");
    world.preload(&mut command);
    Guard::spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()))
}

fn line(guard: &mut Guard) -> String {
    let mut line = String::new();
    BufReader::new(guard.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// A server under the library that sends back what it receives, once it listens.
fn echo_server(world: &World, port: u16) -> Guard {
    let mut server = Command::new(support::stage::python());
    server.arg(format!("{}/tests/programs/echo_server.py", env!("CARGO_MANIFEST_DIR")));
    server.args(["127.0.0.1", &port.to_string()]).env(partywall_protocol::environment::MOVES, "now");
    world.preload(&mut server);
    let mut server = Guard::spawn(server.stdin(Stdio::null()));
    server.await_listener(port, &String::new);
    server
}

#[test]
fn child_of_another_user_cannot_reach_later_connections() {
    if !rustix::process::geteuid().is_root() {
        support::skipped("a child becomes another user only under root");
        return;
    }
    let world = World::new();
    let port = free_port();
    let _server = echo_server(&world, port);
    let mut parent = start(&world, "scribble", &["later", &port.to_string(), "50"]);
    assert_eq!(line(&mut parent), "carried 50 of 50");
    assert!(parent.wait().success());
}

/// Parent and children say in shared memory which sets several of them use.
#[test]
fn child_of_another_user_cannot_take_later_sets_off_the_ring() {
    if !rustix::process::geteuid().is_root() {
        support::skipped("a child becomes another user only under root");
        return;
    }
    let world = World::new();
    let port = free_port();
    let _server = echo_server(&world, port);
    let mut parent = start(&world, "scribble", &["set", &port.to_string(), "200"]);
    assert_eq!(line(&mut parent), "carried 200 of 200 by ring");
    assert!(parent.wait().success());
}

/// It can make the calls on connections that lived through the fork fail, and can neither end its parent nor keep it.
#[test]
fn child_of_another_user_cannot_crash_its_parent() {
    if !rustix::process::geteuid().is_root() {
        support::skipped("a child becomes another user only under root");
        return;
    }
    let world = World::new();
    let port = free_port();
    let _server = echo_server(&world, port);
    let rounds = std::env::var("PARTYWALL_SCRIBBLE_ROUNDS").unwrap_or_else(|_| "2".to_owned());
    let mut parent = start(&world, "scribble", &["inherited", &port.to_string(), &rounds]);
    let (told, status) = (line(&mut parent), parent.wait());
    assert_eq!(told, format!("survived {rounds} of {rounds} rounds, then carried 1"), "{status}");
    assert!(status.success(), "{status}");
}

/// Its parent ends before the child first runs, or after.
#[test]
fn child_of_daemon_keeps_its_parents_ring() {
    let world = World::new();
    let port = free_port();
    let _server = echo_server(&world, port);
    for _ in 0..10 {
        let mut parent = start(&world, "newpid", &[&port.to_string(), "daemon"]);
        assert_eq!(line(&mut parent), "daemon: ring wrong 0");
        assert!(parent.wait().success());
    }
}

/// The handler's call finds the connection locked by its own thread, and fails as if the socket were full.
#[test]
fn send_in_handler_within_send_delivers_or_fails() {
    let world = World::new();
    let port = free_port();
    let mut sink = start(&world, "handler", &["sink", &port.to_string()]);
    assert_eq!(line(&mut sink), "ready");
    let mut sender = start(&world, "handler", &["send", &port.to_string()]);
    let told = line(&mut sender);
    assert!(told.starts_with("missing 0 and 0 failed 0 of "), "{told}");
    // By TCP, the kernel takes each byte.
    assert!(!told.ends_with("refused 0"), "no call of the handler met the ring: {told}");
    assert!(sender.wait().success());
}

/// The handler waits for the answer and leaves it for the call that it has interrupted. If that call slept afterwards, it would miss the answer.
fn assert_no_wait_is_missed(call: &str, handler: &str, installed_by: &str) {
    let world = World::new();
    let port = free_port();
    let mut server = start(&world, "latewait", &["serve", &port.to_string()]);
    assert_eq!(line(&mut server), "ready");
    let mut command = Command::new(c::program("latewait", &["latewait.c"], &[]));
    command.args([call, handler, installed_by, &port.to_string()]).env(partywall_protocol::environment::MOVES, "now");
    // A thread that spins holds signals back meanwhile, so the handler would not run.
    command.env(partywall_protocol::environment::SPIN_US, "0");
    world.preload(&mut command);
    // Behind the library, so that the library's own calls meet it.
    let signal = c::library("latesignal", &["latesignal.c"], &[]);
    command.env("LD_PRELOAD", format!("{}:{}", world::library().display(), signal.display()));
    let mut client = Guard::spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()));
    let told = line(&mut client);
    let sleeps = if ["poll2", "select"].contains(&call) { "in epoll 0, in poll 5" } else { "in epoll 5, in poll 0" };
    assert_eq!(
        told,
        format!("missed 0, failed 0, {sleeps}"),
        "{call} interrupted by {handler}, installed by {installed_by}"
    );
    assert!(client.wait().success());
}

#[test]
fn recv_interrupted_before_its_sleep_misses_nothing() {
    ["recv", "poll"].iter().for_each(|handler| assert_no_wait_is_missed("recv", handler, "sigaction"));
}

#[test]
fn poll_interrupted_before_its_sleep_misses_nothing() {
    for call in ["poll", "poll2", "select"] {
        ["recv", "poll"].iter().for_each(|handler| assert_no_wait_is_missed(call, handler, "sigaction"));
    }
}

#[test]
fn epoll_interrupted_before_its_sleep_misses_nothing() {
    for call in ["epoll", "epoll2"] {
        ["recv", "poll", "epoll"].iter().for_each(|handler| assert_no_wait_is_missed(call, handler, "sigaction"));
    }
}

/// A library that did not notice the handler would sleep as in a program without handlers.
#[test]
fn handler_is_noticed_however_it_was_installed() {
    for installed_by in ["signal", "sysv_signal", "sigset", "syscall"] {
        assert_no_wait_is_missed("poll", "recv", installed_by);
    }
}

/// Locks and holders of a ring that lives through a `fork` are numbers of threads and processes.
#[test]
fn child_in_another_pid_namespace_shares_no_ring() {
    if !rustix::process::geteuid().is_root() {
        support::skipped("only root makes a pid namespace");
        return;
    }
    let world = World::new();
    let port = free_port();
    let _server = echo_server(&world, port);
    let mut parent = start(&world, "newpid", &[&port.to_string()]);
    // In the same namespace it stays on its ring, in another it does not.
    assert_eq!(line(&mut parent), "same: ring child 0 parent 0, other: tcp child 0 parent 0");
    assert!(parent.wait().success());
}

#[test]
fn connection_is_not_locked_by_a_jump_out_of_a_handler() {
    let world = World::new();
    let port = free_port();
    let mut sink = start(&world, "jump", &["sink", &port.to_string()]);
    assert_eq!(line(&mut sink), "ready");
    let mut jumper = start(&world, "jump", &["out", &port.to_string()]);
    let told = line(&mut jumper);
    assert!(told.ends_with(" locked 0"), "{told}");
    assert!(jumper.wait().success());
}

/// The thread is in none of these calls any more, and the broker may read the socket's numbers.
#[test]
fn connection_gets_its_ring_after_jumps_out_of_waiting_calls() {
    let world = World::new();
    let port = free_port();
    let mut sink = start(&world, "jump", &["sink", &port.to_string()]);
    assert_eq!(line(&mut sink), "ready");
    let mut jumper = start(&world, "jump", &["wait", &port.to_string()]);
    assert_eq!(line(&mut jumper), "ring");
    assert!(jumper.wait().success());
}
