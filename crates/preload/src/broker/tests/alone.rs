//! Tests that have a process to themselves, and the process that starts them.
//!
//! ```text
//!   constructor  ---- fork ---->  starter    while there is one thread, and no descriptor of any test
//!   alone!()     ---- name ---->  starter  ---- exec ---->  this test program, for that test only
//!                <-- how it ended, what it wrote --
//! ```
//!
//! A process has one session with a broker, and every connection of the process uses it: with a broker there, connections of other tests
//! offer their rings, follow its policy, and are shown to the broker that comes next. So the process that runs all other tests has no
//! broker.
//!
//! Nor does it make a child itself. Until a child calls `exec` it has a copy of every descriptor, and a test that closes a descriptor just
//! then does not find the hang-up at the other end.
#![expect(unsafe_code, reason = "a constructor that makes a process")]

use partywall_region::packet;
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The variable with the name of the only test of a process.
const TEST: &str = "PARTYWALL_TEST_ALONE";
/// The most that is kept of what a test wrote, from its end.
const KEPT: usize = 32 << 10;

static STARTER: OnceLock<Mutex<OwnedFd>> = OnceLock::new();

#[used]
// SAFETY: the section holds pointers to functions that are called before `main` and need no arguments.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    if std::env::var_os(TEST).is_some() {
        return;
    }
    let (ours, its) = packet::pair().unwrap();
    // SAFETY: there is no other thread yet, so that the child may do whatever this process may.
    match unsafe { libc::fork() } {
        0 => {
            drop(ours);
            serve(&its);
            // SAFETY: ends the child; nothing of it is to be run or dropped.
            unsafe { libc::_exit(0) }
        }
        _ => STARTER.set(Mutex::new(ours)).unwrap(),
    }
}

/// Runs what it is asked to run until the test program ends.
fn serve(asked: &OwnedFd) {
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let mut name = [0; 512];
    while let Ok(request) = packet::recv(asked.as_fd(), &mut name)
        && request.len > 0
    {
        let (passed, wrote) = start_test(&String::from_utf8_lossy(&name[..request.len]));
        let kept = &wrote.as_bytes()[wrote.len().saturating_sub(KEPT)..];
        let _ = packet::send(asked.as_fd(), &[&[u8::from(passed)], kept].concat(), &[]);
    }
}

fn start_test(test: &str) -> (bool, String) {
    let run = std::env::current_exe().and_then(|program| {
        Command::new(program)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(TEST, test)
            .stdin(Stdio::null())
            // Waits until no process holds the two pipes any more: children of the test have ended, too.
            .output()
    });
    match run {
        Err(error) => (false, format!("it could not be started: {error}")),
        Ok(run) => {
            let [out, err] = [&run.stdout, &run.stderr].map(|bytes| String::from_utf8_lossy(bytes));
            // With a name that no test has, the process ends well, too.
            let passed = run.status.success() && out.contains("1 passed");
            (passed, format!("{}\n{out}\n{err}", run.status))
        }
    }
}

/// Goes on in a process that runs only the calling test, with what [`run`] returns there; elsewhere has that process run.
macro_rules! alone {
    () => {{
        fn here() {}
        $crate::broker::tests::alone::run(std::any::type_name_of_val(&here))
    }};
}
pub(crate) use alone;

/// `Some` in a process that runs only the test that the function named `here` is in: the test goes on. Otherwise has the starter run that
/// process, and returns `None` if the test has passed there: it is over here.
pub(crate) fn run(here: &str) -> Option<Alone> {
    let (_crate, test) = here.trim_end_matches("::here").split_once("::").unwrap();
    if std::env::var_os(TEST).is_some_and(|alone| alone == test) {
        set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        // As before `main` in a program: in a child of this process, the path of the broker would be another.
        super::settings::get();
        return Some(Alone);
    }
    let starter = STARTER.get().unwrap().lock().unwrap_or_else(PoisonError::into_inner);
    packet::send(starter.as_fd(), test.as_bytes(), &[]).unwrap();
    let mut answer = vec![0; KEPT + 1];
    let answered = packet::recv(starter.as_fd(), &mut answer).unwrap();
    assert!(answered.len > 0, "the starter has ended");
    let wrote = String::from_utf8_lossy(&answer[1..answered.len]);
    assert!(answer[0] == 1, "{test} in a separate process: {wrote}");
    None
}

/// The only test of its process. When this is dropped, its broker has ended, and nothing of it is left.
pub(crate) struct Alone;

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = super::path().parent().map(std::fs::remove_dir_all);
    }
}
