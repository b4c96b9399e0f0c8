//! The two machines: booted, attached, put on processors, and told what to measure.
//!
//! ```text
//!   machine a                           host                              machine b
//!   active side ===== window, virtio-serial port of the agent =====  passive side
//!        |  \=== virtio-net === tap === bridge === tap === virtio-net ===/  |
//!        +-- serial port ======= threads of this program ======= serial port --+    beats; and bytes, to measure such a relay
//! ```

use std::{
    fmt::Write as _,
    io::{Read, Write},
    net::Ipv4Addr,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use partywall_lab::{CommandOutput, Guest, GuestOptions, LabError, Network, Playground, PlaygroundOptions, Running};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal},
    thread::{CpuSet, sched_setaffinity},
};

use crate::{
    affinity::Placement,
    bench::{BenchPlan, patience},
    error::{BenchError, During, Result},
    inside::{ANSWER, BEAT, BYTES, READY},
    interrupt::Interrupt,
    mechanism::Mechanism,
    task::{Figures, Inside, MeasuringSide, MeasuringTask, TaskAnswer},
};

/// The names of the machines, the active side's first.
const NAMES: [&str; 2] = ["a", "b"];
/// Their addresses. The broker's list names them, so that datagrams between the machines go by rings.
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2)];
/// The name of the bench inside the machines.
pub(in crate::commands) const PROGRAM: &str = "partywall-bench";
/// Where a program in a machine finds its broker: the agent's socket.
const AGENT: &str = "/run/partywall/broker.sock";
/// Windows that a machine can take; each measurement of what it takes to plug one in leaves one behind.
const SLOTS: u32 = 64;
/// MiB of memory of a machine: half of it holds its files, with the programs that are measured and their databases.
const MEMORY: u32 = 1024;
/// How long windows may take to be seen before something must be wrong.
const ATTACHED: Duration = Duration::from_secs(180);
/// How often to look at two machines that measure, and at Ctrl-C.
const LOOK: Duration = Duration::from_millis(5);

/// The time that attaching the machines took.
#[derive(Debug, Clone, Copy)]
pub(in crate::commands) struct AttachTook {
    /// From the request for the second machine until both saw all windows.
    pub(super) whole: Duration,
    /// The part of it until the broker had answered.
    pub(super) host: Duration,
}

/// Both machines, attached. Dropping it ends them.
#[derive(Debug)]
pub(in crate::commands) struct MeasuredMachines {
    playground: Playground,
    network: Network,
    serial: u64,
    pinned: Option<Placement>,
}

/// A fault of the lab's: a missing program is this machine's, all else is ours.
pub(in crate::commands) fn fault(e: LabError) -> BenchError {
    match e {
        LabError::Tool { .. } | LabError::Program { .. } => BenchError::Unavailable(e.to_string()),
        e => BenchError::Transport(e.to_string()),
    }
}

impl MeasuredMachines {
    /// Boots both, each with this number of places on its bus, these programs of the host and these modules of the kernel. Nothing is
    /// attached yet.
    pub(in crate::commands) fn boot(
        window: u64,
        ports: u32,
        programs: Vec<(PathBuf, String)>,
        modules: &[&str],
        scratch: &Path,
        say: &mut dyn FnMut(&str),
    ) -> Result<Self> {
        let network = Network::new().map_err(fault)?;
        let bench = std::env::current_exe().during("finding this program")?;
        // PostgreSQL's server is another user's.
        let mut options = PlaygroundOptions::new("bench-vm").agent("--socket-mode 666").window_mib(window >> 20);
        options = options.policy(&policy()).program(bench, PROGRAM);
        for (path, name) in programs {
            options = options.program(path, &name);
        }
        for module in ["vfio_pci", "vfio_iommu_type1", "udp_diag"].iter().chain(modules) {
            options = options.module(module);
        }
        for name in NAMES {
            let mut guest = GuestOptions::new(name).slots(SLOTS).memory(MEMORY).interrupts(ports);
            for port in [BEAT, BYTES] {
                guest = guest.serves_port(port, &socket(scratch, name, port));
            }
            options = options.guest(guest.network(&network).map_err(fault)?);
        }
        let playground = Playground::boot(options, say).map_err(fault)?;
        for (guest, address) in playground.guests().iter().zip(ADDRESSES) {
            if guest.address() != Some(address) {
                let name = guest.name();
                return Err(BenchError::Transport(format!(
                    "machine {name} has another address than the broker's list"
                )));
            }
        }
        for port in [BEAT, BYTES] {
            relay(NAMES.map(|name| socket(scratch, name, port)))?;
        }
        Ok(Self { playground, network, serial: 0, pinned: None })
    }

    /// The guests in which the two sides run.
    pub(in crate::commands) fn guests(&self) -> [&Guest; 2] {
        let guests = self.playground.guests();
        [&guests[0], &guests[1]]
    }

