//! A virtual machine: booted, used, broken, and gone when it is dropped.

use crate::commands::Commands;
use crate::cycles;
use crate::network::NetworkPort;
use crate::process::LabProcess;
use crate::wire::{self, CommandFrame, FrameKind, MAX};
use crate::{Accel, Image, LabError, Network, scratch};
use partywall_vm::qmp::{Qmp, QmpError};
use serde_json::{Value, json};
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a boot may take. Emulated on a busy machine, seconds become a minute.
const BOOT: Duration = Duration::from_secs(120);
/// How long a command may take unless its caller says otherwise.
const COMMAND: Duration = Duration::from_secs(120);
/// How long a failed test waits for more output of a running command.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Bytes of a command's output that are shown when its test has failed.
const SHOWN: usize = 4096;

/// The properties of a guest.
#[derive(Debug, Clone)]
pub struct GuestOptions {
    name: String,
    memory_mib: u32,
    shares_memory: bool,
    slots: u32,
    arguments: Vec<String>,
    cpu: Option<usize>,
    boot_limit: Duration,
    console: bool,
    network: Option<NetworkPort>,
    interrupts: Option<u32>,
    same_addresses: bool,
    /// Where the machine comes from that is migrated into this one.
    incoming: Option<String>,
    /// The network that it arrives on, if it leaves another one.
    arrives_on: Option<Network>,
}

impl GuestOptions {
    /// A machine that windows can be plugged into.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            // At most half of it is for files: what a test writes, and the image. Our programs in the image, built for tests and stripped, take
            // some 40 MiB.
            memory_mib: 384,
            shares_memory: false,
            slots: 16,
            arguments: Vec::new(),
            cpu: None,
            boot_limit: BOOT,
            console: false,
            network: None,
            interrupts: None,
            same_addresses: false,
            incoming: None,
            arrives_on: None,
        }
    }

    /// The network of the host that it arrives on, joined to the one that it leaves ([`Network::joined`]). To be called before
    /// [`incoming`](Self::incoming).
    pub fn arrives_on(mut self, network: &Network) -> Self {
        self.arrives_on = Some(network.clone());
        self
    }

    /// Does not boot, and waits at `uri` for a machine that is migrated into it: `leaves`, whose network card it has, and whose options
    /// it must have.
    pub fn incoming(mut self, uri: &str, leaves: &Guest) -> Result<Self, LabError> {
        self.network =
            leaves.options.network.as_ref().map(|place| place.next_wire(self.arrives_on.as_ref())).transpose()?;
        self.incoming = Some(uri.to_owned());
        Ok(self)
    }

    /// Its memory, in MiB.
    pub fn memory(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Makes its memory a file that servers of its devices can map (vhost-user).
    pub fn shared_memory(mut self) -> Self {
        self.shares_memory = true;
        self
    }

    /// A place on a network; its first Ethernet device has an address there once it is up.
    pub fn network(mut self, network: &Network) -> Result<Self, LabError> {
        self.network = Some(network.place()?);
        Ok(self)
    }

    /// A machine whose programs can have interrupts: one with an IOMMU, and this number of PCI Express ports to plug into.
    pub fn interrupts(mut self, ports: u32) -> Self {
        self.interrupts = Some(ports);
        self
    }

    /// Loads each program at the same addresses every time (`norandmaps`), unless `/proc/sys/kernel/randomize_va_space` is changed in it.
    /// QEMU keeps what it has translated by address. A program that starts for the second time in an emulated machine takes a quarter of
    /// the time of one at new addresses.
    pub fn same_addresses(mut self) -> Self {
        self.same_addresses = true;
        self
    }

    /// How many windows it has room for; with 0 it is a machine that knows nothing of windows.
    pub fn slots(mut self, slots: u32) -> Self {
        self.slots = slots;
        self
    }

    /// Further arguments for QEMU.
    pub fn arguments<S: Into<String>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// A serial port of that name for the guest, its other end a socket that QEMU connects to.
    pub fn port(self, name: &str, socket: &Path) -> Self {
        self.port_by(name, socket, "server=off,reconnect=1")
    }

    /// The same port, with QEMU as the listening side.
    pub fn serves_port(self, name: &str, socket: &Path) -> Self {
        self.port_by(name, socket, "server=on,wait=off")
    }

    fn port_by(self, name: &str, socket: &Path, how: &str) -> Self {
        let id = name.replace('.', "-");
        let chardev = format!("socket,id={id},path={},{how}", socket.display());
        self.arguments([
            "-chardev".into(),
            chardev,
            "-device".into(),
            format!("virtserialport,chardev={id},name={name}"),
        ])
    }

    /// A shell on a second serial line, which is a socket on the host.
    pub fn console(mut self, socket: &Path) -> Self {
        self.console = true;
        let chardev = format!("socket,id=console,path={},server=on,wait=off", socket.display());
        self.arguments(["-chardev".into(), chardev, "-serial".into(), "chardev:console".to_owned()])
    }

    /// How long its boot may take.
    pub fn boot_limit(mut self, limit: Duration) -> Self {
        self.boot_limit = limit;
        self
    }

    /// The name that the guest is to have.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it waits for a machine that is migrated into it.
    pub(crate) fn arrives(&self) -> bool {
        self.incoming.is_some()
    }

    /// Runs it on one core of the host alone.
    pub fn on_core(mut self, core: usize) -> Self {
        self.cpu = Some(core);
        self
    }
}

