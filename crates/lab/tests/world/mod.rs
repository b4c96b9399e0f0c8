//! A host with a broker, and guests with agents: the programs as users run them.

pub(crate) mod python;

use partywall_lab::{CommandOutput, Guest, GuestOptions, ImageOptions, Lab, Running};
use partywall_region::relay::PORT;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer is a hang.
pub(crate) const HANG: Duration = Duration::from_secs(180);
/// A guest that is silent for so long is taken for hung. Emulated and busy, one is easily silent for some seconds.
const SILENCE: &str = "12";

/// A process of the host that does not outlive its test.
pub(crate) struct Process(pub(crate) Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A broker on the host, with guests.
pub(crate) struct World {
    broker: Option<Process>,
    // Dropped last: sockets and windows are in it.
    pub(crate) dir: tempfile::TempDir,
    lab: Lab,
}

/// A program of ours beside this one, built if need be, and not if the environment says that everything is (`make test` does).
pub(crate) fn program(package: &str, name: &str) -> PathBuf {
    build(package, name, None)
}

/// The library that `partywall run` loads, beside this program.
pub(crate) fn preload_library() -> PathBuf {
    let library = program_path("libpartywall_preload.so");
    if std::env::var_os("PARTYWALL_PROGRAMS_ARE_BUILT").is_none() || !library.exists() {
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.args(["build", "--quiet", "--package", "partywall-preload"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        if library.parent().and_then(Path::file_name).is_some_and(|profile| profile == "release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "partywall-preload does not build");
    }
    library
}

/// The same program without any library, as for machines of other distributions. `None` where Rust cannot build it.
pub(crate) fn static_program(package: &str, name: &str) -> Option<PathBuf> {
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let folder = Command::new("rustc").args(["--print", "target-libdir", "--target", &target]).output().ok()?;
    if !Path::new(String::from_utf8_lossy(&folder.stdout).trim_end()).is_dir() {
        skipped(&format!(
            "the static {name}, since Rust has no target {target} here; install it with: rustup target add {target}"
        ));
        return None;
    }
    Some(build(package, name, Some(&target)))
}

/// Says that a test, or a part of one, does not run, and why. Not by `print!`, which the test harness keeps from being seen while tests pass.
pub(crate) fn skipped(why: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("NOT TESTED: {test}: {why}\n").as_bytes());
}

fn build(package: &str, name: &str, target: Option<&str>) -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let folder = here.ancestors().nth(2).unwrap();
    let (all, profile) = (folder.parent().unwrap(), folder.file_name().unwrap().to_str().unwrap());
    let built = target.map_or(folder.to_owned(), |target| all.join(target).join(profile)).join(name);
    if std::env::var_os("PARTYWALL_PROGRAMS_ARE_BUILT").is_some() && built.exists() {
        return built;
    }
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "--package", package, "--bin", name]);
    build.args(["--profile", if profile == "debug" { "dev" } else { profile }]);
    build.args(target.iter().flat_map(|target| ["--target", target]));
    build.arg("--target-dir").arg(all).current_dir(env!("CARGO_MANIFEST_DIR"));
    assert!(
        build.status().unwrap().success(),
        "{package} does not build (scripts/setup.sh programs brings what it takes)"
    );
    built
}

/// A test that fails shows what the broker has said.
impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the broker: {}", self.log());
        }
    }
}

impl World {
    pub(crate) fn new(name: &str) -> Self {
        Self::with(name, ImageOptions::default())
    }

    /// With more in the guests than our programs.
    pub(crate) fn with(name: &str, image: ImageOptions) -> Self {
        Self::with_agent(name, image, program("partywall-agent", "partywall-agent"))
    }

