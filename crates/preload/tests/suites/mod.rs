//! CPython's own tests of everything that has to do with sockets: which of them run, how each ended, and which ended in another way with the
//! library. The same on the host and in a guest of the lab.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::BTreeMap;
use std::path::Path;

/// The modules of Debian's Python, which are its library and, from the package libpython3.11-testsuite, its tests.
pub(crate) const PYTHON_LIBRARY: &str = "/usr/lib/python3.11";

/// The program that runs a suite, from the folder of this package.
pub(crate) const RUNNER: &str = "tests/programs/run_tests.py";

/// Modules, and the tests of them to run; none means all.
pub(crate) type Suite = (&'static str, &'static [&'static str]);

/// All of them, for `make compat`.
pub(crate) const LONG: &[Suite] = &[
    // UDP-Lite is no longer in newer kernels, where its tests hang; those of virtual machines' sockets hang where there is no host.
    ("test.test_socket", &["!*UDPLITE*", "!*VSOCK*"]),
    ("test.test_selectors", &[]),
    ("test.test_ssl", &[]),
    ("test.test_ftplib", &[]),
    ("test.test_httplib", &[]),
    ("test.test_epoll", &[]),
    ("test.test_poll", &[]),
    ("test.test_select", &[]),
    ("test.test_socketserver", &[]),
    ("test.test_asyncore", &[]),
    ("test.test_asynchat", &[]),
    ("test.test_smtplib", &[]),
    ("test.test_poplib", &[]),
    ("test.test_imaplib", &[]),
    ("test.test_telnetlib", &[]),
    ("test.test_urllib2_localnet", &[]),
    ("test.test_httpservers", &[]),
    ("test.test_xmlrpc", &[]),
    ("test.test_logging", &[]),
    ("test.test_asyncio.test_events", &[]),
    ("test.test_asyncio.test_selector_events", &[]),
    ("test.test_asyncio.test_server", &[]),
    ("test.test_asyncio.test_sock_lowlevel", &[]),
    ("test.test_asyncio.test_sslproto", &[]),
    ("test.test_asyncio.test_ssl", &[]),
    ("test.test_asyncio.test_streams", &[]),
    ("test.test_asyncio.test_buffered_proto", &[]),
    ("test.test_asyncio.test_sendfile", &[]),
    ("test.test_asyncio.test_unix_events", &[]),
    ("test.test_asyncio.test_subprocess", &[]),
    ("test.test_multiprocessing_main_handling", &[]),
];

/// The suites of [`LONG`], or those whose module's name ends as `$PARTYWALL_COMPAT` says.
pub(crate) fn long() -> Vec<Suite> {
    let only = std::env::var("PARTYWALL_COMPAT").unwrap_or_default();
    LONG.iter().copied().filter(|(module, _)| module.ends_with(only.as_str())).collect()
}

/// Whether the tests are on this machine; says so if they are not.
pub(crate) fn are_installed(skipped: impl FnOnce(&str)) -> bool {
    let there = Path::new(PYTHON_LIBRARY).join("test/test_socket.py").exists();
    if !there {
        skipped("CPython's tests are not on this machine; they are in Debian's package libpython3.11-testsuite");
    }
    there
}

/// One run of a suite.
#[derive(Debug)]
pub(crate) struct SuiteRun {
    /// How each test ended, by its name.
    pub(crate) outcomes: BTreeMap<String, String>,
    /// The standard error, for people.
    pub(crate) said: String,
}

impl SuiteRun {
    /// From the two outputs of the runner, and how its process ended.
    pub(crate) fn new(module: &str, out: &[u8], err: &[u8], end: String) -> Self {
        let out = String::from_utf8_lossy(out);
        let results = out.lines().filter_map(|line| line.strip_prefix("RESULT ")?.split_once(' '));
        let mut outcomes: BTreeMap<_, _> = results.map(|(test, how)| (test.to_owned(), how.to_owned())).collect();
        outcomes.insert(format!("{module} as a whole"), end);
        Self { outcomes, said: String::from_utf8_lossy(err).into_owned() }
    }

    /// How often tests ended in which way, for people.
    pub(crate) fn tally(&self) -> String {
        let mut counts = BTreeMap::<&str, usize>::new();
        for how in self.outcomes.values() {
            *counts.entry(how.as_str()).or_default() += 1;
        }
        counts.iter().map(|(how, count)| format!("{count} {how}")).collect::<Vec<_>>().join(", ")
    }
}

/// The tests that ended in another way with the library, and what they said. `again` runs the suite without the library once more: some tests do not
/// end the same way twice without it, either.
pub(crate) fn differences(plain: &SuiteRun, ours: &SuiteRun, again: impl FnOnce() -> SuiteRun) -> Vec<String> {
    let with = |test: &String| ours.outcomes.get(test).map_or("did not run", String::as_str);
    let mut found: Vec<_> = plain.outcomes.iter().filter(|(test, how)| with(test) != how.as_str()).collect();
    if !found.is_empty() {
        let again = again();
        found.retain(|(test, how)| again.outcomes.get(*test) == Some(how));
    }
    if !found.is_empty() {
        let tail: Vec<&str> = ours.said.lines().rev().take(150).collect();
        eprintln!("{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
    }
    let line = |(test, how): (&String, &String)| format!("{test}: without the library {how}, with it {}", with(test));
    found.into_iter().map(line).collect()
}

/// The tests that ended well on the host and not in a guest.
pub(crate) fn lost_inside(outside: &SuiteRun, inside: &SuiteRun) -> Vec<String> {
    let ended_well = outside.outcomes.iter().filter(|(_, how)| *how == "ok").map(|(test, _)| test);
    let how = |test: &String| inside.outcomes.get(test).map_or("did not run", String::as_str);
    let lost = ended_well.filter(|test| how(test) != "ok");
    lost.map(|test| format!("{test}: outside of the guest ok, in it {}", how(test))).collect()
}

/// Fails with the differences of all suites.
pub(crate) fn assert_none(differences: &[String]) {
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
}
