//! The wheel, built by maturin and installed into a fresh environment, does what `test_partywall.py` and `test_calls.py` ask of it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_daemon::Broker;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder of this build, above that of the test programs.
fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().to_owned()
}

/// maturin, as `make setup-programs` installs it, or the machine's.
fn maturin() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = std::env::split_paths(&path).map(|folder| folder.join("maturin"));
    std::iter::once(target().join("tools/maturin/bin/maturin")).chain(installed).find(|file| file.exists())
}

/// A Python that has what the wheel needs: version 3.11 or later, and `venv`.
fn python() -> Option<PathBuf> {
    let fits = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))";
    ["/usr/bin/python3", "python3"].into_iter().map(PathBuf::from).find(|python| {
        let status = Command::new(python).args(["-c", fits]).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    })
}

fn run(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        said(&output.stdout),
        said(&output.stderr)
    );
}

#[test]
fn wheel_in_fresh_environment_passes_its_tests() {
    let (Some(maturin), Some(python)) = (maturin(), python()) else {
        // Past the harness, which keeps what tests print to itself.
        let why = "NOT TESTED: the Python package needs Python 3.11 with venv, and maturin (`make setup-programs` installs both)";
        let _ = writeln!(std::io::stderr(), "{why}");
        return;
    };
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let wheels = folder.path().join("wheels");
    // In a separate folder: maturin chooses other settings for PyO3 than the workspace, and each would build it again after the other.
    let build = target().join("wheel");
    let mut make = Command::new(maturin);
    make.args(["build", "--quiet", "--profile", "dev", "--interpreter"]).arg(&python).arg("--target-dir").arg(build);
    run(make.arg("--out").arg(&wheels).current_dir(crate_folder));
    let wheel = std::fs::read_dir(&wheels).unwrap().next().unwrap().unwrap().path();
    assert!(wheel.to_str().unwrap().contains("-abi3-"), "{wheel:?}");

    let environment = folder.path().join("environment");
    run(Command::new(&python).args(["-m", "venv"]).arg(&environment));
    let fresh = environment.join("bin/python");
    run(Command::new(&fresh).args(["-m", "pip", "install", "--quiet", "--no-index"]).arg(&wheel));
    let broker = Broker::embedded().unwrap();
    for file in ["tests/test_partywall.py", "tests/test_calls.py"] {
        let mut tests = Command::new("timeout");
        tests.arg("120").arg(&fresh).arg(crate_folder.join(file)).env("PARTYWALL_BROKER", broker.path());
        tests.env("PARTYWALL_GUIDE", crate_folder.join("../../docs/python.md"));
        tests.env("PARTYWALL_RPC_GUIDE", crate_folder.join("../../docs/rpc.md"));
        run(tests.current_dir(folder.path()));
    }
}
