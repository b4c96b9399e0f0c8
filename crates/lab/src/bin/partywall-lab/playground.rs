//! Machines to play with, at a place where `partywall-lab shell` finds them.

use partywall_lab::{GuestOptions, Playground, PlaygroundOptions};
use std::error::Error;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Emulated on a busy machine, a window is seen late.
const READY: Duration = Duration::from_secs(60);

/// Where the sockets of this user's machines are.
pub(crate) fn folder() -> PathBuf {
    std::env::temp_dir().join(format!("partywall-playground-{}", rustix::process::getuid().as_raw()))
}

/// The folder, gone with this program. There is one for each user.
pub(crate) struct Folder {
    path: PathBuf,
    /// Shows that a program uses the folder.
    _alive: UnixListener,
}

impl Folder {
    /// Fails while machines of this user are up.
    pub(crate) fn new() -> Result<Self, Box<dyn Error>> {
        let path = folder();
        let alive = path.join("up");
        if UnixStream::connect(&alive).is_ok() {
            return Err("machines are up already; end that `partywall-lab up` or `partywall-lab nas up` first".into());
        }
        // The folder of a program that was killed.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { _alive: UnixListener::bind(alive)?, path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Boots them, and stays until it is ended.
pub(crate) fn up(names: &[String], window_mib: u64) -> Result<(), Box<dyn Error>> {
    let folder = Folder::new()?;
    let stop = super::stop::on_signals()?;

    let mut options = PlaygroundOptions::new("playground").folder(folder.path()).window_mib(window_mib);
    for name in names {
        options = options.guest(GuestOptions::new(name).console(&folder.path().join(name)));
    }
    // The bench is useful in the guests, but optional.
    let bench = std::env::current_exe()?.with_file_name("partywall-bench");
    if bench.exists() {
        options = options.program(bench, "partywall-bench");
    }
    let playground = Playground::boot(options, &mut |said| println!("{said}"))?;
    for guest in playground.guests() {
        println!("{}", playground.attach(guest)?.said);
    }
    playground.wait_ready(READY)?;
    explain(names, &playground.socket());
    stop.wait();
    println!("ending them");
    Ok(())
}

fn explain(names: &[String], socket: &Path) {
    for name in names {
        println!("{name}: a shell: partywall-lab shell {name}");
    }
    if let [first, second, ..] = names {
        println!("try, in {first}:  partywall --domain {first} cat -l hello");
        println!("and in {second}:  echo hello | partywall --domain {second} cat {first}:hello");
    }
    println!("and here: export PARTYWALL_BROKER={}; partywall vm list", socket.display());
    println!("Ctrl-C ends them.");
}
