//! The results of a reader while its writer holds bytes back: the same with the library as by TCP. The cases are those of
//! `driver/held.c`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::process::{Command, Stdio};

use partywall_protocol::environment;
use support::{c, world::World};

/// A line for each case, and how many of them went by rings.
fn run(with: &dyn Fn(&mut Command)) -> (Vec<String>, usize) {
    let mut command = Command::new(c::program("held", &["held.c"], &[]));
    command.env_remove(environment::PRELOAD).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    with(&mut command);
    let output = support::guard::Guard::spawn(&mut command).output();
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    let mut lines: Vec<String> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    let sum = lines.pop().unwrap();
    (lines, sum.strip_prefix("# ").unwrap().parse().unwrap())
}

#[test]
fn bytes_held_back_look_as_by_tcp() {
    let world = World::new();
    let library = |command: &mut Command| {
        world.preload(command);
        command.env(environment::MOVES, "now");
    };
    // On a busy machine a pause may be too long, by TCP as well. Only a difference in every run counts.
    let mut differing: Option<Vec<(String, String)>> = None;
    for _ in 0..8 {
        let ((plain, none), (loaded, by_ring)) = (run(&|_| {}), run(&library));
        assert_eq!((none, plain.len()), (0, loaded.len()));
        assert_eq!(by_ring, loaded.len(), "not all cases went by rings: {loaded:?}");
        let now: Vec<_> = plain.into_iter().zip(loaded).filter(|(plain, loaded)| plain != loaded).collect();
        let case = |line: &str| line.split(' ').next().unwrap().to_owned();
        let before = differing.take().unwrap_or_else(|| now.clone());
        let still = now.into_iter().filter(|(plain, _)| before.iter().any(|(other, _)| case(other) == case(plain)));
        let still: Vec<_> = still.collect();
        if still.is_empty() {
            return;
        }
        differing = Some(still);
    }
    let report: String =
        differing.iter().flatten().map(|(plain, loaded)| format!("plain   {plain}\nlibrary {loaded}\n")).collect();
    assert!(report.is_empty(), "what the reader sees differs:\n{report}");
}