/// The output of a command in a guest, and its exit.
#[derive(Debug, Clone, Default)]
pub struct CommandOutput {
    /// The exit status, or minus the number of the signal that ended it.
    pub status: i32,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

impl CommandOutput {
    /// The standard output, as text without the last newline.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }
}

/// A running guest.
#[derive(Debug)]
pub struct Guest {
    options: GuestOptions,
    process: LabProcess,
    commands: Commands,
    qmp: Mutex<Qmp>,
    sockets: tempfile::TempDir,
    serial: PathBuf,
    booted_in: Duration,
}

impl Guest {
    /// Boots it, and waits until it takes commands. Its serial log goes to `serial`.
    pub(crate) fn boot(options: GuestOptions, image: &Image, accel: Accel, serial: PathBuf) -> Result<Self, LabError> {
        let start = Instant::now();
        let sockets = scratch::folder()?;
        let _ = fs::remove_file(&serial);
        let process = LabProcess::start(&command(&options, image, accel, sockets.path(), &serial), "KILL", None)?;
        let fail = |what: String| LabError::Guest {
            guest: options.name.clone(),
            // Sockets of a QEMU that gives up break a moment before it has ended.
            what: match process.wait(Duration::from_millis(500)) {
                Some(end) => format!("QEMU has ended: {end}"),
                None => what,
            },
            serial: tail(&serial),
        };
        let port = connect(&process, &sockets.path().join("lab")).ok_or_else(|| fail("no socket of QEMU's".into()))?;
        let commands = Commands::new(port).map_err(|e| fail(format!("cannot start a thread for it: {e}")))?;
        let qmp = Qmp::connect(sockets.path().join("qmp-lab")).map_err(|e| fail(e.to_string()))?;
        // A machine that arrives has greeted long ago, elsewhere.
        while options.incoming.is_none() && !commands.wait_greeting(0, Duration::from_millis(500)) {
            let panicked = fs::read(&serial).is_ok_and(|log| String::from_utf8_lossy(&log).contains("Kernel panic"));
            if panicked || process.wait(Duration::ZERO).is_some() || start.elapsed() > options.boot_limit {
                return Err(fail(format!(
                    "it did not come up ({})",
                    if panicked { "its kernel panicked" } else { "hung" }
                )));
            }
        }
        let booted_in = start.elapsed();
        Ok(Self { options, process, commands, qmp: Mutex::new(qmp), sockets, serial, booted_in })
    }

    /// The name that the guest was started with.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// From the start of QEMU to the first command it would have taken.
    pub fn booted_in(&self) -> Duration {
        self.booted_in
    }

    /// Waits until a machine that was migrated into this one takes commands.
    pub fn wait_arrival(&self) -> Result<(), LabError> {
        self.start(&["true"])?.wait(BOOT).map(drop)
    }

    /// Its address on the network that it was given.
    pub fn address(&self) -> Option<Ipv4Addr> {
        self.options.network.as_ref().map(NetworkPort::address)
    }

    /// The process of its QEMU.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its serial log.
    pub fn serial(&self) -> &Path {
        &self.serial
    }

    /// The path of a second monitor, for the code under test.
    pub fn monitor(&self) -> PathBuf {
        self.sockets.path().join("qmp")
    }

    /// Runs a command to its end.
    pub fn run(&self, words: &[&str]) -> Result<CommandOutput, LabError> {
        self.start(words)?.wait(COMMAND)
    }

