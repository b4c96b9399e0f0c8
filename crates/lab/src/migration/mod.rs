//! Two hosts, a guest that is migrated between them, and its neighbour: streams that go on meanwhile, and what happens when.
//!
//! ```text
//!   home: a broker, guest a, guest b                              far: a broker, and guest a while it is away
//!                    |          |                                                   |
//!                    +----------+-- a bridge == a link of 1 Gbit/s == a bridge ----+
//! ```

mod stream;
mod timeline;
pub mod traffic;

pub use stream::{StreamRecord, StreamTransport};
pub use timeline::{HopPauses, Timeline};
pub use traffic::TrafficSum;

use crate::{Accel, Guest, GuestOptions, LabError, Network, Playground, PlaygroundOptions, program};
use serde_json::{Value, json};
use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use stream::{MeasuredStream, StreamOptions};

/// The guest that is migrated.
const TRAVELLER: &str = "a";
/// The guest that stays at home.
const NEIGHBOUR: &str = "b";
/// Memory of a guest, in MiB.
const MEMORY: u32 = 448;
/// MiB for rings in each window.
const WINDOW: u64 = 16;
/// The port of the first stream; the others follow.
const PORT: u16 = 7000;
/// How long windows may take to be seen, also in emulated guests on a busy host.
const READY: Duration = Duration::from_secs(180);
/// What the link between the hosts carries, in megabits a second. Memory of a migrated guest crosses it, and its streams while it is away.
const LINK: u32 = 1000;
/// The port at which a host waits for the first guest that is migrated to it. The next one has the next port.
const ARRIVAL: u16 = 4444;
/// The library that `partywall run` loads.
const LIBRARY: &str = "libpartywall_preload.so";

/// Which way a guest is migrated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HopDirection {
    /// From home to the far host, where it has no neighbour.
    Away,
    /// Home again.
    Back,
}

impl fmt::Display for HopDirection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Away => "away",
            Self::Back => "back",
        })
    }
}

/// When what happened during a migration, from the begin of the recording. Those of QEMU are by the time stamps of its events.
#[derive(Debug, Clone)]
pub struct HopReport {
    /// Which way it went.
    pub direction: HopDirection,
    /// The request to release the windows.
    pub detach_begins: Duration,
    /// The guest's agent has released them, and QEMU is asked to migrate.
    pub released: Duration,
    /// QEMU begins to send memory.
    pub migration_begins: Duration,
    /// The guest is stopped at the source.
    pub stopped: Duration,
    /// It runs at the destination.
    pub runs: Duration,
    /// QEMU's migration ends at the source.
    pub migration_ends: Duration,
    /// The destination's broker has attached it.
    pub attached: Duration,
    /// A new connection to the neighbour has its rings; `None` where there is no neighbour.
    pub on_ring: Option<Duration>,
    /// QEMU's own figure (`query-migrate`).
    pub qemu_downtime: Duration,
    /// Bytes of memory that QEMU has sent.
    pub memory_sent: u64,
    /// In the words of `partywall vm migrate`.
    pub said: String,
}

impl HopReport {
    /// The moments by their names, in the order in which they are expected.
    pub fn marks(&self) -> Vec<(&'static str, Duration)> {
        let mut marks = vec![
            ("detach begins", self.detach_begins),
            ("windows released", self.released),
            ("QEMU's migration begins", self.migration_begins),
            ("guest stopped at the source", self.stopped),
            ("guest runs at the destination", self.runs),
            ("QEMU's migration ends", self.migration_ends),
            ("attached at the destination", self.attached),
        ];
        marks.extend(self.on_ring.map(|at| ("new connection on rings", at)));
        marks
    }

    /// When the last of it happened.
    pub fn end(&self) -> Duration {
        self.on_ring.unwrap_or(self.attached)
    }
}

/// A stream between the guests, and what has been seen of it.
#[derive(Debug, Clone)]
pub struct StreamReport {
    /// What it is called.
    pub name: String,
    /// Its programs run under `partywall run`.
    pub by_partywall: bool,
    /// What was sent, once it has come whole and in order.
    pub sum: Option<TrafficSum>,
    /// What its receiver has reported.
    pub record: StreamRecord,
}

