//! Machines that are attached to a broker of their own.

use partywall_lab::{Guest, GuestOptions, ImageOptions, Lab};
use partywall_region::relay::PORT;
use std::error::Error;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Programs of ours that go along.
const INSIDE: &[(&str, bool)] = &[("partywall", true), ("partywall-agent", true), ("partywall-bench", false)];

/// Where the sockets of this user's machines are.
pub(crate) fn folder() -> PathBuf {
    std::env::temp_dir().join(format!("partywall-playground-{}", rustix::process::getuid().as_raw()))
}

/// The broker, which ends with this program.
struct Broker(Child);

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots them, and stays until it is ended.
pub(crate) fn up(names: &[String], window: u64) -> Result<(), Box<dyn Error>> {
    let folder = folder();
    if std::os::unix::net::UnixStream::connect(folder.join("up")).is_ok() {
        return Err("machines are up already; end that `partywall-lab up` first".into());
    }
    // What an interrupted one has left.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
    let _alive = std::os::unix::net::UnixListener::bind(folder.join("up"))?;

    let mut options = ImageOptions::default();
    for (name, needed) in INSIDE {
        match beside(name) {
            Ok(path) => options = options.program(path, name),
            Err(e) if *needed => return Err(e),
            Err(_) => {}
        }
    }
    let socket = folder.join("broker.sock");
    let _broker = start_broker(&socket)?;
    let lab = Lab::new("playground", &options)?;
    println!("{}, kernel {}", lab.accel(), lab.image().version);
    let mut guests: Vec<Guest> = Vec::new();
    for name in names {
        let port = folder.join(format!("{name}.port"));
        let guest = lab.boot(GuestOptions::new(name).console(&folder.join(name)).serves_port(PORT, &port))?;
        guest.shell("partywall-agent > /tmp/agent.log 2>&1 &")?;
        println!("{name}: up in {:.1} s; a shell: partywall-lab shell {name}", guest.booted_in().as_secs_f64());
        let attached = Command::new(beside("partywall")?)
            .arg("--broker")
            .arg(&socket)
            .args(["vm", "attach", name, "--window", &format!("{window}M"), "--qmp"])
            .arg(guest.monitor())
            .arg("--port")
            .arg(&port)
            .status()?;
        if !attached.success() {
            return Err(format!("{name} cannot be attached").into());
        }
        guests.push(guest);
    }
    if let [first, second, ..] = names {
        println!("try, in {first}:  partywall --domain {first} cat -l hello");
        println!("and in {second}:  echo hello | partywall --domain {second} cat {first}:hello");
    }
    println!("and here: export PARTYWALL_BROKER={}; partywall vm list", socket.display());
    println!("Ctrl-C ends them.");
    loop {
        std::thread::park();
    }
}

fn start_broker(socket: &Path) -> Result<Broker, Box<dyn Error>> {
    // It ends also when this program is killed.
    let child = Command::new("setpriv")
        .args(["--pdeathsig", "TERM", "--"])
        .arg(beside("partywalld")?)
        .args(["--log", "warn", "--socket"])
        .arg(socket)
        .stdin(Stdio::null())
        .spawn()?;
    let broker = Broker(child);
    for _ in 0..500 {
        if socket.exists() {
            return Ok(broker);
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    Err("the broker does not start".into())
}

fn beside(name: &str) -> Result<PathBuf, Box<dyn Error>> {
    let path = std::env::current_exe()?.with_file_name(name);
    if path.exists() {
        return Ok(path);
    }
    Err(format!("{} is missing; `make lab` builds it", path.display()).into())
}
