//! What the broker remembers of virtual machines, for the broker that runs after it: the machines that are attached, and the files of
//! their windows and of the windows of their groups.
//!
//! ```text
//!   broker.sock.machines   JSON, of this user alone, replaced as a whole; there while a machine is attached
//! ```
//!
//! Without it every start of a broker would plug new windows into machines, which have 16 slots for them or so and release none.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use partywall_protocol::window::WindowId;
use partywall_region::pmem::{WindowFile, WindowTrace, book};
use partywall_vm::Machine;
use serde::{Deserialize, Serialize};

use super::store::{self, PassedFiles};
use crate::unix_socket::beside;

/// The layout of the file. A broker ignores files of another one.
const VERSION: u32 = 1;
/// Most bytes of the file that are read: some hundred machines.
const MOST: u64 = 4 << 20;

/// One machine that is attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AttachmentRecord {
    pub(super) name: String,
    pub(super) monitor: String,
    pub(super) port: String,
    pub(super) room: u64,
    pub(super) migratable: bool,
}

/// The file of one window. The host has no name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WindowRecord {
    pub(super) owner: Option<String>,
    pub(super) peer: Option<String>,
    pub(super) id: String,
    pub(super) inode: u64,
    pub(super) size: u64,
}

/// The file of the window of a member of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupWindowRecord {
    pub(super) group: String,
    /// All members, each with whether it is a machine: they see the window.
    pub(super) members: Vec<(String, bool)>,
    /// Whose window it is, by its place among them.
    pub(super) member: usize,
    pub(super) id: String,
    pub(super) inode: u64,
    pub(super) size: u64,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Remembered {
    version: u32,
    pub(super) machines: Vec<AttachmentRecord>,
    /// Those that have released their windows to be migrated. Their QEMU still has the windows, and must not get them plugged in again.
    #[serde(default)]
    pub(super) released: Vec<AttachmentRecord>,
    windows: Vec<WindowRecord>,
    #[serde(default)]
    pub(super) groups: Vec<GroupWindowRecord>,
}

/// The file, and what an earlier broker has written there.
#[derive(Debug)]
pub(super) struct AttachmentFile {
    path: PathBuf,
    /// The record that this broker has written last.
    written: Option<Remembered>,
    /// The record of the earlier broker, as far as it is not used yet: machines by name, and windows by owner and peer.
    machines: BTreeMap<String, AttachmentRecord>,
    released: BTreeMap<String, AttachmentRecord>,
    windows: BTreeMap<(Option<String>, Option<String>), WindowRecord>,
    /// Files that the service manager has kept for this broker.
    passed: PassedFiles,
    is_settled: bool,
}

/// Where the broker that serves this socket remembers its machines.
fn path_of(socket: &Path) -> PathBuf {
    beside(socket, ".machines")
}

/// What the earlier broker of this socket has left. A file that makes no sense is as good as none.
pub(super) fn remembered(socket: &Path) -> Remembered {
    let path = path_of(socket);
    read(&path).unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            tracing::warn!(path = %path.display(), %error, "the machines of the last broker are forgotten: the file cannot be read");
        }
        Remembered::default()
    })
}

/// Whether an earlier broker of this socket had machines, or has left files of windows with the service manager.
pub(crate) fn is_there(socket: &Path) -> bool {
    path_of(socket).symlink_metadata().is_ok() || PassedFiles::are_there()
}

impl AttachmentFile {
    /// Reads what the earlier broker of this socket has left. A file that makes no sense is as good as none.
    pub(super) fn open(socket: &Path) -> Self {
        let path = path_of(socket);
        let remembered = remembered(socket);
        let is_settled = remembered.machines.is_empty() && remembered.released.is_empty();
        let by_name = |all: Vec<AttachmentRecord>| all.into_iter().map(|one| (one.name.clone(), one)).collect();
        let (machines, released) = (by_name(remembered.machines), by_name(remembered.released));
        let windows = remembered.windows.into_iter().map(|one| ((one.owner.clone(), one.peer.clone()), one)).collect();
        let mut passed = PassedFiles::inherited();
        if is_settled {
            // No machine will ask for them.
            passed.close(|_| false);
        }
        Self { path, written: None, machines, released, windows, passed, is_settled }
    }

    /// The machines that the earlier broker had and that were not asked for since.
    pub(super) fn machines_left(&self) -> Vec<AttachmentRecord> {
        self.machines.values().cloned().collect()
    }

    /// The machines that had released their windows with the earlier broker and that were not asked for since.
    pub(super) fn released_left(&self) -> Vec<AttachmentRecord> {
        self.released.values().cloned().collect()
    }

    /// The windows of a machine that the earlier broker has made and that were not looked for since.
    pub(super) fn windows_left(&self, name: &str) -> Vec<WindowRecord> {
        let is_its = |window: &&WindowRecord| [&window.owner, &window.peer].map(Option::as_deref).contains(&Some(name));
        self.windows.values().filter(is_its).cloned().collect()
    }

