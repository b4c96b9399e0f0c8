//! Removing the devices of windows from this machine's kernel.
//!
//! Removing a device takes its memory away from every process that still maps it: a store or a load there is then a bus error. So no device
//! is removed while a process maps a ring. A directory is another matter: a program looks at the word of revocation before it looks at the
//! directory, so a program that sleeps in the kernel may keep its mapping.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use partywall_protocol::directory;
use rustix::io::Errno;

/// Has the kernel look for PCI devices.
const RESCAN: &str = "/sys/bus/pci/rescan";

/// The device of a window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemovableDevice {
    /// As `dax0.0`.
    pub(crate) name: String,
    /// The folder of its PCI device in sysfs.
    pub(crate) folder: PathBuf,
}

impl RemovableDevice {
    /// Has the kernel forget it.
    pub(crate) fn remove(&self) -> Result<(), String> {
        let file = self.folder.join("remove");
        fs::write(&file, "1").map_err(|e| format!("cannot remove {} by {}: {e}", self.name, file.display()))?;
        tracing::info!(device = self.name, "the window was removed");
        Ok(())
    }
}

/// Has the kernel find the devices again that were removed.
pub(crate) fn rescan() -> io::Result<()> {
    fs::write(RESCAN, "1")
}

/// The node of a device, as `maps` shows it whatever path leads to it: an agent in a separate mount namespace has passed descriptors on
/// whose path is not below `/dev` any more once that agent has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DeviceNode {
    /// The device number of the file system with the node: major and minor number, in hexadecimal digits.
    device: String,
    inode: u64,
}

impl DeviceNode {
    fn of(name: &str) -> io::Result<Self> {
        let facts = fs::metadata(Path::new("/dev").join(name))?;
        let device = facts.dev();
        Ok(Self {
            device: format!("{:02x}:{:02x}", rustix::fs::major(device), rustix::fs::minor(device)),
            inode: facts.ino(),
        })
    }
}

/// The processes that map these devices and may look there, in words. `word` is the file of the word of revocation.
///
/// # Errors
/// The agent may not see the mappings of a process.
pub(crate) fn holders(devices: &[RemovableDevice], word: u64) -> io::Result<Vec<String>> {
    let nodes: Vec<DeviceNode> =
        devices.iter().map(|device| DeviceNode::of(&device.name)).collect::<io::Result<_>>()?;
    holders_in(Path::new("/proc"), &nodes, word)
}

fn holders_in(proc: &Path, devices: &[DeviceNode], word: u64) -> io::Result<Vec<String>> {
    let mut held = Vec::new();
    let own = std::process::id();
    for entry in fs::read_dir(proc)? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // The names of files may be any bytes. They do not matter here.
        let maps = match fs::read(entry.path().join("maps")) {
            Ok(maps) => String::from_utf8_lossy(&maps).into_owned(),
            // A process of the kernel has no mappings.
            Err(e) if has_ended(&e) => continue,
            Err(e) => return Err(e),
        };
        let used: BTreeSet<MappingUse> = maps.lines().filter_map(|line| mapping(line, devices, word)).collect();
        let is_reported = || used.contains(&MappingUse::Word) && (pid == own || !runs(&entry.path()));
        let holds = used.contains(&MappingUse::Region) || used.contains(&MappingUse::Directory) && !is_reported();
        if holds {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            held.push(format!("process {pid} ({})", name.trim()));
        }
    }
    Ok(held)
}

/// Whether a file of a process or a thread cannot be read because that has ended.
fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// The use of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum MappingUse {
    /// The word of revocation, by which it knows that its directory is void.
    Word,
    /// The directory.
    Directory,
    /// A region of a connection or a channel.
    Region,
}

/// The use of a mapping, from a line of `maps`, if it is one of these devices or the word.
fn mapping(line: &str, devices: &[DeviceNode], word: u64) -> Option<MappingUse> {
    let mut words = line.split_ascii_whitespace();
    let (range, rights) = (words.next()?, words.next()?);
    // Behind the offset.
    let (device, inode, path) = (words.nth(1)?, words.next()?.parse::<u64>().ok()?, words.next()?);
    if path.starts_with("/memfd:") {
        return (word != 0 && inode == word).then_some(MappingUse::Word);
    }
    // A mapping of a device that was removed before is void. The device may have come back under the same name, with another inode.
    if !devices.iter().any(|node| node.device == device && node.inode == inode) {
        return None;
    }
    let (from, to) = range.split_once('-')?;
    let at = |text: &str| u64::from_str_radix(text, 16).unwrap_or(0);
    let size = at(to).saturating_sub(at(from));
    let is_directory = rights.starts_with("r--") && size == directory::SIZE.next_multiple_of(4096);
    Some(if is_directory { MappingUse::Directory } else { MappingUse::Region })
}

