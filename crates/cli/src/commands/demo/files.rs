//! A directory of one domain, mounted in the other: a file is read there, and its checksum compared.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use partywall_terminal::{Show, table, typed};

use super::children::{DemoChild, check_interrupted, run};
use super::measure::{LONGEST, compare, median};
use super::payload::{CarriedFile, checksum};
use super::world::{DemoSide, World};
use crate::exit::{CommandFailure, Context};
use crate::{human, siblings};

/// The most that is read.
const MOST: u64 = 64 << 20;
const MOST_QUICK: u64 = 8 << 20;
const PIECE: usize = 1 << 20;

/// How the requests of a mount travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FilesTransport {
    Calls,
    Tcp,
}

/// Seconds of each read.
#[derive(Debug)]
pub(super) struct FilesTimes {
    size: u64,
    calls: Vec<f64>,
    tcp: Vec<f64>,
}

impl FilesTimes {
    /// `None`, having said why, if nothing can be mounted here.
    pub(super) fn run(
        world: &World,
        payload: &CarriedFile,
        rounds: u32,
        quick: bool,
        show: &Show,
    ) -> Result<Option<Self>, CommandFailure> {
        show.step("A directory of domain b, mounted in domain a");
        if let Some(reason) = why_not() {
            show.say(&format!("   left out: {reason}"));
            return Ok(None);
        }
        let shared = SharedFile::make(world, payload, if quick { MOST_QUICK } else { MOST })?;
        let mut all = Self { size: shared.size, calls: Vec::new(), tcp: Vec::new() };
        for round in 1..=rounds {
            show.show_commands(round == 1);
            show.busy(&format!("a file is read, round {round} of {rounds}"));
            all.calls.push(shared.read(world, FilesTransport::Calls, round, show)?);
            all.tcp.push(shared.read(world, FilesTransport::Tcp, round, show)?);
        }
        show.say(&format!(
            "   all {} reads of {} through the mounts have the SHA-256 sum of the exported file",
            2 * rounds,
            human::bytes(shared.size)
        ));
        Ok(Some(all))
    }

    pub(super) fn to_text(&self) -> String {
        let mut rows = table(&["file read through a mount", ">rate", ">seconds"]);
        let (ours, theirs) = (median(&self.calls), median(&self.tcp));
        for (name, seconds) in [("Partywall (by calls)", ours), ("the same over TCP loopback", theirs)] {
            rows.add_row([name.to_owned(), human::rate(self.size, seconds), format!("{seconds:.3}")]);
        }
        format!("{rows}\n{}", compare(theirs, ours, "as fast as", "TCP loopback"))
    }
}

fn why_not() -> Option<String> {
    if let Err(failure) = siblings::find("partywall-fs", "partywall-fs") {
        return Some(failure.to_string().replace("\n  ", "; "));
    }
    if !Path::new("/dev/fuse").exists() {
        return Some("there is no /dev/fuse (load the module `fuse`)".into());
    }
    let may_mount = rustix::process::geteuid().is_root() || run(Command::new("fusermount3").arg("-V")).is_ok();
    (!may_mount).then(|| "a mount needs root or fusermount3 (Debian: fuse3)".into())
}

/// The exported directory, with the beginning of the carried file in it.
struct SharedFile {
    folder: PathBuf,
    mountpoint: PathBuf,
    size: u64,
    sum: String,
}

impl SharedFile {
    fn make(world: &World, payload: &CarriedFile, most: u64) -> Result<Self, CommandFailure> {
        let [folder, mountpoint] = ["shared", "mounted"].map(|name| world.dir().join(name));
        for path in [&folder, &mountpoint] {
            DirBuilder::new().mode(0o755).create(path).context(format_args!("cannot make {}", path.display()))?;
        }
        let path = folder.join("file");
        let from = File::open(&payload.path).context("cannot read the file to carry")?;
        world.make_room_for(payload.size.min(most))?;
        let mut to = File::create_new(&path).context(format_args!("cannot make {}", path.display()))?;
        std::io::copy(&mut from.take(most), &mut to).context("cannot copy the file to carry")?;
        // A server of root treats a client of root as nobody, who may read what all may read.
        to.set_permissions(Permissions::from_mode(0o644)).context("cannot set the mode of the exported file")?;
        let (size, sum) = checksum(&path)?;
        Ok(Self { folder, mountpoint, size, sum })
    }