    /// A machine is attached from now on. If it is not known to be the one that the earlier broker had under this name, its windows are
    /// others too: behind another monitor is another machine, and the one of before may still write its own.
    pub(super) fn attached(&mut self, record: &AttachmentRecord) {
        let [stays, released] = [&mut self.machines, &mut self.released].map(|known| known.remove(&record.name));
        if ![stays, released].into_iter().flatten().any(|before| before.monitor == record.monitor) {
            self.forget_windows(&record.name);
        }
    }

    /// The windows of this machine that were not looked for are not used again.
    pub(super) fn forget_windows(&mut self, name: &str) {
        let is_its = |side: &Option<String>| side.as_deref() == Some(name);
        self.windows.retain(|(owner, peer), _| !is_its(owner) && !is_its(peer));
        if self.is_settled {
            let windows = &self.windows;
            self.passed.close(|id| windows.values().any(|window| window.id == id.to_string()));
        }
    }

    /// The window between two parties that the earlier broker has made, if a process behind one of these monitors has its file, and most of
    /// its places are free. Also its places that programs of before may still use, as bytes from the header on.
    pub(super) fn find(
        &mut self,
        (owner, peer): (Option<&str>, Option<&str>),
        size: u64,
        monitors: &[&str],
    ) -> Option<(WindowFile, Vec<(u64, u64)>)> {
        let record = self.windows.remove(&(owner.map(str::to_owned), peer.map(str::to_owned)))?;
        let id: WindowId = record.id.parse().ok()?;
        let trace = WindowTrace { id, inode: record.inode, size: record.size };
        let found = find_again(trace, size, monitors);
        match found {
            Some(_) => self.passed.use_again(id),
            // It is not used again, and its memory is freed with the last descriptor.
            None => store::give_up(id),
        }
        found
    }

    /// The window with this id, which the service manager may have kept, is used again.
    pub(super) fn use_again(&mut self, id: WindowId) {
        self.passed.use_again(id);
    }

    /// Every machine of the last broker has been looked for. The files of `waiting` are looked for later.
    pub(super) fn settle(&mut self, waiting: &[WindowRecord]) {
        self.is_settled = true;
        self.passed.close(|id| waiting.iter().any(|window| window.id == id.to_string()));
    }

    /// Whether every machine of the last broker has been looked for.
    pub(super) fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Remembers what there is now, if it has changed. Until the machines of the last broker have been looked for, the file says more than
    /// this broker knows.
    pub(super) fn save(
        &mut self,
        (machines, released): (Vec<AttachmentRecord>, Vec<AttachmentRecord>),
        windows: Vec<WindowRecord>,
        groups: Vec<GroupWindowRecord>,
    ) {
        if !self.is_settled {
            return;
        }
        let now = Remembered { version: VERSION, machines, released, windows, groups };
        if self.written.as_ref() == Some(&now) {
            return;
        }
        let saved = match now.machines.is_empty() && now.released.is_empty() {
            true => std::fs::remove_file(&self.path).or_else(|e| match e.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(e),
            }),
            false => write(&self.path, &now),
        };
        match saved {
            Ok(()) => self.written = Some(now),
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "the next broker will not know the machines: they cannot be written down");
            }
        }
    }
}

/// The file of a window, if it has this size, a process behind one of these monitors or this process has it, and most of its places are free.
pub(super) fn find_again(trace: WindowTrace, size: u64, monitors: &[&str]) -> Option<(WindowFile, Vec<(u64, u64)>)> {
    if trace.size != size {
        return None;
    }
    let id = trace.id;
    let machines = monitors.iter().filter_map(|monitor| Machine::connect(monitor).ok()?.process().ok());
    // This process has what the service manager has kept.
    let file =
        std::iter::once(std::process::id()).chain(machines).find_map(|process| WindowFile::find_in(process, trace))?;
    let in_use: Vec<(u64, u64)> = book::noted(rustix::fd::AsFd::as_fd(&file))?
        .into_iter()
        .map(|part| (part.start, part.end - part.start))
        .collect();
    if in_use.iter().map(|(_, len)| len).sum::<u64>() > size / 2 {
        tracing::info!(%id, "a window of the last broker is not used again: programs of before may use most of it");
        return None;
    }
    Some((file, in_use))
}

fn read(path: &Path) -> io::Result<Remembered> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let facts = file.metadata()?;
    // It says which sockets this broker connects to.
    if !facts.is_file() || facts.uid() != rustix::process::geteuid().as_raw() || facts.mode() & 0o022 != 0 {
        return Err(io::Error::other("others than this user can write it"));
    }
    let mut text = String::new();
    file.take(MOST).read_to_string(&mut text)?;
    let remembered: Remembered = serde_json::from_str(&text)?;
    if remembered.version == VERSION { Ok(remembered) } else { Err(io::Error::other("it is of another version")) }
}

