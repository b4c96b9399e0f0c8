//! The processes of the host that an appliance has: a switch, and a back end for each imported disk.

use crate::process::LabProcess;
use crate::{LabError, Playground, beside};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Longer is a hang.
const START: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct HostParts {
    folder: PathBuf,
    switch: Option<LabProcess>,
    /// By the domain that exports the disk.
    disks: BTreeMap<String, LabProcess>,
}

impl HostParts {
    pub(super) fn new(folder: &Path) -> Result<Self, LabError> {
        Ok(Self { folder: folder.to_owned(), switch: None, disks: BTreeMap::new() })
    }

    /// The folder of the switch and of the disks' sockets.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn socket(&self, domain: &str) -> PathBuf {
        self.folder.join(format!("{domain}.sock"))
    }

    pub(super) fn start_switch(&mut self) -> Result<(), LabError> {
        let mut command = Command::new(beside("partywall-net")?);
        command.arg("--folder").arg(&self.folder).args(["run", "lan", "--port", "files", "--port", "gateway"]);
        let switch = self.start(&command, "switch")?;
        let socket = self.folder.join("lan/gateway.port");
        self.wait_for(&socket, &switch)?;
        self.switch = Some(switch);
        Ok(())
    }

    /// Serves a disk that a domain exports as its service `disk`, unless that is so already.
    pub(super) fn serve(&mut self, playground: &Playground, domain: &str) -> Result<(), LabError> {
        if self.disks.contains_key(domain) {
            return Ok(());
        }
        let socket = self.socket(domain);
        let mut command = Command::new(beside("partywall-blk")?);
        command.args(["serve", "--from", &format!("{domain}:disk"), "--socket"]).arg(&socket);
        // As long as a machine takes that is started again.
        command.args(["--grace", "300", "--connections", "2", "--broker"]).arg(playground.socket());
        let process = self.start(&command, domain)?;
        self.wait_for(&socket, &process)?;
        self.disks.insert(domain.to_owned(), process);
        Ok(())
    }

    /// Commands that show the switch and each disk.
    pub(super) fn commands(&self) -> Vec<String> {
        let mut commands = Vec::new();
        if self.switch.is_some() {
            commands.push(format!("partywall net --folder {} show lan", self.folder.display()));
        }
        let disk = |domain: &String| format!("partywall blk show --socket {}", self.socket(domain).display());
        commands.extend(self.disks.keys().map(disk));
        commands
    }

    fn start(&self, command: &Command, name: &str) -> Result<LabProcess, LabError> {
        let log = self.folder.join(format!("{name}.log"));
        let file = File::create(&log).map_err(LabError::file("create", &log))?;
        LabProcess::start(command, "TERM", Some(file))
    }

    fn wait_for(&self, socket: &Path, process: &LabProcess) -> Result<(), LabError> {
        let deadline = Instant::now() + START;
        while !socket.exists() {
            let ended = process.wait(Duration::from_millis(20));
            if ended.is_some() || Instant::now() > deadline {
                let log = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
                let log: String = log
                    .filter(|entry| entry.path().extension().is_some_and(|kind| kind == "log"))
                    .filter_map(|entry| std::fs::read_to_string(entry.path()).ok())
                    .collect();
                return Err(LabError::tool(&socket.display().to_string(), ended.unwrap_or_default() + &log));
            }
        }
        Ok(())
    }

    /// Bytes that all back ends have read, written and copied.
    pub(super) fn disk_bytes(&self) -> Result<[u64; 3], LabError> {
        let mut sums = [0; 3];
        for domain in self.disks.keys() {
            let mut command = Command::new(beside("partywall-blk")?);
            command.args(["show", "--json", "--socket"]).arg(self.socket(domain));
            let output = command.output().map_err(|e| LabError::tool("partywall-blk", e))?;
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            for (sum, name) in sums.iter_mut().zip(["read_bytes", "written_bytes", "copied_bytes"]) {
                *sum += report["counters"][name].as_u64().unwrap_or(0);
            }
        }
        Ok(sums)
    }
}
