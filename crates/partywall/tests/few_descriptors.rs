//! A listener in a process that has no descriptors left, and later has some again.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{Daemon, child, role};
use common::*;
use partywall::{Domain, Error, Refusal, Stream};
use rustix::fd::AsRawFd as _;
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::path::Path;

/// Connections that find the listener without descriptors. At each step at which one is missing, more than there are places in the backlog.
const FAILURES: usize = 200;
/// Connections that are served afterwards.
const SERVED: usize = 20;

#[test]
#[ignore = "for processes that the tests start"]
fn child_main() {
    let Some((role, broker)) = role() else { return };
    match role.as_str() {
        "listener" => listen_with_few_descriptors(&broker),
        "joiner" => join_with_few_descriptors(&broker),
        other => panic!("{other}"),
    }
}

/// Leaves this process `room` descriptors.
fn limit_to(room: u64) {
    let lowest = fcntl_dupfd_cloexec(std::io::stdin(), 0).unwrap().as_raw_fd();
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(u64::try_from(lowest).unwrap() + room), maximum }).unwrap();
}

/// Whether this error, or the cause of it, is `EMFILE`.
fn is_for_want_of_descriptors(error: &Error) -> bool {
    let is_mfile = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref().and_then(Errno::from_io_error) == Some(Errno::MFILE)
            || error.downcast_ref() == Some(&Errno::MFILE)
    };
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |error| error.source()).any(is_mfile)
}

fn listen_with_few_descriptors(broker: &Path) {
    let domain = Domain::builder().name("web").broker(broker).join().unwrap();
    let mut listener = domain.bind_with("echo", &fixed(4096).backlog(8)).unwrap();
    let before = getrlimit(Resource::Nofile);
    let mut failures = 0;
    // A connection fails at each of its steps that needs a descriptor, and is served where there is room for all.
    for room in (0..12).cycle() {
        limit_to(room);
        let accepted = listener.accept();
        // So that a message of a failure, and what is dropped now, needs no descriptor that is missing.
        setrlimit(Resource::Nofile, before).unwrap();
        match accepted {
            Err(error) => {
                assert!(is_for_want_of_descriptors(&error), "{error}");
                failures += 1;
            }
            Ok((stream, _)) => answer(stream),
        }
        if failures == FAILURES {
            break;
        }
    }
    for _ in 0..SERVED {
        answer(listener.accept().unwrap().0);
    }
}

/// Sends back a word, and waits until the client has gone.
fn answer(mut stream: Stream) {
    let mut word = [0; 5];
    stream.read_exact(&mut word).unwrap();
    stream.write_all(&word).unwrap();
    let _ = stream.read(&mut word);
}

#[test]
fn listener_serves_again_after_running_out_of_descriptors() {
    let _guard = hang_guard();
    let broker = Daemon::start();
    let mut server = child("listener", &broker.path());
    let domain = Domain::builder().name("client").broker(broker.path()).join().unwrap();
    let is_bound = || domain.services().unwrap().iter().any(|row| row.name == "echo");
    eventually("the listener is there", is_bound);
    let (mut ended, mut served) = (0, 0);
    while server.is_running() {
        let mut stream = match domain.connect_with("web:echo", &fixed(4096)) {
            Ok(stream) => stream,
            Err(Error::Refused { code: Refusal::BacklogFull, reason }) => {
                panic!("after {ended} failures, places in the backlog are lost: {reason}")
            }
            // It has served all of them, and gone.
            Err(_) => break,
        };
        let mut word = *b"hello";
        match stream.write_all(&word).and_then(|()| stream.read_exact(&mut word)) {
            Ok(()) => served += 1,
            Err(_) => ended += 1,
        }
    }
    assert!(server.wait());
    assert!(ended >= FAILURES && served >= SERVED, "{ended} connections ended and {served} were served");
}

/// Its first attempts to use the library fail, each at the next step that needs a descriptor.
fn join_with_few_descriptors(broker: &Path) {
    let before = getrlimit(Resource::Nofile);
    let mut failures = Vec::new();
    for room in 0..12 {
        limit_to(room);
        let joined = Domain::builder().name("late").broker(broker).join();
        setrlimit(Resource::Nofile, before).unwrap();
        match joined {
            Err(error) => failures.push(error.to_string()),
            Ok(_) => break,
        }
    }
    assert!(failures.iter().any(|failure| failure.contains("keeper")), "no attempt failed at the keeper: {failures:?}");
    Domain::builder().name("late").broker(broker).join().unwrap();
}

#[test]
fn process_joins_after_running_out_of_descriptors_at_first() {
    let _guard = hang_guard();
    let broker = Daemon::start();
    assert!(child("joiner", &broker.path()).wait());
}
