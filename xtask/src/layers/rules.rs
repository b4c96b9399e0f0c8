//! The arrows, as a table. ARCHITECTURE.md draws them; each crate's README repeats its own row.
//!
//! ```text
//! shm <--- protocol <--- region <--- partywall <--- cli, bench
//!  ^          ^            ^
//!  +----------+------------+------- daemon
//!  +----------+------------+------- preload
//!  |          +------------+------- vm <--- lab, daemon, vhost, bench
//!  |          +------------+------- agent
//! partywall <--- capi, python, fs, gateway, vhost
//!  |          |                     lab <--- bench
//!  +----------+--- cli, bench, fuzz (names of counters and messages)
//!  +----------+------------+------- fuzz, which starts a daemon
//! terminal <--- cli, bench, lab, vhost
//! vhost <--- bench
//! ```

/// Crate, and the crates of this project that it may depend on.
const ARROWS: &[(&str, &[&str])] = &[
    ("partywall-shm", &[]),
    ("partywall-protocol", &["partywall-shm"]),
    // How programs speak to people.
    ("partywall-terminal", &[]),
    ("partywall-region", &["partywall-shm", "partywall-protocol"]),
    ("partywall-vm", &["partywall-protocol", "partywall-region"]),
    ("partywall-vhost", &["partywall", "partywall-vm", "partywall-terminal"]),
    ("partywall-lab", &["partywall-shm", "partywall-region", "partywall-vm", "partywall-terminal"]),
    ("partywall", &["partywall-shm", "partywall-protocol", "partywall-region"]),
    ("partywall-daemon", &["partywall-shm", "partywall-protocol", "partywall-region", "partywall-vm"]),
    ("partywall-agent", &["partywall-protocol", "partywall-region"]),
    // A file system as a user of the library has it.
    ("partywall-fs", &["partywall", "partywall-terminal"]),
    // Between hosts: the only crate with TLS and the client of a directory.
    ("partywall-gateway", &["partywall", "partywall-terminal"]),
    ("partywall-preload", &["partywall-shm", "partywall-protocol", "partywall-region"]),
    // About virtual machines it asks their monitors, and inside a machine it examines the devices. It has the kernel record sequence numbers, which
    // brokers and agents read.
    (
        "partywall-cli",
        &["partywall-shm", "partywall-protocol", "partywall-region", "partywall", "partywall-vm", "partywall-terminal"],
    ),
    // Between virtual machines it boots them, plugs memory into them and looks for it inside.
    (
        "partywall-bench",
        &[
            "partywall-protocol",
            "partywall",
            "partywall-region",
            "partywall-vm",
            "partywall-vhost",
            "partywall-lab",
            "partywall-terminal",
        ],
    ),
    // Languages: they offer what the library has, and nothing else.
    ("partywall-capi", &["partywall"]),
    ("partywall-python", &["partywall"]),
    // Examples, which need what a user's project needs.
    ("partywall-grpc", &["partywall"]),
    ("partywall-capnp", &["partywall"]),
    (
        "partywall-fuzz",
        &[
            "partywall-shm",
            "partywall-protocol",
            "partywall-region",
            "partywall-daemon",
            "partywall-vhost",
            "partywall",
        ],
    ),
    ("xtask", &[]),
];

/// Crates that are nothing but tests, so they may link a program as tests do.
pub(super) const ARE_TESTS: &[&str] = &["partywall-fuzz"];

/// The crates that the tests of any crate may also use: a broker to talk to, and the library to talk with.
pub(super) const TESTS_MAY_USE: &[&str] = &["partywall", "partywall-daemon"];

/// Libraries that have programs beside them: who links one links no program.
pub(super) const LIBRARIES_WITH_PROGRAMS: &[&str] =
    &["partywall-lab", "partywall-vhost", "partywall-fs", "partywall-gateway"];

/// The crates that hold no system call, and the crates that would bring one in.
pub(super) const PURE: &[&str] = &["partywall-shm", "partywall-protocol"];
/// See [`PURE`].
pub(super) const SYSTEM: &[&str] = &["libc", "rustix", "nix", "linux-raw-sys", "syscalls", "tokio", "std"];

/// The crates that `name` may depend on; `None` if the table does not know it.
pub(super) fn may_use(name: &str) -> Option<&'static [&'static str]> {
    ARROWS.iter().find(|(known, _)| *known == name).map(|(_, allowed)| *allowed)
}
