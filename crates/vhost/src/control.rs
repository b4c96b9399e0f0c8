//! The control socket of a switch: ports come and go while frames flow. A request is a line of JSON, and so is its answer.

use crate::config::{ConfigSource, SwitchConfig, contradiction};
use crate::folder::{self, SWITCHES};
use crate::handle::{Answer, RequestHandle};
use crate::{PortCounters, VhostError, line, tap};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tracing::{info, warn};

pub use crate::port::{PortSpec, check_name};

/// How long a client waits for a file to come into force.
const LONGEST_RELOAD: Duration = Duration::from_secs(300);

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
    /// Read the switch's file, and bring it into force: [`ReloadReport`].
    Reload,
    /// Bring a file into force: [`ReloadReport`]. The process of the switch reads the file, so no client can send this.
    #[serde(skip)]
    Apply {
        /// The file.
        config: Box<SwitchConfig>,
    },
    /// End.
    Stop,
}

/// The ports that a file has changed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReloadReport {
    /// New ones.
    pub added: Vec<String>,
    /// Those with other limits than before.
    pub changed: Vec<String>,
    /// Those that are gone.
    pub removed: Vec<String>,
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
    /// The file and the line that fix its limits, if a file lists it.
    #[serde(default)]
    pub listed: Option<String>,
    /// A driver uses it, or its device exists.
    pub connected: bool,
    /// A front end is connected, also if no driver uses it yet: a second one is sent away.
    pub occupied: bool,
    /// The counts of its frames.
    pub counters: PortCounters,
}

impl PortReport {
    /// Whether this is the port that is `wanted`: with the same limits, or none are wanted.
    ///
    /// # Errors
    /// It has other limits. The error names the file that fixes them, if one does.
    pub fn agrees(&self, wanted: &PortSpec) -> Result<(), VhostError> {
        match &self.listed {
            Some(place) if !wanted.fits(&self.port) => Err(VhostError::Refused(contradiction(place, &self.port.name))),
            _ => wanted.agrees(&self.port),
        }
    }
}

/// All ports of a switch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SwitchReport {
    /// In the order in which they were added.
    pub ports: Vec<PortReport>,
    /// The file in force.
    #[serde(default)]
    pub file: Option<PathBuf>,
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
    folder::of_user(SWITCHES)
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
    // The names of users in a file may come from another host.
    let limit = if matches!(request, ControlRequest::Reload) { LONGEST_RELOAD } else { line::ANSWER };
    line::ask(&socket(folder), request, limit).map_err(|e| {
        e.or_absent(format_args!("no switch runs in {}; start it with `partywall net run`", folder.display()))
    })
}

/// Ports that no file lists, as they were when the switch last ran, by its folder; none if it has not run.
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

/// Ports that no file lists, written down for [`saved`] before a change and not in force yet.
#[derive(Debug)]
struct PortsDraft {
    draft: PathBuf,
    path: PathBuf,
}

impl PortsDraft {
    fn write(folder: &Path, ports: &[PortSpec]) -> Result<Self, VhostError> {
        let this = Self { draft: folder.join("ports.json.new"), path: folder.join("ports.json") };
        let text = serde_json::to_string(ports).map_err(|e| VhostError::Refused(e.to_string()))?;
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&this.draft)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()
        };
        write().map_err(VhostError::file("write", &this.draft))?;
        Ok(this)
    }

    /// The change is in force, and the ports of the last run are these from now on.
    fn keep(self) -> Result<(), VhostError> {
        std::fs::rename(&self.draft, &self.path).map_err(|e| {
            let remedy = "the next start would have the ports of before: correct the folder, and repeat a change";
            let path = self.path.display();
            VhostError::Refused(format!("the change is in force, but {path} cannot be written: {e}; {remedy}"))
        })
    }
}

impl Drop for PortsDraft {
    fn drop(&mut self) {
        // There is none after it was kept.
        let _ = std::fs::remove_file(&self.draft);
    }
}

/// Listens in a switch's folder, for [`serve`].
pub fn listen(folder: &Path) -> Result<UnixListener, VhostError> {
    line::listen(&socket(folder))
}

/// Serves clients one after the other until the engine has ended.
pub fn serve(listener: &UnixListener, switch: &SwitchControl) {
    line::serve(listener, |request| switch.perform(request));
}

/// A running switch with its folder and its file. Clients and signals change it by this, one after the other.
#[derive(Debug)]
pub struct SwitchControl {
    folder: PathBuf,
    engine: EngineHandle,
    source: ConfigSource,
    turn: Mutex<()>,
}

impl SwitchControl {
    /// The switch of this folder, which `engine` runs.
    pub fn new(folder: &Path, engine: EngineHandle, source: ConfigSource) -> Self {
        Self { folder: folder.to_owned(), engine, source, turn: Mutex::default() }
    }

    /// Adds the ports of the file, those of the last run, and those of the command line.
    ///
    /// # Errors
    /// A port cannot be added, or the command line contradicts the file.
    pub fn start(&self, config: Option<SwitchConfig>, wanted: &[PortSpec]) -> Result<(), VhostError> {
        let _turn = self.turn();
        // Before anything is changed: a file of ports that cannot be read ends the start.
        let mut others = saved(&self.folder)?;
        if let Some(config) = &config {
            wanted.iter().try_for_each(|port| config.permits(port))?;
            self.engine.ask(ControlRequest::Apply { config: Box::new(config.clone()) })?;
            others.retain(|port| stays(config, port));
        }
        let is_listed = |port: &PortSpec| config.as_ref().is_some_and(|config| config.find(&port.name).is_some());
        let new = |port: &&PortSpec| !is_listed(port) && !others.iter().any(|other| other.name == port.name);
        for port in others.iter().chain(wanted.iter().filter(new)) {
            self.engine.ask(ControlRequest::Add { port: port.clone() }).inspect_err(|_| {
                // The devices of new ports would stay without a switch that knows them.
                for port in wanted.iter().filter(new) {
                    let _ = self.engine.ask(ControlRequest::Remove { name: port.name.clone() });
                }
            })?;
        }
        let report = self.report()?;
        let is_port = |name: &str, tap| report.ports.iter().any(|row| row.port.name == name && row.port.tap == tap);
        tap::remove_strays(&self.folder, |name| is_port(name, true));
        remove_stray_sockets(&self.folder, |name| is_port(name, false));
        PortsDraft::write(&self.folder, &others_of(report))?.keep()
    }