/// The hosts and the guests. Everything ends when it is dropped.
#[derive(Debug)]
pub struct MigrationStage {
    /// Ended first, so that the streams' receivers end.
    traveller: Guest,
    neighbour: Arc<Guest>,
    streams: Vec<(MeasuredStream, bool)>,
    home: Playground,
    far: Playground,
    network: Network,
    far_network: Network,
    arrival: u16,
    direction: HopDirection,
    epoch: Instant,
    rate: u64,
}

impl MigrationStage {
    /// Starts both brokers, boots both guests at home, and attaches them there. `rate` is that of each stream, in bytes a second.
    /// `progress` gets the name of each step.
    ///
    /// # Errors
    /// A program or tool is missing, a guest does not come up, or three machines cannot have a network here.
    pub fn boot(name: &str, rate: u64, progress: &mut dyn FnMut(&str)) -> Result<Self, LabError> {
        let network = Network::new()?;
        if network.host().is_none() {
            let why = "only root can put three machines on a network";
            return Err(LabError::tool("the bridge between the hosts", why));
        }
        let far_network = network.joined(LINK)?;
        let library = program::beside(LIBRARY)?;
        let broker = |name: &str| PlaygroundOptions::new(name).program(&library, LIBRARY).window_mib(WINDOW);
        let home = Playground::boot(broker(name), progress)?;
        let far = Playground::boot(broker(&format!("{name}-far")), progress)?;
        progress(&format!("two guests boot, {}, kernel {}", home.accel(), home.kernel()));
        let (traveller, neighbour) = (options(TRAVELLER).network(&network)?, options(NEIGHBOUR).network(&network)?);
        let [traveller, neighbour] = <[Guest; 2]>::try_from(home.boot_guests(vec![traveller, neighbour])?)
            .map_err(|_| LabError::tool("the lab", "it has not booted two guests"))?;
        let stage = Self {
            traveller,
            neighbour: Arc::new(neighbour),
            streams: Vec::new(),
            home,
            far,
            network,
            far_network,
            arrival: ARRIVAL,
            direction: HopDirection::Away,
            epoch: Instant::now(),
            rate,
        };
        progress("the broker at home attaches both");
        stage.home.attach_migratable(&stage.traveller)?;
        stage.home.attach(&stage.neighbour)?;
        stage.home.wait_attached(2, READY)?;
        Ok(stage)
    }

    /// How its guests are run.
    pub fn accel(&self) -> Accel {
        self.home.accel()
    }

    /// The version of their kernel.
    pub fn kernel(&self) -> &str {
        self.home.kernel()
    }

    /// The network between them.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// What the link between the hosts carries, in megabits a second.
    pub fn link_megabits(&self) -> u32 {
        LINK
    }

    /// The way of the next migration.
    pub fn direction(&self) -> HopDirection {
        self.direction
    }

    /// What the broker where the guest is says about its mobility, and that at home about its neighbour's.
    ///
    /// # Errors
    /// A broker does not answer.
    pub fn mobility(&self) -> Result<[String; 2], LabError> {
        Ok([self.source().mobility(TRAVELLER)?, self.home.mobility(NEIGHBOUR)?])
    }

    /// Begins a stream from the guest that is migrated to its neighbour, and waits until it flows; under `partywall run`, until it has a
    /// ring.
    ///
    /// # Errors
    /// It does not come up.
    pub fn begin_stream(&mut self, name: &str, by_partywall: bool) -> Result<Duration, LabError> {
        let port = PORT + u16::try_from(self.streams.len()).unwrap_or_default();
        let how = StreamOptions { port, rate: self.rate, by_partywall };
        // Whatever comes of it, its thread is to be waited for at the end.
        self.streams.push((MeasuredStream::receive(name, &self.neighbour, how, self.epoch)?, by_partywall));
        if let Some((stream, _)) = self.streams.last() {
            let transport = if by_partywall { StreamTransport::Ring } else { StreamTransport::Tcp };
            let up = stream.send(&self.traveller, &self.neighbour).and_then(|()| stream.wait_transport(transport));
            up.map_err(|error| stream.explain(error, &self.traveller))?;
        }
        Ok(self.epoch.elapsed())
    }

