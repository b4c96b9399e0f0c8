//! `run` executes the given program, with the environment that makes sockets transparent; `doctor -- COMMAND` judges programs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::{Guard, PARTYWALL, World, copy_program, make_executable, said};
use tempfile::TempDir;

/// An installation: `bin/partywall`, and a library in `lib/partywall` that is one for the loader, and does nothing.
///
/// These tests see the environment that the loader and the program get, not what a library does with it.
struct Installed(TempDir);

impl Installed {
    fn new() -> Self {
        let bare = Self::without_library();
        let library = bare.library();
        std::fs::create_dir_all(library.parent().unwrap()).unwrap();
        // Every dynamically linked program has it already, so that preloading it changes nothing.
        std::fs::copy(libc(), library).unwrap();
        bare
    }

    fn without_library() -> Self {
        let dir = tempfile::Builder::new().prefix("partywall-cli-run-").tempdir().unwrap();
        std::fs::create_dir(dir.path().join("bin")).unwrap();
        copy_program(PARTYWALL, dir.path().join("bin/partywall"));
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn library(&self) -> PathBuf {
        self.path("lib/partywall/libpartywall_preload.so")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.path("bin/partywall"));
        for key in ["PARTYWALL_BROKER", "PARTYWALL_DOMAIN", "PARTYWALL_MOVES", "RUST_LOG", "LD_PRELOAD"] {
            command.env_remove(key);
        }
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs `partywall` with this broker, for a user who is called `me`.
    fn output_with(&self, broker: &World, arguments: &[&str]) -> Output {
        Guard::spawn(self.command(arguments).env("PARTYWALL_BROKER", broker.socket()).env("USER", "me")).output()
    }

    fn output(&self, arguments: &[&str]) -> Output {
        Guard::spawn(&mut self.command(arguments)).output()
    }

    /// The result of `doctor` for a program: its exit code, and its findings by name.
    fn verdict(&self, program: &Path) -> (Option<i32>, serde_json::Value) {
        self.verdict_with(&World::new(), program)
    }

    fn verdict_with(&self, broker: &World, program: &Path) -> (Option<i32>, serde_json::Value) {
        let output = self.output_with(broker, &["doctor", "--json", "--", program.to_str().unwrap()]);
        let report: serde_json::Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)));
        let mut by_name = serde_json::Map::new();
        for check in report["checks"].as_array().unwrap() {
            by_name.insert(check["name"].as_str().unwrap().to_owned(), check.clone());
        }
        (output.status.code(), by_name.into())
    }

    /// Compiles a C program that ends with 42 if something is preloaded, else with 41; `None` if this machine lacks the compiler.
    fn compile(&self, compiler: &str, name: &str, options: &[&str]) -> Option<PathBuf> {
        let source = self.path("program.c");
        std::fs::write(&source, "#include <stdlib.h>\nint main(void) { return getenv(\"LD_PRELOAD\") ? 42 : 41; }\n")
            .unwrap();
        let output = self.path(name);
        let compiled = Command::new(compiler).args(options).arg("-o").arg(&output).arg(&source).output();
        match compiled {
            Ok(result) if result.status.success() => Some(output),
            Ok(result) => {
                eprintln!("{compiler} {options:?}: {}", said(&result));
                None
            }
            Err(error) => {
                eprintln!("{compiler}: {error}");
                None
            }
        }
    }
}

/// The C library that this test itself uses.
fn libc() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.lines().find_map(|line| line.split_whitespace().nth(5).filter(|path| path.contains("/libc.so.")));
    PathBuf::from(path.expect("tests run with glibc"))
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn program_gets_environment_and_its_arguments() {
    let (world, installed) = (World::new(), Installed::new());
    let socket = world.socket();
    let arguments = [
        "--broker",
        socket.to_str().unwrap(),
        "--domain",
        "shop",
        "run",
        "--move",
        "after=16,bytes=64K",
        "--move",
        "never@port=22",
        "--ring",
        "1M",
        "--spin",
        "20us",
        "--",
        "sh",
        "-c",
        "env; echo \"$0 $@\"",
        "a",
        "--ring",
        "-v",
    ];
    let output = installed.output(&arguments);
    assert!(output.status.success(), "{}", said(&output));
    let text = text(&output);
    for line in [
        format!("PARTYWALL_BROKER={}", socket.display()),
        "PARTYWALL_DOMAIN=shop".into(),
        "PARTYWALL_MOVES=after=16,bytes=65536 never@port=22".into(),
        "PARTYWALL_RING=1048576".into(),
        "PARTYWALL_SPIN_US=20".into(),
        format!("LD_PRELOAD={}", installed.library().display()),
        "a --ring -v".into(),
    ] {
        assert!(text.lines().any(|have| have == line), "{line} is missing:\n{text}");
    }
    assert_eq!(said(&output), "", "nothing is wrong, so that nothing is said");
}

