//! The control socket of a switch: ports come and go while frames flow. A request is a line of JSON, and so is its answer.

use crate::handle::RequestHandle;
use crate::switch::MacAddress;
use crate::{PortCounters, VhostError, line};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// A port as the operator wants it.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct PortSpec {
    /// Its name: that of its socket, or of the tap device.
    pub name: String,
    /// It is a tap device of the host.
    #[serde(default)]
    pub tap: bool,
    /// The Ethernet addresses that it may send from; all, if there are none here.
    #[serde(default)]
    pub mac: Vec<MacAddress>,
    /// The IP addresses that it may send from; all, if there are none here.
    #[serde(default)]
    pub ip: Vec<IpAddr>,
    /// Bytes a second that it may send.
    #[serde(default)]
    pub rate: Option<u64>,
    /// The user whose QEMU may connect.
    #[serde(default)]
    pub owner: Option<u32>,
}

impl PortSpec {
    /// A port for a card, without limits.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), tap: false, mac: Vec::new(), ip: Vec::new(), rate: None, owner: None }
    }

    /// Its socket in the switch's folder.
    pub fn socket(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}.port", self.name))
    }

    /// Whether the port `there` is what is wanted here: with the same limits, or none are wanted here. No owner agrees with any owner.
    pub fn agrees(&self, there: &Self) -> Result<(), VhostError> {
        let wanted = Self { owner: self.owner.or(there.owner), ..self.clone() };
        if wanted == *there || *self == Self::new(&there.name) {
            return Ok(());
        }
        let why = "there is a port of this name with other limits; remove it first, or leave the limits out";
        Err(VhostError::Refused(format!("{}: {why}", self.name)))
    }

    pub(crate) fn check(&self) -> Result<(), VhostError> {
        check_name(&self.name)?;
        let most = 64;
        if self.mac.len() > most || self.ip.len() > most || self.rate == Some(0) {
            return Err(VhostError::Refused(format!(
                "a port has at most {most} addresses of a kind, and a rate above 0"
            )));
        }
        Ok(())
    }
}

/// Checks a name, which becomes a part of paths.
pub fn check_name(name: &str) -> Result<(), VhostError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let good = (1..=32).contains(&name.len()) && name.chars().all(fits) && !name.starts_with(['.', '-']);
    let rule = "1 to 32 of A-Z a-z 0-9 . _ -, first a letter or digit";
    if good { Ok(()) } else { Err(VhostError::Refused(format!("`{name}` is no name: write {rule}"))) }
}

/// A request to a switch.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "lowercase", deny_unknown_fields)]
pub enum ControlRequest {
    /// Add a port; the answer is its socket.
    Add {
        /// The port.
        port: PortSpec,
    },
    /// Remove a port.
    Remove {
        /// Its name.
        name: String,
    },
    /// Show the ports: [`SwitchReport`].
    Show,
    /// Show the addresses: a list of [`crate::switch::LearnedAddress`].
    Table,
    /// End.
    Stop,
}

/// The handle for requests to a running engine.
pub type EngineHandle = RequestHandle<ControlRequest>;

/// One port of a switch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PortReport {
    /// Its number in the table of addresses.
    pub number: u32,
    /// As it was added.
    pub port: PortSpec,
    /// Its socket, or its device.
    pub path: PathBuf,
    /// A driver uses it, or its device exists.
    pub connected: bool,
    /// A front end is connected, also if no driver uses it yet: a second one is sent away.
    pub occupied: bool,
    /// The counts of its frames.
    pub counters: PortCounters,
}

/// All ports of a switch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SwitchReport {
    /// In the order in which they were added.
    pub ports: Vec<PortReport>,
}

/// A switch that has run in a folder of switches and has not ended in order.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct FoundSwitch {
    /// Its name.
    pub name: String,
    /// Its own folder.
    pub folder: PathBuf,
    /// A process listens at its control socket. A switch that was killed leaves the socket behind.
    pub running: bool,
}

/// The folder of all switches of this user, unless the command line names another. `None` if the user has no folder for such files.
pub fn default_folder() -> Option<PathBuf> {
    folder_of("net")
}

/// A folder of this user for sockets of one kind.
pub(crate) fn folder_of(kind: &str) -> Option<PathBuf> {
    let all = match rustix::process::geteuid().is_root() {
        true => PathBuf::from("/run"),
        false => std::env::var_os("XDG_RUNTIME_DIR")?.into(),
    };
    Some(all.join("partywall").join(kind))
}

/// Finds the switches in a folder of switches by their control sockets, in the order of their names.
pub fn switches(all: &Path) -> Result<Vec<FoundSwitch>, VhostError> {
    let entries = match std::fs::read_dir(all) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(VhostError::file("read", all))?,
    };
    let found = |name: String| {
        check_name(&name).ok()?;
        let folder = all.join(&name);
        let at = socket(&folder);
        let is_socket = at.symlink_metadata().is_ok_and(|there| there.file_type().is_socket());
        is_socket.then(|| FoundSwitch { running: line::is_served(&at), name, folder })
    };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut switches: Vec<FoundSwitch> = names.filter_map(found).collect();
    switches.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(switches)
}

