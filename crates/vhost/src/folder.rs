//! Folders for the sockets of switches and of disks.

use std::path::{Path, PathBuf};

/// The folder of all switches, in that of this user or of root.
pub(crate) const SWITCHES: &str = "net";
/// The folder of all back ends of disks.
pub(crate) const DISKS: &str = "blk";

/// The folder of root for sockets of one kind, which is [`SWITCHES`] or [`DISKS`].
pub(crate) fn of_root(kind: &str) -> PathBuf {
    within(Path::new("/run"), kind)
}

/// The folder of this user for sockets of one kind. `None` if the user has no folder for such files (`XDG_RUNTIME_DIR`).
pub(crate) fn of_user(kind: &str) -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(of_root(kind));
    }
    Some(within(Path::new(&std::env::var_os("XDG_RUNTIME_DIR")?), kind))
}

fn within(all: &Path, kind: &str) -> PathBuf {
    all.join("partywall").join(kind)
}
