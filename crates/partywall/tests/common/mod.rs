//! Helpers of the library's tests: bytes that encode their position, hang guards, polling, processes, raw peers.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part of it")]

pub(crate) mod call_records;
pub(crate) mod feed;
pub(crate) mod gate;
pub(crate) mod huge_page_pool;
pub(crate) mod memory_limit;
pub(crate) mod pattern;
pub(crate) mod pool;
pub(crate) mod process;
pub(crate) mod raw;
pub(crate) mod world;

pub(crate) use pattern::{Dice, Pattern};
pub(crate) use world::World;

use partywall::{Options, RingSize, Stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::Write as _;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// A hang is a failure after so long; nothing is measured by it. Long, for a machine that is slow and does other things as well.
pub(crate) const HANG: Duration = Duration::from_secs(240);

/// Ends the process if the test that holds this does not end.
pub(crate) struct HangGuard(#[expect(dead_code, reason = "dropping it is what it is for")] std::sync::mpsc::Sender<()>);

/// For tests whose failure may be that they never end.
pub(crate) fn hang_guard() -> HangGuard {
    hang_guard_of(HANG)
}

pub(crate) fn hang_guard_of(longest: Duration) -> HangGuard {
    let (alive, watched) = std::sync::mpsc::channel::<()>();
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    std::thread::spawn(move || {
        if watched.recv_timeout(longest) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            abort(&format!("{test} hangs"));
        }
    });
    HangGuard(alive)
}

/// A hang guard for a whole test program, for hangs outside of the single guards. No test program takes longer than some seconds.
pub(crate) fn watch_all() {
    static STARTED: std::sync::Once = std::sync::Once::new();
    STARTED.call_once(|| {
        std::thread::spawn(|| {
            std::thread::sleep(2 * HANG);
            abort("the test program hangs");
        });
    });
}

fn abort(why: &str) -> ! {
    // Not `eprintln`: what tests print is kept until they end.
    let _ = writeln!(std::io::stderr(), "{why}");
    std::process::abort();
}

/// Waits until `condition` holds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < HANG / 2, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a descriptor becomes readable within the time.
pub(crate) fn readable(fd: impl AsFd, within: Duration) -> bool {
    let limit = Timespec { tv_sec: within.as_secs().cast_signed(), tv_nsec: within.subsec_nanos().into() };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&limit)).unwrap() == 1
}

pub(crate) fn fixed(size: u64) -> Options {
    Options::default().ring(RingSize::Fixed(size))
}

pub(crate) fn adaptive(initial: u64, max: u64) -> Options {
    Options::default().ring(RingSize::Adaptive { initial, max })
}

pub(crate) fn pair(options: &Options) -> (Stream, Stream) {
    watch_all();
    Stream::pair(options).unwrap()
}

/// The Partywall error inside of an `io::Error`.
pub(crate) fn cause(e: &std::io::Error) -> &partywall::Error {
    e.get_ref().and_then(|e| e.downcast_ref()).unwrap_or_else(|| panic!("{e:?} is no error of Partywall"))
}

/// The error of a call that must fail.
#[track_caller]
pub(crate) fn failure<T, E: Into<std::io::Error>>(call: &str, result: Result<T, E>) -> std::io::Error {
    match result {
        Err(e) => e.into(),
        Ok(_) => panic!("{call} went well"),
    }
}

/// Asserts how a call failed: `assert_fails!(call, Error::Closed(_))`. Takes errors of Partywall and of `std::io`.
#[macro_export]
macro_rules! assert_fails {
    ($call:expr, $pattern:pat) => {{
        let e = $crate::common::failure(stringify!($call), $call);
        let why = $crate::common::cause(&e);
        assert!(matches!(why, $pattern), "{}: {why:?}", stringify!($call));
    }};
}