    /// Runs a line of shell, which must succeed, and returns what it printed.
    pub fn shell(&self, line: &str) -> Result<String, LabError> {
        self.shell_within(line, COMMAND)
    }

    /// The same with another limit than that of commands.
    pub(crate) fn shell_within(&self, line: &str, limit: Duration) -> Result<String, LabError> {
        let output = self.start(&["sh", "-c", line])?.wait(limit)?;
        if output.status == 0 {
            return Ok(output.text());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(self.failed(format!("`{line}` ended with {}: {}\n{}", output.status, said.trim(), output.text())))
    }

    /// Starts a command.
    pub fn start(&self, words: &[&str]) -> Result<Running<'_>, LabError> {
        let mut payload = Vec::new();
        for word in words {
            payload.extend_from_slice(word.as_bytes());
            payload.push(0);
        }
        let (id, answers) = self.begin(FrameKind::Run, &payload)?;
        Ok(Running {
            guest: self,
            id,
            answers,
            what: words.join(" "),
            so_far: CommandOutput::default(),
            has_ended: false,
        })
    }

    /// Copies bytes into a file of the guest, its folder made if need be.
    pub fn put(&self, content: &[u8], path: &str, mode: u32) -> Result<(), LabError> {
        let mut payload = mode.to_le_bytes().to_vec();
        payload.extend_from_slice(path.as_bytes());
        let (id, answers) = self.begin(FrameKind::Put, &payload)?;
        for piece in content.chunks(MAX).chain([&[][..]]) {
            self.send(id, FrameKind::Input, piece)?;
        }
        self.answer(&answers, &format!("the file {path}"), COMMAND).map(drop)
    }

    /// Copies a file out of the guest.
    pub fn get(&self, path: &str) -> Result<Vec<u8>, LabError> {
        let (_, answers) = self.begin(FrameKind::Get, path.as_bytes())?;
        let mut content = Vec::new();
        loop {
            let frame = self.answer(&answers, &format!("a request for {path}"), COMMAND)?;
            if frame.kind == FrameKind::Done {
                return Ok(content);
            }
            content.extend_from_slice(&frame.payload);
        }
    }

    /// A command to its monitor.
    pub fn monitor_command(&self, command: &str, arguments: Value) -> Result<Value, LabError> {
        let mut qmp = self.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        qmp.execute(command, arguments).map_err(|e| self.monitor_failed(e))
    }

    /// The events that its monitor has sent before the answer to the last command, each reported once.
    pub(crate) fn take_monitor_events(&self) -> Vec<Value> {
        self.qmp.lock().unwrap_or_else(PoisonError::into_inner).take_events()
    }

    /// Stops its processor (`stop`).
    pub fn pause(&self) -> Result<(), LabError> {
        self.monitor_command("stop", json!({})).map(drop)
    }

    /// Lets it go on (`cont`).
    pub fn resume(&self) -> Result<(), LabError> {
        self.monitor_command("cont", json!({})).map(drop)
    }

    /// Presses its reset button, and waits until it takes commands again.
    pub fn reset(&self) -> Result<(), LabError> {
        let before = self.commands.greetings();
        self.monitor_command("system_reset", json!({}))?;
        if self.commands.wait_greeting(before, BOOT) {
            Ok(())
        } else {
            Err(self.failed("it did not come up again".into()))
        }
    }

    /// `kill -9` for its QEMU.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Whether its QEMU has ended.
    pub fn has_ended(&self) -> bool {
        self.process.wait(Duration::ZERO).is_some()
    }

    fn begin(&self, kind: FrameKind, payload: &[u8]) -> Result<(u32, Receiver<CommandFrame>), LabError> {
        self.commands.begin(kind, payload).map_err(|e| self.failed(format!("cannot be talked to: {e}")))
    }

    fn send(&self, id: u32, kind: FrameKind, payload: &[u8]) -> Result<(), LabError> {
        self.commands.send(id, kind, payload).map_err(|e| self.failed(format!("cannot be talked to: {e}")))
    }

    fn answer(&self, answers: &Receiver<CommandFrame>, what: &str, limit: Duration) -> Result<CommandFrame, LabError> {
        match answers.recv_timeout(limit) {
            Ok(frame) if frame.kind == FrameKind::Failed => Err(LabError::Refused {
                guest: self.options.name.clone(),
                why: String::from_utf8_lossy(&frame.payload).into_owned(),
            }),
            Ok(frame) => Ok(frame),
            Err(RecvTimeoutError::Timeout) => Err(LabError::Silent {
                guest: self.options.name.clone(),
                what: what.to_owned(),
                after: limit,
                serial: tail(&self.serial),
            }),
            Err(RecvTimeoutError::Disconnected) => Err(self.failed(format!("reset, or ended, during {what}"))),
        }
    }

