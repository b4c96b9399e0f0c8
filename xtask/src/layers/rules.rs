//! The arrows, as a table. ARCHITECTURE.md draws them; each crate's README repeats its own row.
//!
//! ```text
//! shm <--- region <--- partywall <--- cli, bench
//!  ^          ^
//!  +----------+------- daemon
//!  +----------+------- preload
//!  +----------+------- vm <--- lab, daemon, bench
//!  +----------+------- agent
//!                      lab <--- bench
//!  +--- cli, bench, fuzz (names of counters and messages)
//! terminal <--- cli, bench, lab
//! ```

/// Crate, and the crates of this project that it may depend on.
const ARROWS: &[(&str, &[&str])] = &[
    ("partywall-shm", &[]),
    // How programs speak to people.
    ("partywall-terminal", &[]),
    ("partywall-region", &["partywall-shm"]),
    ("partywall-vm", &["partywall-shm", "partywall-region"]),
    ("partywall-lab", &["partywall-shm", "partywall-region", "partywall-vm", "partywall-terminal"]),
    ("partywall", &["partywall-shm", "partywall-region"]),
    ("partywall-daemon", &["partywall-shm", "partywall-region", "partywall-vm"]),
    ("partywall-agent", &["partywall-shm", "partywall-region"]),
    ("partywall-preload", &["partywall-shm", "partywall-region"]),
    // Of virtual machines it asks their monitors, and inside one it looks at what is there.
    ("partywall-cli", &["partywall-shm", "partywall", "partywall-vm", "partywall-terminal"]),
    // Between virtual machines it boots them, plugs memory into them and looks for it inside.
    (
        "partywall-bench",
        &["partywall-shm", "partywall", "partywall-region", "partywall-vm", "partywall-lab", "partywall-terminal"],
    ),
    ("partywall-fuzz", &["partywall-shm"]),
    ("xtask", &[]),
];

/// What the tests of any crate may use besides: a broker to talk to.
pub(super) const TESTS_MAY_USE: &[&str] = &["partywall-daemon"];

/// Libraries that have programs beside them: who links one links no program.
pub(super) const LIBRARIES_WITH_PROGRAMS: &[&str] = &["partywall-lab"];

/// The crate that holds no system call, and the crates that would bring one in.
pub(super) const PURE: &str = "partywall-shm";
/// See [`PURE`].
pub(super) const SYSTEM: &[&str] = &["libc", "rustix", "nix", "linux-raw-sys", "syscalls", "tokio", "std"];

/// What `name` may depend on; `None` if the table does not know it.
pub(super) fn may_use(name: &str) -> Option<&'static [&'static str]> {
    ARROWS.iter().find(|(known, _)| *known == name).map(|(_, allowed)| *allowed)
}
