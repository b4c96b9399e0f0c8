//! Guests with an agent in each, and a private broker on the host to attach them to: all that two machines need to connect.

use crate::guest::tail;
use crate::process::LabProcess;
use crate::{Accel, Guest, GuestOptions, ImageOptions, Lab, LabError, program, scratch};
use partywall_region::relay::PORT;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Starting a broker takes some milliseconds; more than this is a hang.
const START: Duration = Duration::from_secs(30);

/// The parts of a playground.
#[derive(Debug, Clone)]
pub struct PlaygroundOptions {
    name: String,
    image: ImageOptions,
    guests: Vec<GuestOptions>,
    window_mib: u64,
    folder: Option<PathBuf>,
    policy: Option<String>,
    agent: String,
}

impl PlaygroundOptions {
    /// No guests yet. `name` names the folder of their logs.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            image: ImageOptions::default(),
            guests: Vec::new(),
            window_mib: 64,
            folder: None,
            policy: None,
            agent: String::new(),
        }
    }

    /// One more guest. It gets a port to the broker besides what it has.
    pub fn guest(mut self, options: GuestOptions) -> Self {
        self.guests.push(options);
        self
    }

    /// A program of the host for all of them; `partywall` and `partywall-agent` are there in any case.
    pub fn program(mut self, path: impl Into<PathBuf>, name: &str) -> Self {
        self.image = self.image.program(path, name);
        self
    }

    /// A further kernel module for all of them.
    pub fn module(mut self, name: &str) -> Self {
        self.image = self.image.module(name);
        self
    }

    /// MiB for rings in each window.
    pub fn window_mib(mut self, mib: u64) -> Self {
        self.window_mib = mib;
        self
    }

    /// The folder for its sockets, in place of a new one that ends with it.
    pub fn folder(mut self, folder: &Path) -> Self {
        self.folder = Some(folder.to_owned());
        self
    }

    /// The broker's policy file. Without one, all domains may connect to each other.
    pub fn policy(mut self, text: &str) -> Self {
        self.policy = Some(text.to_owned());
        self
    }

    /// Options of the agents, in the words of a shell.
    pub fn agent(mut self, options: &str) -> Self {
        self.agent = options.to_owned();
        self
    }
}

/// The shortest and the longest time between two looks at what the guests see. Each look starts a program, with which an emulated guest
/// shares the processor.
const LOOK: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];

/// The result of attaching a guest.
#[derive(Debug, Clone)]
pub struct AttachReport {
    /// How long the request took on the host.
    pub took: Duration,
    /// In the words of `partywall vm attach`.
    pub said: String,
}

/// A broker and guests. All of it ends when it is dropped, and when this process ends.
#[derive(Debug)]
pub struct Playground {
    // Guests go first: the broker is to see them end.
    guests: Vec<Guest>,
    broker: LabProcess,
    lab: Lab,
    partywall: PathBuf,
    window_mib: u64,
    folder: PathBuf,
    agent: String,
    _own: Option<tempfile::TempDir>,
}

impl Playground {
    /// Starts the broker, boots all guests at once, and starts their agents. No guest is attached yet. `progress` gets the name of each step.
    pub fn boot(options: PlaygroundOptions, progress: &mut dyn FnMut(&str)) -> Result<Self, LabError> {
        let PlaygroundOptions { name, mut image, guests, window_mib, folder, policy, agent } = options;
        let partywall = program::beside("partywall")?;
        for (path, name) in [(&partywall, "partywall"), (&program::beside("partywall-agent")?, "partywall-agent")] {
            image = image.program(path, name);
        }
        let own = if folder.is_none() { Some(scratch::folder()?) } else { None };
        let folder = folder.or_else(|| own.as_ref().map(|own| own.path().to_owned())).unwrap_or_default();
        progress("kernel and file system of the guests");
        let lab = Lab::new(&name, &image)?;
        let broker = start_broker(&folder, policy.as_deref())?;
        if !guests.is_empty() {
            progress(&format!("{} guests boot, {}, kernel {}", guests.len(), lab.accel(), lab.image().version));
        }
        let guests = boot(&lab, &folder, guests, &agent)?;
        Ok(Self { guests, broker, lab, partywall, window_mib, folder, agent, _own: own })
    }