#[test]
fn run_with_move_now_warns_of_short_connections_unless_quiet() {
    let (world, installed) = (World::new(), Installed::new());
    for (options, warned) in [(&["--move", "now"][..], true), (&["--policy", "now", "-q"], false)] {
        let mut command = installed.command(&[&["run"], options, &["true"]].concat());
        let output = Guard::spawn(command.env("PARTYWALL_BROKER", world.socket())).output();
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(said(&output).contains("short connections"), warned, "{options:?}: {}", said(&output));
    }
}

#[test]
fn unset_options_set_no_variables() {
    let (world, installed) = (World::new(), Installed::new());
    let mut command = installed.command(&["run", "env"]);
    command.env("PARTYWALL_BROKER", world.socket()).env("LD_PRELOAD", libc());
    let text = text(&Guard::spawn(&mut command).output());
    for key in ["PARTYWALL_DOMAIN", "PARTYWALL_MOVES", "PARTYWALL_RING", "PARTYWALL_SPIN_US"] {
        assert!(!text.contains(key), "{text}");
    }
    let preload = format!("LD_PRELOAD={}:{}", installed.library().display(), libc().display());
    assert!(text.lines().any(|line| line == preload), "{preload}:\n{text}");
}

#[test]
fn relative_broker_path_survives_change_of_folder() {
    let (world, installed) = (World::new(), Installed::new());
    let mut command =
        installed.command(&["--broker", "broker.sock", "run", "sh", "-c", "cd /; echo $PARTYWALL_BROKER"]);
    let output = Guard::spawn(command.current_dir(world.socket().parent().unwrap())).output();
    assert_eq!(text(&output).trim(), world.socket().to_str().unwrap(), "{}", said(&output));
}

#[test]
fn run_executes_the_program_in_its_own_process() {
    let (world, installed) = (World::new(), Installed::new());
    let mut command = installed.command(&["run", "sh", "-c", "echo $$; cat >/dev/null; exit 41"]);
    command.env("PARTYWALL_BROKER", world.socket()).stdin(Stdio::piped());
    let mut child = Guard::spawn(&mut command);
    let mut pid = [0; 20];
    let read = child.0.stdout.as_mut().unwrap().read(&mut pid).unwrap();
    assert_eq!(String::from_utf8_lossy(&pid[..read]).trim(), child.0.id().to_string(), "no process in between");
    drop(child.0.stdin.take());
    assert_eq!(child.code(), Some(41), "the exit code is the program's");
    let mut command = installed.command(&["run", "sh", "-c", "kill -9 $$"]);
    let status = Guard::spawn(command.env("PARTYWALL_BROKER", world.socket())).wait();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
}

#[test]
fn run_without_broker_warns_and_runs_the_program() {
    let installed = Installed::new();
    let none = installed.path("none.sock");
    let arguments = ["--broker", none.to_str().unwrap(), "run", "sh", "-c", "echo ran; exit 5"];
    let output = installed.output(&arguments);
    assert_eq!((output.status.code(), text(&output).as_str()), (Some(5), "ran\n"));
    let said = said(&output);
    assert!(said.lines().count() == 1 && said.contains("no broker answers") && said.contains("TCP"), "{said}");
    let quiet = installed.output(&["--broker", none.to_str().unwrap(), "run", "--quiet", "true"]);
    assert!(quiet.status.success() && quiet.stderr.is_empty());
}

