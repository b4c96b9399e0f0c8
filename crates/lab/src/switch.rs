//! A switch of `partywall net` on the host, and the options of a guest's card on it.

use crate::process::LabProcess;
use crate::{LabError, beside, scratch};
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// A start that takes longer than this hangs.
const START: Duration = Duration::from_secs(30);
/// The name of the switch in its folder.
const NAME: &str = "lan";

/// A running switch. It ends, and its folder with it, when it is dropped.
#[derive(Debug)]
pub struct NetSwitch {
    // The process ends before its folder goes.
    process: LabProcess,
    folder: tempfile::TempDir,
}

impl NetSwitch {
    /// Starts a switch with these ports.
    pub fn start(ports: &[&str]) -> Result<Self, LabError> {
        let folder = scratch::folder()?;
        let log = folder.path().join("log");
        let mut command = Command::new(beside("partywall-net")?);
        command.arg("--folder").arg(folder.path()).args(["run", NAME]);
        command.args(ports.iter().flat_map(|port| ["--port", port]));
        let file = File::create(&log).map_err(LabError::file("create", &log))?;
        let process = LabProcess::start(&command, "TERM", Some(file))?;
        let switch = Self { process, folder };
        let deadline = Instant::now() + START;
        while !ports.iter().all(|port| switch.socket(port).exists()) {
            let ended = switch.process.wait(Duration::from_millis(5));
            if ended.is_some() || Instant::now() > deadline {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                return Err(LabError::tool("partywall-net", format!("{} {said}", ended.unwrap_or_default())));
            }
        }
        Ok(switch)
    }

    /// The arguments that give a guest of QEMU a card on a port. Its memory must be shared ([`GuestOptions::shared_memory`](crate::GuestOptions::shared_memory)).
    pub fn card(&self, port: &str, mac: &str) -> Vec<String> {
        // QEMU 7.2 crashes with interrupt vectors where it emulates.
        let device = format!("virtio-net-pci,netdev=port,mac={mac},rx_queue_size=1024,tx_queue_size=1024,vectors=0");
        vec![
            "-chardev".into(),
            format!("socket,id=port,path={},reconnect=1", self.socket(port).display()),
            "-netdev".into(),
            "vhost-user,id=port,chardev=port".into(),
            "-device".into(),
            device,
        ]
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The socket of a port.
    pub fn socket(&self, port: &str) -> PathBuf {
        self.folder.path().join(NAME).join(format!("{port}.port"))
    }
}

impl Drop for NetSwitch {
    fn drop(&mut self) {
        // It removes its sockets.
        self.process.stop();
    }
}
