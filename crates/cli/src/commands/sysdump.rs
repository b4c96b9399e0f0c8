//! `partywall sysdump`: what a report of a bug needs, in one file.
//!
//! It holds what Partywall's own commands report, and facts about the machine. It never holds what connections carry, nor arguments and environments of
//! programs, which often have passwords in them.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use partywall_terminal::printable;

use crate::args::Global;
use crate::exit::{CommandFailure, Context};
use crate::{output, session};

const AFTER: &str = "\
The file has: versions, `doctor`, `list`, `stat`, `top`, `moves` and `vm list` as JSON, the broker's policy file and the last lines of its log, limits, memory and \
kernel of this machine, and the list of programs that have loaded the library. It also has names of domains and services, users, addresses and ports. \
It has no payload of connections, and no arguments or environments of programs.

Run it as root to see the connections of all users. Read it before you send it: tar tf, tar xf.

Examples:
  partywall sysdump
  partywall sysdump --output /tmp/report.tar";

/// Collect the data for a bug report into one file, without payload of connections
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// File to write, which must not exist [default: partywall-sysdump-TIME.tar in this folder]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Longest time that one command may take: a broker that hangs is what many reports are about.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of one entry.
const MOST: u64 = 4 << 20;

/// The reports of our own commands: the name of the entry, and the arguments.
const OURS: [(&str, &[&str]); 7] = [
    ("version.txt", &["--version"]),
    ("doctor.json", &["doctor", "--json"]),
    ("list.json", &["list", "--json"]),
    ("stat.json", &["stat", "--json"]),
    ("top.json", &["top", "--once", "--json"]),
    ("moves.json", &["moves", "--json"]),
    ("vm.json", &["vm", "list", "--json"]),
];

/// The reports of other programs. If a program is missing, its entry contains that error.
const OTHERS: [(&str, &[&str]); 4] = [
    ("broker-version.txt", &["partywalld", "--version"]),
    ("broker-policy-check.txt", &["partywalld", "--check-policy"]),
    ("broker-unit.txt", &["systemctl", "--no-pager", "status", "--lines=0", "partywalld.service"]),
    (
        "broker-log.txt",
        &[
            "journalctl",
            "--no-pager",
            "--unit=partywalld",
            "--unit=partywall-agent",
            "--lines=2000",
            "--output=short-iso",
        ],
    ),
];

/// Files as they are.
const FILES: [&str; 14] = [
    "/etc/os-release",
    "/etc/partywall/partywalld.toml",
    "/etc/cdi/partywall.json",
    "/proc/version",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/sys/fs/file-nr",
    "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/sys/net/core/somaxconn",
    "/proc/sys/vm/overcommit_memory",
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "/sys/kernel/security/lsm",
    "/proc/self/limits",
];

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let path = args.output.clone().unwrap_or_else(|| format!("partywall-sysdump-{seconds}.tar").into());
    let failed = || format!("cannot write {}", path.display());
    // For its owner alone: it shows which programs are connected.
    let file = File::options().write(true).create_new(true).mode(0o600).open(&path).context(failed())?;
    let mut dump = Dump { tar: tar::Builder::new(file), seconds };
    let own = std::env::current_exe().context("cannot tell where this program is")?;
    let broker = session::broker_path(global);
    for (name, arguments) in OURS {
        dump.add(name, &report(Command::new(&own).args(arguments).arg("--broker").arg(&broker))).context(failed())?;
    }
    for (name, command) in OTHERS {
        let [program, arguments @ ..] = command else { continue };
        dump.add(name, &report(Command::new(program).args(arguments))).context(failed())?;
    }
    for file in FILES {
        dump.add(&format!("files{file}"), &read(Path::new(file))).context(failed())?;
    }
    dump.add("programs.txt", programs().as_bytes()).context(failed())?;
    let mut file = dump.tar.into_inner().context(failed())?;
    file.flush().context(failed())?;
    output::print(format_args!(
        "wrote {}: look through it before you send it; names, users and addresses are in it, what connections carry is not",
        path.display()
    ))
}