#[test]
fn run_with_refusing_broker_warns() {
    let (world, installed) = (World::with_policy(Some("administrators = []\n")), Installed::new());
    let mut command = installed.command(&["run", "sh", "-c", "echo ran"]);
    let output = Guard::spawn(command.env("PARTYWALL_BROKER", world.socket())).output();
    assert_eq!(text(&output), "ran\n");
    let said = said(&output);
    assert!(said.contains("stays on TCP") && said.contains("[[join]]"), "{said}");
    let user = format!("users = [{}]", rustix::process::geteuid().as_raw());
    assert!(said.contains(&user), "{said}");
}

/// A broker that lets this user join under these names alone.
fn world_of(domain: &str) -> World {
    let user = rustix::process::geteuid().as_raw();
    World::with_policy(Some(&format!("administrators = []\n[[join]]\ndomain = \"{domain}\"\nusers = [{user}]\n")))
}

#[test]
fn run_warns_if_the_policy_refuses_the_program_name() {
    let installed = Installed::new();
    for (admitted, warned) in [("me-*", true), ("sh-*", false)] {
        let output = installed.output_with(&world_of(admitted), &["run", "sh", "-c", "true"]);
        assert!(output.status.success(), "{admitted}: {}", said(&output));
        assert_eq!(said(&output).contains("domain = \"sh-*\""), warned, "{admitted}: {}", said(&output));
        assert_eq!(said(&output).is_empty(), !warned, "{admitted}: {}", said(&output));
    }
}

#[test]
fn doctor_fails_if_the_policy_refuses_the_program_name() {
    let installed = Installed::new();
    for (admitted, code, status) in [("me-*", 1, "fail"), ("sh-*", 0, "ok")] {
        let (ended, found) = installed.verdict_with(&world_of(admitted), Path::new("/bin/sh"));
        let reachable = &found["reachable"];
        assert_eq!((ended, &reachable["status"]), (Some(code), &status.into()), "{admitted}: {found:#}");
        let rule = reachable["remedy"].as_str().is_some_and(|remedy| remedy.contains("domain = \"sh-*\""));
        assert_eq!(rule, code == 1, "{admitted}: {reachable}");
    }
}

