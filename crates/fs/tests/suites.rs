//! Test programs of other projects against a mount: `pjdfstest` for the rules of POSIX, `fsx` for random operations on one file.
//!
//! `scripts/setup.sh programs` installs both. They run beside Partywall, which links nothing of them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::{Way, world};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Cases of `pjdfstest` that must pass, at least: otherwise most of them were left out.
const PASSED: usize = 290;

/// A program in `target/tools`. `None`, and the reason on standard error, if it is not there.
fn tool(name: &str) -> Option<PathBuf> {
    let here = std::env::current_exe().unwrap();
    let path = here.ancestors().nth(3).unwrap().join("tools/bin").join(name);
    if !path.exists() {
        eprintln!("SKIPPED: {} is missing; scripts/setup.sh programs installs it", path.display());
        return None;
    }
    Some(path)
}

fn configuration(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name)
}

fn posix_rules_hold(way: Way, options: &[&str]) {
    let Some(suite) = tool("pjdfstest") else { return };
    let Some(world) = world(way, &[]) else { return };
    // Users without rights reach the files.
    fs::set_permissions(world.export(), Permissions::from_mode(0o755)).unwrap();
    let mounted = world.mount(&[&["--allow-other"], options].concat());
    let other_file_system = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut command = Command::new(suite);
    command.arg("-c").arg(configuration("pjdfstest.toml")).arg("-p").arg(mounted.path());
    command.arg("-s").arg(other_file_system.path()).env("NO_COLOR", "1").env("RUST_BACKTRACE", "0");
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    let failed: String = said
        .split_inclusive('\n')
        .skip_while(|line| !line.contains("FAIL"))
        .filter(|line| !line.ends_with(" ok\n") && !line.contains("failed as expected"))
        .collect();
    assert!(done.status.success(), "{failed}{}", String::from_utf8_lossy(&done.stderr));
    let summary = said.lines().find(|line| line.starts_with("Summary:")).unwrap();
    let words: Vec<&str> = summary.split_whitespace().collect();
    let passed = words.windows(2).find(|pair| pair[1].starts_with("passed")).unwrap()[0];
    assert!(passed.parse::<usize>().unwrap() >= PASSED, "{summary}");
    assert!(mounted.end(), "the mount ends in order");
}

#[test]
fn posix_rules_hold_by_calls() {
    posix_rules_hold(Way::Calls, &[]);
}

#[test]
fn posix_rules_hold_by_a_stream_without_cache() {
    posix_rules_hold(Way::Stream, &["--cache", "0"]);
}

fn random_operations_read_what_was_written(way: Way, options: &[&str], seed: u32) {
    let Some(program) = tool("fsx") else { return };
    let Some(world) = world(way, &[]) else { return };
    let mounted = world.mount(options);
    let artifacts = tempfile::tempdir().unwrap();
    let mut command = Command::new(program);
    command.arg("-f").arg(configuration("fsx.toml")).args(["-N", "3000", "-S", &seed.to_string()]);
    let done = command.arg("-P").arg(artifacts.path()).arg(mounted.join("file")).output().unwrap();
    let said = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(done.status.success(), "seed {seed}: {}{}", said(&done.stdout), said(&done.stderr));
    assert!(mounted.end(), "the mount ends in order");
}

#[test]
fn random_operations_of_fsx_hold_by_calls() {
    random_operations_read_what_was_written(Way::Calls, &[], 1);
    random_operations_read_what_was_written(Way::Calls, &["--cache", "0"], 2);
}

#[test]
fn random_operations_of_fsx_hold_by_a_stream() {
    random_operations_read_what_was_written(Way::Stream, &[], 3);
}

#[test]
fn random_operations_of_fsx_hold_by_tcp() {
    random_operations_read_what_was_written(Way::Tcp, &[], 4);
}