fn write(path: &Path, what: &Remembered) -> io::Result<()> {
    let fresh = beside(path, ".new");
    match std::fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file: File = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
    file.write_all(serde_json::to_string_pretty(what)?.as_bytes())?;
    std::fs::rename(&fresh, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn machine(name: &str) -> AttachmentRecord {
        let at = |what: &str| format!("/run/{name}.{what}");
        AttachmentRecord { name: name.into(), monitor: at("qmp"), port: at("port"), room: 8 << 20, migratable: false }
    }

    fn window(owner: Option<&str>, peer: Option<&str>) -> WindowRecord {
        let [owner, peer] = [owner, peer].map(|side| side.map(str::to_owned));
        WindowRecord { owner, peer, id: "00".repeat(16), inode: 7, size: 8 << 20 }
    }

    fn group() -> GroupWindowRecord {
        let members = vec![("a".to_owned(), true), ("web".to_owned(), false)];
        GroupWindowRecord { group: "pool".into(), members, member: 0, id: "00".repeat(16), inode: 7, size: 8 << 20 }
    }

    #[test]
    fn attachments_are_read_again_until_all_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("broker.sock");
        assert!(!is_there(&socket));
        AttachmentFile::open(&socket).save(
            (vec![machine("a")], Vec::new()),
            vec![window(Some("a"), None)],
            vec![group()],
        );
        assert_eq!(path_of(&socket).metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let mut file = AttachmentFile::open(&socket);
        assert_eq!(file.windows.len(), 1);
        assert_eq!(file.machines_left(), [machine("a")]);
        assert_eq!(remembered(&socket).groups, [group()]);
        file.save(Default::default(), Vec::new(), Vec::new());
        assert!(is_there(&socket), "the machine has not been looked for yet");
        file.attached(&machine("a"));
        assert_eq!(file.machines_left(), []);
        file.settle(&[]);
        file.save(Default::default(), Vec::new(), Vec::new());
        assert!(!is_there(&socket));
    }

    #[test]
    fn windows_of_another_machine_of_the_same_name_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("broker.sock");
        let windows = vec![window(Some("a"), None), window(Some("b"), Some("a")), window(Some("b"), None)];
        AttachmentFile::open(&socket).save((vec![machine("a"), machine("b")], Vec::new()), windows, Vec::new());
        let mut file = AttachmentFile::open(&socket);
        file.attached(&machine("a"));
        assert_eq!(file.windows.len(), 3);
        let mut file = AttachmentFile::open(&socket);
        file.attached(&AttachmentRecord { monitor: "/run/other.qmp".into(), ..machine("a") });
        assert_eq!(file.windows.keys().collect::<Vec<_>>(), [&(Some("b".to_owned()), None)]);
        // Windows of a machine that is in neither list.
        let migrating = socket.with_file_name("other.sock");
        AttachmentFile::open(&migrating).save(
            (vec![machine("b")], Vec::new()),
            vec![window(Some("a"), None), window(Some("b"), None)],
            Vec::new(),
        );
        let mut file = AttachmentFile::open(&migrating);
        file.attached(&machine("a"));
        assert_eq!(file.windows.keys().collect::<Vec<_>>(), [&(Some("b".to_owned()), None)]);
    }

    #[test]
    fn windows_of_released_machine_stay_behind_its_monitor() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("broker.sock");
        let windows = vec![window(Some("a"), None), window(None, Some("a"))];
        AttachmentFile::open(&socket).save((Vec::new(), vec![machine("a")]), windows.clone(), Vec::new());
        assert!(is_there(&socket), "no other machine is attached");
        let mut file = AttachmentFile::open(&socket);
        assert_eq!((file.machines_left(), file.released_left()), (Vec::new(), vec![machine("a")]));
        file.save(Default::default(), Vec::new(), Vec::new());
        assert!(is_there(&socket), "the machine has not been looked for yet");
        file.attached(&machine("a"));
        assert_eq!((file.released_left(), file.windows_left("a").len()), (Vec::new(), windows.len()));
        let mut file = AttachmentFile::open(&socket);
        file.attached(&AttachmentRecord { monitor: "/run/other.qmp".into(), ..machine("a") });
        assert_eq!(file.windows_left("a"), []);
    }

    #[test]
    fn file_that_others_can_write_or_that_makes_no_sense_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("broker.sock");
        let path = path_of(&socket);
        AttachmentFile::open(&socket).save((vec![machine("a")], Vec::new()), Vec::new(), Vec::new());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();
        assert_eq!(AttachmentFile::open(&socket).machines_left(), []);
        for text in ["", "nonsense", r#"{"version":2,"machines":[],"windows":[]}"#] {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            assert_eq!(AttachmentFile::open(&socket).machines_left(), [], "{text}");
        }
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        assert_eq!(AttachmentFile::open(&socket).machines_left(), []);
    }
}
