//! `cat` in a terminal, with typed input.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use common::{Guard, World, said};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// A terminal: the end for typing, and the end that a program reads.
fn terminal() -> (File, File) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let keyboard = openpt(flags).unwrap();
    grantpt(&keyboard).unwrap();
    unlockpt(&keyboard).unwrap();
    let name = ptsname(&keyboard, Vec::new()).unwrap();
    // Not as the terminal that runs the tests.
    let program = open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    (keyboard.into(), program.into())
}

/// The same command with interrupts as a terminal's programs have them. A shell starts background programs with interrupts ignored,
/// including these tests and their children.
fn interruptible(command: &Command) -> Command {
    let mut env = Command::new("env");
    env.arg("--default-signal=INT").arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => env.env(key, value),
            None => env.env_remove(key),
        };
    }
    env
}

/// A listener that repeats nothing, with both its ends in hand, and a `cat` on a terminal that is connected to it.
fn conversation(world: &World) -> (Guard, Guard, File) {
    let mut listener = world.partywall("b", &["cat", "-l", "talk"]);
    let mut listener = Guard::spawn(listener.stdin(Stdio::piped()));
    let (mut keyboard, program) = terminal();
    let mut typist = interruptible(&world.partywall("a", &["cat", "b:talk", "--wait", "60"]));
    let typist = Guard::spawn(typist.stdin(program).stdout(Stdio::piped()).stderr(Stdio::piped()));
    keyboard.write_all(b"typed\n").unwrap();
    let mut heard = [0; 6];
    listener.0.stdout.as_mut().unwrap().read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"typed\n");
    (listener, typist, keyboard)
}

#[test]
fn cat_ends_when_the_peer_has_closed_both_ways() {
    let world = World::new();
    let (mut listener, typist, _keyboard) = conversation(&world);
    let mut stdin = listener.0.stdin.take().unwrap();
    stdin.write_all(b"good-bye").unwrap();
    drop(stdin);
    let output = typist.output();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert_eq!(output.stdout, b"good-bye");
    assert_eq!(listener.code(), Some(0), "it ended in good order");
}

#[test]
fn control_d_ends_only_the_input() {
    let world = World::new();
    let (mut listener, typist, mut keyboard) = conversation(&world);
    keyboard.write_all(b"\x04").unwrap();
    let mut rest = Vec::new();
    listener.0.stdout.as_mut().unwrap().read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    listener.0.stdin.take().unwrap().write_all(b"an answer").unwrap();
    let output = typist.output();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"an answer"[..]), "{}", said(&output));
    assert_eq!(listener.code(), Some(0));
}

#[test]
fn interrupt_is_not_reported_as_end_of_input() {
    let world = World::new();
    let (mut listener, typist, mut keyboard) = conversation(&world);
    keyboard.write_all(b"and more\n").unwrap();
    let mut heard = [0; 9];
    listener.0.stdout.as_mut().unwrap().read_exact(&mut heard).unwrap();
    // As Ctrl-C does, where the terminal is the process's own.
    kill_process(Pid::from_child(&typist.0), Signal::INT).unwrap();
    let output = typist.output();
    assert_eq!(output.status.signal(), Some(2), "{}", said(&output));
    // Its input stays open: what ends it is the news.
    let _stdin = listener.0.stdin.take();
    let output = listener.output();
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
}
