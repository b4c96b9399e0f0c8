//! The parts that the tests share: C programs that are compiled against the header and linked with the library of this build.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use partywall_daemon::Broker;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The longest that a program of a test may run, valgrind included.
const HANG: Duration = Duration::from_secs(120);

/// The folder of this crate.
pub(crate) fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder in which cargo has put the library that this test was built with.
fn built_folder() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// The shared library.
pub(crate) fn shared_library() -> PathBuf {
    built_folder().join("libpartywall_capi.so")
}

/// The static library.
pub(crate) fn static_library() -> PathBuf {
    built_folder().join("libpartywall_capi.a")
}

/// A folder that has the shared library under the names by which programs are linked and started.
pub(crate) fn installed() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        // Test programs of one build share it. Each makes its links under another name and moves them into place.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libpartywall");
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["libpartywall.so", "libpartywall.so.0"] {
            let fresh = folder.join(format!("{name}.new-{}", std::process::id()));
            std::os::unix::fs::symlink(shared_library(), &fresh).unwrap();
            std::fs::rename(fresh, folder.join(name)).unwrap();
        }
        folder
    })
}

/// A compiler of the system, and the language that it is to accept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Compiler {
    pub(crate) program: &'static str,
    pub(crate) standard: &'static str,
}

pub(crate) const GCC: Compiler = Compiler { program: "gcc", standard: "-std=c11" };

pub(crate) const COMPILERS: [Compiler; 4] = [
    GCC,
    Compiler { program: "g++", standard: "-std=c++17" },
    Compiler { program: "clang", standard: "-std=c11" },
    Compiler { program: "clang++", standard: "-std=c++17" },
];

/// Whether a program is installed; reported where it is not.
pub(crate) fn is_installed(program: &str) -> bool {
    let there =
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|dir| dir.join(program).exists());
    if !there {
        // Past the harness, which keeps what tests print to itself.
        let _ = writeln!(std::io::stderr(), "NOT TESTED with {program}, which is not installed");
    }
    there
}

/// Compiles C or C++ against the header, with all warnings as errors.
pub(crate) fn compile(compiler: Compiler, source: &Path, flags: &[&str], output: &Path) {
    let mut cc = Command::new(compiler.program);
    cc.args([compiler.standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g", "-D_GNU_SOURCE"]);
    if compiler.program.ends_with("++") {
        cc.args(["-x", "c++"]);
    }
    cc.arg("-I").arg(crate_folder().join("include")).arg(source);
    if compiler.program.ends_with("++") {
        cc.args(["-x", "none"]);
    }
    cc.args(flags).arg("-o").arg(output);
    let result = cc.output().unwrap_or_else(|e| panic!("{cc:?}: {e}"));
    assert!(result.status.success(), "{cc:?}\n{}", String::from_utf8_lossy(&result.stderr));
}

/// A folder for the programs of one test, and a broker for them.
pub(crate) struct Bench {
    folder: tempfile::TempDir,
    pub(crate) broker: Broker,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), broker: Broker::embedded().unwrap() }
    }

    /// Builds a program with the shared library.
    pub(crate) fn program(&self, compiler: Compiler, source: &str, flags: &[&str]) -> PathBuf {
        let source = crate_folder().join(source);
        let output =
            self.folder.path().join(format!("{}-{}", source.file_stem().unwrap().to_str().unwrap(), compiler.program));
        let folder = format!("-L{}", installed().display());
        let all = [&[folder.as_str(), "-lpartywall", "-pthread"], flags].concat();
        compile(compiler, &source, &all, &output);
        output
    }

    /// A command that finds the library and the broker.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", installed()).env("PARTYWALL_BROKER", self.broker.path()).stdin(Stdio::null());
        command
    }

    /// Runs a program to its end, and asserts that it succeeds.
    pub(crate) fn run(&self, command: &mut Command) -> Output {
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let id = child.id().to_string();
        let (ended, watched) = std::sync::mpsc::channel::<()>();
        let guard = std::thread::spawn(move || {
            if watched.recv_timeout(HANG) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                let _ = Command::new("kill").args(["-9", &id]).status();
            }
        });
        let output = child.wait_with_output().unwrap();
        drop(ended);
        guard.join().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
        output
    }
}

/// A program that is killed when the test is done with it.
pub(crate) struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// The next line that it prints; empty at its end.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < HANG, "process {} does not end", self.child.id());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
