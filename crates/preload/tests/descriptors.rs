//! A program with few descriptors: what the library needs of them is not to be missing.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::process::{Command, Stdio};

use partywall_protocol::environment;
use support::{
    c,
    guard::Guard,
    world::{World, library},
};

/// How many connections a server accepts with these limits until it fails with `EMFILE`, and how many of them went by a ring. Twice: the server
/// closes the first ones before it accepts others.
fn connections(soft: u32, hard: u32, world: Option<&World>) -> [(u32, u32); 2] {
    let mut command = Command::new(c::program("descriptors", &["descriptors.c"], &[]));
    command.args([soft.to_string(), hard.to_string()]).env_remove(environment::PRELOAD).stdin(Stdio::null());
    if let Some(world) = world {
        command.env(environment::PRELOAD, library()).env(environment::BROKER, world.socket());
        command.env(environment::MOVES, "now");
    }
    let output = Guard::spawn(command.stdout(Stdio::piped())).output();
    let said = String::from_utf8(output.stdout).unwrap();
    let numbers: Vec<u32> = said.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    assert_eq!(numbers.len(), 8, "{}: {said}", output.status);
    [&numbers[..4], &numbers[4..]].map(|numbers| {
        let [count, error, limit, by_ring] = numbers[..] else { panic!("{said}") };
        assert_eq!((error.cast_signed(), limit), (rustix::io::Errno::MFILE.raw_os_error(), soft), "{said}");
        (count, by_ring)
    })
}

#[test]
fn program_at_its_soft_limit_has_as_many_connections_as_by_tcp() {
    let [(plain, _), _] = connections(64, 1024, None);
    for (count, by_ring) in connections(64, 1024, Some(&World::new())) {
        assert_eq!(count, plain);
        assert!(by_ring > plain / 2, "{by_ring} of {count} went by a ring");
    }
}

#[test]
fn rings_leave_descriptors_below_hard_limit_to_program() {
    let [(plain, _), _] = connections(64, 64, None);
    // Also when it has run out of descriptors once, and has some again.
    for (count, by_ring) in connections(64, 64, Some(&World::new())) {
        // Ours are in the last quarter, and only while few are in use.
        assert!(count + 16 >= plain, "{count} connections, {plain} without the library");
        assert!(by_ring > 0, "{by_ring} of {count} went by a ring");
    }
}
