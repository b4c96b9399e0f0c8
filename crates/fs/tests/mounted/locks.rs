//! Locks between clients, and the size of a file whose lock is taken.

use super::{LONG_CACHE, code};
use crate::common::{Guard, Way, eventually, world};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A client takes a lock after another one has held it and made the file longer.
fn size_is_current_after_lock(is_waited_for: bool) {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&LONG_CACHE), world.mount(&LONG_CACHE));
    fs::write(first.join("file"), "text").unwrap();
    let open = File::options().read(true).write(true).open(second.join("file")).unwrap();
    assert_eq!(open.metadata().unwrap().len(), 4);
    let other = File::options().append(true).open(first.join("file")).unwrap();
    rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
    std::thread::scope(|scope| {
        let take = || rustix::fs::flock(&open, FlockOperation::LockExclusive).unwrap();
        let waiter = is_waited_for.then(|| scope.spawn(take));
        if waiter.is_some() {
            std::thread::sleep(Duration::from_millis(300));
        }
        (&other).write_all(b" of the first client").unwrap();
        rustix::fs::flock(&other, FlockOperation::Unlock).unwrap();
        match waiter {
            Some(waiter) => waiter.join().unwrap(),
            None => take(),
        }
    });
    assert_eq!(open.metadata().unwrap().len(), 24);
}

#[test]
fn size_is_current_after_lock_is_taken() {
    size_is_current_after_lock(false);
}

#[test]
fn size_is_current_after_wait_for_lock() {
    size_is_current_after_lock(true);
}

/// Takes a lock by one descriptor, and closes another one of the same file. Says so, and ends when its input does.
const LOCK_AND_CLOSE_ANOTHER: &str = "
import fcntl, os, sys
locked = os.open(sys.argv[1], os.O_RDWR)
other = os.open(sys.argv[1], os.O_RDONLY)
fcntl.lockf(locked, fcntl.LOCK_EX)
os.close(other)
print('closed', flush=True)
sys.stdin.read()
";

#[test]
fn close_of_any_descriptor_releases_posix_locks() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&[]), world.mount(&[]));
    fs::write(first.join("lock"), "text").unwrap();
    let mut holder = Command::new("python3");
    holder.args(["-c", LOCK_AND_CLOSE_ANOTHER]).arg(first.join("lock")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = Guard(holder.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(holder.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "closed\n");
    let other = File::options().write(true).open(second.join("lock")).unwrap();
    assert_eq!(rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive), Ok(()));
    assert!(holder.0.try_wait().unwrap().is_none(), "the first descriptor is still open");
}

#[test]
fn locks_hold_between_clients_and_waiter_can_be_killed() {
    let Some(mut world) = world(Way::Calls, &[]) else { return };
    let (mut first, second) = (world.mount(&[]), world.mount(&[]));
    let held = File::create(first.join("lock")).unwrap();
    rustix::fs::flock(&held, FlockOperation::LockExclusive).unwrap();
    let other = File::open(second.join("lock")).unwrap();
    assert_eq!(rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared), Err(Errno::AGAIN));
    // A process that waits for the lock ends when it is killed.
    let mut waiter = Command::new("flock").arg(second.join("lock")).arg("true").spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(waiter.try_wait().unwrap().is_none(), "the lock is not held");
    waiter.kill().unwrap();
    eventually("a process that waits for a lock could not be killed", || waiter.try_wait().unwrap().is_some());
    // A waiting process gets the lock when its holder's client dies.
    let mut waiter = Command::new("flock").arg(second.join("lock")).arg("true").spawn().unwrap();
    first.kill();
    eventually("the lock of a dead client was not given up", || waiter.try_wait().unwrap().is_some());
    assert!(waiter.wait().unwrap().success());
    // A lock that a restarted server does not have is not taken for held.
    rustix::fs::flock(&other, FlockOperation::LockShared).unwrap();
    world.kill_server();
    world.start();
    assert_eq!(code((&other).read(&mut [0; 8])), Errno::IO.raw_os_error());
    eventually("other open files go on", || fs::read(second.join("lock")).is_ok());
}
