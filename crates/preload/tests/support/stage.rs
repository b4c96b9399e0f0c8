//! A scenario of real programs, played without the library and with it, on loopback and between network namespaces.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use tempfile::TempDir;

use super::{
    guard::Guard,
    netns::Namespaces,
    switch::{Policy, Switch},
    world::World,
};

/// Where a scenario plays, and whether with the library.
pub(crate) struct Stage<'a> {
    pub(crate) world: Option<&'a World>,
    pub(crate) spaces: Option<&'a Namespaces>,
    pub(crate) folder: TempDir,
}

impl Stage<'_> {
    pub(crate) fn command(&self, which: usize, program: &Path) -> Command {
        // The variables are for the program alone, not for what brings it to its place.
        let mut command = match self.spaces {
            Some(spaces) => spaces.command(which, Path::new("/usr/bin/env")),
            None => Command::new("/usr/bin/env"),
        };
        if let Some(world) = self.world {
            let mut with = Command::new(program);
            world.preload(&mut with);
            for (name, value) in with.get_envs() {
                let mut setting = name.to_owned();
                setting.push("=");
                setting.push(value.unwrap());
                command.arg(setting);
            }
        }
        command.arg(program).current_dir(self.folder.path()).env_remove("LD_PRELOAD").env("LC_ALL", "C.UTF-8");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// A server, with its output in a file of the folder.
    pub(crate) fn server(&self, program: &Path, arguments: &[&str]) -> Guard {
        let log = fs::File::options().append(true).create(true).open(self.path("server.log")).unwrap();
        let mut command = self.command(0, program);
        Guard::spawn(command.args(arguments).stdout(log.try_clone().unwrap()).stderr(log))
    }

    /// A client, to its end; what it printed.
    pub(crate) fn client(&self, program: &Path, arguments: &[&str]) -> String {
        self.client_with(program, arguments, Stdio::null())
    }

    pub(crate) fn client_with(&self, program: &Path, arguments: &[&str], stdin: Stdio) -> String {
        let output = Guard::spawn(self.command(1, program).args(arguments).stdin(stdin)).output();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let log = || fs::read_to_string(self.path("server.log")).unwrap_or_default();
        assert!(output.status.success(), "{program:?} {arguments:?}: {}, {said}; the server: {}", output.status, log());
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn address(&self) -> &'static str {
        if self.spaces.is_some() { Namespaces::ADDRESSES[0] } else { "127.0.0.1" }
    }

    /// Waits until a server, or a descendant of it, listens.
    pub(crate) fn await_listener(&self, server: &mut Guard, port: u16) {
        server.await_listener(port, &|| fs::read_to_string(self.path("server.log")).unwrap_or_default());
    }
}

/// Whether a process in the network namespace of `process` listens on a port.
pub(super) fn listens(process: u32, port: u16) -> bool {
    ["tcp", "tcp6"].iter().any(|table| {
        let table = fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap_or_default();
        table.lines().skip(1).any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let local = fields.next().unwrap_or_default();
            local.ends_with(&format!(":{port:04X}")) && fields.nth(1) == Some("0A")
        })
    })
}

/// Plays a scenario without and with the library, on loopback and between namespaces: the same output, and at least this number of
/// bytes over rings, to which connections go at once.
pub(crate) fn both(scenario: &dyn Fn(&Stage<'_>) -> String, least: u64) {
    both_under(&[Some("now")], scenario, least);
}

/// Runs the scenario once without the library, and with it under each of these move rules; `None` for the default rules.
pub(crate) fn both_under(policies: &[Option<&str>], scenario: &dyn Fn(&Stage<'_>) -> String, least: u64) {
    let spaces = Namespaces::create();
    for spaces in [None, spaces.as_ref()].into_iter().take(1 + usize::from(spaces.is_some())) {
        let place = if spaces.is_some() { "between namespaces" } else { "on loopback" };
        let folder = || {
            let folder = tempfile::Builder::new().prefix("partywall-programs-").tempdir().unwrap();
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
            folder
        };
        let plain = scenario(&Stage { world: None, spaces, folder: folder() });
        if std::env::var_os("PARTYWALL_TEST_PLAIN").is_some() {
            eprintln!("{place}:\n{plain}");
            continue;
        }
        for policy in policies {
            let world = World::new();
            if let Some(clauses) = policy {
                Policy::new(world.socket()).set(clauses);
            }
            let rules = policy.unwrap_or("the default rules");
            let switch = Switch::watch(&world);
            let ours = scenario(&Stage { world: Some(&world), spaces, folder: folder() });
            assert_eq!(plain, ours, "{place}, {rules}: without, and with the library");
            let seen = switch.seen();
            eprintln!("{place}, {rules}: {seen:?}; at least {least} bytes");
            assert!(
                seen.ring_bytes >= least,
                "{place}, {rules}: {seen:?}; at least {least} bytes were to go over rings"
            );
        }
    }
}

/// A digest, for people.
pub(crate) fn digest(bytes: &[u8]) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    // In words: without an optimiser, a step for each byte takes seconds for large files.
    for part in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        hash = (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01b3);
        // A product's low bits do not depend on the high bits of its factors.
        hash ^= hash >> 32;
    }
    format!("{} bytes, {hash:016x}", bytes.len())
}

pub(crate) fn script(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name).to_str().unwrap().to_owned()
}

/// Debian's own, not one of a user's that may be first on the path.
pub(crate) fn python() -> PathBuf {
    PathBuf::from("/usr/bin/python3")
}