    fn failed(&self, what: String) -> LabError {
        let what = match self.process.wait(Duration::ZERO) {
            Some(end) => format!("{what}; QEMU has ended: {end}"),
            None => what,
        };
        LabError::Guest { guest: self.options.name.clone(), what, serial: tail(&self.serial) }
    }

    fn monitor_failed(&self, source: QmpError) -> LabError {
        LabError::Monitor { guest: self.options.name.clone(), source, serial: tail(&self.serial) }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.process.kill();
    }
}

/// A command that runs in a guest.
#[derive(Debug)]
pub struct Running<'a> {
    guest: &'a Guest,
    id: u32,
    answers: Receiver<CommandFrame>,
    what: String,
    so_far: CommandOutput,
    has_ended: bool,
}

impl Running<'_> {
    /// Writes to its standard input.
    pub fn input(&self, bytes: &[u8]) -> Result<(), LabError> {
        bytes.chunks(MAX).try_for_each(|piece| self.guest.send(self.id, FrameKind::Input, piece))
    }

    /// Closes its standard input.
    pub fn end_input(&self) -> Result<(), LabError> {
        self.guest.send(self.id, FrameKind::Input, &[])
    }

    /// Sends a signal to it and to what it has started.
    pub fn signal(&self, signal: rustix::process::Signal) -> Result<(), LabError> {
        self.guest.send(self.id, FrameKind::Signal, &signal.as_raw().to_le_bytes())
    }

    /// Waits until it has printed `text`.
    pub fn wait_for(&mut self, text: &str, limit: Duration) -> Result<(), LabError> {
        let deadline = Instant::now() + limit;
        while !String::from_utf8_lossy(&self.so_far.stdout).contains(text) {
            if self.take(deadline.saturating_duration_since(Instant::now()))? {
                let said = String::from_utf8_lossy(&self.so_far.stderr);
                let what = format!(
                    "`{}` ended with {} before it said {text:?}: {}\n{}",
                    self.what,
                    self.so_far.status,
                    said.trim(),
                    self.so_far.text()
                );
                return Err(self.guest.failed(what));
            }
        }
        Ok(())
    }

    /// Waits for its end.
    pub fn wait(mut self, limit: Duration) -> Result<CommandOutput, LabError> {
        let deadline = Instant::now() + limit;
        while !self.has_ended {
            if let Err(error) = self.take(deadline.saturating_duration_since(Instant::now())) {
                self.show();
                return Err(error);
            }
        }
        Ok(std::mem::take(&mut self.so_far))
    }

    /// Takes what it prints within `limit`: whether it has ended, or `None` if it said nothing.
    pub fn look(&mut self, limit: Duration) -> Result<Option<bool>, LabError> {
        match self.take(limit) {
            Err(LabError::Silent { .. }) => Ok(None),
            other => other.map(Some),
        }
    }

    /// The output so far.
    pub fn so_far(&self) -> &CommandOutput {
        &self.so_far
    }

    /// Takes one piece of output; `true` at its end.
    fn take(&mut self, limit: Duration) -> Result<bool, LabError> {
        let frame = self.guest.answer(&self.answers, &format!("`{}`", self.what), limit)?;
        match frame.kind {
            FrameKind::Stdout => self.so_far.stdout.extend_from_slice(&frame.payload),
            FrameKind::Stderr => self.so_far.stderr.extend_from_slice(&frame.payload),
            FrameKind::Exited => {
                self.so_far.status = frame.payload.try_into().map_or(-1, i32::from_le_bytes);
                self.has_ended = true;
            }
            _ => {}
        }
        Ok(self.has_ended)
    }

    /// Shows the end of what the command has printed, which may be why a test fails.
    fn show(&self) {
        let CommandOutput { status, stdout, stderr } = &self.so_far;
        let state = if self.has_ended { format!("ended with {status}") } else { "has not ended".to_owned() };
        let said = [stderr, stdout].map(|text| {
            let end = &text[text.len().saturating_sub(SHOWN)..];
            String::from_utf8_lossy(end).trim().to_owned()
        });
        eprintln!("guest {}: `{}` {state}: {}", self.guest.name(), self.what, said.join("\n"));
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let deadline = Instant::now() + LAST_WORDS;
        while !self.has_ended && self.take(deadline.saturating_duration_since(Instant::now())).is_ok() {
            if Instant::now() >= deadline {
                break;
            }
        }
        self.show();
    }
}

