//! Mounting and unmounting.
//!
//! Root mounts by `mount(2)` here and hands the device to `fuser`, whose own unmounting would also remove a mount that another user has
//! made at the same path meanwhile. Other users need `fusermount3`, which `fuser` runs.

use crate::filesystem::RemoteFilesystem;
use fuser::{Config, MountOption, Session, SessionACL};
use partywall_fs::FsError;
use partywall_fs::remote::Remote;
use partywall_fs::wire::LARGEST_DATA;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::CString;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// How an export is mounted.
#[derive(Debug, Clone)]
pub(crate) struct MountSettings {
    pub(crate) source: String,
    pub(crate) allow_other: bool,
    pub(crate) threads: usize,
}

/// Mounts an export and serves it until it is unmounted.
pub(crate) fn run(
    remote: Remote,
    mountpoint: &Path,
    settings: &MountSettings,
    mounted: impl FnOnce(),
) -> Result<(), FsError> {
    let mut signals =
        signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(FsError::system("catch signals"))?;
    let mountpoint = std::fs::canonicalize(mountpoint)
        .map_err(FsError::system(format!("find the directory {}", mountpoint.display())))?;
    check_empty(&mountpoint)?;
    let acl = if settings.allow_other { SessionACL::All } else { SessionACL::Owner };
    let mut config = Config::default();
    config.acl = acl;
    config.n_threads = Some(settings.threads);
    config.clone_fd = settings.threads > 1;
    let is_read_only = remote.is_read_only();
    let notifier = Arc::new(OnceLock::new());
    let filesystem = RemoteFilesystem::new(remote, Arc::clone(&notifier));
    let below = device_of(&mountpoint);
    let session = if rustix::process::geteuid().is_root() {
        let device = mount(&mountpoint, settings, is_read_only)?;
        Session::from_fd(filesystem, device, acl, config).inspect_err(|_| {
            let _ = rustix::mount::unmount(&mountpoint, UnmountFlags::DETACH);
        })
    } else {
        config.mount_options = vec![
            MountOption::FSName(settings.source.replace(',', "_")),
            MountOption::Subtype("partywall".into()),
            MountOption::NoDev,
            MountOption::NoSuid,
        ];
        config.mount_options.extend(is_read_only.then_some(MountOption::RO));
        config.mount_options.extend(settings.allow_other.then_some(MountOption::DefaultPermissions));
        Session::new(filesystem, &mountpoint, &config)
    };
    let session = session.map_err(FsError::system(format!("mount on {}", mountpoint.display())))?;
    let _ = notifier.set(session.notifier());
    let running = std::thread::Builder::new()
        .name("pw-fs-mount".into())
        .spawn(move || session.run())
        .map_err(FsError::system("start a thread"))?;
    // Something else may be mounted there by now, or nothing. A file system without a disk has the major number 0.
    let ours = device_of(&mountpoint).filter(|device| device.0 == 0 && Some(*device) != below);
    if let Some(device) = ours {
        read_ahead(device);
    }
    mounted();
    // The session ends when the file system is unmounted by whomever.
    let watcher = signals.handle();
    let ended = std::thread::spawn(move || {
        let end = running.join();
        watcher.close();
        end
    });
    let mut is_asked = false;
    for _ in signals.forever() {
        if is_asked {
            // The kernel ends the requests under way when the device is closed.
            std::process::exit(1);
        }
        is_asked = true;
        if ours.is_some()
            && device_of(&mountpoint) == ours
            && let Err(e) = detach(&mountpoint)
        {
            tracing::warn!(error = %e, "the mount stays; another signal ends this program and leaves it without a server");
        }
    }
    match ended.join() {
        Ok(Ok(Ok(()))) => Ok(()),
        // A thread was taking a request when the file system was unmounted. Its later reads, and those of other threads, say so (ENODEV).
        Ok(Ok(Err(e))) if e.kind() == std::io::ErrorKind::ConnectionAborted => Ok(()),
        Ok(Ok(Err(e))) => Err(FsError::system("serve the kernel's requests")(e)),
        _ => Err(FsError::Refused("the mount has ended by an internal fault".into())),
    }
}