    /// Exports, mounts, reads, compares and unmounts. Returns the seconds that the read took.
    fn read(&self, world: &World, transport: FilesTransport, round: u32, show: &Show) -> Result<f64, CommandFailure> {
        let [folder, mountpoint] = [&self.folder, &self.mountpoint].map(|path| path.to_string_lossy());
        // A mount in a namespace of `ip netns exec` would be seen by that command alone.
        let partywall = |side, name, words: &[&str]| world.partywall_here(side, name, words);
        let export: &[&str] = match transport {
            FilesTransport::Calls => &["--as", "b:files"],
            FilesTransport::Tcp => &["--tcp", "127.0.0.1:0"],
        };
        let export = [&["fs", "export", &folder, "--read-only"], export].concat();
        let (_export, said) = ready(world, partywall(DemoSide::B, "export", &export)?, "export", show)?;
        let mount: &[&str] = match transport {
            FilesTransport::Calls => &["b:files"],
            FilesTransport::Tcp => &["--transport", "tcp", said.rsplit(' ').next().unwrap_or_default()],
        };
        let mount = [&["fs", "mount"], mount, &[&mountpoint]].concat();
        // The guard is there before the mount is.
        let _mounted = MountGuard(world, &self.mountpoint);
        let (mut mount, said) = ready(world, partywall(DemoSide::A, "mount", &mount)?, "mount", show)?;
        if round == 1 {
            show.say(&format!("   {said}"));
        }
        let file = self.mountpoint.join("file");
        let begun = Instant::now();
        let bytes = read(&file, self.size)?;
        let seconds = begun.elapsed().as_secs_f64();
        let (size, sum) = (bytes.len() as u64, super::payload::sum_of(&bytes));
        if (size, &sum) != (self.size, &self.sum) {
            return Err(CommandFailure::general(format!(
                "the file differs through the mount: {size} bytes, SHA-256 {sum}"
            )));
        }
        // A program that may not call `umount` itself would go on after SIGTERM.
        world.unmount(&self.mountpoint);
        mount.finish(LONGEST)?;
        Ok(seconds)
    }
}

/// Reads a file whole, and notices an interrupt between two pieces.
fn read(path: &Path, size: u64) -> Result<Vec<u8>, CommandFailure> {
    let context = || format!("cannot read {}", path.display());
    let mut file = File::open(path).context(context())?;
    // One byte more than expected, to see a file that has grown.
    let mut bytes = vec![0; size as usize + 1];
    let mut done = 0;
    loop {
        check_interrupted()?;
        let end = bytes.len().min(done + PIECE);
        match file.read(&mut bytes[done..end]).context(context())? {
            0 => break,
            n => done += n,
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

/// Starts a command that says a line when it is ready, and returns that line. The command is ended in order.
fn ready(world: &World, mut command: Command, log: &str, show: &Show) -> Result<(DemoChild, String), CommandFailure> {
    show.command("", &typed(&command));
    let mut child = DemoChild::start_orderly(command.stdout(Stdio::piped()))?;
    let mut line = String::new();
    let stdout = child.take_stdout().ok_or_else(|| CommandFailure::general("the command has no output"))?;
    BufReader::new(stdout).read_line(&mut line).context("cannot read from `partywall fs`")?;
    check_interrupted()?;
    match line.trim() {
        "" => Err(CommandFailure::general(format!("`{}` is not ready", typed(&command)))
            .hint(world.read_log(log).trim().to_owned())),
        line => Ok((child, line.to_owned())),
    }
}

/// Unmounts, if the mount is still there, whatever happened to the program that serves it.
struct MountGuard<'a>(&'a World, &'a Path);

impl Drop for MountGuard<'_> {
    fn drop(&mut self) {
        self.0.unmount(self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_returns_a_longer_file_as_longer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [7; 100]).unwrap();
        assert_eq!(read(&path, 100).unwrap(), [7; 100]);
        assert_eq!(read(&path, 99).unwrap().len(), 100);
        assert!(read(&dir.path().join("none"), 1).unwrap_err().to_string().contains("none"));
    }

    #[test]
    fn files_table_shows_rates_and_ratio() {
        let text = FilesTimes { size: 100_000_000, calls: vec![0.1], tcp: vec![0.05] }.to_text();
        for part in ["1.00 GB/s", "2.00 GB/s", "Partywall is 0.5 times as fast as TCP loopback"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
