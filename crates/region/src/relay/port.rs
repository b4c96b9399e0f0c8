//! The serial port of a guest, found by its name: its number follows the order in which ports were plugged in.

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The name of the port that a host gives to a guest for Partywall.
pub const PORT: &str = "org.partywall.0";

/// Where the kernel lists them.
const PORTS: &str = "/sys/class/virtio-ports";

/// The device of the port called `name`.
pub fn find_port(name: &str) -> io::Result<PathBuf> {
    let ports = fs::read_dir(PORTS).into_iter().flatten().flatten();
    for port in ports {
        if fs::read_to_string(port.path().join("name")).is_ok_and(|text| text.trim() == name) {
            return Ok(Path::new("/dev").join(port.file_name()));
        }
    }
    let advice = if Path::new(PORTS).exists() {
        format!("; start QEMU with -device virtserialport,chardev=ID,name={name}")
    } else {
        "; this kernel knows no such ports: modprobe virtio_console".to_owned()
    };
    Err(io::Error::new(io::ErrorKind::NotFound, format!("this machine has no serial port called {name}{advice}")))
}

/// Opens it. The kernel lets one process have it at a time.
pub fn open_port(name: &str) -> io::Result<OwnedFd> {
    let path = find_port(name)?;
    rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|e| match e {
        rustix::io::Errno::BUSY => io::Error::new(
            io::ErrorKind::ResourceBusy,
            format!("{} is in use: is another agent running?", path.display()),
        ),
        e => io::Error::new(io::Error::from(e).kind(), format!("cannot open {}: {e}", path.display())),
    })
}