    /// Lines that say what is measured, and how fast the machines' clocks can be read.
    pub(in crate::commands) fn describe(&self) -> Result<String> {
        let [a, b] = self.guests();
        let kernel = a.shell("uname -r").map_err(fault)?;
        let clock = a.shell("cat /sys/devices/system/clocksource/clocksource0/current_clocksource").map_err(fault)?;
        Ok(format!(
            "# two machines, {}, Linux {kernel}, one virtual processor each, up in {:.1} and {:.1} s; clock {clock}; network: {}",
            self.playground.accel(),
            a.booted_in().as_secs_f64(),
            b.booted_in().as_secs_f64(),
            self.network.kind(),
        ))
    }

    /// Whether the processor runs them, and not an emulator.
    pub(in crate::commands) fn are_emulated(&self) -> bool {
        self.playground.accel() == partywall_lab::Accel::Tcg
    }

    /// The network that TCP between the machines goes over.
    pub(in crate::commands) fn network(&self) -> &Network {
        &self.network
    }

    /// Attaches both to the broker, and says how long the second took, with which a pair comes to be.
    pub(in crate::commands) fn attach(&self) -> Result<AttachTook> {
        let [a, b] = self.guests();
        self.playground.attach(a).map_err(fault)?;
        self.playground.wait_attached(1, ATTACHED).map_err(fault)?;
        let start = Instant::now();
        let host = self.playground.attach(b).map_err(fault)?.took;
        self.playground.wait_ready(ATTACHED).map_err(fault)?;
        let whole = start.elapsed();
        self.playground.wait_interrupts(ATTACHED).map_err(fault)?;
        Ok(AttachTook { whole, host })
    }

    /// Puts each machine, with all threads of its QEMU, on a processor.
    pub(in crate::commands) fn place(&mut self, placement: Placement) -> Result<()> {
        if self.pinned == Some(placement) {
            return Ok(());
        }
        place(self.guests(), placement)?;
        self.pinned = Some(placement);
        Ok(())
    }

    /// One measurement between them.
    pub(super) fn run(&mut self, plan: &BenchPlan, placement: Placement, interrupt: &Interrupt) -> Result<Figures> {
        if plan.key.mechanism == Mechanism::Vsock {
            return Err(no_vsock());
        }
        self.place(placement)?;
        self.serial += 1;
        let [a, b] = self.guests();
        let inside = Inside { active: a.name().into(), passive: b.name().into(), passive_address: b.address() };
        let task = |side| MeasuringTask {
            side,
            parent: 0,
            leads: true,
            cpu: Some(0),
            mechanism: plan.key.mechanism,
            tuning: plan.tuning.clone(),
            work: plan.work.clone(),
            broker: Some(AGENT.into()),
            broker_pid: None,
            session: format!("bench-{}", self.serial),
            scratch: "/tmp".into(),
            inside: Some(inside.clone()),
        };
        let mut sides = [
            MeasuredSide::start(a, &task(MeasuringSide::Active))?,
            MeasuredSide::start(b, &task(MeasuringSide::Passive))?,
        ];
        let limit = patience(&plan.work) * 4;
        let done = measure(&mut sides, limit, interrupt);
        if done.is_err() {
            for side in &sides {
                side.kill();
            }
            // Bytes in transit between the two must arrive before the next pair empties the ports.
            thread::sleep(Duration::from_millis(300));
        }
        done
    }
}

/// The broker's policy: every domain may connect to every other, and the list of networks names the machines' addresses. Datagrams of
/// machines that the list does not name stay on the kernel.
fn policy() -> String {
    let user = rustix::process::geteuid().as_raw();
    let mut policy = format!("administrators = [{user}]\n[[connect]]\nfrom = \"*\"\nto = \"*\"\n");
    for (name, address) in NAMES.into_iter().zip(ADDRESSES) {
        // Writing to a string does not fail.
        let _ = write!(policy, "[[network]]\nmachine = \"{name}\"\naddresses = [\"{address}\"]\n");
    }
    policy
}

/// Puts each machine, with all threads of its QEMU, on a processor.
pub(super) fn place(guests: [&Guest; 2], placement: Placement) -> Result<()> {
    for (guest, cpu) in guests.into_iter().zip([placement.active, placement.passive]) {
        let mut set = CpuSet::new();
        set.set(cpu);
        let threads = format!("/proc/{}/task", guest.pid());
        for thread in std::fs::read_dir(&threads).during(format!("reading {threads}"))?.flatten() {
            let id = thread.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
            match sched_setaffinity(id, &set) {
                // The thread has ended meanwhile.
                Err(rustix::io::Errno::SRCH) => {}
                other => other.during(format!("putting machine {} on processor {cpu}", guest.name()))?,
            }
        }
    }
    Ok(())
}

/// One side of a measurement.
struct MeasuredSide<'a> {
    side: MeasuringSide,
    machine: &'a str,
    running: Running<'a>,
    ended: bool,
}

impl<'a> MeasuredSide<'a> {
    fn start(guest: &'a Guest, task: &MeasuringTask) -> Result<Self> {
        let running = guest.start(&[PROGRAM, "inside", "measure"]).map_err(fault)?;
        let mut order = serde_json::to_vec(task).map_err(|e| BenchError::transport("writing an order", e))?;
        order.push(b'\n');
        running.input(&order).map_err(fault)?;
        Ok(Self { side: task.side, machine: guest.name(), running, ended: false })
    }