fn command(options: &GuestOptions, image: &Image, accel: Accel, sockets: &Path, serial: &Path) -> Command {
    let start = |program| options.network.as_ref().map_or_else(|| Command::new(program), |n| n.command(program));
    let mut command = match options.cpu {
        Some(core) => {
            let mut pinned = start("taskset");
            pinned.args(["-c", &core.to_string(), "qemu-system-x86_64"]);
            pinned
        }
        None => start("qemu-system-x86_64"),
    };
    let mut machine = if options.interrupts.is_some() { "q35" } else { "pc" }.to_owned();
    let mut memory = options.memory_mib.to_string();
    if options.slots > 0 {
        machine.push_str(",nvdimm=on");
        memory.push_str(&format!(",slots={},maxmem=8G", options.slots));
    }
    if options.interrupts.is_some() && accel == Accel::Kvm {
        machine.push_str(",kernel-irqchip=split");
    }
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", &machine, "-m", &memory]);
    if options.shares_memory {
        let object = format!("memory-backend-memfd,id=ram,size={}M,share=on", options.memory_mib);
        command.args(["-object", &object, "-machine", "memory-backend=ram"]);
    }
    if let Some(ports) = options.interrupts {
        command.args(["-device", "intel-iommu,intremap=on"]);
        for port in 1..=ports {
            command.args(["-device", &format!("pcie-root-port,id=port{port},chassis={port},pref64-reserve=256M")]);
        }
    }
    command.args(accel.arguments());
    command.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initrd);
    // A panic stays on the screen, which is the serial log. On a busy host the kernel takes an emulated cycle counter for broken, and
    // each reading of its next best clock waits for QEMU; it panics over a timer that is only late; and it measures the counter wrongly. Its
    // ciphers test themselves for a quarter of an emulated boot.
    let cycles = if accel == Accel::Tcg { cycles::per_millisecond() } else { None };
    let line = format!(
        "console=ttyS0 quiet loglevel=4 mitigations=off panic=0 tsc=reliable no_timer_check cryptomgr.notests{}{} lab.name={}{}{}{}",
        cycles.map_or_else(String::new, |n| format!(" tsc_early_khz={n}")),
        if options.same_addresses { " norandmaps" } else { "" },
        options.name,
        if options.interrupts.is_some() { " intel_iommu=on" } else { "" },
        if options.console { " lab.shell" } else { "" },
        options.network.as_ref().map_or_else(String::new, |place| format!(" lab.address={}", place.address()))
    );
    command.args(["-append", &line]);
    command.arg("-chardev").arg(format!("file,id=serial,path={}", serial.display()));
    command.args(["-serial", "chardev:serial"]);
    for (id, kind) in [("qmp-lab", "mode=control"), ("qmp", "mode=control")] {
        let path = sockets.join(id);
        command.arg("-chardev").arg(format!("socket,id={id},path={},server=on,wait=off", path.display()));
        command.args(["-mon", &format!("chardev={id},{kind}")]);
    }
    command.arg("-chardev").arg(format!("socket,id=lab,path={},server=on,wait=off", sockets.join("lab").display()));
    command.args(["-device", "virtio-serial", "-device", &format!("virtserialport,chardev=lab,name={}", wire::PORT)]);
    command.args(options.network.iter().flat_map(NetworkPort::arguments));
    command.args(&options.arguments);
    command.args(options.incoming.iter().flat_map(|uri| ["-incoming", uri]));
    command
}

/// QEMU makes its sockets early, but not at once.
fn connect(process: &LabProcess, path: &Path) -> Option<UnixStream> {
    let deadline = Instant::now() + BOOT;
    while Instant::now() < deadline {
        if let Ok(stream) = UnixStream::connect(path) {
            return Some(stream);
        }
        if process.wait(Duration::from_millis(5)).is_some() {
            return None;
        }
    }
    None
}

/// The end of a log, for people to read.
pub(crate) fn tail(serial: &Path) -> String {
    const LINES: usize = 15;
    let log = fs::read(serial).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let mut text = format!("the last lines of {}:", serial.display());
    for line in &lines[lines.len().saturating_sub(LINES)..] {
        text.push_str("\n  | ");
        text.push_str(line);
    }
    text
}