/// Whether a thread of this process may be anywhere but asleep in the kernel.
fn runs(process: &Path) -> bool {
    let threads = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    threads.map(|thread| fs::read(thread.path().join("stat"))).any(|stat| match stat {
        Ok(stat) => {
            // Behind the name, which is in brackets and may contain any bytes.
            let behind = stat.iter().rposition(|&byte| byte == b')').and_then(|end| stat.get(end + 2));
            !matches!(behind, Some(b'S' | b'T' | b't' | b'Z' | b'X'))
        }
        Err(error) => !has_ended(&error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(proc: &Path, pid: u32, maps: impl AsRef<[u8]>, states: &[char]) {
        let folder = proc.join(pid.to_string());
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("maps"), maps).unwrap();
        fs::write(folder.join("comm"), "web\n").unwrap();
        for (thread, state) in states.iter().enumerate() {
            let task = folder.join("task").join(thread.to_string());
            fs::create_dir_all(&task).unwrap();
            let stat = [b"7 (a ) R \xff) ".as_slice(), &[*state as u8], b" 1 1"].concat();
            fs::write(task.join("stat"), stat).unwrap();
        }
    }

    fn line(size: u64, rights: &str, inode: u64) -> String {
        format!("7f0000000000-{:x} {rights} 00200000 00:06 {inode}      /dev/dax\n", 0x7f00_0000_0000 + size)
    }

    fn node(inode: u64) -> DeviceNode {
        DeviceNode { device: "00:06".into(), inode }
    }

    const WORD: u64 = 88;

    #[test]
    fn ring_is_held_while_mapped_and_directory_while_process_runs() {
        let proc = tempfile::tempdir().unwrap();
        let directory = line(directory::SIZE.next_multiple_of(4096), "r--s", 500);
        let word = "7e0000000000-7e0000001000 r--s 00000000 00:01 88 /memfd:partywall (deleted)\n";
        let ring = line(4096 + 65536, "r--s", 501);
        process(proc.path(), 10, format!("{directory}{word}"), &['S', 'S']);
        process(proc.path(), 11, format!("{directory}{word}"), &['S', 'R']);
        process(proc.path(), 12, format!("{directory}{word}{ring}"), &['S']);
        process(proc.path(), 13, line(8192, "rw-s", 507), &['R']);
        process(proc.path(), 14, "", &['R']);
        process(proc.path(), 16, b"7f00-7f01 rw-s 00000000 00:01 5 /tmp/\xff\n", &['R']);
        process(proc.path(), 15, format!("{directory}{}", word.replace(" 88 ", " 87 ")), &['S']);
        fs::create_dir(proc.path().join("sys")).unwrap();
        let mut held = holders_in(proc.path(), &[node(500), node(501)], WORD).unwrap();
        held.sort();
        assert_eq!(
            held,
            ["process 11 (web)", "process 12 (web)", "process 15 (web)"],
            "10 sleeps and has the word, 13 maps a device of somebody else's, 15 has the word of an earlier agent"
        );
    }

    #[test]
    fn directory_that_can_be_written_counts_as_region() {
        let size = directory::SIZE.next_multiple_of(4096);
        let found = |line: &str| mapping(line, &[node(500)], WORD);
        assert_eq!(found(&line(size, "r--s", 500)), Some(MappingUse::Directory));
        assert_eq!(found(&line(size, "rw-s", 500)), Some(MappingUse::Region));
        assert_eq!(found(&line(size + 4096, "r--s", 500)), Some(MappingUse::Region));
        assert_eq!(found(&line(size, "r--s", 499)), None, "the device was removed and has come back");
        assert_eq!(
            found(&line(size, "r--s", 500).replace("/dev/dax", "/dax0.0")),
            Some(MappingUse::Directory),
            "the mount namespace of the agent that opened it has gone"
        );
        assert_eq!(found(&line(size, "r--s", 500).replace("00:06", "00:07")), None, "another file system");
        assert_eq!(found("7f00-7f01 r--p 0 00:00 0"), None);
    }
}