    /// Ends a stream and compares its sums.
    ///
    /// # Errors
    /// It was reset, or something else has come than was sent.
    pub fn end_stream(&mut self, name: &str) -> Result<(), LabError> {
        let from = &self.traveller;
        let mut named = self.streams.iter_mut().map(|(stream, _)| stream).filter(|stream| stream.name() == name);
        named.try_for_each(|stream| stream.end(from).map_err(|error| stream.explain(error, from)))
    }

    /// Waits until each stream that was not ended has brought some more.
    ///
    /// # Errors
    /// One stands still.
    pub fn wait_flow(&self) -> Result<(), LabError> {
        let going = self.streams.iter().filter(|(stream, _)| stream.sum().is_none());
        going.map(|(stream, _)| stream).try_for_each(|stream| stream.wait_bytes(self.rate / 8))
    }

    /// All streams, the ended ones too.
    pub fn streams(&self) -> Vec<StreamReport> {
        let report = |(stream, by_partywall): &(MeasuredStream, bool)| StreamReport {
            name: stream.name().to_owned(),
            by_partywall: *by_partywall,
            sum: stream.sum().cloned(),
            record: stream.record(),
        };
        self.streams.iter().map(report).collect()
    }

    /// How long the recording has gone on.
    pub fn elapsed(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Tries to migrate the guest to where it is not expected. It must stay, with its windows.
    ///
    /// # Errors
    /// It is without windows, or has gone.
    pub fn fail_to_migrate(&self) -> Result<String, LabError> {
        let source = self.source();
        let mut command = source.partywall(["vm", "migrate", TRAVELLER, "--to", "unix:/nonexistent/socket"]);
        let done = command.output().map_err(|e| source.refused(format!("partywall does not start: {e}")))?;
        let said = String::from_utf8_lossy(&done.stderr).trim_end().to_owned();
        if done.status.success() || !said.contains("has its windows again") {
            return Err(source.refused(format!("a migration to nowhere ended with {}: {said}", done.status)));
        }
        source.wait_attached(self.machines(), READY)?;
        Ok(said)
    }

    /// Migrates the guest to the other host, and attaches it there.
    ///
    /// # Errors
    /// A step fails. The guest may be lost then.
    pub fn hop(&mut self) -> Result<HopReport, LabError> {
        let (destination, network) = if self.direction == HopDirection::Away {
            (&self.far, &self.far_network)
        } else {
            (&self.home, &self.network)
        };
        let host = network.host().ok_or_else(|| LabError::tool("the bridge between the hosts", "it has no address"))?;
        let uri = format!("tcp:{host}:{}", self.arrival);
        self.arrival += 1;
        let arrives = destination.expect(options(TRAVELLER).arrives_on(network), &uri, &self.traveller)?;
        // Otherwise QEMU sends no events of the migration.
        let wanted = json!({ "capabilities": [{ "capability": "events", "state": true }] });
        self.traveller.monitor_command("migrate-set-capabilities", wanted)?;

        let detach_begins = self.epoch.elapsed();
        let (released, said) = self.run_migrate(&uri)?;
        let progress = self.traveller.monitor_command("query-migrate", json!({}))?;
        let source_events = self.events(&self.traveller)?;
        // The guest at the source is over; its descriptors hold the windows.
        self.traveller = arrives;
        self.traveller.wait_arrival()?;
        self.destination().attach_migratable(&self.traveller)?;
        let attached = self.epoch.elapsed();
        let arrival_events = self.events(&self.traveller)?;
        self.direction = match self.direction {
            HopDirection::Away => HopDirection::Back,
            HopDirection::Back => HopDirection::Away,
        };
        self.source().wait_attached(self.machines(), READY)?;

        let at = |events: &[MonitorEvent], name: &str, status: Option<&str>| {
            let is_it =
                |event: &&MonitorEvent| event.name == name && (status.is_none() || event.status.as_deref() == status);
            let found = events.iter().find(is_it).map(|event| event.at);
            found.ok_or_else(|| LabError::tool("qemu-system-x86_64", format!("it has sent no event {name} {status:?}")))
        };
        let number = |value: &Value| value.as_u64().unwrap_or_default();
        Ok(HopReport {
            direction: if self.direction == HopDirection::Back { HopDirection::Away } else { HopDirection::Back },
            detach_begins,
            released,
            migration_begins: at(&source_events, "MIGRATION", Some("setup"))?,
            stopped: at(&source_events, "STOP", None)?,
            runs: at(&arrival_events, "RESUME", None)?,
            migration_ends: at(&source_events, "MIGRATION", Some("completed"))?,
            attached,
            on_ring: None,
            qemu_downtime: Duration::from_millis(number(&progress["downtime"])),
            memory_sent: number(&progress["ram"]["transferred"]),
            said,
        })
    }

    /// Where the guest is.
    fn source(&self) -> &Playground {
        if self.direction == HopDirection::Away { &self.home } else { &self.far }
    }

    fn destination(&self) -> &Playground {
        if self.direction == HopDirection::Away { &self.far } else { &self.home }
    }

    /// How many machines are attached where the guest is.
    fn machines(&self) -> usize {
        if self.direction == HopDirection::Away { 2 } else { 1 }
    }

    /// Runs `partywall vm migrate`: when the windows were released, and all that it said.
    fn run_migrate(&self, uri: &str) -> Result<(Duration, String), LabError> {
        let source = self.source();
        let start_error = |e: std::io::Error| source.refused(format!("partywall does not run: {e}"));
        let mut command = source.partywall(["vm", "migrate", TRAVELLER, "--to", uri]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(start_error)?;
        let (mut released, mut said) = (None, String::new());
        for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
            let line = line.map_err(start_error)?;
            if line.contains("has released its windows") {
                released = Some(self.epoch.elapsed());
            }
            said.push_str(&line);
            said.push('\n');
        }
        let mut complaint = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            stderr.read_to_string(&mut complaint).map_err(start_error)?;
        }
        let status = child.wait().map_err(start_error)?;
        match released {
            Some(released) if status.success() => Ok((released, said)),
            _ => Err(source.refused(format!("`partywall vm migrate` ended with {status}: {said}{complaint}"))),
        }
    }

