//! The child of a process that had used the library before it forked.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]
#![expect(unsafe_code, reason = "forks")]

mod common;

use common::process::alone;
use common::*;
use partywall::{Domain, Error};
use std::io::{Read, Write};

/// Refused because of the fork, with what to do.
fn is_refused<T>(result: Result<T, Error>) -> bool {
    let text = result.err().map(|error| error.to_string()).unwrap_or_default();
    text.contains("child of a fork") && text.contains("before the first join")
}

#[test]
fn child_of_a_fork_is_refused_and_harms_nothing() {
    alone("child_of_a_fork_is_refused_and_harms_nothing", || {
        let _guard = hang_guard();
        let world = World::new();
        let mut listener = world.web.bind("before").unwrap();
        // SAFETY: the child uses memory that it has got, makes no use of other threads, and ends by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let join = Domain::builder().name("child").broker(world.broker.path()).join();
            let results = [
                is_refused(join),
                is_refused(world.web.domains()),
                is_refused(world.web.bind("child")),
                is_refused(world.web.connect("web:before")),
            ];
            let code = results.iter().fold(0, |sum, refused| sum * 2 + i32::from(!refused));
            // SAFETY: ends this process alone, without what the parent does at its end.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: a number of this test.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "a bit for each of those that were not refused");
        // The parent's sessions have answers to their own requests only.
        assert!(world.web.domains().unwrap().iter().all(|row| row.name != "child"));
        let mut here = world.web.connect("web:before").unwrap();
        let (mut there, _) = listener.accept().unwrap();
        here.write_all(b"still here").unwrap();
        drop(here);
        let mut text = String::new();
        there.read_to_string(&mut text).unwrap();
        assert_eq!(text, "still here");
    });
}