    /// Whether the switch has a file in force, or one to read.
    pub fn has_file(&self) -> bool {
        self.source.path.as_ref().is_some_and(|path| path.exists()) || self.report().is_ok_and(|it| it.file.is_some())
    }

    /// Performs a request, and writes down the ports that no file lists. That comes first: if it fails, nothing is changed.
    pub fn perform(&self, request: ControlRequest) -> Answer {
        let _turn = self.turn();
        let unchanged = |e| VhostError::Refused(format!("nothing was changed: {e}"));
        match request {
            ControlRequest::Reload => {
                let (config, draft) = self.prepare_reload().map_err(unchanged)?;
                let path = config.path.clone();
                let report = self.engine.ask(ControlRequest::Apply { config }).map_err(unchanged)?;
                info!("{} is in force: {report}", path.display());
                draft.keep()?;
                Ok(report)
            }
            ControlRequest::Add { ref port } => {
                let mut others = others_of(self.report()?);
                others.push(port.clone());
                self.change(request, &others)
            }
            ControlRequest::Remove { ref name } => {
                let mut others = others_of(self.report()?);
                others.retain(|port| port.name != *name);
                self.change(request, &others)
            }
            request => self.engine.ask(request),
        }
    }

    /// Performs a request, after which the switch has these ports that no file lists.
    fn change(&self, request: ControlRequest, others: &[PortSpec]) -> Answer {
        let draft = PortsDraft::write(&self.folder, others)?;
        let value = self.engine.ask(request)?;
        draft.keep()?;
        Ok(value)
    }

    /// The file, and the ports that it does not list and that stay.
    fn prepare_reload(&self) -> Result<(Box<SwitchConfig>, PortsDraft), VhostError> {
        let Some(path) = &self.source.path else {
            let why = "the switch was started without --config, and its folder is not in /run/partywall/net";
            return Err(VhostError::Refused(format!("there is no file to read: {why}")));
        };
        let config = self.source.read()?;
        let config = config.ok_or_else(|| VhostError::Refused(format!("there is no file {}", path.display())))?;
        let mut others = others_of(self.report()?);
        others.retain(|port| config.other_ports && config.find(&port.name).is_none());
        Ok((Box::new(config), PortsDraft::write(&self.folder, &others)?))
    }

    fn report(&self) -> Result<SwitchReport, VhostError> {
        let report = self.engine.ask(ControlRequest::Show)?;
        serde_json::from_value(report).map_err(|e| VhostError::Refused(e.to_string()))
    }

    fn turn(&self) -> std::sync::MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ports that no file lists. A port that the file lists is in force only by the file.
fn others_of(report: SwitchReport) -> Vec<PortSpec> {
    report.ports.into_iter().filter(|row| row.listed.is_none()).map(|row| row.port).collect()
}

/// Removes the sockets that a killed process of a switch has left behind, of ports that the switch has no longer.
fn remove_stray_sockets(folder: &Path, is_port: impl Fn(&str) -> bool) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_stray = name.to_str().and_then(|name| name.strip_suffix(".port")).is_some_and(|name| !is_port(name));
        if is_stray && entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Whether a port of the last run is added again. The file wins.
fn stays(config: &SwitchConfig, port: &PortSpec) -> bool {
    if config.find(&port.name).is_some() {
        return false;
    }
    let why = match config.conflict(port) {
        _ if !config.other_ports => "the file does not list it".to_owned(),
        Some((address, listed)) => format!("{} fixes {address} to the port {}", config.place(listed), listed.spec.name),
        None => return true,
    };
    warn!(port = port.name, "a port that a command had added is gone: {why}");
    false
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
    fn client_cannot_send_a_file_but_only_have_it_read() {
        let parse = |text: &str| serde_json::from_str::<ControlRequest>(text);
        assert!(matches!(parse(r#"{"request":"reload"}"#), Ok(ControlRequest::Reload)));
        let refused = parse(r#"{"request":"apply","config":{}}"#).unwrap_err().to_string();
        assert!(refused.contains("unknown variant"), "{refused}");
    }

    #[test]
    fn listed_port_with_other_limits_names_its_file() {
        let mut row = PortReport {
            number: 1,
            port: PortSpec { rate: Some(7), ..PortSpec::new("a") },
            path: PathBuf::new(),
            listed: Some("/etc/lan.toml, line 3".into()),
            connected: false,
            occupied: false,
            counters: PortCounters::default(),
        };
        let other = PortSpec { rate: Some(8), ..PortSpec::new("a") };
        assert!(row.agrees(&PortSpec::new("a")).is_ok() && row.agrees(&row.port).is_ok());
        let refused = row.agrees(&other).unwrap_err().to_string();
        assert!(refused.starts_with("/etc/lan.toml, line 3, fixes the port a"), "{refused}");
        row.listed = None;
        assert!(row.agrees(&other).unwrap_err().to_string().contains("remove it first"));
    }
}
