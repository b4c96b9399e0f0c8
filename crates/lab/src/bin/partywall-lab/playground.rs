//! Machines with a window from each to each other.

use partywall_lab::{Guest, GuestOptions, ImageOptions, Lab};
use partywall_region::pmem::{WindowFile, WindowSpec};
use partywall_vm::{Machine, Role, Window};
use std::error::Error;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

/// Programs of ours that go along where they have been built.
const PROGRAMS: &[&str] = &["partywall", "partywalld", "partywall-bench"];

/// Where the shells of this user's machines are.
pub(crate) fn folder() -> PathBuf {
    std::env::temp_dir().join(format!("partywall-playground-{}", rustix::process::getuid().as_raw()))
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
    let program = std::env::current_exe()?;
    for name in PROGRAMS {
        let path = program.with_file_name(name);
        if path.exists() {
            options = options.program(path, name);
        }
    }
    let lab = Lab::new("playground", &options)?;
    println!("{}, kernel {}", lab.accel(), lab.image().version);
    let mut guests: Vec<Guest> = Vec::new();
    for name in names {
        let guest = lab.boot(GuestOptions::new(name).console(&folder.join(name)))?;
        println!("{name}: up in {:.1} s; a shell: partywall-lab shell {name}", guest.booted_in().as_secs_f64());
        guests.push(guest);
    }
    let mut windows = Vec::new();
    for owner in &guests {
        for peer in guests.iter().filter(|peer| peer.name() != owner.name()) {
            let spec = WindowSpec { room: window << 20, owner: owner.name().to_owned(), peer: peer.name().to_owned() };
            let file = WindowFile::create(&spec)?;
            for (guest, role) in [(owner, Role::Owner), (peer, Role::Peer)] {
                let plugged = Machine::connect(guest.monitor())?.plug(&Window::of(&file), role)?;
                println!(
                    "{}: window {} -> {} of {window} MiB as {role}, in {:.1} ms",
                    guest.name(),
                    spec.owner,
                    spec.peer,
                    plugged.took.unwrap_or_default().as_secs_f64() * 1e3
                );
            }
            windows.push(file);
        }
    }
    println!("Ctrl-C ends them.");
    loop {
        std::thread::park();
    }
}