    /// A world with a certain agent.
    pub(crate) fn with_agent(name: &str, image: ImageOptions, agent: PathBuf) -> Self {
        let image = image.program(program("partywall-cli", "partywall"), "partywall").program(agent, "partywall-agent");
        let lab = Lab::new(name, &image).unwrap();
        let dir = tempfile::Builder::new().prefix("partywall-lab-").tempdir().unwrap();
        let mut world = Self { broker: None, dir, lab };
        world.start_broker();
        world
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The socket of a machine's serial port, where machines of libvirt have it.
    pub(crate) fn port(&self, machine: &str) -> PathBuf {
        let folder = self.path(&format!("domain-{machine}"));
        std::fs::create_dir_all(&folder).unwrap();
        folder.join("partywall.port")
    }

    /// Starts the broker, whose file names the machines that `start_broker_with` was told of.
    pub(crate) fn start_broker(&mut self) {
        self.start_broker_with("");
    }

    pub(crate) fn start_broker_with(&mut self, machines: &str) {
        self.write_policy(machines);
        let log = std::fs::File::options().create(true).append(true).open(self.path("broker.log")).unwrap();
        let child = Command::new(program("partywall-daemon", "partywalld"))
            .arg("--socket")
            .arg(self.path("broker.sock"))
            .arg("--policy")
            .arg(self.path("policy.toml"))
            .args(["--machine-silence", SILENCE, "--log", "warn,partywall_daemon::machines=debug"])
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.broker = Some(Process(child));
        let deadline = Instant::now() + HANG;
        while self.partywall(&["list"]).status != 0 {
            assert!(Instant::now() < deadline, "the broker does not start: {}", self.log());
        }
    }

    fn write_policy(&self, further: &str) {
        let uid = rustix::process::geteuid().as_raw();
        let policy = format!("administrators = [{uid}]\n[[connect]]\nfrom = \"*\"\nto = \"*\"\n{further}");
        std::fs::write(self.path("policy.toml"), policy).unwrap();
    }

    /// Puts another policy in force soon, while the broker runs.
    pub(crate) fn set_policy(&self, further: &str) {
        self.write_policy(further);
        let pid = rustix::process::Pid::from_raw(self.broker_pid().cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    }

    /// Kills it.
    pub(crate) fn kill_broker(&mut self) {
        self.broker = None;
    }

    pub(crate) fn broker_pid(&self) -> u32 {
        self.broker.as_ref().unwrap().0.id()
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("broker.log")).unwrap_or_default()
    }

    /// The entry of a machine in the broker's policy file.
    pub(crate) fn entry(&self, guest: &Guest) -> String {
        let (monitor, port) = (guest.monitor(), self.port(guest.name()));
        format!("[[machine]]\nname = {:?}\nmonitor = {monitor:?}\nport = {port:?}\nroom = {}\n", guest.name(), 16 << 20)
    }

    /// Boots guests, each with an agent.
    pub(crate) fn boot<const N: usize>(&self, names: [&str; N]) -> [Guest; N] {
        self.boot_with(names.map(|name| (name, 16)))
    }

    /// Boots guests, each with a number of places for windows as memory.
    pub(crate) fn boot_with<const N: usize>(&self, machines: [(&str, u32); N]) -> [Guest; N] {
        self.boot_as(machines.map(|(name, slots)| GuestOptions::new(name).slots(slots)))
    }

    /// Boots guests of any kind. Their programs lie at the same addresses at each start, for the sake of time.
    pub(crate) fn boot_as<const N: usize>(&self, machines: [GuestOptions; N]) -> [Guest; N] {
        let boot = |options: GuestOptions| {
            let port = self.port(options.name());
            self.lab.boot(options.same_addresses().serves_port(PORT, &port)).unwrap()
        };
        let guests = std::thread::scope(|s| machines.map(|one| s.spawn(move || boot(one))).map(|g| g.join().unwrap()));
        for guest in &guests {
            println!("{} guest {} up in {:?}", self.lab.accel(), guest.name(), guest.booted_in());
            guest.start_agent();
        }
        guests
    }

    /// A QEMU that waits at `uri` for `leaves` to be migrated into it. Its agent runs already.
    pub(crate) fn expect(&self, options: GuestOptions, uri: &str, leaves: &Guest) -> Guest {
        let port = self.port(options.name());
        // A machine that has left from here has used the socket's name.
        let _ = std::fs::remove_file(&port);
        self.lab.boot(options.serves_port(PORT, &port).incoming(uri, leaves).unwrap()).unwrap()
    }

    /// Attaches a guest so that it can be migrated.
    pub(crate) fn attach_migratable(&self, guest: &Guest) -> CommandOutput {
        self.attach_migratable_with(guest, "16M")
    }

    /// The same with windows of this size.
    pub(crate) fn attach_migratable_with(&self, guest: &Guest, window: &str) -> CommandOutput {
        let (qmp, port) = (guest.monitor(), self.port(guest.name()));
        let (qmp, port) = (qmp.to_str().unwrap(), port.to_str().unwrap());
        self.partywall(&[
            "vm",
            "attach",
            guest.name(),
            "--qmp",
            qmp,
            "--port",
            port,
            "--window",
            window,
            "--migratable",
        ])
    }

    /// The command line of the host.
    pub(crate) fn partywall(&self, words: &[&str]) -> CommandOutput {
        let done = self.command(words).output().unwrap();
        CommandOutput { status: done.status.code().unwrap_or(-1), stdout: done.stdout, stderr: done.stderr }
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(program_path("partywall"));
        command.arg("--broker").arg(self.path("broker.sock")).args(words).stdin(Stdio::null());
        command
    }

    /// Attaches a guest; what is said of that.
    pub(crate) fn attach(&self, guest: &Guest) -> CommandOutput {
        let (qmp, port) = (guest.monitor(), self.port(guest.name()));
        self.attach_by(guest.name(), &qmp, &port)
    }

    pub(crate) fn attach_by(&self, name: &str, qmp: &Path, port: &Path) -> CommandOutput {
        let (qmp, port) = (qmp.to_str().unwrap(), port.to_str().unwrap());
        self.partywall(&["vm", "attach", name, "--qmp", qmp, "--port", port, "--window", "16M"])
    }

    /// Waits until every window is seen by both its sides.
    pub(crate) fn wait_ready(&self, machines: usize) {
        let deadline = Instant::now() + HANG;
        loop {
            let said = self.partywall(&["vm", "list", "--json"]);
            let lines: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap_or_default();
            let ready = |line: &&serde_json::Value| line["agent"] == true && line["ready"] == line["windows"];
            if lines.as_array().is_some_and(|all| all.len() == machines && all.iter().filter(ready).count() == machines)
            {
                return;
            }
            assert!(Instant::now() < deadline, "windows are not seen: {lines}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn program_path(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join(name)
}

/// A command in brackets for a guest's shell. It prints the numbers of the processes that run this program with this in their arguments.
/// (Guests have no `pgrep`.)
pub(crate) fn processes(program: &str, argument: &str) -> String {
    format!(
        "(for p in /proc/[0-9]*; do grep -qx '{program}' $p/comm 2>/dev/null && tr '\\0' ' ' < $p/cmdline 2>/dev/null \
         | grep -q -e '{argument}' && echo ${{p#/proc/}}; done)"
    )
}

/// The operations inside a guest.
pub(crate) trait Inside {
    fn start_agent(&self);
    /// Kills its agent, and waits until that has ended: the lock on the agent's socket lasts until then, and the next agent would refuse to start.
    fn kill_agent(&self);
    /// Whether programs that start from now on get random addresses, as in machines of users.
    fn randomize_addresses(&self, random: bool);
    fn sh(&self, line: &str) -> String;
    /// Waits until this command of the shell succeeds. `false` if it does not within [`HANG`].
    fn wait_until(&self, condition: &str) -> bool;
    fn begin(&self, line: &str) -> Running<'_>;
    fn wait_service(&self, name: &str);
}

impl Inside for Guest {
    fn start_agent(&self) {
        self.shell("partywall-agent --log debug > /tmp/agent.log 2>&1 & echo $! > /tmp/agent.pid").unwrap();
    }

    fn kill_agent(&self) {
        // What has ended and was not waited for has this state, too.
        self.sh("agent=$(cat /tmp/agent.pid); kill -9 $agent; \
             while grep -q '^State:.[^ZX]' /proc/$agent/status 2>/dev/null; do usleep 10000; done");
    }

    fn randomize_addresses(&self, random: bool) {
        self.sh(&format!("echo {} > /proc/sys/kernel/randomize_va_space", if random { 2 } else { 0 }));
    }

    /// A line for the shell, which must succeed.
    fn sh(&self, line: &str) -> String {
        self.shell(line)
            .unwrap_or_else(|e| panic!("{e}\nagent: {}", self.shell("cat /tmp/agent.log").unwrap_or_default()))
    }

    fn wait_until(&self, condition: &str) -> bool {
        let deadline = Instant::now() + HANG;
        // A command of the lab costs the guest a descriptor, and has a limit.
        let line = format!(
            "n=0; while [ $n -lt 100 ]; do if {condition}; then echo yes; break; fi; usleep 100000; n=$((n+1)); done"
        );
        loop {
            match self.sh(&line) {
                said if said.trim() == "yes" => return true,
                _ if Instant::now() > deadline => return false,
                _ => {}
            }
        }
    }

    fn begin(&self, line: &str) -> Running<'_> {
        self.start(&["sh", "-c", line]).unwrap()
    }

    /// Waits until a service can be connected to from here.
    fn wait_service(&self, name: &str) {
        let deadline = Instant::now() + HANG;
        while !self.shell("partywall list services").is_ok_and(|said| said.contains(name)) {
            assert!(Instant::now() < deadline, "no service {name}: {}", self.sh("partywall list; cat /tmp/agent.log"));
        }
    }
}