    /// How its guests are run.
    pub fn accel(&self) -> Accel {
        self.lab.accel()
    }

    /// The version of their kernel.
    pub fn kernel(&self) -> &str {
        &self.lab.image().version
    }

    /// The guests, in the order in which they were asked for.
    pub fn guests(&self) -> &[Guest] {
        &self.guests
    }

    /// The broker's socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("broker.sock")
    }

    /// The process of the broker.
    pub fn broker_pid(&self) -> u32 {
        self.broker.pid()
    }

    /// The host's end of a guest's port to the broker.
    pub fn port(&self, guest: &Guest) -> PathBuf {
        port(&self.folder, guest.name())
    }

    /// `partywall` on the host, for this broker.
    pub fn partywall<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = Command::new(&self.partywall);
        command.arg("--broker").arg(self.socket()).args(words).stdin(Stdio::null());
        // A user's settings for other brokers do not apply to this one.
        command.env_remove("PARTYWALL_BROKER").env_remove("PARTYWALL_DOMAIN");
        command
    }

    /// Attaches a guest to the broker.
    pub fn attach(&self, guest: &Guest) -> Result<AttachReport, LabError> {
        self.attach_with(guest, &[])
    }

    /// The same, so that the guest can be migrated.
    pub(crate) fn attach_migratable(&self, guest: &Guest) -> Result<AttachReport, LabError> {
        self.attach_with(guest, &["--migratable"])
    }

    fn attach_with(&self, guest: &Guest, options: &[&str]) -> Result<AttachReport, LabError> {
        let start = Instant::now();
        let mut command = self.partywall(["vm", "attach", guest.name(), "--window"]);
        command.arg(format!("{}M", self.window_mib)).arg("--qmp").arg(guest.monitor()).arg("--port");
        let said = self.said(command.arg(self.port(guest)).args(options))?;
        Ok(AttachReport { took: start.elapsed(), said })
    }

    /// Boots further guests, each with an agent, which belong to the caller.
    pub(crate) fn boot_guests(&self, guests: Vec<GuestOptions>) -> Result<Vec<Guest>, LabError> {
        boot(&self.lab, &self.folder, guests, &self.agent)
    }

    /// Starts a QEMU that waits at `uri` for `leaves` to be migrated into it. The agent of that guest runs already.
    pub(crate) fn expect(&self, options: GuestOptions, uri: &str, leaves: &Guest) -> Result<Guest, LabError> {
        let port = port(&self.folder, options.name());
        // A guest that has left from here has had the socket's name.
        let _ = std::fs::remove_file(&port);
        self.lab.boot(options.serves_port(PORT, &port).incoming(uri, leaves)?)
    }

    /// Whether a machine can be migrated, in the words of `partywall vm list`.
    pub(crate) fn mobility(&self, name: &str) -> Result<String, LabError> {
        let said = self.said(&mut self.partywall(["vm", "list", "--json"]))?;
        let rows: Value = serde_json::from_str(&said).unwrap_or_default();
        let row = rows.as_array().and_then(|rows| rows.iter().find(|row| row["name"] == name));
        let mobility = row.and_then(|row| row["mobility"].as_str());
        mobility.map(str::to_owned).ok_or_else(|| self.refused(format!("it does not list {name}: {said}")))
    }

    /// The folder of its sockets.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Waits until every agent has connected and every window is seen by both its sides. Returns how long that took.
    pub fn wait_ready(&self, limit: Duration) -> Result<Duration, LabError> {
        self.wait_attached(self.guests.len(), limit)
    }

    /// The same for a number of guests, when not all have been attached yet.
    pub fn wait_attached(&self, guests: usize, limit: Duration) -> Result<Duration, LabError> {
        let is_ready = |row: &Value| row["agent"] == true && row["ready"] == row["windows"];
        self.wait_for("windows are not seen", guests, is_ready, limit)
    }

    /// The same for the guest of this name.
    pub(crate) fn wait_machine(&self, name: &str, limit: Duration) -> Result<(), LabError> {
        let is_ready = |row: &Value| row["name"] == name && row["agent"] == true && row["ready"] == row["windows"];
        self.wait_for("windows are not seen", 1, is_ready, limit).map(drop)
    }

    /// Waits until the doorbells of every guest are interrupts, which takes guests of [`GuestOptions::interrupts`] with the
    /// modules `vfio_pci` and `vfio_iommu_type1`. A program that connects earlier uses the serial port for as long as it lives.
    pub fn wait_interrupts(&self, limit: Duration) -> Result<Duration, LabError> {
        let has_interrupts = |row: &Value| row["rung_by"] == "interrupts";
        self.wait_for("doorbells are not interrupts", self.guests.len(), has_interrupts, limit)
    }

    /// Waits until `partywall vm list` has as many rows as wanted for which this holds.
    fn wait_for(
        &self,
        otherwise: &str,
        wanted: usize,
        holds: impl Fn(&Value) -> bool,
        limit: Duration,
    ) -> Result<Duration, LabError> {
        let start = Instant::now();
        loop {
            let said = self.said(&mut self.partywall(["vm", "list", "--json"]))?;
            let rows: Value = serde_json::from_str(&said).unwrap_or_default();
            if rows.as_array().is_some_and(|rows| rows.iter().filter(|row| holds(row)).count() == wanted) {
                return Ok(start.elapsed());
            }
            if let Some(end) = self.guests.iter().find(|guest| guest.has_ended()) {
                return Err(self.refused(format!("{} has ended", end.name())));
            }
            if start.elapsed() > limit {
                let log = |guest: &Guest| format!("\n{}", tail(guest.serial()));
                let logs: String = self.guests.iter().map(log).collect();
                return Err(self.refused(format!("{otherwise} after {limit:?}: {said}{logs}")));
            }
            // The longer it takes, the less it matters when exactly it ended.
            std::thread::sleep((start.elapsed() / 20).clamp(LOOK[0], LOOK[1]));
        }
    }

    /// Runs one of ours to its end, which must be a good one; what it printed.
    pub(crate) fn said(&self, command: &mut Command) -> Result<String, LabError> {
        let output = command.output().map_err(|e| self.refused(format!("partywall does not start: {e}")))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned());
        }
        Err(self.refused(String::from_utf8_lossy(&output.stderr).trim_end().to_owned()))
    }

    pub(crate) fn refused(&self, what: String) -> LabError {
        failed(&self.folder, what)
    }
}