    /// The events that a guest's QEMU has sent since the last look.
    fn events(&self, guest: &Guest) -> Result<Vec<MonitorEvent>, LabError> {
        // Events precede the answer to a later command.
        guest.monitor_command("query-status", json!({}))?;
        let (now, since) = (SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(), self.epoch.elapsed());
        let event = |event: &Value| {
            let stamp = &event["timestamp"];
            let seconds = Duration::from_secs(stamp["seconds"].as_u64()?);
            let micros = Duration::from_micros(stamp["microseconds"].as_u64()?);
            Some(MonitorEvent {
                name: event["event"].as_str()?.to_owned(),
                status: event["data"]["status"].as_str().map(str::to_owned),
                at: (since + seconds + micros).saturating_sub(now),
            })
        };
        Ok(guest.take_monitor_events().iter().filter_map(event).collect())
    }
}

/// An event of QEMU's.
#[derive(Debug)]
struct MonitorEvent {
    name: String,
    /// That of its data, as the event `MIGRATION` has it.
    status: Option<String>,
    at: Duration,
}

impl Drop for MigrationStage {
    fn drop(&mut self) {
        self.traveller.kill();
        self.neighbour.kill();
        // Each follower holds the neighbour, whose folder is removed with the last of them.
        for (stream, _) in &mut self.streams {
            stream.join();
        }
    }
}

fn options(name: &str) -> GuestOptions {
    GuestOptions::new(name).memory(MEMORY)
}

/// The processes and folders of this process' labs that are there, as paths.
pub fn left_behind() -> Vec<PathBuf> {
    let mut left = crate::scratch::own_folders(&std::env::temp_dir());
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        left.extend(children.split_whitespace().map(|pid| PathBuf::from(format!("/proc/{pid}"))));
    }
    left
}
