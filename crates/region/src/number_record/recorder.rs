//! Has the kernel record, and stops it. This takes `CAP_BPF` and `CAP_NET_ADMIN`, and a file system of type `bpf` for what goes on without a process.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use super::{LINK, MAP, NumberRecord, bpf, program};

/// The names of map and program, which `bpftool` shows.
const NAME: [u8; 16] = *b"partywall_first\0";
/// `BPF_FS_MAGIC` and `CGROUP2_SUPER_MAGIC`.
const BPF_FILE_SYSTEM: u64 = 0xcafe_4a11;
const CGROUP2: u64 = 0x6367_7270;
/// Where systemd has the root of the second version of cgroups, alone or beside the first version.
const CGROUP_ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Begins to record the numbers of all TCP connections that are established by processes below the root of cgroups. Recording goes on until the record
/// is dropped, if it is not kept ([`keep`]).
///
/// # Errors
/// Without the capabilities, `PermissionDenied`; without the second version of cgroups, `Unsupported`.
pub fn record() -> io::Result<NumberRecord> {
    // Before Linux 5.11, maps and programs count as locked memory. Where the limit cannot be raised, it may suffice.
    let unlimited = rustix::process::Rlimit { current: None, maximum: None };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Memlock, unlimited);
    let cgroup = CGROUP_ROOTS.iter().find_map(|root| cgroup_root(Path::new(root)).transpose()).ok_or_else(|| {
        let nowhere = format!("no cgroup2 file system is mounted at {}", CGROUP_ROOTS.join(" or "));
        io::Error::new(io::ErrorKind::Unsupported, nowhere)
    })??;
    let map = bpf::make_socket_map(NAME)?;
    let program = bpf::load_program(NAME, &program::recording_into(map.as_raw_fd()))?;
    let link = bpf::attach(program.as_fd(), cgroup.as_fd())?;
    Ok(NumberRecord { map, link })
}

/// The directory if a file system of the second version of cgroups is there.
fn cgroup_root(at: &Path) -> io::Result<Option<OwnedFd>> {
    let root = match File::open(at) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    Ok((rustix::fs::fstatfs(&root)?.f_type.cast_unsigned() == CGROUP2).then(|| root.into()))
}

/// Keeps a record at a directory, which is made for it, until [`forget`]. Only the user who does this may read it.
///
/// # Errors
/// `AlreadyExists` if a record is there; `Unsupported` if the directory is in another file system than one of type `bpf`.
pub fn keep(record: &NumberRecord, at: &Path) -> io::Result<()> {
    let above = match at.parent() {
        Some(above) if above != Path::new("") => above,
        Some(_) => Path::new("."),
        None => Path::new("/"),
    };
    if rustix::fs::statfs(above)?.f_type.cast_unsigned() != BPF_FILE_SYSTEM {
        let mount = format!("{} is no file system of type bpf (`mount -t bpf -o mode=0700 bpf {0}`)", above.display());
        return Err(io::Error::new(io::ErrorKind::Unsupported, mount));
    }
    DirBuilder::new().mode(0o700).create(at)?;
    // The map last: where it is, the link is.
    let kept = bpf::pin(record.link.as_fd(), &at.join(LINK)).and_then(|()| bpf::pin(record.map.as_fd(), &at.join(MAP)));
    kept.inspect_err(|_| drop(forget(at)))
}

/// Removes a kept record. Processes that have opened it go on with it, and the kernel records until they end.
///
/// # Errors
/// `NotFound` if there is no record.
pub fn forget(at: &Path) -> io::Result<()> {
    for name in [MAP, LINK] {
        match std::fs::remove_file(at.join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    std::fs::remove_dir(at)
}