impl Drop for Playground {
    fn drop(&mut self) {
        for guest in &self.guests {
            guest.kill();
        }
        // It removes its socket.
        self.broker.stop();
    }
}

fn port(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.port"))
}

fn failed(folder: &Path, what: String) -> LabError {
    LabError::Broker { what, log: tail(&folder.join("broker.log")) }
}

fn boot(lab: &Lab, folder: &Path, options: Vec<GuestOptions>, agent: &str) -> Result<Vec<Guest>, LabError> {
    let one = |options: GuestOptions| {
        let path = port(folder, options.name());
        let guest = lab.boot(options.serves_port(PORT, &path))?;
        guest.shell(&format!("partywall-agent {agent} > /tmp/agent.log 2>&1 & echo $! > /tmp/agent.pid"))?;
        Ok(guest)
    };
    std::thread::scope(|s| {
        let booting: Vec<_> = options.into_iter().map(|options| s.spawn(|| one(options))).collect();
        let ended = |_| LabError::tool("a thread", "it panicked");
        booting.into_iter().map(|guest| guest.join().map_err(ended).flatten()).collect()
    })
}

fn start_broker(folder: &Path, policy: Option<&str>) -> Result<LabProcess, LabError> {
    let (socket, log) = (folder.join("broker.sock"), folder.join("broker.log"));
    let mut command = Command::new(program::beside("partywalld")?);
    command.args(["--log", "warn", "--socket"]).arg(&socket);
    if let Some(policy) = policy {
        let path = folder.join("policy.toml");
        std::fs::write(&path, policy).map_err(LabError::file("write", &path))?;
        command.arg("--policy").arg(path);
    }
    let file = std::fs::File::create(&log).map_err(LabError::file("create", &log))?;
    let broker = LabProcess::start(&command, "TERM", Some(file))?;
    let deadline = Instant::now() + START;
    while !socket.exists() {
        if let Some(end) = broker.wait(Duration::from_millis(2)) {
            return Err(failed(folder, format!("it has ended: {end}")));
        }
        if Instant::now() > deadline {
            return Err(failed(folder, "it does not start".into()));
        }
    }
    Ok(broker)
}