#[test]
fn doctor_without_broker_fails_for_a_program() {
    let installed = Installed::new();
    let none = installed.path("none.sock");
    let output = installed.output(&["--broker", none.to_str().unwrap(), "doctor", "--", "sh"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let text = text(&output);
    assert!(text.contains("FAIL reachable") && text.contains("1 missing"), "{text}");
}

#[test]
fn unrunnable_program_has_exit_code_126_or_127() {
    let installed = Installed::new();
    let plain = installed.path("plain");
    std::fs::write(&plain, "no program").unwrap();
    assert_eq!(installed.output(&["run", "no-such-program-of-partywall"]).status.code(), Some(127));
    assert_eq!(installed.output(&["run", plain.to_str().unwrap()]).status.code(), Some(126));
    assert_eq!(installed.output(&["doctor", "--", "no-such-program-of-partywall"]).status.code(), Some(127));
    for wrong in [&["run"][..], &["run", "--move", "soon", "true"], &["run", "--ring", "3000", "true"]] {
        assert_eq!(installed.output(wrong).status.code(), Some(2), "{wrong:?}");
    }
    let without = Installed::without_library();
    let output = without.output(&["run", "true"]);
    assert_eq!(output.status.code(), Some(1));
    let said = said(&output);
    assert!(said.contains("libpartywall_preload.so") && said.contains("make install"), "{said}");
}

#[test]
fn misspelt_option_is_reported_with_a_suggestion() {
    let installed = Installed::new();
    for (wrong, right) in [
        (&["run", "--mvoe", "never", "true"][..], "--move"),
        (&["run", "--quite", "true"], "--quiet"),
        (&["doctor", "--jsn", "true"], "--json"),
    ] {
        let output = installed.output(wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {}", said(&output));
        let said = said(&output);
        assert!(said.contains(wrong[1]) && said.contains(right), "{said}");
    }
    let output = installed.output(&["run", "-x", "true"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    // After two hyphens it is the name of a program.
    let output = installed.output(&["run", "--", "--polcy"]);
    assert_eq!(output.status.code(), Some(127), "{}", said(&output));
    // Arguments after the program are the program's own.
    let output = installed.output(&["run", "--quiet", "echo", "--polcy", "-v", "--ring", "--", "x"]);
    assert_eq!(text(&output), "--polcy -v --ring -- x\n", "{}", said(&output));
}

#[test]
fn ordinary_programs_can_be_accelerated() {
    let installed = Installed::new();
    let ls = std::fs::canonicalize("/bin/ls").unwrap();
    let (code, found) = installed.verdict(&ls);
    assert_eq!(code, Some(0), "{found:#}");
    assert_eq!(found["loading"]["status"], "ok", "{found:#}");
    assert_eq!(found["our library"]["status"], "ok", "{found:#}");
    let script = installed.path("script");
    std::fs::write(&script, "#!/usr/bin/env -S sh -e\n").unwrap();
    make_executable(&script);
    let (code, found) = installed.verdict(&script);
    assert_eq!(code, Some(0), "{found:#}");
    let file = found["file"]["found"].as_str().unwrap();
    assert!(file.contains("a script") && file.contains("/sh"), "{file}");
    assert_eq!(found["socket calls"]["status"], "warn", "a shell has no sockets: {found:#}");
    // curl, where it is there, has them in a library.
    if let Some(curl) = ["/usr/bin/curl"].into_iter().map(Path::new).find(|path| path.exists()) {
        let (_, found) = installed.verdict(curl);
        assert!(found["socket calls"]["found"].as_str().unwrap().contains("connect"), "{found:#}");
    }
}

#[test]
fn static_program_runs_without_acceleration() {
    let installed = Installed::new();
    let Some(program) = installed.compile("cc", "static", &["-static"]) else { return };
    let (code, found) = installed.verdict(&program);
    assert_eq!(code, Some(1));
    assert!(found["loading"]["found"].as_str().unwrap().contains("statically linked"), "{found:#}");
    assert!(!found["loading"]["remedy"].is_null());
    let output = installed.output(&["run", program.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(42), "what it starts may use the library");
    let said = said(&output);
    assert!(said.lines().count() == 1 && said.contains("statically linked"), "{said}");
}

#[test]
fn musl_program_runs_without_the_library() {
    let installed = Installed::new();
    let Some(program) = installed.compile("musl-gcc", "musl", &[]) else { return };
    let (code, found) = installed.verdict(&program);
    assert_eq!(code, Some(1));
    assert!(found["loading"]["found"].as_str().unwrap().contains("musl"), "{found:#}");
    let output = installed.output(&["run", program.to_str().unwrap()]);
    let said = said(&output);
    assert!(said.lines().count() == 1 && said.contains("musl"), "{said}");
    assert_eq!(output.status.code(), Some(41), "it runs without the library");
}

#[test]
fn go_program_is_recognised() {
    let installed = Installed::new();
    let source = installed.path("main.go");
    std::fs::write(&source, "package main\nfunc main() {}\n").unwrap();
    let program = installed.path("gone");
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(&program).arg(&source).env("GO111MODULE", "off").env("GOFLAGS", "");
    build.env("GOCACHE", installed.path("cache"));
    if !build.output().is_ok_and(|output| output.status.success()) {
        eprintln!("no Go toolchain: not tested");
        return;
    }
    let (code, found) = installed.verdict(&program);
    assert_eq!(code, Some(1));
    assert!(found["loading"]["found"].as_str().unwrap().contains("Go program"), "{found:#}");
}

#[test]
fn setuid_program_is_recognised() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("making a program of another user takes root: not tested");
        return;
    }
    let installed = Installed::new();
    let program = installed.path("set-user-id");
    copy_program("/bin/true", &program);
    std::os::unix::fs::chown(&program, Some(65534), Some(65534)).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let (code, found) = installed.verdict(&program);
    assert_eq!(code, Some(1), "{found:#}");
    assert!(found["rights"]["found"].as_str().unwrap().contains("set-user-id (to 65534)"), "{found:#}");
    let output = installed.output(&["run", program.to_str().unwrap()]);
    assert!(output.status.success() && said(&output).contains("set-user-id"), "{}", said(&output));
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(installed.verdict(&program).0, Some(0));
}
