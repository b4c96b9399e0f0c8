//! Helpers of the tests: a broker, programs that run with or without the library, and the switch of the move rules.
#![allow(dead_code, reason = "every test file uses its own part")]
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

pub(crate) mod c;
pub(crate) mod client;
#[path = "../../../cli/tests/common/collect.rs"]
mod collect;
pub(crate) mod guard;
pub(crate) mod netns;
#[path = "../../../shm/tests/random/mod.rs"]
pub(crate) mod random;
pub(crate) mod stage;
pub(crate) mod switch;
pub(crate) mod world;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// A guard against hangs; nothing here takes nearly as long.
pub(crate) const LONGEST: Duration = Duration::from_secs(120);

/// Waits until `is` holds.
pub(crate) fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONGEST;
    while !is() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The folder of the programs and libraries that cargo builds: above that of the tests.
pub(crate) fn built() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().to_owned()
}

/// Reports why something is not tested: past the harness, which captures the output of tests.
pub(crate) fn skipped(why: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("NOT TESTED: {test}: {why}\n").as_bytes());
}

/// A program of the system; `None`, said aloud, if it is not installed.
pub(crate) fn find(program: &str, package: &str) -> Option<PathBuf> {
    let places = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin:/usr/lib/postgresql/15/bin";
    let found = places.split(':').map(|folder| Path::new(folder).join(program)).find(|path| path.is_file());
    if found.is_none() {
        skipped(&format!("no {program} on this machine; it is in Debian's package {package}"));
    }
    found
}

/// A port that is free for TCP and UDP, and that no closed connection still uses: not every program can bind such a port. It lies below
/// the ports that the kernel assigns itself, so that no connection of another test takes it before the
/// program under test does; and processes begin to look at different places.
pub(crate) fn free_port() -> u16 {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use std::{
        net::{Ipv4Addr, SocketAddrV4},
        sync::atomic::{AtomicU32, Ordering},
    };
    static LOOKED: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id().wrapping_mul(31);
    let port = || 10_000 + (begin.wrapping_add(LOOKED.fetch_add(1, Ordering::Relaxed)) % 20_000) as u16;
    let free = |at| {
        // Without `SO_REUSEADDR`, which Rust's own listeners set.
        [SocketType::STREAM, SocketType::DGRAM].into_iter().all(|kind| {
            // A program that another test starts meanwhile would keep the port with an inherited socket.
            let flags = SocketFlags::CLOEXEC;
            let socket = rustix::net::socket_with(AddressFamily::INET, kind, flags, None).unwrap();
            rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, at)).is_ok()
        })
    };
    std::iter::repeat_with(port).take(20_000).find(|&port| free(port)).expect("a free port")
}
