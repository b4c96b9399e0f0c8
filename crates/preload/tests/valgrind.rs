//! A program that valgrind runs: its system calls and its memory are valgrind's, and not all that the kernel says of the process is true.

mod support;

use std::process::{Command, Stdio};

use partywall_protocol::environment;
use support::{
    c, find,
    guard::Guard,
    world::{World, library},
};

#[test]
fn program_under_valgrind_runs_with_the_library() {
    let Some(valgrind) = find("valgrind", "valgrind") else { return };
    let driver = c::program("deaths-of-valgrind", &["deaths.c"], &[]);
    let world = World::new();
    let mut command = Command::new(valgrind);
    // One case of `deaths.c`, whichever: it listens, connects, forks, and moves bytes.
    command.arg("--quiet").arg(driver).args(["1", "0", "1"]).stdin(Stdio::null());
    command.env(environment::PRELOAD, library()).env(environment::BROKER, world.socket());
    command.env(environment::MOVES, "now").stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = Guard::spawn(&mut command).output();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("# "), "{said}");
}