/// Refuses a directory with files, which the mount would hide. A directory that cannot be read is left to the kernel.
fn check_empty(mountpoint: &Path) -> Result<(), FsError> {
    let has_entry = std::fs::read_dir(mountpoint).is_ok_and(|mut entries| entries.next().is_some());
    if has_entry && !is_mounted_by_us(mountpoint)? {
        let why = "is not empty, and a mount would hide its files; choose an empty directory";
        return Err(FsError::Refused(format!("{} {why}", mountpoint.display())));
    }
    Ok(())
}

/// The number of the file system at a path, from what the kernel knows without asking it.
fn device_of(path: &Path) -> Option<(u32, u32)> {
    let found = rustix::fs::statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()).ok()?;
    Some((found.stx_dev_major, found.stx_dev_minor))
}

/// Lets the kernel read ahead as much of a file as one request may carry. It offers 128 KiB by itself, and lets root change that.
fn read_ahead((major, minor): (u32, u32)) {
    let path = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    if let Err(e) = std::fs::write(&path, (LARGEST_DATA >> 10).to_string()) {
        tracing::debug!(error = %e, path, "the kernel reads ahead as little as it does by itself");
    }
}

/// Makes a mount, and returns the device that its requests come from.
fn mount(mountpoint: &Path, settings: &MountSettings, is_read_only: bool) -> Result<OwnedFd, FsError> {
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| FsError::System { call: "open /dev/fuse (load the module `fuse`)".into(), source: e.into() })?;
    let others = if settings.allow_other { ",allow_other,default_permissions" } else { "" };
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0{others}", device.as_raw_fd());
    let options = CString::new(options).map_err(|_| FsError::Refused("the options have a zero byte".into()))?;
    let mut flags = MountFlags::NODEV | MountFlags::NOSUID;
    flags.set(MountFlags::RDONLY, is_read_only);
    rustix::mount::mount(settings.source.as_str(), mountpoint, "fuse.partywall", flags, Some(&*options))
        .map_err(FsError::system(format!("mount on {}", mountpoint.display())))?;
    Ok(device)
}

/// Unmounts what this program has mounted at a path.
pub(crate) fn unmount(mountpoint: &Path) -> Result<(), FsError> {
    let path = std::path::absolute(mountpoint)
        .map_err(FsError::system(format!("find the directory {}", mountpoint.display())))?;
    if !is_mounted_by_us(&path)? {
        return Err(FsError::Refused(format!("{} is no mount of partywall", path.display())));
    }
    detach(&path)
}

/// Whether this program has mounted an export at a path. Without a server that answers, nothing but the kernel's own table can be asked.
fn is_mounted_by_us(path: &Path) -> Result<bool, FsError> {
    let table = std::fs::read_to_string("/proc/self/mounts").map_err(FsError::system("read the table of mounts"))?;
    Ok(table.lines().any(|line| {
        let mut fields = line.split(' ').skip(1);
        let at = fields.next().map(unescape);
        at.as_deref().is_some_and(|at| Path::new(at) == path) && fields.next() == Some("fuse.partywall")
    }))
}

/// Unmounts a path: by the kernel's call as root, and by `fusermount3` as another user.
fn detach(path: &Path) -> Result<(), FsError> {
    if rustix::process::geteuid().is_root() {
        return rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
            .map_err(FsError::system(format!("unmount {}", path.display())));
    }
    let status = std::process::Command::new("fusermount3")
        .args(["-u", "-z", "--"])
        .arg(path)
        .status()
        .map_err(FsError::system("run fusermount3"))?;
    if status.success() { Ok(()) } else { Err(FsError::Refused("fusermount3 has failed".into())) }
}

/// A path of the table of mounts, where spaces and the like are octal numbers.
fn unescape(field: &str) -> String {
    let mut path = String::new();
    let mut rest = field;
    while let Some((before, after)) = rest.split_once('\\') {
        path.push_str(before);
        let code = after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => path.push(char::from(code)),
            None => path.push('\\'),
        }
        rest = if code.is_some() { &after[3..] } else { after };
    }
    path.push_str(rest);
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octal_numbers_of_the_mount_table_are_read() {
        assert_eq!(unescape("/mnt/a\\040b\\134c"), "/mnt/a b\\c");
        assert_eq!(unescape("/mnt/plain\\"), "/mnt/plain\\");
    }
}