/// Where a switch is asked.
pub fn socket(folder: &Path) -> PathBuf {
    folder.join("control")
}

/// Asks a running switch.
pub fn ask(folder: &Path, request: &ControlRequest) -> Result<serde_json::Value, VhostError> {
    line::ask(&socket(folder), request).map_err(|e| {
        e.or_absent(format_args!("no switch runs in {}; start it with `partywall net run`", folder.display()))
    })
}

/// Ports as they were when the switch last ran, by its folder; none if it has not run.
///
/// A file that cannot be read is an error: without it, ports would come back without their limits.
pub fn saved(folder: &Path) -> Result<Vec<PortSpec>, VhostError> {
    let path = folder.join("ports.json");
    let text = match std::fs::read_to_string(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(VhostError::file("read", &path))?,
    };
    let remedy = "correct it, or remove it to start without ports";
    serde_json::from_str(&text).map_err(|e| VhostError::Refused(format!("{}: {e}; {remedy}", path.display())))
}

/// Writes the ports of a running switch into its folder, for [`saved`].
pub fn save(folder: &Path, engine: &EngineHandle) -> Result<(), VhostError> {
    let report = engine.ask(ControlRequest::Show)?;
    let report: SwitchReport = serde_json::from_value(report).map_err(|e| VhostError::Refused(e.to_string()))?;
    let ports: Vec<PortSpec> = report.ports.into_iter().map(|row| row.port).collect();
    let text = serde_json::to_string(&ports).map_err(|e| VhostError::Refused(e.to_string()))?;
    let (draft, path) = (folder.join("ports.json.new"), folder.join("ports.json"));
    std::fs::write(&draft, text).and_then(|()| std::fs::rename(&draft, &path)).map_err(VhostError::file("write", &path))
}

/// Listens in a switch's folder, for [`serve`].
pub fn listen(folder: &Path) -> Result<UnixListener, VhostError> {
    line::listen(&socket(folder))
}

/// Serves clients one after the other until the engine has ended.
pub fn serve(listener: &UnixListener, folder: &Path, engine: &EngineHandle) {
    line::serve(listener, |request: ControlRequest| {
        let changes = matches!(request, ControlRequest::Add { .. } | ControlRequest::Remove { .. });
        let value = engine.ask(request)?;
        if changes {
            save(folder, engine)?;
        }
        Ok(value)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_that_cannot_be_read_are_not_taken_for_none() {
        let folder = tempfile::tempdir().unwrap();
        assert!(saved(folder.path()).unwrap().is_empty());
        std::fs::write(folder.path().join("ports.json"), r#"[{"name":"a","ip":["10.0.0.1"]}]"#).unwrap();
        assert_eq!(saved(folder.path()).unwrap()[0].ip.len(), 1);
        for text in ["", r#"[{"name":"a","ip":["10.0.0.1"]"#, r#"[{"name":"a","unknown":1}]"#] {
            std::fs::write(folder.path().join("ports.json"), text).unwrap();
            assert!(saved(folder.path()).is_err(), "{text:?}");
        }
    }

    #[test]
    fn switches_are_found_by_their_control_sockets() {
        let all = tempfile::tempdir().unwrap();
        assert!(switches(&all.path().join("absent")).unwrap().is_empty());
        let folder = |name: &str| {
            let folder = all.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            folder
        };
        // The last switch was killed, which leaves its socket behind. The others are none: a folder that never ran, a file in place
        // of a socket, a name that no switch can have.
        let _serving = listen(&folder("b")).unwrap();
        drop(listen(&folder("a")).unwrap());
        folder("never-ran");
        std::fs::write(socket(&folder("file")), "").unwrap();
        let _other = listen(&folder("no name")).unwrap();
        let found = switches(all.path()).unwrap();
        let found: Vec<_> = found.iter().map(|it| (it.name.as_str(), it.folder.as_path(), it.running)).collect();
        assert_eq!(found, [("a", &*all.path().join("a"), false), ("b", &*all.path().join("b"), true)]);
        let file = all.path().join("file").join("control");
        assert!(switches(&file).is_err(), "a folder of switches that cannot be read");
    }

    #[test]
    fn port_spec_with_other_limits_does_not_agree() {
        let there = PortSpec { rate: Some(1000), ..PortSpec::new("a") };
        assert!(there.agrees(&there).is_ok() && PortSpec::new("a").agrees(&there).is_ok());
        assert!(PortSpec { rate: Some(2000), ..PortSpec::new("a") }.agrees(&there).is_err());
        assert!(there.agrees(&PortSpec::new("a")).is_err(), "limits that are wanted and not there");
        let owned = PortSpec { owner: Some(7), ..there.clone() };
        assert!(there.agrees(&owned).is_ok() && owned.agrees(&there).is_err());
        assert!(PortSpec { owner: Some(8), ..there }.agrees(&owned).is_err());
    }
}