struct Dump {
    tar: tar::Builder<File>,
    seconds: u64,
}

impl Dump {
    fn add(&mut self, name: &str, bytes: &[u8]) -> std::io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.seconds);
        self.tar.append_data(&mut header, format!("partywall-sysdump/{name}"), bytes)
    }
}

/// Both outputs of a command and its exit status, or the reason why it could not be run.
fn report(command: &mut Command) -> Vec<u8> {
    let ended = outputs(command);
    ended.unwrap_or_else(|error| format!("cannot run {}: {error}\n", command.get_program().display()).into_bytes())
}

fn outputs(command: &mut Command) -> std::io::Result<Vec<u8>> {
    // A file, not a pipe: it needs no reader while the command runs, and processes that the command leaves behind cannot block it.
    let mut both = tempfile::tempfile()?;
    let mut child = command.stdin(Stdio::null()).stdout(both.try_clone()?).stderr(both.try_clone()?).spawn()?;
    let deadline = Instant::now() + PATIENCE;
    let ended = loop {
        match child.try_wait()? {
            Some(status) => break status.to_string(),
            None if Instant::now() > deadline => {
                child.kill()?;
                child.wait()?;
                break format!("no end within {} s", PATIENCE.as_secs());
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    std::io::Seek::rewind(&mut both)?;
    let mut text = Vec::new();
    both.take(MOST).read_to_end(&mut text)?;
    // JSON that is good stays JSON.
    if ended != "exit status: 0" {
        text.extend_from_slice(format!("\n{ended}\n").as_bytes());
    }
    Ok(text)
}

fn read(path: &Path) -> Vec<u8> {
    let mut text = Vec::new();
    match File::open(path).and_then(|file| file.take(MOST).read_to_end(&mut text)) {
        Ok(_) => text,
        Err(error) => format!("cannot read it: {error}\n").into_bytes(),
    }
}

/// The programs that have loaded the library: process, user, name, and the file of the library. No arguments.
fn programs() -> String {
    let mut lines = vec!["PROCESS USER NAME LIBRARY".to_owned()];
    for process in procfs::process::all_processes().into_iter().flatten().flatten() {
        let (Ok(status), Ok(maps)) = (process.status(), process.maps()) else { continue };
        let library = maps.into_iter().find_map(|map| match map.pathname {
            procfs::process::MMapPath::Path(path) => {
                let path = path.display().to_string();
                path.contains("libpartywall").then_some(path)
            }
            _ => None,
        });
        lines.extend(library.map(|library| line(process.pid, status.euid, &status.name, &library)));
    }
    lines.push(String::new());
    lines.join("\n")
}

/// A program and its user choose both names.
fn line(pid: i32, user: u32, name: &str, library: &str) -> String {
    format!("{pid} {user} {} {}", printable(name), printable(library))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_users_choose_stay_on_their_line() {
        let line = line(7, 33, "a\n1 0 x", "/tmp/\u{1b}[2J/libpartywall.so");
        assert_eq!(line, "7 33 a\\n1 0 x /tmp/\\u{1b}[2J/libpartywall.so");
    }

    #[test]
    fn failed_and_missing_commands_say_so_in_their_entries() {
        let text = |command: &mut Command| String::from_utf8(report(command)).unwrap();
        assert_eq!(text(Command::new("sh").args(["-c", "echo out; echo err >&2"])), "out\nerr\n");
        assert_eq!(text(Command::new("sh").args(["-c", "echo {; exit 3"])), "{\n\nexit status: 3\n");
        assert!(text(&mut Command::new("no-such-program-of-partywall")).starts_with("cannot run no-such-program"));
    }

    #[test]
    fn long_output_is_cut() {
        let long = report(Command::new("sh").args(["-c", "head -c 5000000 /dev/zero"]));
        assert_eq!(long.len() as u64, MOST);
    }
}
