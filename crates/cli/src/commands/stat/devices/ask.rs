//! Asks switches and disks for their counters. Their own programs find them and speak to them.

use std::ffi::OsStr;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{DeviceTotals, DiskTotals, PortTotals};
use crate::siblings;

/// How long a switch or a disk may take to answer. They are all asked at once, so one that hangs does not delay the others.
const LIMIT: Duration = Duration::from_secs(1);

/// The program that knows the switches, and the package that it and the program of the disks come from.
const NET: &str = "partywall-net";
const PACKAGE: &str = "partywall-vhost";

/// The output of `partywall net show --json` for one port, as far as it is shown here.
#[derive(Debug, Deserialize)]
struct PortRow {
    port: PortName,
    connected: bool,
    counters: PortTotals,
}

#[derive(Debug, Deserialize)]
struct PortName {
    name: String,
}

#[derive(Debug, Deserialize)]
struct SwitchRows {
    ports: Vec<PortRow>,
}

#[derive(Debug, Deserialize)]
struct DiskRow {
    counters: DiskTotals,
}

/// The output of `partywall net list --json` for one switch, as far as it is used here.
#[derive(Debug, Deserialize)]
struct SwitchName {
    name: String,
}

/// The devices whose counters are added.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CountedDeviceArgs {
    /// With --total: folder of the switches (`partywall net`) whose ports are counted [default: that of `partywall net`]
    #[arg(long, value_name = "FOLDER", requires = "total")]
    net_folder: Option<PathBuf>,

    /// With --total: also count the disk (`partywall blk`) at this socket; may be repeated
    #[arg(long = "disk", value_name = "SOCKET", requires = "total")]
    disks: Vec<PathBuf>,
}

impl CountedDeviceArgs {
    /// Asks all devices at once. A device that does not answer becomes a note, and does not delay the others.
    pub(in super::super) fn look(&self, notes: &mut Vec<String>) -> DeviceTotals {
        let mut totals = DeviceTotals::default();
        thread::scope(|scope| {
            let of_disks: Vec<_> = self
                .disks
                .iter()
                .map(|socket| {
                    let words = ["show".as_ref(), "--json".as_ref(), "--socket".as_ref(), socket.as_os_str()];
                    (socket, scope.spawn(move || ask::<DiskRow>("partywall-blk", &words)))
                })
                .collect();
            let switches = self.switches().unwrap_or_else(|why| {
                notes.push(format!("network switches are not counted: {why}"));
                Vec::new()
            });
            let of_switches: Vec<_> = switches
                .into_iter()
                .map(|SwitchName { name }| {
                    let asked = name.clone();
                    (name, scope.spawn(move || self.ask_net::<SwitchRows>(&["show".as_ref(), asked.as_ref()])))
                })
                .collect();
            for (name, asked) in of_switches {
                match asked.join().unwrap_or_else(|_| Err("its answer was not understood".into())) {
                    Ok(SwitchRows { ports }) => {
                        let port =
                            |row: PortRow| (row.port.name, PortTotals { connected: row.connected, ..row.counters });
                        totals.network.insert(name, ports.into_iter().map(port).collect());
                    }
                    Err(why) => notes.push(format!("switch {name} is not counted: {why}")),
                }
            }
            for (socket, asked) in of_disks {
                match asked.join().unwrap_or_else(|_| Err("its answer was not understood".into())) {
                    Ok(DiskRow { counters }) => drop(totals.disks.insert(socket.display().to_string(), counters)),
                    Err(why) => notes.push(format!("disk {} is not counted: {why}", socket.display())),
                }
            }
        });
        totals
    }

    /// The switches that `partywall net list` finds. There are none where `partywall-net` is not installed: no switch runs without it.
    fn switches(&self) -> Result<Vec<SwitchName>, String> {
        match siblings::find(NET, PACKAGE) {
            Err(_) if self.net_folder.is_none() => Ok(Vec::new()),
            _ => self.ask_net(&["list".as_ref()]),
        }
    }

    fn ask_net<A: DeserializeOwned>(&self, words: &[&OsStr]) -> Result<A, String> {
        let folder = self.net_folder.iter().flat_map(|folder| ["--folder".as_ref(), folder.as_os_str()]);
        let words: Vec<&OsStr> = words.iter().copied().chain(["--json".as_ref()]).chain(folder).collect();
        ask(NET, &words)
    }
}

/// Asks all switches of a folder, or else of the usual one, and these disks, for another command than `stat`.
pub(crate) fn look(folder: Option<&Path>, disks: &[PathBuf], notes: &mut Vec<String>) -> DeviceTotals {
    CountedDeviceArgs { net_folder: folder.map(Path::to_owned), disks: disks.to_vec() }.look(notes)
}

fn ask<A: DeserializeOwned>(program: &str, words: &[&OsStr]) -> Result<A, String> {
    let program = siblings::find(program, PACKAGE).map_err(|e| e.to_string())?;
    let (succeeded, stdout, stderr) = run(Command::new(program).args(words), LIMIT)?;
    if !succeeded {
        let said = String::from_utf8_lossy(&stderr);
        return Err(partywall_terminal::printable(said.lines().next().unwrap_or("it does not answer")).to_string());
    }
    serde_json::from_slice(&stdout).map_err(|e| format!("its answer cannot be read: {e}"))
}

/// Runs a program that is to end by itself: whether it succeeded, and what it wrote. It is killed at the limit.
fn run(command: &mut Command, limit: Duration) -> Result<(bool, Vec<u8>, Vec<u8>), String> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| e.to_string())?;
    let (done, written) = mpsc::channel();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    thread::spawn(move || {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let read = stdout.map_or(Ok(0), |mut from| from.read_to_end(&mut out));
        let read = read.and_then(|_| stderr.map_or(Ok(0), |mut from| from.read_to_end(&mut err)));
        let _ = done.send(read.map(|_| (out, err)));
    });
    let read = written.recv_timeout(limit);
    if read.is_err() {
        let _ = child.kill();
    }
    let status = child.wait().map_err(|e| e.to_string())?;
    let (out, err) = read.map_err(|_| format!("it has not answered within {limit:?}"))?.map_err(|e| e.to_string())?;
    Ok((status.success(), out, err))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_that_does_not_answer_is_killed_at_the_limit() {
        let e = run(Command::new("sleep").arg("1000"), Duration::from_millis(50)).unwrap_err();
        assert!(e.contains("has not answered within 50ms"), "{e}");
        let (succeeded, out, err) =
            run(Command::new("sh").args(["-c", "echo a; echo b >&2; exit 1"]), Duration::from_secs(60)).unwrap();
        assert_eq!((succeeded, &out[..], &err[..]), (false, &b"a\n"[..], &b"b\n"[..]));
    }
}