    /// Looks for what it says; `true` once it has said `word`, or has ended.
    fn has_said(&mut self, word: &str) -> Result<bool> {
        if !self.ended && self.running.look(LOOK).map_err(fault)? == Some(true) {
            self.ended = true;
        }
        let said = String::from_utf8_lossy(&self.running.so_far().stdout);
        Ok(said.lines().any(|line| line.starts_with(word)) || self.ended)
    }

    fn answer(&self) -> Result<Figures> {
        let output = self.running.so_far();
        let failed = |reason: String| BenchError::Role {
            side: self.side.name(),
            mechanism: format!("machine {}", self.machine),
            reason,
        };
        read_answer(output, failed)
    }

    fn kill(&self) {
        if !self.ended {
            // If it cannot be told it is gone.
            let _ = self.running.signal(Signal::KILL);
        }
    }
}

/// The answer of a program that has ended. `failed` makes the error of a failed one.
pub(super) fn read_answer(output: &CommandOutput, failed: impl Fn(String) -> BenchError) -> Result<Figures> {
    let text = output.text();
    let Some(answer) = text.lines().find_map(|line| line.strip_prefix(ANSWER)) else {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(failed(format!("it ended with {} and no answer: {}", output.status, said.trim())));
    };
    match serde_json::from_str(answer).map_err(|e| BenchError::transport("reading an answer", e))? {
        TaskAnswer::Figures(figures) => Ok(figures),
        TaskAnswer::Unavailable(why) => Err(BenchError::Unavailable(why)),
        TaskAnswer::Failed(why) => Err(failed(why)),
    }
}

fn measure(sides: &mut [MeasuredSide<'_>; 2], limit: Duration, interrupt: &Interrupt) -> Result<Figures> {
    let deadline = Instant::now() + limit;
    let wait_for = |sides: &mut [MeasuredSide<'_>; 2], word: &str| -> Result<()> {
        loop {
            let mut all = true;
            for side in sides.iter_mut() {
                interrupt.check()?;
                let said = side.has_said(word)?;
                if side.ended {
                    // An answer without figures ends the measurement, and the other side is not waited for.
                    side.answer()?;
                }
                all &= said;
            }
            if all {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(BenchError::Transport(format!("no answer within {} s", limit.as_secs())));
            }
        }
    };
    wait_for(sides, READY)?;
    for side in sides.iter() {
        side.running.input(b"go\n").map_err(fault)?;
    }
    // Each has ended when both have answered.
    while !sides.iter().all(|side| side.ended) {
        wait_for(sides, ANSWER)?;
    }
    let mut figures = Figures::new();
    for side in sides.iter() {
        figures.extend(side.answer()?);
    }
    Ok(figures)
}

/// The reason why vsock is not measured.
fn no_vsock() -> BenchError {
    BenchError::Unavailable(
        if Path::new("/dev/vhost-vsock").exists() {
            "vsock joins a machine with its host, not with another machine; a relay on the host is measured as serial-relay"
        } else {
            "not on this host: it has no /dev/vhost-vsock"
        }
        .into(),
    )
}

fn socket(scratch: &Path, machine: &str, port: &str) -> std::path::PathBuf {
    scratch.join(format!("{machine}.{}", port.rsplit('.').next().unwrap_or(port)))
}

/// Passes bytes on between two ports, both ways, until either ends.
fn relay(sockets: [std::path::PathBuf; 2]) -> Result<()> {
    let [a, b] = sockets;
    let connect = |path: &Path| UnixStream::connect(path).during(format!("connecting to {}", path.display()));
    let (a, b) = (connect(&a)?, connect(&b)?);
    for (from, to) in [(&a, &b), (&b, &a)] {
        let again = |socket: &UnixStream| socket.try_clone().during("duplicating a socket");
        let (mut from, mut to) = (again(from)?, again(to)?);
        thread::spawn(move || {
            let mut bytes = vec![0; 256 << 10];
            // It ends with the machines.
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                if to.write_all(&bytes[..n]).is_err() {
                    return;
                }
            }
        });
    }
    Ok(())
}

/// Ends the machines on Ctrl-C while `work` runs, even if this thread is blocked.
pub(in crate::commands) fn interruptible<T>(interrupt: &Interrupt, work: impl FnOnce() -> T) -> Result<T> {
    let (done, tell) = UnixStream::pair().during("making a socket pair")?;
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut polled =
                [PollFd::new(interrupt, PollFlags::IN), PollFd::new(&done, PollFlags::IN | PollFlags::HUP)];
            let hour = Timespec { tv_sec: 3600, tv_nsec: 0 };
            while let Err(rustix::io::Errno::INTR) | Ok(0) = poll(&mut polled, Some(&hour)) {}
            if !polled[0].revents().is_empty() {
                partywall_lab::interrupt();
            }
        });
        let result = work();
        drop(tell);
        Ok(result)
    })
}
