//! `make install` and `make uninstall`, by the script behind them, with the programs of this build.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{library, partywalld, said};

const PROGRAMS: [&str; 2] = ["partywall", "partywalld"];

/// A tree to install from, with a `make` that must not be called, and one to install into.
struct Trees(tempfile::TempDir);

impl Trees {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("partywall-cli-install-").tempdir().unwrap();
        let release = dir.path().join("target/release");
        std::fs::create_dir_all(&release).unwrap();
        let built = partywalld().parent().unwrap();
        library();
        for file in PROGRAMS.into_iter().chain([partywall_protocol::environment::LIBRARY]) {
            symlink(built.join(file), release.join(file)).unwrap();
        }
        // Any library does for that of C, which is installed and not loaded here.
        symlink(library(), release.join("libpartywall_capi.so")).unwrap();
        std::fs::write(release.join("libpartywall_capi.a"), "!<arch>\n").unwrap();
        // It is installed, and not run.
        for file in ["partywall-agent", "partywall-net", "partywall-blk", "partywall-fs", "partywall-gateway"] {
            symlink("/bin/true", release.join(file)).unwrap();
        }
        let make = dir.path().join("make");
        common::make_script(&make, "echo called >> \"$0.called\"");
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, arguments: &[&str], sudo_user: Option<&str>) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install.sh");
        let mut command = Command::new(script);
        command.args(arguments).env("TARGET_DIR", self.path("target")).env("MAKE", self.path("make"));
        command.env("DESTDIR", self.path("into")).env("PREFIX", "/usr").env_remove("EXTRAS").env_remove("SUDO_USER");
        command.envs(sudo_user.map(|user| ("SUDO_USER", user)));
        command.output().unwrap()
    }

    /// Files below the folder into which is installed.
    fn installed(&self) -> BTreeSet<String> {
        fn walk(folder: &Path, root: &Path, into: &mut BTreeSet<String>) {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                match entry.file_type().unwrap().is_dir() {
                    true => walk(&entry.path(), root, into),
                    false => drop(into.insert(entry.path().strip_prefix(root).unwrap().display().to_string())),
                }
            }
        }
        let mut all = BTreeSet::new();
        walk(&self.path("into"), &self.path("into"), &mut all);
        all
    }
}

#[test]
fn installed_files_are_stripped_complete_and_removed_again() {
    let trees = Trees::new();
    let output = trees.run(&[], None);
    assert!(output.status.success(), "{}", said(&output));
    let installed = trees.installed();
    for file in [
        "usr/bin/partywall",
        "usr/bin/partywalld",
        "usr/bin/partywall-agent",
        "usr/bin/partywall-net",
        "usr/bin/partywall-blk",
        "usr/bin/partywall-fs",
        "usr/bin/partywall-gateway",
        "usr/lib/partywall/libpartywall_preload.so",
        "usr/lib/libpartywall.so.0",
        "usr/lib/libpartywall.a",
        "usr/include/partywall.h",
        "usr/lib/systemd/system/partywalld.service",
        "usr/lib/systemd/system/partywall-gateway.service",
        "usr/lib/systemd/system/partywall-numbers.service",
        "usr/lib/systemd/system/partywall-net@.service",
        "usr/share/bash-completion/completions/partywalld",
        "usr/share/bash-completion/completions/partywall-gateway",
        "usr/share/man/man8/partywall-gateway.8",
        "usr/share/man/man8/partywall-gateway-certificates.8",
        "usr/share/doc/partywall/partywalld.toml",
        "usr/share/man/man1/partywall-run.1",
        "usr/share/man/man5/partywalld.toml.5",
        "usr/share/man/man5/partywall-net.toml.5",
        "usr/share/doc/partywall/net.toml",
        "usr/share/man/man8/partywalld.8",
    ] {
        assert!(installed.contains(file), "{file} is missing: {installed:?}");
    }
    assert!(!installed.iter().any(|file| file.contains("bench") && file.contains("/bin/")), "{installed:?}");
    let program = trees.path("into/usr/bin/partywall");
    let before = partywalld().with_file_name("partywall").metadata().unwrap().len();
    assert!(program.metadata().unwrap().len() < before / 2, "its symbols are still there");
    let version = Command::new(&program).arg("--version").output().unwrap();
    assert!(version.status.success(), "{}", said(&version));

    // The files of others stay.
    let others = ["usr/lib/partywall/other.so", "usr/share/man/man1/other.1"];
    for file in others {
        std::fs::write(trees.path("into").join(file), "").unwrap();
    }
    let output = trees.run(&["uninstall"], None);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(trees.installed(), others.map(str::to_owned).into());
    assert!(!trees.path("into/usr/share/doc/partywall").exists(), "an empty folder is left");
}

#[test]
fn install_as_root_for_sudo_user_compiles_nothing() {
    let trees = Trees::new();
    let is_root = rustix::process::geteuid().is_root();
    assert!(trees.run(&[], Some("somebody")).status.success());
    // Another user's build is up to date at once; root's would leave files of root's.
    assert_eq!(trees.path("make.called").exists(), !is_root);
    if !is_root {
        return;
    }
    std::fs::remove_file(trees.path("target/release/partywalld")).unwrap();
    let output = trees.run(&[], Some("somebody"));
    assert_eq!(output.status.code(), Some(1));
    let said = said(&output);
    assert!(said.contains("partywalld is not built") && said.contains("make build"), "{said}");
    assert!(!trees.path("make.called").exists());
}
